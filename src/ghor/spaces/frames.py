"""Frames: Lambda above a point, and the one formula of a step for each way to keep it.

    Group       Lambda in a small group; four formulas a space     SPD, poses, positions and orientations, R^d
    Stored      Lambda = [y, Q], thin; any adjoint X*              Stiefel, flags, SO, U, symplectic, spheres
    ClosedForm  a function of y and a unitary R, n >= 1            the orthogonal and unitary ones
    Reflections, Boosts    the same for n = 1 and real numbers     spheres; hyperbolic space      (vectors.py)
    Carried     Boosts with a stored rotation O                    stored, of hyperbolic space    (vectors.py)

All that a frame knows is made, to the bit, from the point and `tensors()`, which are what state[p] keeps: so
a batch may be dropped and derived again at any time. A step runs `pull` and `step`, every tenth one `repair`.
For solvers, who try many steps from one frame, it is a value: `push` is the inverse of `pull`, `along` a line
of steps (lines.py), `bend` has second derivatives, `renewed` a new reference.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from ghor.linalg import add_, defect, eager, extremes, eye, gram, inverse, perhaps, plus, polar, size, times
from ghor.spaces.lines import Line, Moved, Straight, Thin
from ghor.spaces.retraction import Move, Retraction, geodesic

if TYPE_CHECKING:
    from ghor.spaces.base import Space
    from ghor.spaces.group import GroupSpace
    from ghor.spaces.matrix import Matrices

Tensors = Sequence[Tensor]
SINGULAR = 100.0  # ||(R + y_1)^-1|| of points that others wrote; steps keep it below 30
NEAR, MENDS = 0.5, 6  # how far from orthonormal a frame above another point may be; squarings that mend it
CACHED = 1 << 20  # numbers that operation after operation finds in the cache
NARROW = 32  # so few columns that products are three to five times slower than wider ones
WORN, DIRECTIONS = 4.0, 4  # ||(R + y_1)^-1|| from which R is reflected; in so many directions


SLOW, LONG = 0.05, 0.5  # lengths of a step from which frames of vectors do more


class Ends(NamedTuple):
    """What is known of the lengths of a step where they may be read: flags, so few graphs are compiled."""

    moving: bool = False  # all are above 0
    slow: bool = False  # none is above SLOW, LONG, 1
    short: bool = False
    near: bool = False
    safe: bool = False  # it ends where frames are well conditioned and points have their digits


UNREAD = Ends()


class Frame:
    """Lambda above the points y (M, N, n); nothing of it is read but by those who `put` points."""

    exact: bool = True  # `point` is kept: a weight of radius 1 is the point, to the bit
    reads: ClassVar[bool] = False  # from such a weight the point is also read, in every step, by `take`
    held: Tensor | None = None  # which points (M) were held where their digits end, since a look
    multiple: Tensor | float | None = None  # the numbers a in w = a m, if a rule with one moment is so simple

    def __init__(self, geometry: Space, y: Tensor, held: dict[str, Tensor], eps: float) -> None:
        """Above y, from what a state has `held` of `tensors()`; eps is that of the weights' dtype."""
        self.geometry, self.n, self.longest, self.eps = geometry, y.shape[-1], geometry.longest(y), eps
        self.sources: list[Tensor] | None = None  # the point, as weights see it

    def tensors(self) -> dict[str, Tensor]:
        """What the state of an optimizer keeps."""
        return {}

    def parts(self) -> list[Tensor]:
        """All that changes, points first: views."""
        raise NotImplementedError

    def point(self) -> Tensor:
        raise NotImplementedError

    def zeros(self) -> Tensor:
        """Memory for elements of g^hor, in the order of the frame's own."""
        return torch.zeros_like(self.point(), memory_format=torch.contiguous_format)

    def blocks(self, w: Tensor) -> list[Tensor]:
        """The matrices (M, a, n) that make up elements of g^hor: views."""
        return self.geometry.hor_blocks(w)

    def hor_(self, w: Tensor) -> None:
        """w <- its component in g^hor."""
        self.geometry.hor_(w)

    def inner(self, w: Tensor, v: Tensor) -> Tensor:
        """<w, v> in g^hor, (M)."""
        return self.geometry.hor_inner(w, v)

    def scale_(self, w: Tensor, factor: Tensor | float) -> None:
        """w <- factor w, one number or (M, 1, 1); 0 where such a factor is, whatever w is there."""
        if torch.is_tensor(factor):
            w.masked_fill_(factor == 0, 0)
        w.mul_(factor)

    def length(self, w: Tensor) -> Tensor:
        """What `longest` limits, (M, 1, 1); 0 only for w = 0, not finite where w is not."""
        return torch.linalg.vector_norm(w, dim=(-2, -1), keepdim=True)

    def ends(self, least: float, most: float) -> Ends:
        """What a step of lengths between these asks."""
        return Ends(least > 0, most <= SLOW, most <= LONG, most <= 1)

    def angle(self, w: Tensor) -> Tensor:
        """The largest angle by which a step w turns a vector, at most, (M, 1, 1)."""
        return self.geometry.angle(w)[:, None, None]

    def pull(self, g: Tensor, out: Tensor) -> None:
        """out <- global_rep(Lambda, rgrad(y, g))."""
        raise NotImplementedError

    def step(
        self, w: Tensor, length: Tensor, R: Retraction, odd: Tensors, even: Tensors, ends: Ends = UNREAD
    ) -> None:
        """Lambda <- Lambda R(w), state into coordinates of the new frame; w is finite and overwritten.

        `length` (M, 1, 1) is that of w, of which `ends` is known. No bit changes where w is 0.
        """
        raise NotImplementedError

    def repair(self, whole: bool, moved: Tensor) -> None:
        """Rounding, of Lambda or of its point; no bit changes where a point has not moved, (M, 1, 1)."""

    # -- for solvers, who leave the frame alone

    def push(self, w: Tensor) -> Tensor:
        """Delta = Lambda w E, the tangent vector with these coordinates."""
        raise NotImplementedError

    def along(self, w: Tensor, R: Retraction) -> Line:
        """The line t -> Lambda R(t w) E; where only a step has a formula for R, that of the geodesic."""
        return Moved(self, w)

    def bend(self, g: Tensor, B: Tensor) -> Callable[[Tensor], Tensor]:
        """v -> the gradient in g^hor of <g, Y''(0)[v, .]> for Y(u) = Lambda R(u) E, the same for every R.

        B is that of <g, Y'(0)[.]>.
        """
        raise NotImplementedError

    def renewed(self) -> Self | None:
        """A frame above the same point with another reference, if that is worn."""
        return None

    def translated(self, w: Tensor, old: Frame) -> Tensor:
        """The coordinates here of the vector that has coordinates w in another frame above the same point."""
        out = self.zeros()
        self.pull(old.push(w), out)
        out[..., : self.n, :] = w[..., : self.n, :]  # A is the same in both
        return out

    def __copy__(self) -> Self:
        """As `copy.copy` does it, in a third of the time."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def copy(self) -> Self:
        """The same frame in memory of its own."""
        return type(self)(self.geometry, self.point(), self.tensors(), self.eps)

    # -- what others write

    def off(self) -> Tensor:
        """How far a frame from a file is off its group, relative to its size, (M); `repair`s mend 0.005."""
        return torch.zeros(len(self.point()), device=self.point().device)

    def put(self, mask: Tensor, y: Tensor) -> None:
        """Make the frames at these points (M) anew, above y; references stay where they are not singular."""
        held = {k: v[mask] for k, v in self.tensors().items() if k == "frame_anchor"}
        new = type(self)(self.geometry, y, held, self.eps)
        for mine, part in zip(self.parts(), new.parts(), strict=True):
            mine[mask] = part

    def take(self, y: Tensor) -> None:
        """Go on from the points y, which others may have written, if the frame `reads`."""

    def write(self, targets: list[Tensor]) -> None:
        """The points of a frame that `reads` into weights, seen as points: one copy out."""
        if self.sources is None:
            self.sources = rows(self.point(), len(targets))
        torch._foreach_copy_(targets, self.sources)


def rows(X: Tensor, count: int) -> list[Tensor]:
    """The points of each of so many weights: views."""
    return list(X.unflatten(0, (count, -1)).unbind(0))


AnyFrame = TypeVar("AnyFrame", bound=Frame)


def cut(frame: AnyFrame, names: Sequence[str], dim: int, beside: int = 1) -> list[tuple[AnyFrame, Any]]:
    """Frames above parts of many points, and where these are along `dim` of tensors.

    So operation after operation of a step on a CPU, with `beside` tensors at hand, finds them in the cache.
    """
    X: Tensor = getattr(frame, names[0])
    if not eager(X) or X.numel() <= CACHED:
        return [(frame, ...)]
    found: list[tuple[AnyFrame, Any]] = []
    size = max(1, CACHED * X.shape[dim] // (beside * X.numel()))
    for i in range(0, X.shape[dim], size):
        part, some = copy.copy(frame), slice(i, i + size)
        where = (..., some, *[slice(None)] * (-1 - dim))
        for name in names:
            setattr(part, name, getattr(frame, name)[where])
        part.held = None if frame.held is None else frame.held[some]
        found.append((part, where))
    return found


class Group(Frame):
    """Lambda in a small group: SPD, poses, R^d. The four lines of Algorithm 3 are the geometry's."""

    geometry: GroupSpace

    def __init__(self, geometry: GroupSpace, y: Tensor, held: dict[str, Tensor], eps: float) -> None:
        super().__init__(geometry, y, held, eps)
        self.L = (held["section"] if held else geometry.section(y)).clone()
        self.exact = geometry.point(self.L) is self.L
        self.held = torch.zeros_like(y[:, 0, 0], dtype=torch.bool) if geometry.has("digits_end") else None

    def tensors(self) -> dict[str, Tensor]:
        return {"section": self.L}

    def parts(self) -> list[Tensor]:
        return [self.L]

    def point(self) -> Tensor:
        return self.geometry.point(self.L)

    def length(self, w: Tensor) -> Tensor:
        return self.geometry.length(w)

    def pull(self, g: Tensor, out: Tensor) -> None:
        out.copy_(self.geometry.coordinates(self.L, g))

    def step(
        self, w: Tensor, length: Tensor, R: Retraction, odd: Tensors, even: Tensors, ends: Ends = UNREAD
    ) -> None:
        new = self.geometry.moved(self.L, w, R, self.longest, self.eps)
        lost = self.geometry.unrepresentable(new, self.eps)
        if lost is not None and perhaps(lost.any()):
            assert self.held is not None
            self.held.logical_or_(lost & (length[:, 0, 0] > 0))
            new = torch.where(lost[:, None, None], self.L, new)
        self.L.copy_(new)

    def repair(self, whole: bool, moved: Tensor) -> None:
        self.geometry.polish_(self.L, moved)

    def put(self, mask: Tensor, y: Tensor) -> None:
        """The frame goes along with the point, so moments go on to mean what they did."""
        L, fresh = self.geometry.transported(self.L[mask], y), self.geometry.section(y)
        off = (self.geometry.point(L) - y).abs().amax((-2, -1), keepdim=True)
        near = off <= 4 * self.eps * y.shape[-2] * y.abs().amax((-2, -1), keepdim=True)
        self.L[mask] = torch.where(near, L, fresh)

    def off(self) -> Tensor:
        y = self.point()
        return self.geometry.residual(y) / self.geometry.tolerance(y, eps=self.eps) * (5 * self.eps)

    def push(self, w: Tensor) -> Tensor:
        return self.geometry.velocity(self.L, w)

    def along(self, w: Tensor, R: Retraction) -> Line:
        return Straight(self, w) if self.geometry.flat else Moved(self, w)

    def bend(self, g: Tensor, B: Tensor) -> Callable[[Tensor], Tensor]:
        """By autograd through the step."""
        geometry = self.geometry
        if geometry.flat:
            return torch.zeros_like
        with torch.enable_grad():
            u = torch.zeros_like(B, requires_grad=True)
            y = geometry.point(geometry.moved(self.L, u, geodesic, self.longest, self.eps))
            (first,) = torch.autograd.grad(y, u, g, create_graph=True)

        def bent(v: Tensor) -> Tensor:
            (out,) = torch.autograd.grad(first, u, v, retain_graph=True)
            geometry.hor_(out, 1)
            return out

        return bent

    def reached(self, y: Tensor) -> Self:
        """The frame above a point that is its own frame."""
        new = copy.copy(self)
        new.L = y
        return new


