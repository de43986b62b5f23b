"""H^n = SO+(1, n)/SO(n): hyperbolic space in the Lorentz model."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ghor._torch.precision import full_precision
from ghor.retraction import Retraction, geodesic
from ghor.spaces import rank_one as lorentz
from ghor.spaces.base import compute
from ghor.spaces.framed import Framed, orthonormalised


class Boosted(Framed):
    """Frames, steps and the implicit section, which has an empty anchor."""

    implicit: ClassVar[bool] = True
    spreads: ClassVar[bool] = True
    max_velocity: ClassVar[float] = 1.0  # Cayley needs |b| < 2

    def frame(self, Y: Tensor) -> Tensor:
        return Y.unsqueeze(-2)

    def section(self, Y: Tensor) -> Tensor:
        n = Y.shape[-1] - 1
        I = torch.eye(n, n + 1, dtype=Y.dtype, device=Y.device).roll(1, -1)
        return torch.cat([Y.unsqueeze(-2), I.expand(*Y.shape[:-1], n, n + 1)], -2)

    def apply_section(self, Lambda: Tensor, E: Tensor) -> Tensor:
        return Lambda[..., 0, :]

    def pullback(self, Lambda: Tensor, G: Tensor) -> Tensor:
        """(0, Q^T G), Q the columns of the frame beyond the first."""
        return _turned(Lambda, lorentz.pull(Lambda[..., 0, :], G))

    def global_rep(self, Lambda: Tensor, Delta: Tensor) -> Tensor:
        return _turned(Lambda, lorentz.coordinates(Lambda[..., 0, :], Delta))

    def push(self, Lambda: Tensor, W: Tensor) -> Tensor:
        return lorentz.push(Lambda[..., 0, :], _boost(Lambda, W))

    def hor(self, W: Tensor) -> Tensor:
        """Nothing along e_0."""
        return torch.cat([torch.zeros_like(W[..., :1]), W[..., 1:]], -1)

    def moved(self, Lambda: Tensor, W: Tensor, R: Retraction) -> Tensor:
        """x+ by the boost, O by Wigner's rotation."""
        x, O = Lambda[..., 0, :], Lambda[..., 1:, 1:]
        b = _boost(Lambda, W)
        shorten = None if W.requires_grad else self.shorten
        x_new = lorentz.lifted(lorentz.Step(x, b, R, shorten).spatial())
        if not W.requires_grad:  # the derivative at 0 is not that of a constant
            x_new = torch.where((b != 0).any(-1, keepdim=True), x_new, x)
        x_new = x_new.unsqueeze(-2)
        if Lambda.shape[-2] > 1:
            turned = lorentz.Step(x.unsqueeze(-2), b.unsqueeze(-2), R, shorten).turned(O)
            x_new = torch.cat([x_new, torch.cat([Lambda[..., 1:, :1], turned], -1)], -2)
        return x_new

    @abstractmethod
    def shorten(self, x0: Tensor, bb: Tensor, xb: Tensor) -> Tensor:
        """A factor for b, below 1 where the step would lead out to where the digits end: eps x_0 = 1/4. Reads
        no value.

        bb = |b|^2 and xb = <x_s, b>.
        """

    def polish(
        self, Lambda: Tensor, E: Tensor, share: Tensor | float = 1.0, point_only: bool = False
    ) -> Tensor:
        """x_0 from the spatial part; O by one Newton-Schulz step."""
        self.implicit_polish(Lambda[..., 0, :], share)
        if not point_only:
            orthonormalised(Lambda[..., 1:, 1:], share)
        return Lambda

    # -- the implicit section -----------------------------------------------------------------------------------------

    def section_kind(self, asked: str, shape: Sequence[int]) -> str:
        return "transported" if asked == "transported" else "implicit"

    def implicit_start(self, Y: Tensor) -> Tensor:
        """Nothing: (..., 0)."""
        return Y.new_empty(*Y.shape[:-1], 0)

    def checked_anchor(self, R: Tensor) -> Tensor:
        """Nothing can be wrong with it."""
        return R

    def implicit_inverse(self, Y: Tensor, R: Tensor) -> Tensor:
        """Nothing is solved for."""
        return R

    def implicit_frame(self, Y: Tensor, R: Tensor) -> Tensor:
        """The boost, with O = I."""
        return self.section(Y)

    def implicit_turn(self, Y: Tensor, R: Tensor, Lambda: Tensor, vectors: Sequence[Tensor]) -> None:
        """From the frame Lambda to the boost alone."""
        for X in vectors:
            X[..., 1:] = _boost(Lambda, X)

    def implicit_polish(self, Y: Tensor, share: Tensor | float) -> None:
        """x_0 from the spatial part, in place."""
        Y[..., 0] += (lorentz.lifted(Y[..., 1:])[..., 0] - Y[..., 0]) * share

    def implicit_restore(self, Y: Tensor) -> Tensor:
        """The same after a long step."""
        return lorentz.lifted(Y[..., 1:])

    def implicit_grad(self, Y: Tensor, R: Tensor, P: Tensor, G: Tensor, out: Tensor) -> Tensor:
        """`global_grad` in the boost frame."""
        out[..., 1:], out[..., 0] = lorentz.pull(Y, G), 0
        return out

    def implicit_update(
        self,
        Y: Tensor,
        R: Tensor,
        P: Tensor,
        W: Tensor,
        retraction: Retraction,
        vectors: Sequence[Tensor],
        moved: Tensor,
        squares: Sequence[Tensor] = (),
    ) -> Tensor:
        """Y and the `vectors`, in place: they turn as the boost frame does, and squares of coordinates spread
        with it.

        This frame turns by about the length of the way. Were squares left, momentum would turn into
        coordinates whose second moment is next to nothing, and Adam would take steps of many learning rates.
        """
        step = lorentz.Step(Y, W[..., 1:], retraction, self.shorten)
        for X in vectors:  # where b = 0 all of them stay to the bit, and so does x_s
            along_x, along_b = step.turn(X[..., 1:])
            X[..., 1:].addcmul_(along_x, step.xs).addcmul_(along_b, step.b)
        for X in squares:
            X[..., 1:] = step.spread(X[..., 1:]).clamp_min(0)
        xs = step.spatial()
        x0 = torch.where(moved.unsqueeze(-1) > 0, (1 + lorentz.dot(xs, xs)).sqrt(), step.x0)
        Y[..., :1], Y[..., 1:] = x0, xs
        return P


