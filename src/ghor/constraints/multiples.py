"""Multiples of points: a weight W = s Q, Q on a space, with the scale s fixed or learned.

Q is what is constrained and trained, as `parametrizations.weight.original`; `weight` is computed from it when
a layer is called, by one multiplication. A learning rate means what it means on the space, whatever s is.
`ghor.release` leaves W = s Q as an ordinary weight.
"""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ghor._torch.precision import wide
from ghor._torch.warn import Warnings
from ghor.constraints.declare import Move, Names, constrain, distance, move_of
from ghor.constraints.registry import forget
from ghor.constraints.selection import Holder, Predicate, check_module, select
from ghor.spaces.stiefel import Orthogonal, Stiefel


class Multiple(nn.Module):
    """The parametrization Q -> s Q, one s for each matrix: a parameter if it is learned, else a buffer."""

    def __init__(self, space: Stiefel, scale: Tensor, learn: bool) -> None:
        super().__init__()
        self.space = space
        self.scale: Tensor
        if learn:
            self.scale = nn.Parameter(scale)
        else:
            self.register_buffer("scale", scale)

    def forward(self, Q: Tensor) -> Tensor:
        return self._times(Q, self.scale)

    def right_inverse(self, W: Tensor) -> Tensor:
        """Q = W/s."""
        return self._times(W, 1 / self.scale.detach())

    def _times(self, X: Tensor, s: Tensor) -> Tensor:
        return self.space.layout.weight(self.space.layout.points(X) * s, X.shape)


def constrain_multiples(
    module: nn.Module,
    name: str | Names | Predicate,
    space: Any,
    scale: float | Literal["start"] = "start",
    learn: bool = False,
) -> dict[str, float]:
    """Make weights of `module` multiples s Q of points Q of `space`; returns {name: how far each has moved}.

    `scale` is a number, or "start": ||s Q||_F is then that of the weight as it is, so that a pretrained layer
    keeps its size. Each matrix of a weight with `blocks` has its own s. With `learn=True` s is a parameter
    that starts there, and is trained as an ordinary one (weight decay pulls it to 0). Weights are selected as
    by `ghor.constrain`. If one of them cannot be moved, none is.

    >>> moved = constrain_multiples(model, "*.query.weight", ghor.Stiefel(blocks=heads))
    >>> optimizer = ghor.optim.AdamW(model, lr=1e-3)
    """
    check_module(module, "constrain_multiples")
    if not (isinstance(space, Orthogonal) and space.compact):
        raise TypeError(f"multiples are those of orthogonal matrices, as of ghor.Stiefel(), got {space!r}")
    if getattr(space, "radius", 1) != 1:
        raise ValueError(f"the multiple is the radius already: use ghor.Sphere() in place of {space!r}")
    if scale != "start" and not (isinstance(scale, (int, float)) and 0 < scale < math.inf):
        raise ValueError(f"scale is a positive number or 'start', got {scale!r}")
    warn, chosen = Warnings(), select(module, name)
    moves: dict[Holder, Move] = {}  # a weight that is here by several names is scaled once
    for n, weight in chosen.items():
        if len(weight.holders) > 1:
            raise ValueError(f"{n} is tied to another weight, which would not be scaled; untie it first")
        if weight.holders[0] not in moves:
            moves[weight.holders[0]] = move_of(n, weight, space, warn)
    moved = {holder: _replace(move, scale, learn) for holder, move in moves.items()}
    warn.flush()
    return {n: moved[weight.holders[0]] for n, weight in chosen.items()}


def _replace(move: Move, scale: float | Literal["start"], learn: bool) -> float:
    """Put s Q in the place of a weight X, Q being the point that X moves to; returns ||s Q - X||_F."""
    (owner, leaf, p, _), space = move.weight, cast(Stiefel, move.space)
    before = p.detach().clone()
    s = torch.linalg.matrix_norm(wide(space.layout.points(before)), keepdim=True)
    if scale == "start":
        s = torch.where(s == 0, 1, s / math.sqrt(space.layout.size(p.shape)[1]))  # 0: a padding row
    else:
        s = torch.full_like(s, scale)
    forget(owner, leaf)  # it is Q that is declared from here on
    parametrize.register_parametrization(owner, leaf, Multiple(space, s.to(p.dtype), learn))
    held: Any = owner.parametrizations[leaf]  # type: ignore[index]
    with torch.no_grad():
        held.original.copy_(move.point)
    constrain(owner, [f"parametrizations.{leaf}.original"], space)
    return distance(before, getattr(owner, leaf))


def multiples(model: nn.Module) -> dict[tuple[nn.Module, str], Multiple]:
    """The multiples of a model, by module and name of the weight there."""
    return {
        (module, leaf): multiple
        for module in model.modules()
        if isinstance(getattr(module, "parametrizations", None), nn.ModuleDict)
        for leaf, chain in module.parametrizations.items()  # type: ignore[union-attr, operator]
        for multiple in chain
        if isinstance(multiple, Multiple)
    }
