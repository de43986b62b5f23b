"""Leave out one thing of the library after the other, and name what no test misses.

`mutations.py` says what is left out. One process imports the library and collects the tests; for each mutant
a fork of it exchanges the code of the function that changes and runs the tests that run this very line, one
case of each test before its other cases, the fastest first. What is done at import (decorators, bodies of
classes) is tried in a process that imports the library anew. Which tests run what is recorded once, in
.pytest_cache, and again where a test file changes. The verdicts are recorded as they come: what was caught
is tried again when its function changes, what survived when anything does.

    make mutants                              all of them
    make mutants ARGS="--since main"          on lines that differ from main: for every day
    make mutants ARGS="--sample 100"          some; --seed 1 for others
    make mutants ARGS="--only 'linalg.*limit' --list"
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import linecache
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import _lru_cache_wrapper, partial
from itertools import groupby
from multiprocessing.connection import wait
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest
from mutations import Mutant, mutants

ROOT = Path(__file__).parents[1]
PRELOADED = ["torch._dynamo", "pytest", "hypothesis"]  # by the process that imports the library anew
PATIENCE = 10  # seconds of a processor that a mutant may take beside three times those of its tests
AT_IMPORT = 30  # tests for a mutant that is imported: each file of them has to be collected

Lines = dict[str, dict[str, dict[str, int]]]  # path, function, text of a line: the tests that run it, by bits
Pairs = list[tuple[FunctionType, CodeType]]


class Task(NamedTuple):
    """Tests for a process of its own, which ends with 0 if they pass."""

    mutant: Mutant | None
    nodes: Sequence[str]
    limit: float  # seconds of a processor
    target: Callable[..., None]
    args: tuple[Any, ...] = ()
    how: str = "fork"


# -- one process a task --------------------------------------------------------------------------------------


def each(tasks: Iterator[Task], folder: Path, jobs: int) -> Iterator[tuple[Task, int, Path]]:
    """Tasks as they end, with exit code and a folder; one that takes too long is killed: a code below 0."""
    live: dict[Any, Any] = {}
    try:
        while True:
            while len(live) < jobs and (task := next(tasks, None)):
                place = Path(tempfile.mkdtemp(dir=folder))
                context: Any = multiprocessing.get_context(task.how)
                process = context.Process(target=begin, args=(place, task.limit, task.target, *task.args))
                process.start()
                live[process.sentinel] = process, task, place, time.monotonic() + 60 + 20 * task.limit
            if not live:
                return
            wait(list(live), timeout=1)
            for sentinel, (process, task, place, end) in list(live.items()):
                if process.is_alive() and time.monotonic() > end:
                    kill(process)
                if not process.is_alive():
                    del live[sentinel]
                    yield task, process.exitcode, place
                    kill(process)  # what it has started
                    shutil.rmtree(place, ignore_errors=True)
    finally:
        for process, *_ in live.values():
            kill(process)


def kill(process: Any) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def begin(place: Path, limit: float, target: Callable[..., None], *args: Any) -> None:
    """In the new process: its own group, its own folder for files, and a limit on its time."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 1, int(limit) + 2))
    out = os.open(place / "out", os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ["TMPDIR"] = tempfile.tempdir = str(place)
    target(place, *args)


def library(place: Path, origin: Path, mutant: Mutant | None) -> Path:
    """A copy of the source with the mutant in it, for this process and those that it starts."""
    src = place / "src"
    shutil.copytree(origin, src, copy_function=os.link)
    if mutant:
        path = src / mutant.path
        changed = mutant.applied(path.read_bytes())
        path.unlink()
        path.write_bytes(changed)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(src), *filter(None, [os.environ.get("PYTHONPATH")])])
    return src


def imported(place: Path, origin: Path, mutant: Mutant, nodes: Sequence[str], options: Sequence[str]) -> None:
    """Import the library with a mutant in it, and run tests."""
    sys.path.insert(0, str(library(place, origin, mutant)))
    sys.path.insert(0, str(ROOT / "tests"))
    sys.exit(pytest.main([*nodes, *options, "-x"]))


# -- code that is exchanged ----------------------------------------------------------------------------------


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for c in code.co_consts:
        if isinstance(c, CodeType):
            yield from codes(c)


