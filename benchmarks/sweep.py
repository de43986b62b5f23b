"""Learning rates: every published Stiefel method on the paper's transformer, at seven rates each.

    python benchmarks/sweep.py sweep                           # into the folder sweep; hours on two cores
    python benchmarks/sweep.py sweep --only "ghor|kong|li-2"   # a regular expression on keys of methods
    python benchmarks/sweep.py sweep --epochs 1 --steps 2      # does everything run? (not for quoting)

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
from itertools import islice, product
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from common import stamp, write_json

import ghor
from ghor_lab.config import Config
from ghor_lab.methods import METHODS, Method
from ghor_lab.tasks import Mnist

RATES = tuple(float(f"{10 ** (e / 2):.2g}") for e in range(-8, -1))  # 1e-4, 3.2e-4, ..., 0.1
# Larger rates if lr is the length of a whole step, or multiplies a gradient, and is not the size of every
# entry of a step.
FACTORS = {"li-1": 10.0, "li-2": 10.0, "scalar": 10.0, "muon": 10.0}
OPTIONS: dict[str, dict[str, Any]] = {"li-1": {}, "muon": {"steps": 10}}
ADAM = {"betas": (0.9, 0.99)}


def run(method: Method, lr: float, epochs: int, steps: int | None) -> dict[str, Any]:
    """Train; losses by epoch, test accuracy, drift, and milliseconds of the method's steps."""
    task = Mnist(Config("mnist", "geometric-adam", (0,), epochs, lr, 2048, threads=torch.get_num_threads()))
    task.read()
    on, off = [], []
    for group in ghor.param_groups(task.model):
        (off if group["space"] == ghor.Euclidean() else on).extend(p for _, p in group["params"])
    own = method.make(on, lr=lr, **OPTIONS.get(method.key, ADAM))
    others = torch.optim.Adam(off, lr=1e-3, fused=True, **ADAM)
    losses: list[float] = []
    ms: list[float] = []
    for epoch in range(1, epochs + 1):
        values: list[float] = []
        for images in islice(task.batches(epoch), steps):
            own.zero_grad()
            others.zero_grad()
            values += task.losses(images)
            others.step()
            begun = time.perf_counter()
            try:
                own.step()
            except torch.linalg.LinAlgError:  # some published methods decompose what is no longer finite
                values.append(math.nan)
            ms.append(1e3 * (time.perf_counter() - begun))
            if not math.isfinite(values[-1]):
                return {"losses": [*losses, None], "step_ms": median(ms)}
        losses.append(mean(values))
    return {"losses": losses, "step_ms": median(ms), **task.evaluate()}


def final(r: dict[str, Any]) -> float:
    return math.inf if r["losses"][-1] is None else float(r["losses"][-1])


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method: its best rate, and what it has there."""
    rows = []
    for method in METHODS:
        of = [r for r in runs if r["method"] == method.key]
        if of:
            best = min(of, key=final)
            row = {"method": method.title, "loss": final(best), "lr": best["lr"]}
            row |= {
                key: best.get(name, [None])[0]
                for key, name in (("accuracy", "test_accuracy"), ("drift",) * 2)
            }
            rows.append(row | {"ms": median(r["step_ms"] for r in of)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="regular expression on the keys of methods")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="at most so many an epoch")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # as in training
    args.folder.mkdir(parents=True, exist_ok=True)
    file = args.folder / "runs.json"
    runs: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    methods = [m for m in METHODS if (m.stiefel or m.key == "soft") and re.search(args.only, m.key)]
    for rate, method in product(args.rates, methods):  # so that an unfinished sweep has every method
        lr = rate * FACTORS.get(method.key, 1.0)
        key = {"method": method.key, "lr": lr, "epochs": args.epochs, "steps": args.steps}
        if not any(all(r[k] == v for k, v in key.items()) for r in runs):
            runs.append(key | run(method, lr, args.epochs, args.steps) | stamp())
            write_json(runs, file)
            print(f"{method.key:8} lr {lr:<8.2g} losses {runs[-1]['losses']}", flush=True)
    rows = summary([r for r in runs if (r["epochs"], r["steps"]) == (args.epochs, args.steps)])
    print(f"\n{'loss':>8} {'lr':>8} {'test %':>7} {'drift':>8} {'ms':>6}  method, at its best rate")
    for r in rows:
        shown = (
            f"{r[k]:{spec}}" if r[k] is not None else "-"
            for k, spec in (("accuracy", "7.2f"), ("drift", "8.1e"))
        )
        print(f"{r['loss']:8.4f} {r['lr']:8.2g} {' '.join(shown)} {r['ms']:6.1f}  {r['method']}")
    write_json(rows, args.folder / "summary.json")


if __name__ == "__main__":
    main()
