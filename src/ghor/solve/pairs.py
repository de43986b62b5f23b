"""Curvature pairs (s, y), s a step and y the change of the gradient: the memory of L-BFGS."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

ABSOLUTE = 1e-10  # torch's: y^T s must exceed it


@dataclass
class Pairs:
    """H g, H the inverse Hessian that the last `size` pairs give of `scale` I, by the two-loop recursion."""

    size: int
    s: list[Tensor] = field(default_factory=list)
    y: list[Tensor] = field(default_factory=list)
    ro: list[Tensor] = field(default_factory=list)  # 1/y^T s
    scale: Tensor | float = 1.0

    def update(self, s: Tensor, y: Tensor, least: float) -> None:
        """Take a pair, if its curvature y^T s exceeds `least`; the oldest goes."""
        ys = y.dot(s)
        if not float(ys) > least:
            return
        for kept, new in ((self.s, s), (self.y, y), (self.ro, 1.0 / ys)):
            if len(kept) == self.size:
                kept.pop(0)
            kept.append(new)
        self.scale = ys / y.dot(y)

    def direction(self, g: Tensor) -> Tensor:
        """-H g."""
        q, alpha = g.neg(), []
        for s, y, ro in zip(reversed(self.s), reversed(self.y), reversed(self.ro), strict=True):
            alpha.append(s.dot(q) * ro)
            q.add_(y * -alpha[-1])
        q = q * self.scale
        for s, y, ro, a in zip(self.s, self.y, self.ro, reversed(alpha), strict=True):
            q.add_(s * (a - y.dot(q) * ro))
        return q

    def vectors(self) -> list[Tensor]:
        """What turns with the frames."""
        return [*self.s, *self.y]

    def clear(self) -> None:
        """Forget everything."""
        for kept in (self.s, self.y, self.ro):
            kept.clear()
        self.scale = 1.0
