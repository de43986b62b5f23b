"""H^n = SO+(1, n)/SO(n): hyperbolic space in the Lorentz model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..linalg import full_precision
from ..retraction import geodesic
from . import lorentz
from .base import compute
from .boosted import Boosted


@dataclass(frozen=True, repr=False)
class Hyperbolic(Boosted):
    """Vectors (..., n+1) with -x_0^2 + x_1^2 + ... + x_n^2 = -1, x_0 > 0. g^hor: boosts b in R^n, stored as (0, b).

    The section is the boost at x, a function of x alone, so the implicit section stores nothing and is the default.
    A transported frame is that boost times a rotation: Lambda = [x; 0, o_1; ...; 0, o_n], o_j in R^n.
    At distance r from e_0 the digits of a point tell places eps e^r/2 apart: 5e-4 at r = 9, 0.2 at r = 15 in float32,
    1e-6 at r = 23 in float64. Where they run out, eps x_0 = 1/4 (r = 15.2 and 35.4), a weight is held, with a warning.
    """

    sides: ClassVar[int] = 1
    holds: ClassVar[str] = "vectors (..., n+1) with n >= 1"

    def check_shape(self, shape: Sequence[int]) -> None:
        self.refuse_shape(shape, len(shape) >= 1 and shape[-1] >= 2)

    def E(self, shape: Sequence[int], dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """e_0."""
        self.check_shape(shape)
        E = torch.zeros(tuple(shape), dtype=dtype, device=device)
        E[..., 0] = 1
        return E

    @full_precision()
    def residual(self, Y: Tensor) -> Tensor:
        """|<x, x> + 1|; infinite beyond the digits, where 1 is less than rounding of x_0."""
        x0, xs = Y[..., 0], Y[..., 1:]
        return torch.where(x0 * torch.finfo(Y.dtype).eps < 1, (1 + (xs * xs).sum(-1) - x0 * x0.abs()).abs(), math.inf)

    def tolerance(self, Y: Tensor) -> Tensor:
        """Rounding of <x, x> grows with x_0^2."""
        return self.room(Y) + 4 * torch.finfo(Y.dtype).eps * compute(Y)[..., 0] ** 2

    def from_normal(self, X: Tensor) -> Tensor:
        """In a uniform direction from e_0, at a uniform distance between 0 and 1."""
        r = torch.special.ndtr(X[..., :1])
        return lorentz.lifted(torch.sinh(r) * torch.nn.functional.normalize(X[..., 1:], dim=-1))

    @full_precision()
    def project(self, X: Tensor) -> Tensor:
        """The point with X's spatial part: x_0 = sqrt(1 + |x_s|^2)."""
        self.check_project(X)
        Y = lorentz.lifted(compute(X)[..., 1:])
        far = float(Y.detach()[..., 0].max())
        if not far * torch.finfo(X.dtype).eps < 1:
            raise ValueError(
                f"the point is at distance {math.log(2 * far):.0f} from the origin of {self}, where {X.dtype} has no "
                "digits left; scale it down, or use float64"
            )
        return Y.to(X.dtype)

    def to_ball(self, Y: Tensor) -> Tensor:
        """The point of the Poincare ball: x_s/(1 + x_0), (..., n+1) -> (..., n)."""
        return Y[..., 1:] / (1 + Y[..., :1])

    def from_ball(self, u: Tensor) -> Tensor:
        """The inverse of `to_ball`: (1 + |u|^2, 2 u)/(1 - |u|^2)."""
        return lorentz.lifted(2 * u / (1 - lorentz.dot(u, u)))

    def shorten(self, x0: Tensor, bb: Tensor, xb: Tensor) -> Tensor:
        far, length = 0.25 / torch.finfo(x0.dtype).eps, bb.sqrt()
        t = 1.1 * length  # a bound on the way, by Cayley too where |b| <= 1
        outward = xb / length.clamp_min(1e-30)
        beyond = (x0 * torch.cosh(t) + torch.sinh(t) * outward > far) & (length > 0)
        self.warn_of_digits(beyond, f"to distance {math.log(2 * far):.1f} from the origin", x0)
        return torch.where(beyond, ((far / x0).log() / t).clamp(0, 1), 1)

    # -- geometry -----------------------------------------------------------------------------------------------------

    def tangent(self, Y: Tensor, X: Tensor) -> Tensor:
        """X + x <x, X>."""
        return X + Y * (lorentz.dot(Y[..., 1:], X[..., 1:]) - Y[..., :1] * X[..., :1])

    def transport(self, Y: Tensor, Delta: Tensor, V: Tensor) -> Tensor:
        step = lorentz.Step(Y, lorentz.coordinates(Y, Delta), geodesic)
        return lorentz.push(lorentz.lifted(step.spatial()), step.turned(lorentz.coordinates(Y, V)))

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """The tangent vector at Y of the geodesic to Z, which is unique."""
        return lorentz.push(Y, lorentz.direction(Y, Z) / lorentz.sinhc(lorentz.square_of_distance(Y, Z)))

    def dist(self, Y: Tensor, Z: Tensor) -> Tensor:
        """arcosh(-<Y, Z>), exact to rounding also for near points; its derivative where they meet is 0."""
        square = lorentz.square_of_distance(Y, Z).squeeze(-1)
        positive = square > 0
        return torch.where(positive, torch.where(positive, square, 1).sqrt(), 0)
