"""What modules remember of their weights: the spaces they were constrained to, and the anchors of their
decay."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor, nn

from ghor.spaces import Space

# The record that counts: on the module, by parameter name. It survives deepcopy, pickle, .to and
# load_state_dict, and is no part of the state_dict. An attribute on the Parameter survives hardly any of
# these, and a weak reference to it would forbid torch.utils.swap_tensors.
RECORD = "_ghor_spaces"
ANCHORS = "_ghor_anchors"  # likewise, where weight decay draws them: "start" or a point

# Modules that have a record, to find the space of a bare parameter.
_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Record(dict[str, Space]):
    """The spaces of a module's own parameters, by name. A copy belongs to the copy of the module."""

    changes: ClassVar[int] = 0  # how often anything was declared

    def __init__(
        self,
        module: nn.Module | None = None,
        spaces: dict[str, Space] | None = None,
        moved: dict[str, float] | None = None,
    ) -> None:
        super().__init__(spaces or {})
        self.moved = dict(moved or {})  # by `constrain`
        self.belongs_to(module)

    def belongs_to(self, module: nn.Module | None) -> None:
        """Make the module known."""
        self.module = None if module is None else weakref.ref(module)
        if module is not None:
            _modules.add(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        return Record(
            memo.get(id(self.module())) if self.module is not None else None, dict(self), self.moved
        )

    def __reduce__(self) -> Any:
        return Record, (None, dict(self), self.moved), None if self.module is None else self.module()

    def __setstate__(self, module: nn.Module) -> None:
        self.belongs_to(module)


def owners(p: Tensor) -> Iterator[tuple[nn.Module, str]]:
    """The modules that have declared this very tensor, and its name there."""
    for module in list(_modules):
        for leaf in module.__dict__.get(RECORD, ()):
            if module._parameters.get(leaf) is p:
                yield module, leaf


def declared_space(p: Tensor) -> Space | None:
    """What `constrain` declared for this very tensor, or for the one it stands in for, if anything."""
    return next((module.__dict__[RECORD][leaf] for module, leaf in owners(p)), None)


def spaces_by_id() -> dict[int, Space]:
    """The space of every declared parameter that there is, by its id."""
    return {
        id(module._parameters[leaf]): space
        for module in list(_modules)
        for leaf, space in module.__dict__.get(RECORD, {}).items()
        if module._parameters.get(leaf) is not None
    }


def anchors_by_id() -> dict[int, Any]:
    """The anchor of every declared parameter that has one, by its id."""
    declared = (
        (m._parameters.get(k), a) for m in list(_modules) for k, a in m.__dict__.get(ANCHORS, {}).items()
    )
    return {id(p): anchor for p, anchor in declared if p is not None and anchor is not None}
