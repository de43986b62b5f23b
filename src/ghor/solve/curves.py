"""Curves t -> Lambda R(t W) from points along a direction, and the slope of a loss along them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm as norm

from ghor.linalg import dot, inverse, product
from ghor.retraction import Retraction, by_name
from ghor.solve.points import PointBatch, Points, copied
from ghor.spaces.matrix import MatrixSpace
from ghor.spaces.orthogonal import Orthogonal
from ghor.spaces.sections import POLISH_POINT, Implicit, Transported

GEODESIC = by_name("geodesic")


class Curve:
    """The curve of one batch of points, on any space and above any section."""

    def __init__(self, batch: PointBatch, W: Tensor, turn: float, retraction: Retraction) -> None:
        self.batch, self.W, self.turn = batch, W, turn
        # Along a geodesic the velocity is W; along Cayley `slope` has a formula on matrix spaces only.
        self.retraction = retraction if batch.matrices else GEODESIC

    def at(self, t: float, vectors: Sequence[Tensor], age: int) -> PointBatch:
        """The batch at t; flat vectors turn to the new frames, in place."""
        batch, W = self.batch, self.W * t
        new, old = copied(batch), batch.section
        new.section = section = type(old)(batch.space, batch.E, *(X.clone() for X in old.tensors().values()))
        Y, turning, moved = batch.Y, list[Tensor](), W
        if isinstance(section, Implicit) and isinstance(old, Implicit):
            Y, turning, moved = Y.clone(), [batch.scaled(v) for v in vectors], moves(W, batch)
            section.P = old.P
        new.Y = section.update(Y, W, self.retraction, turning, moved)
        batch.take_back(vectors, turning)
        polish(new, self.W, t * self.turn, age)
        return new

    def slope(self, at: PointBatch, g: Tensor, d: Tensor, t: float) -> Tensor:
        """<B, V>, B the gradient at Lambda_t = Lambda R(t W), V = Lambda_t^-1 d/dt Lambda_t.

        g and d are flat, in the frames at t. Along a geodesic V = W. Along Cayley V = W (I - W^2/4)^-1 at
        t = 1. Let P = (I - A/2 + B* B/4)^-1 be the upper left block of (I - W/2)^-1, and p = (P + P*)/2 and
        q = (P - P*)/2. Then V = [A p - B* B q/2; B p].
        """
        space = self.batch.space
        if self.retraction.name != "cayley" or not isinstance(space, MatrixSpace):
            return at.own(g).dot(at.own(d))
        # With t W in place of W nothing depends on the scale of d, which at first is that of f.
        W = space.matrix(at.coordinates(d) * t)
        n = W.shape[-1]
        A, B = W[..., :n, :], W[..., n:, :]
        C = space.pair(B, B)
        S = torch.add(A / -2, C, alpha=0.25)
        S.diagonal(dim1=-2, dim2=-1).add_(1)
        P = inverse(S)
        return velocity_slope(at, g, d, P, space.star(P), C / t)


class CayleyCurve:
    """The curve by Cayley on a space of SO(N) or U(N), above a transported section, in the fewest operations.

    What does not depend on t is computed once: U = Lambda W E, C = B^H B and Y C. Then

        P = (I - t A/2 + t^2 C/4)^-1,   D = t (U - t Y C/2) P,   Y_t = Y + D,   Q_t = Q - t (Y + D/2) B^H
    """

    def __init__(self, batch: PointBatch, W: Tensor, turn: float) -> None:
        self.batch, self.W, self.turn = batch, W, turn
        assert isinstance(batch.space, Orthogonal)
        assert isinstance(batch.section, Transported)
        W, self.Lambda = batch.space.matrix(W), batch.section.Lambda
        self.n = n = W.shape[-1]
        self.A, B, self.Y = W[..., :n, :], W[..., n:, :], self.Lambda[..., :n]
        self.B, self.C = B.mH, product(B.mH, B)
        self.U, self.YC = self.Lambda @ W, self.Y * self.C if batch.vector else self.Y @ self.C

    def at(self, t: float, vectors: Sequence[Tensor], age: int) -> PointBatch:
        """The batch at t; transported frames leave vectors alone."""
        new, n = copied(self.batch), self.n
        D = torch.add(self.U, self.YC, alpha=-t / 2)
        if new.vector:  # A = 0, and P is a number
            P = torch.add(1, self.C, alpha=t * t / 4).reciprocal_()
            D = D.mul_(P * t)
        else:
            S = torch.add(self.A * (-t / 2), self.C, alpha=t * t / 4)
            S.diagonal(dim1=-2, dim2=-1).add_(1)
            P = inverse(S)
            D = (D @ P).mul_(t)
        Lambda = self.Lambda.clone()
        if self.B.shape[-1]:
            Lambda[..., n:].sub_(torch.add(self.Y, D, alpha=0.5) @ self.B, alpha=t)
        Lambda[..., :n].add_(D)
        new.section = section = copied(new.section)
        assert isinstance(section, Transported)
        section.Lambda, new.P = Lambda, P
        new.Y = section.point(None)
        polish(new, self.W, t * self.turn, age)
        return new

    def slope(self, at: PointBatch, g: Tensor, d: Tensor, t: float) -> Tensor:
        """See `Curve.slope`; d is the direction from the start, in any frame."""
        return velocity_slope(at, g, d, at.P, at.P.mH, self.C * t)


def moves(W: Tensor, batch: PointBatch) -> Tensor:
    """Which points move at all; the others may not change by a bit."""
    return norm(W, dim=tuple(range(-batch.E.dim(), 0))) > 0


def polish(new: PointBatch, W: Tensor, turn: float, age: int) -> None:
    """Repair rounding every few steps along W, and at once after one that turned a point by much."""
    if new.curved and (turn > 0.02 * new.reach or age % POLISH_POINT == 0):
        new.section.polish(new.Y, age, moves(W, new).to(W.dtype.to_real()), turn > 0.5 * new.reach)


def velocity_slope(at: PointBatch, g: Tensor, d: Tensor, P: Tensor, Ps: Tensor, C: Tensor) -> Tensor:
    """<B, V> with V = [A p - C q/2; B p], p = (P + P*)/2, q = (P - P*)/2, for [A; B] of the flat vector d."""
    space = at.space
    assert isinstance(space, MatrixSpace)
    if at.vector:
        if at.count == 1:
            return at.own(g).dot(at.own(d)) * P.view(())
        G, W = (at.scaled(u).flatten(1) for u in (g, d))
        return (G * W).sum(-1).dot(P.view(-1))
    G, W = (space.matrix(at.scaled(u)) for u in (g, d))
    p = (P + Ps).mul_(0.5)
    V = W @ p
    if W.shape[-2] > W.shape[-1]:
        # Coordinates are scaled: A and the gradient there by sqrt(1/2).
        V[..., : W.shape[-1], :].sub_(C @ (P - p), alpha=math.sqrt(0.5) / 2)
    return dot(V, G).sum()


class Ray:
    """The curves of all batches of some points along a flat vector d."""

    def __init__(self, points: Points, d: Tensor) -> None:
        self.points, self.curves = points, list[Curve | CayleyCurve]()
        cayley = points.retraction.name == "cayley"
        for batch in points.batches:
            # Sums of flat vectors leave g^hor by rounding, which would take frames off their group.
            W = batch.coordinates(d)
            W = batch.space.hor(W) if batch.curved and not batch.vector else W
            # The longest turn of a point at t = 1.
            turns = batch.space.step_length(W) if batch.curved else None
            turn = 0.0 if turns is None else float(turns.max() if turns.dim() else turns)
            lean = cayley and batch.matrices and isinstance(batch.space, Orthogonal)
            if lean and isinstance(batch.section, Transported):
                self.curves.append(CayleyCurve(batch, W, turn))
            else:
                self.curves.append(Curve(batch, W, turn, points.retraction))

    def ceiling(self) -> float:
        """The largest t for which no point turns by more than its `limit`."""
        turns = [(curve.turn, curve.batch.limit) for curve in self.curves]
        return min((limit / turn for turn, limit in turns if turn > 0), default=math.inf)

    def at(self, t: float, vectors: Sequence[Tensor] = ()) -> Points:
        """The points at t; flat vectors turn to the new frames, in place."""
        new = copied(self.points)
        new.age += 1
        new.batches = [curve.at(t, vectors, new.age) for curve in self.curves]
        return new

    def slope(self, at: Points, g: Tensor, d: Tensor, t: float) -> float:
        """The derivative of the loss at t, from the gradient g and the direction in the frames there."""
        slopes = [c.slope(b, g, d, t) for c, b in zip(self.curves, at.batches, strict=True)]
        return float(slopes[0] if len(slopes) == 1 else sum(slopes))

    def renew(self, at: Points, t: float, memory: Callable[[], Sequence[Tensor]]) -> None:
        """Take flat vectors that are older than the step to `at`, the points at t, along with it, in place.

        While its anchor is kept, the implicit frame is a smooth function of the point. Keeping coordinates in
        it is then a transport itself, and an isometry, so vectors stay as they are, at no cost. They turn
        when an anchor is renewed.
        """
        if not at.turning:
            return
        both = [(a.section, b.section) for a, b in zip(self.points.batches, at.batches, strict=True)]
        if any(
            isinstance(a, Implicit) and isinstance(b, Implicit) and not torch.equal(a.R, b.R) for a, b in both
        ):
            self.at(t, memory())
