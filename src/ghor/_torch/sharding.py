"""Weights sharded over processes: DTensors, as `fully_shard` (FSDP2) and tensor parallelism make them.

    split along batch dimensions    each process has whole matrices and moves its own; nothing is sent
    split within a matrix           gradient and weight are gathered, each process makes the same step of the whole
                                    matrix and keeps its own piece of the weight

Shadow and state are DTensors too: placed as the weight in the first case, a copy on every process in the
second.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_sharded(p: Any) -> bool:
    """Whether p is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # where nobody has imported it, there is none
    return module is not None and isinstance(p, module.DTensor)


def placing(p: Any) -> Any:
    """How p is placed, as a value to compare."""
    return (p.device_mesh, p.placements) if is_sharded(p) else None


def gathered(p: Any) -> Tensor:
    """The values of a whole parameter; of a DTensor a copy, and to be called by all processes."""
    values: Tensor = p.detach().full_tensor() if is_sharded(p) else p.detach()
    return values


def local_pieces(params: Sequence[Tensor], space: Any) -> list[Tensor]:
    """What this process works on of weights of one kind."""
    return Shards(params[0], space).pieces(params) if is_sharded(params[0]) else list(params)


class Shards:
    """How one kind of DTensors on a space is worked on: in its own pieces, or `gathered`."""

    def __init__(self, p: Any, space: Any) -> None:
        from torch.distributed.tensor import Replicate, Shard

        self.mesh, self.placements, self.shape = p.device_mesh, p.placements, p.shape
        for q in self.placements:
            if type(q) not in (Replicate, Shard):
                raise ValueError(
                    f"a weight of shape {tuple(p.shape)} on {space} is placed as {self.placements}; the processes can "
                    "work on Shard and Replicate, so shard one dimension over one dimension of the mesh"
                )
        batch = p.dim() - space.dims - (getattr(space, "padding_idx", None) is not None)
        self.gathers = any(q.is_shard() and q.dim >= batch for q in self.placements)
        self.working = (Replicate(),) * self.mesh.ndim if self.gathers else self.placements

    # -- weights and gradients ----------------------------------------------------------------------------------------

    def pieces(self, tensors: Sequence[Any]) -> list[Tensor]:
        """What this process works on: its own pieces themselves, or the whole tensors, in one message."""
        here = [self._piece(t) for t in tensors]
        return (
            list(self._as_dtensor(torch.stack(here), self.placements, 1).full_tensor().unbind(0))
            if self.gathers
            else here
        )

    def write(self, weights: Sequence[Any], values: Sequence[Tensor]) -> None:
        """Into the weights what became of their `pieces`; nothing is sent."""
        if self.gathers:
            parts = self.whole(torch.stack(list(values)), 1).redistribute(
                placements=_shifted(self.placements, 1)
            )
            torch._foreach_copy_([self._piece(p) for p in weights], list(parts.to_local().unbind(0)))
        torch.autograd.graph.increment_version(weights)  # pieces have counters of their own

    def _piece(self, t: Any) -> Tensor:
        t = t.detach()
        piece: Tensor = (
            t if t.placements == self.placements else t.redistribute(self.mesh, self.placements)
        ).to_local()
        return piece

    # -- state --------------------------------------------------------------------------------------------------------

    def whole(self, X: Tensor, lead: int) -> Any:
        """What this process works on, as one DTensor that shares its memory."""
        return self._as_dtensor(X, self.working, lead)

    def placed(self, value: Any) -> Any:
        """A state tensor where it belongs; one that is no DTensor is taken for a copy of the whole."""
        if not is_sharded(value):
            from torch.distributed.tensor import DTensor, Replicate

            value = DTensor.from_local(value, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        alike = all(value.shape[q.dim] == self.shape[q.dim] for q in self.working if q.is_shard())
        return value.redistribute(self.mesh, self.working) if alike else value

    def _as_dtensor(self, X: Tensor, placements: Sequence[Any], lead: int) -> Any:
        """A DTensor from this process' part, whose first `lead` dimensions the weight does not have."""
        from torch.distributed.tensor import DTensor

        shape = list(X.shape)
        for q in placements:
            if q.is_shard():
                shape[q.dim + lead] = self.shape[q.dim]
        order = sorted(range(X.dim()), key=X.stride, reverse=True)
        stride = torch.empty_permuted(shape, order, device="meta").stride()
        shifted = _shifted(placements, lead)
        return DTensor.from_local(
            X, self.mesh, shifted, run_check=False, shape=torch.Size(shape), stride=stride
        )


def _shifted(placements: Sequence[Any], by: int) -> list[Any]:
    from torch.distributed.tensor import Shard

    return [Shard(q.dim + by) if q.is_shard() else q for q in placements]


def spread(X: Tensor, like: Any) -> Any:
    """A tensor that all processes have, sharded as another."""
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = DTensor.from_local(
        X, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False
    )
    return everywhere.redistribute(placements=like.placements)