class Framed(Frame):
    """Lambda = [y, Q] in a group of matrices with an adjoint X*: what solvers ask of such frames."""

    geometry: Matrices

    def defect(self, y: Tensor) -> Tensor:
        """I - y* y."""
        return defect(y, None if self.geometry.compact else self.geometry.star)

    def along(self, w: Tensor, R: Retraction) -> Line:
        return Thin(self, w, R)

    def reached(self, y: Tensor, low: Tensor, t: float, move: Move, whole: bool) -> Self:
        """The frame above y, at the end of the step t w; low is [0; B] of w, and may be overwritten."""
        raise NotImplementedError

    def bend(self, g: Tensor, B: Tensor) -> Callable[[Tensor], Tensor]:
        """With y^H g = C, Q^H g = D, S = (C + C*)/2, and A, B the blocks of v:

        the projection of [C A^H + A^H C + B^H D; D A^H - 2 (B*)^H S]/2
        """
        n, geometry = self.n, self.geometry
        C, D = gram(self.point(), g), B[..., n:, :]
        S = (C + geometry.star(C)) / 2

        def bent(v: Tensor) -> Tensor:
            A, B, out = v[..., :n, :], v[..., n:, :], torch.empty_like(v)
            out[..., :n, :] = (C @ A.mH + A.mH @ C + B.mH @ D) / 2
            out[..., n:, :] = D @ A.mH / 2 - geometry.star(B).mH @ S
            geometry.hor_(out, 1)
            return out

        return bent


