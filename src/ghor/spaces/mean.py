"""Means of points: the Frechet mean, by the iteration of Karcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..linalg import full_precision, wide

if TYPE_CHECKING:
    from .base import Space

STEPS = 1000


@torch.no_grad()
@full_precision()
def mean(space: Space, points: Tensor, weights: Tensor | None = None) -> Tensor:
    """The point that minimises sum_k w_k dist(Y, points[k])^2: Y <- exp(Y, sum_k w_k log(Y, points[k])) until it stays.

    Points (K, ..., *point), stacked along dimension 0; weights (K) or (K, ...), nonnegative, which are divided by their
    sum. In double precision, and without a derivative. It starts at the point of the largest weight; points that are
    too far apart for `log`, or for a mean to be unique, raise ValueError.
    """
    batch = points.shape[: points.dim() - space.dims]
    if len(batch) == 0 or batch[0] == 0:
        raise ValueError(f"{space}.mean takes points stacked along dimension 0, got shape {tuple(points.shape)}")
    X = wide(points)
    X = X if X.dtype == points.dtype else space.project(X)  # what has been rounded is off by more than `log` allows
    w = torch.ones(len(X), device=X.device) if weights is None else weights.detach()
    if tuple(w.shape) != tuple(batch[: w.dim()]) or w.dim() == 0:
        raise ValueError(f"{space}.mean: {batch[0]} points take weights ({batch[0]}), got shape {tuple(w.shape)}")
    w = w.to(X.device, torch.float64).reshape(*w.shape, *[1] * (len(batch) - w.dim())).expand(batch)
    total = w.sum(0)
    if not bool(((w >= 0) & torch.isfinite(w)).all() and (total > 0).all()):
        raise ValueError(f"{space}.mean takes nonnegative weights with a positive sum")
    w = (w / total).reshape(*batch, *[1] * space.dims)
    Y = X.gather(0, w.argmax(0, keepdim=True).expand(1, *X.shape[1:]))[0]
    rounding, last = 16 * torch.finfo(X.dtype).eps, torch.inf
    for _ in range(STEPS):
        V = (w * space.log(Y.expand_as(X), X)).sum(0)
        length = float(torch.linalg.vector_norm(V) / (1 + torch.linalg.vector_norm(Y)))
        if length <= rounding or (length >= last and length <= 1e3 * rounding):  # rounding is all that is left
            return space.project(space.exp(Y, V)).to(points.dtype)
        Y, last = space.exp(Y, V), length
    raise ValueError(f"{space}.mean: no mean was found in {STEPS} iterations; are the points too far apart?")