def exchanged(old: bytes, new: bytes, live: dict[tuple[str, int], list[FunctionType]]) -> Pairs | None:
    """The functions that change and their new code; None if something else does, or cannot be exchanged."""

    def own(c: CodeType) -> tuple[Any, ...]:
        rest = tuple(str(k) for k in c.co_consts if not isinstance(k, CodeType))
        return c.co_code, rest, c.co_names, c.co_varnames, c.co_freevars, c.co_cellvars

    def named(source: bytes) -> dict[tuple[str, int], CodeType]:
        seen: Counter[str] = Counter()
        found = {}
        for c in codes(compile(source, "", "exec", dont_inherit=True)):
            found[c.co_qualname, seen[c.co_qualname]] = c
            seen[c.co_qualname] += 1
        return found

    before, after, pairs = named(old), named(new), Pairs()
    for key, a in before.items():
        b = after.get(key)
        functions = live.get((a.co_qualname, a.co_firstlineno), [])
        if b is None or own(a) != own(b):
            if b is None or any(len(b.co_freevars) != len(f.__code__.co_freevars) for f in functions):
                return None
            if not functions and "<locals>" not in a.co_qualname:
                return None
        pairs += [(f, b) for f in functions if a != b]
    return pairs


# -- the process that has collected the tests ----------------------------------------------------------------


