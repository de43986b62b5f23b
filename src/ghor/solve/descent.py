"""Descent along the directions of a rule, by steps that satisfy the Wolfe conditions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ghor.solve.iterate import Iterate, Ray, Sample, renewed
from ghor.solve.line_search import Trial, strong_wolfe
from ghor.solve.method import Stuck
from ghor.solve.problem import Problem
from ghor.solve.result import Log
from ghor.solve.rules import Rule


def search(
    sample: Callable[[Sequence[Tensor]], Sample], ray: Ray, slope: float, t: float, **options: Any
) -> tuple[float, Iterate]:
    """The step that `strong_wolfe` finds along a ray, starting with t, and the iterate there; or t = 0."""

    def phi(t: float) -> Trial:
        trials = ray.at(t)
        seen = sample([trial.y for trial in trials])
        return Trial(t, seen.value, ray.slope(trials, seen.G), (trials, seen))

    end = strong_wolfe(phi, Trial(0.0, ray.it.value, slope), t, longest=ray.ceiling, **options)
    return (end.t, ray.arrive(*end.at)) if end.t > 0 else (0.0, ray.it)


@dataclass(frozen=True)
class Descent:
    """Steps along the directions of a rule, which knows nothing; the rule as it is by now is the state."""

    rule: Rule

    def init(self) -> Rule:
        """The rule that knows nothing."""
        return self.rule

    def step(self, problem: Problem, it: Iterate, rule: Rule, log: Log) -> tuple[Iterate, Rule | Stuck]:
        """Along the rule's direction; if that does not help, without what the rule has learned."""
        g, eps = it.gradient, problem.space.eps
        d = rule.direction(g)
        slope = float(g.dot(d))
        if not slope < 0:  # rounding has spoilt the memory of the rule
            rule, d, slope = self.rule, -g, -float(g.dot(g))
        t, new = search(
            problem.sample,
            Ray(problem.space, it, d),
            slope,
            1.0 if rule.informed else problem.first_step(it),
            c2=rule.c2,
            size=float(torch.linalg.vector_norm(d)),
            tolerance=eps * problem.extent(it),
            slack=10 * eps * abs(it.value),
        )
        if t == 0:
            return it, self.rule if rule.informed else Stuck()
        rule = rule.learned(d * t, new.gradient - g)
        new, turn = renewed(problem.space, new)
        return new, rule if turn is None else rule.turned(turn)
