"""Needles in a disc, on positions and orientations: they keep apart and align, also with the wall."""

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle

import ghor

PLACES = ghor.PositionsOrientations()


def energy(Y: torch.Tensor) -> torch.Tensor:
    """Energy of needles (M, 2, 3), where n and -n are the same: repulsion, alignment, the wall, the plane."""
    x, n = Y[:, 0], Y[:, 1]
    i, j = torch.triu_indices(len(Y), len(Y), offset=1)
    apart = ((x[i] - x[j]).square().sum(-1) + 1e-6).sqrt()
    aligned = (n[i] * n[j]).sum(-1).square()
    r = (x[:, :2].square().sum(-1) + 1e-12).sqrt()
    along_wall = (x[:, :2] * n[:, :2]).sum(-1).square() / r.square()
    wall = 100 * (r - 0.95).clamp_min(0).square() + torch.sigmoid((r - 0.85) / 0.03) * along_wall
    flat = x[:, 2].square() + n[:, 2].square()
    return (torch.exp(-apart / 0.2) * (2 - aligned)).sum() + 10 * (wall + flat).sum()


def run(steps: int = 500, count: int = 150) -> Figure:
    """Adam from random positions and directions."""
    gen = torch.Generator().manual_seed(1)
    start = PLACES.random(count, 2, 3, generator=gen)
    start[:, 0] *= 0.25
    Y = torch.nn.Parameter(start.clone())
    opt = ghor.optim.Adam([Y], space=PLACES, lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for step in range(steps):
        loss = energy(Y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        if step in (0, steps - 1):
            print(
                f"step {step}: energy {loss.item():.1f}, {float(PLACES.residual(Y.detach()).max()):.1e} off "
                "the space"
            )
    figure = Figure(figsize=(5, 2.7), layout="constrained")
    for k, (title, needles) in enumerate((("start", start), (f"{steps} steps of Adam", Y.detach()))):
        axes = figure.add_subplot(1, 2, k + 1, aspect="equal", title=title, xticks=[], yticks=[])
        axes.add_patch(Circle((0, 0), 1.03, fill=False, color="0.6"))
        x, n = needles[:, 0, :2], 0.055 * needles[:, 1, :2]
        for a, b in zip(x - n, x + n, strict=True):
            axes.plot(*zip(a.tolist(), b.tolist(), strict=True), color="C0", linewidth=1.5)
    return figure


if __name__ == "__main__":
    run().savefig("needle_field.png")
