"""Means of points: where the logarithms cancel, or where the sum of the squared distances is least."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ghor._torch.precision import full_precision, wide
from ghor.linalg import size
from ghor.spaces.points import Points
from ghor.spaces.retraction import geodesic

if TYPE_CHECKING:
    from ghor.spaces.base import Space
    from ghor.spaces.group import GroupSpace

S = TypeVar("S", bound="Space")
STEPS = 1000  # most iterations of `center`, which converges linearly: slowly for points that are far apart


@torch.no_grad()
@full_precision()
def mean(
    space: S, points: Tensor, weights: Tensor | None, of: Callable[[S, Tensor, Tensor], Tensor]
) -> Tensor:
    """The mean of points (K, ..., *point), `of` points (K, M, N, n) in double precision."""
    x, w = _stacked(space, points, weights)
    if points.numel() == 0:
        return points[0].clone()
    y = space.geometry.nearest(of(space.geometry, x, w))
    out: Tensor = Points(space, "p", [wide(points[0])]).back(y, "p")
    return out.to(points.dtype)


def _stacked(space: Space, points: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Points (K, M, N, n) in double precision, and their weights (K, M), which add up to 1."""
    if not isinstance(points, Tensor):
        raise TypeError(
            f"{space}.mean takes points stacked along dimension 0, got a {type(points).__name__}; write "
            "torch.stack(points)"
        )
    if points.dim() <= space.dims or len(points) == 0:
        raise ValueError(
            f"{space}.mean takes points stacked along dimension 0, got shape {tuple(points.shape)}"
        )
    if not bool(torch.isfinite(points).all()):
        raise ValueError(f"{space}.mean: there are NaN or infinite entries among the points")
    there, batch = Points(space, "p", [wide(points)]), space.layout.batch(points.shape)
    w = torch.ones(len(points)) if weights is None else weights.detach()
    if w.dim() == 0 or tuple(w.shape) != tuple(batch[: w.dim()]):
        raise ValueError(
            f"{space}.mean: {len(points)} points take weights ({len(points)}), got shape {tuple(w.shape)}"
        )
    w = w.to(points.device, torch.float64).reshape(*w.shape, *[1] * (len(batch) - w.dim()))
    w = w.expand(batch).reshape(len(points), -1)
    if not bool(((w >= 0) & torch.isfinite(w)).all() and (w.sum(0) > 0).all()):
        raise ValueError(f"{space}.mean takes nonnegative weights with a positive sum")
    x = there.points[0]
    if there.dtype != points.dtype:  # rounded points are off the space
        x = space.geometry.nearest(x)
    x = x.unflatten(0, (len(points), -1))
    # Points without weight may be too far away for `log`: there the point of the largest weight stands.
    x = torch.where(w[..., None, None] > 0, x, heaviest(x, w))
    return x, w / w.sum(0)


def heaviest(x: Tensor, w: Tensor) -> Tensor:
    """The point of the largest weight, (K, M, N, n) -> (M, N, n)."""
    return x.gather(0, w.argmax(0)[None, :, None, None].expand(1, *x.shape[1:]))[0]


def center(space: Space, x: Tensor, w: Tensor) -> Tensor:
    """y with sum_k w_k log(y, x_k) = 0, by y <- exp(y, t sum_k w_k log(y, x_k)) from the heaviest point.

    t is 1, and less where the curvature -k is negative: the second derivative of half the sum of squared
    distances is between 1 and the mean of d coth(d) <= sqrt(1 + d^2), d = sqrt(k) dist, hence
    t = 2/(1 + sqrt(1 + k sum_k w_k dist^2)).
    """
    apart = ValueError(
        f"{space}.mean: no mean was found in {STEPS} iterations; are the points too far apart?"
    )
    y, rounding = heaviest(x, w), 16 * torch.finfo(x.dtype).eps
    last, done = torch.full((), torch.inf), torch.zeros((), dtype=torch.bool, device=x.device)
    for _ in range(STEPS):
        Y = y.expand_as(x).flatten(0, 1)
        U = space.log(Y, x.flatten(0, 1))
        dist = space.norm(Y, U).unflatten(0, (len(w), -1))
        v = (w[..., None, None] * U.unflatten(0, (len(w), -1))).sum(0)
        t = 2 / (1 + (1 - space.curvature * (w * dist * dist).sum(0)).sqrt())
        moved = space.exp(y, v * t[:, None, None])
        # Done when the step is at rounding level, measured in the space's own norm and relative to the
        # spread, so that neither the size of the points nor their distance from E counts. Rounding in the
        # logarithms may keep the step longer than that: then done when it no longer shrinks and is a small
        # part of the spread, or changes only the last digits of y (points close together).
        length, spread = space.norm(y, v), (w * dist).sum(0)
        if not bool(torch.isfinite(length).all()):
            raise apart
        still = (size(moved - y) <= 1e3 * rounding * size(y))[..., 0, 0]
        small = still | (length <= rounding**0.5 * spread)
        done = done | (length <= rounding * spread) | ((length >= last) & small)
        if bool(done.all()):
            return moved
        y, last = moved, length
    raise apart


def least_squares(space: GroupSpace, x: Tensor, w: Tensor) -> Tensor:
    """The minimiser of sum_k w_k dist(y, x_k)^2 near the center, by Newton's method.

    Steps are halved until the sum falls; done where no fall is left that the sum could show.
    """

    def squares(y: Tensor) -> Tensor:
        V = space.global_rep(space.section(y), space.log(y.expand_as(x), x))
        return (w * space.hor_inner(V, V)).sum(0)

    y = center(space, x, w)
    for _ in range(50):
        L = space.section(y)
        with torch.enable_grad():
            W = torch.zeros_like(y, requires_grad=True)
            space.hor_(hor := W.clone())
            value = squares(space.point(space.moved(L, hor, geodesic, torch.inf, 0)))
            (G,) = torch.autograd.grad(value.sum(), W, create_graph=True)
            rows = [torch.autograd.grad(g.sum(), W, retain_graph=True)[0] for g in G.flatten(-2).unbind(-1)]
        value, G = value.detach(), G.detach().flatten(-2)
        W = _newton(torch.stack(rows, -3).flatten(-2), G)
        last = -(G * W).sum(-1) <= 64 * torch.finfo(y.dtype).eps * value
        Delta, step = space.velocity(L, W.view_as(y)), torch.ones_like(value)
        for _ in range(60):
            moved = space.retract(y, Delta * step[:, None, None], geodesic)
            good = last | (squares(moved) < value)
            if bool(good.all()):
                break
            step = torch.where(good, step, step / 2)
        # equivalent(branch): sixty halvings leave a point where it is
        y = torch.where(good[:, None, None], moved, y)
        if bool(last.all()) or not bool(good.any()):
            break
    return y


def _newton(H: Tensor, G: Tensor) -> Tensor:
    """-|H|^-1 G, downhill also where H is not definite, (M, d, d) and (M, d).

    Scaled to the diagonal 1, so that no unit of length counts; coordinates that are not there have 0.
    """
    d = H.diagonal(dim1=-2, dim2=-1).abs()
    d = torch.where(d > 0, d, 1).rsqrt()
    e, V = torch.linalg.eigh(d[..., :, None] * (H + H.mT) / 2 * d[..., None, :])
    e = torch.where(e.abs() > 1e-8, e.abs(), torch.inf)
    W: Tensor = V @ ((V.mT @ (d * G)[..., None]) / e[..., None])
    return -d * W[..., 0]
