"""The trust region method: Newton's step within a radius, by Steihaug's conjugate gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ghor.solve.points import Frames
from ghor.solve.problem import Log, Place, Problem


def trust_region(problem: Problem, frames: Frames, log: Log) -> Place:
    """min <g, u> + <u, H u>/2 over ||u|| <= radius in g^hor, then Lambda <- Lambda R(u), if the value agrees.

    H is the Hessian of the pulled-back loss f(Lambda R(u) E), the Riemannian one at a critical point and
    beyond.
    """
    place, widest = problem.place(frames, twice=True), frames.radius()
    radius, product = widest / 8, None
    while not log.over(place):
        g = place.gradient
        product = product or problem.hessian(place)
        u, Hu, edge = steihaug(g, product, radius, log)
        decrease = -float(g.dot(u) + u.dot(Hu) / 2)
        t = min(1.0, place.frames.ceiling(u))
        new = problem.place(place.frames.moved(u, t), twice=True)
        # Within rounding of the value the model is right (Conn, Gould, Toint): both differences get the same
        # slack.
        slack = max(1.0, abs(place.value)) * frames.eps * 1e3
        ratio = (place.value - new.value + slack) / (decrease + slack)
        if not ratio >= 0.25:
            radius = min(radius, float(u.norm())) / 4
        elif ratio > 0.75 and edge:
            radius = min(2 * radius, widest)
        if ratio > 0.1 and decrease >= 0:
            place, product = new, None
        elif radius < frames.eps * widest:
            log.status = (
                f"no step lowers the value {place.value}: rounding, or a gradient that is not its own"
            )
            break
    return place


def steihaug(
    g: Tensor, product: Callable[[Tensor], Tensor], radius: float, log: Log
) -> tuple[Tensor, Tensor, bool]:
    """Conjugate gradients for H u = -g, to the edge where they leave the radius or meet negative curvature.

    Ends at ||r|| <= ||g|| min(||g||, 0.1), so that the outer iteration converges quadratically, or at half of
    what is asked for.
    """
    u, Hu, r = torch.zeros_like(g), torch.zeros_like(g), g.clone()
    d, rr = -r, float(g.dot(g))
    size = math.sqrt(rr)
    target = max(size * min(size, 0.1), log.target() / 2)
    for _ in range(2 * len(g)):
        Hd = product(d)
        dHd, uu, ud, dd = (float(a.dot(b)) for a, b in ((d, Hd), (u, u), (u, d), (d, d)))
        alpha = rr / dHd if dHd > 0 else math.inf
        if alpha == math.inf or uu + 2 * alpha * ud + alpha * alpha * dd >= radius * radius:
            tau = (-ud + math.sqrt(max(0.0, ud * ud + dd * (radius * radius - uu)))) / dd
            return u.add_(d, alpha=tau), Hu.add_(Hd, alpha=tau), True
        for a, b in ((u, d), (Hu, Hd), (r, Hd)):
            a.add_(b, alpha=alpha)
        new = float(r.dot(r))
        if math.sqrt(new) <= target or log.late():
            break
        d, rr = d.mul_(new / rr).sub_(r), new
    return u, Hu, False
