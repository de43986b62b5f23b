"""R^d, so that a product of spaces may have flat factors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from ghor.spaces.retraction import Retraction
from ghor.layout import Layout
from ghor.spaces.base import GroupSpace, on_points


@dataclass(frozen=True, repr=False)
class Euclidean(GroupSpace):
    """R^d: the group of translations."""

    compact: ClassVar[bool] = False
    flat: ClassVar[bool] = True

    @cached_property
    def layout(self) -> Layout:
        return Layout(dims=0)

    def positions(self, x: Tensor) -> Tensor:
        """All of them."""
        return x

    def longest(self, y: Tensor) -> float:
        return math.inf

    def origin(self, y: Tensor) -> Tensor:
        """The weight is its own development."""
        return y

    def coordinates(self, L: Tensor, g: Tensor) -> Tensor:
        return g

    def moved(self, L: Tensor, w: Tensor, R: Retraction, longest: float, eps: float) -> Tensor:
        return L + w

    @on_points("p>n")
    def residual(self, y: Tensor) -> Tensor:
        return (y * 0).real.sum((-2, -1))

    def nearest(self, x: Tensor) -> Tensor:
        return x.clone()

    draw = nearest
