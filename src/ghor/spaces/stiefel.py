"""St(n, N) = SO(N)/SO(N-n), or U(N)/U(N-n) for complex tensors: N x n matrices with orthonormal columns."""

from __future__ import annotations

import torch
from torch import Tensor

from ghor._torch.transforms import differentiated
from ghor.linalg import det, frobenius, largest, log_rotation
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
    """The logarithm in the canonical metric by Zimmermann's iteration (arXiv 1604.05054), in O(N^3).

    Complete Lambda^H Z to a rotation V; then V <- V diag(I, exp(-C)), where C is the lower right block of
    log V, until C = 0: then log V lies in g^hor.
    """
    M = space.matrix(Y)
    n = M.shape[-1]
    Lambda = space.section_matrix(M)
    E = torch.eye(*M.shape[-2:], dtype=M.dtype, device=M.device)
    V = space.section_matrix(E + Lambda.mH @ space.matrix(Z - Y))  # E itself where Z = Y
    # A reflection has no real logarithm, so det V is made positive; the last columns may be chosen freely.
    if M.shape[-2] > n and not V.is_complex():
        flip = torch.sign(det(V.detach()))[..., None, None]
        V = torch.cat([V[..., :-1], V[..., -1:] * flip], -1)
    V, L, first, _ = _completed(V, n)
    if first < _tolerance(V) ** 0.3 and differentiated(V):
        # The value was found before its derivative, which takes as many iterations as to undo a turn: their
        # errors shrink at the same rate.
        with torch.no_grad():
            steps = _completed(_turned(V.detach(), 0.1 * _generic(V, n)), n)[-1]
        for _ in range(steps):
            V = _turned(V, -log_rotation(V)[..., n:, n:])
        L = log_rotation(V)
    Delta = space.unmatrix(Lambda @ L[..., :n], Y.shape)
    return require_geodesic(space, Y, Z, Delta)


def _completed(V: Tensor, n: int) -> tuple[Tensor, Tensor, float, int]:
    """V with the last columns of Zimmermann's iteration, log V, the least C of a point before, the steps."""
    steps, L = 0, log_rotation(V)
    sizes = _sizes(L, n)
    first = -largest(-sizes)
    while largest(sizes) > _tolerance(V) and steps < 200:
        V = _turned(V, -L[..., n:, n:])
        steps, L = steps + 1, log_rotation(V)
        sizes = _sizes(L, n)
    return V, L, first, steps


def _tolerance(V: Tensor) -> float:
    """The size of C at which the iteration ends."""
    return 4 * float(torch.finfo(V.dtype).eps) * V.shape[-1]


def _sizes(L: Tensor, n: int) -> Tensor:
    """The largest entry of the lower right block of each matrix; 0 where there is none."""
    C = L.detach()[..., n:, n:].abs()
    return C.amax((-2, -1)) if C.numel() else C.new_zeros(C.shape[:-2])


def _turned(V: Tensor, C: Tensor) -> Tensor:
    """V diag(I, exp(C)) for C of the size of the lower right block."""
    n = V.shape[-1] - C.shape[-1]
    return torch.cat([V[..., :n], V[..., n:] @ torch.linalg.matrix_exp(C)], -1)


def _generic(V: Tensor, n: int) -> Tensor:
    """A skew matrix of Frobenius norm 1, of the size of the lower right block of V, without any pattern."""
    p = V.shape[-1] - n
    X = torch.arange(1, p * p + 1, dtype=torch.float64, device="cpu").square().sin().view(p, p)
    X = (X * (1 + 1j) if V.is_complex() else X).to(V)
    S = X - X.mH
    return S / frobenius(S).clamp_min(torch.finfo(V.dtype).tiny)
