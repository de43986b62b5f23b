"""Lines t -> the point of Lambda R(t W), on which solvers try steps, and the frame where a step is taken.

Thin       matrices and vectors with an adjoint X*: y_t and y_t' from (y, Q B, A, B* B) alone, N x n
Straight   y + t w of Euclidean points
Moved      any frame: a copy takes the step t w along a geodesic, whose velocity has the coordinates w
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ghor.linalg import by_columns, times
from ghor.spaces.retraction import Move, Retraction, geodesic

if TYPE_CHECKING:
    from ghor.spaces.frames import Frame, Framed, Group


class Trial(NamedTuple):
    """A step t along a line: the point there, and what slope and frame there are made of."""

    t: float
    y: Tensor
    move: Move | None = None  # of a Thin line
    frame: Frame | None = None  # of a copied frame, with the coordinates of the velocity in it
    velocity: Tensor | None = None


class Line(Protocol):
    """A curve through the point of a frame, which stays what it is."""

    def at(self, t: float, repair: bool = False) -> Trial:
        """The point at t, with its rounding repaired if asked."""

    def slope(self, trial: Trial, g: Tensor) -> Tensor:
        """<g, y_t'> for the Euclidean gradient g there."""

    def frame(self, trial: Trial, whole: bool = False) -> Frame:
        """A frame above that point; rounding of all of Lambda is repaired if `whole`."""


class Thin:
    """y_t = y + D, Q_t = Q - (y + J) (t B)* of D, J = R.act(y, M -> t Q B + y M, t A, t^2 C), C = B* B."""

    def __init__(self, frame: Framed, w: Tensor, R: Retraction) -> None:
        n, star = frame.n, frame.geometry.star
        self.start, self.y, self.R, self.longest, self.low = frame, frame.point(), R, frame.longest, w.clone()
        self.A, B = w[..., :n, :], w[..., n:, :]
        self.low[..., :n, :] = 0
        self.QB, self.C = frame.push(self.low), torch.bmm(star(B), B)

    def at(self, t: float, repair: bool = False) -> Trial:
        """A trial costs two products N n^2."""

        def V(M: Tensor | None) -> Tensor:
            if M is None or self.y.shape[-1] == 1:
                return self.QB * t if M is None else torch.addcmul(self.QB * t, self.y, M)
            if by_columns(self.QB):
                return torch.baddbmm(self.QB.mT, M.mT, self.y.mT, beta=t).mT
            return torch.baddbmm(self.QB, self.y, M, beta=t)

        move = self.R.act(self.y, V, self.A * t, self.C * (t * t), self.longest)
        y = self.y + move.D
        if repair:
            y = y + times(y, self.start.defect(y) / 2)
        return Trial(t, y, move)

    def slope(self, trial: Trial, g: Tensor) -> Tensor:
        """Two products more, whatever the retraction."""
        assert trial.move is not None
        velocity = self.R.velocity(self.y, self.QB, self.A, self.C, trial.t, trial.move)
        return (g * velocity.conj()).real.sum()

    def frame(self, trial: Trial, whole: bool = False) -> Frame:
        """The one time that a frame moves."""
        assert trial.move is not None
        return self.start.reached(trial.y, self.low, trial.t, trial.move, whole)


class Straight:
    """y + t w."""

    def __init__(self, frame: Group, w: Tensor) -> None:
        self.start, self.y, self.w = frame, frame.point(), w

    def at(self, t: float, repair: bool = False) -> Trial:
        """There is nothing to repair."""
        return Trial(t, torch.add(self.y, self.w, alpha=t))

    def slope(self, trial: Trial, g: Tensor) -> Tensor:
        """<g, w>."""
        return (g * self.w.conj()).real.sum()

    def frame(self, trial: Trial, whole: bool = False) -> Frame:
        """The point is its frame."""
        return self.start.reached(trial.y)


class Moved:
    """A copied frame takes the step t w along a geodesic."""

    def __init__(self, frame: Frame, w: Tensor) -> None:
        self.start, self.w, self.length = frame, w, frame.length(w)

    def at(self, t: float, repair: bool = False) -> Trial:
        """The coordinates of the velocity stay w, or turn with the frame as a first moment does."""
        new, velocity = self.start.copy(), self.w.clone()
        new.step(self.w * t, self.length * abs(t), geodesic, [velocity], ())
        if repair:
            new.repair(False, self.length > 0)
        return Trial(t, new.point(), frame=new, velocity=velocity)

    def slope(self, trial: Trial, g: Tensor) -> Tensor:
        """<B, w>, B the gradient in g^hor."""
        new, w = cast("Frame", trial.frame), cast(Tensor, trial.velocity)
        B = new.zeros()
        new.pull(g, B)
        return new.geometry.hor_inner(B, w).sum()

    def frame(self, trial: Trial, whole: bool = False) -> Frame:
        """The copy."""
        new = cast("Frame", trial.frame)
        if whole:
            new.repair(True, self.length > 0)
        return new
