"""A batch: weights of one kind, computed as one. It knows layouts, radii and state[p]; frames know geometry.

A batch is derived: all that it knows can be made again from its weights and state[p], to the bit.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import chain, starmap
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ghor._torch.memory import keep_freed_memory
from ghor._torch.precision import COMPUTE_DTYPE
from ghor._torch.sharding import ShardLayout, is_sharded
from ghor.constraints.registry import declared_radii, keep_radii
from ghor.constraints.validation import Warn, batch_dims, check_on_space
from ghor.lifting.groups import Weight
from ghor.lifting.law import Traits
from ghor.linalg import extremes
from ghor.spaces.frames import Frame, rows
from ghor.spaces.messages import no_digits
from ghor.spaces.retraction import RETRACTIONS
from ghor.spaces.tangent import Tangent

REPAIR_EVERY = 10  # moves of a batch between two repairs of the rounding of its points
WHOLE_EVERY, A_SIDE = 100, 17  # and of whole sections: so many, or 17 N/n, 4 % of a step's arithmetic
LOOK_EVERY = {"cpu": 10}  # and between two looks at its numbers, which reads one value; 100 on other devices
ROWS, ROOM = 64, 1 << 22  # of a stored frame that nobody asked for: N <= 64 n, or so many numbers in all

LARGE = 1 << 16  # numbers of weights that are compared one by one
NEAR = 1e-5  # from the point of a half precision weight that has not moved, to that of its state

FRAME_KEYS = ("section", "frame_anchor")  # what a frame keeps in state[p]
POINT_KEYS = ("master", "decay_target")  # the point, where the weight is not it to the bit; decay's anchor
# The radii of spheres of any radius; the weight that the rule reads; and how often the weight has moved.
OUR_KEYS = (*FRAME_KEYS, *POINT_KEYS, "radius", "developed", "moves")

BESIDE = ".A"  # state[p]["momentum_buffer"] has K in the weight's shape, "momentum_buffer.A" the A beside it

_version, _grad = operator.attrgetter("_version"), operator.attrgetter("grad")


class OwnRule(NamedTuple):
    """A rule of ours for a batch: the state that it begins with, and W, written to b.H, from b.G and b.state.

    It returns the numbers a in W = a m if it is so simple, see `Frame.multiple`.
    """

    state: Callable[[Batch], dict[str, Any]]
    velocity: Callable[[Batch], Any]


class Batch:
    """Weights as points (M, N, n), with their frame, their velocity H, and the rule's state for H.

    Where weights may share a tensor, H is (M, N, n), too; else it is in the one weight's shape. A rule that
    does not read its weight finds H = 0. One that does finds the weight developed: H_0 = Lambda^-1 Y = E, H_t
    = E + W_1 + ... + W_t. state[p] shows live views of the batch's state. Whatever a batch is made of is in
    the weights and there.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        group: dict[str, Any],
        states: Sequence[dict[str, Any]],
        traits: Traits,
        warn: Warn,
    ) -> None:
        keep_freed_memory()  # page faults of temporaries take longer than the arithmetic
        self.weights, self.warn, first = list(weights), warn, weights[0]
        self.params, self.names = [w.p for w in weights], [w.name for w in weights]
        self.gi, self.space, self.layout = first.gi, first.space, first.space.layout
        self.R, self.max_angle = RETRACTIONS[group["retraction"]], group["max_angle"]
        self.stacks, self.odd, self.even = traits.stacks, sorted(traits.odd), sorted(traits.even)
        self.entrywise = traits.entrywise
        self.shards = ShardLayout(first.p, batch_dims(first.p, self.space)) if is_sharded(first.p) else None
        self.before: Frame | None = None  # the frame that moments are in, if the group wants another kind
        self._lay_out()
        states = list(map(self._here, states))
        self._stand(group["section"], states, traits)
        self.H = self._room()
        self.G: Tensor  # its gradient, and `length`, that of this step's velocities, 0 of those left out:
        self.length: Tensor  # both are there during a step alone
        self.least, self.most = 0.0, 0.0  # the ends of `length`, see `extremes`
        self.long = False  # whether a velocity may have been too long, or not finite
        self.developed = self._developed(states) if traits.reads else None
        self.state = self._gathered(states)
        self._translate()
        moves = states[0].get("moves", torch.zeros((), dtype=torch.int64, device="cpu"))
        self.moves, self.age = moves.clone(), int(moves)
        self.steps = self.age  # also those that moved nothing
        y = self.frame.point()
        self.peak = y.real.new_zeros(len(y), 1, 1)  # the longest velocity of each point, or NaN, since a look
        self.lost = torch.zeros((), dtype=torch.bool, device=y.device)  # whether a write through .data was
        self.in_motion, self.decays = False, False
        self.group: dict[str, Any] = group
        self.own: OwnRule | None = None  # a rule of ours
        self.multiple: Any = None  # the number a in W = a m, if Base's rule is so simple
        self.bound: tuple[Any, ...] | None = None  # what state[p] shows
        self.dicts: tuple[Any, ...] = ()
        self.values: tuple[Any, ...] = ()
        self.shared: list[Tensor] = []  # what the members' states have in common, and its versions
        self.leave()

    # -- what a batch is made of

    def _lay_out(self) -> None:
        """Where weights lie: their dtype, their shape, and themselves as points if these are views."""
        local, p = self._local(self.params), self.params[0]
        self.shape, self.dtype = local[0].shape, COMPUTE_DTYPE.get(p.dtype, p.dtype)
        self.kind, self.half, self.eps = p.dtype, self.dtype != p.dtype, torch.finfo(p.dtype).eps
        targets = list(map(self.layout.points, local))
        gathered = self.shards is not None and self.shards.gathers
        shared = all(starmap(shares_memory, zip(targets, local, strict=True)))
        self.views = shared and not gathered and self.layout.padding is None
        self.targets = targets if self.views else None  # writing there is one copy

    def _stand(self, section: str, states: Sequence[dict[str, Any]], traits: Traits) -> None:
        """Find the points, and the frame above them, from weights and states."""
        weights = self._weights()
        held = self._held(states)
        self.scale = self._scale(weights, held)
        y = self._checked(self._unit(weights), held)
        kept = {k: held[k] for k in FRAME_KEYS if k in held}
        if section == "auto" and not kept and not (traits.turns and (self.views or self.stacks)):
            section = "transported"
            self._check_room(y)
        geometry, at = self.space.geometry, held.get("master", y)
        has_run = "moves" in states[0]
        beside = any(k.endswith(BESIDE) for k in states[0]) or len(geometry.hor_blocks(at)) == 1
        began = "auto" if has_run and not kept and beside else section  # with a frame that keeps nothing
        if traits.free:
            one = self.layout.blocks == 1
            by_rows = None if one else self._viewable(y.new_empty(y.shape)).is_contiguous()
            self.frame = geometry.free_frame(at, began, kept, self.eps, by_rows)
        else:
            self.frame = geometry.frame(at, section, kept, self.eps)
        if has_run and section != "auto":
            self._convert(at, section)
        self._put(self._differs(y), y)
        # Whether the weight is the point, to the bit; if not, a state keeps the point or the whole section.
        self.exact = self.frame.exact and not self.half and self.scale is None
        holds = self.exact or "section" in self.frame.tensors()
        self.master = None if holds else self._viewable(self.frame.point())
        self.written = None if self.exact else self._weights().clone()
        self.anchor = self._anchor(y, held)

    def _convert(self, y: Tensor, section: str) -> None:
        """Take another kind of frame than the state has; a run without any goes on so."""
        if self.stacks and not isinstance(self.frame, Tangent):
            asked = self.space.geometry.frame(y, section, {}, self.eps)
            if asked.tensors().keys() != self.frame.tensors().keys():
                self.before, self.frame = self.frame, asked

    def _translate(self) -> None:
        """Take moments to the frame's coordinates from those of another kind of frame."""
        for X in (self.state[k] for k in self.odd if k in self.state):
            if self.before is not None:
                X.copy_(self.frame.translated(X, self.before))
        self.before = None

    def _check_room(self, y: Tensor) -> None:
        """Raise where a frame that the rule wants stored would be large."""
        M, N, n = y.shape
        if N > ROWS * n and M * N * N > ROOM:
            raise ValueError(
                f"the rule of {self.names[0]} keeps state that cannot be taken to another frame, and a "
                f"frame that stays has {N} x {N} numbers for each of {M} points: take Adam, SGD or Muon, or "
                "section='transported' all the same"
            )

    def _room(self) -> Tensor:
        """Memory for elements of g^hor: in the frame's order, unless its views could not be weights."""
        if not self.stacks:
            room = torch.zeros(self.shape, dtype=self.dtype, device=self.params[0].device)
            points = self.layout.points(room)
            if shares_memory(points, room):
                return room
            return self.layout.weight(torch.zeros_like(points), self.shape)
        room = self.frame.zeros()
        if room.dim() == 1:
            return room
        return self._viewable(room)

    def _viewable(self, X: Tensor) -> Tensor:
        """Points in an order of memory in which each weight's part is a view of the weight's shape."""
        for room in (X, X.contiguous(), X.mT.contiguous().mT):  # the last is that of wide blocks
            if shares_memory(self.layout.weight(rows(room, len(self.params))[0], self.shape), room):
                return room
        raise AssertionError(f"{self.space} has no views of shape {tuple(self.shape)}")

    def _developed(self, states: Sequence[dict[str, Any]]) -> Tensor:
        """The weight as a rule reads it, rolled out into flat space; from where a state has it."""
        if "developed" in states[0]:
            return self._like_H("developed", states)
        room = torch.zeros_like(self.H)
        y = self.frame.point()
        self._seen_as_points(room).copy_(self._in_units(self.space.geometry.origin(y).expand_as(y)))
        return room

    def _anchor(self, y: Tensor, held: dict[str, Tensor]) -> Tensor | None:
        """Where weight decay draws these weights: points, "start", or nowhere."""
        given = self.weights[0].anchor
        if given is None:
            return None
        if torch.is_tensor(given):
            return self._unit(self._padded([self._local([w.anchor])[0] for w in self.weights]))
        return held["decay_target"] if "decay_target" in held else y.clone()

    # -- weights and points

    def _local(self, tensors: Sequence[Any]) -> list[Tensor]:
        """The part of each that this process works on: all of an ordinary one."""
        if self.shards is None:
            return [t.detach() for t in tensors]
        return self.shards.local_tensors([t if is_sharded(t) else self.shards.place(t) for t in tensors])

    def _points(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.layout.points(tensors[0] if len(tensors) == 1 else torch.stack(list(tensors)))

    def _weights(self) -> Tensor:
        """The weights as points, padding rows as (1, 0, ...); one weight is a view."""
        if self.targets is not None:
            return self.targets[0] if len(self.targets) == 1 else torch.cat(self.targets)
        return self._read()

    def _read(self) -> Tensor:
        """The weights as points, wherever they are now."""
        return self._padded(self._local(self.params))

    def _padded(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors as points, padding rows as (1, 0, ...) in their unit of length."""
        X, r = self._points(tensors), self.space.radius
        unit = 1.0 if isinstance(r, str) else r
        return self.layout.padded(X, self.shape, self.space.geometry.origin(X) * unit)

    def _scale(self, weights: Tensor, held: dict[str, Tensor]) -> float | Tensor | None:
        """The radius of each point, (M, 1, 1) or one for all; None on unit spheres and where there is none.

        Radii that a state or the declaration has hold as long as the weights are there; else they are the
        weights'.
        """
        if self.space.radius != "start":
            return None if self.space.radius == 1 else float(self.space.radius)
        weights = weights.to(self.dtype)
        radii = cast(Tensor, self.space.scale(weights))
        known = held.get("radius")
        if known is None and self.shards is None:
            declared = [r for r in map(declared_radii, self.params) if r is not None]
            known = torch.cat(declared) if len(declared) == len(self.params) else None
        if known is not None:
            known = known.to(radii).reshape(radii.shape)
            y, geometry = weights / known, self.space.geometry
            near = geometry.residual(y) <= geometry.tolerance(y, eps=self.eps)
            radii = torch.where(near.reshape(radii.shape), known, radii)
        if self.shards is None:
            for p, r in zip(self.params, rows(radii, len(self.params)), strict=True):
                keep_radii(p, r)
        return radii

    def _unit(self, X: Tensor) -> Tensor:
        """Points of weights in full precision, on the unit sphere."""
        return X.to(self.dtype) if self.scale is None else X.to(self.dtype) / self.scale

    def _in_units(self, y: Tensor) -> Tensor:
        """Points or vectors in the weights' unit of length."""
        return y if self.scale is None else y * self.scale

    def _divide_(self, W: Tensor) -> None:
        """The inverse of `_in_units`, for elements of g^hor, in place."""
        if self.scale is not None:
            self.frame.scale_(W, 1 / self.scale)

    def _checked(self, y: Tensor, held: dict[str, Tensor]) -> Tensor:
        """The points of the weights, which are on their space; nothing was moved if one is not.

        Weights that were on it to the digits of a narrower dtype are projected, or go on from the point that
        their state holds.
        """
        off = self._off(y)
        if bool(off.any()) and not self.half:
            known = held.get("master", held["section"][..., : y.shape[-1]] if "section" in held else y)
            if known.shape == y.shape and near_in_half(y, known) and not bool(self._off(known).any()):
                name = self.names[0]
                self.warn(
                    "dtype", f"{name} was half precision: it goes on from the point that its state holds"
                )
                self._write(self._in_units(known))
                return known
            self._refuse(off)
            y = self._unit(self._weights())
        elif bool(off.any()):
            self._refuse(off)
        return self._nearest(y)

    def _refuse(self, off: Tensor) -> None:
        """Raise for the weights of points that are off their space."""
        of_weight = off.view(len(self.params), -1).any(1).tolist()
        params = [p for p, bad in zip(self.params, of_weight, strict=True) if bad]
        names = [name for name, bad in zip(self.names, of_weight, strict=True) if bad]
        check_on_space(params, self.space, names, self.warn)
        if bool(self._off(self._unit(self._weights())).any()):
            raise ValueError(f"{names[0]} is not on {self.space}; take ghor.{self.space}.project(...) of it")

    def _off(self, y: Tensor) -> Tensor:
        """Which points are off their space, (M)."""
        geometry = self.space.geometry
        return ~(geometry.residual(y) <= geometry.tolerance(y, eps=self.eps))

    def _nearest(self, y: Tensor) -> Tensor:
        """The points that weights of half precision stand for."""
        return self.space.geometry.nearest(y) if self.half else y

    # -- in and out: the copies of a step, which are not compiled: every weight would be a kernel

    def gather(self) -> Tensor:
        """Gradients as points; and points, where the frame reads them, or others have written them."""
        self.H.grad = self.G = torch.empty_like(self.H)
        if not self.G.numel():  # a process may hold none of their points
            return self.G
        self.follow()
        grads = [g.to_dense() if g.is_sparse else g for g in map(_grad, self.params)]
        G = self._points(self._local(grads)).to(self.dtype)
        return self.layout.padded(G, self.shape, 0.0)

    def follow(self) -> None:
        """Go on from points that were written through .data: read where that is cheap, else compared.

        To compare is to read a value: on the CPU in every step; elsewhere it is a flag for the next look.
        """
        if self.frame.reads and self.exact:
            self.frame.take(self._weights())
        elif self.H.device.type != "cpu":
            self.lost.logical_or_(self._differs(self._unit(self._weights())).any())
        elif not self._are_as_written():
            now = self._weights()
            if torch.is_tensor(self.scale):
                self.scale.copy_(cast(Tensor, self._scale(now, {"radius": self.scale})))
            moved = self._differs(y := self._unit(now))
            if bool((off := self._off(y) & moved).any()):
                self._refuse(off)
            self._put(moved, self._nearest(y))
            self.written = None if self.exact else now.clone()

    def _are_as_written(self) -> bool:
        """Whether weights are what the last step wrote; large ones without a copy in between."""
        there = self.frame.point() if self.written is None else self.written
        if self.targets is not None and there.numel() > LARGE * len(self.targets):
            return all(map(torch.equal, self.targets, rows(there, len(self.targets))))
        return torch.equal(self._weights(), there)

    def scatter(self) -> None:
        """Points to weights. A weight that is not its point to the bit is written only if it has moved."""
        if not self.H.numel():
            return
        if self.exact and self.targets is not None:
            self.frame.write(self.targets)
        else:
            new = self.frame.point() if self.master is None else self.master
            if self.master is not None and not self.frame.steady:  # else it is the frame's own memory
                self.frame.write([new])
            if self.written is not None:
                new = self._in_units(new).to(self.written.dtype)
                if not self.least > 0:
                    new = torch.where(self.length > 0, new, self.written)
                new = self.written.copy_(new)
            self._write(new)
        if self.shards is not None:  # a local shard has a version counter of its own
            torch.autograd.graph.increment_version(self.params)

    def _write(self, points: Tensor) -> None:
        if self.layout.padding is not None:
            points = self.layout.padded(points, self.shape, self._points(self._local(self.params)))
        weights = [self.layout.weight(P, self.shape) for P in rows(points, len(self.params))]
        if self.shards is None or not self.shards.gathers:
            torch._foreach_copy_(self._local(self.params), weights)
        else:
            self.shards.write(self.params, weights)

    # -- the lines of Algorithm 3: compiled, and nothing is read

    def pull(self, G: Tensor) -> Tensor | None:
        """H.grad <- global_rep(Lambda, rgrad(Y, G)), and H <- where the rule starts: returned, or None for 0.

        It is 0 for a rule that does not read its weight: there weight decay finds nothing to draw at. With an
        anchor it is the vector from there to Y: that is what decays. Else it is the developed weight.
        """
        if not G.numel():
            return None
        self.frame.pull(G, self._seen_as_points(self.G))
        if self.developed is not None:
            self.unroll()
            return self.developed
        if not self.decays or self.anchor is None:
            self.H.zero_()  # it may be left from a step that was interrupted
            return None
        away = self._seen_as_points(self.H)
        self.space.geometry.away(self.frame, self.anchor, away)
        if self.scale is not None:
            self.frame.scale_(away, self.scale)
        return self.H.clone()

    def unroll(self) -> None:
        """Let the rule find the developed weight."""
        assert self.developed is not None
        self.H.copy_(self.developed)

    def move(self, state: dict[str, Any], start: Tensor | None) -> None:
        """The rest of a step: W by a rule of ours, if there is one, and `push`."""
        if not self.G.numel():
            return
        self.frame.multiple = self.multiple
        if self.own is not None:
            self.frame.multiple = self.own.velocity(self)
            if start is not None:
                self.H.add_(start * (-self.group["lr"] * self.group["weight_decay"]))
        if start is not None or self.scale is not None or self.max_angle is not None:
            self.frame.multiple = None
        self.push(state, None if self.own is not None else start)
        self.frame.multiple = None  # nothing of a step stays

    def push(self, state: dict[str, Any], start: Tensor | None) -> None:
        """Lambda <- Lambda R(W), Y <- Lambda E; long W are shortened, infinite ones are 0.

        W is projected to g^hor, unless the rule is entrywise: then it is there, as its gradient is.
        """
        W = self._seen_as_points(self.H if start is None else self.H.sub_(start))
        frame = self.frame
        self._divide_(W)
        if self.own is not None or not self.entrywise:
            frame.hor_(W)
        if self.max_angle is not None:
            self._limit_(W, self.max_angle)
        length = frame.length(W)
        self.least, self.most = extremes(length)
        if not self.most <= frame.longest:
            most = torch.finfo(length.dtype).max
            unit = torch.where(length < torch.inf, 1, most**-0.625)  # squares of a finite W may overflow
            frame.scale_(W, unit)
            length = frame.length(W)
            whole = torch.where(length < torch.inf, (length / unit).clamp_max_(most), length)
            torch.maximum(self.peak, whole, out=self.peak)  # keeps NaN
            scale = torch.where(length < torch.inf, (frame.longest / length).clamp_max_(1), 0)
            frame.scale_(W, scale)
            if frame.multiple is not None:
                frame.multiple = frame.multiple * (unit * scale)
            length = torch.where(scale > 0, length * scale, 0)
            self.long, (self.least, self.most) = True, extremes(length)
        self.length = length
        if self.developed is not None:
            self._seen_as_points(self.developed).add_(self._in_units(W))
        odd, even = (
            [self._seen_as_points(state[k]) for k in keys if k in state] for keys in (self.odd, self.even)
        )
        frame.step(W, self.length, self.R, odd, even, (self.least, self.most))

    def _limit_(self, W: Tensor, max_angle: float) -> None:
        """Shorten W where it turns a vector by more than `max_angle`; what is not finite stays so."""
        angle = self.frame.angle(W)
        self.frame.scale_(W, torch.where(angle < torch.inf, (max_angle / angle).clamp_max_(1), 1))

    # -- the end of a step

    def end(self) -> None:
        """Count the step, if it has moved anything, and do what is due every so often."""
        self.steps += 1
        if self.shards is not None or self._has_moved():
            self.moves.add_(1)
            self.age += 1
            if self.age % REPAIR_EVERY == 0 and self.H.numel():
                self._repair()
        if self.H.numel():
            if self.steps % LOOK_EVERY.get(self.H.device.type, 100) == 0:
                self.look()
            elif self.long and self._is_unusual():
                self._say_long()
                self.peak.zero_()
        self.long = False
        self.H.grad = None
        del self.G
        if hasattr(self, "length"):
            del self.length

    def _is_unusual(self) -> bool:
        """Whether a velocity was too long, or not finite, where a value is read for nothing."""
        return self.H.device.type == "cpu" and not bool(self.peak.amax() <= self.frame.longest)

    def _has_moved(self) -> bool:
        """Whether a point has moved, where that may be read for nothing; elsewhere whether it may have."""
        if self.most == math.inf and self.H.numel():  # as compiled code leaves it
            self.least, self.most = extremes(self.length)
        return not self.most <= 0

    def _repair(self) -> None:
        """The rounding of points that have moved; nothing is read."""
        N, n = self.layout.size(self.shape)
        period = max(WHOLE_EVERY // REPAIR_EVERY, -(-A_SIDE * N // (n * REPAIR_EVERY)))
        self.frame.repair(self.age // REPAIR_EVERY % period == 0, self.length > 0)
        self.scatter()

    # -- state[p]

    def _here(self, state: dict[str, Any]) -> dict[str, Any]:
        """A weight's state with tensors where this process works on them."""
        device, place = self.params[0].device, self.shards
        out = dict(state)
        for key, value in state.items():
            if torch.is_tensor(value) and value.dim() > 0:
                out[key] = (value if place is None else place.place(value).to_local()).to(device)
        return out

    def _held(self, states: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """What the members' states keep of points and frames."""
        held = {}
        for key in (k for k in (*FRAME_KEYS, *POINT_KEYS, "radius") if k in states[0]):
            X = torch.stack([s[key] for s in states])
            X = X.to(self.dtype.to_real() if key == "radius" else self.dtype)
            held[key] = self.layout.points(X).clone() if key in POINT_KEYS else X
            if key in FRAME_KEYS:
                held[key] = X.reshape(-1, *X.shape[-2:])
        return held

    def _gathered(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The rule's state for H: numbers per coordinate in H's layout, others from the first member."""
        state: dict[str, Any] = {}
        for key, value in states[0].items():
            if key in OUR_KEYS or key.endswith(BESIDE):
                continue
            state[key] = value.clone() if torch.is_tensor(value) else value
            if is_per_coordinate(value, self.shape):
                state[key] = self._like_H(key, states)
            elif self._is_of_points(value):
                state[key] = torch.cat([s[key].reshape(-1, *value.shape[-2:]) for s in states])
        for key in (k for k in self.odd if k in state):  # an interrupt may have left it half turned
            self.frame.hor_(self._seen_as_points(state[key]))
        return state

    def _seen_as_points(self, X: Tensor) -> Tensor:
        """What lies as H does, as points: a view."""
        return X if self.stacks else self.layout.points(X)

    def _is_of_points(self, value: Any) -> bool:
        """Whether an entry of a state has a matrix, or a number (1, 1), for each point."""
        return self.stacks and torch.is_tensor(value) and value.dim() > 1

    def _like_H(self, key: str, states: Sequence[dict[str, Any]]) -> Tensor:
        """State that lies as weights do, as H does: a copy, in H's precision if its numbers have digits."""
        value = states[0][key]
        has_digits = value.is_floating_point() or value.is_complex()
        room = torch.empty_like(self.H, dtype=None if has_digits else value.dtype)
        if not self.stacks:
            return room.copy_(value)
        first, *beside = self._faces(room)
        first.copy_(self._points([s[key] for s in states]))
        for A in beside:
            A.copy_(torch.stack([s[key + BESIDE] for s in states]).reshape(A.shape))
        return room

    def _faces(self, X: Tensor) -> list[Tensor]:
        """What lies as H does, in a point's shape, and what there may be beside it: the A of (K, A)."""
        return self.frame.blocks(X) if X.dim() == 1 else [X]

    def shown(self) -> list[dict[str, Any]]:
        """state[p] of every weight: views in p's shape; the members share what is not per coordinate."""
        count, columns = len(self.params), dict[str, Sequence[Any]]()

        def in_shape(X: Tensor) -> list[Tensor]:
            return [self.layout.weight(P, self.shape) for P in rows(X, count)]

        def per_point(X: Tensor) -> list[Tensor]:
            return [x.reshape(*self.layout.batch(self.shape), *X.shape[1:]) for x in rows(X, count)]

        developed = {} if self.developed is None else {"developed": self.developed}
        for key, value in (self.state | developed).items():
            if torch.is_tensor(value) and value.shape == self.H.shape and self.stacks:
                first, *beside = self._faces(value)
                columns[key] = in_shape(first)
                for A in beside:
                    columns[key + BESIDE] = per_point(A)
            else:
                columns[key] = per_point(value) if self._is_of_points(value) else [value] * count
        for key, value in self.frame.tensors().items():
            columns[key] = per_point(value)
        if torch.is_tensor(self.scale):
            columns["radius"] = [r.reshape(self.layout.batch(self.shape)) for r in rows(self.scale, count)]
        if self.master is not None:
            columns["master"] = in_shape(self.master)
        if self.anchor is not None:
            columns["decay_target"] = in_shape(self.anchor)
        if self.shards is not None:
            columns = {k: list(map(self._sharded, v)) for k, v in columns.items()}
        columns["moves"] = [self.moves] * count
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _sharded(self, value: Any) -> Any:
        assert self.shards is not None
        return self.shards.to_dtensor(value, 0) if torch.is_tensor(value) and value.dim() > 0 else value

    def publish(self, state: Any) -> None:
        """Show our state in state[p], if the rule has bound new objects since the last time."""
        bound = tuple(self.state.values())
        if self.bound is None or not same_objects(bound, self.bound):
            for p, entries in zip(self.params, self.shown(), strict=True):
                there = state[p]
                there.update(entries)
                for key in there.keys() - entries.keys():
                    del there[key]
            self.bound = bound
            self.note(state)

    def note(self, state: Any) -> None:
        """Remember state[p] as it is now."""
        self.dicts = tuple(map(state.get, self.params))
        self.values = tuple(chain.from_iterable(d.values() for d in self.dicts if d))
        first, *others = (d or {} for d in self.dicts)
        self.shared = [
            v for k, v in first.items() if torch.is_tensor(v) and any(d.get(k) is v for d in others)
        ]
        self.counts = tuple(map(_version, self.shared))

    # -- what others do between two steps

    def leave(self) -> None:
        """Remember the weights as they are now."""
        self.versions = tuple(map(_version, self.params))
        self.places = self._places()
        self.counts = tuple(map(_version, self.shared))

    def say_shared(self) -> None:
        """Say that others have written a number that the members have in common in place."""
        if self.versions and tuple(map(_version, self.shared)) != self.counts:  # else a step was interrupted
            self.warn(
                "shared",
                f"a state tensor that {len(self.params)} weights share, such as the step count of "
                f"{self.names[0]}, was written in place, which changes all of them. Bind a new tensor to "
                "change one: opt.state[p][key] = torch.tensor(...)",
            )

    def _places(self) -> tuple[int, ...]:
        params = self.params if self.shards is None else [cast(Any, p).to_local() for p in self.params]
        return tuple(map(Tensor.data_ptr, params))

    def as_left(self, state: Any) -> bool:
        """Whether weights and state are the objects, at the places and in the versions, that we left."""
        dicts = tuple(map(state.get, self.params))
        return (
            same_objects(dicts, self.dicts)
            and tuple(map(_version, self.params)) == self.versions
            and self._places() == self.places
            and same_objects(tuple(chain.from_iterable(d.values() for d in dicts if d)), self.values)
        )

    def _differs(self, y: Tensor) -> Tensor:
        """Which points (M) are not the frame's, up to rounding."""
        point = self.frame.point()
        largest = y.abs().amax((-2, -1), keepdim=True).clamp_min(1)
        if not self.half:
            near = 4 * self.eps * (1 if self.frame.exact else y.shape[-2])
            return ~((point - y).abs() <= near * largest).flatten(1).all(1)
        # To the bit what is left of the frame's point; or a weight that has not moved yet.
        weights = self._read()
        kept = (self._in_units(point).to(self.kind) == weights).flatten(1).all(1)
        still = (self._nearest(self._unit(weights)) - point).abs() <= NEAR * largest
        return ~(kept | still.flatten(1).all(1))

    def _put(self, moved: Tensor, y: Tensor) -> None:
        """Put the frames of points that others have moved above them."""
        if bool(moved.any()):
            self.in_motion = True  # an interrupt here, too, drops the frame
            self.frame.put(moved, y[moved])
            self.in_motion = False
            self._say_changed(moved.view(len(self.params), -1).any(1).tolist())

    def _say_changed(self, changed: Sequence[bool]) -> None:
        """Say which weights others have written."""
        names = [name for name, there in zip(self.names, changed, strict=True) if there]
        others = f" and {len(names) - 1} other weights" if len(names) > 1 else ""
        if names:
            self.warn(
                "changed",
                f"{names[0]}{others} changed outside the optimizer, within {self.space}: the section was "
                "rebuilt, moments were kept",
            )

    def dissolve(self, state: Any) -> None:
        """Leave the weights to other batches.

        Those that others have written, be it with their own values, get moments of zero where these are not
        finite.
        """
        now = list(map(_version, self.params))
        touched = [a != b for a, b in zip(now, self.versions, strict=False)]
        other = [w.p.dtype != self.kind for w in self.weights]
        if any(w.p.shape != w.shape for w in self.weights):
            pass  # an error, a little later
        elif any(other):
            self._say_changed(other)
        elif self.H.numel() and self.versions and (any(touched) or self._places() != self.places):
            moved = self._differs(self._unit(self._read()))
            self._say_changed(moved.view(len(self.params), -1).any(1).tolist())
        for w, written in zip(self.weights, touched, strict=False):
            broken = [v for v in state.get(w.p, {}).values() if written and is_broken(v)]
            for value in broken:
                value.zero_()
            if broken:
                self.warn(
                    "reset",
                    f"{w.name} changed outside the optimizer: its moments, which were not finite, start "
                    "from zero",
                )

    # -- looks

    def look(self) -> None:
        """Report what happened since the last look; the one place of a step that reads a value everywhere."""
        reads = self.frame.reads and self.exact
        y = self.frame.point() if reads else None
        off = self.lost if y is None else self._off(y)
        held = self.lost if self.frame.held is None else self.frame.held
        seen = [x.to(self.peak) for x in (self.peak.amax(), self.lost, off.any(), held.any())]
        peak, lost, any_off, any_held = torch.stack(seen).tolist()
        if not peak <= self.frame.longest:
            self._say_long()
        if lost:
            self.warn(
                "lost",
                f"{self.names[0]} or one of its kind was written through .data, which is not counted on "
                "this device: the write was lost; write under torch.no_grad() instead",
            )
        if self.frame.held is not None and any_held:
            self.warn("digits", no_digits(cast(Any, self.space), self.eps))
            self.frame.held.zero_()
        if y is not None and any_off:
            name = self._name_of(off)
            self.warn(
                "off", f"{name} is not on {self.space}, as after a write through .data: it was projected"
            )
            self.frame.put(off, self.space.geometry.nearest(y[off]))
            self.scatter()
        self.peak.zero_(), self.lost.zero_()

    def _say_long(self) -> None:
        longest = self.frame.longest
        bad = ~(self.peak < torch.inf)
        if bool(bad.any()):
            self.warn(
                "nonfinite",
                f"the velocity of {self._name_of(bad)} is not finite (a NaN or infinite gradient?): the "
                "weight stays where it is, but its moments are lost. Load a state dict, or constrain the "
                "weight again, which sets them to zero",
            )
        long = (self.peak > longest) & ~bad
        if bool(long.any()):
            most = float(self.peak[long].max())
            self.warn(
                "long",
                f"a velocity of length {most:.1e} of {self._name_of(long)} was clipped to {longest:.1g}; is "
                "the learning rate intentional?",
            )

    def _name_of(self, mask: Tensor) -> str:
        """The name of the first weight with a point that is marked."""
        return self.names[int(mask.flatten().nonzero()[0]) * len(self.names) // mask.numel()]


def same_objects(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two sequences hold the very same objects; comparing them by value would read tensors."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


def is_broken(value: Any) -> bool:
    """Whether an entry of a state has numbers that are not finite."""
    return torch.is_tensor(value) and value.dim() > 0 and not bool(torch.isfinite(value).all())


def near_in_half(X: Tensor, Y: Tensor) -> bool:
    """Whether two tensors are equal to the digits of bfloat16."""
    return bool(((X - Y).abs() <= torch.finfo(torch.bfloat16).eps * Y.abs().clamp_min(1e-2)).all())


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether one is a view of the other."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def is_per_coordinate(value: Any, shape: Sequence[int]) -> bool:
    """Whether an entry of a state has a number for each coordinate of the weight."""
    return torch.is_tensor(value) and value.dim() > 0 and value.shape == shape


def shared_values(state: dict[str, Any] | None, shape: Sequence[int]) -> str:
    """The part of a weight's state that members of a batch must have in common."""
    out = {}
    for k, v in (state or {}).items():
        ours = k in OUR_KEYS and k != "moves"
        differs = ours or (torch.is_tensor(v) and (v.dim() > 1 or (v.dim() > 0 and v.shape == shape)))
        out[k] = None if differs else v.tolist() if torch.is_tensor(v) else v
    return repr(sorted(out.items()))
