"""What catches a run: the first steps of geometric Adam on MNIST with seed 1, and with weights held fixed.

    python benchmarks/first_steps.py --json first_steps.json     # a minute; reads MNIST
    python benchmarks/first_steps.py --delta-inside 30 --json delta_inside.json    # ten minutes

After each step: the loss of its batch, and the class that the network prefers over the test images with its
mean probability. Then the same with the Stiefel weights held fixed, and with all others held fixed.

The second command asks whether runs are caught because delta is outside the root in m/(sqrt(v) + delta), as
in torch and in the authors' code. It trains the first epoch of so many seeds as the paper writes Adam,
m/sqrt(v + delta), and counts the runs whose last loss is above 1.32, as `ghor caught` does.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import stamp, write_json
from torch import Tensor

import ghor
from ghor_lab.caught import ABOVE
from ghor_lab.config import Config
from ghor_lab.tasks import Mnist

STEPS, STILL = 15, 1e-12  # a learning rate that moves nothing in float32
HELD: dict[str, dict[str, Any]] = {
    "none": {},
    "Stiefel weights": {"manifold_lr": STILL},
    "all others": {"lr": STILL, "manifold_lr": 1e-3},
}


@torch.no_grad()
def favourite(task: Mnist, images: Tensor) -> tuple[int, float]:
    """The class with the largest mean probability over the images, and that probability."""
    mean = task.model(images).double().mean(0)
    return int(mean.argmax()), float(mean.max())


def first_steps(seed: int, held: dict[str, Any], steps: int) -> list[dict[str, float]]:
    config = Config("mnist", "geometric-adam", (seed,), 1, batch_size=2048, **{"lr": 1e-3, **held})
    task = Mnist(config)
    task.read()
    opt = task.optimizer()
    images = task.pixels(task.images.test_images[:2000])
    found = []
    for batch in islice(task.batches(1), steps):
        opt.zero_grad()
        loss = task.losses(batch)
        opt.step()
        label, probability = favourite(task, images)
        found.append({"loss_before": loss[0], "class": label, "probability": probability})
    return found


def last_loss_with_delta_inside(seed: int) -> float:
    """The loss of the last step of the first epoch."""
    config = Config("mnist", "geometric-adam", (seed,), 1, batch_size=2048, lr=1e-3)
    task = Mnist(config)
    task.read()
    opt = ghor.optim.PaperAdam(task.model, lr=config.lr, betas=config.betas, delta=config.eps)
    last = 0.0
    for batch in task.batches(1):
        opt.zero_grad()
        loss = task.losses(batch)
        opt.step()
        last = loss[0]
    return last


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS + 1)
    parser.add_argument("--delta-inside", type=int, metavar="SEEDS", help="count caught runs, see above")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if args.delta_inside:
        losses = []
        for seed in range(args.delta_inside):
            losses.append(last_loss_with_delta_inside(seed))
            print(f"seed {seed}: {losses[-1]:.3f}{' caught' if losses[-1] > ABOVE else ''}", flush=True)
        print(f"caught: {sum(loss > ABOVE for loss in losses)} of {len(losses)}")
        if args.json:
            write_json({"benchmark": "delta inside the root", **stamp(), "last_loss": losses}, args.json)
        return
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
