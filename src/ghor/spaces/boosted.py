"""The lines of Algorithm 3 for hyperbolic space: the frame at x is the boost Lambda(x), times a rotation or alone.

Lambda = [x; (0, o_1); ...; (0, o_n)] stands for Lambda(x) diag(1, O), o_j the columns of O: as a product it is as exact
at x_0 = 1e6 as at x_0 = 1. The boost alone, which the implicit section uses, is Lambda = [x], (..., 1, n+1).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..retraction import Retraction
from . import lorentz
from .framed import Framed, orthonormalised


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
        """A factor for b, below 1 where the step would lead out to where the digits end: eps x_0 = 1/4. Reads no value.

        bb = |b|^2 and xb = <x_s, b>.
        """

    def polish(self, Lambda: Tensor, E: Tensor, share: Tensor | float = 1.0, point_only: bool = False) -> Tensor:
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
        """Y and the `vectors`, in place: they turn as the boost frame does, and squares of coordinates spread with it.

        This frame turns by about the length of the way. Were squares left, momentum would turn into coordinates whose
        second moment is next to nothing, and Adam would take steps of many learning rates.
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


def _turned(Lambda: Tensor, w: Tensor) -> Tensor:
    """Coordinates in the boost frame as stored ones in that of Lambda: (0, O^T w)."""
    w = (Lambda[..., 1:, 1:] @ w.unsqueeze(-1)).squeeze(-1) if Lambda.shape[-2] > 1 else w
    return torch.nn.functional.pad(w, (1, 0))


def _boost(Lambda: Tensor, W: Tensor) -> Tensor:
    """The inverse: O b of W = (0, b)."""
    return (W[..., None, 1:] @ Lambda[..., 1:, 1:]).squeeze(-2) if Lambda.shape[-2] > 1 else W[..., 1:]