class Run:
    """A plugin of pytest that runs no test itself: its forks do."""

    def __init__(self, root: Path, folder: Path, chosen: list[Mutant], given: argparse.Namespace) -> None:
        self.root, self.folder, self.chosen, self.given = root, folder, chosen, given
        self.src, self.store = folder / "src", root / ".pytest_cache" / "mutants"
        self.sources = {m.path: (self.src / m.path).read_bytes() for m in chosen}
        self.options = ["-s", "-p", "no:cacheprovider", *["-m", ""] * given.slow]
        self.at_import = set[tuple[str, str]]()  # path and name of what has run when the tests begin
        self.live = dict[str, dict[tuple[str, int], list[FunctionType]]]()  # by path, name and line
        self.code = 2

    def ours(self, code: CodeType) -> str:
        """The path of code of the library, from src/."""
        path = code.co_filename.removeprefix(f"{self.src}{os.sep}")
        return path if path != code.co_filename else ""

    def pytest_collection(self) -> None:
        def called(frame: Any, event: str, arg: Any) -> None:
            if event == "call" and (path := self.ours(frame.f_code)):
                self.at_import.add((path, plain(frame.f_code.co_qualname)))

        sys.setprofile(called)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        sys.setprofile(None)
        self.session, self.items = session, {item.nodeid: item for item in session.items}
        for x in gc.get_objects():
            if type(x) is FunctionType and (path := self.ours(x.__code__)):
                functions = self.live.setdefault(path, {})
                functions.setdefault((x.__code__.co_qualname, x.__code__.co_firstlineno), []).append(x)
            elif type(x) is _lru_cache_wrapper and x.__module__.startswith("ghor"):
                x.cache_clear()
        gc.freeze()
        self.read_lines()
        self.code = self.survivors()
        return True

    def progress(self, what: str, tasks: Sequence[Task | Mutant], made: Any = None) -> Iterator[Any]:
        """`each` of them, with a bar; mutants are made tasks when it is their turn."""
        began, total, made_tasks = time.monotonic(), len(tasks), map(made, tasks) if made else iter(tasks)
        for done, found in enumerate(each(made_tasks, self.folder, self.given.j), 1):
            yield found
            seconds = (time.monotonic() - began) / done * (total - done)
            left = time.strftime("%H:%M:%S", time.gmtime(seconds))
            line = f"{what} [{'#' * (30 * done // total):30}] {done}/{total}, {left} left"
            if sys.stderr.isatty():
                print(f"\r{line} ", end="\n" * (done == total), file=sys.stderr, flush=True)
            elif 50 * done // total > 50 * (done - 1) // total:
                print(line, file=sys.stderr, flush=True)

    # in a fork

    def each_item(self, nodes: Sequence[str]) -> Iterator[tuple[str, bool]]:
        """Run tests one by one: whether each passes."""
        items = [self.items[node] for node in nodes]
        for node, item, following in zip(nodes, items, [*items[1:], None], strict=False):
            failed = self.session.testsfailed
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            yield node, self.session.testsfailed == failed

    def play(self, place: Path, nodes: Sequence[str], mutant: Mutant | None, pairs: Pairs) -> None:
        """Run tests until one fails, and leave its name."""
        library(place, self.src, mutant)
        for f, code in pairs:
            f.__code__ = code
        for node, passes in self.each_item(nodes):
            if not passes:
                (place / "failed").write_text(node)
                os._exit(1)
        os._exit(0)

    def watch(self, place: Path, nodes: Sequence[str]) -> None:
        """Run tests and write down which lines each runs, and how long it takes, of those that pass."""
        library(place, self.src, None)
        tests, lines, hit = list[tuple[str, float]](), Lines(), set[tuple[str, str, int]]()

        def inside(frame: Any, event: str, arg: Any) -> Any:
            if event == "line":
                hit.add((frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno))
            return inside

        def outside(frame: Any, event: str, arg: Any) -> Any:
            return inside if self.ours(frame.f_code) else None

        began = time.process_time()
        threading.settrace(outside)
        sys.settrace(outside)
        for node, passes in self.each_item(nodes):
            for file, name, line in hit if passes else ():
                path, text = str(Path(file).relative_to(self.src)), linecache.getline(file, line).strip()
                texts = lines.setdefault(path, {}).setdefault(plain(name), {})
                texts[text] = texts.get(text, 0) | 1 << len(tests)
            tests += [(node, time.process_time() - began)] * passes
            hit.clear()
            began = time.process_time()
            sys.settrace(outside)  # a test may have set its own
        (place / "record").write_bytes(pickle.dumps((tests, lines)))
        os._exit(0)

    # which tests run what

    def read_lines(self) -> None:
        """The tests that pass, with their seconds, and what they run: a pickle a file, until that changes."""
        self.tests, self.lines = list[tuple[str, float]](), Lines()
        folder, shared, kept, new = self.store / "tests", b"slow" * self.given.slow, dict[str, Path](), []
        folder.mkdir(parents=True, exist_ok=True)
        helpers = {f for f in (self.root / "tests").rglob("*.py") if not re.match("test_|mut", f.name)}
        shared += b"".join(f.read_bytes() for f in sorted(helpers))
        for file, nodes in groupby(sorted(self.items), key=lambda node: node.partition("::")[0]):
            digest = hashlib.sha256(shared + (self.root / file).read_bytes()).hexdigest()
            kept[file] = folder / file.replace("/", ".")
            if not kept[file].exists() or pickle.loads(kept[file].read_bytes())[0] != digest:
                new.append(Task(None, (file, digest), 3600, self.watch, (list(nodes),)))
        for task, _, place in self.progress("recording", new):
            file, digest = task.nodes
            if not (place / "record").exists():
                raise SystemExit(f"{file} does not run:\n{(place / 'out').read_text()[-3000:]}")
            found = pickle.loads((place / "record").read_bytes())
            kept[file].write_bytes(pickle.dumps((digest, *found)))
        for path in kept.values():
            _, tests, lines = pickle.loads(path.read_bytes())
            for path, name, text, bits in flat(lines):
                mine = self.lines.setdefault(path, {}).setdefault(name, {})
                mine[text] = mine.get(text, 0) | bits << len(self.tests)
            self.tests += tests
        for node in sorted(self.items.keys() - {node for node, _ in self.tests}):
            print(f"{node} fails with nothing left out, and judges nothing")

    def tests_of(self, m: Mutant) -> tuple[list[str], float, bool]:
        """Those that run its line, or else its function, the best first, within the budget.

        How many seconds they take, and whether anything runs it.
        """
        rows = self.sources[m.path].decode().splitlines()
        near, everywhere, there = {rows[i - 1].strip() for i in m.rows}, 0, 0
        for _, name, text, bits in flat({m.path: self.lines.get(m.path, {})}):
            if not m.function or f"{name}.".startswith(f"{m.function}."):
                everywhere, there = everywhere | bits, there | bits * (text in near)
        places = [i for i, bit in enumerate(f"{there or everywhere:b}"[::-1]) if bit == "1"]
        seen = bool(places)
        if not seen:  # perhaps in another process: tests in files that speak of it
            word = re.compile(rf"\b{m.function.rpartition('.')[2] or Path(m.path).stem}\b")
            texts = {f: (self.root / f).read_text() for f in {node.partition("::")[0] for node in self.items}}
            of = [texts[node.partition("::")[0]] for node, _ in self.tests]
            places = [i for i, text in enumerate(of) if word.search(text)]
        cases, ranked = Counter[str](), []
        for seconds, node in sorted(self.tests[i][::-1] for i in places if self.tests[i][0] in self.items):
            cases[test := node.partition("[")[0]] += 1
            ranked.append((cases[test], seconds, node))
        chosen, spent = list[str](), 0.0
        for _, seconds, node in sorted(ranked):
            if chosen and spent + seconds > self.given.budget:
                break
            chosen.append(node)
            spent += seconds
        return chosen, spent, seen

    # the mutants

    def task(self, m: Mutant, anew: bool = False) -> Task:
        source, (nodes, spent, _) = self.sources[m.path], self.tests_of(m)
        limit = PATIENCE + 3 * spent
        pairs = None if anew else exchanged(source, m.applied(source), self.live.get(m.path, {}))
        if pairs is not None:
            return Task(m, nodes, limit, self.play, (nodes, m, pairs))
        nodes = nodes[:AT_IMPORT]
        return Task(m, nodes, limit + 20, imported, (self.src, m, nodes, self.options), "forkserver")

    def survivors(self) -> int:
        """Try them, print those that no test misses, and say how many: the exit code."""
        keys, seen = dict[Mutant, str](), Counter[str]()
        for m in self.chosen:
            text = f"{m.path} {m.function} ({m.kind}) {m.shown(self.sources[m.path]).partition(chr(10))[2]}"
            seen[text] += 1
            keys[m] = f"{text} {seen[text]}"
        file, now = self.store / "verdicts", digest(self.root)
        known = dict(json.loads(row) for row in file.read_text().splitlines()) if file.exists() else {}
        left = [m for m in self.chosen if self.given.anew or known.get(keys[m]) not in ("caught", now)]
        passing, again = {""}, list[Mutant]()
        for what, make in ("mutants", self.task), ("imported", partial(self.task, anew=True)):
            for task, code, place in self.progress(what, left, make):
                m, node = task.mutant, (place / "failed").read_text() if (place / "failed").exists() else ""
                if code > 0 and task.how == "fork" and not node:
                    raise SystemExit((place / "out").read_text())
                if node not in passing:
                    alone = Task(None, [node], 3600, self.play, ([node], None, ()))
                    if next(each(iter([alone]), self.folder, 1))[1]:
                        print(f"{node} fails with nothing left out, and judges nothing")
                        del self.items[node]
                        again.append(m)
                        continue
                    passing.add(node)
                if not code and task.how == "fork" and (m.path, m.function) in self.at_import:
                    again.append(m)
                    continue
                known[keys[m]] = "caught" if code else now
                with file.open("a") as rows:
                    print(json.dumps([keys[m], known[keys[m]]]), file=rows)
            left = again
        missed = [m for m in self.chosen if known[keys[m]] != "caught"]
        for m in missed:
            nodes, _, seen = self.tests_of(m)
            print(m.shown(self.sources[m.path]))
            print(f"    survived {len(nodes)} tests" if seen else "    no test runs it")
        count = len(self.chosen)
        print(f"mutants: {count}, caught: {count - len(missed)}, survived: {len(missed)}")
        return 1 if missed else 0