class Stored(Framed):
    """Lambda = [y, Q] by columns, L = Lambda^T, for matrices with an adjoint X*; coordinates never turn."""

    geometry: Matrices

    def __init__(self, geometry: Matrices, y: Tensor, held: dict[str, Tensor], eps: float) -> None:
        super().__init__(geometry, y, held, eps)
        S = held["section"] if held else torch.cat([y, geometry.complement(y)], -1)
        self.L = S.mT.clone(memory_format=torch.contiguous_format)
        self.held = torch.zeros_like(y[:, 0, 0], dtype=torch.bool) if geometry.has("digits_end") else None

    def tensors(self) -> dict[str, Tensor]:
        return {"section": self.L.mT}

    def parts(self) -> list[Tensor]:
        return [self.L]

    def point(self) -> Tensor:
        return self.L[..., : self.n, :].mT

    def zeros(self) -> Tensor:
        return torch.zeros_like(self.L[..., : self.n, :]).mT

    def pull(self, g: Tensor, out: Tensor) -> None:
        """[skew(y^H g); Q^H g]: the derivative along W, downhill for every rule that keeps signs."""
        out.mT.baddbmm_(g.mT, self.L.mH, beta=0)
        self.geometry.hor_(out, 1)
        if not self.geometry.compact:
            self._round_(g, out)

    def _round_(self, g: Tensor, out: Tensor) -> None:
        """0 where coordinates are rounding: of a product N eps ||q_i|| ||g_j||, of points 4 times that.

        Adam would make steps of it, and frames that grow make gradients of such steps.
        """
        norm = torch.linalg.vector_norm
        rows, columns = norm(self.L, dim=-1, keepdim=True), norm(g, dim=-2, keepdim=True)
        columns *= 4 * g.shape[-2] * torch.finfo(g.dtype).eps
        bound, top = rows * columns, rows[..., : self.n, :].amax(-2, keepdim=True)
        bound[..., : self.n, :] = top * columns.amax(-1, keepdim=True)  # A is a difference of two
        out.masked_fill_(out.abs() < bound, 0)  # not where both are infinite: that is reported

    def step(
        self, w: Tensor, length: Tensor, R: Retraction, odd: Tensors, even: Tensors, ends: Ends = UNREAD
    ) -> None:
        """y <- y + D, Q <- Q - (y + J) B*."""
        n, star = self.n, self.geometry.star
        if self.held is not None:
            share = self.geometry.shortening(self.L, w, length)
            if share is not None:
                self.held.logical_or_(share[:, 0, 0] < 1)
                w.mul_(share)
        N = w.shape[-2]
        if (N < 2 * n and N <= R.dense_up_to) or N == n:  # equivalent(operand): the thin form is no smaller
            W = self.geometry.algebra(w)
            self.L.add_((W @ R.ratio(W, 2 * self.longest)).mT @ self.L)
            return
        top, B, y = w[..., :n, :], w[..., n:, :], self.L[..., :n, :].mT

        def V(M: Tensor | None) -> Tensor:
            # All of Lambda times [M; B]: of slices, torch takes the matrices one by one. M is there already.
            if M is None:
                top.zero_()
            return self.push(w)

        Bs = star(B)
        move = R.act(y, V, top, Bs @ B, self.longest)  # which asks for V when it is done with A
        top.zero_()
        self.L.baddbmm_(*self._sides(w, Bs, move), alpha=-1)
        self.L[..., :n, :].add_(move.D.mT)

    def _sides(self, low: Tensor, Bs: Tensor, move: Move) -> tuple[Tensor, Tensor]:
        """[0; B*^T] and (y + J)^T: Q <- Q - (y + J) B* is one product. low is [0; B], and overwritten."""
        n, y = self.n, self.L[..., : self.n, :].mT
        if low.is_complex() or not self.geometry.compact:
            low[..., n:, :] = Bs.mT
        return low, (torch.add(y, move.D, alpha=0.5) if move.J is None else y + move.J).mT

    def push(self, w: Tensor) -> Tensor:
        return (w.mT @ self.L).mT

    def reached(self, y: Tensor, low: Tensor, t: float, move: Move, whole: bool) -> Self:
        new = copy.copy(self)
        if self.L.shape[-1] == self.n:
            new.L = y.mT.contiguous()
            return new
        Bs = self.geometry.star(low[..., self.n :, :])
        new.L = torch.baddbmm(self.L, *self._sides(low, Bs, move), alpha=-t)
        new.L[..., : self.n, :] = y.mT
        if whole:
            new.repair(True, low.real.new_ones(()))
            new.L[..., : self.n, :] = y.mT
        return new

    def off(self) -> Tensor:
        X = self.L.mT
        return (size(self._star(X) @ X - eye(X)) / size(X).square())[:, 0, 0] * X.shape[-1] ** 0.5

    def _star(self, X: Tensor) -> Tensor:
        """X* of square matrices [y, Q]."""
        return torch.cat([self.geometry.star(X[..., : self.n]), self.geometry.star(X[..., self.n :])], -2)

    def put(self, mask: Tensor, y: Tensor) -> None:
        """Q <- Q - y y* Q, made orthonormal, where y is not far: so moments go on to mean what they did."""
        fresh = torch.cat([y, self.geometry.complement(y)], -1)
        Q = self.L[mask].mT[..., self.n :]
        X = torch.cat([y, Q - y @ (self.geometry.star(y) @ Q)], -1)
        near = size(self._star(X) @ X - eye(X)) < NEAR
        for _ in range(MENDS):
            X = X + X @ (eye(X) - self._star(X) @ X) / 2
        self.L[mask] = torch.where(near, X, fresh).mT

    def repair(self, whole: bool, moved: Tensor) -> None:
        """X <- X (3 I - X* X)/2 where points have moved."""
        n, star = self.n, self.geometry.star
        X = (self.L if whole else self.L[..., :n, :]).mT
        if whole:
            S = defect(X, lambda X: torch.cat([star(X[..., :n]), star(X[..., n:])], -2))
        else:
            S = self.defect(X)
        X.add_(X @ (S * moved), alpha=0.5)


