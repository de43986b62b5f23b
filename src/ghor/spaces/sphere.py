"""Spheres: unit vectors, real or complex."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from ghor.layout import Layout
from ghor.spaces.frames import Frame, Stored
from ghor.spaces.stiefel import Stiefel
from ghor.spaces.vectors import Vectors


@dataclass(frozen=True, repr=False)
class Sphere(Stiefel):
    """The sphere: vectors (M, N, 1), real or complex."""

    blocks: int | tuple[int, ...] | None = field(default=None, kw_only=True)
    radius: float | str = field(default=1.0, kw_only=True)  # type: ignore[misc]

    @cached_property
    def layout(self) -> Layout:
        return Layout(dims=1, blocks=self.count, columns=self.along == "columns", flatten=self.flatten)

    def frame(self, y: Tensor, section: str, held: dict[str, Tensor], eps: float) -> Frame:
        if y.is_complex():
            return super().frame(y, section, held, eps)
        stored = "section" in held if held else section == "transported"
        return (Stored if stored else Vectors)(self, y, held, eps)

    def nearest(self, x: Tensor) -> Tensor:
        return x / (x.conj() * x).real.sum((-2, -1), True).sqrt()
