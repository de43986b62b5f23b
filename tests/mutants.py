"""Leave out one thing of the library after the other, and name what no test misses.

`mutations.py` says what is left out. The tests that run the function try it: first those that run the very
line, and one case of each test before its other cases, the fastest first. Which tests run what is recorded
once, in .pytest_cache, and again where a test file changes. Every process has its own copy of src/.

    make mutants                              all of them, for hours
    make mutants ARGS="--since main"          on lines that differ from main: for every day
    make mutants ARGS="--sample 100"          some; --seed 1 for others
    make mutants ARGS="--only 'linalg.*limit' --list"
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import linecache
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mutations import Mutant, mutants

ROOT = Path(__file__).parents[1]
PRELOADED = ["torch._dynamo"]  # each process is a fork of this one, where there are forks
PATIENCE = 60  # seconds that a mutant may take beside five times those of its tests
FIRST = 20  # tests for every mutant, before the others for those that survive


Lines = dict[str, dict[str, dict[str, int]]]  # path, function, text of a line: the tests that run it, by bits


class Recorder:
    """A plugin of pytest: which lines of a copy of the source each test runs, and for how long."""

    def __init__(self, src: Path) -> None:
        self.src = f"{src}{os.sep}"
        self.tests: list[tuple[str, float]] = []
        self.lines: Lines = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        hit: set[tuple[str, str, int]] = set()

        def inside(frame: Any, event: str, arg: Any) -> Any:
            if event == "line":
                hit.add((frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno))
            return inside

        def outside(frame: Any, event: str, arg: Any) -> Any:
            return inside if frame.f_code.co_filename.startswith(self.src) else None

        began = time.perf_counter()
        sys.settrace(outside)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            for path, name, line in hit:
                functions = self.lines.setdefault(path.removeprefix(self.src), {})
                texts = functions.setdefault(name.replace(".<locals>", "").partition(".<")[0], {})
                text = linecache.getline(path, line).strip()
                texts[text] = texts.get(text, 0) | 1 << len(self.tests)
            self.tests.append((item.nodeid, time.perf_counter() - began))


class Chosen:
    """A plugin of pytest: these tests, in this order."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.place = {node: i for i, node in enumerate(nodes)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.place), key=lambda i: self.place[i.nodeid])
        if gone := sorted(set(self.place) - {i.nodeid for i in items}):
            raise pytest.UsageError(f"{gone[0]} was recorded and is not there now: --record")


class Task(NamedTuple):
    """Tests for a process of its own: `nodes`, or all in `files`, recorded."""

    files: list[str]
    nodes: Sequence[str] = ()
    mutant: Mutant | None = None
    limit: float = 3600.0  # seconds


def of_nodes(nodes: Sequence[str], mutant: Mutant | None = None, limit: float = 3600.0) -> Task:
    return Task(sorted({node.partition("::")[0] for node in nodes}), nodes, mutant, limit)


