"""One optimizer step over the workloads of workloads.py, in one of four measurements.

    python benchmarks/measure.py time --only "^336" --seconds 60     # make bench
    python benchmarks/measure.py time --json time.json               # all workloads; ten minutes
    python benchmarks/measure.py kernels --only "^Muon" --ops        # counts, which no other work disturbs
    python benchmarks/measure.py memory --only "x 16$"                # as N grows, each in its own process
    python benchmarks/measure.py calls                               # the way through ghor's files
    python benchmarks/measure.py grid                                # transported and implicit, by N and n/N
    python benchmarks/measure.py WHAT --quick                        # does it run? (not for quoting)

time: within a workload the contenders take turns in shuffled order, so that noise of the machine affects all
of them alike. A turn is two steps: the first finds the caches full of the others' data, as a step after a
backward pass does ("first"), the second is the one compared. Ratios are taken within a round. Each workload
has a process of its own, because memory that others leave behind changes times.

kernels: operations that PyTorch dispatches and that are not views; a call of LAPACK counts as one. They are
those of the most frequent of twenty steps, and "mean" is over all, as rounding is repaired in some of them.
Reads are values that the host waits for, in a step on a device that is no CPU. Products are multiplications
of matrices in units of N n^2 for each matrix, factorisations included. Traffic is what kernels read and
write, from caches or memory, in units of the weights' size: 8 for torch's fused Adam. Memory is all that is
held between steps in these units, and state what of it is in `optimizer.state`. "Moved" are tensors that
outlive a step and were elsewhere before it.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import kernels
import memory
import torch
import walk
from common import commit, machine_lines, quartiles, stamp, write_json
from torch import Tensor
from workloads import CONTENDERS, OURS, WORKLOADS, Contender, Workload, contenders, ours

Row = dict[str, Any]


# -- time ----------------------------------------------------------------------------------------------------


def timed(entries: dict[str, Contender], seconds: float, least: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of the contenders in interleaved rounds, without garbage collection."""
    times: dict[str, dict[str, list[float]]] = {name: {"first": [], "again": []} for name in entries}
    order, end, rounds = random.Random(0), time.perf_counter() + seconds, 0
    gc.collect()
    gc.disable()
    try:
        while time.perf_counter() < end or rounds < least:
            rounds += 1
            for name in sorted(
                order.sample(list(entries), len(entries)), key=lambda name: entries[name].slow
            ):
                for which in ("first", "again"):
                    begun = time.perf_counter()
                    entries[name].step()
                    times[name][which].append(1e3 * (time.perf_counter() - begun))
    finally:
        gc.enable()
    return times


@torch.no_grad()
def points(c: Contender) -> list[Tensor]:
    return [Y.as_subclass(Tensor).double() for Y in c.weights()]


def time_(w: Workload, seconds: float, least: int = 5, only: str = "") -> list[Row]:
    """Quartiles, ratios to the first contender within a round, and how far weights are off their space."""
    entries = dict(contenders(w, only))
    start = {name: points(c) for name, c in entries.items()}
    for c in entries.values():
        for _ in range(3):
            c.step()
    times = timed(entries, seconds, least)
    rows = []
    for name, c in entries.items():
        again, end = times[name]["again"], points(c)
        ratios = [a / b for a, b in zip(times[next(iter(entries))]["again"], again, strict=True)]
        if any(torch.equal(X, Y) for X, Y in zip(start[name], end, strict=True)):
            print(f"{name} has left a weight where it was: it skips work", file=sys.stderr)
        row: Row = {"workload": w.name, "contender": name, "ms": quartiles(again), "best_ms": min(again)}
        row |= {"median_ms": row["ms"][1], "first_ms": quartiles(times[name]["first"]), "rounds": len(again)}
        row |= {
            "ghor_over": quartiles(ratios),
            "distance": None,
            "memory": kernels.memory(c.holder, c.params),
        }
        if end and w.space.dims:
            row["distance"] = max(float(w.space.residual(Y).max()) for Y in end)
        rows.append(row)
    return rows


