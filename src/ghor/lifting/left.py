"""How a batch has left its weights and state[p]: whether others have touched them since; nothing is read."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ghor.lifting.members import Members

_version = operator.attrgetter("_version")


class Left:
    """Objects by identity, tensors by version and place: `p.data = x` bumps no version."""

    def __init__(self, at: Members) -> None:
        self.at, self.params, self.places = at, at.params, at.places()
        self.seen: tuple[Any, ...] = ()  # state[p] of all members and what was in it
        self.shared: list[Tensor] = []  # what the members' states have in common
        self.remember()

    def remember(self) -> None:
        """The weights, and what their states share, are ours as they are now."""
        self.versions = [*map(_version, self.params)]
        self.counts = [*map(_version, self.shared)]

    def remember_state(self, state: Any) -> None:
        """state[p] is ours as it is now."""
        self.seen = self._now(state)
        first, *others = (state.get(p) or {} for p in self.params)
        self.shared = [
            v for k, v in first.items() if torch.is_tensor(v) and any(d.get(k) is v for d in others)
        ]
        self.counts = [*map(_version, self.shared)]

    def holds(self, state: Any) -> bool:
        """Whether weights and state are the objects, at the places and in the versions, that we left."""
        at = self.at
        if [*map(_version, self.shared)] != self.counts:
            at.warn(
                "shared",
                f"a state tensor that {len(self.params)} weights share, such as the step count of "
                f"{at.names[0]}, was written in place, which changes all of them. Bind a new tensor to "
                "change one: opt.state[p][key] = torch.tensor(...)",
            )
        return (
            [*map(_version, self.params)] == self.versions
            and at.places() == self.places
            and same_objects(self._now(state), self.seen)
        )

    def _now(self, state: Any) -> tuple[Any, ...]:
        """state[p] of all members, and what is in it."""
        dicts = tuple(map(state.get, self.params))
        return *dicts, *chain.from_iterable(map(dict.values, filter(None, dicts)))

    def touched(self) -> list[bool]:
        """Which weights others have written."""
        return [_version(p) != version for p, version in zip(self.params, self.versions, strict=True)]


def same_objects(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two sequences hold the very same objects; comparing them by value would read tensors."""
    return len(a) == len(b) and all(map(operator.is_, a, b))
