"""What a descent has learned of the curvature, as values: a new one takes the place of the old.

Vectors are flat, in the frames of one iterate. Factors may be in other units, and no one number suits an
angle and a length of 1000, so the inverse Hessian has a scale for each factor where no pair tells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

Scales = tuple[float, ...]  # one for each factor


class Rule(Protocol):
    """A rule for directions, from the gradient g and the steps so far."""

    c2: ClassVar[float]  # of the Wolfe conditions

    @property
    def informed(self) -> bool:
        """Whether some curvature is known, so that t = 1 is about right."""

    def direction(self, g: Tensor) -> Tensor:
        """A direction of descent, up to rounding."""

    def learned(self, s: Tensor, y: Tensor) -> Self:
        """The rule that also knows of a step s, along which the gradient changed by y."""

    def turned(self, turn: Callable[[Tensor], Tensor]) -> Self:
        """The rule in other frames."""


def curvature(s: Tensor, y: Tensor, least: float | None = None) -> tuple[float, float] | None:
    """y^T s and y^T y if the first exceeds `least`, by default its own rounding; otherwise None."""
    ys, yy = float(y.dot(s)), float(y.dot(y))
    if least is None:
        least = 10 * torch.finfo(s.dtype).eps * math.sqrt(float(s.dot(s))) * math.sqrt(yy)
    return (ys, yy) if ys > least else None


def scales(sizes: Sequence[int], s: Tensor, y: Tensor, all: tuple[float, float], before: Scales) -> Scales:
    """y^T s/y^T y of each factor, which stands for the inverse Hessian where no pair tells.

    A factor whose own curvature is not clearly positive keeps what it had, or at first takes the number of
    all.
    """
    one = all[0] / all[1]
    if len(sizes) == 1:
        return (one,)
    out = []
    for k, (a, b) in enumerate(zip(s.split(sizes), y.split(sizes), strict=True)):
        ab, bb = float(a.dot(b)), float(b.dot(b))
        clear = ab > 0.01 * math.sqrt(float(a.dot(a))) * math.sqrt(bb)
        out.append(ab / bb if clear else before[k] if before else one)
    return tuple(out)


def scaled_(q: Tensor, sizes: Sequence[int], by: Scales) -> Tensor:
    """Multiply each factor's part of q, in place."""
    if len(by) == 1:
        return q.mul_(by[0])
    torch._foreach_mul_(q.split(sizes), list(by))
    return q


def changed(rule: Any, **values: Any) -> Any:
    """`dataclasses.replace`, which takes ten times as long."""
    new = object.__new__(type(rule))
    new.__dict__.update(rule.__dict__, **values)
    return new


NOTHING = torch.empty(0, 0, device="cpu")