def time_table(rows: Sequence[Row]) -> str:
    """A line for each contender, with the ratio of ghor's time to its own, and the quartiles of it."""
    lines = [f"{'median ms':>9} {'best':>9} {'first':>9} {'ghor /':>8}{'':>17} {'memory':>6} {'off by':>8}"]
    for name in dict.fromkeys(row["workload"] for row in rows):
        lines.append(name)
        for r in (row for row in rows if row["workload"] == name):
            q, off = r["ghor_over"], "" if r["distance"] is None else f"{r['distance']:.0e}"
            lines.append(
                f"{r['median_ms']:9.3g} {r['best_ms']:9.3g} {r['first_ms'][1]:9.3g} {q[1]:8.2g}"
                f"{f'({q[0]:.2g} to {q[2]:.2g})':>17} {r['memory']:6.2f} {off:>8}  {r['contender']}"
            )
    return "\n".join(lines)


# -- kernels -------------------------------------------------------------------------------------------------


def kernels_(w: Workload, only: str = "", repeats: int = 20) -> list[Row]:
    rows = []
    for name, c in contenders(w, only):
        counted, mean = kernels.count(c.step, repeats if name.startswith(OURS) else 3)
        dims = w.shapes[0][-w.space.dims :] if w.space.dims else w.shapes[0]
        N, n = max(dims), min(dims) if len(dims) > 1 else 1
        per_product = 2 * N * n * n * sum(math.prod(s) for s in w.shapes) // math.prod(dims)
        row: Row = {"workload": w.name, "contender": name, "kernels": counted.kernels.total(), "mean": mean}
        row["reads"] = reads(w, name) if name.startswith(OURS) and c.holder is not None else None
        row["products"] = counted.flops / per_product
        row["traffic"] = counted.traffic / sum(map(kernels.size, c.params))
        row["memory"] = kernels.memory(c.holder, c.params)
        row["state"] = kernels.memory(getattr(c.holder, "state", None), c.params)
        row["moved"] = max(kernels.moved(c.step, c.holder, c.params) for _ in range(2))
        rows.append(row | {"ops": dict(counted.kernels.most_common())})
    return rows


def reads(w: Workload, name: str) -> float | str:
    """Reads of a contender of ours; in words why there is none."""
    make = CONTENDERS[name]
    options = dict(make.keywords) if isinstance(make, partial) else {}

    def build(params: list[Tensor]) -> torch.optim.Optimizer:
        import ghor

        cls: Any = getattr(ghor.optim, options.pop("optimizer", w.optimizer))
        return cls(params, space=w.space, lr=1e-3, **{**w.options, **options})  # type: ignore[no-any-return]

    try:
        return kernels.reads(build, w.shapes)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def kernels_table(rows: Sequence[Row], ops: bool = False) -> str:
    head = ("kernels", "mean", "reads", "products", "traffic", "memory", "state", "moved")
    lines = [" ".join(f"{word:>8}" for word in head)]
    for r in rows:
        reads = "" if r["reads"] is None else "?" if isinstance(r["reads"], str) else f"{r['reads']:.1f}"
        lines.append(
            f"{r['kernels']:8} {r['mean']:8.1f} {reads:>8} {r['products']:8.1f} {r['traffic']:8.0f} "
            f"{r['memory']:8.2f} {r['state']:8.2f} {r['moved']:8}  {r['contender']}: {r['workload']}"
        )
        lines += [f"{'':9}{r['reads']}"] if isinstance(r["reads"], str) else []
        lines += [f"{'':9}" + ", ".join(f"{name} {n}" for name, n in r["ops"].items())] if ops else []
    return "\n".join(lines)


# -- memory, calls -------------------------------------------------------------------------------------------


def memory_table(rows: Sequence[Row]) -> str:
    lines = [f"{'ms':>9} {'kept':>7} {'peak':>7}  (in units of the weights)"]
    for r in rows:
        if r.get("ms"):
            kept, peak = (f"{r[key] / r['weight_bytes']:7.1f}" for key in ("held_bytes", "peak_bytes"))
            lines.append(f"{quartiles(r['ms'])[1]:9.3g} {kept} {peak}  {r['contender']}: {r['workload']}")
        if r["stopped"]:
            lines.append(f"{'':27}{r['contender']}: {r['workload']} is the last one: {r['stopped']}")
    return "\n".join(lines)


