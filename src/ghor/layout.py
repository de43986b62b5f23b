"""How points lie in a weight. No other file knows: geometry sees tall points (M, N, n), and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Weights as points (M, N, n)."""

    dims: int = 2  # a point is a matrix, a vector (n = 1), or a number (N = n = 1)
    tall: bool = True  # wide matrices are taken as tall ones
    blocks: int = 1  # matrices one below the other in a weight
    columns: bool = False  # blocks, or vectors, lie side by side instead
    flatten: int = 1  # so many trailing dimensions count as one
    padding: int | None = None  # the row of a matrix of vectors that is no point

    def points(self, X: Tensor) -> Tensor:
        """Weights (..., *shape) as points (M, N, n): a view where strides allow."""
        X = X.flatten(-self.flatten) if self.flatten > 1 else X
        if self.dims < 2:
            X = X.mT if self.columns else X
            X = X.unflatten(-1, (self.blocks, -1)) if self.blocks > 1 else X
            return X.reshape(-1, X.shape[-1] if self.dims else 1, 1)
        X = (X.mT if self.columns else X).unflatten(-2, (self.blocks, -1))
        X = X.reshape(-1, *X.shape[-2:])
        return X.mT if self.tall and X.shape[-1] > X.shape[-2] else X

    def weight(self, P: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of `points`."""
        flat = self._flat(shape)
        turned = (*flat[:-2], flat[-1], flat[-2]) if self.columns else flat
        if self.dims == 2 and P.shape[-1] != turned[-1]:
            P = P.mT
        X = P.reshape(turned)
        return (X.mT if self.columns else X).reshape(tuple(shape))

    def padded(self, P: Tensor, shape: Sequence[int], row: Tensor | float) -> Tensor:
        """Points of weights of this shape with `row` (N, 1), or points like P, where the padding row is.

        P itself if there is none. Rows of others stay as they are, to the bit.
        """
        if self.padding is None:
            return P
        rows = torch.arange(len(P), device=P.device) // self.blocks % self._flat(shape)[-2]
        return torch.where((rows == self.padding % self._flat(shape)[-2])[:, None, None], row, P)

    def batch(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a tensor with one number for each point; blocks are a last dimension of their own."""
        if self.dims == 0:
            return tuple(shape)
        flat = self._flat(shape)
        columns = flat[-1:] if self.columns and self.dims == 1 else ()
        blocks = (self.blocks,) if self.blocks > 1 else ()
        return (*flat[: len(flat) - self.dims - len(columns)], *columns, *blocks)

    def size(self, shape: Sequence[int]) -> tuple[int, int]:
        """(N, n) of the points in weights of this shape."""
        if self.dims == 0:
            return 1, 1
        flat = self._flat(shape)
        if self.dims == 1:
            return flat[-2 if self.columns else -1] // self.blocks, 1
        rows, columns = (flat[-1], flat[-2]) if self.columns else (flat[-2], flat[-1])
        rows //= self.blocks
        return (max(rows, columns), min(rows, columns)) if self.tall else (rows, columns)

    @property
    def taken(self) -> int:
        """How many trailing dimensions of a weight are one point, or one row of blocks."""
        return self.dims and self.dims - 1 + self.flatten

    def _flat(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape with the dimensions that count as one taken together."""
        flat = math.prod(shape[-self.flatten :])
        return (*shape[: -self.flatten], flat) if self.flatten > 1 else tuple(shape)
