"""From parameter groups to stacks: which weights are computed as one, and whether that still holds."""

from __future__ import annotations

import operator
from collections import defaultdict
from itertools import repeat
from typing import Any, Protocol

from torch import Tensor

from ghor._torch.sharding import is_sharded, placement
from ghor._torch.values import may_read
from ghor.constraints.registry import Record
from ghor.constraints.validation import Warn, check_on_space
from ghor.lifting import guards
from ghor.lifting.param_groups import (
    DECAYS,
    GROUP_KEYS,
    anchors_of,
    check_group,
    check_options,
    name_of,
    refuse_late_anchors,
    refuse_late_declarations,
    same_anchor,
    spaces_of,
)
from ghor.lifting.stack import NarrowStack, ShardedStack, Stack, is_narrow, shared_values
from ghor.spaces import Euclidean, Space

_grad = operator.attrgetter("grad")

LARGE = 1 << 18  # numbers in a weight


class Lifting(Protocol):
    """The part of a lifted optimizer that a partition needs."""

    param_groups: list[dict[str, Any]]
    state: Any
    defaults: dict[str, Any]

    @property
    def stack(self) -> bool: ...
    @property
    def elementwise(self) -> bool: ...
    @property
    def _warn(self) -> Warn: ...
    def section_kind(self, group: dict[str, Any], space: Space, p: Tensor, name: str) -> str: ...
    def turning_keys(self, group: dict[str, Any]) -> set[str]: ...


