"""state[p] of the weights of a stack: views of the stack's own tensors, and whether they are still in
place."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ghor.lifting.stack import Stack

# Our keys in state[p], beside those of the base optimizer: the section (transported: "section", implicit:
# "anchor"), the point in float32 where the weight is half precision and the section does not hold it, the
# point that weight decay draws the weight to, and the number of moves.
SECTION_KEYS = ("section", "anchor", "master")
POINT_KEYS = (*SECTION_KEYS, "drawn_to")
STATE_KEYS = (*POINT_KEYS, "moves")

_version = operator.attrgetter("_version")


@dataclass(frozen=True)
class Seen:
    """What a stack, its weights and their states were when we last looked: what differs was changed by
    others."""

    dicts: tuple[dict[str, Any] | None, ...] = ()  # state[p], where there is one
    values: tuple[Any, ...] = ()  # what these held, kept alive: an id could come again
    bound: tuple[Any, ...] | None = None  # the values of the stack's state that they are views of
    shared: tuple[Tensor, ...] = ()  # tensors that all weights share, such as a step count,
    shared_versions: tuple[int, ...] = ()  # and their versions
    versions: tuple[int, ...] = ()  # of the weights
    expected: Tensor | None = None  # what `Section.reading` has to give


def is_per_weight(value: Any, like: Tensor) -> bool:
    """Whether a state tensor belongs to the coordinates of a weight: of its shape, or of that with ones
    (norms)."""
    return torch.is_tensor(value) and value.dim() == like.dim() > 0


def is_stacked(value: Any, s: Stack) -> bool:
    """The same for a tensor of a stack's state: then it has a leading dimension for the weights."""
    return is_per_weight(value, s.H) and (not s.stacked or len(value) == len(s.params))


def shared_values(p: Tensor, state: dict[str, Any]) -> tuple[Any, ...]:
    """What the members of a stack must agree in: the keys of their states, and all values that are not per
    weight."""
    shared = {k: v for k, v in state.items() if k not in POINT_KEYS and not is_per_weight(v, p)}
    values = ((k, v.tolist() if torch.is_tensor(v) else v) for k, v in shared.items())
    return tuple(sorted(state)), repr(sorted(values))


def gather(s: Stack, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of a stack from its members': stacked where it is per weight, else shared."""
    out = {}
    for key, value in states[0].items():
        if key in STATE_KEYS:
            continue
        if not torch.is_tensor(value):
            out[key] = value
        elif not is_per_weight(value, s.params[0]):
            out[key] = value.clone()
        else:
            values = [s.placed(state[key]) for state in states]
            stacked = torch.stack(values) if s.stacked else values[0]
            same = (
                value.is_floating_point() == s.H.is_floating_point()
                and value.is_complex() == s.H.is_complex()
            )
            out[key] = stacked.to(s.H.dtype) if same else stacked
    return out


def gather_section(s: Stack, states: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """The tensors of the members' sections and anchors, (M, ...) each, in the dtype of computation."""
    held = {}
    for key in POINT_KEYS:
        if key in states[0]:
            values = [s.local(s.placed(state[key])) for state in states]
            X = torch.stack(values).to(s.H)
            held[key] = s.points(s.space.read(X)) if key == "drawn_to" else X.flatten(0, len(s.batch) - 1)
    return held


def member(s: Stack, i: int) -> dict[str, Any]:
    """state[p] of the i-th weight: views of the stacked tensors; other values are shared by the whole
    stack."""
    out = {k: s.row(v, i) if s.stacked and is_stacked(v, s) else v for k, v in s.state.items()}
    ours = {k: s.whole(v.unflatten(0, s.batch)[i], 0) for k, v in s.section.tensors().items()}
    if s.anchor is not None:
        ours["drawn_to"] = s.whole(s.anchor.view(len(s.params), *s.shape)[i], 0)
    return out | ours | {"moves": s.moves}


def publish(s: Stack, state: Any, only_if_any: bool = False) -> None:
    """Put the members' states into the optimizer's, where the base has bound new objects since the last
    time."""
    s.seen = replace(s.seen, versions=versions(s), shared_versions=tuple(map(_version, s.seen.shared)))
    bound = tuple(s.state.values())
    if (
        s.seen.bound is not None
        and len(bound) == len(s.seen.bound)
        and all(map(operator.is_, bound, s.seen.bound))
    ):
        return
    if only_if_any and not s.state:  # nothing to show before the first step
        dicts = tuple(map(state.get, s.owners))
    else:
        dicts = tuple(state[p] for p in s.owners)
    show(s, dicts)


def show(s: Stack, dicts: tuple[dict[str, Any] | None, ...]) -> None:
    """Fill the members' states, those that there are."""
    there = [d for d in dicts if d is not None]
    for i, d in enumerate(dicts):
        if d is not None:
            d.clear()
            d.update(member(s, i))
    bound = tuple(s.state.values()) if there else None
    shared = (
        tuple(v for v in s.state.values() if torch.is_tensor(v) and not is_stacked(v, s)) if there else ()
    )
    s.seen = replace(s.seen, dicts=dicts, values=_values(there), bound=bound, shared=shared)
    s.seen = replace(s.seen, shared_versions=tuple(map(_version, shared)))


def _values(dicts: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
    return tuple(chain.from_iterable(map(dict.values, dicts)))


def in_place(s: Stack, state: Any) -> bool:
    """Whether the optimizer's state of the members is still what was put there, and the weights of one
    kind."""
    p = s.owners[0]
    there = [d for d in s.seen.dicts if d is not None]
    values = _values(there)
    return (
        p.device == s.where[1]
        and set(map(operator.attrgetter("dtype"), s.owners)) == {s.where[0]}
        and all(map(operator.is_, map(state.get, s.owners), s.seen.dicts))
        and len(values) == len(s.seen.values)
        and all(map(operator.is_, values, s.seen.values))
    )


def versions(s: Stack) -> tuple[int, ...]:
    """torch's version counters of the weights: writes through `.data` escape them."""
    return tuple(map(_version, s.owners))
