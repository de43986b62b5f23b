"""Muon in g^hor against manifold Muon (dual ascent) and Adam, on a small network: loss by step and time.

    python benchmarks/muon.py --json muon.json           # a minute or two
    python benchmarks/muon.py --quick                                    # does everything run?

A student relu(x W1) relu(. W2) w with W1 on St(16, 32), used as its transpose, and W2 on O(32), learns a
teacher of the same form from fresh samples, 256 per step. The Euclidean head w has torch's AdamW at 1e-2 in
all runs. Every method runs with four learning rates and shows the best: the smallest mean loss over the last
tenth of the steps and three seeds. The time is the median of the step on W1 and W2 alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import commit, machine, machine_lines, write_json
from torch import Tensor, nn

import ghor
from ghor_lab.baselines import ManifoldMuon

SPACE = ghor.Stiefel()
RATES = (3e-3, 1e-2, 3e-2, 0.1)
METHODS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "ghor Muon": lambda p, lr: ghor.optim.Muon(p, lr=lr, space=SPACE),
    "ghor Muon, no momentum": lambda p, lr: ghor.optim.Muon(p, lr=lr, momentum=0.0, space=SPACE),
    "ghor Adam": lambda p, lr: ghor.optim.Adam(p, lr=lr, space=SPACE),
    "manifold Muon": lambda p, lr: ManifoldMuon(p, lr=lr),
}


class Net(nn.Module):
    """(B, 16) -> (B)."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.W1 = nn.Parameter(SPACE.random(16, 32, generator=generator))
        self.W2 = nn.Parameter(SPACE.random(32, 32, generator=generator))
        self.w = nn.Parameter(torch.randn(32, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.relu(torch.relu(x @ self.W1) @ self.W2) @ self.w
        return out


def train(method: str, lr: float, seed: int, steps: int) -> tuple[list[float], list[float]]:
    """Losses, and the seconds of each step on the manifolds."""
    gen = torch.Generator().manual_seed(seed)
    teacher, net = Net(gen), Net(gen)
    opt, head = METHODS[method]([net.W1, net.W2], lr), torch.optim.AdamW([net.w], lr=1e-2)
    losses, seconds = [], []
    for _ in range(steps):
        x = torch.randn(256, 16, generator=gen)
        with torch.no_grad():
            y = teacher(x)
        net.zero_grad()
        loss = (net(x) - y).square().mean() / y.square().mean()
        loss.backward()
        begun = time.perf_counter()
        opt.step()
        seconds.append(time.perf_counter() - begun)
        head.step()
        losses.append(float(loss.detach()))
    return losses, seconds


def run(method: str, seeds: int, steps: int) -> dict[str, Any]:
    """The best rate of a method."""
    best: dict[str, Any] = {}
    for lr in RATES:
        runs = [train(method, lr, seed, steps) for seed in range(seeds)]
        curve = [sum(values) / seeds for values in zip(*(losses for losses, _ in runs), strict=True)]
        tail = curve[-max(1, steps // 10) :]
        row = {
            "method": method,
            "lr": lr,
            "loss": sum(tail) / len(tail),
            "ms": 1e3 * median(s for _, seconds in runs for s in seconds),
            "curve": [round(x, 5) for x in curve[:: max(1, steps // 100)]],
        }
        print(f"{method}, lr {lr:g}: loss {row['loss']:.4g}, {row['ms']:.2f} ms a step", flush=True)
        best = row if not best or row["loss"] < best["loss"] else best
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="5 steps, one seed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds, steps = (1, 5) if args.quick else (3, 200)
    record = {
        "benchmark": "muon",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "seeds": seeds,
        "steps": steps,
        "rows": [run(method, seeds, steps) for method in METHODS],
    }
    print("\n".join(machine_lines(record)))
    slow = record["rows"][-1]
    for row in record["rows"]:
        print(
            f"{row['method']:<24}lr {row['lr']:<8g}loss {row['loss']:<10.4g}{row['ms']:>8.2f} ms"
            f"{slow['ms'] / row['ms']:>8.1f} x faster than {slow['method']}"
        )
    if args.json:
        write_json(record, args.json)


if __name__ == "__main__":
    main()