def plain(qualname: str) -> str:
    return qualname.replace(".<locals>", "").partition(".<")[0]


def flat(lines: Lines) -> Iterator[tuple[str, str, str, int]]:
    for path, functions in lines.items():
        for name, texts in functions.items():
            yield from ((path, name, text, bits) for text, bits in texts.items())


def digest(root: Path) -> str:
    files = [f for top in ("src", "tests") for f in sorted((root / top).rglob("*.py"))]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


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


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="PATTERN", help="of 'src/file.py:line function (kind)'")
    parser.add_argument("--since", metavar="REV", help="those on lines that differ from this revision")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of them, at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--list", action="store_true", help="show them and run nothing")
    parser.add_argument("--slow", action="store_true", help="slow tests, too")
    parser.add_argument("--budget", type=float, default=10, help="seconds of tests for each")
    parser.add_argument("--anew", action="store_true", help="try again what was caught, too")
    parser.add_argument("-j", type=int, default=os.cpu_count() or 1, help="processes")
    given = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to clean up then, too
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        src = Path(shutil.copytree(root / "src", Path(name, "src")))
        sources = {str(f.relative_to(src)): f.read_bytes() for f in sorted((src / "ghor").rglob("*.py"))}
        chosen = [m for path, source in sources.items() for m in mutants(path, source)]
        chosen = [m for m in chosen if re.search(given.only, m.name())]
        if given.since:
            changed = changed_since(root, given.since)
            chosen = [m for m in chosen if any((m.path, line) in changed for line in (m.line, *m.rows))]
        if given.sample is not None and given.sample < len(chosen):
            chosen = sorted(random.Random(given.seed).sample(chosen, given.sample), key=chosen.index)
        if given.list or not chosen:
            print(*(m.shown(sources[m.path]) for m in chosen), f"mutants: {len(chosen)}", sep="\n")
            return 0
        multiprocessing.set_forkserver_preload(PRELOADED)
        os.chdir(root)
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_STORAGE_DIRECTORY": f"{name}/hypothesis"}
        sys.path.insert(0, str(src))
        run = Run(root, Path(name), chosen, given)
        code = pytest.main(["tests", *run.options, "--no-header", "--no-summary", "-qq"], [run])
        if code == pytest.ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        return run.code


if __name__ == "__main__":
    sys.exit(main())
