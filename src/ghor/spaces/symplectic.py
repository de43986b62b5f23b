"""Symplectic Stiefel and Grassmann manifolds: the adjoint of the symplectic form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ghor.spaces.frames import Frame, Stored
from ghor.linalg import eye, inverse, polar, size
from ghor.spaces.base import on_points, room_of
from ghor.spaces.matrix import Matrices
from ghor.spaces.stiefel import Stiefel


@dataclass(frozen=True, repr=False)
class SymplecticStiefel(Matrices):
    """Sp(2N)/Sp(2N-2n): U+ U = I for U+ = J^T U^T J."""

    compact: ClassVar[bool] = False
    lost: ClassVar[float] = 1e-3  # the largest eps ||Lambda||^2: so far may rounding take a point off

    def check_size(self, N: int, n: int) -> None:
        super().check_size(N, n)
        if N % 2 or n % 2:
            raise ValueError("numbers of rows and columns are not even")

    def frame(self, y: Tensor, section: str, held: dict[str, Tensor], eps: float) -> Frame:
        return Stored(self, y, held, eps)

    def allowed(self, y: Tensor, eps: float) -> Tensor:
        """The rounding of U+ U grows with ||U||^2."""
        return room_of(eps) * (1 + size(y)[..., 0, 0] ** 2 / 10)

    def star(self, X: Tensor) -> Tensor:
        """Blocks [[a, b], [c, d]] -> [[d^T, -b^T], [-c^T, a^T]]."""
        (a, b), (c, d) = (half.chunk(2, -1) for half in X.chunk(2, -2))
        return torch.cat([torch.cat([d.mT, -b.mT], -1), torch.cat([-c.mT, a.mT], -1)], -2)

    def complement(self, y: Tensor) -> Tensor:
        """An orthonormal basis of ker(U+), made symplectic by eigenvectors of i Z^T J Z, nearest to a fixed matrix."""
        N, n = y.shape[-2:]
        if N == n:
            return y[..., :0]
        turned = lambda X: torch.cat([X[..., N // 2 :, :], -X[..., : N // 2, :]], -2)  # J X
        m, Z = (N - n) // 2, torch.linalg.qr(turned(y), mode="complete")[0][..., n:]
        K = Z.mT @ turned(Z)
        w, V = torch.linalg.eigh(1j * (K - K.mT) / 2)
        V = Z.to(V.dtype) @ V[..., m:]
        fixed = torch.randn(N, m, generator=torch.Generator().manual_seed(0), dtype=torch.complex128).to(V)
        V = (V * (2 / w[..., m:]).sqrt().unsqueeze(-2)) @ polar(V.mH @ fixed)
        Q = torch.cat([V.imag, V.real], -1)
        Q = Q - y @ (self.star(y) @ Q)
        return Q @ (3 * eye(Q) - self.star(Q) @ Q) / 2

    def nearest(self, x: Tensor) -> Tensor:
        """X (X+ X)^(-1/2) by Denman and Beavers, polished."""
        P = self.star(x) @ x
        Z = eye(P).expand_as(P)
        for _ in range(40):
            P, Z = (P + inverse(Z)) / 2, (Z + inverse(P)) / 2
        x = x @ Z
        for _ in range(2):  # the inverses have lost digits
            x = x @ (3 * eye(x) - self.star(x) @ x) / 2
        return x

    def draw(self, normal: Tensor) -> Tensor:
        """[[Re Q, -Im Q], [Im Q, Re Q]] of a unitary N x n matrix Q."""
        N = normal.shape[-2] // 2
        re, im = normal[..., :N, :].chunk(2, -1)
        Q = Stiefel().draw(torch.complex(re.contiguous(), im.contiguous()))
        return torch.cat([torch.cat([Q.real, -Q.imag], -1), torch.cat([Q.imag, Q.real], -1)], -2)

    def shortening(self, L: Tensor, w: Tensor) -> Tensor:
        """The part of w that keeps ||Lambda|| <= limit; L is Lambda^T. The greatest s <= 1 with

            log ||Lambda|| + s g + 2 s^2 (||A|| + ||B||)^2 <= log limit,  g = <Lambda, Lambda W>/||Lambda||^2
        """
        n = w.shape[-1]
        A, B, total = w[..., :n, :], w[..., n:, :], size(L)
        limit = math.sqrt(self.lost / torch.finfo(L.dtype).eps + L.shape[-1])
        room, square = (limit / total).log().clamp_min(0), 2 * (size(A) + size(B)) ** 2
        K = (L[..., :n, :] @ L.mT).mT  # Lambda^T y
        growth = ((K * w).sum((-2, -1), True) - (K[..., n:, :].mT * self.star(B)).sum((-2, -1), True)) / total**2
        s = ((growth**2 + 4 * square * room).sqrt() - growth) / (2 * square.clamp_min(torch.finfo(L.dtype).tiny))
        return torch.where(square > 0, s.clamp(0, 1), 1)


@dataclass(frozen=True, repr=False)
class SymplecticGrassmann(SymplecticStiefel):
    """Symplectic subspaces: A = 0."""

    def hor_(self, w: Tensor, factor: float = 0.5) -> None:
        w[..., : w.shape[-1], :] = 0

    def hor_blocks(self, w: Tensor) -> list[Tensor]:
        """B."""
        return super().hor_blocks(w)[-1:]
