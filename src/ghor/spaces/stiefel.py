"""Stiefel and Grassmann manifolds, and flags between them: orthonormal columns, of which ever more turns are one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from ghor.spaces.frames import ClosedForm, Frame, Stored
from ghor.linalg import eye, polar
from ghor.spaces.matrix import Matrices
from ghor.spaces.tangent import Tangent


@dataclass(frozen=True, repr=False)
class Stiefel(Matrices):
    """St(n, N) = SO(N)/SO(N-n), and U(N)/U(N-n): matrices with orthonormal columns."""

    complex: ClassVar[bool] = True

    def frame(self, y: Tensor, section: str, held: dict[str, Tensor], eps: float) -> Frame:
        N, n = y.shape[-2:]
        closed = n < N and (section == "implicit" or (section == "auto" and N >= 512 and 4 * n <= N))
        closed = "frame_anchor" in held if held else closed
        return (ClosedForm if closed else Stored)(self, y, held, eps)

    def free_frame(self, y: Tensor, section: str, held: dict[str, Tensor], eps: float, by_rows: bool) -> Frame:
        """None but the point, unless another was asked for; real vectors and square matrices have one as small."""
        N, n = y.shape[-2:]
        if held or section != "auto" or n == N or not (n > 1 or y.is_complex()):
            return self.frame(y, section, held, eps)
        return Tangent(self, y, held, eps, by_rows)

    def complement(self, y: Tensor) -> Tensor:
        """The closed form, formed, with R = polar(y_1), so that Lambda(E) = I."""
        n = y.shape[-1]
        Z = y @ polar(y[..., :n, :]).mH
        Z1, Z2 = Z[..., :n, :], Z[..., n:, :]
        X = torch.linalg.solve(eye(Z1) + Z1.mH, Z2.mH)
        return torch.cat([-(X + Z1 @ X), eye(Z2.mH) - Z2 @ X], -2)

    def nearest(self, x: Tensor) -> Tensor:
        return polar(x)

    def draw(self, normal: Tensor) -> Tensor:
        """Haar: the Q of Q R, diag(R) > 0."""
        Q, R = torch.linalg.qr(normal)
        return Q * torch.sgn(R.diagonal(dim1=-2, dim2=-1)).unsqueeze(-2)


@dataclass(frozen=True, repr=False)
class Grassmann(Stiefel):
    """Gr(n, N): subspaces, held by a basis; A = 0, which would turn the basis alone."""

    def hor_(self, w: Tensor, factor: float = 0.5) -> None:
        w[..., : w.shape[-1], :] = 0

    def hor_blocks(self, w: Tensor) -> list[Tensor]:
        """B."""
        return super().hor_blocks(w)[-1:]


@dataclass(frozen=True, repr=False)
class Flag(Stiefel):
    """Fl(n_1, n_2, ...; N): nested subspaces; A has zero diagonal blocks."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))

    def check_size(self, N: int, n: int) -> None:
        if n != sum(self.sizes):
            raise ValueError(f"{n} columns are not {' + '.join(map(str, self.sizes))}")

    def hor_(self, w: Tensor, factor: float = 0.5) -> None:
        super().hor_(w, factor)
        for n, end in zip(self.sizes, accumulate(self.sizes), strict=True):
            w[..., end - n : end, end - n : end] = 0
