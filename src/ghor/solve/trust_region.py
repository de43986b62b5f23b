"""The trust region method: Newton's step within a radius, by Steihaug's conjugate gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ghor.solve.curves import Ray
from ghor.solve.points import Points
from ghor.solve.problem import Log, Place, Problem


def trust_region(problem: Problem, points: Points, log: Log) -> Place:
    """Minimise <g, u> + <u, H u>/2 over ||u|| <= radius in g^hor; Lambda <- Lambda R(u) if the value agrees.

    H is the Hessian of the pulled-back loss f(Lambda R(u) E); at a critical point it is the Riemannian one.
    """
    place, widest, eps = problem.place(points, twice=True), points.widest(), points.eps
    radius, product = 0.0, None
    while not log.over(place):
        g = place.gradient
        product = product or problem.hessian(place)
        radius = radius or _first_radius(place, product, widest)
        u, Hu, edge = steihaug(g, product, radius, log)
        ray, along = Ray(place.points, u), u.clone()
        t = min(1.0, ray.ceiling())
        new = problem.place(ray.at(t, [along]), twice=True)
        slope, length = float(g.dot(u)), t * float(u.norm())
        decrease = -t * slope - t * t / 2 * float(u.dot(Hu))
        ratio = (place.value - new.value) / decrease if decrease > 0 else 0.0
        # Within rounding of the values their difference says nothing. The slopes at both ends still do: by
        # the trapezoidal rule, which is exact for the model, the value falls by -t (slope + slope there)/2.
        noise = 10 * eps * max(abs(place.value), abs(log.first[0]))
        if max(decrease, abs(place.value - new.value)) <= noise and new.norm < place.norm:
            ratio = -t / 2 * (slope + ray.slope(new.points, new.gradient, along, t)) / decrease
        if not (math.isfinite(new.value) and math.isfinite(new.norm)):
            ratio = 0.0
        if not ratio >= 0.25:
            radius = min(radius, length) / 4
        elif ratio > 0.75 and edge:
            radius = min(2 * radius, widest)
        if ratio > 0.1:
            place, product = new, None
        elif radius <= eps * max(place.extent, length):
            newton = steihaug(g, product, math.inf, log)[0]  # not finite if the curvature is negative
            log.get_stuck(place, float(newton.norm()))
            break
    return place


def _first_radius(place: Place, product: Callable[[Tensor], Tensor], widest: float) -> float:
    """An eighth of a radian; with positions, which have no such unit, the length of Cauchy's step.

    That is the step along -gradient that minimises the model.
    """
    if widest < math.inf:
        return widest / 8
    g, norm = place.gradient, place.norm
    bend = float(g.dot(product(g))) / norm / norm
    return norm / bend if bend > 0 else norm * place.points.first_step(g, place.value)


def steihaug(
    g: Tensor, product: Callable[[Tensor], Tensor], radius: float, log: Log
) -> tuple[Tensor, Tensor, bool]:
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
