"""Parallel transport on the sphere S^2 = St(1, 3): the figure of the paper's appendix "Parallel Transport".

v1 is the final velocity, v2 the cache of an optimizer. The geodesic of v1 is followed for a number of steps
eta. v2 is transported along it with the canonical connection of the second kind, under which its coordinates
in g^hor stay the same. `ghor_lab.sphere` draws it; every report of `ghor report` contains it too.
"""

import argparse
import sys
from pathlib import Path

try:
    from ghor_lab.files import store
    from ghor_lab.sphere import transport
except ImportError as error:
    sys.exit(f"this figure needs {error.name}: in a clone of ghor, pip install . ./lab")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("out/parallel_transport.svg"), help="default: %(default)s"
    )
    args = parser.parse_args()
    store(transport().svg.encode(), args.out)
    print(f"picture: {args.out.resolve()}")


if __name__ == "__main__":
    main()
