"""What a batch shows of itself in state[p], in each weight's shape, and how it is read from there again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ghor.lifting.batch import Batch
    from ghor.lifting.members import Members

FRAME_KEYS = ("section", "frame_anchor")  # what a frame keeps in state[p]
POINT_KEYS = ("master", "decay_target")  # the point, where the weight is not it to the bit; decay's anchor
# The radii of spheres of any radius; the weight that the rule reads; and how often the weight has moved.
OUR_KEYS = (*FRAME_KEYS, *POINT_KEYS, "radius", "developed", "moves")

BESIDE = ".A"  # state[p]["momentum_buffer"] has K in the weight's shape, "momentum_buffer.A" the A beside it

States = Sequence[dict[str, Any]]


# -- from state[p] -------------------------------------------------------------------------------------------


def here(at: Members, state: dict[str, Any]) -> dict[str, Any]:
    """A weight's state with tensors where this process works on them."""
    out = dict(state)
    for key, value in state.items():
        if torch.is_tensor(value) and value.dim() > 0:
            local = value if at.shards is None else at.shards.place(value).to_local()
            out[key] = local.to(at.device)
    return out


def held(at: Members, states: States) -> dict[str, Tensor]:
    """What the states keep of points and frames."""
    found = {}
    for key in (k for k in (*FRAME_KEYS, *POINT_KEYS, "radius") if k in states[0]):
        X = torch.stack([s[key] for s in states])
        X = X.to(at.dtype.to_real() if key == "radius" else at.dtype)
        found[key] = at.layout.points(X).clone() if key in POINT_KEYS else X
        if key in FRAME_KEYS:
            found[key] = X.reshape(-1, *X.shape[-2:])
    return found


def gathered(b: Batch, states: States) -> dict[str, Any]:
    """The rule's state for H: numbers per coordinate in H's layout, others from the first member."""
    state: dict[str, Any] = {}
    for key, value in states[0].items():
        if key in OUR_KEYS or key.endswith(BESIDE):
            continue
        if is_per_coordinate(value, b.shape):
            state[key] = like_H(b, key, states)
        elif _is_of_points(b, value):
            state[key] = torch.cat([s[key].reshape(-1, *value.shape[-2:]) for s in states])
        else:
            state[key] = value.clone() if torch.is_tensor(value) else value
    return state


def like_H(b: Batch, key: str, states: States) -> Tensor:
    """State that lies as weights do, as H does: a copy, in H's precision if its numbers have digits."""
    value = states[0][key]
    has_digits = value.is_floating_point() or value.is_complex()
    room = torch.empty_like(b.H, dtype=None if has_digits else value.dtype)
    if not b.stacks:
        return room.copy_(value)
    first, *beside = _faces(b, room)
    first.copy_(b.at.points([s[key] for s in states]))
    for A in beside:
        A.copy_(torch.stack([s[key + BESIDE] for s in states]).reshape(A.shape))
    return room


# -- to state[p] ---------------------------------------------------------------------------------------------


def shown(b: Batch) -> list[dict[str, Any]]:
    """state[p] of every weight: views in its shape; the members share what is not per coordinate."""
    columns = _of_rule(b) | {key: _per_point(b, value) for key, value in b.frame.tensors().items()}
    if torch.is_tensor(b.scale):
        columns["radius"] = [r.reshape(b.layout.batch(b.shape)) for r in _per_point(b, b.scale)]
    for key, points in (("master", b.master), ("decay_target", b.anchor)):
        if points is not None:
            columns[key] = list(b.at.as_weights(points).unbind(0))
    if b.shards is not None:
        columns = {k: [_sharded(b, v) for v in column] for k, column in columns.items()}
    columns["moves"] = [b.moves] * len(b.params)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _of_rule(b: Batch) -> dict[str, list[Any]]:
    """What the rule keeps, and the weight that it reads."""
    columns: dict[str, list[Any]] = {}
    for key, value in (b.state | ({} if b.developed is None else {"developed": b.developed})).items():
        if torch.is_tensor(value) and value.shape == b.H.shape and b.stacks:
            first, *beside = _faces(b, value)
            columns[key] = list(b.at.as_weights(first).unbind(0))
            for A in beside:
                columns[key + BESIDE] = _per_point(b, A)
        else:
            columns[key] = _per_point(b, value) if _is_of_points(b, value) else [value] * len(b.params)
    return columns


def _per_point(b: Batch, X: Tensor) -> list[Tensor]:
    """Matrices (M, ...) as those of each weight."""
    each = X.reshape(len(b.params), *b.layout.batch(b.shape), *X.shape[1:])
    return list(each.unbind(0))


def _sharded(b: Batch, value: Any) -> Any:
    assert b.shards is not None
    return b.shards.to_dtensor(value, 0) if torch.is_tensor(value) and value.dim() > 0 else value


def _faces(b: Batch, X: Tensor) -> list[Tensor]:
    """What lies as H does, in a point's shape, and what there may be beside it: the A of (K, A)."""
    return b.frame.blocks(X) if X.dim() == 1 else [X]


def _is_of_points(b: Batch, value: Any) -> bool:
    """Whether an entry of a state has a matrix, or a number (1, 1), for each point."""
    return b.stacks and torch.is_tensor(value) and value.dim() > 1


def is_per_coordinate(value: Any, shape: Sequence[int]) -> bool:
    """Whether an entry of a state has a number for each coordinate of the weight."""
    return torch.is_tensor(value) and value.dim() > 0 and value.shape == shape


def shared_values(state: dict[str, Any] | None, shape: Sequence[int]) -> str:
    """The part of a weight's state that members of a batch must have in common."""
    out = {}
    for k, v in (state or {}).items():
        ours = k in OUR_KEYS and k != "moves"
        differs = ours or is_per_coordinate(v, shape) or (torch.is_tensor(v) and v.dim() > 1)
        out[k] = None if differs else v.tolist() if torch.is_tensor(v) else v
    return repr(sorted(out.items()))
