"""Poses on SE(3): a robust mean of rotations with outliers, and a small pose graph from noisy relative measurements."""

import argparse
import sys
from pathlib import Path

import torch

import ghor

SE, SO = ghor.SpecialEuclidean(), ghor.SpecialOrthogonal()
F64 = torch.float64


def minimise(loss, Y: torch.Tensor, space: ghor.Space, steps: int, lr: float = 0.05) -> torch.Tensor:
    """Adam with a cosine schedule from Y."""
    weight = torch.nn.Parameter(Y.clone())
    opt = ghor.optim.Adam([weight], space=space, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for _ in range(steps):
        opt.zero_grad()
        loss(weight).backward()
        opt.step()
        schedule.step()
    return weight.detach()


def noisy(Y: torch.Tensor, space: ghor.Space, size: float, gen: torch.Generator) -> torch.Tensor:
    """Y, moved at random by about `size`."""
    return space.exp(Y, size * space.tangent(Y, torch.randn(Y.shape, generator=gen, dtype=F64)))


def rotations(gen: torch.Generator) -> tuple[float, float]:
    """Errors, in degrees, of the mean and of the geodesic median of 40 rotations, 10 more being anything."""
    true = SO.random(3, 3, generator=gen, dtype=F64)
    seen = torch.cat([noisy(true.expand(40, 3, 3), SO, 0.1, gen), SO.random(10, 3, 3, generator=gen, dtype=F64)])
    chord = lambda Y: (Y - seen).square().sum((-2, -1))  # noqa: E731
    mean = minimise(lambda Y: chord(Y).mean(), seen[0], SO, 200)
    median = minimise(lambda Y: (chord(Y) + 1e-6).sqrt().mean(), mean, SO, 300)
    return tuple(float(SO.dist(Y, true).rad2deg()) for Y in (mean, median))


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


def graph(gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """True poses, those of odometry alone, and those of the graph with 20 loop closures, 3 of them wrong."""
    true = circle(30)
    i = torch.cat([torch.arange(29), torch.randint(30, (20,), generator=gen)])
    j = torch.cat([torch.arange(1, 30), (i[29:] + 10 + torch.arange(20) % 10) % 30])
    seen = noisy(between(true[i], true[j]), SE, 0.05, gen)
    seen[-3:] = SE.random(3, 3, 4, generator=gen, dtype=F64)
    odometry = [true[0]]
    for k in range(29):
        odometry.append(after(odometry[-1], seen[k]))
    start = torch.stack(odometry)

    def loss(Y: torch.Tensor) -> torch.Tensor:
        Y = torch.cat([true[:1], Y[1:]])  # the first is known
        off = (between(Y[i], Y[j]) - seen).square().sum((-2, -1))
        return (off / (off + 0.1)).sum()  # Geman and McClure: what is far off does not count

    return true, start, minimise(loss, start, SE, 1000, 0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/poses.svg"), help="default: %(default)s")
    args = parser.parse_args()
    gen = torch.Generator().manual_seed(0)
    mean, median = rotations(gen)
    print(f"rotations, 20 % outliers: the mean is {mean:.1f} degrees off, the median {median:.1f}")
    true, odometry, solved = graph(gen)
    for name, Y in (("odometry", odometry), ("pose graph", solved)):
        print(f"{name}: positions {float((Y - true)[..., 3].norm(dim=-1).mean()):.2f} off in the mean")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit("the picture needs matplotlib: pip install 'ghor[lab]'")
    figure = Figure(figsize=(6, 6))
    axes = figure.add_subplot(aspect="equal")
    for name, Y, style in (("true", true, "k-"), ("odometry", odometry, "C1--"), ("pose graph", solved, "C0o-")):
        axes.plot(Y[:, 0, 3], Y[:, 1, 3], style, label=name, markersize=3)
    axes.quiver(*solved[:, :2, 3].T, *solved[:, :2, 0].T, color="C0", width=0.003)
    axes.legend()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out)
    print(f"picture: {args.out.resolve()}")


if __name__ == "__main__":
    main()
