"""What a run has found, and the log that decides when it is over."""

from __future__ import annotations

import importlib
import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Generic

from ghor.solve.iterate import Iterate, Ray
from ghor.solve.problem import VISIBLE, Problem, X

PATIENCE = 100  # iterations without a change beyond rounding, after which a run ends

Record = dict[str, float]
Callback = Callable[[Record], object] | Callable[[Record, Any], object]


@dataclass(repr=False)
class Result(Generic[X]):
    """The point x that a solver found, in the form of its start, and how it got there.

    `history` has the record of each iteration, a dict of numbers; the first is that of the start.
    """

    x: X
    value: float
    gradient_norm: float
    iterations: int
    evaluations: int
    hessian_products: int
    seconds: float
    success: bool
    status: str
    history: list[Record]

    def __repr__(self) -> str:
        shown = (f.name for f in fields(self) if f.name not in ("x", "history", "success", "status"))
        rows = [f"  {name:<17}{getattr(self, name):.8g}" for name in shown]
        return "\n".join([f"Result({'success' if self.success else 'NO success'}: {self.status})", *rows])

    def draw(self, axes: Any = None) -> Any:
        """Draw the gradient norm by evaluations with matplotlib; returns the axes."""
        axes = importlib.import_module("matplotlib.pyplot").gca() if axes is None else axes
        axes.semilogy(*([h[key] for h in self.history] for key in ("evaluations", "gradient_norm")))
        axes.set(xlabel="evaluations", ylabel="gradient norm")
        return axes


