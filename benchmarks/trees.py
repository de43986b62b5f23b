"""Trees in hyperbolic space, by ghor's Adam and geoopt's RiemannianAdam, if it is installed.

    python benchmarks/trees.py [--steps 300] [--seeds 1] [--depth 6] [--branching 3]

A balanced tree is embedded with its path lengths as distances. The loss is the mean of (d/D - 1)^2 over
sampled pairs; the result that counts is the mean distortion, mean |d/D - 1| over all pairs. Both libraries
start from the same points and use their own distance, and their learning rates are swept. A seed is a start
and an order of pairs, and the best learning rate is that of the mean over seeds.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

import ghor
from ghor.baselines import ScalarMomentAdam

try:
    import geoopt
except ImportError:
    geoopt = None

F64, SPACE = torch.float64, ghor.Hyperbolic()
Made = tuple[Any, nn.Parameter, Callable[..., Tensor]]


def tree(depth: int, branching: int) -> Tensor:
    """Path lengths between all nodes of a balanced tree: (n, n)."""
    n = sum(branching**level for level in range(depth + 1))
    ancestors = torch.eye(n, dtype=F64)
    for i in range(1, n):
        ancestors[i] += ancestors[(i - 1) // branching]
    depths = ancestors.sum(1)
    return depths[:, None] + depths - 2 * ancestors @ ancestors.mT


def start(n: int, dim: int, seed: int) -> Tensor:
    x = 0.01 * torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return SPACE.project(torch.cat([torch.zeros(n, 1, dtype=F64), x], -1))


def ours(x: Tensor, lr: float, cls: Any = ghor.optim.Adam) -> Made:
    Y = nn.Parameter(x.clone())
    return cls([Y], space=SPACE, lr=lr), Y, SPACE.dist


def theirs(x: Tensor, lr: float, manifold: str) -> Made:
    space = getattr(geoopt, manifold)()
    Y = geoopt.ManifoldParameter(
        SPACE.to_ball(x) if manifold == "PoincareBall" else x.clone(), manifold=space
    )
    return geoopt.optim.RiemannianAdam([Y], lr=lr), Y, space.dist


CONTENDERS: dict[str, Callable[[Tensor, float], Made]] = {
    "ghor Adam": ours,
    "ghor, scalar": lambda x, lr: ours(x, lr, ScalarMomentAdam),  # one second moment for each point
    "geoopt Lorentz": lambda x, lr: theirs(x, lr, "Lorentz"),
    "geoopt ball": lambda x, lr: theirs(x, lr, "PoincareBall"),
}


def fit(made: Made, D: Tensor, steps: int, batch: int, seed: int) -> float:
    """The mean distortion at the end."""
    opt, Y, dist = made
    gen, n = torch.Generator().manual_seed(seed + 1), len(D)
    for _ in range(steps):
        i = torch.randint(n, (batch,), generator=gen)
        j = (i + torch.randint(1, n, (batch,), generator=gen)) % n
        opt.zero_grad()
        (dist(Y[i], Y[j]) / D[i, j] - 1).square().mean().backward()
        opt.step()
    i, j = torch.triu_indices(n, n, offset=1)
    with torch.no_grad():
        return float((dist(Y[i], Y[j]) / D[i, j] - 1).abs().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--branching", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--dims", type=int, nargs="+", default=[2, 5])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of contenders")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.2, 0.4, 0.8, 1.6])
    parser.add_argument("--batch", type=int, default=20_000)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    D = tree(args.depth, args.branching)
    print(
        f"{len(D)} nodes, {args.steps} steps of {args.batch} pairs, {args.seeds} seeds: mean distortion by lr"
    )
    print("dim  " + "optimizer".ljust(16) + "".join(f"{lr:>9g}" for lr in args.rates) + "     best")
    for dim in args.dims:
        for name, make in CONTENDERS.items():
            if not any(only in name for only in args.only) or ("geoopt" in name and geoopt is None):
                continue
            found = [
                mean(
                    fit(make(start(len(D), dim, s), lr), D, args.steps, args.batch, s)
                    for s in range(args.seeds)
                )
                for lr in args.rates
            ]
            best = min(x for x in found if x == x)
            print(f"{dim:<5}{name:<16}" + "".join(f"{x:9.4f}" for x in [*found, best]), flush=True)


if __name__ == "__main__":
    main()
