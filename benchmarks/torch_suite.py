"""PyTorch's own tests of optimizers, with the lifted classes in place of torch's.

    python benchmarks/torch_suite.py pytorch/test    # a checkout of PyTorch near the installed version
    python benchmarks/torch_suite.py pytorch/test --optimizer Adam --plain

The wheel does not contain `test_optim.py`, only the database that drives it. The classes are exchanged there,
and pytest runs the file. `--plain` keeps torch's own classes, to see what passes on this machine without
ghor.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest
from torch.testing._internal.common_optimizers import optim_db

import ghor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with test_optim.py in it")
    parser.add_argument(
        "--optimizer", action="append", choices=ghor.optim.__all__, help="may be repeated; default: all"
    )
    parser.add_argument("--plain", action="store_true", help="torch's own classes")
    args = parser.parse_args()
    if not (args.folder / "test_optim.py").is_file():
        sys.exit(
            f"there is no test_optim.py in {args.folder}: give the folder `test` of a checkout of PyTorch"
        )
    for info in [] if args.plain else optim_db:
        info.optim_cls = getattr(ghor.optim, info.optim_cls.__name__, info.optim_cls)
    names = " or ".join(f"_{name}_" for name in args.optimizer or ghor.optim.__all__)
    os.chdir(args.folder)
    sys.path.insert(0, ".")
    sys.exit(
        pytest.main(["-p", "no:cacheprovider", "-W", "ignore", "--tb=short", "test_optim.py", "-k", names])
    )


if __name__ == "__main__":
    main()
