"""Symmetric positive definite matrices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ghor.linalg import size, symmetric
from ghor.spaces.retraction import Retraction
from ghor.layout import Layout
from ghor.spaces.base import GroupSpace, on_points, room_of


@dataclass(frozen=True, repr=False)
class SPD(GroupSpace):
    """GL(n)/O(n): P = L L^T, W symmetric, L <- L R(W)."""

    compact: ClassVar[bool] = False
    exact: ClassVar[bool] = False

    @cached_property
    def layout(self) -> Layout:
        return Layout(tall=False)

    def check_size(self, N: int, n: int) -> None:
        if N != n:
            raise ValueError("it is not square")

    def hor_(self, w: Tensor, factor: float = 0.5) -> None:
        w.copy_(symmetric(w))

    def section(self, y: Tensor) -> Tensor:
        return torch.linalg.cholesky_ex(symmetric(y))[0]

    def point(self, L: Tensor) -> Tensor:
        return symmetric(L @ L.mT)

    def coordinates(self, L: Tensor, g: Tensor) -> Tensor:
        return symmetric(L.mT @ (g + g.mT) @ L)

    def moved(self, L: Tensor, w: Tensor, R: Retraction, longest: float, eps: float) -> Tensor:
        """Held where P would no longer be certain to be definite."""
        new = L + L @ (w @ R.ratio(w, longest))
        return torch.where((self.residual(self.point(new)) > 0)[..., None, None], L, new)

    @on_points("p>n")
    def residual(self, y: Tensor) -> Tensor:
        """||P - P^T||/2, plus ||P|| where Cholesky's rounding, n eps of the diagonal, leaves P indefinite."""
        shifted = symmetric(y)
        shifted.diagonal(dim1=-2, dim2=-1).mul_(1 - y.shape[-1] * torch.finfo(y.dtype).eps)
        return (size(y - y.mT) / 2 + size(y) * (torch.linalg.cholesky_ex(shifted)[1] > 0)[..., None, None])[..., 0, 0]

    def allowed(self, y: Tensor, eps: float) -> Tensor:
        return room_of(eps) * size(y)[..., 0, 0]

    def nearest(self, x: Tensor) -> Tensor:
        t, V = torch.linalg.eigh(symmetric(x))
        least = 10 * x.shape[-1] * torch.finfo(x.dtype).eps * t[..., -1:]
        return symmetric((V * torch.maximum(t, least).unsqueeze(-2)) @ V.mT)

    def draw(self, normal: Tensor) -> Tensor:
        return symmetric(torch.linalg.matrix_exp(symmetric(normal) / normal.shape[-1] ** 0.5))
