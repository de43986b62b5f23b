"""The record that modules keep of their weights: what `constrain` has declared of each."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from inspect import getattr_static
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from ghor.spaces import Euclidean, Space

# The record is kept on the module, by parameter name, so that it survives deepcopy, pickle, .to and
# load_state_dict, and stays out of the state dict. An attribute of the Parameter survives hardly any of
# these, and a weak reference to the Parameter would forbid torch.utils.swap_tensors.
RECORD = "_ghor_spaces"

# Modules that have a record, to find what is declared of a bare parameter.
_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Declaration(NamedTuple):
    """What is declared of a weight."""

    space: Space
    moved: float | None = None  # how far `constrain` moved it
    anchor: Any = None  # where weight decay pulls it: None, "start" or a point
    radii: Tensor | None = None  # the radius of each of its points, on Sphere(radius="start")


class Record(dict[str, Declaration]):
    """What is declared of a module's own parameters, by name. A copy belongs to the copy of the module."""

    changes: ClassVar[int] = 0  # counts declarations, so that optimizers notice new ones

    def __init__(self, module: nn.Module | None, entries: dict[str, Declaration]) -> None:
        super().__init__(entries)
        self.belongs_to(module)

    def belongs_to(self, module: nn.Module | None) -> None:
        """Keep this record on the module, and register it."""
        self.module = None if module is None else weakref.ref(module)
        if module is not None:
            module.__dict__.setdefault(RECORD, self)
            _modules.add(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        module = None if self.module is None else self.module()
        return Record(memo.get(id(module)), copy.deepcopy(dict(self), memo))

    def __reduce__(self) -> Any:
        # The module is passed as state, not as an argument, because it holds this record itself: a cycle.
        return Record, (None, dict(self)), None if self.module is None else self.module()

    def __setstate__(self, module: nn.Module) -> None:
        self.belongs_to(module)


def declare(owner: nn.Module, leaf: str, declaration: Declaration) -> None:
    """Record this with the owner of a weight, and with those who have declared it by another name."""
    Record(owner, {})  # unless it has one
    owner.__dict__[RECORD][leaf] = declaration
    p = owner._parameters[leaf]
    assert p is not None
    for record, twin in _records_of(p):
        record[twin] = declaration
    Record.changes += 1


def keep_radii(p: Tensor, radii: Tensor | None) -> None:
    """Record the radii of a weight's points, as the optimizer that took it knows them."""
    for record, leaf in _records_of(p):
        record[leaf] = record[leaf]._replace(radii=radii)


def forget(module: nn.Module, leaf: str | None = None) -> None:
    """Remove this module's record, or what it says of one weight, if there is any."""
    if leaf is None:
        found: Any = module.__dict__.pop(RECORD, None)
        _modules.discard(module)
    else:
        found = module.__dict__.get(RECORD, {}).pop(leaf, None)
    Record.changes += found is not None


def declarations_by_id() -> dict[int, Declaration]:
    """What is declared of every parameter that is there, by its id."""
    return {id(p): record[leaf] for p, record, leaf in _recorded()}


def declared_space(p: Tensor) -> Space | None:
    """The space that `constrain` declared for this very tensor, or None."""
    return next((record[leaf].space for record, leaf in _records_of(p)), None)


def declared_radii(p: Tensor) -> Tensor | None:
    """The radius of each point of a weight on spheres of any radius, if it is declared."""
    return next((record[leaf].radii for record, leaf in _records_of(p)), None)


def register(model: nn.Module) -> None:
    """Register the modules of a model that have a record: a shallow copy has, and no one knows it."""
    _modules.update(module for module in model.modules() if RECORD in module.__dict__)


def _recorded() -> Iterator[tuple[nn.Parameter, Record, str]]:
    for module in list(_modules):
        record = module.__dict__.get(RECORD, {})
        for leaf in record:
            if (p := module._parameters.get(leaf)) is not None:
                yield p, record, leaf


def _records_of(p: Tensor) -> Iterator[tuple[Record, str]]:
    return ((record, leaf) for q, record, leaf in _recorded() if q is p)


# -- weights that are not parameters any more ----------------------------------------------------------------


def no_longer_parameters(model: nn.Module) -> dict[str, Space]:
    """{name: space} of the model's declared weights that are no longer parameters of their modules.

    A parametrization or pruning computes them from other parameters, and FSDP's first version from flat ones.
    """
    return {
        f"{name}.{leaf}".lstrip("."): space
        for name, module in model.named_modules()
        for leaf, (space, *_) in module.__dict__.get(RECORD, {}).items()
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


def lost_message(lost: dict[str, Space]) -> str:
    """What to say of weights that are not parameters any more."""
    name, space = next(iter(lost.items()))
    others = f" ({len(lost) - 1} others likewise)" if len(lost) > 1 else ""
    return (
        f"{name} was constrained to {space} and is not a parameter any more{others}: a parametrization, "
        "pruning or a wrapper computes it, and nothing keeps it there. Undo that and constrain it again, or "
        "call ghor.release(model) to give the constraints up"
    )
