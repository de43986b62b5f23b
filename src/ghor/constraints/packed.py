"""The space for a weight into which its module packs several matrices, kernels or a padding row.

Queries, keys and values stacked in one weight can have orthonormal columns together while none of the three
has them: a constraint other than the intended one is worse than none.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy

from ghor.constraints.selection import Selected
from ghor.spaces import Space, Sphere
from ghor.spaces.matrix import Matrices

GATES = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}

# Names of layers that hold several projections in one weight (timm, Hugging Face, FlashAttention, ...).
PAIRS = re.compile(r"kv_proj|to_kv|gate_up", re.IGNORECASE)
BY_HEAD = re.compile(r"query_key_value", re.IGNORECASE)  # those of each head in turn: GPT-NeoX, BLOOM, Falcon
FUSED = re.compile(r"qkv|c_attn", re.IGNORECASE)
ATTENTION = re.compile(r"in_proj|att", re.IGNORECASE)  # fused if it has three times as many outputs as inputs


def space_for(weight: Selected, space: Space, name: str) -> tuple[Space, str | None]:
    """The space for a weight in the modules that hold it, and a warning to put after its name, or None.

    Raises ValueError if a module of torch is known to stack matrices and the space has no `blocks`.
    """
    p = weight.p
    if is_lazy(p):  # has no shape to look at; `check_fit` refuses it
        return space, None
    for module, _ in weight.holders:
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.padding_idx is not None:
            return _with_padding(p, space, module.padding_idx)
    if not isinstance(space, Matrices):
        return space, None
    for module, leaf in weight.holders:
        _refuse_packed(module, leaf, p, space, name)
    advice = (ask(m, p, space, name) for m, _ in weight.holders for ask in (_kernels, _groups, _fused))
    return space, next(filter(None, advice), None)


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
    """Raise for matrices that a module of torch stacks along the rows of one parameter."""
    if isinstance(module, nn.MultiheadAttention) and leaf == "in_proj_weight":
        count, what = 3, "queries, keys and values"
    elif leaf.startswith(("weight_ih", "weight_hh")) and isinstance(module, tuple(GATES)):
        count = next(k for cls, k in GATES.items() if isinstance(module, cls))
        what = f"the {count} gates"
    else:
        return
    if space.blocks is not None or p.dim() != space.dims:
        return
    heads = getattr(module, "num_heads", None)
    each = f", {_written(space, (count, heads))} for those of every head" if heads else ""
    raise ValueError(
        f"{name} of shape {tuple(p.shape)} of {type(module).__name__} holds {what}, stacked: {space} would "
        f"constrain them as one matrix, and none of them. Write {_written(space, count)} for each{each}, or "
        f"{_written(space, 1)} if the stack itself is meant"
    )


def _kernels(module: nn.Module, p: Tensor, space: Matrices, name: str) -> str | None:
    """A warning for kernels that are a batch of small matrices."""
    if not isinstance(module, _ConvNd) or space.flatten > 1 or p.dim() <= 2:
        return None
    size = " x ".join(map(str, p.shape[-space.dims :]))
    channel = "input" if isinstance(module, _ConvTransposeNd) else "output"  # whichever comes first
    points = "vectors" if isinstance(space, Sphere) else "matrices"
    return (
        f"of shape {tuple(p.shape)} of {type(module).__name__} on {space} is a batch of {size} {points}, one "
        f"for each pair of channels; ghor.{replace(space, flatten=p.dim() - 1, along='rows')} takes the "
        f"kernels of an {channel} channel as one row"
    )


def _groups(module: nn.Module, p: Tensor, space: Matrices, name: str) -> str | None:
    """A warning for the kernels of several groups that are constrained as one matrix."""
    one = space.flatten > 1 and space.blocks is None and not isinstance(space, Sphere)
    if not one or not isinstance(module, _ConvNd) or module.groups == 1:
        return None
    return (
        f"of shape {tuple(p.shape)} of {type(module).__name__} has the kernels of {module.groups} groups, "
        f"which do not meet: {space} constrains them as one matrix; {_written(space, module.groups)} "
        f"constrains those of each group, {_written(space, 1)} is silent"
    )


def _fused(module: nn.Module, p: Tensor, space: Matrices, name: str) -> str | None:
    """A warning for a layer that probably holds queries, keys and values, judging by names and shapes.

    It is only a guess, so the weight is constrained as asked; giving `blocks` silences the warning.
    """
    if p.dim() != 2 or space.dims != 2 or p.shape[0] == p.shape[1]:
        return None
    transposed = type(module).__name__ == "Conv1D"  # Hugging Face's: the weight is in x out
    out, into = reversed(p.shape) if transposed else p.shape
    along = "columns" if transposed else "rows"
    if transposed and space.count > 1 and space.along == "rows":
        return (
            f"of shape {tuple(p.shape)} of Conv1D is transposed (in x out): {space} splits its inputs; "
            f"{_written(space, space.blocks, along)} splits its outputs"
        )
    if space.blocks is not None:
        return None
    holds = _projections(name, out, into, transposed)
    if holds is None:
        return None
    each = _written(space, f"{out} // head_dim", along)
    if holds == "by head":
        meant = f"They lie there head by head: {each} constrains each of every head"
    elif holds == "grouped":
        meant = f"There may be fewer keys and values than queries: {each} constrains every head"
    else:
        meant = (
            f"Probably {_written(space, holds, along)} was meant, or blocks=({holds}, heads) for every head"
        )
    return (
        f"of shape {tuple(p.shape)} of {type(module).__name__} seems to hold several projections (queries, "
        f"keys and values?): {space} constrains them as one matrix, and none of them. {meant}; "
        f"{_written(space, 1)} if the stack itself is meant"
    )


def _projections(name: str, out: int, into: int, transposed: bool) -> int | str | None:
    """How many projections the weight of this name and size probably holds, or how they lie there."""
    path, layer = name.rpartition(".")[0], ".".join(name.split(".")[-2:])
    fused = FUSED.search(layer) is not None
    if BY_HEAD.search(layer):
        return "by head"
    if PAIRS.search(layer) and not fused:
        return 2
    # A name without a path says nothing: there the shape alone decides, unless the layer is too small.
    likely = fused or transposed or ATTENTION.search(path) or (not path and into >= 32)
    if likely and out == 3 * into:
        return 3
    return "grouped" if fused else None


def _written(space: Matrices, blocks: object, along: Any = "rows") -> str:
    one = f"ghor.{replace(space, blocks=1, along=along)}"
    return one.replace("blocks=1", f"blocks={blocks}")
