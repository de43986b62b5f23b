"""GL(n)/O(n): symmetric positive definite matrices with the affine-invariant metric."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ghor._torch.precision import COMPUTE_DTYPE
from ghor.linalg import size, solve, symmetric
from ghor.spaces.base import unit_tolerance
from ghor.spaces.frames import Frame, Group
from ghor.spaces.group import GroupSpace
from ghor.spaces.points import on_points
from ghor.spaces.retraction import Retraction, cayley, geodesic
from ghor.spaces.symmetric import exp_symmetric, log_gram, symmetric_function

HALF = {torch.finfo(dtype).eps: dtype for dtype in COMPUTE_DTYPE}  # half precision by its rounding


@dataclass(frozen=True, repr=False)
class SPD(GroupSpace):
    """Symmetric positive definite P (..., n, n) with the metric tr(P^-1 U P^-1 V).

    g^hor: symmetric W, <W, W'> = tr(W W'). P = L L^T with L in GL(n), and L <- L exp(W) moves P by 2 ||W||.
    Every invertible L is in the group, so nothing drifts off and nothing has to be repaired or rescaled; each
    step computes P from L, exactly symmetric.

    The geometry works with Cholesky factors, whose condition is the square root of P's; nothing depends on
    the scale of P. The only loss is Cholesky's: a relative error of at most n eps cond(P) in the smallest
    eigenvalue, and so the same absolute error in `dist`. Matrices that are not positive definite within
    rounding, cond(P) > 1/(n eps) (for n = 10: 8e5 in float32, 4e14 in float64), are off the space. Geometry
    gives NaN where there is no Cholesky factor; the optimizer does not take a step to such a matrix, nor to
    one that is no longer definite in the digits of the weight.
    """

    compact: ClassVar[bool] = False
    metric_scale: ClassVar[float] = 4.0
    curvature: ClassVar[float] = -0.5

    def check_size(self, N: int, n: int) -> None:
        if N != n:
            raise ValueError("holds square matrices (..., n, n)")

    # -- points

    @on_points("p>n")
    def residual(self, Y: Tensor) -> Tensor:
        """||P - P^T||/2, plus ||P|| where P is not certain to be positive definite; infinite for P = 0."""
        whole = safe_size(Y)
        whole = torch.where(whole == 0, math.inf, whole)
        return safe_size(Y - Y.mT) / 2 + torch.where(indefinite(symmetric(Y.detach())), whole, 0)

    @on_points("p>n")
    def tolerance(self, Y: Tensor, *, eps: float = 0.0) -> Tensor:
        """Rounding of the entries, relative to the size of P."""
        return unit_tolerance(eps) * safe_size(Y)

    def project(self, X: Tensor) -> Tensor:
        """The symmetric part; if it is not positive definite, with small eigenvalues raised.

        They are raised to 10 n eps times the largest eigenvalue, which must be positive; in half precision to
        sqrt(n) eps, twice what rounding can take away.
        """
        Y = super().project(X)
        if X.dtype not in COMPUTE_DTYPE:
            return Y
        P = super().project(X.to(COMPUTE_DTYPE[X.dtype]))
        more = raised(P, X.shape[-1] ** 0.5 * torch.finfo(X.dtype).eps).to(X.dtype)
        return torch.where(indefinite(Y.to(P.dtype))[..., None, None], more, Y)

    def nearest(self, x: Tensor) -> Tensor:
        S = symmetric(x)
        more = raised(S, 10 * x.shape[-1] * torch.finfo(x.dtype).eps)
        near = torch.where(indefinite(S.detach())[..., None, None], more, S)
        return torch.where(indefinite(near.detach())[..., None, None], torch.nan, near)

    def draw(self, normal: Tensor) -> Tensor:
        """exp(S), S symmetric and normal with ||S||_2 near sqrt(2)."""
        return symmetric(torch.linalg.matrix_exp(symmetric(normal) / normal.shape[-1] ** 0.5))

    # -- Algorithm 3: Lambda is a factor L of P = L L^T

    def hor_(self, w: Tensor, factor: float = 0.5) -> None:
        w.copy_(symmetric(w))

    def section(self, y: Tensor) -> Tensor:
        """The Cholesky factor."""
        return cholesky(y)

    def point(self, L: Tensor) -> Tensor:
        return symmetric(L @ L.mT)

    def transported(self, L: Tensor, y: Tensor) -> Tensor:
        """L (L^-1 P L^-T)^(1/2)."""
        inner = symmetric(solve(L, solve(L, y).mT))
        return L @ symmetric_function(inner, lambda t: (t.sqrt(), 0.5 / t.sqrt()))

    def coordinates(self, L: Tensor, g: Tensor) -> Tensor:
        """L^T (G + G^T) L, *exactly* symmetric."""
        return symmetric(L.mT @ (g + g.mT) @ L)

    def global_rep(self, L: Tensor, v: Tensor) -> Tensor:
        """L^-1 Delta L^-T/2."""
        return symmetric(solve(L, solve(L, symmetric(v)).mT)) / 2

    def velocity(self, L: Tensor, w: Tensor) -> Tensor:
        """2 L W L^T."""
        return symmetric(2 * L @ w @ L.mT)

    def moved(self, L: Tensor, w: Tensor, R: Retraction, longest: float, eps: float) -> Tensor:
        """L R(W)."""
        if longest < math.inf:
            return L + L @ (w @ R.ratio(w, longest))
        return L @ exp_symmetric(w) if R is geodesic else cayley_then_geodesic(L, w, super().longest(w))

    def unrepresentable(self, L: Tensor, eps: float) -> Tensor:
        """Which points are not certain to be positive definite, nor once they are rounded to eps."""
        P = self.point(L)
        bad = indefinite(P)
        return bad if eps not in HALF else bad | indefinite(P.to(HALF[eps]).to(P.dtype))

    def digits_end(self, eps: float) -> str:
        """Where the digits end, for a warning."""
        return "to condition 1/(n eps)"

    def away(self, frame: Frame, y0: Tensor, out: Tensor) -> None:
        """-log(Y, Y0) in g^hor, so that the rate of decay does not depend on the size of Y."""
        assert isinstance(frame, Group)
        out.copy_(-self.global_rep(frame.L, self.log(frame.point(), y0)))

    # -- logarithms

    @on_points("pp>v")
    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """L log(L^-1 Z L^-T) L^T."""
        L = self.section(Y)
        return symmetric(L @ relative_log(L, Y, Z) @ L.mT)

    @on_points("pp>d")
    def dist(self, Y: Tensor, Z: Tensor) -> Tensor:
        """||log(L^-1 Z L^-T)||_F; its derivative where Y = Z is 0."""
        return size(relative_log(self.section(Y), Y, Z))[..., 0, 0]

    @on_points("pp>d")
    def log_euclidean(self, Y: Tensor, Z: Tensor) -> Tensor:
        """||log Y - log Z||_F, the distance in the log-Euclidean metric."""
        return size(log_gram(cholesky(Y)) - log_gram(cholesky(Z)))[..., 0, 0]


def safe_size(P: Tensor) -> Tensor:
    """||P||_F, (..., n, n) -> (...), also where squares are out of range, as of 1e-25 in float32."""
    largest = P.detach().abs().amax((-2, -1), keepdim=True)
    largest = torch.where(largest == 0, 1, largest)
    return (size(P / largest) * largest)[..., 0, 0]


def cholesky(P: Tensor) -> Tensor:
    """The Cholesky factor, NaN where there is none or P is not finite."""
    L, info = torch.linalg.cholesky_ex(symmetric(P))
    good = (info == 0) & torch.isfinite(L.detach().diagonal(dim1=-2, dim2=-1)).all(-1)
    return torch.where(good[..., None, None], L, torch.nan)


def indefinite(P: Tensor) -> Tensor:
    """Which symmetric matrices are not certain to be positive definite: (..., n, n) -> (...).

    Cholesky's rounding amounts to a change of P by about n eps sqrt(p_ii p_jj)/2 (Higham, Accuracy and
    Stability, theorem 10.5), so an indefinite P may well have a computed factor. With n eps of its diagonal
    subtracted, P has one only if it is definite, whatever the scale of its rows.
    """
    part = P.shape[-1] * torch.finfo(P.dtype).eps
    shifted = P - torch.diag_embed(P.diagonal(dim1=-2, dim2=-1) * part)
    info: Tensor = torch.linalg.cholesky_ex(shifted)[1]
    return info > 0


def raised(S: Tensor, least: float) -> Tensor:
    """Symmetric S with eigenvalues of at least `least` times the largest one, by a constant for autograd."""
    t, V = torch.linalg.eigh(S.detach())
    return S + symmetric((V * (least * t[..., -1:] - t).clamp_min(0).unsqueeze(-2)) @ V.mT)


def relative_log(L: Tensor, Y: Tensor, Z: Tensor) -> Tensor:
    """log(L^-1 Z L^-T) with triangular L, Y = L L^T: log(M M^T) with M = L^-1 K, Z = K K^T.

    For Z near Y by log(1 + x) of L^-1 (Z - Y) L^-T, which keeps the digits of small differences.
    """
    half = torch.linalg.solve_triangular(L, symmetric(Z - Y), upper=False)
    D = symmetric(torch.linalg.solve_triangular(L, half.mT, upper=False))
    near = size(D) < 0.5
    of_near = symmetric_function(torch.where(near, D, 0), lambda t: (t.log1p(), 1 / (1 + t)))
    return torch.where(near, of_near, log_gram(torch.linalg.solve_triangular(L, cholesky(Z), upper=False)))


def cayley_then_geodesic(L: Tensor, w: Tensor, limit: float) -> Tensor:
    """L R(W) up to ||W|| = limit, and along the geodesic from there.

    Cayley's (I - W/2)^-1 has a pole where W has the eigenvalue 2; beyond it longer vectors would lead to
    nearer points.
    """
    length = size(w)
    short = w / (length / limit).clamp_min(1)
    new = L + L @ (short @ cayley.ratio(short, limit))
    return torch.where(length > limit, new @ exp_symmetric(w - short), new)
