"""Lezcano-Casado, Martinez-Rubio, "Cheap Orthogonal Constraints in Neural Networks", ICML 2019 (arXiv
1901.08428), and Lezcano-Casado, "Trivializations for Gradient-Based Optimization on Manifolds", NeurIPS 2019
(arXiv 1909.09501): optimizers on the tangent space.

The weight is a function of a vector, Y = base exp(W) E with W in g^hor = T_E, and Adam minimises over W:

    g <- d/dW L(base exp(W) E),    W <- W - lr m/(sqrt(v) + eps),    Y <- base exp(W) E

W starts at zero, and `base` is the section of the first Y.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ghor import SpecialOrthogonal

from .matrices import OnMatrices, adam


class Trivialization(OnMatrices):
    """Adam on W for SO(N) and Stiefel: static, or dynamic with the base moved to the weight every `every`
    steps.

    Static (every=None) gives up accuracy far from the base: exp stretches, so that equal steps of W are
    unequal steps of Y, and the coordinates of the gradient turn as W grows; beyond ||W|| = pi exp is not a
    coordinate map. Dynamic: base <- base exp(W), W <- 0, and the moments stay as they are. With
    every=1 the gradient is always taken at W = 0, where d exp is the identity: that is Algorithm 3 of the
    paper with the geodesic retraction and a transported section, `ghor.optim.Adam(..., retraction="geodesic",
    section="transported")`, step for step. The derivative of an N x N exponential is evaluated at every step.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        every: int | None = None,
    ) -> None:
        if every is not None and not (isinstance(every, int) and every >= 1):
            raise ValueError(
                f"Invalid every: {every}; a number of steps, 1 or more, or None for a fixed base"
            )
        super().__init__(params, lr=lr, betas=betas, eps=eps, every=every)

    def update(self, Y: Tensor, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """g by automatic differentiation of exp; the block A of W and of g is skew."""
        n = Y.shape[-1]
        if "base" not in state:
            state["base"], state["W"] = self.space.section(Y).clone(), torch.zeros_like(Y)
        base, W = state["base"], state["W"]
        with torch.enable_grad():
            X = W.detach().requires_grad_()
            (g,) = torch.autograd.grad(base @ exp(X)[..., :n], X, G)
        A = g[..., :n, :]
        g[..., :n, :] = A - A.mT  # with respect to the entries below the diagonal
        W -= group["lr"] * adam(state, g, group)
        moved = base @ exp(W)
        Y.copy_(moved[..., :n])
        if group["every"] is not None and int(state["step"]) % group["every"] == 0:
            base.copy_(moved)
            W.zero_()


def exp(W: Tensor) -> Tensor:
    """exp of the skew N x N matrix X whose first columns are W (..., N, n), and whose last block is zero.

    exp(X) = exp(X/2^s)^(2^s) by Taylor's series: torch.matrix_exp has 12 digits, and errors of a base add up.
    """
    n = W.shape[-1]
    rest = torch.cat([-W[..., n:, :].mT, W.new_zeros(*W.shape[:-2], W.shape[-2] - n, W.shape[-2] - n)], -2)
    X = torch.cat([W, rest], -1)
    s = max(0, math.frexp(float(torch.linalg.matrix_norm(X.detach(), ord=1).max()))[1] + 2)
    out = term = torch.eye(X.shape[-1], dtype=X.dtype, device=X.device).expand_as(X)
    for k in range(1, 14):  # (1/4)^14 / 14! < 1e-19
        term = term @ X / (2**s * k)
        out = out + term
    for _ in range(s):
        out = out @ out
    return out


class CheapOrthogonal(Trivialization):
    """The first of the two papers, static and on SO(N) only, as in the paper's table. Gives up n < N."""

    space = SpecialOrthogonal()
