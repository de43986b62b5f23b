"""Descent: along the direction of a rule, as far as the Wolfe conditions ask for."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ghor.solve.directions import Rule
from ghor.solve.line_search import Trial, strong_wolfe
from ghor.solve.points import Frames
from ghor.solve.problem import Log, Place, Problem


def descend(problem: Problem, frames: Frames, make: Callable[[], Rule], log: Log) -> Place:
    """Until the log says so, or no step along -gradient lowers the value."""
    place, rule, fresh = problem.place(frames), make(), True
    while not log.over(place):
        g = place.gradient
        d = rule.direction(g)
        slope = float(g.dot(d))
        if not slope < 0:
            rule, d, slope, fresh = make(), -g, -float(g.dot(g)), True

        def phi(t: float, place: Place = place, d: Tensor = d) -> Trial:
            along, before = d.clone(), place.gradient.clone()
            at = problem.place(place.frames.moved(d, t, [along, before]))
            return Trial(t, at.value, at.frames.slope(at.gradient, along, t), (at, along, before))

        found = strong_wolfe(
            phi,
            Trial(0.0, place.value, slope),
            min(1.0, 1.0 / float(g.abs().sum())) if fresh else 1.0,
            c2=rule.c2,
            size=float(d.norm()),
            tolerance=frames.eps,
            longest=place.frames.ceiling(d),
            slack=10 * frames.eps * abs(place.value),
        )
        if found.t == 0 and fresh:
            log.status = (
                f"no step lowers the value {place.value}: rounding, or a gradient that is not its own"
            )
            break
        if found.t == 0:
            rule = make()
        else:
            at, along, before = found.at
            place.frames.renew(at.frames, d, found.t, rule.vectors())
            place = at
            rule.update(along.mul_(found.t), before, place.gradient)
        fresh = found.t == 0
    return place
