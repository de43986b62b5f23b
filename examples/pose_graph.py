"""A pose graph on SE(3): poses from noisy relative measurements, with three wrong loop closures."""

import torch
from matplotlib.figure import Figure

import ghor

SE = ghor.SpecialEuclidean()
F64 = torch.float64


def between(Y: torch.Tensor, Z: torch.Tensor) -> torch.Tensor:
    """Y^-1 Z of poses [R, t]."""
    R = Y[..., :3].mT
    return torch.cat([R @ Z[..., :3], R @ (Z[..., 3:] - Y[..., 3:])], -1)


def after(Y: torch.Tensor, Z: torch.Tensor) -> torch.Tensor:
    """Y Z."""
    return torch.cat([Y[..., :3] @ Z[..., :3], Y[..., :3] @ Z[..., 3:] + Y[..., 3:]], -1)


def circle(count: int) -> torch.Tensor:
    """Poses along a circle of radius 5, looking ahead: (count, 3, 4)."""
    angle = torch.arange(count, dtype=F64) * (2 * torch.pi / count)
    c, s, o, one = angle.cos(), angle.sin(), 0 * angle, 0 * angle + 1
    rows = [-s, -c, o, 5 * c, c, -s, o, 5 * s, o, o, one, 0.5 * (2 * angle).sin()]
    return torch.stack(rows, -1).unflatten(-1, (3, 4))


def run(steps: int = 1000) -> Figure:
    """Adam on the loss of Geman and McClure, starting from odometry alone."""
    gen = torch.Generator().manual_seed(0)
    true = circle(30)
    i = torch.cat([torch.arange(29), torch.randint(30, (20,), generator=gen)])
    j = torch.cat([torch.arange(1, 30), (i[29:] + 10 + torch.arange(20) % 10) % 30])
    exact = between(true[i], true[j])
    seen = SE.exp(exact, 0.05 * SE.tangent(exact, torch.randn(49, 3, 4, generator=gen, dtype=F64)))
    seen[-3:] = SE.random(3, 3, 4, generator=gen, dtype=F64)
    odometry = [true[0]]
    for k in range(29):
        odometry.append(after(odometry[-1], seen[k]))

    Y = torch.nn.Parameter(torch.stack(odometry))
    opt = ghor.optim.Adam([Y], space=SE, lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for _ in range(steps):
        poses = torch.cat([true[:1], Y[1:]])  # the first is known
        off = (between(poses[i], poses[j]) - seen).square().sum((-2, -1))
        opt.zero_grad()
        (off / (off + 0.1)).sum().backward()  # measurements that are far off do not count
        opt.step()
        schedule.step()

    ways = {"true": true, "odometry": torch.stack(odometry), "pose graph": Y.detach()}
    figure = Figure(figsize=(4, 4), layout="constrained")
    axes = figure.add_subplot(aspect="equal")
    for (name, way), style in zip(ways.items(), ("k-", "C1--", "C0o-"), strict=True):
        print(f"{name}: positions {float((way - true)[..., 3].norm(dim=-1).mean()):.2f} off on average")
        axes.plot(way[:, 0, 3], way[:, 1, 3], style, label=name, markersize=3)
    axes.quiver(*ways["pose graph"][:, :2, 3].T, *ways["pose graph"][:, :2, 0].T, color="C0", width=0.003)
    axes.legend()
    return figure


if __name__ == "__main__":
    run().savefig("pose_graph.png")
