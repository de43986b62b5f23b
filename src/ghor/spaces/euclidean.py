"""R^d: the vector space, where Algorithm 3 is the ordinary optimizer: a flat factor of products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ghor.layout import Layout
from ghor.spaces.group import GroupSpace
from ghor.spaces.points import on_points
from ghor.spaces.retraction import Retraction


@dataclass(frozen=True, repr=False)
class Euclidean(GroupSpace):
    """The vector space: rgrad and global_rep are identities, E = 0, Lambda is the translation from 0 to Y."""

    compact: ClassVar[bool] = False
    complex: ClassVar[bool] = True
    flat: ClassVar[bool] = True

    @cached_property
    def layout(self) -> Layout:
        """Every number is a point."""
        return Layout(dims=0)

    def check_shape(self, shape: Sequence[int]) -> None:
        """Any shape."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Any dtype."""

    @on_points("p>n")
    def residual(self, Y: Tensor) -> Tensor:
        """0: every finite tensor is on the space, and NaN is on none."""
        return (Y * 0).real.sum((-2, -1))

    def nearest(self, x: Tensor) -> Tensor:
        return x.clone()

    def draw(self, normal: Tensor) -> Tensor:
        return normal.clone()

    def longest(self, y: Tensor) -> float:
        return math.inf

    def origin(self, y: Tensor) -> Tensor:
        """The weight is its own development."""
        return y

    def distinct(self, y: Tensor) -> Tensor:
        """0."""
        return torch.zeros_like(y)

    def positions(self, x: Tensor) -> Tensor:
        """All of them."""
        return x

    def coordinates(self, L: Tensor, g: Tensor) -> Tensor:
        return g

    def global_rep(self, L: Tensor, v: Tensor) -> Tensor:
        return v

    def velocity(self, L: Tensor, w: Tensor) -> Tensor:
        return w

    def moved(self, L: Tensor, w: Tensor, R: Retraction, longest: float, eps: float) -> Tensor:
        return L + w

    @on_points("pp>v")
    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """Z - Y."""
        return Z - Y
