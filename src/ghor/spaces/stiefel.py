"""St(n, N) = SO(N)/SO(N-n): N x n matrices with orthonormal columns."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg import log_rotation
from .orthogonal import Orthogonal, require_geodesic


class Stiefel(Orthogonal):
    """The Stiefel manifold {Y: Y^T Y = I}, canonical metric. g^hor: A skew (n x n), B arbitrary ((N-n) x n).

    >>> Y = Stiefel().random(49, 7)
    >>> bool(Stiefel().distance(Y) < 1e-5)
    True
    """

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """The logarithm of the canonical metric by Zimmermann's iteration (2017), in O(N^3).

        Lambda^T Z is completed to a rotation V; V <- V diag(I, exp(-C)), C the complement's block of log V, until C is
        zero: then log V lies in g^hor.
        """
        M = self.matrix(Y)
        n = M.shape[-1]
        Lambda = self.section_matrix(M)
        V = self.section_matrix(Lambda.mT @ self.matrix(Z))
        if M.shape[-2] > n:
            flip = torch.sign(torch.linalg.det(V.detach()))[..., None, None]
            V = torch.cat([V[..., :-1], V[..., -1:] * flip], -1)
        tol = 4 * torch.finfo(V.dtype).eps * V.shape[-1]
        for _ in range(200):
            L = log_rotation(V)
            C = L[..., n:, n:]
            if C.numel() == 0 or float(C.detach().abs().amax()) <= tol:
                break
            V = torch.cat([V[..., :n], V[..., n:] @ torch.linalg.matrix_exp(-C)], -1)
        Delta = self.unmatrix(Lambda @ L[..., :n], Y.shape)
        return require_geodesic(self, Y, Z, Delta)
