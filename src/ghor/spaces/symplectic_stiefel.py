"""SpSt(2n, 2N) = Sp(2N)/Sp(2(N-n)): 2N x 2n matrices U with U^T J U = J."""

from __future__ import annotations

import torch
from torch import Tensor

from .symplectic import Symplectic


class SymplecticStiefel(Symplectic):
    """The symplectic Stiefel manifold {U: U+ U = I}, U+ = J^T U^T J. g^hor: A Hamiltonian (2n x 2n), B arbitrary.

    The metric is the right-invariant one of Bendokat and Zimmermann (2021).
    """

    def metric(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """tr(U^T (I - J^T Y (Y^T Y)^-1 Y^T J/2) V (Y^T Y)^-1), right-invariant (Bendokat and Zimmermann)."""
        M, UM, VM = self.matrix(Y), self.matrix(U), self.matrix(V)
        h = M.shape[-2] // 2
        P = M.mT @ M
        JY = torch.cat([-M[..., h:, :], M[..., :h, :]], -2)  # J^T Y
        a, b = torch.linalg.solve(P, VM, left=False), JY.mT @ UM
        c = JY.mT @ a
        return (UM * a).sum((-2, -1)) - (b * torch.linalg.solve(P, c)).sum((-2, -1)) / 2

    def rgrad(self, Y: Tensor, G: Tensor) -> Tensor:
        """G Y^T Y + J Y G^T J Y, the gradient of the right-invariant metric.

        The optimizer uses `global_grad` instead: this metric has an Omega of its own, and signs of this gradient pushed
        through the one above need not point downhill.
        """
        M, GM = self.matrix(Y), self.matrix(G)
        h = M.shape[-2] // 2
        JY = torch.cat([M[..., h:, :], -M[..., :h, :]], -2)
        return self.unmatrix(GM @ (M.mT @ M) + JY @ (GM.mT @ JY), Y.shape)
