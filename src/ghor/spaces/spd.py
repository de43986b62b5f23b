"""GL(n)/O(n): symmetric positive definite matrices with the affine-invariant metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ghor._torch.transforms import differentiated
from ghor.linalg import everywhere, frobenius, log_gram, solve, symmetric, symmetric_function
from ghor.retraction import Retraction, by_name
from ghor.spaces.base import compute
from ghor.spaces.framed import Framed, readable


@dataclass(frozen=True, repr=False)
class SPD(Framed):
    """Symmetric positive definite P (..., n, n) with the metric tr(P^-1 U P^-1 V).

    g^hor: symmetric W, <W, W'> = tr(W W'). P = L L^T with L in GL(n), and L <- L exp(W) moves P by 2 ||W||.
    Lambda = [P, L], (..., 2, n, n). Every invertible L is in the group, so nothing drifts off and nothing has
    to be repaired or rescaled; each step computes P from L, exactly symmetric.

    The geometry works with Cholesky factors, whose condition is the square root of P's; nothing depends on
    the scale of P. The only loss is Cholesky's: a relative error of at most n eps cond(P) in the smallest
    eigenvalue, and so the same absolute error in `dist`. Matrices that are not positive definite within
    rounding, cond(P) > 1/(n eps) (for n = 10: 8e5 in float32, 4e14 in float64), are off the space. Geometry
    gives NaN where there is no Cholesky factor; the optimizer does not take a step to such a matrix, and
    warns.
    """

    max_velocity: ClassVar[float] = 1.0  # Cayley needs ||W|| < 2
    scale: ClassVar[float] = 4.0
    curvature: ClassVar[float] = -0.5
    holds: ClassVar[str] = "square matrices (..., n, n)"

    def check_shape(self, shape: Sequence[int]) -> None:
        self.refuse_shape(shape, len(shape) >= 2 and shape[-1] == shape[-2])

    def E(self, shape: Sequence[int], dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """I."""
        self.check_shape(shape)
        E = torch.zeros(tuple(shape), dtype=dtype, device=device)
        E.diagonal(dim1=-2, dim2=-1).fill_(1)  # torch.eye on the meta device imports 800 modules
        return E

    def residual(self, Y: Tensor) -> Tensor:
        """||P - P^T||/2, plus ||P|| where P is not certain to be positive definite; infinite for P = 0."""
        off, size = _size(Y - Y.mT) / 2, _size(Y)
        whole = torch.where(size == 0, math.inf, size)
        return torch.where(_indefinite(symmetric(compute(Y.detach()))), off + whole, off)

    def tolerance(self, Y: Tensor) -> Tensor:
        """Rounding of the entries, relative to the size of P."""
        return self.room(Y) * _size(compute(Y))

    def from_normal(self, X: Tensor) -> Tensor:
        """exp(S), S symmetric and normal with ||S||_2 near sqrt(2)."""
        return symmetric(torch.linalg.matrix_exp(symmetric(X) / X.shape[-1] ** 0.5))

    def project(self, X: Tensor) -> Tensor:
        """The symmetric part; if it is not positive definite, with small eigenvalues raised.

        They are raised to 10 n eps times the largest eigenvalue, which must be positive; in half precision to
        sqrt(n) eps, twice what rounding can take away.
        """
        self.check_project(X)
        S = symmetric(compute(X))
        w, V = torch.linalg.eigh(S.detach())
        self.check_project(X, everywhere(w[..., -1] > 0))
        n, eps, coarse = X.shape[-1], torch.finfo(S.dtype).eps, torch.finfo(X.dtype).eps
        least = max(10 * n * eps, n**0.5 * coarse) * w[..., -1:]
        more = symmetric((V * (least - w).clamp_min(0).unsqueeze(-2)) @ V.mT)
        rounded = S.detach().to(X.dtype).to(S.dtype)
        return torch.where(_indefinite(rounded)[..., None, None], S + more, S).to(X.dtype)

    def section(self, Y: Tensor) -> Tensor:
        """L is the Cholesky factor."""
        return torch.stack([Y, _cholesky(Y)], -3)

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

    def away_from(self, Lambda: Tensor, Y: Tensor, Y0: Tensor) -> Tensor:
        """-log(Y, Y0) in g^hor, so that the rate of decay does not depend on the size of Y."""
        return -self.global_rep(Lambda, self.log(Y, Y0))

    def push(self, Lambda: Tensor, W: Tensor) -> Tensor:
        """2 L W L^T."""
        L = Lambda[..., 1, :, :]
        return symmetric(2 * L @ W @ L.mT)

    def hor(self, W: Tensor) -> Tensor:
        return symmetric(W)

    def moved(self, Lambda: Tensor, W: Tensor, R: Retraction) -> Tensor:
        """L + L (R(W) - I), and P = L L^T computed again where W is not 0.

        Where values may be read, Cayley is continued beyond max_velocity as in `retract`; elsewhere W must
        not be longer than that, and in the optimizer it never is.
        """
        size = frobenius(W.detach())
        long = readable(W) and not everywhere(size <= 1.001 * self.max_velocity)
        if long:  # a NaN is no matrix that has lost its digits, and is not held
            Lambda = torch.where(torch.isnan(size)[..., None, None, None], torch.nan, Lambda)
        if R.name == "cayley" and long:
            step = _moved_far(Lambda, W, R, self.max_velocity)
        else:
            step = _from_factor(Lambda[..., 1, :, :] + Lambda[..., 1, :, :] @ R.dense(W))
        step = self.within_digits(Lambda, step)
        if differentiated(W):  # the derivative at 0 is not that of a constant
            return step
        return torch.where((size != 0)[..., None, None, None], step, Lambda)

    def within_digits(self, before: Tensor, after: Tensor) -> Tensor:
        indefinite = _indefinite(after[..., 0, :, :].detach())
        self.warn_of_digits(indefinite, "to condition 1/(n eps)", after)
        return torch.where(indefinite[..., None, None, None], before, after)

    def polish(
        self, Lambda: Tensor, E: Tensor, share: Tensor | float = 1.0, point_only: bool = False
    ) -> Tensor:
        """Make P symmetric, which it may not be if it came from outside."""
        Lambda[..., 0, :, :] = symmetric(Lambda[..., 0, :, :])
        return Lambda

    # -- geometry -------------------------------------------------------------------------------------------

    def retract(self, Y: Tensor, Delta: Tensor, retraction: str | Retraction = "cayley") -> Tensor:
        """L R(W)^2 L^T; Cayley up to ||W|| = max_velocity, continued by the geodesic beyond.

        Cayley's (I - W/2)^-1 has a pole where W has the eigenvalue 2; beyond it longer vectors would lead to
        nearer points.
        """
        Lambda = self.frame(Y)
        W = self.global_rep(Lambda, Delta)
        moved = _moved_far(Lambda, W, by_name(retraction), self.max_velocity)[..., 0, :, :]
        if differentiated(W):  # the derivative at 0 is not that of a constant
            return moved
        return torch.where((W != 0).flatten(-2).any(-1)[..., None, None], moved, Y)

    def transport(self, Y: Tensor, Delta: Tensor, V: Tensor) -> Tensor:
        Lambda = self.frame(Y)
        moved = _moved_far(Lambda, self.global_rep(Lambda, Delta), by_name("geodesic"))
        return self.push(moved, self.global_rep(Lambda, V))

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """L log(L^-1 Z L^-T) L^T."""
        Lambda = self.section(Y)
        return self.push(Lambda, self._coordinates(Lambda, Z) / 2)

    def dist(self, Y: Tensor, Z: Tensor) -> Tensor:
        """||log(L^-1 Z L^-T)||_F; its derivative where Y = Z is 0."""
        return frobenius(self._coordinates(self.section(Y), Z))

    def _coordinates(self, Lambda: Tensor, Z: Tensor) -> Tensor:
        """log(L^-1 Z L^-T) with triangular L: log(M M^T) with M = L^-1 K, Z = K K^T.

        For Z near Y by log(1 + x) of L^-1 (Z - Y) L^-T, which keeps the digits of small differences.
        """
        Y, L = Lambda.unbind(-3)
        D = 2 * self.global_rep(Lambda, Z - Y)
        near = (frobenius(D) < 0.5)[..., None, None]
        of_near = symmetric_function(torch.where(near, D, 0), lambda t: (t.log1p(), 1 / (1 + t)))
        far = log_gram(torch.linalg.solve_triangular(L, _cholesky(Z), upper=False))
        return torch.where(near, of_near, far)

    def log_euclidean(self, Y: Tensor, Z: Tensor) -> Tensor:
        """||log Y - log Z||_F, the distance in the log-Euclidean metric."""
        return frobenius(log_gram(_cholesky(Y)) - log_gram(_cholesky(Z)))


def _size(P: Tensor) -> Tensor:
    """||P||_F, also where squares of entries would be out of range, 1e-25 and 1e25 in float32."""
    largest = P.detach().abs().amax((-2, -1), keepdim=True)
    largest = torch.where(largest == 0, 1, largest)
    return frobenius(P / largest) * largest[..., 0, 0]


def _cholesky(P: Tensor) -> Tensor:
    """The Cholesky factor, NaN where there is none or P is not finite."""
    L, info = torch.linalg.cholesky_ex(symmetric(P))
    good = (info == 0) & torch.isfinite(L.detach().diagonal(dim1=-2, dim2=-1)).all(-1)
    return torch.where(good[..., None, None], L, torch.nan)


def _from_factor(L: Tensor) -> Tensor:
    """Lambda = [L L^T, L]."""
    return torch.stack([symmetric(L @ L.mT), L], -3)


def _indefinite(P: Tensor) -> Tensor:
    """Which symmetric matrices are not certain to be positive definite: (..., n, n) -> (...).

    Cholesky's rounding amounts to a change of P by about n eps sqrt(p_ii p_jj)/2 (Higham, Accuracy and
    Stability, theorem 10.5), so an indefinite P may well have a computed factor. With n eps of its diagonal
    subtracted, P has one only if it is definite, whatever the scale of its rows.
    """
    shifted = P.clone()
    shifted.diagonal(dim1=-2, dim2=-1).mul_(1 - P.shape[-1] * torch.finfo(P.dtype).eps)
    return torch.linalg.cholesky_ex(shifted)[1] > 0


def _moved_far(Lambda: Tensor, W: Tensor, R: Retraction, limit: float = 0.0) -> Tensor:
    """Lambda R(W) for W of any length: R is Cayley up to ||W|| = limit, and the geodesic from there."""
    L = Lambda[..., 1, :, :]
    if R.name == "geodesic":
        return _from_factor(L @ _exp(W))
    size = frobenius(W)[..., None, None]
    short = W / (size / limit).clamp_min(1)
    L = L + L @ R.dense(short)
    return _from_factor(torch.where(size > limit, L @ _exp(W - short), L))


def _exp(W: Tensor) -> Tensor:
    """exp(W) of symmetric W, accurate in its small eigenvalues, too; NaN where W is not finite."""
    bad = ~torch.isfinite(W.detach()).all(-1).all(-1)[..., None, None]
    exp = symmetric_function(torch.where(bad, 0, W), lambda t: (t.exp(), t.exp()))
    return torch.where(bad, torch.nan, exp)
