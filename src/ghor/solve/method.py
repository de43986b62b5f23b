"""What a solver is: it takes an iterate, and what it has learned, to the next ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ghor.solve.iterate import Iterate
from ghor.solve.problem import Problem
from ghor.solve.result import Log

State = TypeVar("State")


@dataclass(frozen=True)
class Stuck:
    """In place of a state: no step lowers the value; `newton` is the length of Newton's step, if known."""

    newton: float = math.inf


class Method(Protocol[State]):
    """A method; its state is a value, as iterates are."""

    def init(self) -> State:
        """The state at the start."""

    def step(self, problem: Problem, it: Iterate, state: State, log: Log) -> tuple[Iterate, State | Stuck]:
        """The next iterate and state; the same iterate if this try has failed."""


def run(problem: Problem, it: Iterate, method: Method[State], log: Log) -> Iterate:
    """Go from iterate to iterate until the log says stop, or no step lowers the value."""
    state = method.init()
    while not log.over(it):
        it, new = method.step(problem, it, state, log)
        if isinstance(new, Stuck):
            log.get_stuck(it, new.newton)
            break
        state = new
    return it
