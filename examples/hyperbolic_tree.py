"""A balanced tree in the hyperbolic plane: its path lengths as distances, drawn in the Poincaré disc."""

import math

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle

import ghor

H2 = ghor.Hyperbolic()


def tree(depth: int, branching: int) -> tuple[list[int], torch.Tensor]:
    """The parents of the nodes, and the lengths of the paths between all of them."""
    parents, level = [0], [0]
    for _ in range(depth):
        children = [(len(parents) + i, p) for i, p in enumerate(p for p in level for _ in range(branching))]
        parents += [p for _, p in children]
        level = [c for c, _ in children]
    D = torch.zeros(len(parents), len(parents), dtype=torch.float64)
    for i in range(1, len(parents)):
        D[i, :i] = D[:i, i] = D[parents[i], :i] + 1
    return parents, D


def fan(depth: torch.Tensor) -> torch.Tensor:
    """The start: distance 1/2 for each edge, the nodes of a level around the root in their order."""
    angle = torch.zeros_like(depth)
    for level in depth.unique():
        own = depth == level
        angle[own] = (torch.arange(int(own.sum()), dtype=depth.dtype) + 0.5) * (2 * math.pi / int(own.sum()))
    r = (depth / 2).sinh()
    return H2.project(torch.stack([r, r * angle.cos(), r * angle.sin()], -1))


def arc(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The geodesic from a to b in the disc: (30, 2)."""
    t = torch.linspace(0, 1, 30, dtype=a.dtype)[:, None]
    return H2.to_ball(H2.exp(a.expand(30, -1), t * H2.log(a, b)))


def run(steps: int = 400, depth: int = 5, branching: int = 2) -> Figure:
    """Adam on the mean of (d/D - 1)^2 over all pairs."""
    parents, D = tree(depth, branching)
    Y = torch.nn.Parameter(fan(D[0]))
    opt = ghor.optim.Adam([Y], space=H2, lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    i, j = torch.triu_indices(*D.shape, offset=1)
    for step in range(steps):
        off = H2.dist(Y[i], Y[j]) / D[i, j] - 1
        opt.zero_grad()
        off.square().mean().backward()
        opt.step()
        schedule.step()
        if step in (0, steps - 1):
            print(f"step {step}: mean distortion {float(off.detach().abs().mean()):.3f}")

    root = Y.detach()[:1].expand_as(Y)
    E = H2.E(Y.shape, dtype=Y.dtype)
    W = H2.transport(root, H2.log(root, E), H2.log(root, Y.detach()))
    points = H2.exp(E, W)  # moved so that the root is at the origin
    figure = Figure(figsize=(5, 5))
    axes = figure.add_axes(
        (0, 0, 1, 1), aspect="equal", xlim=(-1.02, 1.02), ylim=(-1.02, 1.02), frameon=False
    )
    axes.add_patch(Circle((0, 0), 1, fill=False, color="0.7"))
    for child in range(1, len(parents)):
        axes.plot(*arc(points[parents[child]], points[child]).T, color="0.6", linewidth=1, zorder=1)
    depths = D[0] / D[0].max()
    axes.scatter(*H2.to_ball(points).T, c=depths, s=30 - 20 * depths, zorder=2)
    return figure


if __name__ == "__main__":
    run().savefig("hyperbolic_tree.png")
