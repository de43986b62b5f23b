"""Checks that weights fit their space and lie on it, a whole stack at a time; errors name the weight."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ghor._torch.precision import COMPUTE_DTYPE, wide
from ghor._torch.sharding import ShardLayout, full_tensor, is_sharded, placement
from ghor.spaces import Euclidean, Space

Warn = Callable[[str, str], None]


def kind(p: Tensor) -> Hashable:
    """The properties that weights on one space must share to be checked, stacked and moved together."""
    if is_lazy(p):
        return id(p)  # a lazy parameter has no shape to compare
    return p.shape, p.dtype, p.device, p.layout, placement(p)


def check_fit(params: Sequence[Tensor], space: Space, names: Sequence[str]) -> None:
    """Raise for the first of some weights of one `kind` that cannot move to the space from where it is.

    Dtype and shape are checked once, values by one reduction over the stack of all weights.
    """
    if isinstance(space, Euclidean):
        return
    _check_kind(params[0], space, names[0])
    _check_strides(params, names)
    # If one process raises, all must: bad entries of shards are counted over all processes, weight by weight.
    if not params[0].is_meta and (
        is_sharded(params[0]) or not bool(_stacked(params, space).isfinite().all())
    ):
        for p, name in zip(params, names, strict=True):
            if count := int(full_tensor(torch.isfinite(p).logical_not_().sum())):
                raise ValueError(
                    f"{name} of shape {tuple(p.shape)} has {count} entries that are NaN or infinite; "
                    "initialise it"
                )


def check_on_space(
    params: Sequence[Tensor], space: Space, names: Sequence[str], warn: Warn | None = None
) -> None:
    """Raise for the first of some weights of one `kind` that is not on the space.

    A float64 weight that is on the space only to the digits of float32 was declared in float32 and then
    converted: if `warn` is given, it is projected, with a warning.
    """
    if params[0].is_meta:
        return
    Y = _stacked(params, space)
    if Y.numel() == 0:  # a process may have no shard
        return
    residual, allowed = worst_residual(space, Y)
    off = ~(residual <= allowed)  # also where a residual is NaN
    if not bool(off.any()):
        return
    bad = off.nonzero().flatten().tolist()
    i = bad[0]
    distance = f"{float(residual[i]):.1e} off {space}"
    narrow = {torch.float64: torch.float32, torch.complex128: torch.complex64}.get(Y.dtype, Y.dtype)
    if warn is not None and bool((residual <= worst_residual(space, Y.to(narrow))[1]).all()):
        with torch.no_grad():
            for j in bad:
                params[j].copy_(space.project(params[j]))
        warn(
            "dtype",
            f"{names[i]} is {kind_of(Y.dtype)} and was {distance}, as a {kind_of(narrow)} weight would be: "
            "it was projected",
        )
        return
    hint = getattr(space, "hint", None)  # why a point is off, where the space can tell
    why = "" if hint is None else hint(Y[i].to(COMPUTE_DTYPE.get(Y.dtype, Y.dtype)))
    raise ValueError(
        f"{names[i]} of shape {tuple(params[i].shape)} is {distance}{why and f' ({why})'}; call "
        f"ghor.constrain(module, name, ghor.{space}), or ghor.project(model) where it was moved since, or "
        f"take ghor.{space}.project(...) of it. (An optimizer that is not ghor's moves weights off their "
        "spaces)"
    )


def check_anchor(anchor: object, p: Tensor, space: Space, name: str) -> None:
    """Raise unless weight decay can draw p to the anchor: "start", or a point of p's space."""
    if isinstance(anchor, str) and anchor == "start":
        return
    if not isinstance(anchor, Tensor):
        raise TypeError(f"the anchor of {name} is None, 'start' or a point of {space}, got {anchor!r}")
    if anchor.shape != p.shape or anchor.is_complex() != p.is_complex():
        raise ValueError(
            f"the anchor of {name} is {kind_of(anchor.dtype)} of shape {tuple(anchor.shape)}, the weight "
            f"{kind_of(p.dtype)} of shape {tuple(p.shape)}"
        )
    check_on_space([anchor], space, [f"the anchor of {name}"])


def batch_dims(p: Tensor, space: Space) -> int:
    """How many leading dimensions of a weight count independent points.

    The dimension of rows does not count if columns are the points, or if one row is a padding row: its index
    is one among all rows, so that dimension cannot be sharded.
    """
    columns = space.dims == 1 and getattr(space, "along", "rows") == "columns"
    return p.dim() - space.dims - (columns or getattr(space, "padding_idx", None) is not None)


def residual(space: Space, Y: Tensor, radii: Tensor | None = None) -> Tensor:
    """How far each point of a weight is off its space, in float64; on spheres of any radius, of these."""
    if radii is None:
        return space.residual(wide(Y))
    y = space.layout.points(wide(Y)) / radii
    return space.geometry.residual(space.layout.padded(y, Y.shape, space.geometry.distinct(y)))


def worst_residual(space: Space, Y: Tensor) -> tuple[Tensor, Tensor]:
    """Residual and tolerance of the worst point of each of P stacked weights: (P, *shape) -> (P), (P)."""
    exact = Y.to(COMPUTE_DTYPE.get(Y.dtype, Y.dtype))
    residual = space.residual(exact).reshape(len(Y), -1)
    # Tolerances that grow with the point overflow far out, where its residual is infinite.
    most = torch.finfo(residual.dtype).max
    allowed = space.tolerance(Y).to(residual).reshape(len(Y), -1).clamp_max(most)
    # A residual of 0 is good even where nothing is allowed, 0/0; for argmax a NaN is the largest.
    worst = torch.where(residual <= allowed, 0, residual / allowed).argmax(1, keepdim=True)
    return residual.gather(1, worst).flatten(), allowed.gather(1, worst).flatten()


def kind_of(dtype: torch.dtype) -> str:
    """The name of a dtype, for messages."""
    return str(dtype).removeprefix("torch.")


def _stacked(params: Sequence[Tensor], space: Space) -> Tensor:
    """This process's part of the weights, (P, *shape)."""
    if is_sharded(params[0]):
        params = ShardLayout(params[0], batch_dims(params[0], space)).local_tensors(params)
    return torch.stack([p.detach() for p in params])


def _check_kind(p: Tensor, space: Space, name: str) -> None:
    if is_lazy(p):
        raise ValueError(f"{name} has no shape yet: call the lazy module once, then put it on {space}")
    try:
        space.check(p.shape, p.dtype)
    except TypeError as error:
        raise TypeError(f"{name} of shape {tuple(p.shape)}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if 0 in p.shape:  # a batch of points may be empty, a weight may not
        raise ValueError(f"{name}: a weight on {space} cannot have the empty shape {tuple(p.shape)}")
    if p.layout != torch.strided:
        raise TypeError(
            f"{name} of shape {tuple(p.shape)} is {p.layout}; weights on {space} are dense: to_dense()"
        )


def _check_strides(params: Sequence[Tensor], names: Sequence[str]) -> None:
    shape = tuple(params[0].shape)
    for p, name in zip(params, names, strict=True):
        strides = p.stride()
        if 0 in strides and any(step == 0 and size > 1 for step, size in zip(strides, shape, strict=True)):
            raise ValueError(
                f"{name} of shape {shape} is expanded: entries that share memory cannot move apart; "
                "clone() it"
            )
        if p.is_conj() or p.is_neg():
            raise ValueError(
                f"{name} of shape {shape} is a view that torch conjugates or negates when it is read, and "
                "does not write to in a step; take resolve_conj() and resolve_neg() of it"
            )
