"""How the tensor of a weight is taken for matrices: wide ones, kernels, several stacked in one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from .base import Space


@dataclass(frozen=True, repr=False, kw_only=True)
class Layout(Space):
    """Matrices (..., N, n); leading dimensions are batch.

    A wide matrix (fewer rows than columns) is on a space when its transpose is. With `flatten=k` the last k dimensions
    of a tensor count as one: `Stiefel(flatten=3)` is for the kernels (out, in, kh, kw) of a Conv2d, taken as
    out x (in kh kw) matrices; without it, such a tensor is a batch of kh x kw matrices.

    With `blocks=k` a tensor is k matrices stacked along the rows, each of them on the space: `Stiefel(blocks=3)` for
    the weights of queries, keys and values in one tensor, `Stiefel(blocks=(3, heads))` for those of every head. Blocks
    are a batch: (k R, C) is taken as (k, R, C), and `residual`, `metric`, ... give a number for each.
    """

    flatten: int = 1
    blocks: int | tuple[int, ...] | None = None

    def __new__(cls, *given: Any, **options: Any) -> Self:
        if given and cls.__init__ is Layout.__init__:
            raise TypeError(
                f"{cls.__name__}() takes no sizes, got {given}: they come from the weight, as in "
                f"{cls.__name__}().random(5, 3); flatten and blocks are given by name"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if type(self.flatten) is not int or self.flatten < 1:
            raise ValueError(f"flatten counts dimensions, 1 or more, got {self.flatten!r}")
        counts = self.blocks if isinstance(self.blocks, tuple) else (1 if self.blocks is None else self.blocks,)
        if not counts or not all(type(k) is int and k > 0 for k in counts):
            raise ValueError(f"blocks counts matrices, 3 or (3, heads), got {self.blocks!r}")

    @property
    def one(self) -> Space:
        return self if self.blocks is None else replace(self, blocks=None)

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return math.prod(self.blocks) if isinstance(self.blocks, tuple) else self.blocks or 1

    @property
    def dims(self) -> int:
        return 1 + self.flatten

    def split(self, X: Tensor) -> Tensor:
        if self.blocks is None or self.count == 1:
            return X
        return X.unflatten(-self.dims, (self.count, X.shape[-self.dims] // self.count))

    def join(self, X: Tensor) -> Tensor:
        """The inverse of `split`."""
        return X if self.count == 1 else X.flatten(-self.dims - 1, -self.dims)

    def write(self, weights: list[Tensor], points: list[Tensor]) -> None:
        super().write(weights if self.blocks is None else list(map(self.split, weights)), points)

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) < 1 + self.flatten:
            hint = "; for unit vectors use ghor.Sphere()" if len(shape) == 1 else ""
            raise ValueError(f"{self} needs {1 + self.flatten} or more dimensions, got shape {tuple(shape)}{hint}")
        if 0 in shape:
            raise ValueError(f"{self} has no points of the empty shape {tuple(shape)}")
        self.check_blocks(shape)
        if self.size(shape)[0] < 2:
            name, more = type(self).__name__, len(shape) - 1
            hint = f"; {name}(flatten={more}) takes a kernel as one matrix" if more > 1 else ""
            raise ValueError(f"{self} of 1 x 1 matrices does not move, got shape {tuple(shape)}{hint}")

    def check_blocks(self, shape: Sequence[int]) -> None:
        """Raise ValueError unless there is a whole number of rows in a block."""
        if shape[-self.dims] % self.count:
            raise ValueError(
                f"{self} splits {shape[-self.dims]} rows into {self.count} blocks, which does not come out even: shape "
                f"{tuple(shape)}"
            )
