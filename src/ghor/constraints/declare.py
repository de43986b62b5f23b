"""Declare which weights of a module live on which space."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn

from ghor._torch.precision import wide
from ghor._torch.sharding import ShardLayout, distribute_like, full_tensor, is_sharded, reshard
from ghor._torch.warn import Warnings
from ghor.constraints.packed import space_for
from ghor.constraints.registry import (
    Declaration,
    declarations_by_id,
    declare,
    lost_message,
    no_longer_parameters,
    register,
)
from ghor.constraints.selection import Predicate, Selected, check_module, select
from ghor.constraints.validation import Warn, batch_dims, check_anchor, check_fit, residual
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
    check_module(module, "constrain")
    reshard(module)
    warn = Warnings()
    moves = [move_of(n, weight, space, warn, anchor) for n, weight in select(module, name).items()]
    if isinstance(anchor, Tensor):
        anchor = anchor.detach().clone()  # it could be the weight itself, which moves
    # All of them before any moves: one weight may be here by several names.
    moved = {move.name: distance(move.weight.p, move.point) for move in moves}
    for n, weight, on, point in moves:
        with torch.no_grad():
            weight.p.copy_(point)
        declare(weight.owner, weight.leaf, Declaration(on, moved[n], anchor, _radii_of(weight.p, on)))
    warn.flush()
    return module if isinstance(name, str) and name in moved else moved


class Move(NamedTuple):
    """A weight on the way to a point of its space."""

    name: str
    weight: Selected
    space: Space
    point: Tensor


def move_of(name: str, weight: Selected, space: Space | SpaceOf, warn: Warn, anchor: object = None) -> Move:
    """Ask everything about a weight before it moves, and give the errors and advice of `constrain`."""
    p: Any = weight.p
    given: Any = space if isinstance(space, (Space, type)) or not callable(space) else space(name, p)
    if not isinstance(given, Space):
        cls = isinstance(given, type) and issubclass(given, Space)
        hint = f": write {given.__name__}()" if cls else ""
        raise TypeError(f"space must be a ghor space such as ghor.Stiefel(), got {given!r}{hint}")
    on, advice = space_for(weight, given, name)
    point = nearest(p, on, name)
    if anchor is not None:
        check_anchor(anchor, p, on, name)
    if _is_reflection(p, on):
        advice = (
            f"was orthogonal with determinant -1, which {on} does not have: it was reflected; "
            "ghor.Stiefel() keeps the determinant"
        )
    if advice is not None:
        warn(advice, f"{name} {advice}")  # once for all layers of one kind
    return Move(name, weight, on, point)


def distance(X: Tensor, Y: Tensor) -> float:
    """||Y - X||_F."""
    return float(torch.linalg.vector_norm(wide(full_tensor(X)) - wide(full_tensor(Y))))


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
    found = [(name, p, d) for name, p, d in declarations_of(model) if not isinstance(d.space, Euclidean)]
    points = [nearest(p, d.space, name, d.radii) for name, p, d in found]
    off = {name: float(residual(d.space, full_tensor(p), d.radii).max()) for name, p, d in found}
    with torch.no_grad():
        for (_, p, _), point in zip(found, points, strict=True):
            p.copy_(point)
    return off


def declarations_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Declaration]]:
    """(name, parameter, what is declared of it) for every parameter, in the order of named_parameters.

    Warns about declared weights that are no longer parameters.
    """
    if lost := no_longer_parameters(model):
        warn = Warnings()
        warn("lost", lost_message(lost))
        warn.flush()
    register(model)
    every = declarations_by_id()  # a weight may be tied to one outside the model, and declared there
    for name, p in model.named_parameters():
        yield name, p, every.get(id(p), Declaration(Euclidean()))


def declared_spaces(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Space]]:
    """(name, parameter, space) for every parameter of the model, in the order of named_parameters.

    Warns about declared weights that are no longer parameters.
    """
    return ((name, p, declaration.space) for name, p, declaration in declarations_of(model))


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


def nearest(p: Tensor, space: Space, name: str, radii: Tensor | None = None) -> Tensor:
    """The point that `space.project` finds for a weight, on spheres of the given radii."""
    check_fit([p], space, [name])
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
    if radii is None:
        return point if shards is None else shards.to_dtensor(point, 0)
    y = space.layout.points(wide(full_tensor(p)))
    y = space.layout.padded(y * (radii / space.scale(y)), p.shape, y)
    whole = space.layout.weight(y, p.shape).to(p.dtype)
    return whole if shards is None else distribute_like(whole, p)


def _radii_of(p: Tensor, space: Space) -> Tensor | None:
    """The radius of each point of a weight, (M, 1, 1), on spheres of any radius; else None."""
    if getattr(space, "radius", 1) != "start":
        return None
    return torch.as_tensor(space.scale(space.layout.points(wide(full_tensor(p)))))


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
