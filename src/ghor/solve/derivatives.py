"""Tests of derivatives by the order of the remainder of a Taylor expansion along a random geodesic.

They look at the frames of the solvers, above which second derivatives are taken.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torch.linalg import vector_norm as norm

from ghor.lifting.groups import SectionName
from ghor.solve.iterate import Iterate, Ray
from ghor.solve.problem import Given, Loss, Problem, Spaces

STRAIGHT = 0.01  # how far log10 of errors may be from a line, in the mean


@dataclass(frozen=True, repr=False)
class Slope:
    """Remainders `error` at steps t, and the `slope` of log(error) against log(t) where that is a line.

    Steps are in radians, and in parts of the size of positions and Euclidean entries. `order` is the slope
    for right derivatives; `ok` compares the two, and printing a Slope gives the verdict. An expansion that is
    exact to rounding passes, with the slope inf. If f changes too little to tell, the slope is NaN.
    `asymmetry` is |<u, H v> - <v, H u>| beyond rounding, as a part of |H u| |v| + |H v| |u|.
    """

    slope: float
    order: int
    t: list[float]
    error: list[float]
    asymmetry: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the slope is `order` or more, to within 0.1, and second derivatives are symmetric."""
        return self.slope > self.order - 0.1 and self.asymmetry == 0

    def __repr__(self) -> str:
        of = {2: "gradient", 3: "Hessian"}.get(self.order, "expansion")
        if math.isnan(self.slope) and math.isfinite(self.error[0]):
            return f"Slope({of} inconclusive: the change of f is below its rounding)"
        if self.asymmetry:
            return f"Slope({of} NOT ok: <u, H v> and <v, H u> are {self.asymmetry:.1e} apart)"
        verdict = f"{of} ok" if self.ok else f"{of} NOT ok"
        return f"Slope({verdict}: slope {self.slope:.2f}, right derivatives have {self.order})"

    def draw(self, axes: Any = None) -> Any:
        """Draw the errors and a line of the right slope with matplotlib; returns the axes."""
        axes = importlib.import_module("matplotlib.pyplot").gca() if axes is None else axes
        seen = [(e, t) for t, e in zip(self.t, self.error, strict=True) if 0 < e < math.inf]
        (top, last), (least, _) = max(seen, default=(1.0, 1.0)), min(seen, default=(1.0, 1.0))
        axes.loglog(self.t, self.error, label=f"error, slope {self.slope:.2f}")
        axes.loglog(
            self.t, [top * (t / last) ** self.order for t in self.t], "--", label=f"slope {self.order}"
        )
        axes.set(xlabel="t", ylabel="remainder of the expansion", ylim=(least / 2, 2 * top))
        axes.legend()
        return axes


def check_gradient(
    f: Loss,
    x: Given,
    space: Spaces = None,
    *,
    section: SectionName = "auto",
    generator: Generator | None = None,
    draw: bool = False,
) -> Slope:
    """Test the gradient of f along a random geodesic x_t: |f(x_t) - f(x) - t <B, W>| must fall like t^2.

    >>> print(check_gradient(f, x, Stiefel()))
    Slope(gradient ok: slope 2.00, right derivatives have 2)
    """
    return _check(f, x, space, 2, section, generator, draw)


def check_hessian(
    f: Loss,
    x: Given,
    space: Spaces = None,
    *,
    section: SectionName = "auto",
    generator: Generator | None = None,
    draw: bool = False,
) -> Slope:
    """Test second derivatives: |f(x_t) - f(x) - t <B, W> - t^2/2 <W, Hess W>| must fall like t^3.

    And Hess must be symmetric, above the frames that solvers use: those of `section`.
    """
    return _check(f, x, space, 3, section, generator, draw)


