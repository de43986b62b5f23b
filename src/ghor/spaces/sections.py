"""Sections: how the frame Lambda above a point is kept from step to step.

Transported: Lambda is stored (N^2 numbers on matrix spaces) and moves with the step, Lambda <- Lambda R(W),
by the methods of the space. The coordinates of a transported vector do not change, so the optimizer's state
is left alone.

Implicit: Lambda is a function of Y and of a small anchor, never formed (formulas: `spaces/anchored.py`), with
the state of the plain optimizer and n^2 numbers. The frame at the new point differs from the transported one
by a rotation of the complement, so state tensors that are vectors are carried over, exactly. Squares of
coordinates cannot be rotated; they stay as they are, in a frame that turns slowly while the anchor is fixed.

Both have one set of methods, and work on stacks: points (M, *point), M the only batch dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ghor.linalg import parts, wide
from ghor.retraction import Retraction
from ghor.spaces.base import Space

POLISH_POINT = 10  # steps between two polishings, of Y alone or, more rarely, of all of Lambda
SECTIONS = ("auto", "transported", "implicit")


class Transported:
    """Lambda, stored and moved by the space's own lines of Algorithm 3."""

    holds_point = True

    def __init__(self, space: Space, E: Tensor, Lambda: Tensor, master: Tensor | None = None) -> None:
        self.space, self.E, self.Lambda = space, E, Lambda
        self.period = -(-space.polish_period(E.shape) // POLISH_POINT) * POLISH_POINT

    @classmethod
    def start(cls, space: Space, E: Tensor, Y: Tensor, half: bool) -> Transported:
        """The space's section at Y."""
        Lambda = space.section(Y)
        return cls(space, E, Lambda.clone() if Lambda.data_ptr() == Y.data_ptr() else Lambda)

    def tensors(self) -> dict[str, Tensor]:
        """What goes into the state, by key."""
        return {"section": self.Lambda}

    def point(self, Y: Tensor | None) -> Tensor:
        """Y, in the dtype of computation: a view of Lambda."""
        return self.space.apply_section(self.Lambda, self.E)

    def reading(self, Y: Tensor) -> Tensor:
        """What tells whether anybody has written to the weights: they are compared with the point that is
        held."""
        return Y

    def global_grad(self, Y: Tensor | None, G: Tensor, out: Tensor) -> None:
        """B <- global_rep(Lambda, rgrad(Y, G))."""
        self.space.global_grad(self.Lambda, G, out=out)

    def update(
        self, Y: Tensor | None, W: Tensor, retraction: Retraction, vectors: Sequence[Tensor], moved: Tensor
    ) -> Tensor:
        """Lambda <- Lambda R(W), in place; returns Y = Lambda E, a view of it."""
        if not self.space.compact:
            W = self._bounded(self.Lambda, W, retraction)
        self.space.update_section(self.Lambda, W, retraction, out=self.Lambda)
        return self.space.apply_section(self.Lambda, self.E)

    def update_far(
        self, Y: Tensor, rows: Tensor, W: Tensor, R: Retraction, vectors: Sequence[Tensor]
    ) -> None:
        """The same for some of the stack and steps of any length: in float64, and back to the group at
        once."""
        Lambda = self.Lambda[rows]
        if not self.space.compact:
            W = self._bounded(Lambda, W, R)
        L = self.space.restore(self.space.update_section(wide(Lambda), W, R), self.E).to(Lambda.dtype)
        self.Lambda[rows] = self.space.within_digits(Lambda, L)

    def _bounded(self, Lambda: Tensor, W: Tensor, R: Retraction) -> Tensor:
        """W, shortened where the point would outgrow its digits."""
        W = self.space.bounded(Lambda, W)
        return self.space.hold(Lambda.to(W.dtype), W, R, self.E.dtype) if self.space.has("hold") else W

    def polish(self, Y: Tensor, age: int, share: Tensor, now: bool) -> None:
        """Back to the group where rounding has left it; `share` (M) is 0 for those that may not change."""
        whole = now or age % self.period == 0
        self.space.polish(self.Lambda, self.E, share, point_only=not whole)

    def rebuild(self, rows: Tensor, Y: Tensor) -> None:
        """From the points Y, for some of the stack."""
        self.Lambda[rows] = self.space.section(Y)

    def to(self, other: type[Section], Y: Tensor, half: bool, vectors: Sequence[Tensor]) -> Section:
        """As the other kind, with vectors of g^hor taken along."""
        if other is Transported:
            return self
        implicit = Implicit.start(self.space, self.E, Y, half)
        self.space.implicit_turn(Y, implicit.R, self.Lambda, vectors)
        return implicit


class Implicit:
    """Lambda from Y and the anchor R. Y itself is held by the weights, or in `master` where they are half
    precision."""

    holds_point = False

    def __init__(self, space: Space, E: Tensor, R: Tensor, master: Tensor | None = None) -> None:
        self.space, self.E, self.R, self.master = space, E, R, master
        self.P: Tensor | None = None  # what the last update has left of `implicit_inverse`
        self.squares: Callable[[], Sequence[Tensor]] | None = None  # even state, where a space takes it along

    @classmethod
    def start(cls, space: Space, E: Tensor, Y: Tensor, half: bool) -> Implicit:
        """Anchored at Y."""
        return cls(space, E, space.implicit_start(Y), Y.clone() if half else None)

    def tensors(self) -> dict[str, Tensor]:
        """What goes into the state, by key."""
        return {"anchor": self.R} if self.master is None else {"anchor": self.R, "master": self.master}

    def point(self, Y: Tensor | None) -> Tensor:
        """Y, in the dtype of computation: what the weights are, or the copy in full precision."""
        point = Y if self.master is None else self.master
        assert point is not None
        return point

    def reading(self, Y: Tensor) -> Tensor:
        """What tells whether anybody has written to the weights."""
        return fingerprint(Y)

    def _inverse(self, Y: Tensor) -> Tensor:
        kept = None if torch.compiler.is_compiling() else self.P
        return self.space.implicit_inverse(Y, self.R) if kept is None else kept

    def global_grad(self, Y: Tensor | None, G: Tensor, out: Tensor) -> None:
        """B <- global_rep(Lambda, rgrad(Y, G))."""
        Y = self.point(Y)
        P = self._inverse(Y)
        self.space.implicit_grad(Y, self.R, P, G, out)
        self.P = None if torch.compiler.is_compiling() else P

    def update(
        self, Y: Tensor | None, W: Tensor, retraction: Retraction, vectors: Sequence[Tensor], moved: Tensor
    ) -> Tensor:
        """Y <- Lambda R(W) E in place, and the `vectors` to the frame at the new Y; returns Y."""
        Y = self.point(Y)
        if not self.space.compact:
            W = self.space.hold(self.space.frame(Y), W, retraction, self.E.dtype)
        squares = () if self.squares is None else self.squares()
        P = self.space.implicit_update(Y, self.R, self._inverse(Y), W, retraction, vectors, moved, squares)
        self.P = None if torch.compiler.is_compiling() else P
        return Y

    def update_far(
        self, Y: Tensor, rows: Tensor, W: Tensor, R: Retraction, vectors: Sequence[Tensor]
    ) -> None:
        """The same for some of the stack and steps of any length: in float64, and back to the space at
        once."""
        part = Implicit(self.space, self.E, wide(self.R[rows]))
        state = [*vectors, *(() if self.squares is None else self.squares())]
        y, turned = wide(Y[rows]), [wide(X[rows]) for X in state]
        part.squares = lambda: turned[len(vectors) :]
        part.update(y, W, R, turned[: len(vectors)], torch.ones((), dtype=y.dtype, device=y.device))
        Y[rows] = self.space.implicit_restore(y).to(Y.dtype)
        self.R[rows] = part.R.to(self.R.dtype)
        for X, x in zip(state, turned, strict=True):
            X[rows] = x.to(X.dtype)
        self.P = None

    def polish(self, Y: Tensor, age: int, share: Tensor, now: bool) -> None:
        """Y back to the space, O(N n^2)."""
        self.space.implicit_polish(Y, share)
        self.P = None

    def rebuild(self, rows: Tensor, Y: Tensor) -> None:
        """Anchored again at the points Y, for some of the stack."""
        self.R[rows] = self.space.implicit_start(Y)
        if self.master is not None:
            self.master[rows] = Y
        self.P = None

    def to(self, other: type[Section], Y: Tensor, half: bool, vectors: Sequence[Tensor]) -> Section:
        """As the other kind: the frame of this one, formed, is a transported one, and nothing turns."""
        return (
            self
            if other is Implicit
            else Transported(self.space, self.E, self.space.implicit_frame(Y, self.R))
        )


def fingerprint(X: Tensor) -> Tensor:
    """(M, ...) -> (M, K/64 + 64): sums of the bits along rows and columns of 64, which tell a change, also of
    order.

    Exact, so that it does not depend on the number of threads. Of small points it is the bits themselves.
    """
    bits = parts(X).flatten(1)
    bits = bits.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()])
    if bits.shape[1] <= 128:
        return bits.clone()
    k = bits.shape[1] // 64 * 64
    rows = bits[:, :k].unflatten(1, (-1, 64))
    return torch.cat([rows.sum(-1), rows.sum(-2), bits[:, k:].to(torch.int64)], -1)


Section = Transported | Implicit
KINDS: dict[str, type[Section]] = {"transported": Transported, "implicit": Implicit}


def from_state(
    kind: type[Section],
    space: Space,
    E: Tensor,
    held: dict[str, Tensor],
    Y: Tensor,
    half: bool,
    vectors: Sequence[Tensor],
) -> Section:
    """The section that a state holds, checked, in the form asked for; from the points Y where it holds
    none."""
    if "section" in held:
        section: Section = Transported(space, E, space.checked_section(held["section"], E))
        Y = section.point(Y)
    elif "anchor" in held:
        Y = held.get("master", Y)
        section = Implicit(space, E, space.checked_anchor(held["anchor"]), Y if half else None)
    else:
        return kind.start(space, E, Y, half)
    return section.to(kind, Y, half, vectors)
