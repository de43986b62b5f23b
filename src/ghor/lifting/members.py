"""Weights of one kind as points (M, N, n), and back: where they lie, their radii, and their precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ghor._torch.precision import COMPUTE_DTYPE
from ghor._torch.sharding import ShardLayout, is_sharded
from ghor.constraints.registry import declared_radii, keep_radii
from ghor.constraints.validation import Warn, batch_dims, check_on_space
from ghor.lifting.groups import Weight
from ghor.spaces.frames import rows


class Members:
    """Weights of one kind, which a batch computes as one: as points of full precision on the unit sphere."""

    def __init__(self, weights: Sequence[Weight], warn: Warn) -> None:
        self.weights, self.warn, first = list(weights), warn, weights[0]
        self.params, self.names = [w.p for w in weights], [w.name for w in weights]
        self.gi, self.space, self.layout = first.gi, first.space, first.space.layout
        self.kind, self.dtype = first.p.dtype, COMPUTE_DTYPE.get(first.p.dtype, first.p.dtype)
        self.half, self.eps = self.dtype != self.kind, torch.finfo(self.kind).eps
        self.shards = ShardLayout(first.p, batch_dims(first.p, self.space)) if is_sharded(first.p) else None
        self.gathers = self.shards is not None and self.shards.gathers
        self.locate()
        self.shape, self.device = self.local[0].shape, first.p.device
        self.empty = not self.local[0].numel()  # a process may hold none of their points
        targets = list(map(self.layout.points, self.local))
        shared = all(map(shares_memory, targets, self.local))
        # The weights as points, if these are views: there one copy is enough.
        self.targets = targets if shared and not self.gathers and self.layout.padding is None else None
        # The radius of each point, (M, 1, 1), or one for all; None on unit spheres and where there is none.
        self.scale: float | Tensor | None = None

    # -- where they lie

    def local_parts(self, tensors: Sequence[Any]) -> list[Tensor]:
        """The part of each that this process works on: all of an ordinary one."""
        if self.shards is None:
            return list(tensors)
        return self.shards.local_tensors([t if is_sharded(t) else self.shards.place(t) for t in tensors])

    def locate(self) -> None:
        """Find where the weights are."""
        self.local = [t.detach() for t in self.local_parts(self.params)]

    def places(self) -> list[int]:
        """Where the weights are in memory."""
        params: list[Any] = self.params
        return [p.data_ptr() for p in (params if self.shards is None else [p.to_local() for p in params])]

    def here(self) -> list[Tensor]:
        """The parts of the weights that this process works on, as they are now."""
        return self.local_parts(self.params) if self.gathers else self.local

    def points(self, tensors: Sequence[Tensor]) -> Tensor:
        """Such parts as points; one is a view where strides allow."""
        return self.layout.points(tensors[0].detach() if len(tensors) == 1 else torch.stack(list(tensors)))

    def as_weights(self, P: Tensor) -> Tensor:
        """Points of all members in the shape of their weights, (count, *shape)."""
        return self.layout.weight(P, (len(self.params), *self.shape))

    def viewable(self, X: Tensor) -> Tensor:
        """Points in an order of memory of which `as_weights` is a view."""
        for room in (X, X.contiguous(), X.mT.contiguous().mT):  # the last is that of wide blocks
            if shares_memory(self.as_weights(room), room):
                return room
        raise AssertionError(f"{self.space} has no views of shape {tuple(self.shape)}")

    def padded(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of the weights' shape as points, padding rows as (1, 0, ...) in their unit of length."""
        X, r = self.points(tensors), self.space.radius
        if self.layout.padding is None:
            return X
        unit = 1.0 if isinstance(r, str) else r
        return self.layout.padded(X, self.shape, self.space.geometry.origin(X) * unit)

    def read(self) -> Tensor:
        """The weights as points in their own unit and precision, padding rows as (1, 0, ...)."""
        return self.padded(self.here())

    def gradients(self) -> Tensor:
        """Their gradients as points, of padding rows 0."""
        grads: list[Any] = [p.grad for p in self.params]
        grads = [g.to_dense() if g.is_sparse else g for g in grads]
        G = self.points(grads if self.shards is None else self.local_parts(grads)).to(self.dtype)
        return G if self.layout.padding is None else self.layout.padded(G, self.shape, 0.0)

    def write(self, points: Tensor) -> None:
        """Points to weights, in their unit and precision; padding rows stay."""
        if self.layout.padding is not None:
            points = self.layout.padded(points, self.shape, self.points(self.here()))
        self.write_parts(list(self.as_weights(points).unbind(0)))

    def write_parts(self, parts: list[Tensor]) -> None:
        """New values of `here()`, in one call."""
        if self.shards is None:
            torch._foreach_copy_(self.local, parts)
        else:
            self.shards.write(self.params, parts)

    # -- unit of length, and precision

    def radii(self, weights: Tensor, known: Tensor | None) -> float | Tensor | None:
        """The scale. Radii that a state or the declaration has hold as long as the weights are there."""
        if self.space.radius != "start":
            return None if self.space.radius == 1 else float(self.space.radius)
        weights = weights.to(self.dtype)
        radii = cast(Tensor, self.space.scale(weights))
        if known is None and self.shards is None:
            declared = [r for r in map(declared_radii, self.params) if r is not None]
            known = torch.cat(declared) if len(declared) == len(self.params) else None
        if known is not None:
            known = known.to(radii).reshape(radii.shape)
            radii = torch.where(self.off(weights / known).reshape(radii.shape), radii, known)
        if self.shards is None:
            for p, r in zip(self.params, rows(radii, len(self.params)), strict=True):
                keep_radii(p, r)
        return radii

    def unit(self, X: Tensor) -> Tensor:
        """Points of weights in full precision, on the unit sphere."""
        return X.to(self.dtype) if self.scale is None else X.to(self.dtype) / self.scale

    def in_units(self, y: Tensor) -> Tensor:
        """Points or vectors in the weights' unit of length."""
        return y if self.scale is None else y * self.scale

    def nearest(self, y: Tensor) -> Tensor:
        """The points that weights of half precision stand for."""
        return self.space.geometry.nearest(y) if self.half else y

    # -- whether they are on their space

    def off(self, y: Tensor) -> Tensor:
        """Which points are off their space, (M)."""
        geometry = self.space.geometry
        return ~(geometry.residual(y) <= geometry.tolerance(y, eps=self.eps))

    def refuse(self, off: Tensor) -> None:
        """Raise for the weights of points that are off their space."""
        bad = [i for i, there in enumerate(self.of_weights(off)) if there]
        check_on_space([self.params[i] for i in bad], self.space, [self.names[i] for i in bad], self.warn)
        if bool(self.off(self.unit(self.read())).any()):
            name = self.names[bad[0]]
            raise ValueError(f"{name} is not on {self.space}; take ghor.{self.space}.project(...) of it")

    def of_weights(self, mask: Tensor) -> list[bool]:
        """Which weights have a point that is marked."""
        marked: list[bool] = mask.view(len(self.params), -1).any(1).tolist()
        return marked


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether one is a view of the other."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
