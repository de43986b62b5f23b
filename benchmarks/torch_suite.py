"""PyTorch's own tests of optimizers and of schedulers, with the lifted classes in place of torch's.

    python benchmarks/torch_suite.py pytorch/test    # a checkout of PyTorch near the installed version
    python benchmarks/torch_suite.py pytorch/test --plain -k "_Adam_ or TestLRScheduler"

The wheel does not contain `test_optim.py`, which imports the tests of schedulers, of averages and of
differentiable steps, but only the database that drives it. The classes are exchanged there and in
torch.optim, and pytest runs the file. `--plain` keeps torch's own classes, to see what passes on this machine
without ghor.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.testing._internal.common_optimizers import optim_db

import ghor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder `test` of a checkout of PyTorch")
    parser.add_argument("--plain", action="store_true", help="torch's own classes")
    args, others = parser.parse_known_args()  # pytest's: -k, -x, -n
    if not (args.folder / "test_optim.py").is_file():
        sys.exit(
            f"there is no test_optim.py in {args.folder}: give the folder `test` of a checkout of PyTorch"
        )
    if not args.plain:
        lifted = {name: getattr(ghor.optim, name) for name in ghor.optim.__all__}
        for info in optim_db:
            info.optim_cls = lifted.get(info.optim_cls.__name__, info.optim_cls)
        for name in lifted.keys() & vars(torch.optim).keys() - {"AdamW", "Muon"}:  # our Muon is made of these
            setattr(torch.optim, name, lifted[name])
    os.chdir(args.folder)
    sys.path.insert(0, ".")
    options = ["-p", "no:cacheprovider", "-p", "no:warnings", "--tb=short"]  # some tests count warnings
    sys.exit(pytest.main([*options, "test_optim.py", *others]))


if __name__ == "__main__":
    main()
