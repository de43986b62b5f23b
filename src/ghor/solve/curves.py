"""Curves t -> Lambda R(t W) from points along a direction, and the slope of a loss along them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.linalg import vector_norm as norm

from ghor.linalg import dot, inverse, product
from ghor.retraction import Retraction, by_name
from ghor.solve.points import PointBatch, Points, copied
from ghor.spaces.matrix import MatrixSpace
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
        batch, new, old = self.batch, copied(self.batch), self.batch.section
        if not batch.curved and isinstance(old, Transported):
            new.section = copied(old)
            new.Y = new.section.Lambda = torch.add(batch.Y, self.W, alpha=t)
            return new
        W = self.W * t
        new.section = section = type(old)(batch.space, batch.E, *(X.clone() for X in old.tensors().values()))
        Y, turning, moved = batch.Y, list[Tensor](), W
        if isinstance(section, Implicit) and isinstance(old, Implicit):
            Y, turning, moved = Y.clone(), [batch.scaled(v) for v in vectors], moves(W, batch.E.dim())
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
        p = (P + space.star(P)) / 2
        G, V = space.matrix(at.scaled(g)), space.matrix(at.scaled(d)) @ p
        # Coordinates are scaled: A and the gradient there by sqrt(1/2).
        V[..., :n, :].sub_(C @ (P - p), alpha=math.sqrt(0.5) / 2 / t)
        return dot(V, G).sum()


class CayleyCurve:
    """The curve by Cayley on a space of SO(N) or U(N), above a transported section, in the fewest operations.

    With U = Lambda W E and C = B^H B, which do not depend on t, and P = (I - t A/2 + t^2 C/4)^-1

        D = (U - t Y C/2) P,   M = Y + t D/2,   Y_t = Y + t D,   Q_t = Q - t M B^H,   Y_t' = (D - t M C/2) P

    Frames are stored by columns, so all of these are transposed here. For a single vector A = 0, and C, which
    is turn^2, and P are numbers. Square matrices have no B.
    """

    def __init__(self, batch: PointBatch, d: Tensor) -> None:
        self.batch, space, section = batch, batch.space, cast(Transported, batch.section)
        V = space.matrix(batch.scaled(d))
        self.Lambda, self.n, self.square = section.Lambda.mT, (n := V.shape[-1]), V.shape[-2] == n
        # Not `@`, which looks for batches first.
        single = V.dim() == 2
        self.plus: Callable[..., Tensor] = torch.addmm if single else torch.baddbmm
        self.times: Callable[..., Tensor] = torch.mm if single else torch.bmm
        if not batch.free:
            # Sums of flat vectors leave g^hor by rounding, which would take frames off their group.
            self.A = space.skew(V[..., :n, :]) * math.sqrt(0.5)
            V = self.A if self.square else torch.cat([self.A, V[..., n:, :]], -2)
        turns = torch.linalg.vector_norm(V, dim=(-2, -1))
        self.turn = float(turns.max() if turns.dim() else turns)
        self.Y, self.U = self.Lambda[..., :n, :], self.times(V.mT, self.Lambda)
        if not self.square:
            self.B = V.conj()  # [0; B]
            if not batch.free:
                V[..., :n, :].zero_()
            if not batch.single:
                self.C = product(V.mT, self.B)

    def at(self, t: float, vectors: Sequence[Tensor], age: int) -> PointBatch:
        """The batch at t; transported frames leave vectors alone."""
        new, n = copied(self.batch), self.n
        P: Any
        if new.single:
            P = 1 / (1 + (t * self.turn) ** 2 / 4)
            D = torch.add(self.U, self.Y, alpha=-t * self.turn * self.turn / 2).mul_(P)
        else:
            S = new.eye if new.free else torch.add(new.eye, self.A.mT, alpha=-t / 2)
            S = S if self.square else torch.add(S, self.C, alpha=t * t / 4)
            P = S.reciprocal() if new.vector else inverse(S)
            D = self.times(P, self.U if self.square else self.plus(self.U, self.C, self.Y, alpha=-t / 2))
        if self.square:
            M, Lambda = self.Y, torch.add(self.Lambda, D, alpha=t)
        else:
            M = torch.add(self.Y, D, alpha=t / 2)
            Lambda = self.plus(self.Lambda, self.B, M, alpha=-t)
        top = Lambda[..., :n, :]
        if not self.square:
            top.add_(D, alpha=t)
        section: Any = copied(new.section)
        new.step, new.section, section.Lambda = (D, M, P), section, Lambda.mT
        if new.tall:
            new.Y = top.mT
        elif new.vector and new.space.dims == 1:
            new.Y = top.squeeze(-2)
        else:
            new.Y = new.space.unmatrix(top.mT, new.E.shape)
        polish(new, self.U, t * self.turn, age)
        return new

    def slope(self, at: PointBatch, g: Tensor, d: Tensor, t: float) -> Tensor | float:
        """<G, Y_t'>, G the Euclidean gradient; for a single vector <B_t, B P>, B_t the gradient in g^hor."""
        D, M, P = at.step
        if at.single:
            return float(at.own(g).dot(at.own(d))) * P
        V = self.times(P, D if self.square else self.plus(D, self.C, M, alpha=-t / 2))
        G = at.space.matrix(at.G).mT
        return dot(G, V) if V.dim() == 2 else dot(G, V).sum()


def moves(W: Tensor, dims: int) -> Tensor:
    """Which points move at all; the others may not change by a bit."""
    return norm(W, dim=tuple(range(-dims, 0))) > 0


def polish(new: PointBatch, W: Tensor, turn: float, age: int) -> None:
    """Repair rounding every few steps along W, and at once after one that turned a point by much."""
    far = turn > 0.5 * new.reach
    if new.curved and (far or age % POLISH_POINT == 0):
        moved = moves(W, W.dim() - len(new.full_shape) + new.E.dim())
        new.section.polish(new.Y, age, moved.to(W.dtype.to_real()), far)


class Ray:
    """The curves of all batches of some points along a flat vector d."""

    def __init__(self, points: Points, d: Tensor) -> None:
        self.points, self.curves = points, list[Curve | CayleyCurve]()
        cayley = points.retraction.name == "cayley"
        for batch in points.batches:
            if cayley and batch.lean:
                self.curves.append(CayleyCurve(batch, d))
                continue
            W = batch.coordinates(d)
            # See `CayleyCurve`.
            W = batch.space.hor(W) if batch.curved and not batch.free else W
            # The longest turn of a point at t = 1.
            turns = batch.turns(W) if batch.curved else None
            turn = 0.0 if turns is None else float(turns.max() if turns.dim() else turns)
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
