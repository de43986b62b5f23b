"""R^d: the vector space, where Algorithm 3 is the ordinary optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from ..retraction import Retraction
from .base import Space


class Euclidean(Space):
    """The vector space: rgrad and global_rep are identities, E = 0, the section is the point, to retract is to add."""

    def __post_init__(self) -> None:
        if self.flatten != 1:
            raise ValueError("Euclidean() has no matrices: flatten does not apply")

    def check_shape(self, shape: Sequence[int]) -> None:
        """Any shape."""

    def E(self, shape: Sequence[int], dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """The zero vector."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def distance(self, Y: Tensor) -> Tensor:
        """Zero: one number, the space has no batch dimensions."""
        return Y.new_zeros(())

    def random(
        self,
        *shape: int,
        generator: Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """Standard normal."""
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    def project(self, X: Tensor) -> Tensor:
        return X.clone()

    def section(self, Y: Tensor) -> Tensor:
        """The translation that takes 0 to Y, held as Y."""
        return Y

    def section_matrix(self, Y: Tensor, R: Tensor | None = None) -> Tensor:
        return Y

    def metric(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """<U, V>."""
        return (U * V).sum()

    def rgrad(self, Y: Tensor, G: Tensor) -> Tensor:
        return G

    def tangent(self, Y: Tensor, X: Tensor) -> Tensor:
        return X

    def is_tangent(self, Y: Tensor, V: Tensor, tol: float | None = None) -> bool:
        return True

    def Omega(self, Y: Tensor, Delta: Tensor) -> Tensor:
        return Delta

    def global_rep(self, Lambda: Tensor, Delta: Tensor) -> Tensor:
        return Delta

    def global_grad(self, Lambda: Tensor, G: Tensor) -> Tensor:
        return G

    def update_section(self, Lambda: Tensor, W: Tensor, retraction: str | Retraction = "cayley") -> Tensor:
        return Lambda + W

    def apply_section(self, Lambda: Tensor, E: Tensor) -> Tensor:
        return Lambda + E

    def retract(self, Y: Tensor, Delta: Tensor, retraction: str | Retraction = "cayley") -> Tensor:
        return Y + Delta

    def transport(self, Y: Tensor, Delta: Tensor, V: Tensor) -> Tensor:
        return V

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        return Z - Y