@dataclass
class Log:
    """The records of a run, and the decision when it ends.

    If the user gives no tolerance, the gradient norm must fall to eps^(2/3) of the first one, or to its own
    rounding, eps |f|/extent, which depends neither on the scale of f nor on a unit of length. A run that ends
    because rounding allows no progress is then a success as well.
    """

    problem: Problem
    tol: float | None = None
    rtol: float | None = None
    max_iterations: int = 1000
    max_evaluations: int | None = None
    max_seconds: float | None = None
    callback: Callback | None = None
    progress: bool = False
    history: list[Record] = field(default_factory=list)
    first: tuple[float, float] = (
        0.0,
        0.0,
    )  # the value and gradient norm at the start, as the problem has them
    began: float = field(default_factory=time.perf_counter)
    status: str = ""
    success: bool = False
    stuck: bool = False  # no step lowers the value
    since: int = 0  # the last iteration in which something changed beyond rounding

    def __post_init__(self) -> None:
        for name in ("tol", "rtol", "max_iterations", "max_evaluations", "max_seconds"):
            if (limit := getattr(self, name)) is not None and not limit >= 0:
                raise ValueError(f"{name} is a number from 0 on, got {limit}")
        self.by_default = self.tol is None and self.rtol is None
        if self.by_default:
            self.rtol = self.problem.space.eps ** (2 / 3)
        try:  # does it take the point, too?
            self.with_point = self.callback is not None and bool(inspect.signature(self.callback).bind({}, 0))
        except (TypeError, ValueError):
            self.with_point = False

    def target(self) -> float:
        """The gradient norm that is asked for."""
        return max((self.tol or 0.0) / self.problem.unit, (self.rtol or 0.0) * self.first[1])

    def late(self) -> bool:
        """Whether the time is up."""
        return self.max_seconds is not None and time.perf_counter() - self.began >= self.max_seconds

    def over(self, it: Iterate) -> bool:
        """Record this iterate; returns whether to stop here."""
        problem, unit = self.problem, self.problem.unit
        value, size = it.value * unit, it.norm * unit
        if not self.history:
            self.first = it.value, it.norm
        record = {
            "iteration": len(self.history),
            "value": value,
            "gradient_norm": size,
            "evaluations": problem.evaluations,
            "hessian_products": problem.products,
            "seconds": time.perf_counter() - self.began,
        }
        self.history.append(record)
        if self.progress:
            _show(record)
        target = self._reachable(it)
        if self._told_to_stop(record, it):
            self.status = "the callback asked to stop"
        elif not (math.isfinite(it.value) and math.isfinite(it.norm)):
            self.status = f"the value {value} or its gradient is not finite"
        elif it.norm <= target:
            self.status = f"the gradient norm {size:.1e} is below {target * unit:.1e}"
            self.success = True
        elif record["iteration"] >= self.max_iterations:
            self.status = f"{self.max_iterations} iterations, max_iterations, gradient norm {size:.1e}"
        elif self.max_evaluations is not None and problem.evaluations >= self.max_evaluations:
            self.status = f"{problem.evaluations} evaluations, max_evaluations, gradient norm {size:.1e}"
        elif self.late():
            self.status = f"{record['seconds']:.1f} seconds, max_seconds, gradient norm {size:.1e}"
        elif self._stalls():
            self.status = (
                f"nothing has changed beyond rounding for {PATIENCE} iterations, gradient norm {size:.1e}; "
                "a wider dtype has more digits"
            )
            self._blame_rounding(it)
        return bool(self.status)

    def get_stuck(self, it: Iterate, newton: float = math.inf) -> None:
        """End here because no step lowers the value; `newton` is the length of Newton's step, if known."""
        self.stuck = True
        value = it.value * self.problem.unit
        self.status = f"no step lowers the value {value}: rounding, or a gradient that is not its own"
        self._blame_rounding(it, newton)

    def go_on(self) -> None:
        """Go on with another method where one got stuck."""
        self.status, self.success = "", False

    def _reachable(self, it: Iterate) -> float:
        """The gradient norm that is asked for, or by default that of rounding."""
        target, extent = self.target(), self.problem.extent(it)
        rounding = self.problem.space.eps * abs(it.value) / extent if extent > 0 else 0.0
        return rounding if self.by_default and target < it.norm <= rounding and self._tells(it) else target

    def _blame_rounding(self, it: Iterate, newton: float = math.inf) -> None:
        """With the default tolerance, count a run that rounding has ended as a success.

        Rounding is the reason if Newton's step is below the rounding of x, or if values could not show a
        decrease, |g| extent <= sqrt(eps) |f|. A wrong gradient of f is far above both.
        """
        eps, extent = self.problem.space.eps, self.problem.extent(it)
        unseen = 0 < it.norm * extent <= math.sqrt(eps) * max(abs(it.value), abs(self.first[0]))
        # It may have run away, where the extent is not finite.
        if (
            self.by_default
            and extent < math.inf
            and (newton <= 100 * eps * extent or (unseen and self._tells(it)))
        ):
            self.success = True
            value, size = it.value * self.problem.unit, it.norm * self.problem.unit
            self.status = f"{value} is the smallest value to rounding, gradient norm {size:.1e}"

    def _tells(self, it: Iterate) -> bool:
        """Whether the extent of the points is a length over which f varies.

        Positions alone may be small only because the run started near 0, as most do. Theirs counts once the
        gradient has fallen, or if f rises both ways along it, by steps whose predicted change can be seen.
        """
        space = self.problem.space
        if space.radian > 0 or it.norm <= 0.1 * self.first[1]:
            return True
        t, rise = VISIBLE * space.eps * abs(it.value) / it.norm**2, 10 * space.eps * abs(it.value)
        ray = Ray(space, it, it.gradient)
        return all(not self.problem.value([x.y for x in ray.at(s)]) - it.value <= rise for s in (-t, t))

    def _stalls(self) -> bool:
        """Whether value and gradient norm have not changed beyond rounding for `PATIENCE` iterations."""
        then, now, eps = self.history[self.since], self.history[-1], self.problem.space.eps
        size = max(abs(now["value"]), eps * abs(self.history[0]["value"]))
        falls = now["gradient_norm"] < 0.9 * then["gradient_norm"]
        if falls or abs(now["value"] - then["value"]) > 10 * eps * size:
            self.since = len(self.history) - 1
        return len(self.history) - 1 - self.since >= PATIENCE

    def _told_to_stop(self, record: Record, it: Iterate) -> bool:
        """Call the callback; returns whether it asked to stop."""
        if self.callback is None:
            return False
        problem = self.problem
        more = (problem.pack(problem.space.weights(it.sample.points)),) if self.with_point else ()
        answer = self.callback(record, *more)
        # Comparisons of tensors and arrays have a bool of their own.
        truth = str(getattr(answer, "dtype", "")) in ("bool", "torch.bool") and bool(answer)
        return answer is True or truth


def _show(record: Record) -> None:
    """Print a line of the table of records, under a heading."""
    if record["iteration"] == 0:
        print("  ".join(f"{name:>{max(13, len(name))}}" for name in record))
    print("  ".join(f"{value:>{max(13, len(name))}.6g}" for name, value in record.items()), flush=True)
