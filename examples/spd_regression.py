"""Covariance regression: a geodesic P(t) = exp(M, t V) of SPD through noisy covariances, against a line."""

import torch
from matplotlib.figure import Figure

import ghor

SPD = ghor.SPD()
F64 = torch.float64


def geodesic(M: torch.Tensor, V: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """exp(M, t V), V symmetric: (len(t), 2, 2)."""
    return SPD.exp(M.expand(len(t), 2, 2), t.view(-1, 1, 1) * SPD.tangent(M, V))


def ellipse(P: torch.Tensor) -> torch.Tensor:
    """{x: x^T P^-1 x = 1}, (50, 2)."""
    angle = torch.linspace(0, 2 * torch.pi, 50, dtype=F64)
    return torch.stack([angle.cos(), angle.sin()], -1) @ torch.linalg.cholesky(P).mT


def run(steps: int = 300) -> Figure:
    """Adam on the mean of dist(P(t_i), P_i)^2: M on SPD, V a plain weight."""
    gen = torch.Generator().manual_seed(0)
    M0, V0 = torch.tensor([[[1.0, 0.2], [0.2, 0.3]], [[-1.2, 0.6], [0.6, 0.5]]], dtype=F64)
    t = torch.linspace(-1, 1, 25, dtype=F64)
    true = geodesic(M0, V0, t)
    L, W = torch.linalg.cholesky(true), 0.15 * torch.randn(25, 2, 2, generator=gen, dtype=F64)
    seen = SPD.exp(true, L @ (W + W.mT) @ L.mT)

    M, V = torch.nn.Parameter(torch.eye(2, dtype=F64)), torch.nn.Parameter(torch.zeros(2, 2, dtype=F64))
    opt = ghor.optim.Adam([{"params": [M], "space": SPD}, {"params": [V]}], lr=0.05)
    for _ in range(steps):
        opt.zero_grad()
        SPD.dist(geodesic(M, V, t), seen).square().mean().backward()
        opt.step()
    fit = geodesic(M.detach(), V.detach(), t)
    line = seen.mean(0) + t.view(-1, 1, 1) * (t.view(-1, 1, 1) * seen).sum(0) / t.square().sum()

    definite = torch.linalg.eigvalsh(line)[:, 0] > 0
    print(f"geodesic: {float(SPD.dist(fit, true).mean()):.3f} off the truth on average")
    there = SPD.dist(line[definite], true[definite]).mean()
    print(f"line: {float(there):.3f} where it is positive definite, {int(definite.sum())} of 25")
    figure = Figure(figsize=(3.6, 2.9), layout="constrained")
    rows = figure.subplots(3, 1, sharex=True, sharey=True)
    ways = (
        ("observed", seen, "#8a8a8a"),
        ("geodesic of SPD", fit, "#3f51b5"),
        ("straight line", line, "#e08214"),
    )
    for axes, (name, P, colour) in zip(rows, ways, strict=True):
        for k in range(0, 25, 3):
            if P is not line or definite[k]:
                axes.plot(*(ellipse(P[k]) * 0.5 + torch.tensor([6 * float(t[k]), 0])).T, color=colour)
            else:
                axes.plot(6 * float(t[k]), 0, "x", color=colour)
        axes.set_title(name, loc="left", color=colour, fontsize=9)
        axes.set(aspect="equal", yticks=[], xticks=[-6, 0, 6], xticklabels=["-1", "0", "1"])
        axes.spines[["top", "right", "left"]].set_visible(False)
    rows[-1].set_title("straight line (x: not a covariance)", loc="left", color="#e08214", fontsize=9)
    rows[-1].set_xlabel("t")
    return figure


if __name__ == "__main__":
    run().savefig("spd_regression.svg")
