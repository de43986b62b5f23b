"""S^(N-1) = SO(N)/SO(N-1), or U(N)/U(N-1) for complex tensors: vectors of one length.

A point of a sphere of another radius r is Y = r y, y a unit vector, and everything is in units of length:
tangent vectors, W in g^hor and learning rates, as they would be without a constraint. A velocity W turns Y
by |W|/r radians. The formulas here are those of unit vectors y (M, N, 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ghor.layout import Layout
from ghor.linalg import everywhere, size
from ghor.spaces.base import Space, unit_of
from ghor.spaces.frames import Frame, Stored
from ghor.spaces.points import on_points
from ghor.spaces.stiefel import Stiefel
from ghor.spaces.vectors import Reflections


@dataclass(frozen=True, repr=False)
class Sphere(Stiefel):
    """The sphere: vectors (..., N) of length one; St(1, N) with vectors in place of one-column matrices.

    A matrix on Sphere() has rows of length one, on Sphere(along="columns") columns: the oblique manifold.
    Complex vectors have the canonical metric of U(N)/U(N-1), in which the direction i Y counts half. The row
    `padding_idx` of a matrix, if given, is not a point, and optimizers leave it alone: it is the padding row
    of an nn.Embedding.

    `radius` is the length of real vectors: a number, or "start", with which every vector keeps the length
    that it has when it is declared or when an optimizer takes it, whatever it is. `Sphere(flatten=2,
    radius="start")` keeps the Frobenius norm of a matrix. The learning rate is in units of length, as without
    a constraint: Adam moves entries by about lr, and a vector of N entries turns by lr sqrt(N)/r radians.

    The section of real vectors is a function of Y and a sign, so the implicit section is the default.
    """

    radius: float | str = field(default=1.0, kw_only=True)
    padding_idx: int | None = field(default=None, kw_only=True)

    # -- options ---------------------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        super().__post_init__()
        r: Any = self.radius
        if r != "start" and (not isinstance(r, Real) or r is True or not 0 < float(r) < math.inf):
            raise ValueError(f"radius is a positive number or 'start', got {r!r}")
        if type(r) not in (int, float, str):  # of NumPy
            object.__setattr__(self, "radius", float(r))

    def check_along(self) -> None:
        if self.along == "columns" and (self.blocks, self.flatten, self.padding_idx) != (None, 1, None):
            raise ValueError(
                f"along='columns' makes the columns of a matrix points; {self} has other options beside it"
            )

    @cached_property
    def layout(self) -> Layout:
        columns, padding = self.along == "columns", self.padding_idx
        return Layout(dims=1, blocks=self.count, columns=columns, flatten=self.flatten, padding=padding)

    def scale(self, y: Tensor) -> float | Tensor:
        """The radius of each of the points y of a weight: a number, or lengths (M, 1, 1), 1 where y = 0."""
        if not isinstance(self.radius, str):
            return self.radius
        length = length_of(y)
        return torch.where(length == 0, 1, length)

    @on_points("p>d")
    def lengths(self, Y: Tensor) -> Tensor:
        """|Y| of each vector: (..., N) -> (...), also where squares are out of range, 1e-25 in float32."""
        return length_of(Y)[..., 0, 0]

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) < self.flatten:
            raise ValueError(f"{self} holds vectors (..., N) with N >= 2, got shape {tuple(shape)}")
        if 0 in shape:
            empty = f"dimension {tuple(shape).index(0)} of shape {tuple(shape)} is empty"
            raise ValueError(f"{self} has no points here: {empty}")
        if self.along == "columns" and len(shape) < 2:
            raise ValueError(
                f"{self} holds the columns of matrices (..., N, K), got shape "
                f"{tuple(shape)}; for single vectors use ghor.Sphere()"
            )
        check_padding(self, shape)
        super().check_shape(shape)

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Real single numbers are refused: +-1 does not move. Complex ones move on the circle U(1)."""
        self.check_dtype(dtype)
        self.check_shape(shape)
        if self.layout.size(shape)[0] < 2 and not dtype.is_complex:
            raise ValueError(
                f"{self} holds vectors (..., N) with N >= 2 (a real number of length one does not move), got "
                f"shape {tuple(shape)}"
            )

    def check_dtype(self, dtype: torch.dtype) -> None:
        super().check_dtype(dtype)
        if dtype.is_complex and self.radius != 1:
            raise TypeError(
                f"weights on {self} are real floating point tensors, not {dtype}; complex vectors have "
                "length one: Sphere()"
            )
        limits = torch.finfo(dtype)
        if not isinstance(self.radius, str) and not limits.tiny <= self.radius <= limits.max:
            raise TypeError(
                f"{dtype} holds no vectors of length {self.radius:.3g}, only from {limits.tiny:.0e} to "
                f"{limits.max:.0e}; use another radius, or a wider dtype"
            )

    # -- points ----------------------------------------------------------------------------------------------

    @on_points("p>n")
    def residual(self, Y: Tensor) -> Tensor:
        """| |Y|^2/r^2 - 1 |; with radius="start" every vector is a point, but 0 and what is not finite."""
        return (squared(Y) - 1).abs()[..., 0, 0]

    def project(self, X: Tensor) -> Tensor:
        """r X/|X|, or X itself with radius="start"; the padding row stays as it is."""
        Y = super().project(X)
        return X.clone() if self.radius == "start" else Y

    def nearest(self, x: Tensor) -> Tensor:
        x = x / unit_of(x)  # the length of a subnormal x has few digits
        return x / length_of(x)

    def check_near(self, x: Tensor, y: Tensor, shape: Sequence[int]) -> None:
        if not everywhere(torch.isfinite(y)):
            raise ValueError(
                f"a vector of length 0 has no nearest point on {self}; initialise it first, for example with "
                f"{self}.random{tuple(shape)}"
            )

    def draw(self, normal: Tensor) -> Tensor:
        """Uniform."""
        return self.nearest(normal)

    # -- Algorithm 3 -----------------------------------------------------------------------------------------

    def frame(self, y: Tensor, section: str, held: dict[str, Tensor], eps: float) -> Frame:
        if y.is_complex():
            return super().frame(y, section, held, eps)
        stored = "section" in held if held else section == "transported"
        return (Stored if stored else Reflections)(self, y, held, eps)

    def hor_(self, w: Tensor, factor: float = 0.5) -> None:
        """A is 0 for real vectors, whatever is there: 0/0, where a rule has no eps."""
        if w.is_complex():
            super().hor_(w, factor)
        else:
            w[..., 0, :] = 0

    def angle(self, w: Tensor) -> Tensor:
        """|W|/r, the angle in radians; of complex vectors as of one-column matrices."""
        return super().angle(w) if w.is_complex() else size(w)[..., 0, 0]

    # -- logarithms ------------------------------------------------------------------------------------------

    @on_points("pp>v")
    def log(self, Y: Tensor, Z: Tensor, *, eps: float = 0.0) -> Tensor:
        """theta/sin(theta) (Z - cos(theta) Y), with theta from both its sine and its cosine.

        So it is accurate to rounding, relatively for near points, too, and for points that are nearly
        antipodal; to an antipodal point it is one of the shortest ways. Geodesics of complex vectors are not
        circles: there it is that of one-column matrices.
        """
        if Y.is_complex():
            return super().log(Y, Z)
        Y, Z = self._same_length(Y, Z, eps)
        c = (Y * Z).sum(-2, keepdim=True)
        D = torch.where(c < 0, Z + Y, Z - Y)
        K = D - Y * (Y * D).sum(-2, keepdim=True)  # Z - c Y, but not a difference of large numbers
        K = K - Y * (Y * K).sum(-2, keepdim=True)  # once more, where D is nearly along Y
        s2 = squared(K)
        small, opposite = (s2 < 1e-6) & (c > 0), (s2 == 0) & (c < 0)
        s = torch.where(small | opposite, 1, s2).sqrt()
        series = 1 + s2 / 6 + 3 * s2 * s2 / 40  # theta/sin(theta); sqrt has no derivative at 0
        Delta = K * torch.where(small, series, torch.atan2(s, c) / s)
        return torch.where(opposite, math.pi * across(Y), Delta)

    @on_points("pp>d")
    def dist(self, Y: Tensor, Z: Tensor, *, eps: float = 0.0) -> Tensor:
        """r times the angle 2 atan(|Z - Y|/|Z + Y|), accurate to rounding at any angle.

        Its derivative is taken as 0 where points coincide and where they are antipodal.
        """
        if Y.is_complex():
            return self.norm(Y, self.log(Y, Z))
        Y, Z = self._same_length(Y, Z, eps)
        near, far = (root(squared(V)) for V in (Z - Y, Z + Y))
        return 2 * torch.atan2(near, far)[..., 0, 0]

    def _same_length(self, y: Tensor, z: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Both of length 1, where z is in the unit of y; ValueError for points that no one sphere holds."""
        if self.radius != "start":
            return y, z
        length = length_of(z)
        off = (length.detach() - 1).abs() > max(1e-3, eps)
        if not torch.compiler.is_compiling() and not everywhere(~off):
            raise ValueError(f"points of different lengths are on different spheres of {self}")
        return y / length_of(y), z / length


def squared(y: Tensor) -> Tensor:
    """|y|^2, (M, N, 1) -> (M, 1, 1).

    By torch's sum, which adds pairwise: its norms and products are 1e-5 off for a million entries in float32.
    """
    return ((y * y.conj()).real if y.is_complex() else y * y).sum(-2, keepdim=True)


def length_of(y: Tensor) -> Tensor:
    """|y|, (M, N, 1) -> (M, 1, 1), also where squares of entries are out of range."""
    unit = unit_of(y)
    return squared(y / unit).sqrt() * unit


def root(s: Tensor) -> Tensor:
    """sqrt(s), with derivative 0 at 0."""
    zero = s == 0
    return torch.where(zero, 0, torch.where(zero, 1, s).sqrt())


def across(y: Tensor) -> Tensor:
    """A unit vector orthogonal to y, from the coordinate that y has least of; a constant for autograd."""
    y = y.detach()
    e = torch.zeros_like(y).scatter(-2, y.abs().argmin(-2, keepdim=True), 1)
    v = e - y * (y * e).sum(-2, keepdim=True)
    return v / length_of(v)


def check_padding(space: Space, shape: Sequence[int]) -> None:
    """Raise ValueError unless the padding row exists."""
    row, dims = space.layout.padding, space.dims
    rows = shape[-dims - 1] if len(shape) > dims else 0
    if row is not None and not -rows <= row < rows:
        raise ValueError(f"{space} has no row {row} in a tensor of shape {tuple(shape)}")