def run(root: Path, folder: Path, task: Task, slow: bool) -> None:
    """Copy the source, change the copy, and leave with pytest's exit code."""
    os.setsid()
    src = folder / "src"
    shutil.copytree(folder.parent / "src", src)
    if task.mutant:
        path = src / task.mutant.path
        path.write_bytes(task.mutant.applied(path.read_bytes()))
    os.chdir(root)
    sys.path.insert(0, str(src))
    sys.dont_write_bytecode = True
    os.environ["PYTHONPATH"] = os.pathsep.join([str(src), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
    out = os.open(folder / "out", os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    plugin = Chosen(task.nodes) if task.nodes else Recorder(src)
    options = ["-p", "no:cacheprovider", *["-x"] * bool(task.mutant), *["-m", ""] * slow]
    code = pytest.main([*task.files, *options], plugins=[plugin])
    if isinstance(plugin, Recorder):
        (folder / "record").write_bytes(pickle.dumps((plugin.tests, plugin.lines)))
    sys.exit(code)


class Processes(NamedTuple):
    """So many at a time, each with a copy of the source as it was when this began."""

    root: Path
    folder: Path
    jobs: int
    slow: bool
    source: str  # its digest

    def each(self, what: str, tasks: list[Task]) -> Iterator[tuple[Task, int, Path]]:
        """Tasks as they end, with exit code and folder; one that takes too long is killed: a code below 0."""
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        began, waiting, live = time.monotonic(), tasks[::-1], dict[Any, Any]()
        try:
            while waiting or live:
                while waiting and len(live) < self.jobs:
                    task, folder = waiting.pop(), Path(tempfile.mkdtemp(dir=self.folder))
                    process = context.Process(target=run, args=(self.root, folder, task, self.slow))
                    process.start()
                    live[process.sentinel] = process, task, folder, time.monotonic() + task.limit
                wait(list(live), timeout=1)
                for sentinel, (process, task, folder, end) in list(live.items()):
                    if process.is_alive() and time.monotonic() > end:
                        kill(process)
                    if not process.is_alive():
                        del live[sentinel]
                        yield task, process.exitcode, folder
                        shutil.rmtree(folder, ignore_errors=True)
                        progress(what, len(tasks) - len(waiting) - len(live), len(tasks), began)
        finally:
            for process, *_ in live.values():
                kill(process)

    def failures(self, what: str, tasks: list[Task]) -> str:
        """The ends of what pytest says where anything fails."""
        return "".join((at / "out").read_text()[-3000:] for _, code, at in self.each(what, tasks) if code)


def kill(process: Any) -> None:
    """A process and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def progress(what: str, done: int, total: int, began: float) -> None:
    left = time.strftime("%H:%M:%S", time.gmtime((time.monotonic() - began) / done * (total - done)))
    line = f"{what:9} [{'#' * (30 * done // total):30}] {done}/{total}, {left} left"
    if sys.stderr.isatty():
        print(f"\r{line} ", end="\n" * (done == total), file=sys.stderr, flush=True)
    elif 10 * done // total > 10 * (done - 1) // total:
        print(line, file=sys.stderr, flush=True)


class Record:
    """Which tests run what, kept from one time to the next."""

    def __init__(self, processes: Processes, folders: list[str], anew: bool) -> None:
        self.root, self.source = processes.root, processes.source
        store = self.root / ".pytest_cache" / "mutants"
        self.tests: list[tuple[str, float]] = []
        self.lines: Lines = {}
        self.files: dict[
            str, tuple[str, int, int, str]
        ] = {}  # digest, place in the list, source if it passes
        if store.exists() and not anew:
            self.tests, self.lines, self.files = pickle.loads(store.read_bytes())
        digests = digests_of(self.root, folders, processes.slow)
        new = [Task([f]) for f, digest in digests.items() if self.files.get(f, ("",))[0] != digest]
        for task, code, folder in processes.each("recording", new):
            if not (folder / "record").exists():
                raise SystemExit(f"{task.files[0]} does not run:\n{(folder / 'out').read_text()[-3000:]}")
            tests, lines = pickle.loads((folder / "record").read_bytes())
            for path, name, text, bits in flat(lines):
                mine = self.lines.setdefault(path, {}).setdefault(name, {})
                mine[text] = mine.get(text, 0) | bits << len(self.tests)
            place, passing = (len(self.tests), len(self.tests) + len(tests)), "" if code else processes.source
            self.files[task.files[0]] = digests[task.files[0]], *place, passing
            self.tests += tests
            store.parent.mkdir(exist_ok=True)
            store.write_bytes(pickle.dumps((self.tests, self.lines, self.files)))
        self.files = {f: self.files[f] for f in digests}
        self.live = sum((1 << stop) - (1 << start) for _, start, stop, _ in self.files.values())

    def passed(self, node: str) -> bool:
        """Whether it passed with this very source when it was recorded."""
        return self.files[node.partition("::")[0]][3] == self.source

    def tests_of(self, m: Mutant, source: bytes) -> list[tuple[str, float]]:
        """Those that run its function and how many seconds each takes, the best first."""
        rows = source.decode().splitlines()
        near, all_of_it, there = {rows[i - 1].strip() for i in m.rows}, 0, 0
        for _, name, text, bits in flat({m.path: self.lines.get(m.path, {})}):
            if not m.function or f"{name}.".startswith(f"{m.function}."):
                all_of_it, there = all_of_it | bits, there | bits * (text in near)
        if not all_of_it & self.live:  # perhaps in another process: tests in files that speak of it
            word = re.compile(rf"\b{m.function.rpartition('.')[2] or Path(m.path).stem}\b")
            for file, (_, start, stop, _) in self.files.items():
                if word.search((self.root / file).read_text()):
                    all_of_it |= (1 << stop) - (1 << start)
        places = (i for i, bit in enumerate(f"{all_of_it & self.live:b}"[::-1]) if bit == "1")
        found = [(not there >> i & 1, *self.tests[i]) for i in places]
        cases: Counter[str] = Counter()
        ranked = []
        for far, node, seconds in sorted(found, key=lambda t: (t[0], t[2])):
            cases[test := node.partition("[")[0]] += 1
            ranked.append((far, cases[test], seconds, node))
        return [(node, seconds) for *_, seconds, node in sorted(ranked)]


def flat(lines: Lines) -> Iterator[tuple[str, str, str, int]]:
    for path, functions in lines.items():
        for name, texts in functions.items():
            yield from ((path, name, text, bits) for text, bits in texts.items())


def digests_of(root: Path, folders: list[str], slow: bool) -> dict[str, str]:
    """The test files, and for each what changes with it and with what the tests beside it share."""
    every = (f for t in folders for f in [root / t, *(root / t).rglob("*.py")])
    found = sorted({f.relative_to(root) for f in every if re.fullmatch(r"test_.*\.py", f.name)})
    shared = dict.fromkeys((f.parts[0] for f in found), b"slow" * slow)
    for top in shared:
        helpers = (f for f in (root / top).rglob("*.py") if not re.match(r"test_|mutants|mutations", f.name))
        shared[top] += b"".join(f.read_bytes() for f in sorted(helpers))
    return {str(f): hashlib.sha256(shared[f.parts[0]] + (root / f).read_bytes()).hexdigest() for f in found}


def changed_since(root: Path, revision: str) -> set[tuple[str, int]]:
    """The lines of src/ that differ from a revision."""
    command = ["git", "diff", "-U0", "--no-prefix", "--relative", revision, "--", "src"]
    found, path = set(), ""
    for row in subprocess.check_output(command, cwd=root, text=True).splitlines():
        if row.startswith("+++ "):
            path = row[4:].removeprefix("src/")
        elif hunk := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", row):
            found |= {(path, int(hunk[1]) + i) for i in range(int(hunk[2] or 1))}
    return found


def survivors(chosen: list[Mutant], sources: dict[str, bytes], processes: Processes, given: Any) -> int:
    """Run them, print those that no test misses, and say how many: the exit code."""
    record = Record(processes, given.tests, given.record)
    tests = {m: record.tests_of(m, sources[m.path]) for m in chosen}
    left, tried = {m for m in chosen if tests[m]}, Counter[Mutant]()
    for part in (slice(0, FIRST), slice(FIRST, None)):
        tasks = []
        for m in (m for m in chosen if m in left and tests[m][part]):
            spent = list(accumulate(seconds for _, seconds in tests[m][part]))
            count = max(1, bisect(spent, given.budget))
            tasks.append(
                of_nodes([node for node, _ in tests[m][part][:count]], m, PATIENCE + 5 * spent[count - 1])
            )
            tried[m] += count
        nodes = sorted({node for task in tasks for node in task.nodes if not record.passed(node)})
        parts = [of_nodes(some) for i in range(4 * given.j) if (some := nodes[i :: 4 * given.j])]
        if wrong := processes.failures("baseline", parts):
            print(f"tests fail with nothing left out:\n{wrong}")
            return 2
        left -= {task.mutant for task, code, _ in processes.each("mutants", tasks) if code and task.mutant}
    missed = [m for m in chosen if m in left or not tests[m]]
    for m in missed:
        print(m.shown(sources[m.path]))
        print(
            f"    survived {tried[m]} of {len(tests[m])} tests that run it"
            if tests[m]
            else "    no test runs it"
        )
    print(f"mutants: {len(chosen)}, caught: {len(chosen) - len(missed)}, survived: {len(missed)}")
    return 1 if missed else 0


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="PATTERN", help="of 'src/file.py:line function (kind)'")
    parser.add_argument("--since", metavar="REV", help="those on lines that differ from this revision")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of them, at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--list", action="store_true", help="show them and run nothing")
    parser.add_argument(
        "--tests", nargs="+", default=["tests"], metavar="PATH", help="folders or files (tests)"
    )
    parser.add_argument("--slow", action="store_true", help="slow tests, too")
    parser.add_argument(
        "--budget", type=float, default=30, metavar="S", help="seconds of tests for each (30)"
    )
    parser.add_argument("--record", action="store_true", help="record anew which tests run what")
    parser.add_argument(
        "-j", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (one a core)"
    )
    given = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to clean up then, too
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        src = Path(shutil.copytree(root / "src", Path(name, "src")))
        sources = {str(f.relative_to(src)): f.read_bytes() for f in sorted((src / "ghor").rglob("*.py"))}
        every = (m for path, source in sources.items() for m in mutants(path, source))
        chosen = [m for m in every if re.search(given.only, m.name())]
        if given.since:
            changed = changed_since(root, given.since)
            chosen = [m for m in chosen if any((m.path, line) in changed for line in (m.line, *m.rows))]
        if given.sample is not None and given.sample < len(chosen):
            chosen = sorted(random.Random(given.seed).sample(chosen, given.sample), key=chosen.index)
        if given.list or not chosen:
            print(*(m.shown(sources[m.path]) for m in chosen), f"mutants: {len(chosen)}", sep="\n")
            return 0
        for module in PRELOADED:
            importlib.import_module(module)
        digest = hashlib.sha256(b"".join(sources.values())).hexdigest()
        return survivors(chosen, sources, Processes(root, Path(name), given.j, given.slow, digest), given)


if __name__ == "__main__":
    sys.exit(main())
