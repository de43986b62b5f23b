"""Weights of one kind as one batch: their layout, their state, and the lines of Algorithm 3 for them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ghor._torch.memory import keep_freed_memory
from ghor._torch.precision import COMPUTE_DTYPE
from ghor._torch.sharding import ShardLayout, is_sharded
from ghor._torch.values import SELDOM, may_read
from ghor.constraints.validation import batch_dims
from ghor.linalg import by_coordinates
from ghor.retraction import by_name
from ghor.spaces import Space
from ghor.spaces.sections import KINDS, SECTION_KEYS, Implicit, Transported, from_state

# Our keys in state[p], beside those of the base optimizer: the section; the point in float32 ("master") where
# the weight is half precision and the section does not hold it; the point that weight decay draws the weight
# towards; and how often the weight has moved.
POINT_KEYS = (*SECTION_KEYS, "decay_target")
STATE_KEYS = (*POINT_KEYS, "moves")

KEPT = 1 << 21  # the most numbers in a gradient that a stack keeps the memory of
FEW = 1 << 16  # numbers that torch.equal compares faster than two kernels do

_version = operator.attrgetter("_version")
_dtype = operator.attrgetter("dtype")


@dataclass
class Snapshot:
    """A stack's weights and states as we left them: whatever differs now was changed by others."""

    dicts: tuple[dict[str, Any] | None, ...] = ()  # state[p], where there is one
    values: tuple[Any, ...] = ()  # all their values: the objects, to be compared with `is`
    bound: tuple[Any, ...] | None = None  # the values of the stack's state, of which those are views
    shared: tuple[Tensor, ...] = ()  # tensors that all weights share, such as a step count
    shared_versions: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()  # of the weights
    expected: Tensor | None = None  # what `Stack.reading` has to return