def _check(
    f: Loss, x: Given, spaces: Spaces, order: int, section: str, generator: Generator | None, draw: bool
) -> Slope:
    problem = Problem(f, x, spaces, section=section)
    it = problem.start(twice=order == 3)
    g, value, W = it.gradient, it.value, _random(problem, it, generator)
    first, second, asymmetry = float(g.dot(W)), 0.0, 0.0
    eps = torch.finfo(g.dtype).eps
    # On a curved space a derivative that is zero is so to the rounding of what cancels there.
    rows = zip(problem.space.parts, it.sample.points, it.sample.G, strict=True)
    zero = 100 * eps * sum(float(norm(y) * norm(G)) for part, y, G in rows if part.limit < math.inf)
    if order == 3:
        H, V = problem.hessian(it), _random(problem, it, generator)
        HV, HW = H(V), H(W)
        second, sizes = float(W.dot(HW)), float(norm(HV) * norm(W) + norm(HW) * norm(V))
        apart = abs(float(W.dot(HV)) - float(V.dot(HW)))
        asymmetry = apart / sizes if apart > math.sqrt(eps) * sizes + zero * float(norm(V) * norm(W)) else 0.0
    steps, ray = _steps(problem, it), Ray(problem.space, it, W)
    values = [problem.value([trial.y for trial in ray.at(t)]) for t in steps]
    errors = [abs(f - value - t * first - t * t / 2 * second) for t, f in zip(steps, values, strict=True)]
    terms = [abs(t * first if order == 2 else t * t / 2 * second) for t in steps]
    size = max(abs(value), float(norm(problem.sized(it, g))))
    noise = [100 * eps * max(size, abs(f)) for f in values]
    slope, unit = _steepness(steps, errors, terms, noise, zero), problem.unit
    result = Slope(slope, order, steps, [e * unit for e in errors], asymmetry)  # in the units of f
    if draw:
        result.draw()
    return result


def _random(problem: Problem, it: Iterate, generator: Generator | None) -> Tensor:
    """A random flat vector: of length one, but for positions, which move by their size."""
    space, points = problem.space, it.sample.points
    raw = [torch.randn(y.shape, generator=generator, dtype=y.dtype, device=y.device) for y in points]
    W = space.pull(it.frames, raw)
    return problem.sized(it, W / W.norm())


def _steps(problem: Problem, it: Iterate) -> list[float]:
    """Four steps a decade: up to a radian or the size of the positions, and from 1e-8 of that.

    The scale of f may be another, so there are also those of 1e-8 to 1 in the unit of the positions.
    """
    sizes = [length or 1.0 for length in problem.lengths(it)]
    more, longer = math.log10(max(1.0, *sizes)), -math.log10(min(1.0, *sizes))
    last = 0 if problem.space.radian > 0 else math.ceil(4 * longer)  # no more than a radian
    return [10 ** (k / 4) for k in range(-32 - math.ceil(4 * more), last + 1)]


def _steepness(
    steps: list[float], errors: list[float], terms: list[float], noise: list[float], zero: float
) -> float:
    """The slope over the first decade in which the errors above rounding are a line, or closest to one.

    The first, because an error of low order is lost among those of high order in long steps. Steps count
    where f is finite. If there is no such decade, the slope is inf where some term is ten times its error and
    rounding, or where all are zero and nothing else is seen; otherwise NaN.
    """
    seen = [row for row in zip(steps, errors, terms, noise, strict=True) if math.isfinite(row[1])]
    kept = [(math.log10(t), math.log10(e)) for t, e, _, least in seen if e > least]
    if len(kept) < 5:
        told = any(term > 0 and term >= 10 * max(e, least) for _, e, term, least in seen)
        nothing = len(seen) > 0 and not kept and max(terms) <= zero
        return math.inf if told or nothing else math.nan
    x, y = torch.tensor(kept, dtype=torch.float64, device="cpu").unfold(0, 5, 1).unbind(1)  # windows of 5
    x, y = x - x.mean(1, True), y - y.mean(1, True)
    slope = (x * y).sum(1) / (x * x).sum(1)
    bend = (y - slope[:, None] * x).square().mean(1).sqrt()
    return float(slope[bend.clamp_min(STRAIGHT).argmin()])
