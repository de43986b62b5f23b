"""Step times and counts of this tree beside those of another checkout.

    git worktree add ../before ba79b46
    python benchmarks/beside.py --before ../before --json beside.json       # times; twenty minutes
    python benchmarks/beside.py --before ../before --quick                  # does it run? (not for quoting)
    python benchmarks/beside.py kernels --before ../before                  # and calls: exact, in any company

Each tree has a process of its own, and the two take turns of ten steps, so that noise of the machine affects
both alike; several pairs of processes follow each other, since memory lies elsewhere in each. A turn counts
with its mean, in which what is done every ten steps has its share. A ratio is that of two neighbouring turns:
quartiles over all of them, and the ratio of the best turns. "compiled" is torch.compile(optimizer.step) of
this tree over the *eager* step of the other, "compiled both" over the other's compiled one. On a busy
machine, `--clock cpu --threads 1` takes the time of the processor in place of the clock's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import commit, machine_lines, quartiles, seconds, stamp, write_json

HERE = Path(__file__).parent
TREES = ("after", "before")
KINDS = ["eager", "compiled", "compiled both"]
TEN = 10


# -- in the processes ----------------------------------------------------------------------------------------


def worker(threads: int, clock: str) -> None:
    """Does what each line of stdin asks: ["build", workload, compiled] or ["turn"]; answers with a line."""
    import torch
    from workloads import WORKLOADS, ours

    torch.set_num_threads(threads)
    step: Any = None
    now = {"wall": time.perf_counter, "cpu": time.process_time}[clock]
    for line in sys.stdin:
        what, *task = json.loads(line)
        answer: Any = None
        if what == "build":
            name, compiled = task
            (w,) = (w for w in WORKLOADS if w.name == name)
            torch._dynamo.reset()
            step = ours(w).step
            step = torch.compile(step) if compiled else step
            answer = seconds(lambda step=step: [step() for _ in range(TEN + 2)])  # type: ignore[misc]
        else:
            step()  # finds what the other process has left of the caches
            begun = now()
            for _ in range(TEN):
                step()
            answer = 1e3 * (now() - begun) / TEN
        print(json.dumps(answer), flush=True)


def environment(tree: Path, threads: int) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": str(threads)}


class Process:
    """A worker of one tree."""

    def __init__(self, tree: Path, threads: int, clock: str) -> None:
        command = [sys.executable, __file__, "--worker", str(threads), clock]
        env, pipe = environment(tree, threads), subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)

    def ask(self, *task: Any) -> Any:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(task) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended at {task} with code {self.process.wait()}")
        return json.loads(line)


@contextmanager
def processes(trees: dict[str, Path], threads: int, clock: str) -> Iterator[dict[str, Process]]:
    found = {name: Process(tree, threads, clock) for name, tree in trees.items()}
    try:
        yield found
    finally:
        for p in found.values():
            p.process.kill()
            p.process.wait()


# -- times ---------------------------------------------------------------------------------------------------


def turns(pair: dict[str, Process], name: str, kind: str, time_: float) -> dict[str, Any]:
    """Milliseconds a step in the turns of both trees, and the seconds of the first twelve steps."""
    compiled = {"after": kind != "eager", "before": kind == "compiled both"}
    first = {tree: p.ask("build", name, compiled[tree]) for tree, p in pair.items()}
    times: dict[str, list[float]] = {tree: [] for tree in TREES}
    end = time.perf_counter() + time_
    while len(times["before"]) < 2 or time.perf_counter() < end:
        for tree in TREES if len(times["before"]) % 2 else TREES[::-1]:
            times[tree].append(pair[tree].ask("turn"))
            time.sleep(0.005)  # threads of the one stop waiting for work before the other begins
    return {"first_s": first, "turns_ms": times}


def measure(trees: dict[str, Path], args: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for threads in args.threads:
        for name in names:
            for kind in args.kinds:
                found: list[dict[str, Any]] = []
                try:
                    count = args.processes if kind == "eager" else 1  # compiling takes a while
                    for _ in range(count):
                        with processes(trees, threads, args.clock) as pair:
                            found.append(turns(pair, name, kind, args.seconds / count))
                except RuntimeError as error:
                    print(f"{name}, {kind}: {error}", flush=True)
                    continue
                ms = {tree: [t for f in found for t in f["turns_ms"][tree]] for tree in TREES}
                ratios = [a / b for a, b in zip(ms["after"], ms["before"], strict=True)]
                row = {"workload": name, "kind": kind, "threads": threads, "turns": len(ratios)}
                row |= {"ms": {tree: quartiles(ms[tree]) for tree in TREES}, "ratio": quartiles(ratios)}
                row |= {"best_ms": {tree: min(ms[tree]) for tree in TREES}, "runs": found}
                row["ratio_of_best"] = row["best_ms"]["after"] / row["best_ms"]["before"]
                rows.append(row)
                print(line(row), flush=True)
    return rows


HEAD = f"{'workload':34}{'kind':14}{'threads':>7}  before ms   after ms  ratio     (quartiles)   best"


def line(r: dict[str, Any]) -> str:
    q, ms = r["ratio"], r["ms"]
    return (
        f"{r['workload']:34}{r['kind']:14}{r['threads']:7}{ms['before'][1]:11.3g}{ms['after'][1]:11.3g}"
        f"{q[1]:7.2f}{f'({q[0]:.2f} to {q[2]:.2f})':>16}{r['ratio_of_best']:7.2f}"
    )


# -- counts --------------------------------------------------------------------------------------------------


def counts(what: str, trees: dict[str, Path], only: str, threads: int, quick: bool) -> list[dict[str, Any]]:
    """Rows of `measure.py kernels` or `calls` of both trees."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for tree, path in trees.items():
            out = Path(folder) / f"{tree}.json"
            command = [sys.executable, str(HERE / "measure.py"), what, "--by", "ghor", "--only", only]
            command += ["--threads", str(threads), "--json", str(out), *["--quick"] * quick]
            subprocess.run(command, env=environment(path, threads), check=True, stdout=subprocess.DEVNULL)
            rows = json.loads(out.read_text())["rows"]
            found[tree] = {f"{r.get('contender', 'ghor')}: {r['workload']}": r for r in rows}
    both = [name for name in found["after"] if name in found["before"]]
    return [{"workload": name} | {tree: found[tree][name] for tree in TREES} for name in both]


