"""U(N): unitary matrices; the group itself, so the section is Y and g^hor is u(N)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .functions import log_rotation
from .orthogonal import Orthogonal, require_geodesic


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
