"""What catches a run: the first steps of geometric Adam on MNIST with seed 1, and with weights held fixed.

    python benchmarks/first_steps.py --json first_steps.json     # a minute; reads MNIST

After each step: the loss of its batch, and the class that the network prefers over the test images with its
mean probability. Then the same with the Stiefel weights held fixed, and with all others held fixed.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import stamp, write_json
from torch import Tensor

from ghor_lab.config import Config
from ghor_lab.tasks import Classification
from ghor_lab.train import optimizer_of

STEPS, STILL = 15, 1e-12  # a learning rate that moves nothing in float32
HELD: dict[str, dict[str, Any]] = {
    "none": {},
    "Stiefel weights": {"manifold_lr": STILL},
    "all others": {"lr": STILL, "manifold_lr": 1e-3},
}


@torch.no_grad()
def favourite(task: Classification, images: Tensor) -> tuple[int, float]:
    """The class with the largest mean probability over the images, and that probability."""
    mean = task.model(images).double().mean(0)
    return int(mean.argmax()), float(mean.max())


def first_steps(seed: int, held: dict[str, Any], steps: int) -> list[dict[str, float]]:
    config = Config("mnist", "geometric-adam", (seed,), 1, batch_size=2048, **{"lr": 1e-3, **held})
    task = Classification(config)
    opt = optimizer_of(config, task.model)
    images = task._pixels(task.images.test_images[:2000])
    found = []
    for batch in islice(task.batches(1), steps):
        opt.zero_grad()
        objective, loss = task.loss(batch)
        objective.backward()
        opt.step()
        label, probability = favourite(task, images)
        found.append({"loss_before": loss[0], "class": label, "probability": probability})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS + 1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    found = {name: first_steps(args.seed, held, args.steps) for name, held in HELD.items()}
    for name, lines in found.items():
        print(f"held fixed: {name}")
        for step, line in enumerate(lines):
            print(
                f"  loss after {step:2} steps {line['loss_before']:.4f}; one step later class {line['class']}"
                f" has probability {line['probability']:.3f}"
            )
    if args.json:
        write_json({"benchmark": "first steps", **stamp(), "seed": args.seed, "held": found}, args.json)


if __name__ == "__main__":
    main()
