"""The README's second picture: the distance from the manifold during training.

The first, the time of a step, is drawn from records by docs/build/records.py.
"""

import torch
from matplotlib.figure import Figure

import ghor
from ghor_lab.baselines import SoftConstraintAdam

COLORS = {"ghor": "#3f51b5", "Adam": "#8a8a8a", "Adam, penalty": "#e08214"}


def off(Y: torch.Tensor) -> float:
    """The largest ||Y^T Y - I|| of a batch, in float64."""
    Y = Y.detach().double()
    return float(torch.linalg.matrix_norm(Y.mT @ Y - torch.eye(Y.shape[-1])).max())


def distances(steps: int) -> dict[str, list[float]]:
    """Sixteen weights on St(7, 49) follow noisy targets, float32: {optimizer: distance after each step}."""
    rules = {
        "ghor": lambda Y: ghor.optim.Adam([Y], space=ghor.Stiefel(), lr=1e-3),
        "Adam, penalty": lambda Y: SoftConstraintAdam([Y], lr=1e-3),
        "Adam": lambda Y: torch.optim.Adam([Y], lr=1e-3),
    }
    curves = {}
    for name, rule in rules.items():
        noise = torch.Generator().manual_seed(0)
        start, target = (ghor.Stiefel().random(16, 49, 7, generator=noise) for _ in range(2))
        Y = torch.nn.Parameter(start)
        optimizer, curves[name] = rule(Y), []
        for _ in range(steps):
            Y.grad = Y.detach() - target + torch.randn(16, 49, 7, generator=noise)
            optimizer.step()
            curves[name].append(off(Y))
    return curves


def run(steps: int = 2000) -> Figure:
    """Draw the figure."""
    figure = Figure(figsize=(3.5, 2.7), layout="constrained")
    axes = figure.subplots()
    for name, curve in distances(steps).items():
        print(f"{name}: {curve[-1]:.1e} off after {steps} steps")
        axes.plot(curve[:: max(1, steps // 200)], color=COLORS[name], linewidth=1.5)
        end = {"textcoords": "offset points", "ha": "right", "color": COLORS[name], "fontsize": 9}
        above = {"Adam": 5, "Adam, penalty": -11, "ghor": 11}[name]
        axes.annotate(name, (steps / max(1, steps // 200), curve[-1]), (0, above), **end)
    figure.suptitle("Distance from the manifold, float32", fontsize=9)
    axes.set(yscale="log", ylim=(3e-8, 5), xlabel="step", ylabel="||YᵀY - I||")
    axes.set_xticks([0, 100, 200], ["0", str(steps // 2), str(steps)])
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    run().savefig("overview-drift.svg")
