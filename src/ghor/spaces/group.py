"""Spaces of a small group, of which Lambda is an element: four formulas make the step and the geometry."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ghor._torch.transforms import differentiated
from ghor.layout import Layout
from ghor.linalg import size
from ghor.spaces.base import Space
from ghor.spaces.frames import Frame, Group
from ghor.spaces.points import on_points
from ghor.spaces.retraction import Retraction, by_name, geodesic


@dataclass(frozen=True, repr=False)
class GroupSpace(Space):
    """A small group that acts: Lambda is an element L, and the lines of Algorithm 3 are formulas of it.

    Geometry on points goes through any L above them; no result depends on which.
    """

    metric_scale: ClassVar[float] = 1.0  # the metric is so many times the inner product of g^hor

    @cached_property
    def layout(self) -> Layout:
        """Matrices as they are, wide ones, too."""
        return Layout(tall=False)

    def frame(self, y: Tensor, section: str, held: dict[str, Tensor], eps: float) -> Frame:
        return Group(self, y, held, eps)

    def length(self, w: Tensor) -> Tensor:
        """What limits a step, (M, 1, 1)."""
        return size(w)

    def section(self, y: Tensor) -> Tensor:
        """L above y."""
        return y

    def point(self, L: Tensor) -> Tensor:
        """The point of L: L itself, on most groups."""
        return L

    def transported(self, L: Tensor, y: Tensor) -> Tensor:
        """L transported along the geodesic from its point to y."""
        return self.section(y)

    def coordinates(self, L: Tensor, g: Tensor) -> Tensor:
        """The gradient in g^hor, of the derivative g at the point of L."""
        raise NotImplementedError

    def global_rep(self, L: Tensor, v: Tensor) -> Tensor:
        """The element of g^hor of a tangent vector; others are projected first."""
        raise NotImplementedError

    def velocity(self, L: Tensor, w: Tensor) -> Tensor:
        """The inverse of `global_rep`: the derivative of L R(t w) E at t = 0."""
        raise NotImplementedError

    def moved(self, L: Tensor, w: Tensor, R: Retraction, longest: float, eps: float) -> Tensor:
        """L R(w), or as much of it as points rounded to eps can hold; L to the bit where w is 0."""
        raise NotImplementedError

    def unrepresentable(self, L: Tensor, eps: float) -> Tensor | None:
        """Where a step may not lead (M), as points rounded to eps could not hold it; None for nowhere."""
        return None

    def polish_(self, L: Tensor, moved: Tensor) -> None:
        """Rounding, where points have moved."""

    # -- geometry

    @on_points("pvv>m")
    def metric(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """g_Y(U, V): the inner product of the coordinates in g^hor, `metric_scale` times."""
        L = self.section(Y)
        return self.metric_scale * self.hor_inner(self.global_rep(L, U), self.global_rep(L, V))

    @on_points("pv>v")
    def rgrad(self, Y: Tensor, G: Tensor) -> Tensor:
        """The gradient in the metric, of the derivative G."""
        L = self.section(Y)
        return self.velocity(L, self.coordinates(L, G) / self.metric_scale)

    @on_points("pv>v")
    def tangent(self, Y: Tensor, X: Tensor) -> Tensor:
        """The projection of X to T_Y."""
        L = self.section(Y)
        return self.velocity(L, self.global_rep(L, X))

    @on_points("pv>p")
    def retract(
        self, Y: Tensor, Delta: Tensor, retraction: str | Retraction = "cayley", *, eps: float | None = None
    ) -> Tensor:
        """Lambda R(W) E, W the coordinates of Delta; Y to the bit where Delta = 0. Digits end at `eps`."""
        L, R = self.section(Y), by_name(retraction)
        W = self.global_rep(L, Delta)
        Z = self.point(self.moved(L, W, R, math.inf, eps or torch.finfo(Y.dtype).eps))
        if differentiated(W):  # the derivative at 0 is not that of a constant
            return Z
        return torch.where((W != 0).any(-1, True).any(-2, True), Z, Y)

    @on_points("pv>p")
    def exp(self, Y: Tensor, Delta: Tensor, *, eps: float | None = None) -> Tensor:
        """gamma(1) on the geodesic gamma from Y with velocity Delta."""
        return self.retract(Y, Delta, geodesic, eps=eps)

    @on_points("pvv>v")
    def transport(self, Y: Tensor, Delta: Tensor, V: Tensor, *, eps: float | None = None) -> Tensor:
        """Transport V along the geodesic of Delta: its coordinates in the moving frame stay the same."""
        L = self.section(Y)
        moved = self.moved(L, self.global_rep(L, Delta), geodesic, math.inf, eps or torch.finfo(Y.dtype).eps)
        return self.velocity(moved, self.global_rep(L, V))
