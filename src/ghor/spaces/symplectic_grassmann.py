"""SpGr(2n, 2N) = Sp(2N)/(Sp(2n) x Sp(2(N-n))): symplectic subspaces, held by a symplectic basis U."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg import dot
from .grassmann import Subspaces
from .symplectic import Symplectic


class SymplecticGrassmann(Subspaces, Symplectic):
    """The symplectic Grassmann manifold of span(U), U+ U = I. g^hor: A = 0, B arbitrary (2(N-n) x 2n).

    U and U K, K symplectic, are the same point; the projection onto it is U U+. Tangent vectors have U+ V = 0.
    """

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
