"""Declaring which weights of a module live on which space."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from ghor._torch.sharding import Shards, gathered, is_sharded
from ghor._torch.warn import Warnings
from ghor.constraints.packed import meant
from ghor.constraints.registry import ANCHORS, RECORD, Record, owners
from ghor.constraints.selection import Predicate, chosen
from ghor.constraints.validation import _worst, check_anchor, check_parameter
from ghor.linalg import wide
from ghor.spaces import Euclidean, Space

SpaceOf = Callable[[str, nn.Parameter], Space]


@overload
def constrain(
    module: nn.Module, name: str, space: Space | SpaceOf, anchor: Tensor | str | None = None
) -> Any: ...
@overload
def constrain(
    module: nn.Module,
    name: Sequence[str] | Predicate,
    space: Space | SpaceOf,
    anchor: Tensor | str | None = None,
) -> dict[str, float]: ...
def constrain(
    module: nn.Module,
    name: str | Sequence[str] | Predicate,
    space: Space | SpaceOf,
    anchor: Tensor | str | None = None,
) -> Any:
    """Move parameters of `module` onto `space`, in place, and declare them: optimizers will keep them there.

    A weight goes to the point `space.project` finds for it (the nearest on orthogonal spaces). `name` is the
    name of one parameter, and the module is returned; or it says which: a pattern in which * stands for
    anything, a list of names and patterns, a function of name and parameter. Then what was constrained is
    returned, with ||Y - X||_F, how far each has moved (`check` has that, too). Where one cannot be moved,
    none is. `space` may be a function of name and parameter, too.

    `anchor` is where weight decay draws a weight: a point, "start" (where the first step finds it), or
    nowhere.

    >>> layer = constrain(nn.Linear(49, 7, bias=False), "weight", Stiefel())
    >>> moved = constrain(model, "encoder.*.self_attn.*_proj.weight", Stiefel(blocks=8))
    >>> moved = constrain(model, lambda name, p: name.endswith("proj.weight") and p.dim() == 2, Stiefel())
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"constrain takes a module and the name of its parameter, got {type(module).__name__}"
        )
    warn, plan = Warnings(), []
    for n, (owner, leaf) in chosen(module, name).items():
        p = owner._parameters[leaf]
        assert p is not None
        given = space if isinstance(space, (Space, type)) or not callable(space) else space(n, p)
        if not isinstance(given, Space):
            raise TypeError(f"space must be a ghor space such as ghor.Stiefel(), got {given!r}")
        on, said = meant(owner, leaf, p, given, n)
        plan.append((n, owner, leaf, p, on, nearest(p, on, n)))
        if anchor is not None:
            check_anchor(anchor, p, on, n)
        if said is not None:
            warn(n, said)
    anchor = (
        anchor.detach().clone() if isinstance(anchor, Tensor) else anchor
    )  # it could be the weight itself
    moved = {}
    for n, owner, leaf, p, on, point in plan:
        with torch.no_grad():
            moved[n] = float(torch.linalg.vector_norm(wide(gathered(p) - gathered(point))))
            p.copy_(point)
        for owner_of, twin in owners(p):
            owner_of.__dict__[RECORD][twin] = on  # of a tied weight that was declared before
        record = owner.__dict__.setdefault(RECORD, Record(owner))
        record[leaf], record.moved[leaf] = on, moved[n]
        for owner_of, twin in owners(p):
            owner_of.__dict__.setdefault(ANCHORS, {})[twin] = anchor
    Record.changes += 1
    warn.flush()
    return module if isinstance(name, str) and name in moved else moved


def project(model: nn.Module) -> dict[str, float]:
    """Move every declared weight of a model to its space, in place, as `constrain` does; returns how far off
    each was.

    For weights that were written without regard to their spaces: the averages of an AveragedModel, a loaded
    or rounded state dict. Where one has no point near it this raises, and none is moved.

    >>> averaged = torch.optim.swa_utils.AveragedModel(model)
    >>> distances = project(averaged)
    """
    found = [
        (name, p, space) for name, p, space in declared_spaces(model) if not isinstance(space, Euclidean)
    ]
    points = [nearest(p, space, name) for name, p, space in found]
    distances = {name: float(space.residual(wide(gathered(p))).max()) for name, p, space in found}
    with torch.no_grad():
        for (_, p, _), point in zip(found, points, strict=True):
            p.copy_(point)
    return distances


def nearest(p: Tensor, space: Space, name: str) -> Tensor:
    """The point that `space.project` finds for a weight."""
    check_parameter(p, space, name)
    if p.is_meta:
        raise ValueError(
            f"{name} is on the meta device and has no values yet; materialise the module, then constrain it"
        )
    shards = Shards(p, space) if is_sharded(p) else None
    try:
        point = space.project(p.detach() if shards is None else shards.pieces([p])[0])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return point if shards is None else shards.whole(point, 0)


def declared_spaces(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Space]]:
    """(name, parameter, space) for every parameter of the model, in the order of named_parameters."""
    records: dict[int, Space] = {}
    for module in model.modules():
        for leaf, space in module.__dict__.get(RECORD, {}).items():
            p = getattr(module, leaf, None)
            if isinstance(p, Tensor):
                records[id(p)] = space
    for name, p in model.named_parameters():
        yield name, p, records.get(id(p), Euclidean())


def param_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """The trainable parameters of a model as optimizer groups, the Euclidean ones first, then one group a
    space.

    `options` go into every group; change a group's entries for options of its own. Frozen parameters are left
    out.
    """
    groups: dict[Space, dict[str, Any]] = {}
    for name, p, space in declared_spaces(model):
        if p.requires_grad:
            groups.setdefault(space, {"params": [], "space": space, **options})["params"].append((name, p))
    return sorted(groups.values(), key=lambda group: not isinstance(group["space"], Euclidean))


def check(model: nn.Module) -> str:
    """Print and return a table of the model's parameters: name, shape, space, distance from it.

    With how far `constrain` has moved each; one that is off its space is marked.
    """
    moved = {
        id(p): module.__dict__[RECORD].moved.get(leaf)
        for module in model.modules()
        for leaf, p in module._parameters.items()
        if leaf in module.__dict__.get(RECORD, ())
    }
    rows = [("parameter", "shape", "space", "distance", "moved")]
    for name, p, space in declared_spaces(model):
        shape, way, distance, off = "x".join(map(str, p.shape)) or "scalar", moved.get(id(p)), "", ""
        if not isinstance(space, Euclidean) and not p.is_meta:
            Y = gathered(p).detach()
            distance = f"{float(space.residual(wide(Y)).max()):.1e}"
            far, allowed = _worst(space, Y[None])
            off = "" if bool(far <= allowed) else "  off: moved by another optimizer? ghor.project(model)"
        on = "-" if isinstance(space, Euclidean) else repr(space)
        rows.append((name, shape, on, distance, ("" if way is None else f"{way:.1e}") + off))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    table = "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
    print(table)
    return table


spaces = declared_spaces  # its name in version 0.1.0
