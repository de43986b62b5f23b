"""The roster of an optimizer: which weights are on which spaces, and whether its groups still say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ghor.constraints.registry import Record
from ghor.constraints.validation import Warn
from ghor.lifting.groups import (
    GROUP_KEYS,
    Weight,
    admitted,
    check_memory,
    check_options,
    fixed,
    refuse_late_declarations,
    refuse_shared_memory,
    switches,
)

Groups = Sequence[dict[str, Any]]


class Seen(NamedTuple):
    """A group as it was when its weights were admitted."""

    params: list[Tensor]
    ids: list[int]
    ours: dict[str, Any]
    fixed: list[tuple[str, Any]]  # options that do not change in place, if all are such
    switches: dict[str, Any]

    @classmethod
    def of(cls, group: dict[str, Any]) -> Seen:
        params = list(group["params"])
        ours = {key: group[key] for key in GROUP_KEYS}
        return cls(params, [*map(id, params)], ours, fixed(group), switches(group))

    def has_weights_of(self, group: dict[str, Any]) -> bool:
        """Whether the weights are the same, on the same spaces, with the same anchors."""
        same = self.ids == [*map(id, group["params"])]
        return same and all(self.ours[key] is group[key] for key in ("space", "anchor"))


class Roster:
    """The weights of every group, admitted to their spaces."""

    def __init__(self, defaults: dict[str, Any], warn: Warn) -> None:
        self.defaults, self.warn = defaults, warn
        self.placed: list[list[Weight]] = []  # the weights of each group
        self.seen: list[Seen] = []
        self.declared = -1  # `Record.changes` of the time
        self.curved: list[Weight] = []  # the weights on manifolds, and their ids
        self.ids = frozenset[int]()
        self.flat: list[list[Tensor]] = []  # the others, by group

    @property
    def weights(self) -> list[Weight]:
        """Those of all groups."""
        return [w for placed in self.placed for w in placed]

    def add(self, group: dict[str, Any]) -> list[Weight]:
        """Admit the weights of one more group."""
        weights = admitted(group, len(self.placed), self.defaults, self.warn)
        refuse_shared_memory(self.weights + weights)
        self.seen[len(self.placed) :], self.declared = [Seen.of(group)], -1
        self.placed.append(weights)
        return weights

    def drop(self, count: int) -> None:
        """Forget all groups but so many."""
        del self.placed[count:], self.seen[count:]

    def holds(self, groups: Groups) -> bool:
        """Whether the groups have the weights, the keys of ours and the switches that we know them with."""
        if Record.changes != self.declared or len(groups) != len(self.seen):
            return False
        for seen, group in zip(self.seen, groups, strict=True):
            same = seen.ids == [*map(id, group["params"])]
            if not same or any([group[key] is not value for key, value in seen.ours.items()]):  # noqa: C419
                return False
            still = seen.fixed and all([group.get(key) is value for key, value in seen.fixed])  # noqa: C419
            if not still and not seen.switches.items() <= switches(group).items():
                return False
        return True

    def renew(self, groups: Groups, state: Any) -> None:
        """Start again from the groups: which weights are on manifolds, and where."""
        before = {id(w.p): w for w in self.weights}
        if self.declared != Record.changes:
            refuse_late_declarations(groups, self.weights)
        for gi, group in enumerate(groups):
            check_options(group, gi)
            known = gi < min(len(self.placed), len(self.seen))
            if not (known and self.seen[gi].has_weights_of(group)):
                self.placed[gi : gi + 1] = [admitted(group, gi, self.defaults, self.warn)]
        self.drop(len(groups))
        refuse_shared_memory(self.weights)
        self.curved = [w for w in self.weights if w.curved]
        for w in self.curved:
            check_memory(w)
        for w in self.weights:
            then = before.get(id(w.p), w).space
            if then != w.space and state.get(w.p):
                raise ValueError(
                    f"{w.name} went from {then} to {w.space} after steps were taken; its state means nothing "
                    "there, so build a new optimizer"
                )
        self.ids = frozenset([id(w.p) for w in self.curved])
        self.flat = [[w.p for w in placed if not w.curved] for placed in self.placed]
        self.seen, self.declared = list(map(Seen.of, groups)), Record.changes
