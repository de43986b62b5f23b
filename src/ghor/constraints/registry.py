"""The record that modules keep of their weights: the space of each, the anchor of its decay, its radii."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from inspect import getattr_static
from typing import Any, ClassVar

from torch import Tensor, nn

from ghor.spaces import Euclidean, Space

# The record is kept on the module, by parameter name, so that it survives deepcopy, pickle, .to and
# load_state_dict, and stays out of the state dict. An attribute of the Parameter survives hardly any of
# these, and a weak reference to the Parameter would forbid torch.utils.swap_tensors.
RECORD = "_ghor_spaces"
ANCHORS = "_ghor_anchors"  # {parameter name: "start" or a point}
RADII = "_ghor_radii"  # {parameter name: the radius of each of its points}, on Sphere(radius="start")

# Modules that have a record, to find the space of a bare parameter.
_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Record(dict[str, Space]):
    """The spaces of a module's own parameters, by name. A copy belongs to the copy of the module."""

    changes: ClassVar[int] = 0  # counts declarations, so that optimizers notice new ones

    def __init__(
        self,
        module: nn.Module | None = None,
        spaces: dict[str, Space] | None = None,
        moved: dict[str, float | None] | None = None,
    ) -> None:
        super().__init__(spaces or {})
        self.moved = dict(moved or {})  # how far `constrain` moved each
        self.belongs_to(module)

    def belongs_to(self, module: nn.Module | None) -> None:
        """Keep this record on the module, and register it."""
        self.module = None if module is None else weakref.ref(module)
        if module is not None:
            module.__dict__.setdefault(RECORD, self)
            _modules.add(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        module = None if self.module is None else self.module()
        return Record(memo.get(id(module)), dict(self), self.moved)

    def __reduce__(self) -> Any:
        # The module is passed as state, not as an argument, because it holds this record itself: a cycle.
        return Record, (None, dict(self), self.moved), None if self.module is None else self.module()

    def __setstate__(self, module: nn.Module) -> None:
        self.belongs_to(module)


def declare(
    owner: nn.Module,
    leaf: str,
    space: Space,
    moved: float | None = None,
    anchor: Any = None,
    radii: Tensor | None = None,
) -> None:
    """Record the space of a weight with its owner, and with those who have declared it by another name."""
    Record(owner)
    owner.__dict__[RECORD][leaf] = space
    p = owner._parameters[leaf]
    assert p is not None
    for other, twin in owners(p):
        record = other.__dict__[RECORD]
        record[twin], record.moved[twin] = space, moved
        other.__dict__.setdefault(ANCHORS, {})[twin] = anchor
    keep_radii(p, radii)
    Record.changes += 1


def keep_radii(p: Tensor, radii: Tensor | None) -> None:
    """Record the radii of a weight's points, those of its declaration or of the optimizer that took it."""
    for module, leaf in owners(p):
        module.__dict__.setdefault(RADII, {})[leaf] = radii


def declared_radii(p: Tensor) -> Tensor | None:
    """The radius of each point of a weight on spheres of any radius, if it is declared."""
    return next((module.__dict__.get(RADII, {}).get(leaf) for module, leaf in owners(p)), None)


def forget(module: nn.Module, leaf: str | None = None) -> None:
    """Remove this module's record, or what it says of one weight, if there is any."""
    if leaf is not None and leaf in module.__dict__.get(RECORD, ()):
        del module.__dict__[RECORD][leaf]
        for key in (ANCHORS, RADII):
            module.__dict__.get(key, {}).pop(leaf, None)
        Record.changes += 1
    elif leaf is None and RECORD in module.__dict__:
        for key in (RECORD, ANCHORS, RADII):
            module.__dict__.pop(key, None)
        _modules.discard(module)
        Record.changes += 1


def owners(p: Tensor) -> Iterator[tuple[nn.Module, str]]:
    """The modules that have declared this very tensor, with its name there."""
    for module in list(_modules):
        for leaf in module.__dict__.get(RECORD, ()):
            if module._parameters.get(leaf) is p:
                yield module, leaf


def declared_space(p: Tensor) -> Space | None:
    """The space that `constrain` declared for this very tensor, or None."""
    return next((module.__dict__[RECORD][leaf] for module, leaf in owners(p)), None)


def spaces_by_id() -> dict[int, Space]:
    """The space of every declared parameter, by its id."""
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


def no_longer_parameters(model: nn.Module) -> dict[str, Space]:
    """{name: space} of the model's declared weights that are no longer parameters of their modules.

    A parametrization or pruning computes them from other parameters, and FSDP's first version from flat ones.
    """
    return {
        f"{name}.{leaf}".lstrip("."): space
        for name, module in model.named_modules()
        for leaf, space in module.__dict__.get(RECORD, {}).items()
        if module._parameters.get(leaf) is None and not isinstance(space, Euclidean)
    }


def lost_beside(params: set[int]) -> dict[str, Space]:
    """`no_longer_parameters` of the modules to which parameters with these ids belong, by class and name.

    A weight that was deleted from its module is not among them: nothing computes it.
    """
    return {
        f"{type(module).__name__.removeprefix('Parametrized')}.{leaf}": space
        for module in list(_modules)
        if (lost := no_longer_parameters(module)) and any(id(p) in params for p in module.parameters())
        for leaf, space in lost.items()
        if getattr_static(module, leaf, None) is not None
    }
