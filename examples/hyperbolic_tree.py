"""A balanced tree in the hyperbolic plane: its path lengths as distances, drawn in the Poincare disc."""

import argparse
import math
import sys
from pathlib import Path

import torch

import ghor


def tree(depth: int, branching: int) -> tuple[list[int], torch.Tensor]:
    """The parents of the nodes, and the lengths of the paths between all of them."""
    parents, level = [0], [0]
    for _ in range(depth):
        children = [(len(parents) + i, p) for i, p in enumerate(p for p in level for _ in range(branching))]
        parents += [p for _, p in children]
        level = [c for c, _ in children]
    D = torch.zeros(len(parents), len(parents))
    for i in range(1, len(parents)):
        D[i, :i] = D[:i, i] = D[parents[i], :i] + 1
    return parents, D


def fan(parents: list[int]) -> torch.Tensor:
    """Where to start: at distance 1/2 for each edge, children in the sector of their parent."""
    children: list[list[int]] = [[] for _ in parents]
    for i, p in enumerate(parents[1:], 1):
        children[p].append(i)
    x, depth = torch.zeros(len(parents), 3, dtype=torch.float64), [0] * len(parents)
    sector = {0: (0.0, 2 * math.pi)}
    for i, own in enumerate(children):
        low, high = sector[i]
        angle = torch.tensor((low + high) / 2)
        depth[i] = depth[parents[i]] + (i > 0)
        x[i, 1:] = math.sinh(depth[i] / 2) * torch.stack([angle.cos(), angle.sin()])
        width = (high - low) / max(1, len(own))
        sector |= {c: (low + k * width, low + (k + 1) * width) for k, c in enumerate(own)}
    return x


def embed(Y: torch.Tensor, D: torch.Tensor, steps: int, scale: float) -> tuple[torch.Tensor, list[float]]:
    """Points whose distances are `scale` times D, by Adam on mean (d/D - 1)^2; and the mean distortions on the way."""
    space = ghor.Hyperbolic()
    Y = torch.nn.Parameter(space.project(Y))
    opt = ghor.optim.Adam([Y], space=space, lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    i, j = torch.triu_indices(*D.shape, offset=1)
    losses = []
    for _ in range(steps):
        off = space.dist(Y[i], Y[j]) / (scale * D[i, j]) - 1
        opt.zero_grad()
        off.square().mean().backward()
        opt.step()
        schedule.step()
        losses.append(float(off.detach().abs().mean()))
    return Y.detach(), losses


def arc(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The geodesic from a to b in the disc: (30, 2)."""
    space, t = ghor.Hyperbolic(), torch.linspace(0, 1, 30, dtype=a.dtype)[:, None]
    return space.to_ball(space.exp(a.expand(30, -1), t * space.log(a, b)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/hyperbolic_tree.svg"), help="default: %(default)s")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--branching", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--scale", type=float, default=1.0, help="length of an edge, default: %(default)s")
    args = parser.parse_args()
    parents, D = tree(args.depth, args.branching)
    Y, losses = embed(fan(parents), D.double(), args.steps, args.scale)
    for step in (0, args.steps // 4, args.steps - 1):
        print(f"step {step}: mean distortion {losses[step]:.3f}")
    print(f"{len(Y)} points, {float(ghor.Hyperbolic().distance(Y).max()):.1e} off the hyperboloid")
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Circle
    except ImportError:
        sys.exit("the picture needs matplotlib: pip install 'ghor[lab]'")
    figure = Figure(figsize=(6, 6))
    axes = figure.add_axes((0, 0, 1, 1), aspect="equal", xlim=(-1.02, 1.02), ylim=(-1.02, 1.02), frameon=False)
    axes.add_patch(Circle((0, 0), 1, fill=False, color="0.7"))
    Y = centred(Y)
    for i in range(1, len(parents)):
        axes.plot(*arc(Y[parents[i]], Y[i]).T, color="0.6", linewidth=1, zorder=1)
    depth = D[0] / D[0].max()
    axes.scatter(*ghor.Hyperbolic().to_ball(Y).T, c=depth, s=30 - 20 * depth, zorder=2)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out)
    print(f"picture: {args.out.resolve()}")


def centred(Y: torch.Tensor) -> torch.Tensor:
    """Y moved by the motion that takes the root to the origin."""
    space = ghor.Hyperbolic()
    root = Y[:1]
    W = space.global_rep(space.frame(root.expand_as(Y)), space.log(root.expand_as(Y), Y))
    E = space.E(Y.shape, dtype=Y.dtype)
    return space.exp(E, W)


if __name__ == "__main__":
    main()
