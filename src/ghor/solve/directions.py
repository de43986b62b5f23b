"""Search directions: L-BFGS, BFGS and conjugate gradients. Vectors are flat, in the frames of one point."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor


class Rule(Protocol):
    """A rule for directions, from the gradient g and the steps so far."""

    c2: ClassVar[float]  # of the Wolfe conditions

    @property
    def informed(self) -> bool:
        """Whether some curvature is known, so that t = 1 is about right."""

    def direction(self, g: Tensor) -> Tensor:
        """A direction of descent, up to rounding."""

    def update(self, s: Tensor, before: Tensor, g: Tensor) -> None:
        """Learn from the step s from a point with gradient `before` to one with gradient g."""

    def vectors(self) -> list[Tensor]:
        """The vectors that turn with the frames."""


def curvature(s: Tensor, y: Tensor, least: float | None = None) -> Tensor | None:
    """y^T s if it exceeds `least`, by default its own rounding; otherwise None."""
    least = 10 * torch.finfo(s.dtype).eps * float(s.norm() * y.norm()) if least is None else least
    ys = y.dot(s)
    return ys if float(ys) > least else None


@dataclass
class Limited:
    """L-BFGS: -H g, H the inverse Hessian from `scale` I and the last `size` pairs s, y = g - before."""

    c2: ClassVar[float] = 0.9
    size: int
    s: list[Tensor] = field(default_factory=list)
    y: list[Tensor] = field(default_factory=list)
    ro: list[Tensor] = field(default_factory=list)  # 1/y^T s
    scale: Tensor | float = 1.0
    least: float | None = None  # see `curvature`

    @property
    def informed(self) -> bool:
        """Whether there is a pair."""
        return bool(self.s)

    def direction(self, g: Tensor) -> Tensor:
        """The two-loop recursion."""
        q, alpha = g.neg(), []
        for s, y, ro in zip(reversed(self.s), reversed(self.y), reversed(self.ro), strict=True):
            alpha.append(float(s.dot(q) * ro))
            q.add_(y, alpha=-alpha[-1])
        q.mul_(self.scale)
        for s, y, ro, a in zip(self.s, self.y, self.ro, reversed(alpha), strict=True):
            q.add_(s, alpha=a - float(y.dot(q) * ro))
        return q

    def update(self, s: Tensor, before: Tensor, g: Tensor) -> None:
        """Add a pair and drop the oldest; skip one without positive curvature, which would spoil H > 0."""
        y = g - before
        ys = curvature(s, y, self.least)
        if ys is None:
            return
        for kept, new in ((self.s, s), (self.y, y), (self.ro, 1.0 / ys)):
            if len(kept) == self.size:
                kept.pop(0)
            kept.append(new)
        self.scale = ys / y.dot(y)

    def vectors(self) -> list[Tensor]:
        """The pairs."""
        return [*self.s, *self.y]


class Dense:
    """BFGS: the inverse Hessian as a matrix, H <- (I - ro s y^T) H (I - ro y s^T) + ro s s^T, ro = 1/y^T s.

    The matrix does not turn with frames, so these must be transported.
    """

    c2: ClassVar[float] = 0.9
    H: Tensor | None = None

    @property
    def informed(self) -> bool:
        """Whether H has been started."""
        return self.H is not None

    def direction(self, g: Tensor) -> Tensor:
        """-H g."""
        return -g if self.H is None else -(self.H @ g)

    def update(self, s: Tensor, before: Tensor, g: Tensor) -> None:
        """Update H by a matrix of rank two."""
        y = g - before
        ys = curvature(s, y)
        if ys is None:
            return
        if self.H is None:
            self.H = torch.diag_embed(torch.full_like(s, float(ys / y.dot(y))))
        Hy = self.H @ y
        self.H.addr_(s, s, alpha=float((1 + y.dot(Hy) / ys) / ys))
        self.H.sub_((torch.outer(Hy, s) + torch.outer(s, Hy)) / ys)

    def vectors(self) -> list[Tensor]:
        """None."""
        return []


class Conjugate:
    """Conjugate gradients, d <- -g + b s with b = max(0, <g, g - g_old>)/-<g_old, s>, s the last step.

    With an exact line search this is Polak and Ribiere's formula, whatever the length of s; b = 0 is a
    restart (Powell). Scaled by <s, y>/<y, y>, so that t = 1 is about right.
    """

    c2: ClassVar[float] = 0.3
    informed = False
    s: Tensor | None = None
    beta, scale = 0.0, 1.0

    def direction(self, g: Tensor) -> Tensor:
        """-g plus a multiple of the last step, scaled."""
        return g * -self.scale if self.s is None else (self.s * self.beta - g) * self.scale

    def update(self, s: Tensor, before: Tensor, g: Tensor) -> None:
        """Set b and the scale."""
        y, fall = g - before, -float(before.dot(s))
        ys = curvature(s, y)
        if ys is not None:
            self.scale, self.informed = float(ys / y.dot(y)), True
        self.beta = max(0.0, float(g.dot(y))) / fall if fall > 0 else 0.0
        self.s = s if self.beta > 0 else None

    def vectors(self) -> list[Tensor]:
        """The last step."""
        return [] if self.s is None else [self.s]
