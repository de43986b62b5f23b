"""Five optimizers on a Procrustes problem over the Stiefel manifold, with a picture.

    min ||X Y - Z||^2   over Y in St(7, 49),   Z = X Y*,

so the smallest loss, 0, is known. X has fewer rows than columns: without the constraint, most of the
solutions are far from the manifold. Its columns differ in size by a factor of ten. A few problems are solved
at once, as one batch; the figure shows the loss and the distance from the manifold, step by step.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import ghor

try:
    import matplotlib
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError as error:
    sys.exit(f"this example needs {error.name}: in a clone of ghor, pip install . ./lab")

matplotlib.use("Agg")
import matplotlib.pyplot as plt

N, n, ROWS = 49, 7, 40
SPACE = ghor.Stiefel()

# Learning rates, and colours of the Okabe-Ito palette, which colour-blind readers can tell apart.
OPTIMIZERS: dict[str, tuple[Callable[[Tensor], torch.optim.Optimizer], str]] = {
    "SGD, momentum 0.9": (lambda Y: ghor.optim.SGD([Y], space=SPACE, lr=0.2, momentum=0.9), "#000000"),
    "Adagrad": (lambda Y: ghor.optim.Adagrad([Y], space=SPACE, lr=0.1), "#009E73"),
    "RMSprop": (lambda Y: ghor.optim.RMSprop([Y], space=SPACE, lr=0.01), "#E69F00"),
    "Adam": (lambda Y: ghor.optim.Adam([Y], space=SPACE, lr=0.02), "#0072B2"),
    "Rprop": (lambda Y: ghor.optim.Rprop([Y], space=SPACE, lr=0.01), "#CC79A7"),
}
# The same problem without the constraint: what the right panel would look like.
REFERENCE = "Adam, unconstrained"
OPTIMIZERS[REFERENCE] = (lambda Y: torch.optim.Adam([Y], lr=0.02), "#999999")


@dataclass(frozen=True)
class Run:
    """The result of one optimizer: one row per step, one column per problem."""

    loss: Tensor  # (steps + 1, problems)
    distance: Tensor  # (steps + 1, problems), in float64
    seconds: float


def problems(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """X (count, ROWS, N), Z = X Y* with ||Z|| = 1, and a start Y (count, N, n)."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(0, -1, N)
    X = torch.randn(count, ROWS, N, generator=generator) * scales
    Z = X @ SPACE.random(count, N, n, generator=generator)
    size = torch.linalg.matrix_norm(Z)[:, None, None]
    return X / size, Z / size, SPACE.random(count, N, n, generator=generator)


def train(
    make: Callable[[Tensor], torch.optim.Optimizer],
    data: tuple[Tensor, ...],
    steps: int,
    tick: Callable[[], None],
) -> Run:
    """Solve all problems of `data` at once, with a cosine schedule down to 0."""
    X, Z, start = data
    Y = torch.nn.Parameter(start.clone())
    optimizer = make(Y)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses, distances = [], []
    seconds = 0.0
    for step in range(steps + 1):
        began = time.perf_counter()
        loss = (X @ Y - Z).square().sum((-2, -1))  # (problems,)
        losses.append(loss.detach())
        if step < steps:
            optimizer.zero_grad()
            loss.sum().backward()
            optimizer.step()
            schedule.step()
        seconds += time.perf_counter() - began
        distances.append(
            SPACE.residual(Y.detach().double())
        )  # float64: the ruler must be finer than what it measures
        tick()
    return Run(torch.stack(losses), torch.stack(distances), seconds)


def draw(runs: dict[str, Run], out: Path) -> None:
    """Loss on the left, distance on the right.

    The file is written under another name first, so nobody sees half a picture.
    """
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for name, run in runs.items():
        colour, style = OPTIMIZERS[name][1], ":" if name == REFERENCE else "-"
        steps = torch.arange(1, len(run.loss) + 1)
        loss = run.loss.clamp_min(1e-16)
        if name != REFERENCE:
            left.fill_between(steps, loss.amin(1), loss.amax(1), color=colour, alpha=0.15, linewidth=0)
        left.plot(steps, loss.median(1).values, color=colour, linewidth=1.8, linestyle=style, label=name)
        right.plot(steps, run.distance.amax(1), color=colour, linewidth=1.2, linestyle=style)
    count = next(iter(runs.values())).loss.shape[1]
    left.set_title("loss  $\\|XY - Z\\|^2$,  smallest possible: 0")
    left.legend(frameon=False, title=f"median and range of {count} problems", loc="lower left")
    right.set_title("distance from the manifold  $\\|Y^T Y - I\\|_F$,  largest")
    eps = torch.finfo(torch.float32).eps
    right.axhline(eps, color="grey", linewidth=1, linestyle="--")
    right.annotate("float32 eps", (1, eps), textcoords="offset points", xytext=(2, 4), color="grey")
    right.set_ylim(bottom=eps / 10)
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="step")
        axes.grid(alpha=0.25)
    figure.suptitle(f"Procrustes on St({n}, {N}), float32, torch.optim rules lifted by ghor")
    unfinished = out.with_name(f".{out.name}.{os.getpid()}.unfinished")
    try:
        figure.savefig(unfinished, dpi=150, format="png")
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("out/procrustes.png"), help="the picture (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=1500, help="steps of each optimizer (default: %(default)s)"
    )
    parser.add_argument(
        "--problems", type=int, default=8, help="problems in the batch (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the data (default: %(default)s)")
    args = parser.parse_args()
    if args.steps < 1 or args.problems < 1:
        parser.error("--steps and --problems must be at least 1")
    if args.out.is_dir():
        parser.error(f"--out {args.out} is a folder; name a file, for example {args.out / 'procrustes.png'}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(
        1
    )  # such small matrices gain nothing from more threads, and lose much on a busy machine

    console = Console()
    data = problems(args.problems, args.seed)
    runs: dict[str, Run] = {}
    columns = (TextColumn("{task.description:<19}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for name, (make, _) in OPTIMIZERS.items():
            task = progress.add_task(name, total=args.steps + 1)
            runs[name] = train(make, data, args.steps, lambda task=task: progress.advance(task))
    draw(runs, args.out)

    table = Table("optimizer", title=f"{args.problems} problems on St({n}, {N}), {args.steps} steps, float32")
    for heading in ("loss - optimum (median)", "largest distance", "seconds"):
        table.add_column(heading, justify="right")
    for name, run in runs.items():
        table.add_row(name, f"{run.loss[-1].median():.1e}", f"{run.distance.max():.1e}", f"{run.seconds:.1f}")
    console.print(table)
    console.print(f"picture: {args.out.resolve()}", soft_wrap=True)


if __name__ == "__main__":
    main()
