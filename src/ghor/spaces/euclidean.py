"""R^d: the vector space, where Algorithm 3 is the ordinary optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from ghor.retraction import Retraction
from ghor.spaces.base import Space


@dataclass(frozen=True, repr=False)
class Euclidean(Space):
    """The vector space: rgrad and global_rep are identities, E = 0, the section is Y, and steps add W."""

    compact: ClassVar[bool] = False

    @property
    def dims(self) -> int:
        """0: every number is a point, and all dimensions are batch dimensions."""
        return 0

    def check_shape(self, shape: Sequence[int]) -> None:
        """Any shape."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Any dtype."""

    def E(self, shape: Sequence[int], dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """The zero vector."""
        return torch.zeros(tuple(shape), dtype=dtype, device=device)

    def residual(self, Y: Tensor) -> Tensor:
        """Zero, one number for the whole tensor: every finite tensor is on the space, and NaN is on none."""
        return (Y * 0).real.sum() if Y.is_complex() else (Y * 0).sum()

    def random(
        self,
        *shape: int,
        generator: Generator | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> Tensor:
        """A standard normal tensor."""
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    def project(self, X: Tensor) -> Tensor:
        return X.clone()

    def section(self, Y: Tensor) -> Tensor:
        """The translation that takes 0 to Y, held as Y."""
        return Y

    def apply_section(self, Lambda: Tensor, E: Tensor) -> Tensor:
        return Lambda

    def global_grad(self, Lambda: Tensor, G: Tensor, out: Tensor | None = None) -> Tensor:
        return G if out is None else out.copy_(G)

    def update_section(
        self, Lambda: Tensor, W: Tensor, retraction: str | Retraction = "cayley", out: Tensor | None = None
    ) -> Tensor:
        return torch.add(Lambda, W, out=out)

    def step_length(self, W: Tensor) -> Tensor:
        """|W|: every number is a point."""
        return W.abs()

    def polish(
        self, Lambda: Tensor, E: Tensor, share: Tensor | float = 1.0, point_only: bool = False
    ) -> Tensor:
        return Lambda

    def metric(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """Re <U, V>."""
        return (U.conj() * V).real.sum()

    def rgrad(self, Y: Tensor, G: Tensor) -> Tensor:
        """G: the metric is that of the coordinates."""
        return G

    def tangent(self, Y: Tensor, X: Tensor) -> Tensor:
        """X: every vector is tangent."""
        return X

    def is_tangent(self, Y: Tensor, V: Tensor, tol: float | Tensor | None = None) -> bool:
        """True: every vector is tangent."""
        return True

    def Omega(self, Y: Tensor, Delta: Tensor) -> Tensor:
        """Delta: the group is the translations."""
        return Delta

    def global_rep(self, Lambda: Tensor, Delta: Tensor) -> Tensor:
        """Delta."""
        return Delta

    def retract(self, Y: Tensor, Delta: Tensor, retraction: str | Retraction = "cayley") -> Tensor:
        """Y + Delta."""
        return Y + Delta

    def exp(self, Y: Tensor, Delta: Tensor) -> Tensor:
        """Y + Delta."""
        return Y + Delta

    def transport(self, Y: Tensor, Delta: Tensor, V: Tensor) -> Tensor:
        """V."""
        return V

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """Z - Y."""
        return Z - Y