class Stack:
    """P weights of one group, space, shape, dtype, device and step count, as one tensor (P, *shape).

    `H` is their shadow, 0 between steps, and `state` the base optimizer's state for it. The geometry sees
    points (M, *point), where M is P times the weights' own batch dimensions; `W` is H in that layout. With
    `stacked=False` there is a single weight, and H has its shape without a leading dimension.

    `parameters` are the optimizer's; `params` are the tensors that this process works on, which differ only
    for sharded weights (`ShardedStack`).
    """

    def __init__(
        self,
        group: dict[str, Any],
        gi: int,
        space: Space,
        kind: str,
        parameters: list[Tensor],
        names: list[str],
        states: list[dict[str, Any]],
        vectors: set[str],
        stacked: bool = True,
    ) -> None:
        self.group, self.gi, self.space, self.kind = group, gi, space, kind
        self.parameters, self.names, self.vectors, self.stacked = parameters, names, vectors, stacked
        self.as_is = space.one == space  # a weight is a plain batch of points: no blocks, no padding row
        self.params = params = self.pieces(parameters)
        self.shape = space.by_rows(params[0]).shape
        self.where = params[0].dtype, params[0].device
        self.given = parameters[0].shape
        dtype = COMPUTE_DTYPE.get(params[0].dtype, params[0].dtype)
        self.half = dtype != params[0].dtype
        split = space.split(params[0]).shape
        # Only the layout and dtype of E are used, so it has no values.
        self.E = torch.empty(split[len(split) - space.dims :], dtype=params[0].dtype, device="meta")
        self.batch = (len(params), *split[: len(split) - space.dims])
        self.H = self.whole(
            torch.zeros((*self.batch[:stacked], *self.shape), dtype=dtype, device=self.where[1]), stacked
        )
        self.free = may_read(self.H)
        self.may_fuse = self.free and not (self.H.is_complex() or is_sharded(self.H))
        # Above `large` rounding is repaired at once; above `limit` a step is taken in float64.
        reach = space.reach(params[0].shape)
        self.large, self.limit = 0.5 * reach, min(4 * reach, space.max_velocity)
        # A sphere of another radius, which its section keeps: lengths of W/r are angles, on the unit sphere.
        self.of_radius, self.angular = getattr(space, "radius", 1) != 1, getattr(space.one, "unit", space.one)
        # Whether a length is the Frobenius norm, saving a call.
        self.plain_length = type(space).step_length is Space.step_length
        self.retraction, self.max_angle = by_name(group["retraction"]), group["max_angle"]
        self.state = self._gather(states)
        self.moves = torch.zeros((), dtype=torch.int64, device="cpu")
        if "moves" in states[0]:
            self.moves.copy_(states[0]["moves"])
        self.age = int(self.moves)
        held, Y = self._gather_points(states), self.exact(self.weights())
        self.section = from_state(KINDS[kind], space.one, self.E, held, Y, self.half, self.turning())
        if isinstance(self.section, Implicit) and space.spreads:
            self.section.squares = self.even
        self.B: Tensor | None = None  # memory for the gradient, where a stack keeps it between steps
        self.keep_points(Y)
        self.written = self._own_layout()
        target = held.get("decay_target")
        if self.half and target is not None and target.numel():
            target = space.one.project(target)
        self.decay_target: Tensor | None = target  # (M, *point)
        self.decays = False  # whether the group has a weight decay now; looked up before each step
        self.longest: float | None = None  # the longest velocity of this step, once it was read
        self.shortest = 0.0
        self.loaded = bool(held)  # whether the section is that of a state, and has not moved since
        self.in_motion = False  # True while the section is being written, when it may be off the group
        self.seen = Snapshot(versions=tuple(map(_version, parameters)))
        self.seen.expected = self._expected_at_start()
        self._targets: list[Tensor] | None = None  # views of the points, one for each weight

    # -- layout ----------------------------------------------------------------------------------------------

    def pieces(self, tensors: list[Tensor]) -> list[Tensor]:
        """The part of each tensor that this process works on: all of an ordinary one."""
        return tensors

    def whole(self, X: Tensor, lead: int) -> Tensor:
        """X as the base optimizer sees it; its first `lead` dimensions do not belong to the weight."""
        return X

    def local(self, X: Tensor) -> Tensor:
        """The inverse of `whole`."""
        return X

    def keep_points(self, Y: Tensor) -> None:
        """Keep a copy of the points where the section does not have one."""

    def placed(self, value: Tensor) -> Tensor:
        """A state tensor, moved to where its weight is."""
        return value

    def rows(self, X: Tensor) -> Sequence[Tensor]:
        """X[0], X[1], ..., as views."""
        return X.unbind(0)

    def write_back(self) -> None:
        """Copy `params` to the parameters where they are not the same tensors."""

    def points(self, X: Tensor) -> Tensor:
        """(P, *shape) as points (M, *point); a view where the batch dimensions allow it."""
        return X.reshape(-1, *self.E.shape)

    @property
    def W(self) -> Tensor:
        """The velocities in the layout of points."""
        return self.points(self.local(self.H))

    def weights(self) -> Tensor:
        """The weights as one tensor (P, *shape), without gradients; a single weight is not copied."""
        one = len(self.params) == 1
        weights = self.params[0].detach().unsqueeze(0) if one else torch.stack(self.params)
        return weights if self.as_is else self.space.by_rows(self.space.read(weights))

    def held_by_weights(self) -> Tensor | None:
        """Y where the section does not hold it, contiguous because spaces write to views of it."""
        return None if self.section.holds_point else self.points(self.weights()).contiguous()

    def _own_layout(self) -> Tensor | None:
        """Memory for the points of many weights in their own layout, where a section has another one.

        Weights are then written from it, and compared with it in the next step, as memory lies: for small
        matrices that takes half the time.
        """
        if len(self.params) == 1 or self.half or not isinstance(self.section, Transported):
            return None
        point = self.section.point(None)
        return None if point.is_contiguous() else point.contiguous()

    def exact(self, weights: Tensor) -> Tensor:
        """Weights as points in the dtype of computation.

        Rounding takes half precision weights off the space, so these are projected.
        """
        Y = self.points(weights.to(self.H.dtype))
        return self.space.one.project(Y) if self.half and Y.numel() else Y

    def any_of_weight(self, x: Tensor) -> Tensor:
        """Whether any of a weight's points is true: (M) -> (P)."""
        return x.view(len(self.params), math.prod(self.batch[1:])).any(1)

    def each(self, x: Tensor) -> Tensor:
        """One value per point, shaped so that it multiplies points: (M) -> (M, 1, ...)."""
        return x.view(-1, *[1] * self.E.dim())

    def name_of_point(self, i: int) -> str:
        """The name of the weight that a point belongs to."""
        return self.names[i // math.prod(self.batch[1:])]

    # -- state: the stack's tensors, and state[p] as views of them -----------------------------------------

    def is_stacked(self, value: Any) -> bool:
        """Whether an entry of the stack's state has a leading dimension for the weights."""
        return is_per_weight(value, self.H) and (not self.stacked or len(value) == len(self.params))

    def moments(self) -> list[Tensor]:
        """State tensors with an entry for each weight, (P, ...)."""
        tensors = [self.local(v) for v in self.state.values() if self.is_stacked(v)]
        return tensors if self.stacked else [v.unsqueeze(0) for v in tensors]

    def turning(self) -> list[Tensor]:
        """State that is odd in the gradient (momentum), as points: it turns with an implicit section."""
        return [self.points(self.local(self.state[key])) for key in sorted(self.vectors & set(self.state))]

    def even(self) -> list[Tensor]:
        """State that is even in the gradient (second moments), as points."""
        others = [v for k, v in self.state.items() if k not in self.vectors and torch.is_tensor(v)]
        return [self.points(self.local(v)) for v in others if v.shape == self.H.shape]

    def _gather(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The stack's state from its members': tensors of a weight's shape are stacked, others shared."""
        out = {}
        for key, value in states[0].items():
            if key in STATE_KEYS:
                continue
            if not torch.is_tensor(value):
                out[key] = value
            elif not is_per_weight(value, self.params[0]):
                out[key] = value.clone()
            else:
                values = [self.space.by_rows(self.placed(state[key])) for state in states]
                stacked = torch.stack(values) if self.stacked else values[0].contiguous()
                H = self.H
                same = (
                    value.is_floating_point() == H.is_floating_point()
                    and value.is_complex() == H.is_complex()
                )
                out[key] = stacked.to(H.dtype) if same else stacked
        return out

    def _gather_points(self, states: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """The members' sections and decay targets, (M, ...) each, in the dtype of computation."""
        held = {}
        for key in POINT_KEYS:
            if key in states[0]:
                values = [self.local(self.placed(state[key])) for state in states]
                X = torch.stack(values).to(self.H)
                if key == "decay_target":
                    held[key] = self.points(self.space.by_rows(self.space.read(X))).contiguous()
                else:
                    held[key] = X.flatten(0, len(self.batch) - 1)
        return held

    def members(self) -> list[dict[str, Any]]:
        """state[p] of every weight: views of the stacked tensors; other values are shared by all."""
        count = len(self.params)
        columns: dict[str, Sequence[Any]] = {}
        for key, value in self.state.items():
            if not self.is_stacked(value):
                columns[key] = [value] * count
            else:
                rows = self.rows(value) if self.stacked else [value]
                columns[key] = list(map(self.space.by_rows, rows))
        for key, value in self.section.tensors().items():
            columns[key] = [self.whole(X, 0) for X in value.unflatten(0, self.batch).unbind(0)]
        if self.decay_target is not None:
            targets = self.space.by_rows(self.decay_target.view(count, *self.shape)).unbind(0)
            columns["decay_target"] = [self.whole(X, 0) for X in targets]
        columns["moves"] = [self.moves] * count
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def publish(self, state: Any, only_if_any: bool = False) -> None:
        """Put the members' states into the optimizer's if the base has bound new objects since last time."""
        seen = self.seen
        seen.versions = tuple(map(_version, self.parameters))
        seen.shared_versions = tuple(map(_version, seen.shared))
        bound = tuple(self.state.values())
        if (
            seen.bound is not None
            and len(bound) == len(seen.bound)
            and all(map(operator.is_, bound, seen.bound))
        ):
            return
        if only_if_any and not self.state:  # there is nothing to show before the first step
            dicts = tuple(map(state.get, self.parameters))
        else:
            dicts = tuple(state[p] for p in self.parameters)
        self._show(dicts)

    def _show(self, dicts: tuple[dict[str, Any] | None, ...]) -> None:
        """Fill the members' states with views of the stack's; None in `dicts` is a state that is absent."""
        there = [d for d in dicts if d is not None]
        if there:
            for d, entries in zip(dicts, self.members(), strict=True):
                if d is not None:
                    d.clear()
                    d.update(entries)
        shared = tuple(v for v in self.state.values() if torch.is_tensor(v) and not self.is_stacked(v))
        seen = self.seen
        seen.dicts, seen.values = dicts, _values(there)
        seen.bound = tuple(self.state.values()) if there else None
        seen.shared = shared if there else ()
        seen.shared_versions = tuple(map(_version, seen.shared))

    def drop_section(self) -> None:
        """Delete the section from each state; it will be rebuilt from the weights."""
        for d in filter(None, self.seen.dicts):
            for key in SECTION_KEYS:
                d.pop(key, None)

    def subset(self, index: list[int]) -> Stack:
        """A stack of some of the weights, with a copy of their state."""
        members = self.members()
        states = [members[i] for i in index]
        parameters, names = [self.parameters[i] for i in index], [self.names[i] for i in index]
        part = type(self)(self.group, self.gi, self.space, self.kind, parameters, names, states, self.vectors)
        then = self.seen.expected
        if then is None:  # on an accelerator, between two looks: a write so far is noticed by the next one
            part.seen.expected = None
        elif isinstance(self.section, Implicit) and self.section.holds_point:
            part.keep_points(then.unflatten(0, self.batch)[index].flatten(0, len(self.batch) - 1))
            part.seen.expected = part.section.point(None)
        elif self.half or not part.section.holds_point:
            if self.half:
                chosen = then[index]
            else:
                chosen = then.unflatten(0, self.batch)[index].flatten(0, len(self.batch) - 1)
            part.seen.expected = chosen
        part.seen.versions = tuple(self.seen.versions[i] for i in index)
        part.loaded, part.decays = self.loaded, self.decays
        part._show(tuple(self.seen.dicts[i] for i in index))
        return part

    # -- what others may have changed ----------------------------------------------------------------------

    def in_place(self, state: Any) -> bool:
        """Whether the optimizer's state is still what we put there, and the weights still of one kind."""
        seen = self.seen
        values = _values([d for d in seen.dicts if d is not None])
        return (
            self.parameters[0].device == self.where[1]
            and set(map(_dtype, self.parameters)) == {self.where[0]}
            and all(map(operator.is_, map(state.get, self.parameters), seen.dicts))
            and len(values) == len(seen.values)
            and all(map(operator.is_, values, seen.values))
        )

    def as_left(self) -> bool:
        """Whether weights and shared state are as we left them, as far as we may look now: the common case.

        Writes through `.data` escape the version counters, so values are compared too; on an accelerator
        every `SELDOM` steps only. `guards.before` deals with any change.
        """
        seen = self.seen
        if (
            self.params is not self.parameters  # sharded: the local tensors have to be fetched
            or self.parameters[0].shape != self.given
            or tuple(map(_version, self.parameters)) != seen.versions
            or tuple(map(_version, seen.shared)) != seen.shared_versions
        ):
            return False
        if seen.expected is None or not (self.free or self.age % SELDOM == 0):
            return True
        return _same(self.reading(), seen.expected)

    def reading(self) -> Tensor:
        """The weights, in the form in which `seen.expected` is kept."""
        weights = self.weights()
        if self.half:
            return weights
        Y = self.points(weights)
        return Y if self.section.holds_point else self.section.reading(Y, self.seen.expected)

    def expected(self) -> Tensor:
        """The `reading` of the next step, now that the weights are what they should be."""
        if self.section.holds_point and not self.half:
            point = self.section.point(None)
            return point if self.written is None else self.written.copy_(point)
        reading, then = self.reading(), self.seen.expected
        if reading.data_ptr() != self.params[0].data_ptr():
            return reading
        return reading.clone() if then is None else then.copy_(reading)

    def _expected_at_start(self) -> Tensor:
        """`expected` for a new stack, whose section may come from a file.

        Half precision weights near the section's point count as unchanged. For the others the point itself,
        rounded, is expected, so that the first step finds them changed.
        """
        if not self.half or not self.params[0].numel():
            return self.expected()
        weights, Y = self.weights(), self.section.point(None)
        near = (self.exact(weights) - Y).abs().flatten(1).amax(1) <= 1e-5
        near = ~self.any_of_weight(~near).view(-1, *[1] * len(self.shape))
        return torch.where(near, weights, Y.reshape(weights.shape).to(self.where[0]))

    # -- Algorithm 3: reads no value, for torch.compile and accelerators -----------------------------------

    def global_grad(self, B: Tensor) -> Tensor | None:
        """B <- global_rep(Lambda, rgrad(Y, G)) in the shadow's layout; returns Y if the weights hold it."""
        grads: list[Any] = [p.grad for p in self.parameters]
        if True in [g.is_sparse for g in grads]:
            grads = [g.to_dense() for g in grads]
        grads = self.pieces(grads)
        G = grads[0].unsqueeze(0) if len(grads) == 1 else torch.stack(grads)
        G = G if self.as_is else self.space.by_rows(self.space.read(G, gradient=True))
        Y, G = self.held_by_weights(), self.points(G.detach().to(self.H.dtype))
        self.section.global_grad(Y, G, self.points(self.local(B)))
        return Y

    def away_from_target(self) -> Tensor:
        """H <- the vector from the decay target Y0 to the weight Y, in g^hor (`Space.away_from`).

        Base's weight decay takes H for the weight, and shortens it. Returns a copy to subtract after Base's
        step, because W is only what Base has added.
        """
        assert self.decay_target is not None
        self.section.away_from(self.held_by_weights(), self.decay_target, self.W)
        return self.W.clone()

    def update_section(self, Y: Tensor | None) -> tuple[Tensor, Tensor]:
        """Lambda <- Lambda R(W) in place; returns the new Y and the lengths of W. W = 0 changes no bit.

        Velocities that are not finite or longer than `limit` are left out where values may be read, and in
        compiled code: `guards.after` takes them where values may be read. Elsewhere those that are not finite
        are set to 0, and long ones are clipped.
        """
        W = self.W if self.max_angle is None else self.limited(self.max_angle)
        if self.plain_length:
            length = torch.linalg.vector_norm(W, dim=tuple(range(1, W.dim())))
        else:
            length = self.step_length(W)
        moved, self.longest = length, None
        if not self.free:
            W = (W * self.each((self.limit / length).clamp_max(1))).nan_to_num(0, 0, 0)
        elif torch.compiler.is_compiling() or not self.all_short(length):
            moved = (length > 0) & (length <= self.limit)
            W = torch.where(self.each(moved), W, 0)
        self.in_motion = True
        span = self.lengths_read() if moved is length else None
        return self.section.update(Y, W, self.retraction, self.turning(), moved, span), length

    def step_length(self, W: Tensor) -> Tensor:
        """`Space.step_length`, on spheres the angle: W is divided first, because its square may overflow."""
        return self.angular.step_length(W * self.each(1 / self.section.radius()) if self.of_radius else W)

    def lengths_read(self) -> tuple[float, float] | None:
        """The least and the greatest length of this step's velocities, if they were read."""
        return None if self.longest is None else (self.shortest, self.longest)

    def all_short(self, length: Tensor) -> bool:
        """Whether no velocity is longer than `limit`; keeps the longest length for `guards.after`."""
        if length.numel() == 1:
            self.shortest = self.longest = float(length)
        else:
            least_and_most = torch.aminmax(length) if length.numel() else (0.0, 0.0)
            self.shortest, self.longest = map(float, least_and_most)
        return self.longest <= self.limit

    def limited(self, max_angle: float) -> Tensor:
        """W, shortened in place where it turns a vector by more than `max_angle`; others keep every bit."""
        W = self.W
        known = W.nan_to_num(0, 0, 0)  # what is not finite stays so, for `guards.after`
        peak = known.abs().flatten(1).amax(1)
        peak = torch.where(peak == 0, 1, peak)  # divided by first: squares of entries may overflow
        angle = self.angular.angle(known / self.each(peak))
        angle = angle / self.section.radius() if self.of_radius else angle
        return W.mul_(self.each((max_angle / peak / angle).clamp_max(1)))

    def write_weights(self, Y: Tensor, length: Tensor) -> None:
        """Copy the points Y = Lambda E to the weights, except half precision weights that did not move."""
        points = (Y if self.written is None else self.written.copy_(Y)).unflatten(0, self.batch)
        if self.half:
            moved = self.any_of_weight(length > 0).view(-1, *[1] * (points.dim() - 1))
            weights = self.weights().reshape(points.shape)
            points = torch.where(moved, points.to(self.where[0]), weights)
        # The same address: an implicit section has moved a single weight in place, and nothing is to copy.
        if torch.compiler.is_compiling() or points.data_ptr() != self.params[0].data_ptr():
            if self.as_is:
                torch._foreach_copy_(self.params, self._unstack(points))
            else:
                self.space.write(self.params, self._unstack(points))
        self.write_back()

    def _unstack(self, points: Tensor) -> list[Tensor]:
        """Points of P weights as P views, made once if the points stay at the same address."""
        if torch.compiler.is_compiling() or self.half or not self.section.holds_point:
            return list(points.unbind(0))
        if self._targets is None:
            self._targets = list(points.unbind(0))
        return self._targets


class NarrowStack(Stack):
    """A stack of many short vectors, (P, M, N) with a small N, that stores them coordinate by coordinate.

    The formulas for spheres and hyperbolic spaces multiply vectors by one number per point. Along rows that
    is a loop of length N for each point; with coordinates first, (N, P, M), it is N loops over all points.
    Base sees H and its state in that layout, and the section holds the points in it.
    """

    def whole(self, X: Tensor, lead: int) -> Tensor:
        return X.movedim(-1, 0).contiguous() if lead else X

    def local(self, X: Tensor) -> Tensor:
        return X.movedim(0, -1) if X.shape == self.H.shape else X

    def rows(self, X: Tensor) -> Sequence[Tensor]:
        return self.local(X).unbind(0)

    def is_stacked(self, value: Any) -> bool:
        return torch.is_tensor(value) and value.shape == self.H.shape

    def keep_points(self, Y: Tensor) -> None:
        assert isinstance(self.section, Implicit)
        self.section.hold(by_coordinates(Y))
        # Fresh memory costs page faults, which take longer than the arithmetic.
        self.B = torch.empty_like(self.H) if self.H.numel() <= KEPT else None
        keep_freed_memory()

    def _gather(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        shape = self.local(self.H).shape
        return {
            key: self.whole(value, 1) if torch.is_tensor(value) and value.shape == shape else value
            for key, value in super()._gather(states).items()
        }

    def write_weights(self, Y: Tensor, length: Tensor) -> None:
        if torch.compiler.is_compiling() or not self.as_is:
            return super().write_weights(Y, length)
        for p, y in zip(self.params, Y.unflatten(0, self.batch).unbind(0), strict=True):
            torch._foreach_copy_(p.unbind(-1), y.unbind(-1))  # all at once it would be done by rows: slow
        return None


def is_narrow(space: Space, weights: list[Tensor]) -> bool:
    """Whether a stack of these weights would be a `NarrowStack`: values can be read, and the space agrees."""
    p = weights[0]
    split = space.split(p).shape
    point = split[len(split) - space.dims :]
    count = len(weights) * p.numel() // max(1, math.prod(point))
    # Rows that hold several points, in blocks, could not be viewed as points in that layout.
    plain = space.by_rows(p).shape[-1:] == point and COMPUTE_DTYPE.get(p.dtype, p.dtype) == p.dtype
    return plain and may_read(p) and space.one.narrow(count, point, p.dtype, p.device)


class ShardedStack(Stack):
    """A stack of DTensors: `params` are local tensors, and H and the state are DTensors made of such.

    `ghor._torch.sharding` decides whether a local tensor is the process's own shard or the gathered weight.
    """

    def pieces(self, tensors: list[Any]) -> list[Tensor]:
        if not hasattr(self, "shards"):
            self.shards = ShardLayout(tensors[0], batch_dims(tensors[0], self.space))
        return self.shards.local_tensors(tensors)

    def whole(self, X: Tensor, lead: int) -> Any:
        return self.shards.to_dtensor(X, lead)

    def local(self, X: Any) -> Tensor:
        return X.to_local() if is_sharded(X) else X

    def placed(self, value: Any) -> Any:
        return self.shards.place(value)

    def rows(self, X: Any) -> Sequence[Any]:
        if not is_sharded(X):
            return X.unbind(0)
        # Not X[i], which changes the shape of X itself in torch 2.9.
        return [X[i : i + 1].squeeze(0) for i in range(len(X))]

    def write_back(self) -> None:
        """Each process writes its own shard; nothing is sent."""
        self.shards.write(self.parameters, self.params)


def is_per_weight(value: Any, like: Tensor) -> bool:
    """Whether a state tensor has as many dimensions as a weight; some may be 1, as those of row norms are."""
    return torch.is_tensor(value) and value.dim() == like.dim() > 0


def _same(a: Tensor, b: Tensor) -> bool:
    """torch.equal, but faster: that compares one number after the other, on one thread.

    Two float32 are compared as one integer, so as bits: -0 is not 0, but NaN is NaN.
    """
    even = not any(k % 2 for k in (a.numel(), a.storage_offset(), b.storage_offset()))
    if even and a.element_size() == 4 and a.is_contiguous() and b.is_contiguous():
        a, b = a.view(-1).view(torch.int64), b.view(-1).view(torch.int64)
    if a.numel() < FEW or a.is_floating_point() or a.is_complex():
        return torch.equal(a, b)
    least, most = torch.aminmax(a ^ b)
    return not (bool(least) or bool(most))


def shared_values(p: Tensor, state: dict[str, Any]) -> tuple[Any, ...]:
    """The part of a state that members of a stack must share: its keys, and values not kept per weight."""
    shared = {k: v for k, v in state.items() if k not in POINT_KEYS and not is_per_weight(v, p)}
    values = ((k, v.tolist() if torch.is_tensor(v) else v) for k, v in shared.items())
    return tuple(sorted(state)), repr(sorted(values))


def _values(dicts: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
    return tuple(chain.from_iterable(map(dict.values, dicts)))
