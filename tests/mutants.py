"""Take out the guards of the library, one by one, and name those that no test misses.

Code runs without its guards, and so do tests that do not ask for them. Every guard of `guards.py` is replaced
in a copy of the source, and the tests that should miss it are run there: one of them has to fail.

    make mutants                         all of them: "mutants: 279, survived: none"
    make mutants ARGS="--only polish"    those with this word in their names, with the output of pytest
    make mutants ARGS="-j 4"             four at a time
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from guards import MUTANTS, Mutant

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A copy of the library and its tests, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        root = Path(name)
        for folder in ("src", "tests", "benchmarks"):
            shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        yield root


def run_in(root: Path, nodes: list[str], verbose: bool) -> int:
    """pytest's exit code in a copy: 0 all passed, 1 some failed, else they were not run."""
    import pytest

    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root / "src")
    sys.path.insert(0, str(root / "src"))
    sys.dont_write_bytecode = True  # the next mutant of a file may be as old and as long
    out = os.open(root / "output", os.O_CREAT | os.O_WRONLY)
    if not verbose:
        os.dup2(out, 1)
        os.dup2(out, 2)
    return int(
        pytest.main(["-x", "-q", "-n", "0", "--timeout", "200", "-p", "no:cacheprovider", "-m", "", *nodes])
    )


def caught(task: tuple[Mutant, bool]) -> tuple[Mutant, str, float]:
    """Whether a test misses the guard, in a process of its own."""
    mutant, verbose = task
    began = time.process_time()
    with copied() as root:
        path = root / mutant.path
        path.write_text(mutant.applied(path.read_text()))
        code = run_in(root, mutant.nodes(), verbose)
    outcome = {0: "SURVIVED", 1: "caught"}.get(code, f"NOT RUN (pytest's exit code is {code})")
    return mutant, outcome, time.process_time() - began


def whole(nodes: list[str]) -> str:
    """What fails with all guards in place, in pytest's words: only what passes then can catch anything."""
    with copied() as root:
        code = run_in(root, nodes, False)
        return "" if code == 0 else (root / "output").read_text()[-3000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="NAME", help="mutants with this in their names")
    parser.add_argument("-j", type=int, default=2, metavar="N", help="how many at a time (2)")
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if given.only in m.name]
    if not chosen:
        print(f"no mutant has {given.only!r} in its name")
        return 2
    for m in chosen:
        m.applied((ROOT / m.path).read_text())  # raises where the list does not follow the code
    import torch._dynamo  # loaded once: each process is a fork of this one, where there are forks

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    began = time.perf_counter()
    with context.Pool(given.j, maxtasksperchild=1) as pool:
        nodes = sorted({node for m in chosen for node in m.nodes()})
        wrong = "".join(
            pool.map(whole, filter(None, (nodes[i :: given.j] for i in range(given.j))), chunksize=1)
        )
        if wrong:
            print(f"tests fail with all guards in place:\n{wrong}")
            return 2
        print(f"with all guards in place the tests pass, {time.perf_counter() - began:.0f} s", flush=True)
        survived = []
        tasks = [(m, bool(given.only)) for m in chosen]
        for mutant, outcome, seconds in pool.imap_unordered(caught, tasks, chunksize=1):
            print(f"{seconds:5.1f} s  {outcome}: {mutant.file}, {mutant.name}", flush=True)
            if outcome != "caught":
                survived.append(mutant.name)
    names = "".join(f"\n  {name}" for name in survived) or " none"
    print(f"mutants: {len(chosen)}, survived:{names} ({time.perf_counter() - began:.0f} s)")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
