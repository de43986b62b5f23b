"""Where a solver is, and the lines that lead away from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ghor.solve.coordinates import Coordinates
from ghor.spaces.frames import Frame
from ghor.spaces.lines import Line, Trial

REPAIR_EVERY = 10  # iterates between two repairs of points
WHOLE_EVERY = 100  # and of whole frames


class Sample(NamedTuple):
    """The value of a loss at points, and its Euclidean gradients; `graph` is x and these, for Hessians."""

    points: Sequence[Tensor]
    value: float
    G: Sequence[Tensor]
    graph: tuple[Sequence[Tensor], Sequence[Tensor | None]] = ((), ())


@dataclass(frozen=True)
class Iterate:
    """Frames, and the value and gradient of the loss below them.

    A solver goes on by putting a new one in its place. An interrupt leaves the old one or the new one.
    """

    frames: tuple[Frame, ...]
    sample: Sample
    gradient: Tensor  # in g^hor, flat
    age: int = 0

    @property
    def value(self) -> float:
        """The loss."""
        return self.sample.value

    @cached_property
    def norm(self) -> float:
        """The gradient norm."""
        return float(torch.linalg.vector_norm(self.gradient))


class Ray:
    """The lines of all parts from an iterate along a flat vector d: t -> points, slope, the iterate there."""

    def __init__(self, space: Coordinates, it: Iterate, d: Tensor) -> None:
        self.space, self.it, self.d, w = space, it, d, space.elements(d)
        self.ceiling = space.ceiling(it.frames, w)  # the largest t that turns no point too far
        self.lines: list[Line] = [frame.along(x, space.R) for frame, x in zip(it.frames, w, strict=True)]

    def at(self, t: float) -> list[Trial]:
        """The points at t. Rounding is repaired at every tenth iterate, before the loss sees the points."""
        repair = (self.it.age + 1) % REPAIR_EVERY == 0
        return [line.at(t, repair) for line in self.lines]

    def slope(self, trials: Sequence[Trial], G: Sequence[Tensor]) -> float:
        """The derivative of the loss, of which G are the Euclidean gradients there."""
        slopes = [line.slope(trial, g) for line, trial, g in zip(self.lines, trials, G, strict=True)]
        return float(slopes[0] if len(slopes) == 1 else sum(slopes))

    def arrive(self, trials: Sequence[Trial], sample: Sample) -> Iterate:
        """The iterate at a trial: the one time that frames move. The old ones stay what they are."""
        age = self.it.age + 1
        whole = age % WHOLE_EVERY == 0
        frames = tuple(line.frame(trial, whole) for line, trial in zip(self.lines, trials, strict=True))
        return Iterate(frames, sample, self.space.pull(frames, sample.G), age)


Turn = Callable[[Tensor], Tensor]


def renewed(space: Coordinates, it: Iterate) -> tuple[Iterate, Turn | None]:
    """The iterate above frames with new references where these are worn, and how vectors turn to them."""
    news = [frame.renewed() for frame in it.frames]
    if not any(news):
        return it, None
    frames = tuple(new or old for new, old in zip(news, it.frames, strict=True))
    turn = turning((space, it.frames), (space, frames))
    return replace(it, frames=frames, gradient=turn(it.gradient)), turn


Place = tuple[Coordinates, Sequence[Frame]]


def turning(old: Place, new: Place) -> Turn:
    """How flat vectors turn to other frames above the same points."""

    def turn(u: Tensor) -> Tensor:
        rows = zip(old[0].elements(u), old[1], new[1], strict=True)
        w = [x if a is b else b.translated(x, a) for x, a, b in rows]
        return new[0].flat(lambda k, part: part.copy_(w[k]))

    return turn
