"""SE(d): rigid motions of R^d; the group itself, so the section is the point and g^hor is se(d)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..linalg import full_precision, phi
from ..retraction import Retraction
from .framed import Framed, orthonormalised
from .special_orthogonal import SpecialOrthogonal

SO = SpecialOrthogonal()


@dataclass(frozen=True, repr=False)
class SpecialEuclidean(Framed):
    """Poses [R, t], (..., d, d+1): x -> R x + t. g^hor: (omega, v), omega skew (d x d), v in R^d, in the body's frame.

    <W, W'> = <omega, omega'>/2 + <v, v'>: a turn by one radian is as long as a way of one unit of length. Everything is
    left-invariant: a change of the world's coordinates changes nothing. SE(d) has no metric that is invariant on both
    sides; `exp` and `log` are those of the group, screw motions, and `dist` is the length of log.
    """

    holds: ClassVar[str] = "poses [R, t], (..., d, d+1) with d >= 2"

    def check_shape(self, shape: Sequence[int]) -> None:
        self.refuse_shape(shape, len(shape) >= 2 and shape[-1] == shape[-2] + 1 and shape[-2] >= 2)

    def E(self, shape: Sequence[int], dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """[I, 0]."""
        self.check_shape(shape)
        E = torch.zeros(tuple(shape), dtype=dtype, device=device)
        E.diagonal(dim1=-2, dim2=-1).fill_(1)
        return E

    def residual(self, Y: Tensor) -> Tensor:
        """That of R from the rotations."""
        return SO.residual(Y[..., :-1])

    @full_precision()
    def project(self, X: Tensor) -> Tensor:
        """The nearest point: R by polar decomposition, t as it is."""
        return torch.cat([self.project_part(SO, X[..., :-1], X), X[..., -1:]], -1)

    def section(self, Y: Tensor) -> Tensor:
        """Lambda = Y."""
        return Y

    def apply_section(self, Lambda: Tensor, E: Tensor) -> Tensor:
        return Lambda

    def pullback(self, Lambda: Tensor, G: Tensor) -> Tensor:
        """[R^T G_R - G_R^T R, R^T G_t], omega *exactly* skew."""
        H = Lambda[..., :-1].mT @ G
        return torch.cat([SO.skew(H[..., :-1]), H[..., -1:]], -1)

    def global_rep(self, Lambda: Tensor, Delta: Tensor) -> Tensor:
        return self.hor(Lambda[..., :-1].mT @ Delta)

    def push(self, Lambda: Tensor, W: Tensor) -> Tensor:
        return Lambda[..., :-1] @ W

    def ghor_inner(self, W: Tensor, V: Tensor) -> Tensor:
        P = W * V
        return P[..., :-1].sum((-2, -1)) / 2 + P[..., -1].sum(-1)

    def hor(self, W: Tensor) -> Tensor:
        return torch.cat([SO.skew(W[..., :-1]) / 2, W[..., -1:]], -1)

    def ghor_blocks(self, W: Tensor) -> list[Tensor]:
        """omega and v."""
        return [W[..., :-1], W[..., -1:]]

    def moved(self, Lambda: Tensor, W: Tensor, R: Retraction) -> Tensor:
        """[R, t] + R (R(X) - I), X = [[omega, v], [0, 0]]: by Cayley R (I - omega/2)^-1 W."""
        X = torch.nn.functional.pad(W, (0, 0, 0, 1))
        return Lambda + Lambda[..., :-1] @ R.dense(X)[..., :-1, :]

    def polish(self, Lambda: Tensor, E: Tensor, share: Tensor | float = 1.0, point_only: bool = False) -> Tensor:
        """One Newton-Schulz step of R."""
        orthonormalised(Lambda[..., :-1], share)
        return Lambda

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """Y log(Y^-1 Z): the screw motion from Y to Z, for turns by less than pi."""
        R = Y[..., :-1]
        turn = SO.log(R, Z[..., :-1])
        v = torch.linalg.solve(phi(R.mT @ turn), R.mT @ (Z[..., -1:] - Y[..., -1:]))
        return torch.cat([turn, R @ v], -1)
