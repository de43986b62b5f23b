"""Whether a tensor can be a weight on a space, and whether it lies on it; errors name the weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ghor._torch.precision import COMPUTE_DTYPE
from ghor._torch.sharding import gathered, local_pieces
from ghor.spaces import Euclidean, Space

Warn = Callable[[str, str], None]


def check_parameter(p: Tensor, space: Space, name: str) -> None:
    """Raise unless p can be a weight on the space: dtype, shape, memory, finite values."""
    if isinstance(space, Euclidean):
        return
    if is_lazy(p):
        raise ValueError(f"{name} has no shape yet: call the lazy module once, then put it on {space}")
    try:
        space.check_dtype(p.dtype)
    except TypeError as error:
        raise TypeError(f"{name} of shape {tuple(p.shape)}: {error}") from None
    try:
        space.check(p.shape, p.dtype)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if p.layout != torch.strided:
        raise TypeError(
            f"{name} of shape {tuple(p.shape)} is {p.layout}; weights on {space} are dense: to_dense()"
        )
    if any(step == 0 and size > 1 for step, size in zip(p.stride(), p.shape, strict=True)):
        raise ValueError(
            f"{name} of shape {tuple(p.shape)} is expanded: entries that share memory cannot move apart; clone() it"
        )
    if not p.is_meta and (count := int(gathered(torch.isfinite(p).logical_not_().sum()))):
        raise ValueError(
            f"{name} of shape {tuple(p.shape)} has {count} entries that are NaN or infinite; initialise it"
        )


def check_anchor(anchor: object, p: Tensor, space: Space, name: str) -> None:
    """Raise unless weight decay can draw p there: "start", or a point of its space."""
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


def check_on_space(
    params: Sequence[Tensor],
    space: Space,
    names: Sequence[str],
    warn: Callable[[str, str], None] | None = None,
) -> None:
    """Raise for the first of some weights of one kind that is not on its space.

    A float64 weight that is on it to the digits of float32 was declared in that: it is projected, with a
    word.
    """
    if params[0].is_meta:
        return
    pieces = local_pieces(params, space)
    Y = torch.stack([p.detach() for p in pieces])
    if Y.numel() == 0:
        return
    distance, allowed = _worst(space, Y)
    bad = ~(distance <= allowed)
    if not bool(bad.any()):
        return
    i = int(bad.nonzero()[0])
    narrow = {torch.float64: torch.float32, torch.complex128: torch.complex64}.get(Y.dtype)
    if warn is not None and narrow is not None and bool((distance <= _worst(space, Y.to(narrow))[1]).all()):
        with torch.no_grad():
            for p in (params[int(j)] for j in bad.nonzero()):
                p.copy_(space.project(p))
        warn(
            "dtype",
            f"{names[i]} is {kind_of(Y.dtype)} and was {float(distance[i]):.1e} off {space}, as a {kind_of(narrow)} "
            "weight would be: it was projected",
        )
        return
    raise ValueError(
        f"{names[i]} of shape {tuple(params[i].shape)} is {float(distance[i]):.1e} off {space}; call "
        f"ghor.constrain(module, name, ghor.{space}), or ghor.project(model) where it was moved since, or take "
        f"ghor.{space}.project(...) of it. (An optimizer that is not ghor's moves weights off their spaces)"
    )


def kind_of(dtype: torch.dtype) -> str:
    """The name of a dtype, for messages."""
    return str(dtype).removeprefix("torch.")


def _worst(space: Space, Y: Tensor) -> tuple[Tensor, Tensor]:
    """Of P stacked weights, for each the distance of its worst point and what is allowed there: (P, *shape)
    -> (P)."""
    exact = Y.to(COMPUTE_DTYPE.get(Y.dtype, Y.dtype))
    distance = space.residual(exact).reshape(len(Y), -1)
    allowed = space.tolerance(Y).to(distance).reshape(len(Y), -1)
    worst = (distance / allowed).argmax(1, keepdim=True)  # a NaN is the largest
    return distance.gather(1, worst).flatten(), allowed.gather(1, worst).flatten()
