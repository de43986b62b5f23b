"""The space for a weight into which its module packs several matrices, kernels or a padding row.

Queries, keys and values stacked in one weight can have orthonormal columns together while none of the three
has them: a constraint other than the intended one is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy

from ghor.spaces import Space, Sphere
from ghor.spaces.matrix import Matrices

Holder = tuple[nn.Module, str]  # a module and its name for a parameter

GATES = {"LSTM": 4, "GRU": 3, "LSTMCell": 4, "GRUCell": 3}

# Names of layers that hold several projections in one weight (timm, Hugging Face, FlashAttention, ...).
PAIRS = re.compile(r"kv_proj|to_kv|gate_up", re.IGNORECASE)
BY_HEAD = re.compile(r"query_key_value", re.IGNORECASE)  # those of each head in turn: GPT-NeoX, BLOOM, Falcon
FUSED = re.compile(r"qkv|c_attn", re.IGNORECASE)
ATTENTION = re.compile(r"in_proj|att", re.IGNORECASE)  # fused if it has three times as many outputs as inputs


def packed_matrices(module: nn.Module, leaf: str) -> tuple[int, str] | None:
    """How many matrices a parameter of one of torch's modules stacks along its rows, and what they are."""
    if isinstance(module, nn.MultiheadAttention) and leaf == "in_proj_weight":
        return 3, "queries, keys and values"
    for kind, count in GATES.items():
        if isinstance(module, getattr(nn, kind)) and re.match(r"weight_[ih]h", leaf):
            return count, f"the {count} gates"
    return None


def space_for(holders: Sequence[Holder], p: Tensor, space: Space, name: str) -> tuple[Space, str | None]:
    """The space for a parameter that these modules hold, and a warning to put after its name, or None.

    Raises ValueError if a module of torch is known to stack matrices and the space has no `blocks`.
    """
    if is_lazy(p):  # has no shape to look at; `check_parameter` refuses it
        return space, None
    for module, _ in holders:
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.padding_idx is not None:
            return _with_padding(p, space, module.padding_idx)
    if not isinstance(space, Matrices):
        return space, None
    for module, leaf in holders:
        _refuse_packed(module, leaf, p, space, name)
        if isinstance(module, _ConvNd) and space.flatten == 1 and p.dim() > 2:
            size = " x ".join(map(str, p.shape[-space.dims :]))
            channel = "input" if isinstance(module, _ConvTransposeNd) else "output"  # whichever comes first
            points = "vectors" if isinstance(space, Sphere) else "matrices"
            return space, (
                f"of shape {tuple(p.shape)} of {type(module).__name__} on {space} is a batch of {size} "
                f"{points}, one for each pair of channels; "
                f"ghor.{replace(space, flatten=p.dim() - 1, along='rows')} takes the kernels of an "
                f"{channel} channel as one row"
            )
        grouped = isinstance(module, _ConvNd) and module.groups > 1
        if grouped and space.flatten > 1 and space.blocks is None:
            return space, (
                f"of shape {tuple(p.shape)} of {type(module).__name__} has the kernels of {module.groups} "
                f"groups, which do not meet: {space} constrains them as one matrix; "
                f"{_written(space, module.groups)} constrains those of each group, {_written(space, 1)} is "
                "silent"
            )
    return space, next(filter(None, (_fused(m, p, space, name) for m, _ in holders)), None)


def _with_padding(p: Tensor, space: Space, row: int) -> tuple[Space, str | None]:
    """The space with a padding row; on a space of matrices the row moves with the matrix, and we warn."""
    across = getattr(space, "along", "rows") == "columns"  # points that have an entry in every row
    if "padding_idx" in {f.name for f in fields(space)} and p.dim() > space.dims and not across:
        given: Any = space
        return (replace(given, padding_idx=row) if given.padding_idx is None else space), None
    if p.dim() != space.dims and not across:
        return space, None
    return space, (
        f"has the padding row {row}, which is a row of the matrix on {space} and moves with it; "
        "ghor.Sphere() leaves it alone"
    )


def _refuse_packed(module: nn.Module, leaf: str, p: Tensor, space: Matrices, name: str) -> None:
    packed = packed_matrices(module, leaf)
    if packed is None or space.blocks is not None or p.dim() != space.dims:
        return
    count, what = packed
    heads = getattr(module, "num_heads", None)
    each = f", {_written(space, (count, heads))} for those of every head" if heads else ""
    raise ValueError(
        f"{name} of shape {tuple(p.shape)} of {type(module).__name__} holds {what}, stacked: {space} would "
        f"constrain them as one matrix, and none of them. Write {_written(space, count)} for each{each}, or "
        f"{_written(space, 1)} if the stack itself is meant"
    )


def _fused(module: nn.Module, p: Tensor, space: Matrices, name: str) -> str | None:
    """A warning for a layer that probably holds queries, keys and values, judging by names and shapes.

    It is only a guess, so the weight is constrained as asked; giving `blocks` silences the warning.
    """
    if p.dim() != 2 or space.dims != 2:
        return None
    transposed = type(module).__name__ == "Conv1D"  # Hugging Face's: the weight is in x out
    out, into = reversed(p.shape) if transposed else p.shape
    along = "columns" if transposed else "rows"
    if transposed and out != into and space.count > 1 and space.along == "rows":
        return (
            f"of shape {tuple(p.shape)} of Conv1D is transposed (in x out): {space} splits its inputs; "
            f"{_written(space, space.blocks, along)} splits its outputs"
        )
    layer, path = ".".join(name.split(".")[-2:]), name.rpartition(".")[0]
    pair, by_head = PAIRS.search(layer) and not FUSED.search(layer), BY_HEAD.search(layer)
    # A name without a path says nothing: there the shape alone decides, unless the layer is too small.
    three = out == 3 * into and (transposed or (not path and into >= 32) or ATTENTION.search(path))
    fused = pair or by_head or FUSED.search(layer) or three
    if space.blocks is not None or out == into or not fused:
        return None
    each, count = _written(space, f"{out} // head_dim", along), 2 if pair else 3
    if by_head:
        meant = f"They lie there head by head: {each} constrains each of every head"
    elif pair or out == 3 * into:
        meant = (
            f"Probably {_written(space, count, along)} was meant, or blocks=({count}, heads) for every head"
        )
    else:
        meant = f"There may be fewer keys and values than queries: {each} constrains every head"
    return (
        f"of shape {tuple(p.shape)} of {type(module).__name__} seems to hold several projections (queries, "
        f"keys and values?): {space} constrains them as one matrix, and none of them. {meant}; "
        f"{_written(space, 1)} if the stack itself is meant"
    )


def _written(space: Matrices, blocks: object, along: Any = "rows") -> str:
    one = f"ghor.{replace(space, blocks=1, along=along)}"
    return one.replace("blocks=1", f"blocks={blocks}")
