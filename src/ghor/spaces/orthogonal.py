"""What the orthogonal spaces share: points found by polar decomposition, the canonical metric.

On complex tensors they are the spaces of the unitary group: X^T is X^H, and inner products are real parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from ..linalg import dot, eye_like, full_precision, phases, product
from .anchored import Anchored
from .base import Space, compute
from .functions import symmetric_function


class Orthogonal(Anchored):
    """Spaces of SO(N), X* = X^T, or U(N), X* = X^H."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        if not (dtype.is_floating_point or dtype in (torch.complex64, torch.complex128)):
            kinds = "floating point tensors, real, complex64 or complex128"
            raise TypeError(f"weights on {self} are {kinds}, not {dtype}; convert with .float()")

    def inverse(self, Lambda: Tensor, n: int) -> Tensor:
        """Lambda^H."""
        return Lambda.mH

    def random(
        self, *shape: int, generator: Generator | None = None, dtype: torch.dtype | None = None, device: Any = None
    ) -> Tensor:
        """Uniform (Haar): the Q of a normal matrix Q R, with diag(R) made positive."""
        self.check_shape(shape)
        self.check_dtype(dtype or torch.get_default_dtype())
        X = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        M, R = torch.linalg.qr(compute(self.matrix(X)))
        M = self._orient(M * phases(R.diagonal(dim1=-2, dim2=-1)).unsqueeze(-2), eye_like(M))
        return self.unmatrix(M, shape).to(X.dtype).contiguous()

    @full_precision()
    def project(self, X: Tensor) -> Tensor:
        """The nearest point, the orthogonal polar factor of X; X must have full rank."""
        self.check_shape(X.shape)
        self.check_dtype(X.dtype)
        M = compute(self.matrix(X))
        if not bool(torch.isfinite(M).all()):
            raise ValueError(f"a matrix with NaN or infinite entries has no nearest point on {self}")
        tiny = torch.finfo(M.dtype).tiny
        M = M / M.detach().abs().amax((-2, -1), keepdim=True).clamp_min(tiny)  # 1e30 squared is inf
        U, s, Vh = torch.linalg.svd(M.detach(), full_matrices=False)
        rank = (s > s[..., :1] * max(M.shape[-2:]) * torch.finfo(M.dtype).eps).sum(-1)
        if not bool((rank == M.shape[-1]).all()):
            raise ValueError(
                f"a matrix of rank {int(rank.min())} < {M.shape[-1]} has no nearest point on {self}; "
                f"initialise it first, for example with {self}.random{tuple(X.shape)}"
            )
        Y = self._orient(U, Vh) @ Vh
        Y = Y + Y @ (eye_like(Y) - product(Y.mH, Y)) / 2  # single precision SVD is orthogonal to 1e-5 only
        if X.requires_grad:  # SVD has no derivative where singular values coincide, as they do on the space
            smooth = M @ symmetric_function(M.mH @ M, lambda t: (t.rsqrt(), -(t**-1.5) / 2), zero=0.0)
            Y = Y + (smooth - smooth.detach())
        return self.unmatrix(Y, X.shape).to(X.dtype).contiguous()

    def _orient(self, U: Tensor, V: Tensor) -> Tensor:
        """U, or U with its last column turned where U V is in another component than the space."""
        return U

    def restore(self, Lambda: Tensor, E: Tensor) -> Tensor:
        """The Q of Lambda = Q R, R with a positive diagonal: Householder reflections work at any distance."""
        Q, R = torch.linalg.qr(Lambda)
        return Q * phases(R.diagonal(dim1=-2, dim2=-1)).unsqueeze(-2)

    def metric(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """The canonical metric Re tr(U^H (I - Y Y^H/2) V), which is Re tr(Omega(U)^H Omega(V))/2."""
        M, UM, VM = self.matrix(Y), self.matrix(U), self.matrix(V)
        return dot(UM, VM) - dot(M.mH @ UM, M.mH @ VM) / 2

    def rgrad(self, Y: Tensor, G: Tensor) -> Tensor:
        """G - Y Y^H G + Y skew(Y^H G), the gradient of the canonical metric; on Stiefel, G - Y G^H Y."""
        M, GM = self.matrix(Y), self.matrix(G)
        YG = M.mH @ GM
        return self.unmatrix(GM + M @ (self.skew(YG) - YG), Y.shape)


def require_geodesic(space: Space, Y: Tensor, Z: Tensor, Delta: Tensor) -> Tensor:
    """Delta, checked: exp(Y, Delta) = Z. At the cut locus a logarithm is not unique, and iterations may not arrive."""
    with torch.no_grad():
        off = float((space.exp(Y, Delta) - Z).abs().amax())
    if not off <= torch.finfo(Y.dtype).eps ** 0.5:
        raise ValueError(
            f"{space}.log: the points are at or near the cut locus, or in different components (exp(log) misses by "
            f"{off:.1e})"
        )
    return Delta
