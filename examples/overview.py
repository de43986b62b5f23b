"""The README's picture: the cost of a step, and the distance from the manifold during training.

python examples/overview.py --out overview.png    # times: results/step/step.json, from benchmarks/step.py
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import ghor
from ghor.baselines import SoftConstraintAdam

TIMES = Path(__file__).parents[1] / "results" / "step" / "step.json"
BARS = {
    "ghor Adam, Cayley": "ghor",
    "torch Adam, fused": "torch Adam, unconstrained",
    "geoopt RiemannianAdam, Euclidean": "geoopt, Euclidean metric",
    "geoopt RiemannianAdam, canonical": "geoopt, canonical metric",
    "geotorch orthogonal, cayley": "geotorch",
    "torch orthogonal, cayley": "torch orthogonal",
}
COLORS = {"ghor": "#3f51b5", "Adam": "#999999", "Adam with a penalty": "#e08214"}


def off(Y):
    """The largest ||Y^T Y - I|| of a batch, in float64."""
    Y = Y.detach().double()
    return float(torch.linalg.matrix_norm(Y.mT @ Y - torch.eye(Y.shape[-1])).max())


def distances(steps):
    """Sixteen weights on St(7, 49) follow noisy targets, float32: {optimizer: distance after each step}."""
    rules = {
        "ghor": lambda Y: ghor.optim.Adam([Y], space=ghor.Stiefel(), lr=1e-3),
        "Adam with a penalty": lambda Y: SoftConstraintAdam([Y], lr=1e-3),
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


def run(steps=2000):
    """Draw the figure."""
    rows = json.loads(TIMES.read_text())["contenders"]
    ms = {row["name"]: row["ms"][1] for row in rows if row["layout"] == "336 tensors"}
    bars = {label: ms[name] for name, label in BARS.items() if name in ms}
    names, times = list(bars)[::-1], list(bars.values())[::-1]

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    drawn = left.barh(names, times, color=["#3f51b5" if name == "ghor" else "#bbbbbb" for name in names])
    left.bar_label(drawn, [f" {t:.1f} ms" for t in times])
    left.set(
        xscale="log",
        xlim=(1, 400),
        title="One Adam step, 336 weights on St(7, 49)",
        xlabel="milliseconds, 2 threads",
    )
    print(", ".join(f"{name} {t:.1f} ms" for name, t in bars.items()))
    for name, curve in distances(steps).items():
        right.plot(curve, label=name, color=COLORS[name])
    right.set(
        yscale="log", title="Distance from the manifold, float32", xlabel="step", ylabel=r"$\|Y^T Y - I\|$"
    )
    right.legend(loc="center right")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    run().savefig("overview.png")
