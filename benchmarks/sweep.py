"""Learning rates: every published Stiefel method on the paper's transformer, a few epochs at seven rates
each.

    python benchmarks/sweep.py sweep                           # into the folder sweep; hours on two cores
    python benchmarks/sweep.py sweep --only "ghor|kong|li-2"   # a regular expression on keys of methods
    python benchmarks/sweep.py sweep --epochs 1 --steps 2      # does everything run? (not for quoting)
    python benchmarks/sweep.py sweep --draw                    # only the table, from records

Each run is added to runs.json when it is over, and not done again, so an interrupted sweep continues.
The method trains the 336 weights on St(7, 49) at the rate of the sweep; torch's fused Adam trains all others
at 1e-3, the same in every run. All start from the same seed. Adams have betas 0.9, 0.99, as in the paper.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import commit, write_json
from rich.console import Console

import ghor
from ghor_lab.config import Config
from ghor_lab.data import MNIST, load
from ghor_lab.methods import METHODS, Method
from ghor_lab.tables import Table, number
from ghor_lab.tasks import Mnist
from ghor_lab.train import machine

RATES = tuple(float(f"{10 ** (e / 2):.2g}") for e in range(-8, -1))  # 1e-4, 3.2e-4, ..., 0.1
# Larger rates if lr is the length of a whole step, or multiplies a gradient, and is not the size of every
# entry of a step.
FACTORS = {"li-1": 10.0, "li-2": 10.0, "scalar": 10.0, "muon": 10.0}
OPTIONS: dict[str, dict[str, Any]] = {"li-1": {}, "muon": {"steps": 10}}
ADAM = {"betas": (0.9, 0.99)}
RUNS = "runs.json"
SETTING = ("seed", "epochs", "steps", "batch")
NEAR = 1.1  # a rate is good if its loss is at most this many times the method's best
CONTENDERS = tuple(m for m in METHODS if m.stiefel or m.key == "soft")


# -- one run -------------------------------------------------------------------------------------------------


def run(
    method: Method, lr: float, seed: int, epochs: int, steps: int | None, batch: int, threads: int
) -> dict[str, Any]:
    """Train; returns losses by epoch, test accuracy, drift, and milliseconds of the method's steps."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    task = Mnist(Config("mnist", "geometric-adam", (seed,), epochs, lr, batch, threads=threads))
    task.read()
    on, off = [], []
    for group in ghor.param_groups(task.model):
        (off if group["space"] == ghor.Euclidean() else on).extend(p for _, p in group["params"])
    opts = (
        method.make(on, lr=lr, **OPTIONS.get(method.key, ADAM)),
        torch.optim.Adam(off, lr=1e-3, fused=True, **ADAM),
    )
    losses, ms, began = [], [], time.perf_counter()
    for epoch in range(1, epochs + 1):
        values = []
        for images in islice(task.batches(epoch), steps):
            for opt in opts:
                opt.zero_grad()
            loss = task.losses(images)
            opts[1].step()
            t0 = time.perf_counter()
            try:
                opts[0].step()
            except torch.linalg.LinAlgError:  # some published methods decompose what is no longer finite
                loss = [math.nan]
            ms.append(1e3 * (time.perf_counter() - t0))
            values += loss
            if not math.isfinite(loss[0]):
                break
        losses.append(sum(values) / len(values))
        if not math.isfinite(losses[-1]):
            break
    finite = math.isfinite(losses[-1])
    return {
        "losses": losses if finite else [x if math.isfinite(x) else None for x in losses],
        **(task.evaluate() if finite else {}),
        "step_ms": median(ms),
        "seconds": time.perf_counter() - began,
    }


def sweep(folder: Path, options: argparse.Namespace, console: Console) -> None:
    """Do all runs that have no record yet."""
    setting = {k: getattr(options, k) for k in SETTING}
    folder.mkdir(parents=True, exist_ok=True)
    load(MNIST)
    done = kept(folder)
    for rate in options.rates:  # so that an unfinished sweep has every method
        for method in CONTENDERS:
            lr = rate * FACTORS.get(method.key, 1.0)
            found: dict[str, Any] = {"benchmark": "sweep", "method": method.key, "lr": lr, **setting}
            there = any(all(r[k] == v for k, v in found.items()) for r in done)
            if there or not re.search(options.only, method.key):
                continue
            found |= run(method, lr, **setting, threads=options.threads)
            found |= {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "commit": commit(),
                "machine": machine(),
            }
            done.append(found)
            write_json(done, folder / RUNS)
            console.print(f"{method.key:8} lr {lr:<8.2g} losses {found['losses']}, {found['seconds']:.0f} s")


# -- from the records ----------------------------------------------------------------------------------------


def kept(folder: Path) -> list[dict[str, Any]]:
    """The runs that were recorded."""
    path = folder / RUNS
    return json.loads(path.read_text()) if path.exists() else []


def records(folder: Path, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The records of these settings by method, in the order of the rates."""
    found = defaultdict(list)
    for r in kept(folder):
        if all(r[k] == getattr(options, k) for k in SETTING):
            found[r["method"]].append(r)
    return {m.key: sorted(found[m.key], key=lambda r: r["lr"]) for m in CONTENDERS if m.key in found}


def final(r: dict[str, Any]) -> float:
    return math.inf if r["losses"][-1] is None else r["losses"][-1]


def table(runs: dict[str, list[dict[str, Any]]]) -> Table:
    """The best loss, how many rates are nearly as good, drift at the best rate, and time."""
    titles, rows = {m.key: m.title for m in METHODS}, []
    for key, rs in runs.items():
        best = min(rs, key=final)
        good = sum(final(r) <= NEAR * final(best) for r in rs)
        drift = best["drift"][0] if best.get("drift") else None
        accuracy = best["test_accuracy"][0] if "test_accuracy" in best else None
        time_ = median(r["step_ms"] for r in rs)
        numbers = (number(final(best), ".4f"), number(best["lr"], ".2g"), f"{good} of {len(rs)}")
        others = (number(accuracy, ".2f"), number(drift, ".1e"), number(time_, ".1f"))
        rows.append((titles[key], *numbers, *others))
    headings = ("method", "best loss", "at lr", f"rates within {NEAR:g} x", "test accuracy %", "drift")
    title = "Loss of the last epoch, by method, at its best learning rate"
    return Table(title, (*headings, "ms a step"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="regular expression on the keys of methods")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="at most so many an epoch")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draw", action="store_true", help="nothing is trained")
    options = parser.parse_args(arguments)
    console = Console()
    if not options.draw:
        sweep(options.folder, options, console)
    runs = records(options.folder, options)
    if not runs:
        raise SystemExit(f"{options.folder} has no records of these settings; leave --draw out to make some")
    console.width = max(console.width, 120)
    made = table(runs)
    console.print(made.rich(console.width))
    keys = [column.key for column in made.columns]
    write_json(
        [dict(zip(keys, row.cells, strict=True)) for row in made.rows], options.folder / "summary.json"
    )


if __name__ == "__main__":
    main()
