"""The trust region method: Newton's step within a radius, by Steihaug's conjugate gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ghor.solve.iterate import Iterate, Ray, renewed
from ghor.solve.method import Stuck
from ghor.solve.problem import Problem
from ghor.solve.result import Log

Product = Callable[[Tensor], Tensor]


class Trust(NamedTuple):
    """The radius, and the Hessian of an iterate that a step has not left."""

    radius: float = 0.0
    hessian: Product | None = None


class TrustRegion:
    """Minimise <g, u> + <u, H u>/2 over ||u|| <= radius in g^hor; Lambda <- Lambda R(u) if the value agrees.

    H is the Hessian of the pulled-back loss f(Lambda R(u) E); at a critical point it is the Riemannian one.
    """

    def init(self) -> Trust:
        """No radius yet."""
        return Trust()

    def step(self, problem: Problem, it: Iterate, state: Trust, log: Log) -> tuple[Iterate, Trust | Stuck]:
        """One solution of the model, taken or not."""
        space, eps, g = problem.space, problem.space.eps, it.gradient
        product = state.hessian or problem.hessian(it)
        radius = state.radius or _first_radius(problem, it, product)
        u, Hu, edge = steihaug(g, product, radius, log)
        bend = float(u.dot(Hu))
        if not (math.isfinite(bend) or bool(torch.isfinite(Hu).all())):  # second derivatives are not
            return it, Stuck()
        ray = Ray(space, it, u)
        t = min(1.0, ray.ceiling)
        trials = ray.at(t)
        seen = problem.sample([trial.y for trial in trials], twice=True)
        new = ray.arrive(trials, seen)
        slope, length = float(g.dot(u)), t * float(u.norm())
        decrease = -t * slope - t * t / 2 * bend
        ratio = (it.value - new.value) / decrease if decrease > 0 else 0.0
        # Within rounding of the values their difference says nothing. The slopes at both ends still do: by
        # the trapezoidal rule, which is exact for the model, the value falls by -t (slope + slope there)/2.
        noise = 10 * eps * max(abs(it.value), abs(log.first[0]))
        if max(decrease, abs(it.value - new.value)) <= noise and new.norm < it.norm:
            ratio = -t / 2 * (slope + ray.slope(trials, seen.G)) / decrease
        if not (math.isfinite(new.value) and math.isfinite(new.norm)):
            ratio = 0.0
        radius = _resized(radius, ratio, length, space.widest if edge else radius)
        if ratio > 0.1:
            return renewed(space, new)[0], Trust(radius)
        if radius <= eps * max(problem.extent(it), length):
            newton = steihaug(g, product, math.inf, log)[0]  # not finite if the curvature is negative
            return it, Stuck(float(newton.norm()))
        return it, Trust(radius, product)


def _first_radius(problem: Problem, it: Iterate, product: Product) -> float:
    """An eighth of a radian; with positions, which have no such unit, the length of Cauchy's step.

    That is the step along -gradient that minimises the model.
    """
    if problem.space.widest < math.inf:
        return problem.space.widest / 8
    bend = float(it.gradient.dot(product(it.gradient))) / it.norm / it.norm
    return it.norm / bend if bend > 0 else it.norm * problem.first_step(it)


def _resized(radius: float, ratio: float, length: float, widest: float) -> float:
    """A quarter where the model was wrong, and twice as long, up to `widest`, where it was right."""
    if not ratio >= 0.25:
        return min(radius, length) / 4
    return min(2 * radius, widest) if ratio > 0.75 else radius


def steihaug(g: Tensor, product: Product, radius: float, log: Log) -> tuple[Tensor, Tensor, bool]:
    """Conjugate gradients for H u = -g; up to the edge if they leave the radius or meet negative curvature.

    Ends at ||r|| <= ||g|| min(sqrt(||g||/||g_0||), 0.1), g_0 the first gradient of the run, so that the outer
    iteration converges with order 3/2; or at half of the gradient norm that the run is to reach. Returns u,
    H u, and whether u is at the edge.
    """
    size = float(g.norm())
    # Everything is divided by `size`: squares of small gradients would underflow in float32.
    u, Hu, r = torch.zeros_like(g), torch.zeros_like(g), g / size
    d, rr, edge = -r, 1.0, radius / size
    target = max(min(math.sqrt(size / log.first[1]), 0.1), log.target() / 2 / size)
    for _ in range(2 * len(g)):
        Hd = product(d)
        dHd, uu, ud, dd = (float(a.dot(b)) for a, b in ((d, Hd), (u, u), (u, d), (d, d)))
        alpha = rr / dHd if dHd > 0 else math.inf
        if alpha == math.inf or uu + 2 * alpha * ud + alpha * alpha * dd >= edge * edge:
            tau = (-ud + math.sqrt(max(0.0, ud * ud + dd * (edge * edge - uu)))) / dd
            return u.add_(d, alpha=tau).mul_(size), Hu.add_(Hd, alpha=tau).mul_(size), True
        for a, b in ((u, d), (Hu, Hd), (r, Hd)):
            a.add_(b, alpha=alpha)
        new = float(r.dot(r))
        if math.sqrt(new) <= target or log.late():
            break
        d, rr = d.mul_(new / rr).sub_(r), new
    return u.mul_(size), Hu.mul_(size), False
