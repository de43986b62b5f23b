"""Descent along search directions: L-BFGS, BFGS and conjugate gradients are rules for the direction."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .frames import Frames
from .pairs import Pairs
from .problem import Log, Place, Problem
from .wolfe import Trial, strong_wolfe


class Rule(Protocol):
    """A direction from gradients. All vectors are flat, in the frames of the current place."""

    c2: float  # of the Wolfe conditions

    def direction(self, g: Tensor) -> Tensor: ...
    def update(self, s: Tensor, before: Tensor, g: Tensor) -> None: ...
    def vectors(self) -> list[Tensor]: ...
    def clear(self) -> None: ...


class Limited(Pairs):
    """L-BFGS: the inverse Hessian of the last pairs."""

    c2 = 0.9

    def update(self, s: Tensor, before: Tensor, g: Tensor) -> None:  # type: ignore[override]
        """The pair s, y = g - before."""
        y = g - before
        super().update(s, y, _least(s, y))


class Dense:
    """BFGS: the inverse Hessian as a matrix, H <- (I - ro s y^T) H (I - ro y s^T) + ro s s^T."""

    c2 = 0.9

    def __init__(self) -> None:
        self.H: Tensor | None = None

    def direction(self, g: Tensor) -> Tensor:
        """-H g."""
        return -g if self.H is None else -(self.H @ g)

    def update(self, s: Tensor, before: Tensor, g: Tensor) -> None:
        """The pair s, y = g - before."""
        y = g - before
        ys = y.dot(s)
        if not float(ys) > _least(s, y):
            return
        if self.H is None:
            self.H = torch.diag_embed(torch.full_like(s, float(ys / y.dot(y))))
        Hy = self.H @ y
        self.H.addr_(s, s, alpha=float((1 + y.dot(Hy) / ys) / ys))
        self.H.sub_((torch.outer(Hy, s) + torch.outer(s, Hy)) / ys)

    def vectors(self) -> list[Tensor]:
        """None: the frames are transported ones."""
        return []

    def clear(self) -> None:
        """Forget everything."""
        self.H = None


class Conjugate:
    """Conjugate gradients, d <- -g + b s with b = max(0, <g, g - g_old>)/-<g_old, s>, s the last step.

    Polak and Ribiere's where the line search is exact, whatever the length of s; b = 0 starts afresh (Powell). Scaled
    by <s, y>/<y, y>, so that a step of 1 is about right.
    """

    c2 = 0.3

    def __init__(self) -> None:
        self.s: Tensor | None = None
        self.beta, self.scale = 0.0, 1.0

    def direction(self, g: Tensor) -> Tensor:
        """-g, and what is left of the last step."""
        return g * -self.scale if self.s is None else (self.s * self.beta - g) * self.scale

    def update(self, s: Tensor, before: Tensor, g: Tensor) -> None:
        """After the step s from where the gradient was `before`."""
        y = g - before
        ys, fall = float(y.dot(s)), -float(before.dot(s))
        self.scale = ys / float(y.dot(y)) if ys > _least(s, y) else self.scale
        self.beta = max(0.0, float(g.dot(y))) / fall if fall > 0 else 0.0
        self.s = s if self.beta > 0 else None

    def vectors(self) -> list[Tensor]:
        """The last step."""
        return [] if self.s is None else [self.s]

    def clear(self) -> None:
        """Forget everything."""
        self.s, self.scale = None, 1.0


def _least(s: Tensor, y: Tensor) -> float:
    """Curvature that is no more than rounding."""
    return 10 * torch.finfo(s.dtype).eps * float(s.norm() * y.norm())


def descend(problem: Problem, place: Place, rule: Rule, log: Log) -> Place:
    """Until the log says so, or no step along -gradient lowers the value."""
    fresh = True
    while not log.over(place):
        g, frames = place.gradient, place.frames
        d = rule.direction(g)
        slope = float(g.dot(d))
        if not slope < 0:
            rule.clear()
            d, slope, fresh = -g, -float(g.dot(g)), True
        longest = frames.ceiling(d)

        def phi(t: float, d: Tensor = d, frames: Frames = frames) -> Trial:
            along = d.clone()
            at = problem.place(frames.moved(d, t, [along]))
            return Trial(t, at.value, at.frames.slope(at.gradient, along, t), at)

        eps = torch.finfo(g.dtype).eps
        found = strong_wolfe(
            phi,
            Trial(0.0, place.value, slope, place),
            min(1.0, 1.0 / float(g.abs().sum())) if fresh else 1.0,
            c2=rule.c2,
            size=float(d.norm()),
            tolerance=eps,
            longest=longest,
            slack=10 * eps * abs(place.value),
        )
        if found.t == 0:
            if fresh:
                log.status = f"no step lowers the value {place.value}: rounding, or a gradient that is not its own"
                return place
            rule.clear()
            fresh = True
            continue
        before, s = g.clone(), d * found.t
        to = frames.arrived(d, found.t, found.at.frames, [before, s], rule.vectors())
        place = Place(to, found.f, found.at.gradient)
        rule.update(s, before, place.gradient)
        fresh = False
    return place
