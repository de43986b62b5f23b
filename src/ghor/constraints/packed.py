"""Weights that hold more than one matrix, or a matrix in other dimensions than meant: what a space comes to
on them.

A constraint that is not the one meant is worse than none: the stacked weight of queries, keys and values can
have orthonormal columns while none of the three has.
"""

from __future__ import annotations

import re
from dataclasses import replace

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ghor.spaces import Space, Sphere
from ghor.spaces.matrix import MatrixSpace

GATES = {"LSTM": 4, "GRU": 3, "LSTMCell": 4, "GRUCell": 3}


def parts(module: nn.Module, leaf: str) -> tuple[int, str] | None:
    """How many matrices a parameter of a module of torch's holds, stacked along its rows, and what they
    are."""
    if isinstance(module, nn.MultiheadAttention) and leaf == "in_proj_weight":
        return 3, "queries, keys and values"
    for kind, count in GATES.items():
        if isinstance(module, getattr(nn, kind)) and re.match(r"weight_[ih]h", leaf):
            return count, f"the {count} gates"
    return None


def meant(module: nn.Module, leaf: str, p: Tensor, space: Space, name: str) -> tuple[Space, str | None]:
    """The space for a weight of this module, and what there is to warn of; ValueError for what nobody
    means."""
    if not isinstance(space, MatrixSpace):
        return space, None
    packed, kind = parts(module, leaf), type(module).__name__
    if packed is not None and space.blocks is None and p.dim() == space.dims:
        count, what = packed
        heads = getattr(module, "num_heads", None)
        each = f", {_said(space, (count, heads))} for those of every head" if heads else ""
        raise ValueError(
            f"{name} of shape {tuple(p.shape)} of {kind} holds {what}, stacked: {space} would constrain them as one "
            f"matrix, and none of them. Write {_said(space, count)} for each{each}, or {_said(space, 1)} if the stack "
            "itself is meant"
        )
    if isinstance(module, _ConvNd) and space.flatten == 1 and p.dim() > 2:
        size = " x ".join(map(str, p.shape[-space.dims :]))
        points = "vectors" if isinstance(space, Sphere) else "matrices"
        return space, (
            f"{name} of shape {tuple(p.shape)} of {kind} on {space} is a batch of {size} {points}, one for each pair "
            f"of channels; {_said(space, flatten=p.dim() - 1)} takes the kernels of an output channel as one row"
        )
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        if isinstance(space, Sphere) and space.padding_idx is None and p.dim() > space.dims:
            return replace(space, padding_idx=module.padding_idx), None
        if p.dim() == space.dims:
            return space, (
                f"the padding row {module.padding_idx} of {name} is a row of the matrix on {space}, and moves with it; "
                "ghor.Sphere() leaves it alone"
            )
    return space, None


def _said(space: MatrixSpace, blocks: int | tuple[int, ...] | None = None, flatten: int = 1) -> str:
    return f"ghor.{replace(space, blocks=blocks, flatten=flatten)}"
