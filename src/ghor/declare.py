"""Declaring which weights of a module live on which space."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from .distributed import gathered, is_spread, shards_of
from .spaces import Euclidean, Space

# The record that counts: on the module, by parameter name. It survives deepcopy, pickle, .to and load_state_dict, and
# is no part of the state_dict. An attribute on the Parameter survives hardly any of these.
RECORD = "_ghor_spaces"

# So that an optimizer given bare parameters can look them up; the modules' records are the truth.
_declared: Any = WeakTensorKeyDictionary()

# Modules that have a record: fully_shard puts DTensors in place of the parameters that were declared.
_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Record(dict[str, Space]):
    """The spaces of a module's own parameters, by name. Copies of the module's parameters are declared as well."""

    def __init__(self, module: nn.Module | None = None, spaces: dict[str, Space] | None = None) -> None:
        super().__init__(spaces or {})
        self.module = None if module is None else weakref.ref(module)
        if module is not None:
            _modules.add(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        module = self.module() if self.module is not None else None
        for name, space in self.items() if module is not None else ():
            p = memo.get(id(getattr(module, name, None)))
            if isinstance(p, Tensor):
                _declared[p] = space
        return Record(memo.get(id(module)), dict(self))

    def __reduce__(self) -> Any:
        return Record, (None, dict(self))


def constrain(module: nn.Module, name: str, space: Space) -> nn.Module:
    """Move the parameter `name` of `module` onto `space`, in place, and declare it: optimizers will keep it there.

    The weight goes to the point `space.project` finds for it (the nearest on orthogonal spaces). Returns the module.

    >>> layer = constrain(nn.Linear(49, 7, bias=False), "weight", Stiefel())
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"constrain takes a module and the name of its parameter, got {type(module).__name__}")
    if not isinstance(space, Space):
        raise TypeError(f"space must be a ghor space such as ghor.Stiefel(), got {space!r}")
    owner, _, leaf = name.rpartition(".")
    target = dict(module.named_modules(remove_duplicate=False)).get(owner)
    p = None if target is None else target._parameters.get(leaf)
    if target is None or p is None:
        known = ", ".join(n for n, _ in module.named_parameters())
        raise ValueError(f"{type(module).__name__} has no parameter {name!r}; it has: {known or 'none'}")
    point = _nearest(p, space, name)
    with torch.no_grad():
        p.copy_(point)
    target.__dict__.setdefault(RECORD, Record(target))[leaf] = space
    _declared[p] = space
    return module


def project(model: nn.Module) -> dict[str, float]:
    """Move every declared weight of a model to its space, in place, as `constrain` does; returns how far off each was.

    For weights that were written without regard to their spaces: the averages of an AveragedModel, a loaded or rounded
    state dict. Where one has no point near it this raises, and none is moved.

    >>> averaged = torch.optim.swa_utils.AveragedModel(model)
    >>> distances = project(averaged)
    """
    found = [(name, p, space) for name, p, space in spaces(model) if not isinstance(space, Euclidean)]
    points = [_nearest(p, space, name) for name, p, space in found]
    distances = {name: float(space.distance(gathered(p).double()).max()) for name, p, space in found}
    with torch.no_grad():
        for (_, p, _), point in zip(found, points, strict=True):
            p.copy_(point)
    return distances


def _nearest(p: Tensor, space: Space, name: str) -> Tensor:
    """The point that `space.project` finds for a weight."""
    check_parameter(p, space, name)
    if p.is_meta:
        raise ValueError(
            f"{name} is on the meta device and has no values yet; materialise the module, then constrain it"
        )
    shards = shards_of(p, space)
    try:
        point = space.project(p.detach() if shards is None else shards.pieces([p])[0])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return point if shards is None else shards.single(point)


def check_parameter(p: Tensor, space: Space, name: str) -> None:
    """Raise unless p can be a weight on the space: dtype, shape, memory, finite values."""
    if isinstance(space, Euclidean):
        return
    if is_lazy(p):
        raise ValueError(f"{name} has no shape yet: call the lazy module once, then put it on {space}")
    if p.is_complex() or not p.is_floating_point():
        raise TypeError(
            f"{name} of shape {tuple(p.shape)} is {p.dtype}; weights on {space} are real floating point tensors, so "
            "convert it first, for example with .float()"
        )
    try:
        space.check_shape(p.shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if p.layout != torch.strided:
        raise TypeError(f"{name} of shape {tuple(p.shape)} is {p.layout}; weights on {space} are dense: to_dense()")
    if any(step == 0 and size > 1 for step, size in zip(p.stride(), p.shape, strict=True)):
        raise ValueError(
            f"{name} of shape {tuple(p.shape)} is expanded: entries that share memory cannot move apart; clone() it"
        )
    if not p.is_meta and not bool(torch.isfinite(p).all()):
        count = int((~torch.isfinite(p)).sum())
        raise ValueError(
            f"{name} of shape {tuple(p.shape)} has {count} entries that are NaN or infinite; initialise it"
        )


def spaces(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Space]]:
    """(name, parameter, space) for every parameter of the model, in the order of named_parameters."""
    records: dict[int, Space] = {}
    for module in model.modules():
        for leaf, space in module.__dict__.get(RECORD, {}).items():
            p = getattr(module, leaf, None)
            if isinstance(p, Tensor):  # of a tied weight that was declared twice, the last declaration counts
                records[id(p)] = _declared[p] = _declared.get(p, space)
    for name, p in model.named_parameters():
        yield name, p, records.get(id(p), Euclidean())


def declared_space(p: Tensor) -> Space | None:
    """What `constrain` declared for this very tensor, or for the one it stands in for, if anything."""
    space: Space | None = _declared.get(p)
    if space is None and is_spread(p):
        found = (s for m in _modules for leaf, s in m.__dict__.get(RECORD, {}).items() if m._parameters.get(leaf) is p)
        space = next(found, None)
        if space is not None:
            _declared[p] = space
    return space


def param_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """The trainable parameters of a model as optimizer groups, the Euclidean ones first, then one group a space.

    `options` go into every group; change a group's entries for options of its own. Frozen parameters are left out.
    """
    groups: dict[Space, dict[str, Any]] = {}
    for name, p, space in spaces(model):
        if p.requires_grad:
            groups.setdefault(space, {"params": [], "space": space, **options})["params"].append((name, p))
    return sorted(groups.values(), key=lambda group: not isinstance(group["space"], Euclidean))


def check(model: nn.Module) -> str:
    """Print and return a table of the model's parameters: name, shape, space, distance from it."""
    rows = [("parameter", "shape", "space", "distance")]
    for name, p, space in spaces(model):
        euclidean = isinstance(space, Euclidean)
        distance = "" if euclidean or p.is_meta else f"{float(space.distance(gathered(p).double()).max()):.1e}"
        rows.append((name, "x".join(map(str, p.shape)) or "scalar", "-" if euclidean else repr(space), distance))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    table = "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
    print(table)
    return table
