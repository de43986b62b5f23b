"""Trees in hyperbolic space, by ghor's Adam and geoopt's RiemannianAdam.

    python benchmarks/trees.py [--steps 300] [--seeds 1] [--cosine] [--depth 6] [--branching 3]

A balanced tree is embedded with its path lengths, times a scale of 1, as distances. The loss is the mean of
(d/D - 1)^2 over pairs; the result that counts is the mean distortion, mean |d/D - 1| over all pairs. Both
libraries start from the same points and use their own distance, and their learning rates are swept. A seed is
a start and an order of pairs, and the best learning rate is that of the mean over seeds. geoopt: `pip install
-e ".[bench]"`.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ghor
from ghor.baselines import ScalarMomentAdam

RATES = (0.1, 0.2, 0.4, 0.8, 1.6)
HYPERBOLIC = ghor.Hyperbolic()


def tree(depth: int, branching: int) -> Tensor:
    """Path lengths between all nodes of a balanced tree: (n, n)."""
    parent = [0]
    level = [0]
    for _ in range(depth):
        level = [len(parent) + i for i in range(branching * len(level))]
        parent += [(i - 1) // branching for i in level]
    up = [[0]]
    for i in range(1, len(parent)):
        up.append([i, *up[parent[i]]])
    n = len(parent)
    ancestors = torch.zeros(n, n)
    for i, path in enumerate(up):
        ancestors[i, path] = 1
    depths = ancestors.sum(1)
    common = ancestors @ ancestors.mT
    return depths[:, None] + depths[None, :] - 2 * common


def pairs_of(n: int, count: int, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    i = torch.randint(n, (count,), generator=gen)
    return i, (i + torch.randint(1, n, (count,), generator=gen)) % n


def distortion(dist: Callable[[Tensor, Tensor], Tensor], x: Tensor, D: Tensor) -> float:
    """mean |d/D - 1| over all pairs."""
    i, j = torch.triu_indices(*D.shape, offset=1)
    with torch.no_grad():
        return float((dist(x[i], x[j]) / D[i, j] - 1).abs().mean())


def fit(
    opt: Any,
    Y: nn.Parameter,
    dist: Callable[[Tensor, Tensor], Tensor],
    D: Tensor,
    args: argparse.Namespace,
    seed: int,
) -> float:
    gen = torch.Generator().manual_seed(seed + 1)
    lr = opt.param_groups[0]["lr"]
    for step in range(args.steps):
        i, j = pairs_of(len(D), args.batch, gen)
        if args.cosine:
            opt.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * step / args.steps)) / 2
        opt.zero_grad()
        (dist(Y[i], Y[j]) / D[i, j] - 1).square().mean().backward()
        opt.step()
    return distortion(dist, Y.detach(), D)


def start(n: int, dim: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    x = 0.01 * torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return HYPERBOLIC.project(torch.cat([torch.zeros(n, 1), x], -1)).to(dtype)


def contestants(
    geoopt: Any,
) -> dict[str, Callable[[Tensor, float], tuple[Any, nn.Parameter, Callable[..., Tensor]]]]:
    def ours(x: Tensor, lr: float) -> tuple[Any, nn.Parameter, Callable[..., Tensor]]:
        Y = nn.Parameter(x.clone())
        return ghor.optim.Adam([Y], space=HYPERBOLIC, lr=lr), Y, HYPERBOLIC.dist

    def one_a_point(x: Tensor, lr: float) -> tuple[Any, nn.Parameter, Callable[..., Tensor]]:
        """One second moment for each point, which is geoopt's choice."""
        Y = nn.Parameter(x.clone())
        return ScalarMomentAdam([Y], space=HYPERBOLIC, lr=lr), Y, HYPERBOLIC.dist

    def lorentz(x: Tensor, lr: float) -> tuple[Any, nn.Parameter, Callable[..., Tensor]]:
        space = geoopt.Lorentz()
        Y = geoopt.ManifoldParameter(x.clone(), manifold=space)
        return geoopt.optim.RiemannianAdam([Y], lr=lr), Y, space.dist

    def ball(x: Tensor, lr: float) -> tuple[Any, nn.Parameter, Callable[..., Tensor]]:
        space = geoopt.PoincareBall()
        Y = geoopt.ManifoldParameter(HYPERBOLIC.to_ball(x), manifold=space)
        return geoopt.optim.RiemannianAdam([Y], lr=lr), Y, space.dist

    own = {"ghor Adam": ours, "ghor, scalar": one_a_point}
    return own | ({"geoopt Lorentz": lorentz, "geoopt ball": ball} if geoopt else {})


def trees(args: argparse.Namespace, geoopt: Any) -> None:
    D = tree(args.depth, args.branching).to(args.dtype)
    print(
        f"\ntree of {len(D)} nodes, {args.steps} steps of {args.batch} pairs, {args.dtype}, {args.seeds} "
        f"seeds",
        end="",
    )
    print(f"{', cosine schedule' * args.cosine}; mean distortion by lr")
    print("dim  " + "optimizer".ljust(16) + "".join(f"{lr:>9g}" for lr in args.rates) + "     best  by seed")
    for dim in args.dims:
        for name, make in contestants(geoopt).items():
            if not any(only in name for only in args.only):
                continue
            found = []
            for lr in args.rates:
                runs = [(*make(start(len(D), dim, args.dtype, seed), lr), seed) for seed in range(args.seeds)]
                found.append([fit(opt, Y, dist, D, args, seed) for opt, Y, dist, seed in runs])
            means = [sum(f) / len(f) for f in found]
            best = min((i for i, m in enumerate(means) if m == m), key=means.__getitem__)
            print(
                f"{dim:<5}{name:<16}" + "".join(f"{m:9.4f}" for m in means) + f"{means[best]:9.4f}  ", end=""
            )
            print(" ".join(f"{f:.4f}" for f in found[best]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--branching", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--cosine", action="store_true", help="the learning rate falls to 0 along a cosine, for all"
    )
    parser.add_argument("--dims", type=int, nargs="+", default=[2, 5])
    parser.add_argument(
        "--only", nargs="+", default=[""], help="parts of the names of those that embed trees"
    )
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--batch", type=int, default=20_000)
    parser.add_argument("--dtype", type=lambda s: getattr(torch, s), default=torch.float64)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    try:
        import geoopt
    except ImportError:
        geoopt = None
        print('geoopt is not installed and left out: pip install -e ".[bench]"')
    trees(args, geoopt)


if __name__ == "__main__":
    main()
