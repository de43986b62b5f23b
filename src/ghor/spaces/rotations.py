"""SO(N) and U(N): the groups themselves, so that the section is Y and g^hor is the whole Lie algebra."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ghor._torch.transforms import differentiated
from ghor.linalg import det, det_sign, everywhere, eye_like, log_rotation
from ghor.spaces.base import compute
from ghor.spaces.orthogonal import Orthogonal, require_geodesic


class OrthogonalGroup(Orthogonal):
    """Square matrices with Y^H Y = I, metric Re tr(U^H V)/2."""

    def check_shape(self, shape: Sequence[int]) -> None:
        super().check_shape(shape)
        if len(set(self.size(shape))) > 1:
            raise ValueError(f"{self} holds square matrices, got shape {tuple(shape)}; use ghor.Stiefel()")

    def section_matrix(self, Y: Tensor, R: Tensor | None = None) -> Tensor:
        """Lambda = Y: there is no complement."""
        return Y

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """Y log(Y^H Z), the principal logarithm; Y^H Z = I + Y^H (Z - Y) is I where Z = Y."""
        M = self.matrix(Y)
        R = eye_like(M) + M.mH @ self.matrix(Z - Y)
        Delta = self.unmatrix(M @ log_rotation(R), Y.shape)
        return require_geodesic(self, Y, Z, Delta)


class SpecialOrthogonal(OrthogonalGroup):
    """The rotations SO(N) = {Y: Y^T Y = I, det Y = 1}, real (..., N, N), metric tr(U^T V)/2.

    g^hor: A skew (N x N).

    >>> Y = SpecialOrthogonal().random(10, 3, 3)
    >>> bool((Y.det() > 0).all())
    True
    """

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype.is_complex:
            raise TypeError(
                f"weights on {self} are real floating point tensors; use ghor.Unitary() for {dtype}"
            )
        super().check_dtype(dtype)

    def residual(self, Y: Tensor) -> Tensor:
        """||Y^T Y - I||_F, plus 2, the distance of the two components of O(N), if det Y < 0."""
        return super().residual(Y) + 2 * (det(compute(self.matrix(Y).detach())) < 0)

    def hint(self, Y: Tensor) -> str:
        if not bool((det(compute(self.matrix(Y.detach()))) < 0).any()):
            return ""
        return (
            "determinant -1: use ghor.Stiefel(), which has both signs, or project it, which reflects a column"
        )

    def _orient(self, U: Tensor, V: Tensor) -> Tensor:
        """U with det(U V) = 1; negating the column of the smallest singular value keeps U V nearest."""
        sign = torch.where(det(U @ V) < 0, -1, 1).to(U.dtype)
        return torch.cat([U[..., :-1], U[..., -1:] * sign[..., None, None]], -1)

    def project(self, X: Tensor) -> Tensor:
        """The nearest rotation; if det X < 0, with the vector of the smallest singular value negated."""
        if differentiated(X) and not everywhere(~(det_sign(compute(self.matrix(X).detach())) < 0)):
            raise ValueError(f"{self}.project of a matrix with det < 0 has no derivative here; detach it")
        return super().project(X)

    def levi_civita(self, Y: Tensor, Delta: Tensor, V: Tensor, t: float = 1.0) -> Tensor:
        """Transport V along the geodesic of Delta to time t by the Levi-Civita connection of the group:

            Y exp(t A/2) B exp(t A/2),   A = Y^T Delta, B = Y^T V

        `transport`, that of the canonical connection of the second kind, gives Y exp(t A) B instead. Both are
        isometries, and agree if A and B commute. On symmetric spaces (Grassmann, Sphere) the two connections
        are the same.
        """
        M = self.matrix(Y)
        A, B = M.mT @ self.matrix(Delta), M.mT @ self.matrix(V)
        half = torch.linalg.matrix_exp(t * A / 2)
        return self.unmatrix(M @ half @ B @ half, Y.shape)


class Unitary(OrthogonalGroup):
    """The unitary group U(N) = {Y: Y^H Y = I}, complex (..., N, N), metric Re tr(U^H V)/2.

    g^hor: A skew-Hermitian (N x N), its diagonal imaginary. 1 x 1 matrices are the complex circle U(1). For
    real tensors it is O(N), rotations and reflections: a weight keeps the sign of its determinant.

    >>> Y = Unitary().random(7, 1, 1, dtype=torch.complex64)
    >>> torch.allclose(Y.abs(), torch.ones(7, 1, 1))
    True
    """
