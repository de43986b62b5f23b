"""Matrices with orthonormal columns: Stiefel and Grassmann manifolds, and the flags between them.

Lambda is in SO(N), or in U(N) for complex tensors. The three differ in what A may be, that is, in which turns
of the columns among themselves move a point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from ghor._torch.functions import frozen, with_value
from ghor._torch.transforms import differentiated
from ghor.linalg import defect, everywhere, eye, eye_of, finite, inner, largest, polar, solve, spectral_bound
from ghor.spaces.base import unit_of
from ghor.spaces.frames import DIRECTIONS, ClosedForm, Frame, Stored
from ghor.spaces.logarithms import canonical_log
from ghor.spaces.matrix import Matrices, Subspaces
from ghor.spaces.points import on_points
from ghor.spaces.symmetric import gram_function
from ghor.spaces.tangent import Tangent


@dataclass(frozen=True, repr=False)
class Orthogonal(Matrices):
    """Spaces of SO(N), X* = X^T, or of U(N), X* = X^H: frames, points and the canonical metric."""

    implicit: ClassVar[bool] = True
    complex: ClassVar[bool] = True

    def frame(self, y: Tensor, section: str, held: dict[str, Tensor], eps: float) -> Frame:
        """Stored if N = n, where there is no Q to save storing; otherwise "auto" is the faster kind.

        Also of nearly square matrices: a function of y would take as much memory as Q there, and its
        reference may wear in more directions at once than are reflected.
        """
        N, n = y.shape[-2:]
        slim = N - n > 2 or (n < N and n < DIRECTIONS)
        closed = slim and (section == "implicit" or (section == "auto" and N >= 512 and 4 * n <= N))
        closed = "frame_anchor" in held if held else closed
        return (ClosedForm if closed else Stored)(self, y, held, eps)

    def free_frame(
        self, y: Tensor, section: str, held: dict[str, Tensor], eps: float, by_rows: bool | None
    ) -> Frame:
        """None but the point, unless another was asked for; of square matrices one is as small."""
        N, n = y.shape[-2:]
        if held or section != "auto" or n == N or not (n > 1 or y.is_complex()):
            return self.frame(y, section, held, eps)
        return Tangent(self, y, held, eps, by_rows)

    def hor_(self, w: Tensor, factor: float = 0.5) -> None:
        if factor != 1:  # what is 0 in every skew matrix is 0, also where a rule has divided 0 by 0
            w[..., : w.shape[-1], :].diagonal(dim1=-2, dim2=-1).real.zero_()
        super().hor_(w, factor)

    def complement(self, y: Tensor) -> Tensor:
        """The closed form, formed, with R = polar(y_1), so that Lambda(E) = I; to autograd R is constant."""
        n = y.shape[-1]
        if y.shape[-2] == n:
            return y[..., :0]
        Z = y @ polar(frozen(y[..., :n, :])).mH
        Z1, Z2 = Z[..., :n, :], Z[..., n:, :]
        X = solve(eye(Z1) + Z1.mH, Z2.mH)
        return torch.cat([-(X + Z1 @ X), eye(Z2.mH) - Z2 @ X], -2)

    def angle(self, w: Tensor) -> Tensor:
        """(a + sqrt(a^2 + 4 b^2))/2 with a >= ||A||_2 and b >= ||B||_2, a bound of ||[[A, -B^H], [B, 0]]||_2.

        That norm is the largest angle of exp(W); Cayley turns by less. The bound is exact if A or B is 0 and
        the other has rank one (two for A), and up to rounding and n^(1/16) in general if one of them is 0.
        """
        n = w.shape[-1]
        a = spectral_bound(w[..., :n, :], 1 if w.is_complex() else 2)
        b = spectral_bound(w[..., n:, :])
        return (a + torch.hypot(a, 2 * b)) / 2

    # -- points ----------------------------------------------------------------------------------------------

    def draw(self, normal: Tensor) -> Tensor:
        """Uniform (Haar): the Q of Q R, with diag(R) made positive."""
        Q, R = torch.linalg.qr(normal)
        d = R.diagonal(dim1=-2, dim2=-1)
        return Q * torch.where(d == 0, 1, torch.sgn(d)).unsqueeze(-2)

    def nearest(self, x: Tensor) -> Tensor:
        """X (X^H X)^(-1/2), the polar factor."""
        x = x / unit_of(x)  # 1e30 squared overflows float32
        y = polar(frozen(x))
        y = y + y @ (defect(y) / 2)  # LAPACK's U V^H is orthogonal to 1e-5 in float32
        if not differentiated(x):
            return y
        # The SVD has no derivative where singular values coincide, as all of them do on the space.
        return with_value(x @ gram_function(x.mH, lambda t: (t.rsqrt(), -(t**-1.5) / 2), zero=0.0), y)

    def check_near(self, x: Tensor, y: Tensor, shape: Sequence[int]) -> None:
        """X must have full rank."""
        s = torch.linalg.svdvals(frozen(x / unit_of(x)))
        rank = (s > s[..., :1] * max(x.shape[-2:]) * torch.finfo(x.dtype).eps).sum(-1)
        if not everywhere(rank == x.shape[-1]):
            raise ValueError(
                f"a matrix of rank {-int(largest(-rank))} < {x.shape[-1]} has no nearest point on {self}; "
                f"initialise it first, for example with {self}.random{tuple(shape)}"
            )

    # -- the canonical metric --------------------------------------------------------------------------------

    @on_points("pvv>m")
    def metric(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """The canonical metric Re tr(U^H (I - Y Y^H/2) V) = Re tr(Omega(U)^H Omega(V))/2."""
        return inner(U, V) - inner(Y.mH @ U, Y.mH @ V) / 2

    @on_points("pv>v")
    def rgrad(self, Y: Tensor, G: Tensor) -> Tensor:
        """G - Y Y^H G + Y skew(Y^H G), the gradient in the canonical metric; on Stiefel, G - Y G^H Y."""
        YG = Y.mH @ G
        return G + Y @ (self.skew(YG) - YG)

    def check_points(self, what: str, points: Sequence[Tensor], eps: float) -> None:
        if self.layout.dims < 2:  # vectors of any length have a direction
            return
        off = max(largest(self.geometry.residual(frozen(y)).nan_to_num(0)) for y in points)
        if off > eps**0.5 * points[0].shape[-1]:
            raise ValueError(f"{self}.{what}: a matrix is {off:.1e} off the space; project it first")


class Stiefel(Orthogonal):
    """The Stiefel manifold {Y: Y^H Y = I} of (..., N, n) matrices with orthonormal columns, N >= n.

    A wide matrix has orthonormal rows instead. Metric: the canonical one, Re tr(U^H (I - Y Y^H/2) V). g^hor:
    A skew (n x n), B arbitrary ((N-n) x n).

    >>> Y = Stiefel().random(49, 7)
    >>> bool(Stiefel().residual(Y) < 1e-5)
    True
    """

    @on_points("pp>v")
    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """The logarithm in the canonical metric by Zimmermann's iteration (arXiv 1604.05054), in O(N^3).

        NaN where it finds none: for points at or near the cut locus, or in different components.
        """
        Lambda = self.section(Y)
        V = self.section(eye_of(Y) + Lambda.mH @ (Z - Y))  # E itself where Z = Y
        return Lambda @ canonical_log(V, Y.shape[-1])


@dataclass(frozen=True, repr=False)
class Grassmann(Subspaces, Orthogonal):
    """The Grassmann manifold of subspaces span(Y), Y^H Y = I, held by (..., N, n) matrices, N > n.

    Y and Y R, R a rotation, are the same point: `dist`, and the steps of an optimizer that is invariant under
    rotations, do not depend on R. Metric: Re tr(U^H V), where Y^H U = 0; rgrad is G - Y Y^H G. g^hor: A = 0,
    B arbitrary ((N-n) x n).

    >>> Y = Grassmann().random(9, 2)
    >>> bool(Grassmann().dist(Y, Y.flip(-1)) < 1e-3)
    True
    """

    @on_points("pp>v")
    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """(I - Y Y^H) Z V diag(t / sin t) U^H, where Y^H Z = U diag(cos t) V^H, in O(N n^2).

        t are the principal angles. At pi/2 the shortest geodesic is not unique, and one of them is taken.
        """
        D, YZ = Z - Y, Y.mH @ Z
        K = D - Y @ (Y.mH @ D)  # small where Z is near Y
        good = finite(YZ)
        U, c, Vh = torch.linalg.svd(torch.where(good, frozen(YZ), eye(YZ)))
        KV = frozen(K) @ Vh.mH
        s = torch.linalg.vector_norm(KV, dim=-2)
        angle = torch.where(s == 0, 1, torch.atan2(s, c) / torch.where(s == 0, 1, s))
        value = torch.where(good, (KV * angle.unsqueeze(-2)) @ U.mH, torch.nan)
        if not differentiated(K):
            return value
        L = solve(YZ, K, left=False)  # of the tangents of the angles, f(t) = atan(sqrt t)/sqrt t
        return with_value(L @ gram_function(L.mH, _atan_ratio), value)


def _atan_ratio(t: Tensor) -> tuple[Tensor, Tensor]:
    """f(t) = atan(sqrt t)/sqrt t and f'(t); near 0, where sqrt has no derivative, by their series."""
    small = t < 1e-4
    safe = torch.where(small, 1.0, t)
    root = safe.sqrt()
    f = root.atan() / root
    df = (1 / (1 + safe) - f) / (2 * safe)
    near, dnear = 1 - t / 3 + t * t / 5 - t**3 / 7, -1 / 3 + 2 * t / 5 - 3 * t * t / 7
    return torch.where(small, near, f), torch.where(small, dnear, df)


