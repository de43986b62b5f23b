"""The parts of a training step of the paper's two networks, and how far it is from the machine's limit.

    python benchmarks/training.py                         # 2 threads, 12 rounds and 2 of warm-up; two minutes
    python benchmarks/training.py --rounds 1 --warmup 1   # does everything run? (not for quoting)
    python benchmarks/training.py --json training.json

The transformer at batch 2048, on random images: forward and backward, and the step of each optimizer of the
comparison. The pendulum's autoencoder: ten networks at once at batch 256, one thread, on random points.
All contenders take turns within a round, in shuffled order. Subnormal numbers are flushed to zero, as in
training.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import commit, machine, machine_lines, quartiles, write_json
from rich.console import Console
from rich.progress import Progress

from ghor_lab import paper
from ghor_lab.config import PAPER, Config
from ghor_lab.tables import Table, number
from ghor_lab.tasks import Mnist, Pendulum
from ghor_lab.tasks.mnist import CLASSES

BATCH, TOKENS, DIM, BLOCKS = 2048, 16, 49, 16
POINTS, SEEDS, STEPS = 256, 10, 10  # STEPS: of a visit
BAR, BAR_GFLOPS, BAR_GBS = 0.5, 200.0, 10.0  # seconds, on a machine of these rates
FIRST = "geometric-adam"
PARTS = ("ad", "step")


# -- contenders ----------------------------------------------------------------------------------------------


class Contender:
    """A task with its optimizer; `step()` adds the milliseconds of one training step to `ms`."""

    def __init__(self, name: str, task: Any, batch: Any, threads: int, steps: int) -> None:
        self.name, self.task, self.batch, self.threads, self.steps = name, task, batch, threads, steps
        self.opt = task.optimizer()
        self.ms: dict[str, list[float]] = {part: [] for part in PARTS}

    def visit(self) -> None:
        """Take `steps` steps and record their mean."""
        torch.set_num_threads(self.threads)
        total = dict.fromkeys(PARTS, 0.0)
        for _ in range(self.steps):
            for part, ms in zip(PARTS, self.step(), strict=True):
                total[part] += ms
        for part in PARTS:
            self.ms[part].append(total[part] / self.steps)

    def step(self) -> tuple[float, float]:
        """Milliseconds of automatic differentiation and of the optimizer."""
        t0 = time.perf_counter()
        self.opt.zero_grad()
        self.task.losses(self.batch)
        t1 = time.perf_counter()
        self.opt.step()
        t2 = time.perf_counter()
        return 1e3 * (t1 - t0), 1e3 * (t2 - t1)

    def summary(self) -> dict[str, Any]:
        rounds = list(zip(*self.ms.values(), strict=True))
        return {
            "name": self.name,
            **{part: quartiles(values) for part, values in self.ms.items()},
            "share_percent": quartiles([100 * step / (ad + step) for ad, step in rounds]),
            "rounds_ms": self.ms,
        }


# Random images and points: nothing is downloaded, and times do not depend on them.


def transformers(threads: int) -> Iterator[Contender]:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(BATCH, 28, 28, generator=generator)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    for name in PAPER:
        config = Config("mnist", name, (0,), 1, 1e-3, BATCH, threads=threads)
        yield Contender(name, Mnist(config), (images, labels), threads, steps=1)


def autoencoders() -> Iterator[Contender]:
    z = torch.randn(SEEDS, 4, POINTS, generator=torch.Generator().manual_seed(1))
    for name in PAPER[:-1]:  # without standard-adam
        config = Config("pendulum", name, tuple(range(SEEDS)), 1, 1e-3, POINTS)
        yield Contender(name, Pendulum(config), z, 1, steps=STEPS)


def measure(contenders: list[Contender], rounds: int, warmup: int, tell: Callable[[], object]) -> None:
    """Interleaved rounds without garbage collection; `tell` is called after each visit."""
    order = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for round_ in range(warmup + rounds):
            for c in order.sample(contenders, len(contenders)):
                c.visit()
                tell()
            if round_ == warmup - 1:
                for c in contenders:
                    c.ms = {part: [] for part in PARTS}
    finally:
        gc.enable()


# -- the limit -----------------------------------------------------------------------------------------------


def flops() -> dict[str, float]:
    """Products of one forward and backward pass of the transformer, a multiply-add counted as two.

    Backward is twice forward: a product for the gradient of either factor.
    """
    columns = BATCH * TOKENS
    forward = {
        "projections": BLOCKS * 2 * (3 * DIM) * DIM * columns,
        "feed_forward": BLOCKS * 2 * DIM * DIM * columns,
        "attention": BLOCKS * 2 * (2 * TOKENS) * DIM * columns,  # scores, and values
        "head": 2 * CLASSES * DIM * BATCH,
    }
    return {part: 3.0 * count for part, count in forward.items()}


def limits(rates: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The time of the products alone at the measured rate, and the bar, scaled to this machine twice."""
    products, copies = BAR_GFLOPS / rates["matmul_gflops"], BAR_GBS / rates["copy_gbs"]
    total = sum(flops().values())
    floor = total / rates["matmul_gflops"] / 1e9
    bars = {"max": BAR * max(products, copies), "mean": BAR * (products + copies) / 2}
    return {
        "seconds": seconds,
        "flops": flops(),
        "floor_seconds": floor,
        "over_floor": seconds / floor,
        "slower_products": products,
        "slower_copies": copies,
        "bar_seconds": bars,
        "met": {how: seconds <= bar for how, bar in bars.items()},
    }


