"""Weights sharded over processes: DTensors, as `fully_shard` (FSDP2) and tensor parallelism make them.

    sharded along batch dimensions    each process has complete matrices and moves its own: no communication
    sharded within a matrix           gradient and weight are gathered; every process takes the same step with
                                      the full matrix and keeps its own shard of the weight

Shadows and state are DTensors too: placed like the weight in the first case, replicated in the second.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_sharded(p: Any) -> bool:
    """Whether p is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # if nobody has imported it, there are no DTensors
    return module is not None and isinstance(p, module.DTensor)


def reshard(model: Any) -> None:
    """Put the shards of FSDP2 back into modules that have held whole weights since a forward pass.

    What is written to those is lost with the next one, and their memory is freed.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in () if fsdp is None else model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def placement(p: Any) -> Any:
    """Mesh and placements of a DTensor, as a value to compare; None for an ordinary tensor."""
    return (p.device_mesh, p.placements) if is_sharded(p) else None


def full_tensor(p: Any) -> Tensor:
    """The values of the full tensor; for a DTensor a copy, and a collective call."""
    values: Tensor = p.detach().full_tensor() if is_sharded(p) else p.detach()
    return values


def distribute_like(X: Tensor, like: Any) -> Any:
    """Shard a tensor that every process has in full, like the DTensor `like`."""
    from torch.distributed.tensor import DTensor, Replicate

    replicated = DTensor.from_local(
        X, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False
    )
    return replicated.redistribute(placements=like.placements)


class ShardLayout:
    """Reads and writes DTensors of one kind whose first `batch_dims` dimensions count independent points.

    `gathers` tells whether points themselves are cut, so that each process has to work on full tensors.
    """

    def __init__(self, p: Any, batch_dims: int) -> None:
        from torch.distributed.tensor import Replicate, Shard

        self.mesh, self.placements, self.shape = p.device_mesh, p.placements, p.shape
        for q in self.placements:
            if type(q) not in (Replicate, Shard):
                raise ValueError(
                    f"a weight of shape {tuple(p.shape)} is placed as {self.placements}; only Shard and "
                    "Replicate are supported, so shard one dimension over one dimension of the mesh"
                )
        self.gathers = any(q.is_shard() and q.dim >= batch_dims for q in self.placements)
        self.working = (Replicate(),) * self.mesh.ndim if self.gathers else self.placements

    # -- weights and gradients -------------------------------------------------------------------------------

    def local_tensors(self, tensors: Sequence[Any]) -> list[Tensor]:
        """The tensors that this process works on: its own shards, not copied, or gathered full tensors.

        All are gathered in one message.
        """
        shards = [self._shard(t) for t in tensors]
        if not self.gathers:
            return shards
        return list(self._as_dtensor(torch.stack(shards), self.placements, 1).full_tensor().unbind(0))

    def write(self, weights: Sequence[Any], values: Sequence[Tensor]) -> None:
        """Write back the new values of `local_tensors(weights)`; no communication."""
        if self.gathers:
            stacked = self.to_dtensor(torch.stack(list(values)), 1)
            values = stacked.redistribute(placements=_shifted(self.placements, 1)).to_local().unbind(0)
        torch._foreach_copy_([self._shard(p) for p in weights], list(values))
        # A local shard has a version counter of its own: autograd must see that the DTensor has changed.
        torch.autograd.graph.increment_version(weights)

    def _shard(self, t: Any) -> Tensor:
        t = t.detach()
        shard: Tensor = (
            t if t.placements == self.placements else t.redistribute(self.mesh, self.placements)
        ).to_local()
        return shard

    # -- state -----------------------------------------------------------------------------------------------

    def to_dtensor(self, X: Tensor, extra_dims: int) -> Any:
        """A local tensor as the DTensor it is a part of, sharing its memory.

        Its first `extra_dims` dimensions do not belong to the weight.
        """
        return self._as_dtensor(X, self.working, extra_dims)

    def place(self, value: Any) -> Any:
        """Place a state tensor as this process works on it; an ordinary tensor is taken for the full one."""
        if not is_sharded(value):
            from torch.distributed.tensor import DTensor, Replicate

            value = DTensor.from_local(value, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        # State that has not the weight's shape, such as one number for each matrix, may not be divisible.
        alike = all(value.shape[q.dim] == self.shape[q.dim] for q in self.working if q.is_shard())
        return value.redistribute(self.mesh, self.working) if alike else value

    def _as_dtensor(self, X: Tensor, placements: Sequence[Any], extra_dims: int) -> Any:
        from torch.distributed.tensor import DTensor

        shape = list(X.shape)
        for q in placements:
            if q.is_shard():
                shape[q.dim + extra_dims] = self.shape[q.dim]
        order = sorted(range(X.dim()), key=X.stride, reverse=True)
        stride = torch.empty_permuted(shape, order, device="meta").stride()
        # Shape and stride are given: from_local would compute them as if all shards had the same size.
        return DTensor.from_local(
            X,
            self.mesh,
            _shifted(placements, extra_dims),
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )


def _shifted(placements: Sequence[Any], by: int) -> list[Any]:
    from torch.distributed.tensor import Shard

    return [Shard(q.dim + by) if q.is_shard() else q for q in placements]
