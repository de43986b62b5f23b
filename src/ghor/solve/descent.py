"""Descent along the directions of a rule, by steps that satisfy the Wolfe conditions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ghor.solve.curves import Ray
from ghor.solve.directions import Rule
from ghor.solve.line_search import Trial, strong_wolfe
from ghor.solve.points import Points
from ghor.solve.problem import Log, Place, Problem


@dataclass(frozen=True)
class Step:
    """A step t along a direction: where it leads, with direction and old gradient in the frames there."""

    t: float
    place: Place
    direction: Tensor
    before: Tensor


def search(
    place: Place,
    d: Tensor,
    slope: float,
    t: float,
    evaluate: Callable[[Points], Place],
    memory: Callable[[], Sequence[Tensor]],
    **options: Any,
) -> Step:
    """The step t d that `strong_wolfe` finds, starting with t.

    The flat vectors that `memory` returns turn with it. If no step is better, the result is `place` itself,
    with t = 0.
    """

    ray = Ray(place.points, d)

    def phi(t: float) -> Trial:
        along, before = d, place.gradient
        if place.points.turning:
            along, before = along.clone(), before.clone()
        at = evaluate(ray.at(t, [along, before]))
        return Trial(t, at.value, ray.slope(at.points, at.gradient, along, t), Step(t, at, along, before))

    start = Trial(0.0, place.value, slope, Step(0.0, place, d, place.gradient))
    found: Step = strong_wolfe(phi, start, t, longest=ray.ceiling(), **options).at
    if found.t > 0:
        ray.renew(found.place.points, found.t, memory)
    return found


def descend(problem: Problem, points: Points, make: Callable[[], Rule], log: Log) -> Place:
    """Step along the directions of a rule until the log says stop, or no step along -gradient helps."""
    place, rule = problem.place(points), make()
    while not log.over(place):
        g, eps = place.gradient, points.eps
        d = rule.direction(g)
        slope = float(g.dot(d))
        if not slope < 0:  # rounding has spoilt the memory of the rule
            rule, d, slope = make(), -g, -float(g.dot(g))
        step = search(
            place,
            d,
            slope,
            1.0 if rule.informed else place.points.first_step(g, place.value),
            problem.place,
            rule.vectors,
            c2=rule.c2,
            size=float(torch.linalg.vector_norm(d)),
            tolerance=eps * place.extent,
            slack=10 * eps * abs(place.value),
        )
        if step.t > 0:
            place = step.place
            rule.update(step.direction * step.t, step.before, place.gradient)
        elif rule.informed:
            rule = make()
        else:
            log.get_stuck(place)
            break
    return place
