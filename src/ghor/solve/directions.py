"""Search directions: L-BFGS, BFGS and conjugate gradients. Vectors are flat, in the frames of one point."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Protocol, Self

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


def curvature(s: Tensor, y: Tensor, least: float | None = None) -> tuple[float, float] | None:
    """y^T s and y^T y if the first exceeds `least`, by default its own rounding; otherwise None."""
    ys, yy = float(y.dot(s)), float(y.dot(y))
    if least is None:
        least = 10 * torch.finfo(s.dtype).eps * math.sqrt(float(s.dot(s))) * math.sqrt(yy)
    return (ys, yy) if ys > least else None


class Limited:
    """L-BFGS: -H g, H the inverse Hessian from `scale` I and the last `size` pairs s, y = g - before.

    With the pairs as rows of S and Y, and R the upper triangle of S Y^T, the two-loop recursion solves

        R a = S g,   q = g - Y^T a,   R^T c = diag(R) a - scale Y q,   H g = scale q + S^T c

    by back substitution, so it is done here with four products and two small solves, whatever the number of
    pairs (Byrd, Nocedal and Schnabel, 1994). S and Y are windows that slide through larger buffers.
    """

    c2: ClassVar[float] = 0.9

    def __init__(self, size: int, least: float | None = None) -> None:
        self.size, self.least, self.scale = size, least, 1.0
        self.first, self.last = 0, 0  # the window
        self.S = self.Y = self.R = torch.empty(0, 0, device="cpu")

    @classmethod
    def of(cls, size: int, least: float | None, s: list[Tensor], y: list[Tensor], R: Tensor | None) -> Self:
        """The rule with these pairs, whose products R are computed if they are not given."""
        rule = cls(size, least)
        for one, other in list(zip(s, y, strict=True))[-size:]:
            rule._append(one, other)
        window = rule.window
        if R is not None and R.shape == (len(s), len(s)):
            rule.R[window, window] = R[-size:, -size:]
        elif s:
            rule.R[window, window] = rule.S[window] @ rule.Y[window].mT
        return rule

    @property
    def window(self) -> slice:
        """The rows of the buffers that are in use."""
        return slice(self.first, self.last)

    @property
    def informed(self) -> bool:
        """Whether there is a pair."""
        return self.last > self.first

    def direction(self, g: Tensor) -> Tensor:
        """-H g."""
        if not self.informed:
            return -self.scale * g
        w = self.window
        S, Y, R = self.S[w], self.Y[w], self.R[w, w]
        a = torch.linalg.solve_triangular(R, torch.mv(S, g).unsqueeze(-1), upper=True)
        q = torch.addmv(g, Y.mT, a.squeeze(-1), alpha=-1)
        c = (R.diagonal().unsqueeze(-1) * a).sub_(torch.mv(Y, q).unsqueeze(-1), alpha=self.scale)
        c = torch.linalg.solve_triangular(R.mT, c, upper=False)
        return torch.addmv(q, S.mT, c.squeeze(-1), beta=-self.scale, alpha=-1)

    def update(self, s: Tensor, before: Tensor, g: Tensor) -> None:
        """Add a pair and drop the oldest; skip one without positive curvature, which would spoil H > 0."""
        y = g - before
        found = curvature(s, y, self.least)
        if found is None:
            return
        self._append(s, y)
        self.R[self.window, self.last - 1] = torch.mv(self.S[self.window], y)
        self.scale = found[0] / found[1]

    def _append(self, s: Tensor, y: Tensor) -> None:
        """Write a pair behind the window, which drops its oldest pair when it is full."""
        if self.last == len(self.S):
            self._make_room(s)
        self.S[self.last], self.Y[self.last] = s, y
        self.last += 1
        self.first = max(self.first, self.last - self.size)

    def _make_room(self, like: Tensor) -> None:
        """Move the window to the front of the buffers, or let them grow to hold it and a quarter more."""
        first, count = self.first, self.last - self.first
        rows = min(max(8, 2 * count), self.size + self.size // 4 + 1)
        held, self.R = self.R[self.window, self.window].clone(), like.new_zeros(rows, rows)
        self.R[:count, :count] = held
        for name in ("S", "Y"):
            old, new = getattr(self, name), getattr(self, name)
            if rows > len(old):
                # Rows are aligned alike, so that products do not depend on where the window is.
                new = like.new_empty(rows, -(-len(like) // 16) * 16)[:, : len(like)]
                setattr(self, name, new)
            step = max(first, 1) if new is old else max(count, 1)
            for i in range(0, count, step):
                new[i : min(i + step, count)] = old[first + i : first + min(i + step, count)]
        self.first, self.last = 0, count

    def vectors(self) -> list[Tensor]:
        """The pairs."""
        return [*self.S[self.window], *self.Y[self.window]]

    def state(self) -> dict[str, Any]:
        """The pairs under the names of torch.optim.LBFGS, as views, with 1/y^T s; and R."""
        w = self.window
        R = self.R[w, w].clone()
        ro = list(R.diagonal().reciprocal())
        pairs = {"old_stps": list(self.S[w]), "old_dirs": list(self.Y[w]), "ro": ro}
        return {**pairs, "H_diag": self.scale, "products": R}


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
        found = curvature(s, y)
        if found is None:
            return
        ys, yy = found
        if self.H is None:
            self.H = torch.diag_embed(torch.full_like(s, ys / yy))
        Hy = self.H @ y
        self.H.addr_(s, s, alpha=(1 + float(y.dot(Hy)) / ys) / ys)
        self.H.sub_((torch.outer(Hy, s) + torch.outer(s, Hy)) / ys)

    def vectors(self) -> list[Tensor]:
        """None."""
        return []


class Conjugate:
    """Conjugate gradients in Shanno's form, -H g with H from the last pair s, y alone (memoryless BFGS).

        H g = c g - (c <y, g> - 2 <s, g>)/<s, y> s - c <s, g>/<s, y> y,   c = <s, y>/<y, y>

    After an exact line search, <s, g> = 0, this is c times Hestenes and Stiefel's direction, which is also
    Polak and Ribiere's. After an inexact one it still descends. Without positive curvature it is -c g.
    """

    c2: ClassVar[float] = 0.5
    informed = False
    pair: tuple[Tensor, Tensor] | None = None
    scale, ys = 1.0, 1.0

    def direction(self, g: Tensor) -> Tensor:
        """-H g."""
        d = g * -self.scale
        if self.pair is None:
            return d
        s, y = self.pair
        gs, gy = float(g.dot(s)), float(g.dot(y))
        d.add_(s, alpha=(self.scale * gy - 2 * gs) / self.ys)
        return d.add_(y, alpha=self.scale * gs / self.ys)

    def update(self, s: Tensor, before: Tensor, g: Tensor) -> None:
        """Take this pair."""
        y = g - before
        found = curvature(s, y)
        self.pair = None if found is None else (s, y)
        if found is not None:
            self.ys, self.scale, self.informed = found[0], found[0] / found[1], True

    def vectors(self) -> list[Tensor]:
        """The pair."""
        return list(self.pair or ())
