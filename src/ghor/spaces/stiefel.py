"""St(n, N) = SO(N)/SO(N-n), or U(N)/U(N-n) for complex tensors: N x n matrices with orthonormal columns."""

from __future__ import annotations

import torch
from torch import Tensor

from ghor.linalg import det, largest, log_rotation
from ghor.spaces.orthogonal import Orthogonal, require_geodesic


class Stiefel(Orthogonal):
    """The Stiefel manifold {Y: Y^H Y = I} of (..., N, n) matrices with orthonormal columns, N >= n.

    A wide matrix has orthonormal rows instead. Metric: the canonical one, Re tr(U^H (I - Y Y^H/2) V). g^hor:
    A skew (n x n), B arbitrary ((N-n) x n).

    >>> Y = Stiefel().random(49, 7)
    >>> bool(Stiefel().residual(Y) < 1e-5)
    True
    """

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """The logarithm in the canonical metric, see `canonical_log`."""
        return canonical_log(self, Y, Z)


def canonical_log(space: Orthogonal, Y: Tensor, Z: Tensor) -> Tensor:
    """The logarithm in the canonical metric by Zimmermann's iteration (2017), in O(N^3).

    Complete Lambda^H Z to a rotation V; then V <- V diag(I, exp(-C)), where C is the lower right block of
    log V, until C = 0: then log V lies in g^hor.
    """
    M = space.matrix(Y)
    n = M.shape[-1]
    Lambda = space.section_matrix(M)
    V = space.section_matrix(Lambda.mH @ space.matrix(Z))
    # A reflection has no real logarithm, so det V is made positive; the last columns may be chosen freely.
    if M.shape[-2] > n and not V.is_complex():
        flip = torch.sign(det(V.detach()))[..., None, None]
        V = torch.cat([V[..., :-1], V[..., -1:] * flip], -1)
    tol = 4 * torch.finfo(V.dtype).eps * V.shape[-1]
    for _ in range(200):
        L = log_rotation(V)
        C = L[..., n:, n:]
        if largest(C.detach().abs()) <= tol:
            break
        V = torch.cat([V[..., :n], V[..., n:] @ torch.linalg.matrix_exp(-C)], -1)
    Delta = space.unmatrix(Lambda @ L[..., :n], Y.shape)
    return require_geodesic(space, Y, Z, Delta)