@dataclass(frozen=True)
class Limited:
    """L-BFGS: -H g, H the inverse Hessian from a `scale` for each factor and the last `size` pairs s, y.

    With the pairs as rows of S and Y, R the upper triangle of S Y^T, and D the scales, the two-loop recursion
    solves

        R a = S g,   q = D (g - Y^T a),   R^T c = diag(R) a - Y q,   H g = q + S^T c

    by back substitution, so it is done here with four products and two small solves, whatever the number of
    pairs (Byrd, Nocedal and Schnabel, 1994). The pairs are the rows [first, last) of larger buffers. A new
    pair is written behind them, where nobody looks, so an interrupt while learning leaves the old rule whole.
    """

    size: int
    sizes: Sequence[int]  # of the factors' parts of a vector
    least: float | None = None
    S: Tensor = NOTHING
    Y: Tensor = NOTHING
    R: Tensor = NOTHING
    first: int = 0
    last: int = 0
    scale: Scales = (1.0,)
    c2: ClassVar[float] = 0.9

    @property
    def informed(self) -> bool:
        """Whether there is a pair."""
        return self.last > self.first

    @property
    def window(self) -> slice:
        """The rows of the buffers that are in use."""
        return slice(self.first, self.last)

    def direction(self, g: Tensor) -> Tensor:
        """-H g."""
        if not self.informed:
            return -g
        w = self.window
        S, Y, R = self.S[w], self.Y[w], self.R[w, w]
        a = torch.linalg.solve_triangular(R, torch.mv(S, g).unsqueeze(-1), upper=True)
        q = scaled_(torch.addmv(g, Y.mT, a.squeeze(-1), alpha=-1), self.sizes, self.scale)
        c = (R.diagonal().unsqueeze(-1) * a).sub_(torch.mv(Y, q).unsqueeze(-1))
        c = torch.linalg.solve_triangular(R.mT, c, upper=False)
        return torch.addmv(q, S.mT, c.squeeze(-1), beta=-1, alpha=-1)

    def learned(self, s: Tensor, y: Tensor) -> Limited:
        """With this pair and without the oldest; one without positive curvature would spoil H > 0."""
        found = curvature(s, y, self.least)
        if found is None:
            return self
        return self.with_pair(s, y, scales(self.sizes, s, y, found, self.scale if self.informed else ()))

    def with_pair(self, s: Tensor, y: Tensor, scale: Scales) -> Limited:
        """With this pair, whatever it is."""
        here = self if self.last < len(self.S) else self._moved(s)
        k, first = here.last, max(here.first, here.last + 1 - self.size)
        here.S[k], here.Y[k] = s, y
        here.R[first : k + 1, k] = torch.mv(here.S[first : k + 1], y)
        return changed(here, first=first, last=k + 1, scale=scale)

    def _moved(self, like: Tensor) -> Limited:
        """The pairs at the front of new buffers with room for a quarter more."""
        keep = slice(max(self.first, self.last + 1 - self.size), self.last)  # the oldest is about to go
        count = keep.stop - keep.start
        rows = min(max(8, 2 * count), self.size + self.size // 4 + 1)
        # Rows are aligned alike, so that products do not depend on where the window is.
        S, Y = like.new_empty(2, rows, -(-len(like) // 16) * 16)[..., : len(like)]
        R = like.new_zeros(rows, rows)
        if count:
            S[:count], Y[:count], R[:count, :count] = self.S[keep], self.Y[keep], self.R[keep, keep]
        return changed(self, S=S, Y=Y, R=R, first=0, last=count)

    def turned(self, turn: Callable[[Tensor], Tensor]) -> Limited:
        """Products of pairs stay what they are."""
        S, Y, w = torch.empty_like(self.S), torch.empty_like(self.Y), self.window
        for k in range(w.start, w.stop):
            S[k], Y[k] = turn(self.S[k]), turn(self.Y[k])
        return changed(self, S=S, Y=Y)

    def empty(self) -> Limited:
        """Without pairs."""
        return Limited(self.size, self.sizes, self.least)


@dataclass(frozen=True)
class Dense:
    """BFGS: the inverse Hessian as a matrix, H <- (I - ro s y^T) H (I - ro y s^T) + ro s s^T, ro = 1/y^T s.

    The matrix does not turn with frames, so these must be stored. It learns in place.
    """

    H: Tensor | None = None
    c2: ClassVar[float] = 0.9

    @property
    def informed(self) -> bool:
        """Whether H has been started."""
        return self.H is not None

    def direction(self, g: Tensor) -> Tensor:
        """-H g."""
        return -g if self.H is None else torch.mv(self.H, g).neg_()

    def learned(self, s: Tensor, y: Tensor) -> Dense:
        """H + u s^T + s u^T: one product of rank two, where outer products would make two more matrices."""
        found = curvature(s, y)
        if found is None:
            return self
        ys, yy = found
        H = torch.diag_embed(torch.full_like(s, ys / yy)) if self.H is None else self.H
        Hy = torch.mv(H, y)
        u = s * ((1 + float(y.dot(Hy)) / ys) / (2 * ys)) - Hy / ys
        H.addmm_(torch.stack([u, s], 1), torch.stack([s, u]))
        return Dense(H)

    def turned(self, turn: Callable[[Tensor], Tensor]) -> Dense:
        """Never: stored frames leave vectors alone."""
        raise NotImplementedError


@dataclass(frozen=True)
class Conjugate:
    """Conjugate gradients in Shanno's form: memoryless BFGS, H from the scales D and the last pair alone.

        a = <s, g>/<s, y>,   q = D (g - a y),   H g = q + (a - <y, q>/<s, y>) s

    With D = <s, y>/<y, y> and after an exact line search, <s, g> = 0, this is D times Hestenes and Stiefel's
    direction, which is also Polak and Ribiere's. After an inexact one it still descends. Without positive
    curvature it is -D g.
    """

    sizes: Sequence[int]
    pair: tuple[Tensor, Tensor] | None = None
    ys: float = 1.0
    scale: Scales = (1.0,)
    informed: bool = False
    c2: ClassVar[float] = 0.5

    def direction(self, g: Tensor) -> Tensor:
        """-H g."""
        minus = tuple(-x for x in self.scale)
        if self.pair is None:
            return scaled_(g.clone(), self.sizes, minus)
        s, y = self.pair
        a = float(g.dot(s)) / self.ys
        d = scaled_(torch.sub(g, y, alpha=a), self.sizes, minus)  # -q
        return d.sub_(s, alpha=a + float(y.dot(d)) / self.ys)

    def learned(self, s: Tensor, y: Tensor) -> Conjugate:
        """Take this pair."""
        found = curvature(s, y)
        if found is None:
            return changed(self, pair=None)
        scale = scales(self.sizes, s, y, found, self.scale if self.informed else ())
        return Conjugate(self.sizes, (s, y), found[0], scale, True)

    def turned(self, turn: Callable[[Tensor], Tensor]) -> Conjugate:
        """The pair, turned."""
        return self if self.pair is None else changed(self, pair=(turn(self.pair[0]), turn(self.pair[1])))
