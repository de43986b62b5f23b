"""Weights of one kind as one batch: their layout, and the lines of Algorithm 3 for them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ghor._torch.precision import COMPUTE_DTYPE
from ghor._torch.values import may_read
from ghor.lifting import guards as upkeep
from ghor.lifting import views
from ghor.lifting.param_groups import DECAYS
from ghor.retraction import by_name
from ghor.spaces import Space
from ghor.spaces.sections import KINDS, Implicit, from_state


class Stack:
    """P weights of one group, space, shape, dtype, device and step count, as (P, *shape).

    `H` is their shadow, 0 between steps, and `state` the base optimizer's state of it. Geometry sees points
    (M, *point), M = P times the weights' own batch dimensions; `W` is H so. A weight that is not `stacked` is
    alone, and H has its shape, with no leading dimension. Weights that are sharded over processes have a
    stack of their own kind, in `distributed.py`: there `params` are what this process works on, H and state
    are DTensors around it.
    """

    def __init__(
        self,
        group: dict[str, Any],
        gi: int,
        space: Space,
        kind: str,
        params: list[Tensor],
        names: list[str],
        states: list[dict[str, Any]],
        vectors: set[str],
        stacked: bool = True,
    ) -> None:
        self.group, self.gi, self.space, self.kind = group, gi, space, kind
        self.owners, self.names, self.vectors, self.stacked = params, names, vectors, stacked
        self.as_is = space.one == space  # weights are points, with no blocks and no rows that are left alone
        self.params = params = self.pieces(params)
        self.shape, self.where = params[0].shape, (params[0].dtype, params[0].device)
        dtype = COMPUTE_DTYPE.get(params[0].dtype, params[0].dtype)
        self.half = dtype != params[0].dtype
        split = space.split(params[0]).shape
        # its layout and dtype are all that counts
        self.E = space.one.E(split[len(split) - space.dims :], dtype=params[0].dtype, device="meta")
        self.batch = (len(params), *split[: len(split) - space.dims])
        self.H = self.whole(
            torch.zeros((*self.batch[:stacked], *self.shape), dtype=dtype, device=self.where[1]), stacked
        )
        self.free = may_read(self.H)
        # Longest velocities: from `large` on rounding is repaired at once, beyond `limit` a step is taken in
        # float64.
        reach = space.reach(self.shape)
        self.large, self.limit = 0.5 * reach, min(4 * reach, space.max_velocity)
        self.retraction = by_name(group["retraction"])
        self.state = views.gather(self, states)
        self.moves = torch.zeros((), dtype=torch.int64)
        if "moves" in states[0]:
            self.moves.copy_(states[0]["moves"])
        self.age = int(self.moves)
        held, Y = views.gather_section(self, states), self.exact(self.weights())
        self.section = from_state(KINDS[kind], space.one, self.E, held, Y, self.half, self.turning())
        if isinstance(self.section, Implicit) and space.spreads:
            self.section.squares = self.even
        anchor = held.get("drawn_to")  # (M, *point), where the weights decay to
        self.anchor = (
            space.one.project(anchor) if self.half and anchor is not None and anchor.numel() else anchor
        )
        self.in_motion = False  # while the section is being written: it may be off the group
        self.seen = views.Seen(versions=views.versions(self), expected=upkeep.expected_of_loaded(self))
        self._targets: list[Tensor] | None = None  # views of the point, one for each weight

    # -- layout -----------------------------------------------------------------------------------------------------

    def pieces(self, tensors: list[Tensor]) -> list[Tensor]:
        """What this process works on: of ordinary tensors, all."""
        return tensors

    def whole(self, X: Tensor, lead: int) -> Tensor:
        """A tensor of weights as the base optimizer sees it; its first `lead` dimensions are no weight's."""
        return X

    def local(self, X: Tensor) -> Tensor:
        """The inverse of `whole`."""
        return X

    def placed(self, value: Tensor) -> Tensor:
        """A tensor of a weight's state where it belongs."""
        return value

    def row(self, X: Tensor, i: int) -> Tensor:
        """X[i], a view."""
        return X[i]

    def points(self, X: Tensor) -> Tensor:
        """(P, *shape) as points (M, *point); a view where the batch dimensions allow it."""
        return X.reshape(-1, *self.E.shape)

    @property
    def W(self) -> Tensor:
        """The velocities, as points."""
        return self.points(self.local(self.H))

    def held_by_weights(self) -> Tensor | None:
        """Y where the section does not hold it, in one piece: spaces write to views of it."""
        return None if self.section.holds_point else self.points(self.weights()).contiguous()

    def weights(self) -> Tensor:
        """(P, *shape), to be called without gradients; of a single weight it is the weight's own memory."""
        one = len(self.params) == 1
        weights = self.params[0].detach().unsqueeze(0) if one else torch.stack(self.params)
        return weights if self.as_is else self.space.read(weights)

    def exact(self, weights: Tensor) -> Tensor:
        """Points in the dtype of computation; half precision ones where they were rounded from."""
        Y = self.points(weights.to(self.H.dtype))
        return self.space.one.project(Y) if self.half and Y.numel() else Y

    def reading(self) -> Tensor:
        """The weights, in the form in which `seen.expected` is kept."""
        weights = self.weights()
        if self.half:
            return weights
        return (
            self.points(weights) if self.section.holds_point else self.section.reading(self.points(weights))
        )

    def any_of_weight(self, x: Tensor) -> Tensor:
        """Of values (M), one for each point, whether any of a weight's is true: (P)."""
        return x.view(len(self.params), math.prod(self.batch[1:])).any(1)

    def each(self, x: Tensor) -> Tensor:
        """Values (M), one for each point, to be multiplied with points."""
        return x.view(-1, *[1] * self.E.dim())

    def moments(self) -> list[Tensor]:
        """State tensors with an entry for each weight, (P, ...) here."""
        tensors = [self.local(v) for v in self.state.values() if views.is_stacked(v, self)]
        return tensors if self.stacked else [v.unsqueeze(0) for v in tensors]

    def turning(self) -> list[Tensor]:
        """Odd (momentum-like) state, as points: what turns with an implicit section's frame."""
        return [self.points(self.local(self.state[key])) for key in sorted(self.vectors & set(self.state))]

    def even(self) -> list[Tensor]:
        """Even state (second moments), as points."""
        others = [v for k, v in self.state.items() if k not in self.vectors and torch.is_tensor(v)]
        return [self.points(self.local(v)) for v in others if v.shape == self.H.shape]

    def name_of_point(self, i: int) -> str:
        """The weight that a point belongs to."""
        return self.names[i // math.prod(self.batch[1:])]

    def part(self, index: list[int]) -> Stack:
        """The stack of some of the weights, with a copy of their state."""
        states = [views.member(self, i) for i in index]
        params, names = [self.owners[i] for i in index], [self.names[i] for i in index]
        part = type(self)(self.group, self.gi, self.space, self.kind, params, names, states, self.vectors)
        then = self.seen.expected
        if then is not None and (self.half or not part.section.holds_point):
            chosen = (
                then[index]
                if self.half
                else then.unflatten(0, self.batch)[index].flatten(0, len(self.batch) - 1)
            )
            part.seen = replace(part.seen, expected=chosen)
        part.seen = replace(part.seen, versions=tuple(self.seen.versions[i] for i in index))
        views.show(part, tuple(self.seen.dicts[i] for i in index))
        return part

    def drop_section(self) -> None:
        """Delete the section from each state; it is rebuilt from the weights."""
        for d in filter(None, self.seen.dicts):
            for key in views.SECTION_KEYS:
                d.pop(key, None)

    # -- Algorithm 3: reads no value, for torch.compile and accelerators ----------------------------------------------

    def global_grad(self, B: Tensor) -> Tensor | None:
        """B <- global_rep(Lambda, rgrad(Y, G)), in the layout of the shadow; returns Y where the weights hold
        it."""
        grads: list[Any] = [p.grad for p in self.owners]
        if True in [g.is_sparse for g in grads]:
            grads = [g.to_dense() for g in grads]
        grads = self.pieces(grads)
        G = grads[0].unsqueeze(0) if len(grads) == 1 else torch.stack(grads)
        G = G if self.as_is else self.space.read(G, gradient=True)
        Y = self.held_by_weights()
        self.section.global_grad(Y, self.points(G.detach().to(self.H.dtype)), self.points(self.local(B)))
        return Y

    def from_anchor(self) -> Tensor | None:
        """H <- global_grad(Lambda, Y - Y0), the gradient of |Y - Y0|^2/2, where weights decay towards an
        anchor Y0.

        Base's weight decay takes it for the weight. Returns a copy, to be taken off again: W is what Base
        adds to it.
        """
        if self.anchor is None or not any(self.group.get(key) for key in DECAYS):
            return None
        held = self.held_by_weights()
        Y = self.section.point(held)
        self.section.global_grad(held, Y - self.space.one.representative(Y, self.anchor), self.W)
        return self.W.clone()

    def update_section(self, Y: Tensor | None) -> tuple[Tensor, Tensor]:
        """Lambda <- Lambda R(W), W = H, in place; returns the new Y and the lengths of W. Where W = 0 no bit
        changes.

        A velocity that is longer than `limit` or not finite is deferred to `upkeep.after`, where reading it
        is free. Elsewhere it is clipped, or 0.
        """
        W = self.W
        length = torch.linalg.vector_norm(W, dim=tuple(range(1, W.dim())))
        moved = length > 0
        if torch.compiler.is_compiling() or (
            self.free and len(length) and not float(length.max()) <= self.limit
        ):
            moved = moved & (length <= self.limit)
            W = torch.where(self.each(moved), W, 0)
        elif not self.free:
            W = (W * self.each((self.limit / length).clamp_max(1))).nan_to_num(0, 0, 0)
        self.in_motion = True
        return self.section.update(Y, W, self.retraction, self.turning(), moved), length

    def apply_section(self, Y: Tensor, length: Tensor) -> None:
        """Y = Lambda E into the weights; of half precision ones those that moved, the others are rounded
        already."""
        points = Y.unflatten(0, self.batch)
        if self.half:
            moved = self.any_of_weight(length > 0).view(-1, *[1] * (points.dim() - 1))
            points = torch.where(moved, points.to(self.where[0]), self.space.split(self.weights()))
        if torch.compiler.is_compiling() or points.data_ptr() != self.params[0].data_ptr():
            if self.as_is:
                torch._foreach_copy_(self.params, self._split(points))
            else:
                self.space.write(self.params, self._split(points))
        self.written()

    def _split(self, points: Tensor) -> list[Tensor]:
        """Points of P weights as P views; those of a section that stays where it is are made once."""
        if torch.compiler.is_compiling() or self.half or not self.section.holds_point:
            return list(points.unbind(0))
        if self._targets is None:
            self._targets = list(points.unbind(0))
        return self._targets

    def written(self) -> None:
        """`params` are what the weights are to be: they are the weights."""
