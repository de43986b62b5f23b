"""Averaging rotations with outliers: the mean and the median on SO(3), as outliers are added."""

import torch
from matplotlib.figure import Figure

import ghor

SO = ghor.SpecialOrthogonal()
F64 = torch.float64


def median(points: torch.Tensor, steps: int) -> torch.Tensor:
    """The medians of points (K, M, 3, 3), all M at once, by Adam: sums of distances, not of their squares."""
    Y = torch.nn.Parameter(SO.project(points.mean(0)))
    opt = ghor.optim.Adam([Y], space=SO, lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for _ in range(steps):
        opt.zero_grad()
        ((Y - points).square().sum((-2, -1)) + 1e-6).sqrt().sum().backward()
        opt.step()
        schedule.step()
    return Y.detach()


def run(steps: int = 200) -> Figure:
    """50 rotations, 20 times; noise of about 6 degrees."""
    gen = torch.Generator().manual_seed(0)
    true = SO.random(20, 3, 3, generator=gen, dtype=F64)
    noise = SO.tangent(true, torch.randn(50, 20, 3, 3, generator=gen, dtype=F64))
    seen = SO.exp(true.expand(50, 20, 3, 3), 0.1 * noise)
    wrong = SO.random(50, 20, 3, 3, generator=gen, dtype=F64)
    shares = (0, 10, 20, 30, 40)
    errors: dict[str, list[float]] = {"mean (chordal)": [], "median": []}
    for share in shares:
        points = torch.where((torch.arange(50) < share / 2).view(50, 1, 1, 1), wrong, seen)
        for name, Y in (("mean (chordal)", SO.project(points.mean(0))), ("median", median(points, steps))):
            errors[name].append(float(SO.dist(true, Y).rad2deg().mean()))
        print(
            f"{share} % outliers: "
            + ", ".join(f"{name} {e[-1]:.1f} degrees off" for name, e in errors.items())
        )
    figure = Figure(figsize=(4, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="outliers, %", ylabel="error, degrees")
    for (name, values), color in zip(errors.items(), ("#8a8a8a", "#3f51b5"), strict=True):
        axes.plot(shares, values, "o-", label=name, color=color)
    axes.legend()
    return figure


if __name__ == "__main__":
    run().savefig("rotation_mean.png")
