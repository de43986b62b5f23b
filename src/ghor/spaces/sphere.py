"""S^(N-1) = SO(N)/SO(N-1), U(N)/U(N-1) of complex tensors: unit vectors along the last dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .orthogonal import Orthogonal
from .stiefel import canonical_log


class Sphere(Orthogonal):
    """The sphere: vectors (..., N) of length one; St(1, N) with vectors in place of one-column matrices.

    A matrix on Sphere() has rows of length one: the oblique manifold. Complex vectors have the canonical metric of
    U(N)/U(N-1), in which the direction i Y counts half.
    """

    @property
    def dims(self) -> int:
        return self.flatten

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) < self.flatten or 0 in shape or math.prod(shape[-self.flatten :]) < 2:
            raise ValueError(f"{self} holds vectors (..., N) with N >= 2, got shape {tuple(shape)}")

    def size(self, shape: Sequence[int]) -> tuple[int, int]:
        return math.prod(shape[-self.flatten :]), 1

    def matrix(self, Y: Tensor) -> Tensor:
        return Y.flatten(-self.flatten).unsqueeze(-1)

    def unmatrix(self, M: Tensor, shape: Sequence[int]) -> Tensor:
        return M.squeeze(-1).unflatten(-1, tuple(shape[-self.flatten :]))

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """theta/sin(theta) (Z - cos(theta) Y), the angle from chord and complement, exact to machine precision.

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
        small = (s2 < 1e-6) & (c > 0)  # theta/sin(theta) = 1 + s^2/6 + 3 s^4/40 + ...; sqrt has no derivative at 0
        s = torch.where(small, 1.0, s2).sqrt()
        ratio = torch.where(small, 1 + s2 / 6 + 3 * s2 * s2 / 40, torch.atan2(s, c) / s)
        return self.unmatrix(K * ratio, Y.shape)
