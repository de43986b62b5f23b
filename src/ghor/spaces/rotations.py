"""SO(N) and U(N): the groups themselves, so that the section is Y and g^hor is the whole Lie algebra."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ghor._torch.functions import frozen
from ghor._torch.transforms import differentiated
from ghor.linalg import det, everywhere, eye, finite
from ghor.spaces.base import unit_of
from ghor.spaces.logarithms import log_rotation
from ghor.spaces.points import on_points
from ghor.spaces.stiefel import Orthogonal


class OrthogonalGroup(Orthogonal):
    """Square matrices with Y^H Y = I, metric Re tr(U^H V)/2."""

    def check_size(self, N: int, n: int) -> None:
        if N != n:
            raise ValueError("holds square matrices (ghor.Stiefel() holds others)")

    @on_points("pp>v")
    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """Y log(Y^H Z), the principal logarithm; for an angle of exactly pi one of the two.

        NaN for points of different components. Y^H Z = I + Y^H (Z - Y) is I where Z = Y.
        """
        R = eye(Y) + Y.mH @ (Z - Y)
        if not R.is_complex():
            R = torch.where((det(frozen(R)) < 0)[..., None, None], torch.nan, R)
        return Y @ log_rotation(R)


class SpecialOrthogonal(OrthogonalGroup):
    """The rotations SO(N) = {Y: Y^T Y = I, det Y = 1}, real (..., N, N), metric tr(U^T V)/2.

    g^hor: A skew (N x N).

    >>> Y = SpecialOrthogonal().random(10, 3, 3)
    >>> bool((Y.det() > 0).all())
    True
    """

    complex: ClassVar[bool] = False

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype.is_complex:
            raise TypeError(
                f"weights on {self} are real floating point tensors; use ghor.Unitary() for {dtype}"
            )
        super().check_dtype(dtype)

    @on_points("p>n")
    def residual(self, Y: Tensor) -> Tensor:
        """||Y^T Y - I||_F, plus 2, the distance of the two components of O(N), if det Y < 0."""
        return super().residual(Y) + 2 * (det(frozen(Y)) < 0)

    def hint(self, Y: Tensor) -> str:
        """Why points Y are off the space, for a message: a determinant of -1; else ""."""
        if not bool((self.residual(Y) >= 2).any()):
            return ""
        return (
            "determinant -1: use ghor.Stiefel(), which has both signs, or project it, which reflects a column"
        )

    def draw(self, normal: Tensor) -> Tensor:
        """Uniform (Haar), the last column negated where det < 0."""
        y = super().draw(normal)
        return torch.cat([y[..., :-1], torch.where(det(y) < 0, -1, 1)[:, None, None] * y[..., -1:]], -1)

    def nearest(self, x: Tensor) -> Tensor:
        """The nearest rotation; if det X < 0, with the vector of the smallest singular value negated."""
        y, good = super().nearest(x), finite(x)
        v = torch.linalg.svd(torch.where(good, frozen(x), eye(x)))[2][..., -1:, :].mT
        v = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True)  # LAPACK's is off by 1e-6 in float32
        return y - torch.where((det(frozen(y)) < 0)[:, None, None], 2 * (frozen(y) @ v) @ v.mT, 0)

    def check_near(self, x: Tensor, y: Tensor, shape: Sequence[int]) -> None:
        super().check_near(x, y, shape)
        if differentiated(x) and not everywhere(~(det(frozen(x / unit_of(x))) < 0)):
            raise ValueError(f"{self}.project of a matrix with det < 0 has no derivative here; detach it")

    @on_points("pvv>v")
    def levi_civita(self, Y: Tensor, Delta: Tensor, V: Tensor, t: float = 1.0) -> Tensor:
        """Transport V along the geodesic of Delta to time t by the Levi-Civita connection of the group:

            Y exp(t A/2) B exp(t A/2),   A = Y^T Delta, B = Y^T V

        `transport`, that of the canonical connection of the second kind, gives Y exp(t A) B instead. Both are
        isometries, and agree if A and B commute. On symmetric spaces (Grassmann, Sphere) the two connections
        are the same.
        """
        half = torch.linalg.matrix_exp(t * (Y.mT @ Delta) / 2)
        return Y @ half @ (Y.mT @ V) @ half


class Unitary(OrthogonalGroup):
    """The unitary group U(N) = {Y: Y^H Y = I}, complex (..., N, N), metric Re tr(U^H V)/2.

    g^hor: A skew-Hermitian (N x N), its diagonal imaginary. 1 x 1 matrices are the complex circle U(1). For
    real tensors it is O(N), rotations and reflections: a weight keeps the sign of its determinant.

    >>> Y = Unitary().random(7, 1, 1, dtype=torch.complex64)
    >>> torch.allclose(Y.abs(), torch.ones(7, 1, 1))
    True
    """
