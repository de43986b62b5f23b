"""Declare which weights of a module live on which space."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn

from ghor._torch.precision import wide
from ghor._torch.sharding import ShardLayout, full_tensor, is_sharded, reshard
from ghor._torch.warn import Warnings
from ghor.constraints.packed import Holder, space_for
from ghor.constraints.registry import RECORD, declare, declared_radii, no_longer_parameters, spaces_by_id
from ghor.constraints.selection import Predicate, check_module, select
from ghor.constraints.validation import batch_dims, check_anchor, check_parameter, residual
from ghor.spaces import Euclidean, Space, SpecialOrthogonal, Stiefel

SpaceOf = Callable[[str, nn.Parameter], Space]
Anchor = Tensor | Literal["start"] | None

# Names that torch's modules give their own weights. No type can tell other names from patterns, which return
# a dict; a list of names or patterns always does.
Own = Literal["weight", "in_proj_weight", "weight_hh", "weight_ih", "weight_hh_l0", "weight_ih_l0"]
Names = list[str] | tuple[str, ...]  # not a sequence: a string is one, too
M = TypeVar("M", bound=nn.Module)


@overload
def constrain(module: M, name: Own, space: Space | SpaceOf, anchor: Anchor = None) -> M: ...
@overload
def constrain(module: nn.Module, name: str, space: Space | SpaceOf, anchor: Anchor = None) -> Any: ...
@overload
def constrain(
    module: nn.Module, name: Names | Predicate, space: Space | SpaceOf, anchor: Anchor = None
) -> dict[str, float]: ...
def constrain(
    module: nn.Module,
    name: str | Names | Predicate,
    space: Space | SpaceOf,
    anchor: Anchor = None,
) -> Any:
    """Move parameters of `module` onto `space`, in place, and declare them: optimizers will keep them there.

    A weight goes to the point that `space.project` finds for it (the nearest on orthogonal spaces). If `name`
    is the name of one parameter, the module is returned. It may also select several, as a glob, a list of
    names and globs, or a function of name and parameter; then {name: ||Y - X||_F} is returned, how far each
    has moved (`check` shows that, too). If one of them cannot be moved, none is. `space` may be a function of
    name and parameter, too.

    `anchor` is where weight decay pulls a weight: a point, "start" (its place at the first step), or None.

    >>> layer = constrain(nn.Linear(49, 7, bias=False), "weight", Stiefel())
    >>> moved = constrain(model, "encoder.*.self_attn.*_proj.weight", Stiefel(blocks=8))
    >>> moved = constrain(model, lambda name, p: name.endswith("proj.weight") and p.dim() == 2, Stiefel())
    """
    reshard(module)
    warn, plan, chosen = Warnings(), [], select(module, name)
    holders = _holders(module)
    for n, (owner, leaf) in chosen.items():
        p = owner._parameters[leaf]
        assert p is not None
        given = space if isinstance(space, (Space, type)) or not callable(space) else space(n, p)
        if not isinstance(given, Space):
            hint = (
                f": write {given.__name__}()" if isinstance(given, type) and issubclass(given, Space) else ""
            )
            raise TypeError(f"space must be a ghor space such as ghor.Stiefel(), got {given!r}{hint}")
        on, advice = space_for(holders[id(p)], p, given, n)
        plan.append((n, owner, leaf, p, on, nearest(p, on, n)))
        if anchor is not None:
            check_anchor(anchor, p, on, n)
        if _is_reflection(p, on):
            advice = (
                f"was orthogonal with determinant -1, which {on} does not have: it was reflected; "
                "ghor.Stiefel() keeps the determinant"
            )
        if advice is not None:
            warn(advice, f"{n} {advice}")  # once for all layers of one kind
    if isinstance(anchor, Tensor):
        anchor = anchor.detach().clone()  # it could be the weight itself, which moves
    with torch.no_grad():  # all of them before any moves: one weight may be here by several names
        distances = [torch.linalg.vector_norm(wide(full_tensor(p) - full_tensor(Y))) for *_, p, _, Y in plan]
    moved = {n: float(distance) for (n, *_), distance in zip(plan, distances, strict=True)}
    for n, owner, leaf, p, on, point in plan:
        with torch.no_grad():
            p.copy_(point)
        declare(owner, leaf, on, moved[n], anchor, radii_of(p, on))
    warn.flush()
    return module if isinstance(name, str) and name in moved else moved


def project(model: nn.Module) -> dict[str, float]:
    """Move every declared weight of a model to its space, in place; returns {name: how far off it was}.

    For weights that were written without regard to their spaces: the averages of an AveragedModel, a loaded
    or rounded state dict. On Sphere(radius="start") a vector gets back the length that it had when it was
    declared, or taken by an optimizer. Raises ValueError if `space.project` finds no point for one; then none
    is moved.

    >>> averaged = torch.optim.swa_utils.AveragedModel(model)
    >>> distances = project(averaged)
    """
    check_module(model, "project")
    reshard(model)
    found = [
        (name, p, space) for name, p, space in declared_spaces(model) if not isinstance(space, Euclidean)
    ]
    radii = [declared_radii(p) for _, p, _ in found]
    points = [nearest(p, space, name, r) for (name, p, space), r in zip(found, radii, strict=True)]
    distances = {
        name: float(residual(space, full_tensor(p), r).max())
        for (name, p, space), r in zip(found, radii, strict=True)
    }
    with torch.no_grad():
        for (_, p, _), point in zip(found, points, strict=True):
            p.copy_(point)
    return distances


def declared_spaces(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Space]]:
    """(name, parameter, space) for every parameter of the model, in the order of named_parameters.

    Warns about declared weights that are no longer parameters.
    """
    if lost := no_longer_parameters(model):
        warn = Warnings()
        warn("lost", lost_message(lost))
        warn.flush()
    # A weight may be tied to one outside the model, and declared there: optimizers find that, too.
    records = spaces_by_id() | {
        id(module._parameters[leaf]): space
        for module in model.modules()
        for leaf, space in module.__dict__.get(RECORD, {}).items()
        if module._parameters.get(leaf) is not None
    }
    for name, p in model.named_parameters():
        yield name, p, records.get(id(p), Euclidean())


def param_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """The trainable parameters of a model as optimizer groups: Euclidean ones, then one group per space.

    `options` go into every group; for different options change the entries of a group. Frozen parameters are
    left out.
    """
    check_module(model, "param_groups")
    reshard(model)
    groups: dict[Space, dict[str, Any]] = {}
    for name, p, space in declared_spaces(model):
        if p.requires_grad:
            groups.setdefault(space, {"params": [], "space": space, **options})["params"].append((name, p))
    return sorted(groups.values(), key=lambda group: not isinstance(group["space"], Euclidean))


def radii_of(p: Tensor, space: Space) -> Tensor | None:
    """The radius of each point of a weight, (M, 1, 1), on spheres of any radius; else None."""
    if getattr(space, "radius", 1) != "start" or p.is_meta:
        return None
    return torch.as_tensor(space.scale(space.layout.points(wide(full_tensor(p.detach())))))


def nearest(p: Tensor, space: Space, name: str, radii: Tensor | None = None) -> Tensor:
    """The point that `space.project` finds for a weight, on spheres of the given radii."""
    check_parameter(p, space, name)
    if p.is_meta:
        raise ValueError(
            f"{name} is on the meta device and has no values yet; materialise the module, then constrain it"
        )
    shards = ShardLayout(p, batch_dims(p, space)) if is_sharded(p) else None
    X = p.detach() if shards is None else shards.local_tensors([p])[0]
    try:
        point = space.project(X)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if radii is not None:
        y = space.layout.points(wide(full_tensor(p.detach())))
        moved = space.layout.padded(y * (radii / space.scale(y)), p.shape, y)
        whole = space.layout.weight(moved, p.shape).to(p.dtype)
        point = whole if shards is None else shards.local_tensors([shards.to_dtensor(whole, 0)])[0]
    return point if shards is None else shards.to_dtensor(point, 0)


def _holders(model: nn.Module) -> dict[int, list[Holder]]:
    """The modules that hold each parameter, with its name there: several where it is tied."""
    found = defaultdict(list)
    for module in model.modules():
        for leaf, p in module._parameters.items():
            found[id(p)].append((module, leaf))
    return found


def _is_reflection(p: Tensor, space: Space) -> bool:
    """Whether p holds a multiple of an orthogonal matrix with determinant -1, which SO(N) does not have.

    Only such a matrix was perhaps meant to keep its determinant; others just go to the nearest rotation.
    """
    if not isinstance(space, SpecialOrthogonal):
        return False
    M = space.layout.points(wide(full_tensor(p)))
    M = M * (M.shape[-1] ** 0.5 / torch.linalg.matrix_norm(M, keepdim=True))
    orthogonal = Stiefel().residual(M) <= Stiefel().tolerance(M.to(p.dtype)).to(M.dtype)
    return bool((orthogonal & (SpecialOrthogonal().residual(M) > 1)).any())


def lost_message(lost: dict[str, Space]) -> str:
    """What to say of `no_longer_parameters`."""
    name, space = next(iter(lost.items()))
    others = f" ({len(lost) - 1} others likewise)" if len(lost) > 1 else ""
    return (
        f"{name} was constrained to {space} and is not a parameter any more{others}: a parametrization, "
        "pruning or a wrapper computes it, and nothing keeps it there. Undo that and constrain it again, or "
        "call ghor.release(model) to give the constraints up"
    )
