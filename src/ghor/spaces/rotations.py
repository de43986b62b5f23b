"""SO(N): rotations; the group itself, so the section is Y and g^hor is so(N)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ghor.linalg import det, log_rotation
from ghor.spaces.orthogonal import Orthogonal, require_geodesic


class SpecialOrthogonal(Orthogonal):
    """SO(N) = {Y: Y^T Y = I, det Y = 1}, metric tr(U^T V)/2. g^hor: A skew (N x N)."""

    def check_shape(self, shape: Sequence[int]) -> None:
        super().check_shape(shape)
        if len(set(self.size(shape))) > 1:
            raise ValueError(f"{self} holds square matrices, got shape {tuple(shape)}; use ghor.Stiefel()")

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype.is_complex:
            raise TypeError(
                f"weights on {self} are real floating point tensors; use ghor.Unitary() for {dtype}"
            )
        super().check_dtype(dtype)

    def residual(self, Y: Tensor) -> Tensor:
        """||Y^T Y - I||_F; a reflection (det < 0) is 2 further away, the distance of the components."""
        return super().residual(Y) + 2 * (det(self.matrix(Y).detach()) < 0)

    def _orient(self, U: Tensor, V: Tensor) -> Tensor:
        """det(U V) = 1: the column of the smallest singular value turns, so that the point stays the
        nearest."""
        sign = torch.where(det(U @ V) < 0, -1, 1).to(U.dtype)
        return torch.cat([U[..., :-1], U[..., -1:] * sign[..., None, None]], -1)

    def project(self, X: Tensor) -> Tensor:
        if X.requires_grad and bool((det(self.matrix(X).detach()) < 0).any()):
            raise ValueError(f"{self}.project of a matrix with det < 0 has no derivative here; detach it")
        return super().project(X)

    def section_matrix(self, Y: Tensor, R: Tensor | None = None) -> Tensor:
        """Lambda = Y: there is no complement."""
        return Y

    def levi_civita(self, Y: Tensor, Delta: Tensor, V: Tensor, t: float = 1.0) -> Tensor:
        """V along the geodesic of Delta to time t, parallel for the Levi-Civita connection of the group:

            Y exp(t A/2) B exp(t A/2),   A = Y^T Delta, B = Y^T V

        `transport`, along the canonical connection of the second kind, gives Y exp(t A) B: both are
        isometries, and they agree where A and B commute. On symmetric spaces (Grassmann, Sphere) the two
        connections agree.
        """
        M = self.matrix(Y)
        A, B = M.mT @ self.matrix(Delta), M.mT @ self.matrix(V)
        half = torch.linalg.matrix_exp(t * A / 2)
        return self.unmatrix(M @ half @ B @ half, Y.shape)

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """Y log(Y^T Z), the principal logarithm."""
        M = self.matrix(Y)
        Delta = self.unmatrix(M @ log_rotation(M.mT @ self.matrix(Z)), Y.shape)
        return require_geodesic(self, Y, Z, Delta)


class Unitary(Orthogonal):
    """U(N) = {Y: Y^H Y = I}, metric Re tr(U^H V)/2. g^hor: A skew-Hermitian (N x N), its diagonal imaginary.

    Of real tensors it is O(N), rotations and reflections: a weight keeps the sign of its determinant.
    """

    def check_shape(self, shape: Sequence[int]) -> None:
        super().check_shape(shape)
        if len(set(self.size(shape))) > 1:
            raise ValueError(f"{self} holds square matrices, got shape {tuple(shape)}; use ghor.Stiefel()")

    def section_matrix(self, Y: Tensor, R: Tensor | None = None) -> Tensor:
        """Lambda = Y: there is no complement."""
        return Y

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """Y log(Y^H Z), the principal logarithm."""
        M = self.matrix(Y)
        Delta = self.unmatrix(M @ log_rotation(M.mH @ self.matrix(Z)), Y.shape)
        return require_geodesic(self, Y, Z, Delta)