def memory_(chosen: Sequence[Workload], only: str, rounds: int, threads: int) -> list[Row]:
    """As N grows, until a budget is used up."""
    if not Path("/proc/self/clear_refs").exists():
        raise SystemExit("memory is read from /proc/self, which is not there: Linux only")
    rows: list[Row] = []
    stopped = set()
    for w in chosen:
        *batch, N, n = w.shapes[0]
        for name in (name for name in w.contenders if only in name and (name, n, *batch) not in stopped):
            tell(f"{w.name}: {name}")
            found = memory.child(w, name, rounds, threads)
            if found["stopped"]:
                stopped.add((name, n, *batch))
            size = 4 * math.prod(w.shapes[0])
            row = {"workload": w.name, "contender": name, "N": N, "n": n, "batch": math.prod(batch)}
            rows.append(row | {"weight_bytes": size, **found})
    tell("")
    return rows


def calls(w: Workload) -> Row:
    found = walk.walk(ours(w).step)
    text = {a: dict(b) for a, b in (("calls", found.calls), ("files", found.files))}
    switches = {f"{a} -> {b}": n for (a, b), n in found.switches.items()}
    totals = {"calls": found.calls.total(), "switches": found.switches.total(), "depth": found.depth}
    return {"workload": w.name, **totals, "by": {**text, "switches": switches}, "text": walk.report(found)}


# -- the command ---------------------------------------------------------------------------------------------


def tell(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text:78}" if text else f"\r{'':78}\r")
        sys.stderr.flush()


def apart(
    job: Callable[..., list[Row]], chosen: Sequence[Workload], threads: int, **options: Any
) -> list[Row]:
    """Each workload in a process of its own."""
    rows: list[Row] = []
    start = torch.set_num_threads
    with ProcessPoolExecutor(1, get_context("spawn"), start, (threads,), max_tasks_per_child=1) as pool:
        for i, w in enumerate(chosen):
            tell(f"{i + 1} of {len(chosen)}: {w.name}")
            rows += pool.submit(job, w, **options).result()
    tell("")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("time", "kernels", "memory", "calls", "grid"))
    parser.add_argument("--only", default="", metavar="REGEX", help="workloads whose name matches")
    parser.add_argument("--by", default="", help="contenders whose name contains this")
    parser.add_argument("--seconds", type=float, default=12, help="of time for each workload (default: 12)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--quick", action="store_true", help="few rounds, small sizes: to see it run")
    parser.add_argument("--ops", action="store_true", help="list the operations of kernels, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record")
    args = parser.parse_args()
    chosen = [w for w in WORKLOADS if args.what in w.measured and re.search(args.only, w.name)]
    if args.quick:
        chosen = [w for w in chosen if sum(math.prod(s) for s in w.shapes) < 1e6]
    if not chosen:
        names = ", ".join(w.name for w in WORKLOADS if args.what in w.measured)
        parser.error(f"no workload matches {args.only!r}; there are: {names}")
    torch.set_num_threads(args.threads)
    exact = args.what in ("kernels", "calls")  # and the same on every machine
    record: Row = {"benchmark": args.what, "commit": commit(), "torch": torch.__version__}
    record |= {} if exact or args.quick else stamp()
    if args.what in ("time", "grid"):
        seconds, least = (0.0, 2) if args.quick else (args.seconds if args.what == "time" else 1.0, 5)
        rows = apart(time_, chosen, args.threads, seconds=seconds, least=least, only=args.by)
        text = time_table(rows)
    elif args.what == "kernels":
        rows = [row for w in chosen for row in kernels_(w, args.by, 5 if args.quick else 20)]
        text = kernels_table(rows, args.ops)
    elif args.what == "memory":
        rows = memory_(chosen, args.by, 1 if args.quick else 4, args.threads)
        text = memory_table(rows)
    else:
        rows = [calls(w) for w in chosen]
        text = "\n\n".join(f"{row['workload']}: {row['text']}" for row in rows)
    print(*(machine_lines(record) if "machine" in record else []), text, sep="\n")
    if args.json:
        write_json(record | {"quick": args.quick, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