@dataclass(frozen=True, repr=False)
class Flag(Orthogonal):
    """The flags span(Y_1) < span(Y_1, Y_2) < ..., held by Y = [Y_1, Y_2, ...] (..., N, n), Y^H Y = I.

    Block Y_i has `sizes[i]` columns. Turning a block within its span does not move the flag, so g^hor has A
    skew with zero diagonal blocks, and B arbitrary. A single block gives Grassmann, and blocks of one column
    give Stiefel up to signs. Metric: that of Stiefel.

    >>> Flag((2, 1)).random(9, 3).shape
    torch.Size([9, 3])
    """

    sizes: tuple[int, ...] = (2, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.sizes if isinstance(self.sizes, (tuple, list)) else ()
        if not sizes or not all(type(n) is int and n > 0 for n in sizes):
            raise ValueError(
                f"the sizes of a flag are positive numbers of columns such as (2, 1), got {self.sizes!r}"
            )
        object.__setattr__(self, "sizes", tuple(sizes))

    def check_size(self, N: int, n: int) -> None:
        if n != sum(self.sizes):
            raise ValueError(f"holds matrices with {sum(self.sizes)} columns")
        if N == n and len(self.sizes) == 1:
            raise ValueError("of square matrices is a single point")

    def skew(self, X: Tensor) -> Tensor:
        """X - X^H outside the diagonal blocks."""
        A = X - X.mH
        for n, end in zip(self.sizes, accumulate(self.sizes), strict=True):
            A[..., end - n : end, end - n : end] = 0
        return A

    def representative(self, y: Tensor, y0: Tensor) -> Tensor:
        """[y0_1 y0_1^H y_1, ...]: each block of y projected to the span of y0's, whatever its basis."""
        blocks = zip(y.split(self.sizes, -1), y0.split(self.sizes, -1), strict=True)
        return torch.cat([b @ (b.mH @ a) for a, b in blocks], -1)
