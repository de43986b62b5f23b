"""SpGr(2n, 2N) = Sp(2N)/(Sp(2n) x Sp(2(N-n))): symplectic subspaces, held by a symplectic basis U."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..linalg import dot
from .symplectic import Symplectic


class SymplecticGrassmann(Symplectic):
    """The symplectic Grassmann manifold of span(U), U+ U = I. g^hor: A = 0, B arbitrary (2(N-n) x 2n).

    U and U K, K symplectic, are the same point; the projection onto it is U U+. Tangent vectors have U+ V = 0.
    """

    def check_shape(self, shape: Sequence[int]) -> None:
        super().check_shape(shape)
        if len(set(self.size(shape))) == 1:
            raise ValueError(
                f"{self} of square matrices is a single point, got shape {tuple(shape)}; use ghor.SymplecticStiefel()"
            )

    def skew(self, X: Tensor) -> Tensor:
        """A = 0: another basis of the same subspace is no other point."""
        return torch.zeros_like(X)

    def representative(self, Y: Tensor, Y0: Tensor) -> Tensor:
        """Y0 Y0+ Y, the projection of Y to the subspace: the same for every basis Y0."""
        M = self.matrix(Y0)
        return self.unmatrix(M @ (self.star(M) @ self.matrix(Y)), Y.shape)

    def ghor_blocks(self, W: Tensor) -> list[Tensor]:
        """B alone."""
        return super().ghor_blocks(W)[-1:]

    def metric(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """tr(U^T V (Y^T Y)^-1), the same for every basis Y K: that of symplectic Stiefel where Y+ U = 0."""
        M, UM, VM = self.matrix(Y), self.matrix(U), self.matrix(V)
        return dot(UM, torch.linalg.solve(M.mT @ M, VM, left=False))

    def rgrad(self, Y: Tensor, G: Tensor) -> Tensor:
        """(I - J Y (Y^T Y)^-1 Y^T J^T) G Y^T Y, the gradient of this metric; the optimizer uses `global_grad`."""
        M, GM = self.matrix(Y), self.matrix(G)
        h = M.shape[-2] // 2
        P, JY = M.mT @ M, torch.cat([M[..., h:, :], -M[..., :h, :]], -2)
        X = GM @ P
        return self.unmatrix(X - JY @ torch.linalg.solve(P, JY.mT @ X), Y.shape)