class ClosedForm(Framed):
    """Lambda as a function of y and a unitary R (n x n), never formed; P = (R + y_1)^-1:

        Q x = [0; x] - (y R^H + E) P^H y_2^H x

    First moments turn with the frame, by terms as small as the step. Where ||P|| > WORN, R is reflected in
    the direction in which R + y_1 is nearly singular: one product with a vector, under a mask, so nothing is
    read.
    """

    geometry: Matrices

    def __init__(self, geometry: Matrices, y: Tensor, held: dict[str, Tensor], eps: float) -> None:
        super().__init__(geometry, y, held, eps)
        self.y = y.clone(memory_format=torch.contiguous_format)
        y1 = self.y[..., : self.n, :]
        self.R = held["frame_anchor"].clone() if held else polar(y1)
        self.P = inverse(self.R + y1)
        far = ~(size(self.P) < SINGULAR * self.n**0.5) if held else None
        if far is not None and bool(far.any()):  # others have written the weight
            self.R = torch.where(far, polar(y1), self.R)
            self.P = inverse(self.R + y1)

    def tensors(self) -> dict[str, Tensor]:
        return {"frame_anchor": self.R}

    def parts(self) -> list[Tensor]:
        return [self.y, self.R, self.P]

    def point(self) -> Tensor:
        return self.y

    def pieces(self) -> list[tuple[Self, Any]]:
        return cut(self, ("y", "R", "P"), -3)

    def pull(self, g: Tensor, out: Tensor) -> None:
        for part, i in self.pieces():
            part._pull(g[i], out[i])

    def _pull(self, g: Tensor, out: Tensor) -> None:
        n, S = self.n, gram(self.y, g)
        lower = out[..., n:, :].copy_(g[..., n:, :])
        add_(lower, self.y[..., n:, :], times(self.P, plus(g[..., :n, :], self.R, S)), -1)
        self.geometry.skew_(out[..., :n, :], S)

    def ends(self, least: float, most: float) -> Ends:
        """It is safe where ||P|| < WORN after it: at most s/(1 - 1.2 s |W|), as ||Delta|| <= 1.2 |W|.

        s >= ||P|| comes from ||P||_F, as singular values of P are at least 1/2, or else by inverse iteration.
        """
        known, P = super().ends(least, most), self.P
        if not eager(P) or not len(P):
            return known
        grows = 1 + 1.2 * WORN * most
        s = math.sqrt(max(extremes(size(P))[1] ** 2 - (self.n - 1) / 4, 0.25))
        safe = s * grows <= WORN or extremes(self._direction(P, [])[1])[1] * grows <= WORN
        return known._replace(safe=safe)

    def step(
        self, w: Tensor, length: Tensor, R: Retraction, odd: Tensors, even: Tensors, ends: Ends = UNREAD
    ) -> None:
        for part, i in self.pieces():
            part._step(w[i], length[i], R, [m[i][..., self.n :, :] for m in odd], ends)

    def _step(self, w: Tensor, length: Tensor, R: Retraction, moments: Tensors, ends: Ends) -> None:
        """With T = R^H P^H and Z = y_2^H B: Q B = [-P^H Z; B] - y T Z, and y+ = y + D.

        A moment m becomes Q m - (y + J) B* m, in the new frame.
        """
        n, y, P, Ref = self.n, self.y, self.P, self.R
        A, B, y2, T = w[..., :n, :], w[..., n:, :], y[..., n:, :], times(P, Ref).mH
        parts = [torch.cat([B, *moments], -1)] if n < NARROW else [B, *moments]
        (Z, *Zs), (C, *cs) = ([G for x in parts for G in gram(X, x).split(n, -1)] for X in (y2, B))

        def V(M: Tensor | None) -> Tensor:  # is asked for when act is done with A
            K = -times(T, Z) if M is None else plus(M, T, Z, -1)
            add_(A, P.mH, Z, -1, 0)
            return plus(w, y, K)

        D, J, _ = R.act(y, V, A, C, self.longest)
        y.add_(D)
        if y.shape[-2] < 2 * n and not ends.near:  # such steps multiply what a point is off by a lot
            add_(y, y, defect(y) * ((length > 0) / 2))
        New, P = self._reference(Ref, y[..., :n, :], length, ends.safe)
        for m, c, Z in zip(moments, cs, Zs, strict=True):
            K = plus(c, T, Z, 1, 0.5 if J is None else 1)
            X = plus(times(New, c), D[..., :n, :], K)
            add_(m, D[..., n:, :], K)
            if J is not None:
                add_(X, J[..., :n, :], c, -1)
                add_(m, J[..., n:, :], c, -1)
            if New is not Ref:
                add_(X, New - Ref, times(T, Z))
            add_(m, y2, times(P, X), -1)
        if New is not Ref:
            self.R.copy_(New)
        self.P.copy_(P)

    def _reference(self, R: Tensor, y1: Tensor, length: Tensor, safe: bool) -> tuple[Tensor, Tensor]:
        """R and P at a new y_1. R + y_1 is singular where y_1 v = -R v, and R (1 - 2 v v^H) + y_1 is not.

        Directions v come from P by inverse iteration; once the first has WORN, all with ||P v|| > 1 go
        together, and R -> -R where most of them have. That is a hundred small operations, so on a CPU values
        are read to see whether they are needed, see `ends`. A polar factor in their place could not be
        captured in a graph, where it would be needed in every step.
        """
        P = inverse(R + y1)
        grown = self._direction(P, [])[1] if not safe else None
        if grown is None or extremes(grown)[1] <= WORN:
            return R, P
        worn = (grown > WORN) & (length > 0)
        R = torch.where(((R.conj() * y1).sum((-2, -1), True).real < -0.75 * self.n) & worn, -R, R)
        P = inverse(R + y1)
        V: list[Tensor] = []  # compilers do not know list[Tensor]()
        for _ in range(min(self.n, DIRECTIONS)):
            v, grown = self._direction(P, V)
            R = torch.where(worn & (grown > 1), R - 2 * (R @ v) @ v.mH, R)
            V.append(v)
        return R, inverse(R + y1)

    @staticmethod
    def _direction(P: Tensor, V: list[Tensor]) -> tuple[Tensor, Tensor]:
        """A unit v orthogonal to V with P v nearly as large as it can be, and ||P^H v||."""
        v = P[..., :1] if not V else P @ V[-1].conj()
        for k in range(3 if V else 2):
            v = P @ (P.mH @ v) if k < 2 else v  # the last time against rounding alone
            for u in V:
                v = v - u * (u.mH @ v)
            v = v / size(v) if k else v
        return v, size(P.mH @ v)

    def push(self, w: Tensor) -> Tensor:
        n, y = self.n, self.y
        U = -times(self.P.mH, gram(y[..., n:, :], w[..., n:, :]))
        return plus(torch.cat([U, w[..., n:, :]], -2), y, w[..., :n, :] + times(self.R.mH, U))

    def reached(self, y: Tensor, low: Tensor, t: float, move: Move, whole: bool) -> Self:
        """The reference is kept: its frames are a smooth field, in which coordinates stay; see `renewed`."""
        new = copy.copy(self)
        new.y, new.P = y, inverse(self.R + y[..., : self.n, :])
        return new

    def renewed(self) -> Self | None:
        worn = ~(size(self.P) < WORN * self.n**0.5)
        if not bool(worn.any()):
            return None
        new, y1 = copy.copy(self), self.y[..., : self.n, :]
        new.R = torch.where(worn, polar(y1), self.R)
        new.P = inverse(new.R + y1)
        return new

    def off(self) -> Tensor:
        return size(gram(self.R, self.R) - eye(self.R))[:, 0, 0] / self.n**0.5

    def repair(self, whole: bool, moved: Tensor) -> None:
        y, n = self.y, self.n
        for X in (y, self.R):
            X.add_(times(X, defect(X) / 2) * moved)
        self.P.copy_(inverse(self.R + y[..., :n, :]))
