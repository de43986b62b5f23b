"""What the spaces promise in floating point, at full length: drift, seeds, targets, invariance, means.

    python benchmarks/spaces.py [--steps 10000] [--seeds 200] [--out lab/results/spaces/spaces.txt]

A row is a figure and its bound; the tests run the same with fewer steps.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import ghor
from ghor import Space

F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128
SE, PO = ghor.SpecialEuclidean(), ghor.PositionsOrientations()
SYMPLECTIC = (ghor.SymplecticStiefel(), ghor.SymplecticGrassmann())

Row = tuple[str, Space, str, float, float]  # what, where, dtype, figure, bound


def kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def randn(*shape: int, gen: torch.Generator, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=gen, dtype=dtype)


def descend(space: Space, Y: Tensor, grad: Callable[[Tensor], Tensor], steps: int, lr: float) -> float:
    """Run Adam; returns the largest distance from the space, infinite if anything is not finite."""
    weight, worst = nn.Parameter(Y), 0.0
    opt = ghor.optim.Adam([weight], space=space, lr=lr)
    for i in range(steps):
        weight.grad = grad(weight)
        opt.step()
        if i % 10 == 9 or i == steps - 1:
            now = weight.detach()
            worst = max(
                worst, float(space.residual(now).max()) if bool(torch.isfinite(now).all()) else float("inf")
            )
    return worst


def reduction(space: Space, X: Tensor) -> Callable[[Tensor], Tensor]:
    """The gradient of |X - U U+ X|^2, summed over a batch: symplectic model reduction of the data X."""

    def grad(U: Tensor) -> Tensor:
        loss = (X - U @ (space.star(U) @ X)).square().mean((-2, -1)).sum()
        return torch.autograd.grad(loss, U)[0]

    return grad


def symplectic(args: argparse.Namespace, gen: torch.Generator) -> Iterator[Row]:
    sizes = torch.linspace(1, 0.01, 40, dtype=F64)[:, None]
    for space in SYMPLECTIC:
        U = space.random(1000, 40, 20, generator=gen, dtype=F64)
        yield "1,000 points drawn, 40 x 20", space, "float64", float(space.residual(U).max()), 1e-13
        for dtype, bound in ((F64, 1e-10), (F32, 1e-4)):
            U, X = (
                space.random(40, 20, generator=gen, dtype=dtype),
                (sizes * randn(40, 60, gen=gen)).to(dtype),
            )
            off = descend(space, U, reduction(space, X), args.steps, 1e-2)
            yield f"Adam, {args.steps:,} steps, 40 x 20", space, kind(dtype), off, bound
            U = space.random(args.seeds, 40, 20, generator=gen, dtype=dtype)
            X = (sizes * randn(args.seeds, 40, 60, gen=gen)).to(dtype)
            off = descend(space, U, reduction(space, X), 200, 1e-2)
            yield f"Adam, {args.seeds} seeds of 200 steps: finite, off by", space, kind(dtype), off, bound


def unitary(args: argparse.Namespace, gen: torch.Generator) -> Iterator[Row]:
    for space, shape in ((ghor.Unitary(), (12, 12)), (ghor.Stiefel(), (20, 6))):
        for dtype, bound in ((C128, 1e-13), (C64, 2e-6)):
            Y, T = space.random(*shape, generator=gen, dtype=dtype), randn(*shape, gen=gen, dtype=dtype)

            def noisy(Y: Tensor, T: Tensor = T) -> Tensor:
                return Y.detach() - T + randn(*T.shape, gen=gen, dtype=T.dtype)

            off = descend(space, Y, noisy, args.steps, 1e-2)
            yield f"Adam, {args.steps:,} steps, {shape[0]} x {shape[1]}", space, kind(dtype), off, bound


def targets(args: argparse.Namespace, gen: torch.Generator) -> Iterator[Row]:
    for space, shape in ((SE, (3, 4)), (PO, (2, 3))):
        Y, target = (space.random(1000, *shape, generator=gen, dtype=F64) for _ in range(2))
        Y = nn.Parameter(Y)
        opt = ghor.optim.Adam([Y], space=space, lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 600)
        for _ in range(600):
            Y.grad = (Y - target).detach()
            opt.step()
            schedule.step()
        yield "Adam, 1,000 targets found to", space, "float64", float((Y.detach() - target).abs().max()), 1e-6


def moved(g: Tensor, Y: Tensor) -> Tensor:
    """g Y for poses [R, t] or for (t, n)."""
    R, t = g[:, :3], g[:, 3:]
    if Y.shape[-1] == 4:
        return torch.cat([R @ Y[..., :3], R @ Y[..., 3:] + t], -1)
    return torch.stack([Y[..., 0, :] @ R.mT + t[:, 0], Y[..., 1, :] @ R.mT], -2)


def trajectory(
    opt: Callable[[list[nn.Parameter]], torch.optim.Optimizer], Y: Tensor, target: Tensor
) -> Tensor:
    weight, way = nn.Parameter(Y.clone()), []
    rule = opt([weight])
    for _ in range(100):
        weight.grad = (weight - target).detach()
        rule.step()
        way.append(weight.detach().clone())
    return torch.stack(way)


def invariance(args: argparse.Namespace, gen: torch.Generator) -> Iterator[Row]:
    """Moving target and start moves the trajectory: |Y - target|^2 is invariant under rigid motions."""
    cases = (
        ("Adam", SE, (3, 4), lambda p: ghor.optim.Adam(p, space=SE, lr=0.05)),
        ("momentum", PO, (2, 3), lambda p: ghor.optim.SGD(p, space=PO, lr=0.02, momentum=0.9)),
    )
    for name, space, shape, opt in cases:
        Y, target = (space.random(100, *shape, generator=gen, dtype=F64) for _ in range(2))
        g = SE.random(3, 4, generator=gen, dtype=F64)
        off = moved(g, trajectory(opt, Y, target)) - trajectory(opt, moved(g, Y), moved(g, target))
        yield f"{name}, 100 steps in a moved world: off by", space, "float64", float(off.abs().max()), 1e-10


def means(args: argparse.Namespace, gen: torch.Generator) -> Iterator[Row]:
    for space, shape in (
        (ghor.SPD(), (20, 20)),
        (ghor.SpecialOrthogonal(), (3, 3)),
        (SE, (3, 4)),
        (PO, (2, 3)),
        (ghor.Hyperbolic(), (6,)),
        (ghor.Sphere(), (5,)),
    ):
        Y = space.random(*shape, generator=gen, dtype=F64).expand(50, *shape)
        V = space.tangent(Y, randn(50, *shape, gen=gen))
        length = torch.rand(50, generator=gen, dtype=F64) / space.norm(Y, V)
        points = space.exp(Y, V * length.view(-1, *[1] * len(shape)))
        if space in (ghor.SPD(), ghor.Hyperbolic()):
            points = space.random(50, *shape, generator=gen, dtype=F64)
        M = space.mean(points)
        off = space.norm(M, space.log(M.expand_as(points), points).mean(0))
        yield (
            f"mean of 50 points, {' x '.join(map(str, shape))}: |mean log|",
            space,
            "float64",
            float(off),
            1e-10,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--out", type=Path, help="a file for the table, too")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    lines, missed = [], 0

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text("\n".join(lines) + "\n")

    say(f"{'':<54}{'space':<24}{'dtype':<12}{'figure':>9}{'bound':>9}{'':>5}{'seconds':>9}")
    for part in (targets, invariance, means, unitary, symplectic):
        begun = time.perf_counter()
        for what, space, dtype, figure, bound in part(args, torch.Generator().manual_seed(0)):
            good = figure <= bound
            missed += not good
            seconds = time.perf_counter() - begun
            say(
                f"{what:<54}{space!r:<24}{dtype:<12}{figure:9.1e}{bound:9.0e}"
                f"{'' if good else ' NO':>5}{seconds:9.0f}"
            )
            begun = time.perf_counter()
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
