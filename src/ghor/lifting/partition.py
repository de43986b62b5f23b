"""From parameter groups to stacks: which weights are computed as one, and whether that still holds."""

from __future__ import annotations

import operator
from collections import defaultdict
from itertools import repeat
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ghor._torch.sharding import is_sharded, placing
from ghor.constraints.registry import Record, spaces_by_id
from ghor.constraints.validation import check_on_space
from ghor.lifting import guards as upkeep
from ghor.lifting import views
from ghor.lifting.distributed import ShardedStack
from ghor.lifting.param_groups import (
    GROUP_KEYS,
    anchors_of,
    check_group,
    check_options,
    name_of,
    same_anchor,
    spaces_of,
)
from ghor.lifting.probe import options_of, parity
from ghor.lifting.stack import Stack
from ghor.spaces import Euclidean, Space

if TYPE_CHECKING:
    from ghor.lifting.contract import Contract

_grad = operator.attrgetter("grad")


class Stacking:
    """The stacks of an optimizer, its Euclidean weights by group, and the groups that they were made from."""

    def __init__(self, optimizer: Contract, before: Stacking | None = None) -> None:
        """Weights of one group, space, shape, dtype, device and step count are one stack."""
        groups: list[dict[str, Any]] = optimizer.param_groups
        state = optimizer.state
        spaces = {} if before is None else before.spaces
        self.euclidean: list[list[Tensor]] = []
        self.spaces: dict[int, Space] = {}  # by the id of a weight, which `groups` keeps alive
        self.loose = [key for key in state if not isinstance(key, Tensor)]  # state of no weight: Base's own
        self.declared = Record.changes
        refuse_late(optimizer)
        kinds: dict[Any, list[tuple[Tensor, str, Any]]] = defaultdict(list)
        for gi, group in enumerate(groups):
            check_options(group, gi)
            known = before is not None and gi < len(before.groups) and before.groups[gi]
            if not (known and known["space"] is group["space"] and same_anchor(known, group)):
                check_group(group, gi, optimizer.defaults, optimizer._warn)
            euclidean = []
            for i, (p, space, anchor) in enumerate(
                zip(group["params"], spaces_of(group), anchors_of(group), strict=True)
            ):
                name = name_of(group, gi, i)
                if spaces.get(id(p), space) != space and state.get(p):
                    raise ValueError(
                        f"{name} went from {spaces[id(p)]} to {space} after steps were taken; its state means nothing "
                        "there, so build a new optimizer"
                    )
                self.spaces[id(p)] = space
                if isinstance(space, Euclidean):
                    euclidean.append(p)
                elif p.is_meta:
                    raise ValueError(
                        f"{name} is on the meta device and has no values to move; materialise the module, then build "
                        "the optimizer"
                    )
                else:
                    shared = views.shared_values(p, state.get(p, {})) if optimizer.stack else id(p)
                    kinds[gi, space, p.shape, p.dtype, p.device, placing(p), anchor is None, shared].append(
                        (p, name, anchor)
                    )
            self.euclidean.append(euclidean)
        self.stacks: list[Stack] = []
        for (gi, space, *_), members in kinds.items():
            params, names = [p for p, *_ in members], [name for _, name, _ in members]
            check_on_space(params, space, names, optimizer._warn)
            kind = section_kind(optimizer, gi, space, params[0], names[0])
            vectors = turning_keys(optimizer, groups[gi]) if kind == "implicit" else set()
            states = [_drawn(dict(state.get(p, {})), p, anchor) for p, _, anchor in members]
            of = ShardedStack if is_sharded(params[0]) else Stack
            try:
                self.stacks.append(
                    of(groups[gi], gi, space, kind, params, names, states, vectors, optimizer.stack)
                )
            except ValueError as error:
                raise ValueError(f"{names[0]}: {error}") from None
        for s in self.stacks:
            views.publish(s, state, only_if_any=True)
        self.groups: list[dict[str, Any]] = [
            {**{k: g[k] for k in GROUP_KEYS}, "params": list(g["params"])} for g in groups
        ]

    def holds(self, optimizer: Contract) -> bool:
        """Whether groups and state are those the stacks were made from (all of them can be written from
        outside)."""
        groups = optimizer.param_groups
        if len(self.groups) != len(groups):
            return False
        for seen, group in zip(self.groups, groups, strict=True):
            if not (
                seen["space"] is group["space"]
                and seen["section"] == group["section"]
                and seen["retraction"] == group["retraction"]
                and (seen["anchor"] is group["anchor"] or same_anchor(seen, group))
                and seen["error_if_nonfinite"] is group["error_if_nonfinite"]
                and len(seen["params"]) == len(group["params"])
                and all(map(operator.is_, seen["params"], group["params"]))
            ):
                return False
        return all([views.in_place(s, optimizer.state) for s in self.stacks])  # noqa: C419 (a generator is a call each)

    def ready(self, optimizer: Contract) -> tuple[Stacking, list[Stack]]:
        """What holds now, and the stacks that move in this step."""
        if self.declared != Record.changes:
            refuse_late(optimizer)
            self.declared = Record.changes
        now = self if self.holds(optimizer) else Stacking(optimizer, self)
        return now, now.moving(optimizer)

    def moving(self, optimizer: Contract) -> list[Stack]:
        """The stacks with gradients. Nothing has moved yet: what is wrong with weights or gradients
        raises."""
        moving = []
        for s in list(self.stacks):
            s.group = optimizer.param_groups[s.gi]  # they can be other dicts than when the stack was made
            grads = list(map(_grad, s.owners))
            if all(map(operator.is_not, grads, repeat(None))):
                moving.append(s)
            elif any(map(operator.is_not, grads, repeat(None))):  # from here on their step counts differ
                there = [i for i, g in enumerate(grads) if g is not None]
                rest = [i for i, g in enumerate(grads) if g is None]
                self.stacks = [t for t in self.stacks if t is not s] + [s.part(there), s.part(rest)]
                moving.append(self.stacks[-2])
        for s in moving:
            if s.group.get("differentiable"):
                raise RuntimeError(
                    f"{s.names[0]} is on {s.space}: differentiable=True does not go through the step of such a weight; "
                    "set it to False in its group"
                )
            upkeep.before(s, optimizer._warn)
        return moving


