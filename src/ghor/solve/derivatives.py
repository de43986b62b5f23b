"""Tests of derivatives by the order of the remainder of a Taylor expansion along a random geodesic."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator

from ghor.solve.curves import Ray
from ghor.solve.problem import Given, Loss, Problem, Spaces


@dataclass(frozen=True, repr=False)
class Slope:
    """Remainders `error` at steps t, and the `slope` of log(error) against log(t) where that is a line.

    `order` is the slope for right derivatives; `ok` compares the two, and printing a Slope gives the verdict.
    An expansion that is exact to rounding passes, with the slope inf.
    """

    slope: float
    order: int
    t: list[float]
    error: list[float]

    @property
    def ok(self) -> bool:
        """Whether the slope is `order` or more, to within 0.1."""
        return self.slope > self.order - 0.1

    def __repr__(self) -> str:
        of = {2: "gradient", 3: "Hessian"}.get(self.order, "expansion")
        verdict = f"{of} ok" if self.ok else f"{of} NOT ok"
        return f"Slope({verdict}: slope {self.slope:.2f}, right derivatives have {self.order})"

    def draw(self, axes: Any = None) -> Any:
        """Draw the errors and a line of the right slope with matplotlib; returns the axes."""
        axes = importlib.import_module("matplotlib.pyplot").gca() if axes is None else axes
        top, least = max(self.error) or 1.0, min((e for e in self.error if e > 0), default=1.0)
        axes.loglog(self.t, self.error, label=f"error, slope {self.slope:.2f}")
        axes.loglog(
            self.t, [top * (t / self.t[-1]) ** self.order for t in self.t], "--", label=f"slope {self.order}"
        )
        axes.set(xlabel="t", ylabel="remainder of the expansion", ylim=(least / 2, 2 * top))
        axes.legend()
        return axes


def check_gradient(
    f: Loss, x: Given, space: Spaces = None, *, generator: Generator | None = None, draw: bool = False
) -> Slope:
    """Test the gradient of f along a random geodesic x_t: |f(x_t) - f(x) - t <B, W>| must fall like t^2.

    >>> print(check_gradient(f, x, Stiefel()))
    Slope(gradient ok: slope 2.00, right derivatives have 2)
    """
    return _check(f, x, space, 2, generator, draw)


def check_hessian(
    f: Loss, x: Given, space: Spaces = None, *, generator: Generator | None = None, draw: bool = False
) -> Slope:
    """Test second derivatives: |f(x_t) - f(x) - t <B, W> - t^2/2 <W, Hess W>| must fall like t^3."""
    return _check(f, x, space, 3, generator, draw)


def _check(f: Loss, x: Given, space: Spaces, order: int, generator: Generator | None, draw: bool) -> Slope:
    problem = Problem(f, x, space)
    place = problem.place(problem.points("geodesic", "transported"), twice=order == 3)
    g, value = place.gradient, place.value
    raw = [
        torch.randn(p.shape, generator=generator, dtype=p.dtype, device=p.device)
        for p in place.points.tensors()
    ]
    W = place.points.gradient(raw)
    W = W / W.norm()
    first, second = float(g.dot(W)), float(W.dot(problem.hessian(place)(W))) if order == 3 else 0.0
    steps = [10 ** (-k / 4) for k in range(32, -1, -1)]
    ray = Ray(place.points, W)
    errors = [abs(problem.value(ray.at(t)) - value - t * first - t * t / 2 * second) for t in steps]
    noise = 100 * torch.finfo(g.dtype).eps * max(abs(value), float(g.norm()))
    result = Slope(_steepness(steps, errors, noise), order, steps, errors)
    if draw:
        result.draw()
    return result


def _steepness(steps: list[float], errors: list[float], noise: float) -> float:
    """The slope over that decade in which the errors above rounding are closest to a line."""
    if any(map(math.isnan, errors)):
        return math.nan
    kept = [(math.log10(t), math.log10(e)) for t, e in zip(steps, errors, strict=True) if e > noise]
    if len(kept) < 5:
        return math.inf
    x, y = torch.tensor(kept, dtype=torch.float64).unfold(0, 5, 1).unbind(1)  # windows of five
    x, y = x - x.mean(1, True), y - y.mean(1, True)
    slope = (x * y).sum(1) / (x * x).sum(1)
    return float(slope[(y - slope[:, None] * x).square().sum(1).argmin()])
