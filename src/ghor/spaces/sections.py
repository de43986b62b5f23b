"""Sections: two ways to keep the frame Lambda above a point from step to step.

Transported: Lambda is stored (N^2 numbers on matrix spaces) and moves with the step, Lambda <- Lambda R(W).
The coordinates of a transported vector do not change, so the optimizer's state stays as it is.

Implicit: Lambda is a function of Y and of a small anchor and is never formed (formulas:
`spaces/orthogonal.py`); only n^2 numbers are stored beside the plain optimizer's state. The frame at the new
point differs from the transported one by a rotation of the complement, by which state tensors that are
vectors are turned, exactly. Squares of coordinates cannot be turned; they stay as they are, in a frame that
turns slowly while the anchor is fixed.

Both classes have the same methods, and work on stacks: points (M, *point) with one batch dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from ghor.linalg import as_real, wide
from ghor.retraction import Retraction
from ghor.spaces.base import Space

POLISH_POINT = 10  # steps between two polishings: mostly of Y alone, more rarely of all of Lambda
SectionName = Literal["auto", "transported", "implicit"]
SECTIONS: tuple[str, ...] = get_args(SectionName)
SECTION_KEYS = ("section", "frame_anchor", "master")  # in state[p]; "section" if transported, else the others
SHORT = 1 << 15  # numbers that are kept and compared faster than they are added up


class Transported:
    """A stored Lambda, moved by the space's own lines of Algorithm 3."""

    holds_point = True

    def __init__(self, space: Space, E: Tensor, Lambda: Tensor, master: Tensor | None = None) -> None:
        self.space, self.E, self.Lambda = space, E, Lambda
        # Rounded up to a multiple of POLISH_POINT, because `polish` is called every POLISH_POINT steps.
        self.period = -(-space.polish_period(E.shape) // POLISH_POINT) * POLISH_POINT

    @classmethod
    def start(cls, space: Space, E: Tensor, Y: Tensor, half: bool) -> Transported:
        """The space's section at Y."""
        Lambda = space.section(Y)
        return cls(space, E, Lambda.clone() if Lambda.data_ptr() == Y.data_ptr() else Lambda)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that go into the optimizer's state, by key."""
        return {"section": self.Lambda}

    def point(self, Y: Tensor | None) -> Tensor:
        """Y in the dtype of computation: a view of Lambda."""
        return self.space.apply_section(self.Lambda, self.E)

    def radius(self) -> Tensor:
        """The radii of spheres, (M)."""
        return self.space.radius_of(self.Lambda)

    def reading(self, Y: Tensor, then: Tensor | None) -> Tensor:
        """A value that changes if anybody writes to the weights: here the weights themselves."""
        return Y

    def global_grad(self, Y: Tensor | None, G: Tensor, out: Tensor) -> None:
        """B <- global_rep(Lambda, rgrad(Y, G))."""
        self.space.global_grad(self.Lambda, G, out=out)

    def away_from(self, Y: Tensor | None, Y0: Tensor, out: Tensor) -> None:
        """The vector of g^hor from Y0 to Y, see `Space.away_from`."""
        out.copy_(self.space.away_from(self.Lambda, self.point(Y), Y0))

    def update(
        self,
        Y: Tensor | None,
        W: Tensor,
        retraction: Retraction,
        vectors: Sequence[Tensor],
        moved: Tensor,
        span: tuple[float, float] | None = None,
    ) -> Tensor:
        """Lambda <- Lambda R(W), in place; returns Y = Lambda E, a view of it. W may be overwritten."""
        if not self.space.compact:
            W = self._bounded(self.Lambda, W, retraction)
        self.space.update_section(self.Lambda, W, retraction, out=self.Lambda)
        return self.space.apply_section(self.Lambda, self.E)

    def update_far(
        self, Y: Tensor, rows: Tensor, W: Tensor, R: Retraction, vectors: Sequence[Tensor]
    ) -> None:
        """`update` for some rows of the stack and steps of any length: in float64, then back to the group."""
        Lambda = self.Lambda[rows]
        if not self.space.compact:
            W = self._bounded(Lambda, W, R)
        L = self.space.restore(self.space.update_section(wide(Lambda), W, R), self.E).to(Lambda.dtype)
        self.Lambda[rows] = self.space.within_digits(Lambda, L)

    def _bounded(self, Lambda: Tensor, W: Tensor, R: Retraction) -> Tensor:
        """W, shortened where the point would outgrow the digits of its dtype."""
        W = self.space.bounded(Lambda, W)
        return self.space.hold(Lambda.to(W.dtype), W, R, self.E.dtype) if self.space.has("hold") else W

    def polish(self, Y: Tensor, age: int, share: Tensor, now: bool) -> None:
        """Repair rounding of all of Lambda or of Y alone; `share` (M) is 0 where nothing may change."""
        whole = now or age % self.period == 0
        self.space.polish(self.Lambda, self.E, share, point_only=not whole)

    def rebuild(self, rows: Tensor, Y: Tensor) -> None:
        """Go on from the points Y, for some members of the stack: with a frame that is near the old one."""
        self.Lambda[rows] = self.space.section_near(self.Lambda[rows], Y)

    def to(self, other: type[Section], Y: Tensor, half: bool, vectors: Sequence[Tensor]) -> Section:
        """Convert to the other kind of section, and turn vectors of g^hor to its frame, in place."""
        if other is Transported:
            return self
        implicit = Implicit.start(self.space, self.E, Y, half)
        self.space.implicit_turn(Y, implicit.R, self.Lambda, vectors)
        return implicit


class Implicit:
    """Lambda as a function of Y and the anchor R.

    Y is held by the weights, or by `master` if these are in half precision.
    """

    holds_point = False

    def __init__(self, space: Space, E: Tensor, R: Tensor, master: Tensor | None = None) -> None:
        self.space, self.E, self.R, self.master = space, E, R, master
        self.P: Tensor | None = None  # `implicit_inverse`, as the last update returned it
        self.scratch: Tensor | None = None  # memory that `update` may overwrite: the gradient of this step
        # Gets the second moments, if the space `spreads`.
        self.squares: Callable[[], Sequence[Tensor]] | None = None

    @classmethod
    def start(cls, space: Space, E: Tensor, Y: Tensor, half: bool) -> Implicit:
        """The section anchored at Y."""
        return cls(space, E, space.implicit_start(Y), Y.clone() if half else None)

    def hold(self, Y: Tensor) -> None:
        """Keep the points Y here, in a memory layout of their own; unlike those of half precision weights,
        they are the weights to the bit, and do not go into the optimizer's state."""
        self.master, self.holds_point = Y, True

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that go into the optimizer's state, by key."""
        held = {"frame_anchor": self.R}
        return held if self.master is None or self.holds_point else {**held, "master": self.master}

    def point(self, Y: Tensor | None) -> Tensor:
        """Y in the dtype of computation: the weights themselves, or their copy in full precision."""
        point = Y if self.master is None else self.master
        assert point is not None
        return point

    def radius(self) -> Tensor:
        """The radii of spheres, (M)."""
        return self.space.radius_of(self.R)

    def reading(self, Y: Tensor, then: Tensor | None) -> Tensor:
        """A value that changes if anybody writes to the weights: here a fingerprint, to save a copy of Y."""
        return fingerprint(Y, then)

    def _inverse(self, Y: Tensor) -> Tensor:
        # A compiled graph keeps no tensor between steps, so it computes P again.
        kept = None if torch.compiler.is_compiling() else self.P
        return self.space.implicit_inverse(Y, self.R) if kept is None else kept

    def global_grad(self, Y: Tensor | None, G: Tensor, out: Tensor) -> None:
        """B <- global_rep(Lambda, rgrad(Y, G))."""
        Y = self.point(Y)
        P = self._inverse(Y)
        self.space.implicit_grad(Y, self.R, P, G, out)
        self.P, self.scratch = (None, None) if torch.compiler.is_compiling() else (P, out)

    def away_from(self, Y: Tensor | None, Y0: Tensor, out: Tensor) -> None:
        """The vector of g^hor from Y0 to Y, see `Space.away_from`."""
        Y = self.point(Y)
        if self.space.compact:
            G = Y - self.space.representative(Y, Y0)
            self.space.implicit_grad(Y, self.R, self._inverse(Y), G, out)
        else:
            out.copy_(self.space.away_from(self.space.frame(Y), Y, Y0))

    def update(
        self,
        Y: Tensor | None,
        W: Tensor,
        retraction: Retraction,
        vectors: Sequence[Tensor],
        moved: Tensor,
        span: tuple[float, float] | None = None,
    ) -> Tensor:
        """Y <- Lambda R(W) E in place, and `vectors` to the frame at the new Y; returns Y.

        W may be overwritten. `moved` (M) is 0 where nothing may change; with `span`, their least and
        greatest value, these are the lengths of W.
        """
        Y = self.point(Y)
        if not self.space.compact:
            longest = None if span is None else span[1]
            held = self.space.hold(self.space.frame(Y), W, retraction, self.E.dtype, longest)
            W, span = held, span if held is W else None
        squares, scratch = () if self.squares is None else self.squares(), self.scratch
        P, self.scratch = self._inverse(Y), None
        P = self.space.implicit_update(Y, self.R, P, W, retraction, vectors, moved, squares, span, scratch)
        self.P = None if torch.compiler.is_compiling() else P
        return Y

    def update_far(
        self, Y: Tensor, rows: Tensor, W: Tensor, R: Retraction, vectors: Sequence[Tensor]
    ) -> None:
        """`update` for some rows of the stack and steps of any length: in float64, then back to the space."""
        part = Implicit(self.space, self.E, wide(self.R[rows]))
        state = [*vectors, *(() if self.squares is None else self.squares())]
        y, turned = wide(Y[rows]), [wide(X[rows]) for X in state]
        part.squares = lambda: turned[len(vectors) :]
        part.update(y, W, R, turned[: len(vectors)], torch.ones((), dtype=y.dtype, device=y.device))
        Y[rows] = self.space.implicit_restore(y, part.R).to(Y.dtype)
        self.R[rows] = part.R.to(self.R.dtype)
        for X, x in zip(state, turned, strict=True):
            X[rows] = x.to(X.dtype)
        self.P = None

    def polish(self, Y: Tensor, age: int, share: Tensor, now: bool) -> None:
        """Repair rounding of Y, O(N n^2)."""
        self.space.implicit_polish(Y, self.R, share)
        self.P = None

    def rebuild(self, rows: Tensor, Y: Tensor) -> None:
        """Go on from the points Y, for some members of the stack; anchored again where that is necessary."""
        self.R[rows] = self.space.implicit_near(self.R[rows], Y)
        if self.master is not None:
            self.master[rows] = Y
        self.P = None

    def to(self, other: type[Section], Y: Tensor, half: bool, vectors: Sequence[Tensor]) -> Section:
        """Convert to the other kind of section: the same Lambda, formed and stored, so no vector turns."""
        if other is Implicit:
            return self
        return Transported(self.space, self.E, self.space.implicit_frame(Y, self.R))


def fingerprint(X: Tensor, then: Tensor | None = None) -> Tensor:
    """(M, K) -> (M, K/64 + 64): the entries, summed along rows and columns of 64; if there are few, a view.

    It has the form of the one to compare it with, `then`: a part of a large stack goes on with sums.

    A change of one entry shows if it is more than rounding, and so does an exchange of two. What preserves
    the sum of every row and every column does not. Each sum is made by one thread, so the result does not
    depend on their number; it is compared as bits, where NaN equals NaN.
    """
    flat = as_real(X).flatten(1)
    k = flat.shape[1] // 64
    few = k <= 2 or flat.numel() <= SHORT if then is None else then.shape[1] == flat.shape[1]
    if few:
        sums = flat
    else:
        rows, rest = flat[:, : 64 * k].unflatten(1, (k, 64)), flat[:, 64 * k :]
        sums = flat.new_empty(flat.shape[0], k + 64 + rest.shape[1])
        torch.sum(rows, -1, out=sums[:, :k])
        torch.sum(rows, -2, out=sums[:, k : k + 64])
        if rest.shape[1]:
            sums[:, k + 64 :] = rest
    return sums.view({4: torch.int32, 8: torch.int64}[sums.element_size()])


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
    """The section that a state holds, checked and converted to `kind`; if it holds none, one started at Y."""
    if "section" in held:
        section: Section = Transported(space, E, space.checked_section(held["section"], E))
        Y = section.point(Y)
    elif "frame_anchor" in held:
        Y = held.get("master", Y)
        section = Implicit(space, E, space.checked_anchor(held["frame_anchor"]), Y if half else None)
    else:
        return kind.start(space, E, Y, half)
    return section.to(kind, Y, half, vectors)