@dataclass(frozen=True, repr=False)
class Hyperbolic(Boosted):
    """Vectors (..., n+1) with -x_0^2 + x_1^2 + ... + x_n^2 = -1, x_0 > 0. g^hor: boosts b in R^n, stored as
    (0, b).

    The section is the boost at x, a function of x alone, so the implicit section stores nothing and is the
    default. A transported frame is that boost times a rotation: Lambda = [x; 0, o_1; ...; 0, o_n], o_j in
    R^n. At distance r from e_0 the digits of a point tell places eps e^r/2 apart: 5e-4 at r = 9, 0.2 at r =
    15 in float32, 1e-6 at r = 23 in float64. Where they run out, eps x_0 = 1/4 (r = 15.2 and 35.4), a weight
    is held, with a warning.
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
        return torch.where(
            x0 * torch.finfo(Y.dtype).eps < 1, (1 + (xs * xs).sum(-1) - x0 * x0.abs()).abs(), math.inf
        )

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


def _turned(Lambda: Tensor, w: Tensor) -> Tensor:
    """Coordinates in the boost frame as stored ones in that of Lambda: (0, O^T w)."""
    w = (Lambda[..., 1:, 1:] @ w.unsqueeze(-1)).squeeze(-1) if Lambda.shape[-2] > 1 else w
    return torch.nn.functional.pad(w, (1, 0))


def _boost(Lambda: Tensor, W: Tensor) -> Tensor:
    """The inverse: O b of W = (0, b)."""
    return (W[..., None, 1:] @ Lambda[..., 1:, 1:]).squeeze(-2) if Lambda.shape[-2] > 1 else W[..., 1:]