def refuse_late(optimizer: Contract) -> None:
    """ValueError if a weight that this optimizer has taken for a Euclidean one was constrained since."""
    declared = spaces_by_id()
    for gi, group in enumerate(optimizer.param_groups):
        for i, (p, space) in enumerate(zip(group["params"], spaces_of(group), strict=True)):
            if isinstance(space, Euclidean) and declared.get(id(p), space) != space:
                raise ValueError(
                    f"{name_of(group, gi, i)} was constrained to {declared[id(p)]} after this optimizer took it on "
                    f"{space}, and would leave it; constrain first, then build the optimizer"
                )


def _drawn(state: dict[str, Any], p: Tensor, anchor: Any) -> dict[str, Any]:
    """A weight's state with the point that weight decay draws it to."""
    if anchor is None:
        state.pop("drawn_to", None)
    elif isinstance(anchor, str):
        state.setdefault("drawn_to", p.detach())
    else:
        state["drawn_to"] = anchor
    return state


def section_kind(optimizer: Contract, gi: int, space: Space, p: Tensor, name: str) -> str:
    """What the group's `section` comes to. "auto" is transported for state that a turning frame would
    spoil."""
    group = optimizer.param_groups[gi]
    if group["section"] == "auto" and "section" in optimizer.state.get(p, {}):
        return "transported"  # a state goes on with the frame that it holds
    try:
        kind = space.section_kind(group["section"], p.shape, p.dtype)
        if kind == "implicit":
            turning_keys(optimizer, group)
    except ValueError as error:
        if group["section"] == "auto":
            return "transported"
        raise ValueError(f"{name}: {error}") from None
    return kind


def turning_keys(optimizer: Contract, group: dict[str, Any]) -> set[str]:
    """The keys of state tensors that turn with the frame."""
    if hasattr(optimizer, "turning_keys"):  # it says so itself
        return optimizer.turning_keys(group)
    options = options_of(optimizer.Base, optimizer._options, group)
    return {key for key, kind in parity(optimizer.Base, options).items() if kind == "vector"}
