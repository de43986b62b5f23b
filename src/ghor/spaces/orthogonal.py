"""What the orthogonal spaces share: points found by polar decomposition, a section in closed form."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from ..linalg import eye_like, full_precision, symmetric_function
from .base import Space, compute


class Orthogonal(Space):
    """Spaces of SO(N), X* = X^T."""

    def random(
        self,
        *shape: int,
        generator: Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """Uniform (Haar): Q R of a normal matrix with the signs of diag(R) made positive."""
        self.check_shape(shape)
        X = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        M, R = torch.linalg.qr(compute(self.matrix(X)))
        signs = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1, 1).to(M.dtype)
        M = self._orient(M * signs.unsqueeze(-2), eye_like(M))
        return self.unmatrix(M, shape).to(X.dtype).contiguous()

    @full_precision()
    def project(self, X: Tensor) -> Tensor:
        """The nearest point, the orthogonal polar factor of X; X must have full rank."""
        self.check_shape(X.shape)
        M = compute(self.matrix(X))
        if not bool(torch.isfinite(M).all()):
            raise ValueError(f"a matrix with NaN or infinite entries has no nearest point on {self}")
        M = M / M.detach().abs().amax((-2, -1), keepdim=True).clamp_min(
            torch.finfo(M.dtype).tiny
        )  # 1e30 squared is inf
        U, s, Vh = torch.linalg.svd(M.detach(), full_matrices=False)
        rank = (s > s[..., :1] * max(M.shape[-2:]) * torch.finfo(M.dtype).eps).sum(-1)
        if not bool((rank == M.shape[-1]).all()):
            raise ValueError(
                f"a matrix of rank {int(rank.min())} < {M.shape[-1]} has no nearest point on {self}; "
                f"initialise it first, for example with {self}.random{tuple(X.shape)}"
            )
        Y = self.polish(self._orient(U, Vh) @ Vh, M.shape[-1])  # single precision SVD is orthogonal to 1e-5 only
        if X.requires_grad:  # SVD has no derivative where singular values coincide, as they do on the space
            smooth = M @ symmetric_function(M.mT @ M, _inverse_root)
            Y = Y + (smooth - smooth.detach())
        return self.unmatrix(Y, X.shape).to(X.dtype).contiguous()

    def _orient(self, U: Tensor, V: Tensor) -> Tensor:
        """U, or U with its last column turned where U V is in another component than the space."""
        return U

    def section_matrix(self, Y: Tensor, R: Tensor | None = None) -> Tensor:
        """Lambda = [Y, Q] in closed form from Y: Q = E_c - D (I + Z1^T)^-1 Z2^T, Z = [Z1; Z2] = Y R^T, D = Z + E.

        R is the anchor, by default the polar factor of Y's top block: then Z1 is symmetric >= 0 and I + Z1 well
        conditioned whatever Y is. section(E) = I. Autograd takes R as fixed, which is a smooth section too.
        """
        n = Y.shape[-1]
        if R is None:
            U, _, Vh = torch.linalg.svd(Y[..., :n, :].detach())
            R = U @ Vh
        Z = Y @ R.mT
        Z1, Z2 = Z[..., :n, :], Z[..., n:, :]
        X = torch.linalg.solve(eye_like(Z1) + Z1.mT, Z2.mT)  # (..., n, N-n)
        Q = torch.cat([-(X + Z1 @ X), eye_like(Z2.mT) - Z2 @ X], -2)
        return torch.cat([Y, Q], -1)

    def restore(self, Lambda: Tensor, n: int) -> Tensor:
        """The Q of Lambda = Q R, R with a positive diagonal: Householder reflections work at any distance."""
        Q, R = torch.linalg.qr(Lambda)
        return Q * torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1, 1).to(Q.dtype).unsqueeze(-2)

    def inverse(self, Lambda: Tensor, n: int) -> Tensor:
        """Lambda^T."""
        return Lambda.mT

    def metric(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """The canonical metric tr(U^T (I - Y Y^T/2) V), which is tr(Omega(U)^T Omega(V))/2."""
        M, UM, VM = self.matrix(Y), self.matrix(U), self.matrix(V)
        return (UM * VM).sum((-2, -1)) - ((M.mT @ UM) * (M.mT @ VM)).sum((-2, -1)) / 2

    def rgrad(self, Y: Tensor, G: Tensor) -> Tensor:
        """G - Y Y^T G + Y skew(Y^T G), the gradient of the canonical metric; on Stiefel, G - Y G^T Y."""
        M, GM = self.matrix(Y), self.matrix(G)
        YG = M.mT @ GM
        return self.unmatrix(GM + M @ (self.skew(YG) - YG), Y.shape)


def _inverse_root(t: Tensor) -> tuple[Tensor, Tensor]:
    """t^(-1/2) and its derivative."""
    return t.rsqrt(), -(t**-1.5) / 2


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
