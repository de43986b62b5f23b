"""Spaces of matrices with Y* Y = I, for the adjoint X* of a form."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ghor.layout import Layout
from ghor.linalg import eye, size
from ghor.spaces.base import Space, on_points


@dataclass(frozen=True, repr=False)
class Matrices(Space):
    """Y* Y = I for the adjoint X* of a form; W = [[A, -B*], [B, 0]], A* = -A, is kept as [A; B]."""

    k: ClassVar[int] = 1

    flatten: int = field(default=1, kw_only=True)
    blocks: int | tuple[int, ...] | None = field(default=None, kw_only=True)
    along: Literal["rows", "columns"] = field(default="rows", kw_only=True)

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return math.prod(self.blocks) if isinstance(self.blocks, tuple) else self.blocks or 1

    @cached_property
    def layout(self) -> Layout:
        return Layout(blocks=self.count, columns=self.along == "columns", flatten=self.flatten)

    def star(self, X: Tensor) -> Tensor:
        """X*."""
        return X.mH

    def complement(self, y: Tensor) -> Tensor:
        """Q of Lambda = [y, Q]."""
        raise NotImplementedError

    def hor_(self, w: Tensor, factor: float = 0.5) -> None:
        A = w[..., : w.shape[-1], :]
        S = A - self.star(A)
        A.copy_(S if factor == 1 else S * factor)

    def algebra(self, w: Tensor) -> Tensor:
        """W, (M, N, N)."""
        (N, n), B = w.shape[-2:], w[..., w.shape[-1] :, :]
        return torch.cat([w, torch.cat([-self.star(B), w.new_zeros(*w.shape[:-2], N - n, N - n)], -2)], -1)

    def hor_blocks(self, w: Tensor) -> list[Tensor]:
        """A and B, unless empty or zero: A of one real column is 0."""
        N, n = w.shape[-2:]
        return [w[..., :n, :]] * (n > 1 or w.is_complex()) + [w[..., n:, :]] * (N > n)

    def hor_inner(self, w: Tensor, v: Tensor) -> Tensor:
        """tr(W^H V)/2."""
        P, n = (w * v.conj()).real, w.shape[-1]
        return P[..., :n, :].sum((-2, -1)) / 2 + P[..., n:, :].sum((-2, -1))

    @on_points("p>n")
    def residual(self, Y: Tensor) -> Tensor:
        """||Y* Y - I||_F."""
        S = self.star(Y) @ Y
        return size(S - eye(S))[..., 0, 0]
