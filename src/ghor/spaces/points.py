"""Weights as points: how a formula on points (M, N, n) takes weights in their layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import reduce, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from ghor._torch.precision import COMPUTE_DTYPE, full_precision

if TYPE_CHECKING:
    from ghor.spaces.base import Space

F = TypeVar("F", bound=Callable[..., Any])


def on_points(kinds: str) -> Callable[[F], F]:
    """Let a formula on points (M, N, n) of one sphere, group, ... take weights in their layout.

    `kinds` says what goes in and comes out, as "pv>p" for `exp`:

        p, v     points, tangent vectors (and gradients): tensors of the weight's shape, in its unit of length
        x        a matrix for each point, (..., a, b), as a frame is
        n        a number for each point;  d a length, m a square of one: in the weight's unit
        b        a bool for all points together

    Shapes are broadcast, half precision is computed in float32, and autocast is off. A formula with an
    argument `eps` is told the rounding of the weight's dtype.
    """
    takes, gives = kinds.split(">")

    def decorate(formula: F) -> F:
        parameters = inspect.signature(formula).parameters
        names = list(parameters)[1 : 1 + len(takes)]

        @wraps(formula)
        @full_precision()
        def method(self: Space, *args: Any, **options: Any) -> Any:
            if self.of_points or len(args) + len(options.keys() & set(names)) < len(takes):
                return formula(self, *args, **options)  # which says what is missing
            tensors = [*args[: len(takes)], *(options.pop(name) for name in names[len(args) :])]
            if "eps" in parameters:
                options.setdefault("eps", torch.finfo(tensors[0].dtype).eps)
            there = Points(self, takes, tensors)
            if takes == "pp":
                self.check_points(formula.__name__, there.points, torch.finfo(tensors[0].dtype).eps)
            return there.back(formula(self.geometry, *there.points, *args[len(takes) :], **options), gives)

        method.kinds = kinds  # type: ignore[attr-defined]
        return cast(F, method)

    return decorate


class Points:
    """The tensors of a call as points and vectors of radius one, and the way back."""

    def __init__(self, space: Space, kinds: str, tensors: Sequence[Tensor]) -> None:
        self.space, self.layout = space, space.layout
        full = [X.to(COMPUTE_DTYPE.get(X.dtype, X.dtype)) for X in tensors]
        shaped = [X for X, kind in zip(full, kinds, strict=True) if kind != "x"]
        self.shape = torch.broadcast_shapes(*(X.shape for X in shaped))
        if 0 not in self.shape:  # an empty batch has no points to be wrong
            space.check_shape(self.shape)
        self.dtype = reduce(torch.promote_types, (X.dtype for X in tensors))
        self.number = torch.empty((), dtype=self.dtype).real.dtype  # torch.compile knows no dtype.to_real
        self.batch = self.layout.batch(self.shape)
        self.first = self.layout.points(shaped[0].expand(self.shape))
        self.scale = space.scale(self.first)
        self.points = [self._taken(X, kind) for X, kind in zip(full, kinds, strict=True)]

    def _taken(self, X: Tensor, kind: str) -> Tensor:
        if kind == "x":
            return X.expand(*self.batch, *X.shape[-2:]).reshape(-1, *X.shape[-2:])
        x = self.layout.points(X.expand(self.shape))
        if self.layout.padding is not None:
            row = self.space.geometry.distinct(x) * self.scale if kind == "p" else 0.0
            x = self.layout.padded(x, self.shape, row)
        return x if self.space.radius == 1 else x / self.scale

    def back(self, out: Any, kind: str) -> Any:
        if kind == "b":
            return bool(out.all())
        if kind == "x":
            return out.reshape(*self.batch, *out.shape[1:]).to(self.dtype)
        unit = None if kind == "n" or self.space.radius == 1 else self.scale
        if kind in "pv":
            out = out if unit is None else out * unit
            out = self.layout.padded(out, self.shape, self.first if kind == "p" else 0.0)
            return self.layout.weight(out, self.shape).to(self.dtype)
        if unit is not None:
            unit = unit[..., 0, 0] if isinstance(unit, Tensor) else unit
            out = out * (unit * unit if kind == "m" else unit)
        return out.reshape(self.batch).to(self.number)
