"""Draw the pictures of the documentation: `python examples/pictures.py [names] [--out docs/pictures]`.

`make pictures` runs it, and docs/build/solving.py for the page "Solving problems".
"""

import argparse
import importlib
import time
from pathlib import Path

import matplotlib

NAMES = (
    "hyperbolic_tree",
    "needle_field",
    "overview",
    "pose_graph",
    "rotation_mean",
    "spd_regression",
    "unitary_rnn",
    "wave_reduction",
)

FILES = {name: f"{name}.svg" for name in ("spd_regression", "unitary_rnn")} | {
    "overview": "overview-drift.svg"
}

COLORS = ["#3f51b5", "#e08214", "#2e7d5b", "#8a8a8a"]  # the first is ghor's, on every page
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "ghor", "axes.prop_cycle": matplotlib.cycler(color=COLORS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "pictures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names or NAMES:
        begun = time.perf_counter()
        path = args.out / FILES.get(name, f"{name}.png")
        with matplotlib.rc_context(STYLE):
            figure = importlib.import_module(name).run()
            figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
        print(f"{path}, {path.stat().st_size / 1000:.0f} kB, {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
