"""S^(N-1) = SO(N)/SO(N-1), U(N)/U(N-1) of complex tensors: unit vectors along the last dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ghor.spaces.base import Space
from ghor.spaces.orthogonal import Orthogonal
from ghor.spaces.stiefel import canonical_log


@dataclass(frozen=True, repr=False)
class Sphere(Orthogonal):
    """The sphere: vectors (..., N) of length one; St(1, N) with vectors in place of one-column matrices.

    A matrix on Sphere() has rows of length one: the oblique manifold. Complex vectors have the canonical
    metric of U(N)/U(N-1), in which the direction i Y counts half. The row `padding_idx` of a matrix, if one
    is named, is no point, and optimizers leave it alone: that of an nn.Embedding.
    """

    padding_idx: int | None = field(default=None, kw_only=True)

    @property
    def one(self) -> Space:
        return (
            replace(self, blocks=None, padding_idx=None)
            if self.blocks or self.padding_idx is not None
            else self
        )

    @property
    def dims(self) -> int:
        return self.flatten

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) < self.flatten or 0 in shape or math.prod(shape[-self.flatten :]) < 2:
            raise ValueError(f"{self} holds vectors (..., N) with N >= 2, got shape {tuple(shape)}")
        self.check_blocks(shape)
        if self.size(shape)[0] < 2:
            raise ValueError(f"{self} of single numbers does not move, got shape {tuple(shape)}")
        rows = shape[-self.dims - 1] if len(shape) > self.dims else 0
        if self.padding_idx is not None and not -rows <= self.padding_idx < rows:
            raise ValueError(f"{self} has no row {self.padding_idx} in a tensor of shape {tuple(shape)}")

    def size(self, shape: Sequence[int]) -> tuple[int, int]:
        return math.prod(shape[-self.flatten :]) // self.count, 1

    def matrix(self, Y: Tensor) -> Tensor:
        return self.split(Y).flatten(-self.flatten).unsqueeze(-1)

    def unmatrix(self, M: Tensor, shape: Sequence[int]) -> Tensor:
        first, *others = shape[-self.flatten :]
        return self.join(M.squeeze(-1).unflatten(-1, (first // self.count, *others)))

    # -- the row that is left alone ---------------------------------------------------------------------------------

    def padding(self, X: Tensor) -> Tensor:
        """Of weights (..., rows, *point) the row that is left alone, a view."""
        assert self.padding_idx is not None
        return X.select(-self.dims - 1, self.padding_idx)

    def read(self, weights: Tensor, gradient: bool = False) -> Tensor:
        if self.padding_idx is None:
            return weights
        points = weights.clone()
        self.padding(points).zero_()
        if not gradient:
            self.padding(points).add_(self.padding(self.E(weights.shape, weights.dtype, weights.device)))
        return points

    def write(self, weights: list[Tensor], points: list[Tensor]) -> None:
        kept = [] if self.padding_idx is None else [self.padding(w).clone() for w in weights]
        super().write(weights, points)
        for w, row in zip(weights, kept, strict=bool(kept)):
            self.padding(w).copy_(row)

    def residual(self, Y: Tensor) -> Tensor:
        """| ||Y||^2 - 1 |; of the padding row 0."""
        return super().residual(self.read(Y))

    def project(self, X: Tensor) -> Tensor:
        """Y/||Y||; the padding row stays as it is."""
        Y = super().project(self.read(X))
        if self.padding_idx is not None:
            self.padding(Y).copy_(self.padding(X))
        return Y

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """theta/sin(theta) (Z - cos(theta) Y), the angle from chord and complement, exact to machine
        precision.

        Geodesics of complex vectors are no circles: see `canonical_log`.
        """
        if Y.is_complex():
            return canonical_log(self, Y, Z)
        y, z = self.matrix(Y), self.matrix(Z)
        c = (y * z).sum(-2, keepdim=True)
        K = z - c * y
        s2 = (K * K).sum(-2, keepdim=True)
        if not bool((c > -1 + 4 * torch.finfo(Y.dtype).eps).all()):
            raise ValueError(f"{self}.log: the points are antipodal, the shortest geodesic is not unique")
        small = (s2 < 1e-6) & (
            c > 0
        )  # theta/sin(theta) = 1 + s^2/6 + 3 s^4/40 + ...; sqrt has no derivative at 0
        s = torch.where(small, 1.0, s2).sqrt()
        ratio = torch.where(small, 1 + s2 / 6 + 3 * s2 * s2 / 40, torch.atan2(s, c) / s)
        return self.unmatrix(K * ratio, Y.shape)
