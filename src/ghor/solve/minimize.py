"""Minimise a function over points of one space or several."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, get_args

from torch import Tensor

from ghor.lifting.groups import SECTIONS, SectionName
from ghor.solve.coordinates import Coordinates
from ghor.solve.descent import Descent
from ghor.solve.method import Method, run
from ghor.solve.problem import Problem, Spaces, X
from ghor.solve.result import Callback, Log, Result
from ghor.solve.rules import Conjugate, Dense, Limited
from ghor.solve.trust_region import TrustRegion
from ghor.spaces.retraction import RetractionName, by_name

MethodName = Literal["auto", "lbfgs", "bfgs", "cg", "trust-region"]
METHODS: tuple[str, ...] = get_args(MethodName)
DENSE_UP_TO = 4000  # the most coordinates for which BFGS keeps a matrix


def make(method: str, space: Coordinates, memory: int) -> Method[Any]:
    """The method of this name; "auto" begins with L-BFGS."""
    if method == "trust-region":
        return TrustRegion()
    if method == "bfgs":
        return Descent(Dense())
    return Descent(Conjugate(space.units) if method == "cg" else Limited(memory, space.sizes))


def minimize(
    f: Callable[[X], Tensor],
    x0: X,
    space: Spaces = None,
    method: MethodName = "auto",
    *,
    tol: float | None = None,
    rtol: float | None = None,
    max_iterations: int = 1000,
    max_evaluations: int | None = None,
    max_seconds: float | None = None,
    memory: int = 30,
    retraction: RetractionName = "cayley",
    section: SectionName = "auto",
    callback: Callback | None = None,
    progress: bool = False,
) -> Result[X]:
    """Find a local minimum of f near x0: a point, or a dict or list of points, on one space or one for each.

    >>> result = minimize(lambda Y: -(Y.mT @ S @ Y).trace(), Stiefel().random(20, 3), Stiefel())

    The run ends when ||grad f|| in g^hor is at most max(tol, rtol ||grad f(x0)||). If neither is given, rtol
    is eps^(2/3) of the dtype (4e-11 in float64, 2e-5 in float32), and a run that rounding ends earlier is a
    success, too, so nothing depends on the scale of f or on a unit of length. `tol` is absolute, in the units
    of f. `result.status` says in words why the run ended.

        lbfgs         the last `memory` curvature pairs, strong Wolfe line search
        bfgs          the whole inverse Hessian, for up to some thousand coordinates
        cg            conjugate gradients (Shanno), which keep one pair
        trust-region  Newton's method with Hessian-vector products (f is differentiated twice)
        auto          lbfgs, then trust-region from the point where its line search finds no better one

    `callback` gets the record of each iteration, a dict of numbers, and the point if it takes two arguments;
    it ends the run by returning True. The point is the solver's own: clone it before you write to it.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; there are {list(METHODS)}")
    if section not in SECTIONS or (method == "bfgs" and section == "implicit"):
        known = [s for s in SECTIONS if method != "bfgs" or s != "implicit"]
        raise ValueError(f"unknown section {section!r} for method {method!r}; there are {known}")
    if memory < 1:
        raise ValueError(f"memory counts curvature pairs, 1 or more, got {memory}")
    problem = Problem(f, x0, space, by_name(retraction), "transported" if method == "bfgs" else section)
    coordinates = problem.space
    if method == "bfgs" and coordinates.size > DENSE_UP_TO:
        raise ValueError(
            f"bfgs keeps a {coordinates.size} x {coordinates.size} matrix here; use method='lbfgs'"
        )
    log = Log(problem, tol, rtol, max_iterations, max_evaluations, max_seconds, callback, progress)
    it = run(problem, problem.start(twice=method == "trust-region"), make(method, coordinates, memory), log)
    if method == "auto" and log.stuck:
        log.go_on()
        it = run(problem, problem.again(it), TrustRegion(), log)
    return Result(
        x=problem.pack([p.detach().clone() for p in coordinates.weights(it.sample.points)]),
        value=it.value * problem.unit,
        gradient_norm=it.norm * problem.unit,
        iterations=len(log.history) - 1,
        evaluations=problem.evaluations,
        hessian_products=problem.products,
        seconds=time.perf_counter() - log.began,
        success=log.success,
        status=log.status,
        history=log.history,
    )
