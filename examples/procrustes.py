"""Five optimizers on a Procrustes problem over the Stiefel manifold: loss, and distance from the manifold.

    min ||X Y - Z||^2   over Y in St(7, 49),   Z = X Y*,

so the smallest loss, 0, is known. X has fewer rows than columns: without the constraint, most of the
solutions are far from the manifold. Its columns differ in size by a factor of ten. A few problems are solved
at once, as one batch.
"""

import torch
from matplotlib.figure import Figure
from torch import Tensor

import ghor

N, n, ROWS = 49, 7, 40
SPACE = ghor.Stiefel()
OPTIMIZERS = {  # with colours that colour-blind readers can tell apart
    "SGD, momentum 0.9": (lambda Y: ghor.optim.SGD([Y], space=SPACE, lr=0.2, momentum=0.9), "#000000"),
    "Adagrad": (lambda Y: ghor.optim.Adagrad([Y], space=SPACE, lr=0.1), "#009E73"),
    "RMSprop": (lambda Y: ghor.optim.RMSprop([Y], space=SPACE, lr=0.01), "#E69F00"),
    "Adam": (lambda Y: ghor.optim.Adam([Y], space=SPACE, lr=0.02), "#0072B2"),
    "Rprop": (lambda Y: ghor.optim.Rprop([Y], space=SPACE, lr=0.01), "#CC79A7"),
    "Adam, unconstrained": (lambda Y: torch.optim.Adam([Y], lr=0.02), "#999999"),
}


def problems(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """X (count, ROWS, N), Z = X Y* with ||Z|| = 1, and a start Y (count, N, n)."""
    gen = torch.Generator().manual_seed(0)
    X = torch.randn(count, ROWS, N, generator=gen) * torch.logspace(0, -1, N)
    Z = X @ SPACE.random(count, N, n, generator=gen)
    size = torch.linalg.matrix_norm(Z, keepdim=True)
    return X / size, Z / size, SPACE.random(count, N, n, generator=gen)


def run(steps: int = 1500, count: int = 8) -> Figure:
    """Solve all problems at once, with a cosine schedule down to 0."""
    X, Z, start = problems(count)
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, (make, colour) in OPTIMIZERS.items():
        Y = torch.nn.Parameter(start.clone())
        optimizer = make(Y)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        losses, distances = [], []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (X @ Y - Z).square().sum((-2, -1))  # one for each problem
            loss.sum().backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach().clamp_min(1e-16))
            distances.append(
                SPACE.residual(Y.detach().double()).max()
            )  # the ruler is finer than what it measures
        loss, distance = torch.stack(losses), torch.stack(distances)
        print(f"{name}: loss {float(loss[-1].median()):.1e}, {float(distance.max()):.1e} off at most")
        left.plot(range(1, steps + 1), loss.median(1).values, color=colour, label=name)
        left.fill_between(
            range(1, steps + 1), loss.amin(1), loss.amax(1), color=colour, alpha=0.15, linewidth=0
        )
        right.plot(range(1, steps + 1), distance, color=colour)
    left.set_title(f"loss, median and range of {count} problems")
    left.legend(frameon=False, loc="lower left")
    right.set_title("distance from the manifold  $\\|Y^T Y - I\\|_F$,  largest")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="step")
    return figure


if __name__ == "__main__":
    run().savefig("procrustes.png")
