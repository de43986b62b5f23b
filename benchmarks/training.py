"""The parts of a training step of the paper's transformer: forward and backward, and the optimizer.

    python benchmarks/training.py                         # 2 threads, 12 rounds after 2 of warm-up
    python benchmarks/training.py --rounds 1 --warmup 1   # does everything run? (not for quoting)
    python benchmarks/training.py --json training.json

Batches of 2048 random images. The optimizers of the comparison take turns within a round, in shuffled order.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from pathlib import Path
from typing import Any

import torch
from common import machine_lines, quartiles, stamp, write_json

from ghor_lab.config import PAPER, Config
from ghor_lab.tasks import Mnist
from ghor_lab.tasks.mnist import CLASSES

BATCH = 2048


def step(task: Mnist, optimizer: torch.optim.Optimizer, batch: Any) -> tuple[float, float]:
    """Milliseconds of automatic differentiation, and of the optimizer."""
    begun = time.perf_counter()
    optimizer.zero_grad()
    task.losses(batch)
    between = time.perf_counter()
    optimizer.step()
    return 1e3 * (between - begun), 1e3 * (time.perf_counter() - between)


def measure(threads: int, rounds: int, warmup: int) -> list[dict[str, Any]]:
    """Quartiles of all optimizers, in interleaved rounds without garbage collection."""
    generator = torch.Generator().manual_seed(1)
    batch = (
        torch.rand(BATCH, 28, 28, generator=generator),
        torch.randint(CLASSES, (BATCH,), generator=generator),
    )
    tasks = {name: Mnist(Config("mnist", name, (0,), 1, 1e-3, BATCH, threads=threads)) for name in PAPER}
    pairs = {name: (task, task.optimizer()) for name, task in tasks.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    order = random.Random(0)
    gc.disable()
    for _ in range(warmup + rounds):
        for name in order.sample(list(pairs), len(pairs)):
            times[name].append(step(*pairs[name], batch))
    rows = []
    for name, found in times.items():
        ad, own = zip(*found[warmup:], strict=True)
        share = [100 * b / (a + b) for a, b in zip(ad, own, strict=True)]
        row = {"name": name, "ad": quartiles(ad), "step": quartiles(own), "share_percent": quartiles(share)}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: 2)")
    parser.add_argument("--rounds", type=int, default=12, help="timed rounds (default: 12)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before those (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # as in training
    record = {"benchmark": "training", **stamp()}
    rows = measure(args.threads, args.rounds, args.warmup)
    print(f"{'medians':20} {'forward, backward':>18} {'optimizer':>10} ms   share")
    for r in rows:
        ad, own, share = (r[key][1] for key in ("ad", "step", "share_percent"))
        print(f"{r['name']:20} {ad:18.1f} {own:10.2f}    {share:5.1f} %")
    print(*machine_lines(record), sep="\n")
    if args.json:
        write_json(record | {"transformer": rows}, args.json)


if __name__ == "__main__":
    main()