# -- the record ----------------------------------------------------------------------------------------------


def make_record(console: Console, threads: int, rounds: int, warmup: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # as in training
    before = machine()
    parts = {"transformer": list(transformers(threads)), "pendulum": list(autoencoders())}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for what, contenders in parts.items():
            task = bar.add_task(what, total=len(contenders) * (warmup + rounds))
            measure(contenders, rounds, warmup, partial(bar.advance, task))
    torch.set_num_threads(threads)
    after = machine()
    rates = {key: max(before[key], after[key]) for key in ("matmul_gflops", "copy_gbs")}
    rows = {what: [c.summary() for c in contenders] for what, contenders in parts.items()}
    ad = {row["name"]: row["rounds_ms"]["ad"] for row in rows["transformer"]}
    return {
        "benchmark": "training",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": before | rates,
        "rates": [{key: m[key] for key in rates} for m in (before, after)],
        "settings": {
            "batch": BATCH,
            "points": POINTS,
            "seeds": SEEDS,
            "threads": threads,
            "rounds": rounds,
            "warmup": warmup,
            "flush_subnormals": True,
        },
        **rows,
        "limits": limits(rates, quartiles(ad[FIRST])[1] / 1e3),
    }


# -- the report ----------------------------------------------------------------------------------------------


def table(record: dict[str, Any], what: str) -> Table:
    """Medians; the paper's share beside ours."""
    s = record["settings"]
    title = {
        "transformer": f"Transformer, batch {s['batch']}, {s['threads']} threads: ms a step",
        "pendulum": f"Pendulum, {s['seeds']} networks at once, batch {s['points']}, 1 thread: ms a step",
    }[what]
    experiment = {"transformer": "mnist"}.get(what, what)
    rows = []
    for row in record[what]:
        theirs, _ = paper.reported(experiment, row["name"], "share_percent") or (None, None)
        numbers = [number(row[key][1], ".2f") for key in (*PARTS, "share_percent")]
        rows.append((row["name"], *numbers, number(theirs, ".1f")))
    headings = ("configuration", "AD", "optimizer", "geometric share (%)", "paper (%)")
    return Table(title, headings, rows)


def report(record: dict[str, Any]) -> list[str]:
    """The rest of the record in words; measures nothing."""
    low, s = record["limits"], record["settings"]
    count = sum(low["flops"].values())
    verdict = {True: "met", False: "NOT MET"}
    minutes, _ = paper.REPORTED["pendulum"][FIRST]["minutes"]
    theirs = minutes * 60e3 / (39 * paper.EPOCHS["pendulum"])  # 39 steps an epoch
    lines = [
        f"Medians of {s['rounds']} interleaved rounds after {s['warmup']} of warm-up; subnormal numbers are "
        "flushed to zero, as in training. Geometric share: optimizer / (AD + optimizer).",
        f"The transformer's {count / 1e9:.1f} GFlop of products "
        f"({', '.join(f'{k} {v / 1e9:.1f}' for k, v in low['flops'].items())}; backward counted as twice "
        f"forward) take {low['floor_seconds']:.3f} s at the rate of a 2048 x 2048 product. Measured: "
        f"{low['seconds']:.3f} s, {low['over_floor']:.1f} times that.",
    ]
    if s["batch"] == 2048:
        lines.append(
            f"Bar: {BAR:g} s where a product reaches {BAR_GFLOPS:.0f} GFlop/s and a copy {BAR_GBS:.0f} GB/s "
            f"(read and written). This machine is {low['slower_products']:.2f} times slower in products, "
            f"{low['slower_copies']:.2f} times in copies. Bar times the larger: "
            f"{low['bar_seconds']['max']:.3f} s, {verdict[low['met']['max']]}; times their mean: "
            f"{low['bar_seconds']['mean']:.3f} s, {verdict[low['met']['mean']]}."
        )
    lines.append(
        f"Pendulum in the paper: {theirs:.1f} ms a step of geometric Adam, one network, everything included."
    )
    for key, unit in (("matmul_gflops", "GFlop/s"), ("copy_gbs", "GB/s")):
        values = [rates[key] for rates in record["rates"]]
        if max(values) > 1.2 * min(values):
            lines.append(
                f"The machine changed meanwhile: {values[0]:.1f}, then {values[1]:.1f} {unit}: not to be "
                "quoted."
            )
    return [*lines, *machine_lines(record)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2, help="of torch, for the transformer (default: 2)")
    parser.add_argument("--rounds", type=int, default=12, help="timed rounds (default: 12)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before those (default: 2)")
    parser.add_argument(
        "--json", "--out", type=Path, metavar="PATH", help="write the whole record, raw times included"
    )
    args = parser.parse_args()
    if min(args.threads, args.rounds, args.warmup) < 1:
        parser.error("--threads, --rounds and --warmup must be at least 1")
    console = Console()
    record = make_record(Console(stderr=True), args.threads, args.rounds, args.warmup)
    for what in ("transformer", "pendulum"):
        console.print(table(record, what).rich(console.width), "")
    for line in report(record):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if args.json:
        write_json(record, args.json)


if __name__ == "__main__":
    main()
