"""Kong, Wang, Tao, "Momentum Stiefel Optimizer, with Applications to Suitably-Orthogonal Attention, and
Optimal Transport", ICLR 2023 (arXiv 2205.14173): Algorithm 2, Adam on Stiefel, and Algorithm 5, Adam on
SO(N).

A tangent vector is X Y + V, Y skew (n x n), V (N x n) with X^T V = 0; a = 1/2 is the canonical metric, a = 0
the Euclidean one, b = a/(a - 1). For a gradient G the two parts are

    f = (1 - b)/2 (X^T G - G^T X),    g = (I - X X^T) G

On SO(N) there is no V, and the momentum Y stays in so(N) for the whole run: there a = 1/2, exp (or Cayley)
and eps outside the root make Algorithm 5 the lifted Adam of `ghor.optim.Adam` on `ghor.SpecialOrthogonal()`,
step for step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ghor import SpecialOrthogonal

from .matrices import OnMatrices, adam, average, eye, polar, tick

EXPONENTIALS = ("cayley", "euler", "geodesic")


def moved(X: Tensor, xi: Tensor, expm: str) -> Tensor:
    """X expm(xi) or an approximation; "euler" is X + X xi, off the manifold until polar() is taken."""
    if expm == "geodesic":
        return X @ torch.linalg.matrix_exp(xi)
    # Cayley: (I - xi/2)^-1 (I + xi/2) = I + (I - xi/2)^-1 xi
    return X + X @ (xi if expm == "euler" else torch.linalg.solve(eye(xi) - xi / 2, xi))


def along(X: Tensor, G: Tensor, a: float) -> Tensor:
    """f, the part of the gradient along X; (1 - b)/2 = 1/(2 (1 - a))."""
    XG = X.mT @ G
    return (XG - XG.mT) / (2 * (1 - a))


class _Kong(OnMatrices):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        *,
        a: float = 0.5,
        expm: str = "cayley",
    ) -> None:
        if expm not in EXPONENTIALS:
            raise ValueError(f"unknown expm {expm!r}; there are {sorted(EXPONENTIALS)}")
        if not a < 1:
            raise ValueError(f"Invalid a: {a}; metrics have a < 1, 0.5 is the canonical one")
        super().__init__(params, lr=lr, betas=betas, eps=eps, a=a, expm=expm)


class AdamSO(_Kong):
    """Algorithm 5, Adam on SO(N): Adam of f in so(N), then X <- X expm(-lr m/(sqrt(v) + eps)).

    Nothing is projected. It is restricted to the group: Stiefel with n < N has a V. With expm="euler" the
    polar factor is taken after the step. eps is outside the root and added to the corrected sqrt(v), as in
    torch's Adam and in the authors' code; in sqrt(1 - beta2^t)/(sqrt(v) + eps), where it is added to the
    uncorrected one, it would count as eps/sqrt(1 - beta2^t) here.
    """

    space = SpecialOrthogonal()

    def update(self, Y: Tensor, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """The weight, X in the paper, is called Y as everywhere here."""
        X = moved(Y, -group["lr"] * adam(state, along(Y, G, group["a"]), group), group["expm"])
        Y.copy_(polar(X) if group["expm"] == "euler" else X)


class AdamStiefel(_Kong):
    """Algorithm 2, Adam on St(n, N): two Adams, one of f and one of g, p and q their second moments.

        Y <- beta1 Y - (1 - beta1) f,    p <- beta2 p + (1 - beta2) f^2
        V <- beta1 V + lr (3a - 2)/2 V Y - (1 - beta1) g,    q <- beta2 q + (1 - beta2) g^2
        Y~ = Y/(sqrt(p) + eps),    V~ = (I - X X^T)(V/(sqrt(q) + eps))         with bias corrections
        X' = X expm(lr Y~),    X'' = X' + lr V~ X'^T X',    V <- V - lr X' V~^T V,    X <- polar(X'')

    V has N n entries for n (N - n) dimensions, and dividing it by its second moments takes it out of the
    tangent space: the projection in V~ brings it back and undoes a part of what the second moments did. The
    coordinates of V are those of R^N and do not move with the weight.

    (3a - 2)/2 is the coefficient of the paper's equations of motion; the authors' code has it with the other
    sign, and leaves out the correction 1/(1 - beta1^t) of V~. It is right for a = 0; geodesics of the
    canonical metric, a = 1/2, have no such term.
    """

    def update(self, Y: Tensor, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """The weight is X and the state has the paper's names, in which Y is a moment."""
        X, lr, a, (beta1, beta2) = Y, group["lr"], group["a"], group["betas"]
        t, f, g = tick(state), along(X, G, a), G - X @ (X.mT @ G)
        c1, c2 = 1 - beta1**t, math.sqrt(1 - beta2**t)
        Y, p = average(state, "Y", -f, beta1), average(state, "p", f * f, beta2)
        turn = lr * (3 * a - 2) / 2 * (state["V"] @ Y) if "V" in state else 0
        V, q = average(state, "V", -g, beta1).add_(turn), average(state, "q", g * g, beta2)
        Y_, V_ = (M / c1 / (v.sqrt() / c2 + group["eps"]) for M, v in ((Y, p), (V, q)))
        V_ -= X @ (X.mT @ V_)
        X1 = moved(X, lr * Y_, group["expm"])
        V -= lr * X1 @ (V_.mT @ V)
        X.copy_(polar(X1 + lr * V_ @ (X1.mT @ X1)))
