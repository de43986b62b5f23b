"""Li, Li, Todorovic, "Efficient Riemannian Optimization on the Stiefel Manifold via the Cayley Transform",
ICLR 2020 (arXiv 2002.01113).

With M the momentum at X, both algorithms move along the Cayley transform of the N x N matrix

    W_hat = M X^T - X (X^T M X^T)/2,    W = W_hat - W_hat^T,    M <- W X

where W X is the projection of M to the tangent space. The transform is not solved for but iterated s = 2
times, and the step alpha = min(lr, 2 q/(||W||_1 + eps)), q = 0.5, makes that a contraction:

    Y_0 = X + alpha W X,    Y_i = X + alpha/2 W (X + Y_(i-1)),    X <- Y_s

The authors' code starts from the momentum before its projection instead, Y_0 = X + alpha M, whose error is
one order larger, and iterates five times. v starts at zero, as in their code.

They leave the manifold by O(alpha^(s+2)) in each step, which adds up (the authors' code orthonormalises at
random, every hundredth step or so; the algorithms do not), and they form N x N matrices. The first moment is
projected again at every step, and Adam's second moment is one number for each matrix.

SpinQuant (Liu et al. 2024, arXiv 2405.16406) learns its rotations with a copy of that code, `SGDG`.

`ghor.baselines.ScalarMomentAdam`, which the paper compares with, takes the scalar second moment from here and
nothing else.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from .matrices import OnMatrices, average, norm, tick


def cayley_iterations(X: Tensor, W: Tensor, alpha: Tensor | float, s: int) -> Tensor:
    """s fixed-point iterations for (I - alpha/2 W)^-1 (I + alpha/2 W) X; the error is O(alpha^(s+2))."""
    Y = X + alpha * (W @ X)
    for _ in range(s):
        Y = X + alpha / 2 * (W @ (X + Y))
    return Y


def rotation(X: Tensor, M: Tensor) -> Tensor:
    """W (..., N, N), skew, with W X the projection of M (..., N, n) to the tangent space at X."""
    W = M @ X.mT - X @ (X.mT @ M @ X.mT) / 2
    return W - W.mT


def step_size(W: Tensor, group: dict[str, Any]) -> Tensor:
    """min(lr, 2 q/(||W||_1 + eps)) for each matrix."""
    bound = 2 * group["q"] / (torch.linalg.matrix_norm(W, ord=1, keepdim=True) + group["eps"])
    return bound.clamp_max(group["lr"])


class _Cayley(OnMatrices):
    room = 0.1  # weights that these methods have moved off the manifold are accepted again


class CayleySGD(_Cayley):
    """Algorithm 1: M <- momentum M - G, then a step as above. lr = 0.1 is that of the authors' commands."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        momentum: float = 0.9,
        *,
        q: float = 0.5,
        s: int = 2,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lr=lr, eps=eps, momentum=momentum, q=q, s=s)

    def update(self, Y: Tensor, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Lines 4 to 12."""
        M = group["momentum"] * state.get("momentum_buffer", 0) - G
        W = rotation(Y, M)
        state["momentum_buffer"] = W @ Y
        Y.copy_(cayley_iterations(Y, W, step_size(W, group), group["s"]))


class SGDG(_Cayley):
    """Algorithm 1 as SpinQuant runs it: X = Y^T for square Y, its columns scaled to length one, then

        M = -G^T,    Y_0 = X + alpha M,    Y_i as above, i = 1, ..., 5

    and about once in 101 steps, at random, X is orthonormalised first; so replicas of a weight stay equal
    only if their processes draw the same random numbers. The published code has momentum, but writes the new
    M to a temporary tensor: its buffer stays 0, whatever `momentum` is, and there is none here. lr = 1.5 is
    that of the authors' commands.
    """

    def __init__(
        self, params: Any, lr: float = 1.5, *, q: float = 0.5, s: int = 5, eps: float = 1e-8
    ) -> None:
        super().__init__(params, lr=lr, eps=eps, q=q, s=s)

    def update(self, Y: Tensor, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step of every matrix of a batch, with a step size for each."""
        square = Y.shape[-1] == Y.shape[-2]
        X, M = (Y.mT, -G.mT) if square else (Y, -G)
        X = X / torch.linalg.vector_norm(X, dim=-2, keepdim=True)
        if random.randint(1, 101) == 1:
            Q, R = torch.linalg.qr(X)
            X = Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        W = rotation(X, M)
        alpha = step_size(W, group)
        Z = X + alpha * M
        for _ in range(group["s"]):
            Z = X + alpha / 2 * (W @ (X + Z))
        Y.copy_(Z.mT if square else Z)


class CayleyAdam(_Cayley):
    """Algorithm 2: Adam with one second moment for each matrix; lr = 0.1 is that of the authors' commands.

        M <- beta1 M + (1 - beta1) G,    v <- beta2 v + (1 - beta2) ||G||_F^2
        r =  (1 - beta1^t) sqrt(v/(1 - beta2^t) + eps),    W <- -W(M)/r,    M <- -r W X

    G is the Euclidean gradient, also in v: the part of it that is normal to the manifold shortens the step.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        *,
        q: float = 0.5,
        s: int = 2,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, q=q, s=s)

    def update(self, Y: Tensor, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Lines 4 to 14."""
        t, (beta1, beta2) = tick(state), group["betas"]
        M = average(state, "exp_avg", G, beta1)
        v = average(state, "exp_avg_sq", norm(G) ** 2, beta2)
        r = (1 - beta1**t) * torch.sqrt(v / (1 - beta2**t) + group["eps"])
        W = rotation(Y, M) / -r
        torch.mul(W @ Y, -r, out=M)
        Y.copy_(cayley_iterations(Y, W, step_size(W, group), group["s"]))
