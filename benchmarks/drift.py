"""Where drift comes from: the form of the retraction, the length of steps, and the repair of rounding.

    python benchmarks/drift.py --json drift.json    # 14,500 float32 steps, six runs; two minutes, one core
    python benchmarks/drift.py --steps 500          # a first look

Weights on St(7, 49) follow noisy gradients of ||Y - target||^2/2 by Adam at 1e-3 with betas 0.9, 0.99, as in
the paper. There are three ways to move the section Lambda by the Cayley transform of the velocity W, the
authors' code first:

    authors     R = (I + B' (I - B''^T B'/2)^-1 B''^T/2) (I + W/2) is formed, N x N, then Lambda <- Lambda R
    increment   Lambda <- Lambda + Lambda (R - I), R - I from an n x n inverse: ghor without repairs
    ghor        the same with repairs, by ghor.optim.Adam and ghor.baselines.ScalarMomentAdam as they are

Each runs with a second moment per coordinate and with one per matrix (steps about 18 times shorter). The
output shows the largest ||Y^T Y - I||_F over the weights, in float64, after some numbers of steps, and the
mean length ||W||_F of a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import stamp, write_json
from torch import Tensor

import ghor
from ghor.baselines import ScalarMomentAdam

N, n = 49, 7
Move = Callable[[Tensor, Tensor], Tensor]
St = ghor.Stiefel()


def full(W: Tensor) -> Tensor:
    """[A; B] -> the N x N matrix [[A, -B^T], [B, 0]]."""
    return torch.cat([W, torch.cat([-W[..., n:, :].mT, W.new_zeros(*W.shape[:-2], N - n, N - n)], -2)], -1)


def authors(Lambda: Tensor, W: Tensor) -> Tensor:
    """The paper's formula for the inverse, which contains a 2n x 2n inverse."""
    A, B = W[..., :n, :], W[..., n:, :]
    I, zero = torch.eye(n).expand_as(A), torch.zeros_like(B)
    left = torch.cat([torch.cat([A / 2, B], -2), torch.cat([I, zero], -2)], -1)  # B', N x 2n
    right = torch.cat([torch.cat([I, zero.mT], -1), torch.cat([A / 2, -B.mT], -1)], -2)  # B''^T, 2n x N
    inner = torch.linalg.inv(torch.eye(2 * n) - right @ left / 2)
    return Lambda @ ((torch.eye(N) + left / 2 @ inner @ right) @ (torch.eye(N) + full(W) / 2))


def increment(Lambda: Tensor, W: Tensor) -> Tensor:
    """D = Lambda [A - B^T B/2; B] (I - A/2 + B^T B/4)^-1, then Y <- Y + D and Q <- Q - (Y + D/2) B^T."""
    A, B, Y, Q = W[..., :n, :], W[..., n:, :], Lambda[..., :n], Lambda[..., n:]
    C = B.mT @ B
    D = Lambda @ torch.cat([A - C / 2, B], -2) @ torch.linalg.inv(torch.eye(n) - A / 2 + C / 4)
    return torch.cat([Y + D, Q - (Y + D / 2) @ B.mT], -1)


MOVES: dict[str, Move | None] = {"authors": authors, "increment": increment, "ghor": None}


def run(move: Move | None, scalar: bool, steps: int, weights: int) -> dict[str, Any]:
    """Distances after some numbers of steps. The gradients' noise is the same in all runs."""
    generator = torch.Generator().manual_seed(0)
    Y, target = (St.random(weights, N, n, generator=generator) for _ in range(2))
    rest = torch.randn(weights, N, N - n, generator=generator)
    Lambda = torch.cat([Y, torch.linalg.qr(torch.cat([Y, rest], -1)).Q[..., n:]], -1)
    p = torch.nn.Parameter(Y.clone())
    rates: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99)}
    kind: Any = ScalarMomentAdam if scalar else ghor.optim.Adam
    opt = kind([p], space=St, **rates)
    m, v, length = torch.zeros_like(Y), torch.zeros_like(Y[:, :1, :1] if scalar else Y), 0.0
    found: dict[int, float] = {}
    for t in range(1, steps + 1):
        G = Y - target + torch.randn(Y.shape, generator=generator)
        if move is None:
            p.grad = G
            opt.step()
            Y = p.detach()
        else:
            g = Lambda.mT @ G
            g[:, :n] -= g[:, :n].mT.clone()  # skew to the bit: Adam divides by what is left of a diagonal
            square = g.square()
            if scalar:
                square = (square.sum((1, 2)) - square[:, :n].sum((1, 2)) / 2)[:, None, None]
            m = 0.9 * m + 0.1 * g
            v = 0.99 * v + 0.01 * square
            W = -1e-3 * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
            length += float(full(W).norm(dim=(1, 2)).mean()) / steps
            Lambda = move(Lambda, W)
            Y = Lambda[..., :n]
        if t in (100, 1000, steps) or t % (steps // 10 or 1) == 0:
            off = (Y.double().mT @ Y.double() - torch.eye(n, dtype=torch.float64)).norm(dim=(1, 2))
            found[t] = float(off.max())
    return {"length": length or None, "drift": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=14_500)
    parser.add_argument("--weights", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    begun = stamp()
    runs = {}
    for moment in ("coordinate", "scalar"):
        for name, move in MOVES.items():
            found = runs[f"{name}, {moment}"] = run(move, moment == "scalar", args.steps, args.weights)
            drifts = "  ".join(
                f"{t}: {off:.1e}" for t, off in found["drift"].items() if t in (100, 1000, args.steps)
            )
            step = "" if found["length"] is None else f"   mean step {found['length']:.1e}"
            print(f"{name:10} second moment by {moment:11} {drifts}{step}", flush=True)
    if args.json:
        settings = {"steps": args.steps, "weights": args.weights}
        write_json({"benchmark": "drift", **begun, "settings": settings, "runs": runs}, args.json)


if __name__ == "__main__":
    main()
