"""GL(n)/O(n): symmetric positive definite matrices with the affine-invariant metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ghor._torch.precision import full_precision
from ghor.linalg import frobenius, log_positive, solve, symmetric, symmetric_function
from ghor.retraction import Retraction
from ghor.spaces.base import compute
from ghor.spaces.framed import Framed


@dataclass(frozen=True, repr=False)
class SPD(Framed):
    """Symmetric positive definite P (..., n, n), metric tr(P^-1 U P^-1 V). g^hor: symmetric W, <W, W'> = tr(W
    W').

    P = L L^T with L in GL(n), and L <- L exp(W), so that the way is 2 ||W||. Lambda = [P, L], (..., 2, n, n).
    Any invertible L is in the group: nothing drifts off, and nothing has to be repaired or rescaled. P is
    made of L at every step, symmetric to the bit, and L has the square root of P's condition, so that L L^T
    is positive definite as long as cond(P) < 1/(n eps): 1e6 in float32, 1e14 in float64 for n = 10. A step
    beyond is not taken, with a warning.
    """

    max_velocity: ClassVar[float] = 1.0  # Cayley needs ||W|| < 2
    scale: ClassVar[float] = 4.0
    holds: ClassVar[str] = "square matrices (..., n, n)"

    def check_shape(self, shape: Sequence[int]) -> None:
        self.refuse_shape(shape, len(shape) >= 2 and shape[-1] == shape[-2])

    def E(self, shape: Sequence[int], dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """I."""
        self.check_shape(shape)
        return torch.eye(shape[-1], dtype=dtype, device=device).expand(tuple(shape)).clone()

    @full_precision()
    def residual(self, Y: Tensor) -> Tensor:
        """||P - P^T||/2; a matrix without a Cholesky factor is ||P|| further away."""
        indefinite = torch.linalg.cholesky_ex(symmetric(Y.detach()))[1] > 0
        return frobenius(Y - Y.mT) / 2 + indefinite * frobenius(Y)

    def tolerance(self, Y: Tensor) -> Tensor:
        """Rounding of entries, hence of the size of P."""
        return self.room(Y) * frobenius(compute(Y))

    def from_normal(self, X: Tensor) -> Tensor:
        """exp(S), S symmetric and normal with ||S||_2 near sqrt(2)."""
        return symmetric(torch.linalg.matrix_exp(symmetric(X) / X.shape[-1] ** 0.5))

    @full_precision()
    def project(self, X: Tensor) -> Tensor:
        """The symmetric part with eigenvalues of at least 10 n eps times the largest, which must be
        positive."""
        self.check_project(X)
        S = symmetric(compute(X))
        w, V = torch.linalg.eigh(S.detach())
        self.check_project(X, bool((w[..., -1] > 0).all()))
        least = 10 * X.shape[-1] * torch.finfo(S.dtype).eps * w[..., -1:]
        more = symmetric((V * (least - w).clamp_min(0).unsqueeze(-2)) @ V.mT)
        return torch.where((w[..., :1] < least).unsqueeze(-1), S + more, S).to(X.dtype)

    def section(self, Y: Tensor) -> Tensor:
        """L is the Cholesky factor."""
        return torch.stack([Y, torch.linalg.cholesky(symmetric(Y))], -3)

    def apply_section(self, Lambda: Tensor, E: Tensor) -> Tensor:
        return Lambda[..., 0, :, :]

    def pullback(self, Lambda: Tensor, G: Tensor) -> Tensor:
        """L^T (G + G^T) L, *exactly* symmetric."""
        L = Lambda[..., 1, :, :]
        return symmetric(L.mT @ (G + G.mT) @ L)

    def global_rep(self, Lambda: Tensor, Delta: Tensor) -> Tensor:
        """L^-1 Delta L^-T/2."""
        L = Lambda[..., 1, :, :]
        return symmetric(solve(L, solve(L, symmetric(Delta)).mT)) / 2

    def push(self, Lambda: Tensor, W: Tensor) -> Tensor:
        """2 L W L^T."""
        L = Lambda[..., 1, :, :]
        return symmetric(2 * L @ W @ L.mT)

    def hor(self, W: Tensor) -> Tensor:
        return symmetric(W)

    def moved(self, Lambda: Tensor, W: Tensor, R: Retraction) -> Tensor:
        """L + L (R(W) - I), and P = L L^T anew where W is not 0."""
        L = Lambda[..., 1, :, :] + Lambda[..., 1, :, :] @ R.dense(W)
        step = self.within_digits(Lambda, torch.stack([symmetric(L @ L.mT), L], -3))
        if W.requires_grad:  # the derivative at 0 is not that of a constant
            return step
        return torch.where((W != 0).flatten(-2).any(-1)[..., None, None, None], step, Lambda)

    def within_digits(self, before: Tensor, after: Tensor) -> Tensor:
        indefinite = torch.linalg.cholesky_ex(after[..., 0, :, :].detach())[1] > 0
        self.warn_of_digits(indefinite, "to condition 1/eps", after)
        return torch.where(indefinite[..., None, None, None], before, after)

    def polish(
        self, Lambda: Tensor, E: Tensor, share: Tensor | float = 1.0, point_only: bool = False
    ) -> Tensor:
        """P made symmetric, where it came from outside."""
        Lambda[..., 0, :, :] = symmetric(Lambda[..., 0, :, :])
        return Lambda

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """L log(L^-1 Z L^-T) L^T; near Y by log(1 + x) of the difference, exact to rounding."""
        Lambda = self.section(Y)
        D, M = 2 * self.global_rep(Lambda, Z - Y), 2 * self.global_rep(Lambda, Z)
        near = (frobenius(D) < 0.5)[..., None, None]
        of_near = symmetric_function(torch.where(near, D, 0), lambda t: (t.log1p(), 1 / (1 + t)))
        return self.push(Lambda, torch.where(near, of_near, log_positive(M)) / 2)

    def log_euclidean(self, Y: Tensor, Z: Tensor) -> Tensor:
        """||log Y - log Z||_F, the distance of the log-Euclidean metric."""
        return frobenius(log_positive(Y) - log_positive(Z))