KEYS = {
    "kernels": ("kernels", "mean", "reads", "products", "traffic", "memory", "state", "moved"),
    "calls": ("calls", "switches", "depth"),
}


def counts_table(what: str, rows: list[dict[str, Any]]) -> str:
    keys = KEYS[what]
    lines = ["".join(f"{key:>16}" for key in keys) + "  (before -> after)"]
    for row in rows:
        cells = [[row[tree][key] for tree in TREES[::-1]] for key in keys]
        short = [" -> ".join("?" if isinstance(x, str) else f"{x or 0:.4g}" for x in cell) for cell in cells]
        lines.append("".join(f"{cell:>16}" for cell in short) + f"  {row['workload']}")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(int(sys.argv[2]), sys.argv[3])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="time", choices=("time", "kernels", "calls"))
    parser.add_argument("--before", type=Path, required=True, metavar="FOLDER", help="the other checkout")
    parser.add_argument("--only", default="", metavar="REGEX", help="workloads whose name matches")
    parser.add_argument("--kinds", nargs="+", default=KINDS[:2], choices=KINDS)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of torch (default: 1 and 2)")
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"), help="cpu: of a busy machine")
    parser.add_argument("--seconds", type=float, default=12, help="of turns for each line (default: 12)")
    parser.add_argument(
        "--processes", type=int, default=3, help="pairs of processes, of eager steps (default: 3)"
    )
    parser.add_argument("--quick", action="store_true", help="one pair, two turns, eager: to see it run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record")
    args = parser.parse_args()
    trees = dict(zip(TREES, (HERE.parent, args.before.resolve()), strict=True))
    if not (trees["before"] / "src" / "ghor").is_dir():
        parser.error(f"{args.before} is no checkout: it has no src/ghor")
    if args.quick:
        args.seconds, args.processes = 0.0, 1
        args.kinds = args.kinds if args.kinds != KINDS[:2] else KINDS[:1]
    record: dict[str, Any] = {
        "benchmark": f"beside, {args.what}",
        "commit": commit(),
        "before": commit(trees["before"]),
        "clock": args.clock,
    }
    if args.what == "time":
        from workloads import WORKLOADS

        record |= {} if args.quick else stamp()
        print(*(machine_lines(record) if "machine" in record else []), HEAD, sep="\n", flush=True)
        names = [w.name for w in WORKLOADS if "beside" in w.measured and re.search(args.only, w.name)]
        rows = measure(trees, args, names)
    else:
        rows = counts(args.what, trees, args.only, args.threads[0], args.quick)
        print(counts_table(args.what, rows))
    if args.json:
        write_json(record | {"quick": args.quick, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
