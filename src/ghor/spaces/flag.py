"""Fl(n_1, n_2, ...; N) = SO(N)/S(O(n_1) x O(n_2) x ...): nested subspaces, held by an orthonormal basis Y."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ghor.spaces.orthogonal import Orthogonal


@dataclass(frozen=True, repr=False)
class Flag(Orthogonal):
    """The flags span(Y_1) < span(Y_1, Y_2) < ..., held by Y = [Y_1, Y_2, ...] (..., N, n), Y^H Y = I.

    Block Y_i has `sizes[i]` columns. Turning a block within its span does not move the flag, so g^hor has A
    skew with zero diagonal blocks, and B arbitrary. A single block gives Grassmann, and blocks of one column
    give Stiefel up to signs. Metric: that of Stiefel.

    >>> Flag((2, 1)).random(9, 3).shape
    torch.Size([9, 3])
    """

    sizes: tuple[int, ...] = (2, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.sizes if isinstance(self.sizes, (tuple, list)) else ()
        if not sizes or not all(type(n) is int and n > 0 for n in sizes):
            raise ValueError(
                f"the sizes of a flag are positive numbers of columns such as (2, 1), got {self.sizes!r}"
            )
        object.__setattr__(self, "sizes", tuple(sizes))

    def check_shape(self, shape: Sequence[int]) -> None:
        super().check_shape(shape)
        N, n = self.size(shape)
        if n != sum(self.sizes):
            raise ValueError(
                f"{self} holds matrices with {sum(self.sizes)} columns, got shape {tuple(shape)}"
            )
        if N == n and len(self.sizes) == 1:
            raise ValueError(f"{self} of square matrices is a single point, got shape {tuple(shape)}")

    def representative(self, Y: Tensor, Y0: Tensor) -> Tensor:
        """[Y0_1 Y0_1^H Y_1, ...]: each block of Y projected to the span of Y0's, whatever its basis."""
        M, M0 = self.matrix(Y).split(self.sizes, -1), self.matrix(Y0).split(self.sizes, -1)
        return self.unmatrix(torch.cat([b @ (b.mH @ a) for a, b in zip(M, M0, strict=True)], -1), Y.shape)

    def skew(self, X: Tensor) -> Tensor:
        """X - X^H outside the diagonal blocks."""
        A = X - X.mH
        for n, end in zip(self.sizes, accumulate(self.sizes), strict=True):
            A[..., end - n : end, end - n : end] = 0
        return A