class Partition:
    """The stacks of an optimizer, its Euclidean weights by group, and a copy of the groups behind them."""

    def __init__(
        self, optimizer: Lifting, groups: list[dict[str, Any]], before: Partition | None = None
    ) -> None:
        """Form one stack of all weights of one group, space, shape, dtype, device and step count.

        `groups` are copies (`copied`) of groups that have been checked already. `before` is the partition
        that this one replaces; a weight with a state must be on the space that it was on there.
        """
        state = optimizer.state
        spaces = {} if before is None else before.spaces
        self.euclidean: list[list[Tensor]] = []
        self.spaces: dict[int, Space] = {}  # by the id of a weight, which `groups` keeps alive
        self.loose = [key for key in state if not isinstance(key, Tensor)]  # Base's state of no weight
        self.declarations = Record.changes
        refuse_late_declarations(optimizer.param_groups)
        kinds: dict[Any, list[tuple[Tensor, str, Any]]] = defaultdict(list)
        for gi, group in enumerate(optimizer.param_groups):
            check_options(group, gi)
            checked = gi < len(groups) and groups[gi]
            if not (
                checked
                and checked["space"] is group["space"]
                and same_anchor(checked, group)
                and len(checked["params"]) == len(group["params"])
                and all(map(operator.is_, checked["params"], group["params"]))
            ):
                check_group(group, gi, optimizer.defaults, optimizer._warn)
            else:
                refuse_late_anchors(group, gi)
            euclidean = []
            members = zip(group["params"], spaces_of(group), anchors_of(group), strict=True)
            for i, (p, space, anchor) in enumerate(members):
                name = name_of(group, gi, i)
                if spaces.get(id(p), space) != space and state.get(p):
                    raise ValueError(
                        f"{name} went from {spaces[id(p)]} to {space} after steps were taken; its state "
                        "means nothing there, so build a new optimizer"
                    )
                self.spaces[id(p)] = space
                if isinstance(space, Euclidean):
                    euclidean.append(p)
                elif p.is_meta:
                    raise ValueError(
                        f"{name} is on the meta device and has no values to move; materialise the module, "
                        "then build the optimizer"
                    )
                elif not is_sharded(p) and p.numel() and not p.untyped_storage().size():
                    raise ValueError(
                        f"{name} has no memory any more: it was a whole weight, gathered by FSDP for a "
                        "forward pass. Build the optimizer from the model itself, or call its reshard() first"
                    )
                else:
                    own = state.get(p)
                    alone = not optimizer.stack or _is_large(p)
                    shared = id(p) if alone else shared_values(p, own) if own else ()
                    kind = gi, space, p.shape, p.dtype, p.device, placement(p), anchor is None, shared
                    kinds[kind].append((p, name, anchor))
            self.euclidean.append(euclidean)
        self.stacks = [self._stack(optimizer, gi, space, alike) for (gi, space, *_), alike in kinds.items()]
        for s in self.stacks:
            s.publish(state, only_if_any=True)
        self.groups = copied(optimizer.param_groups)

    def _stack(
        self, optimizer: Lifting, gi: int, space: Space, members: list[tuple[Tensor, str, Any]]
    ) -> Stack:
        group, params, names = optimizer.param_groups[gi], [m[0] for m in members], [m[1] for m in members]
        # Once more: the values can have changed since the constructor checked them.
        check_on_space(params, space, names, optimizer._warn)
        first = optimizer.state.get(params[0], {})
        if group["section"] == "auto" and "section" in first:
            kind = "transported"  # a run goes on as it began, also if "auto" would now choose otherwise
        else:
            kind = optimizer.section_kind(group, space, params[0], names[0])
        vectors = optimizer.turning_keys(group) if kind == "implicit" else set()
        states = [_with_target(dict(optimizer.state.get(p, {})), p, anchor) for p, _, anchor in members]
        of = ShardedStack if is_sharded(params[0]) else Stack
        if kind == "implicit" and of is Stack and optimizer.elementwise and is_narrow(space, params):
            of = NarrowStack
        try:
            return of(group, gi, space, kind, params, names, states, vectors, optimizer.stack)
        except ValueError as error:
            raise ValueError(f"{names[0]}: {error}") from None

    def holds(self, optimizer: Lifting) -> bool:
        """Whether groups and state, which users can write to, are still those the stacks were made from."""
        groups = optimizer.param_groups
        if len(self.groups) != len(groups):
            return False
        for seen, group in zip(self.groups, groups, strict=True):
            if not (
                seen["space"] is group["space"]
                and seen["section"] == group["section"]
                and seen["retraction"] == group["retraction"]
                and seen["max_angle"] == group["max_angle"]
                and (seen["anchor"] is group["anchor"] or same_anchor(seen, group))
                and seen["error_if_nonfinite"] is group["error_if_nonfinite"]
                and len(seen["params"]) == len(group["params"])
                and all(map(operator.is_, seen["params"], group["params"]))
            ):
                return False
        return all([s.in_place(optimizer.state) for s in self.stacks])  # noqa: C419 (a generator costs calls)

    def ready(self, optimizer: Lifting) -> tuple[Partition, list[Stack]]:
        """The partition that holds now, and its stacks that move in this step."""
        if self.declarations != Record.changes:
            refuse_late_declarations(optimizer.param_groups)
            for gi, group in enumerate(optimizer.param_groups):
                refuse_late_anchors(group, gi)
            self.declarations = Record.changes
        now = self if self.holds(optimizer) else Partition(optimizer, self.groups, self)
        return now, now.moving(optimizer)

    def moving(self, optimizer: Lifting) -> list[Stack]:
        """The stacks with gradients; raises for bad weights or gradients before anything moves."""
        moving = []
        for s in list(self.stacks):
            s.group = optimizer.param_groups[s.gi]  # load_state_dict replaces the dicts
            # Looked up here, because compiled code that reads a group breaks the graph.
            if s.decay_target is not None:
                s.decays = any(s.group.get(key) for key in DECAYS)
            grads = list(map(_grad, s.parameters))
            if all(map(operator.is_not, grads, repeat(None))):
                moving.append(s)
            elif any(map(operator.is_not, grads, repeat(None))):  # split: now their step counts differ
                there = [i for i, g in enumerate(grads) if g is not None]
                rest = [i for i, g in enumerate(grads) if g is None]
                self.stacks = [t for t in self.stacks if t is not s] + [s.subset(there), s.subset(rest)]
                moving.append(self.stacks[-2])
        for s in moving:
            if s.group.get("differentiable"):
                raise RuntimeError(
                    f"{s.names[0]} is on {s.space}: differentiable=True does not go through the step of "
                    "such a weight; set it to False in its group"
                )
            if not s.as_left():
                guards.before(s, optimizer._warn)
        return moving


def _is_large(p: Tensor) -> bool:
    """Whether a weight is computed alone: on a CPU, where a large one gains nothing from company.

    A batch of them would leave the caches, and the weights would be copied into it and back. On an
    accelerator one kernel for all of them is still better than one for each.
    """
    return p.numel() >= LARGE and may_read(p) and not is_sharded(p)


def copied(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our keys and the parameters of checked groups, to compare with later."""
    return [{**{k: g[k] for k in GROUP_KEYS}, "params": list(g["params"])} for g in groups]


def _with_target(state: dict[str, Any], p: Tensor, anchor: Any) -> dict[str, Any]:
    """A weight's state with the point that weight decay draws it towards."""
    if anchor is None:
        state.pop("decay_target", None)
    elif isinstance(anchor, str):
        state.setdefault("decay_target", p.detach())
    else:
        state["decay_target"] = anchor
    return state
