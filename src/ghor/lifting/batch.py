"""A batch: weights of one kind, computed as one; a step of them, and what others do between two steps.

Where weights lie is in members.py, the first points and frames in standing.py, what state[p] shows in
state.py, and what is reported in looks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ghor._torch.memory import keep_freed_memory
from ghor.constraints.validation import Warn
from ghor.lifting.groups import Weight, is_on
from ghor.lifting.law import DECAYS, Traits
from ghor.lifting.left import Left, same_objects
from ghor.lifting.looks import look, say_changed, say_long
from ghor.lifting.members import Members, shares_memory
from ghor.lifting.standing import stand
from ghor.lifting.state import FRAME_KEYS, States, gathered, held, here, like_H, shown
from ghor.linalg import equal_bits, extremes
from ghor.spaces.frames import Ends, Frame
from ghor.spaces.retraction import RETRACTIONS

REPAIR_EVERY = 10  # moves of a batch between two repairs of the rounding of its points
WHOLE_EVERY, A_SIDE = 100, 17  # and of whole sections: so many, or 17 N/n, 4 % of a step's arithmetic
LOOK_EVERY = {"cpu": 10}  # and between two looks at its numbers, which reads one value; 100 on other devices
LARGE = 1 << 16  # numbers of weights that are compared one by one
NEAR = 1e-5  # from the point of a half precision weight that has not moved, to that of its state


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

    frame: Frame

    def __init__(
        self, weights: Sequence[Weight], group: dict[str, Any], states: States, traits: Traits, warn: Warn
    ) -> None:
        keep_freed_memory()  # page faults of temporaries take longer than the arithmetic
        self.at = at = Members(weights, warn)
        self.weights, self.params, self.names, self.warn = at.weights, at.params, at.names, warn
        self.gi, self.space, self.layout, self.shape = at.gi, at.space, at.layout, at.shape
        self.shards, self.device, self.empty = at.shards, at.device, at.empty
        self.stacks, self.free = traits.stacks, traits.free
        self.group, self.R, self.max_angle = group, RETRACTIONS[group["retraction"]], group["max_angle"]
        self.odd, self.even, self.entrywise = sorted(traits.odd), sorted(traits.even), traits.entrywise
        self.length: Any = None  # of a step's velocities, 0 of those left out; and its ends, see `extremes`
        self.least, self.most = 0.0, 0.0
        self.ends = Ends()
        self.in_motion = False  # whether the frame may be off the group
        self.lost = torch.zeros((), dtype=torch.bool, device=self.device)  # whether a write through .data was
        states = [here(at, s) for s in states]
        known = held(at, states)
        y, self.frame, before = stand(at, known, states[0], group["section"], traits)
        self.scale = at.scale
        self._put(self._differs(y), y)
        self._keep(y, known)
        self.H = self._room()
        self.developed = self._developed(states) if traits.reads else None
        self.state = gathered(self, states)
        for vector in self._turning(self.state)[0]:
            self.frame.hor_(vector)  # an interrupt may have left it half turned
            if before is not None:
                vector.copy_(self.frame.translated(vector, before))
        moves = states[0].get("moves", torch.zeros((), dtype=torch.int64, device="cpu"))
        self.moves, self.age = moves.clone(), int(moves)
        self.steps = self.age  # also those that moved nothing
        y = self.frame.point()
        self.peak = y.real.new_zeros(len(y), 1, 1)  # the longest velocity of each point, or NaN, since a look
        self.G: Any = None  # the gradient, during a step
        self.long = False  # whether a velocity may have been too long, or not finite
        self.decays = self.anchor is not None and any(is_on(group.get(key)) for key in DECAYS)
        self.own: OwnRule | None = None  # a rule of ours
        self.lent: Any = None  # the options of its group that Base's rule finds changed
        self.multiple: Any = None  # the number a in W = a m, if Base's rule is so simple
        self.bound: tuple[Any, ...] | None = None  # the rule's state that state[p] shows
        self.left = Left(at)

    def _keep(self, y: Tensor, known: dict[str, Tensor]) -> None:
        """What steps need beside the frame."""
        # Whether the weight is the point, to the bit; if not, a state keeps the point or the whole section.
        self.exact = self.frame.exact and not self.at.half and self.scale is None
        holds = self.exact or "section" in self.frame.tensors()
        self.master = None if holds else self.at.viewable(self.frame.point())
        self.written: Tensor | None = None  # the weights of the last step, unless the frame reads its points
        if not (self.frame.reads and self.exact):
            self.written = self.at.viewable(self.at.points(self.at.here()).clone())
            self.whole = self.at.as_weights(self.written)
            self.parts = list(self.whole.unbind(0))
        given = self.weights[0].anchor
        self.anchor: Tensor | None = None  # where weight decay draws these weights: points, or nowhere
        if torch.is_tensor(given):
            self.anchor = self.at.unit(
                self.at.padded([self.at.local_parts([w.anchor])[0] for w in self.weights])
            )
        elif given is not None:
            self.anchor = known["decay_target"] if "decay_target" in known else y.clone()

    def _room(self) -> Tensor:
        """Memory for elements of g^hor: in the frame's order, unless its views could not be weights."""
        if self.stacks:
            room = self.frame.zeros()
            return room if room.dim() == 1 else self.at.viewable(room)
        room = torch.zeros(self.shape, dtype=self.at.dtype, device=self.device)
        points = self.layout.points(room)
        return (
            room if shares_memory(points, room) else self.layout.weight(torch.zeros_like(points), self.shape)
        )

    def _developed(self, states: States) -> Tensor:
        """The weight as a rule reads it, rolled out into flat space; from where a state has it."""
        if "developed" in states[0]:
            return like_H(self, "developed", states)
        room, y = torch.zeros_like(self.H), self.frame.point()
        self._as_points(room).copy_(self.at.in_units(self.space.geometry.origin(y).expand_as(y)))
        return room

    # -- in and out: the copies of a step, which are not compiled: every weight would be a kernel

    def gather(self) -> Tensor:
        """Gradients as points; and points, where the frame reads them, or others have written them."""
        self.H.grad = self.G = torch.empty_like(self.H)
        if self.empty:
            return self.G
        self.follow()
        return self.at.gradients()

    def follow(self) -> None:
        """Go on from points that were written through .data: read where that is cheap, else compared.

        To compare is to read a value: on the CPU in every step; elsewhere it is a flag for the next look.
        """
        if self.written is None:
            y, self.in_motion = self.at.read(), True  # an interrupt here, too, drops the frame
            self.frame.take(y)
            self.in_motion = False
        elif self.device.type != "cpu":
            self.lost.logical_or_(self._differs(self.at.unit(self.at.read())).any())
        else:
            here = self.at.here() if self.at.gathers else self.at.local
            if len(here) == 1 or self.written.numel() > LARGE * len(here):  # without a copy in between
                same = all(map(equal_bits, here, self.parts))
            else:
                same = equal_bits(torch.stack(here), self.whole)
            if not same:
                self._take_up(self.written)

    def _take_up(self, written: Tensor) -> None:
        """Go on from what others have written."""
        now = self.at.read()
        if torch.is_tensor(self.scale):
            self.scale.copy_(cast(Tensor, self.at.radii(now, self.scale)))
        y = self.at.unit(now)
        moved = self._differs(y)
        off = self.at.off(y) & moved
        if bool(off.any()):
            self.at.refuse(off)
        self._put(moved, self.at.nearest(y))
        written.copy_(self.at.points(self.at.here()))

    def scatter(self) -> None:
        """Points to weights. A weight that is not its point to the bit is written only if it has moved."""
        if self.empty:
            return
        if self.written is None and self.at.targets is not None and self.shards is None:
            self.frame.write(self.at.targets)
            return
        new = self.frame.point()
        if self.master is not None and not shares_memory(self.master, new):
            self.master.copy_(new)
        if self.written is None:
            self.at.write(new)
            return
        if not self.exact:
            new = self.at.in_units(new).to(self.at.kind)
            if not self.least > 0:
                new = torch.where(self.length > 0, new, self.written)
        if self.layout.padding is not None:
            new = self.layout.padded(new, self.shape, self.at.points(self.at.here()))
        self.written.copy_(new)
        self.at.write_parts(self.parts)

    # -- the lines of Algorithm 3: compiled, and nothing is read

    def pull(self, G: Tensor) -> Tensor | None:
        """H.grad <- global_rep(Lambda, rgrad(Y, G)), and H <- where the rule starts: returned, or None for 0.

        It is 0 for a rule that does not read its weight: there weight decay finds nothing to draw at. With an
        anchor it is the vector from there to Y: that is what decays. Else it is the developed weight.
        """
        if self.empty:
            return None
        self.frame.pull(G, self.G if self.stacks else self.layout.points(self.G))
        if self.developed is not None:
            self.H.copy_(self.developed)
            return self.developed
        if not self.decays or self.anchor is None:
            self.H.zero_()  # it may be left from a step that was interrupted
            return None
        away = self._as_points(self.H)
        self.space.geometry.away(self.frame, self.anchor, away)
        if self.scale is not None:
            self.frame.scale_(away, self.scale)
        return self.H.clone()

    def push(self, W: Tensor, state: dict[str, Any]) -> None:
        """Lambda <- Lambda R(W), Y <- Lambda E, for W in H; torch.compile leaves alone what has no tensor."""
        if self.empty:
            return
        odd, even = self._turning(state)
        self.frame.step(
            W if self.stacks else self.layout.points(W), self.length, self.R, odd, even, self.ends
        )

    def _as_points(self, X: Tensor) -> Tensor:
        """What lies as H does, as points: a view."""
        return X if self.stacks else self.layout.points(X)

    def _turning(self, state: dict[str, Any]) -> list[list[Tensor]]:
        """The rule's state that a frame takes along, as points: vectors, and mean squares."""
        found = [[state[k] for k in keys if k in state] for keys in (self.odd, self.even)]
        return found if self.stacks else [list(map(self.layout.points, X)) for X in found]

    # -- between them: the rule has left W in H; values may be read

    def limit(self, start: Tensor | None) -> None:
        """W by a rule of ours, if there is one; in units of the point, and long W shortened, infinite ones 0.

        W is projected to g^hor, unless the rule is entrywise: then it is there, as its gradient is.
        """
        if self.empty:
            return
        frame, H = self.frame, self.H
        frame.multiple = self.multiple
        if self.own is not None:
            frame.multiple = self.own.velocity(self)
        if start is not None and self.own is not None:
            H.add_(start * (-self.group["lr"] * self.group["weight_decay"]))
        elif start is not None:
            H.sub_(start)
        W = H if self.stacks else self.layout.points(H)
        if self.scale is not None:
            frame.scale_(W, 1 / self.scale)
        if self.own is not None or not self.entrywise:
            frame.hor_(W)
        if self.max_angle is not None:
            angle = frame.angle(W)  # what is not finite stays so
            frame.scale_(W, torch.where(angle < torch.inf, (self.max_angle / angle).clamp_max_(1), 1))
        if start is not None or self.scale is not None or self.max_angle is not None:
            frame.multiple = None
        length = frame.length(W)
        self.least, self.most = extremes(length)
        if not self.most <= frame.longest:
            length = self._shorten_(W, length)
        self.length, self.ends = length, frame.ends(self.least, self.most)
        if self.developed is not None:
            self._as_points(self.developed).add_(self.at.in_units(W))

    def _shorten_(self, W: Tensor, length: Tensor) -> Tensor:
        """W <- W of length at most `longest`, 0 where W is not finite; returns the lengths."""
        frame, most = self.frame, torch.finfo(length.dtype).max
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
        return length

    # -- the end of a step

    def end(self, state: Any) -> None:
        """Weights and state[p] follow; what is due every so often is done."""
        self.scatter()
        self.publish(state)
        self.steps += 1
        on_cpu, some = self.device.type == "cpu", not self.empty
        if self.shards is not None or not self.most <= 0:
            self.moves.add_(1)
            self.age += 1
            if self.age % REPAIR_EVERY == 0 and some:
                self._repair()
        if some and self.steps % LOOK_EVERY.get(self.device.type, 100) == 0:
            look(self)
        elif self.long and on_cpu and not bool(self.peak.amax() <= self.frame.longest):
            say_long(self)
            self.peak.zero_()
        self.long, self.G, self.length, self.H.grad = False, None, None, None
        self.frame.multiple = None  # nothing of a step stays
        self.left.remember()
        self.in_motion = False

    def _repair(self) -> None:
        """The rounding of points that have moved; nothing is read."""
        N, n = self.layout.size(self.shape)
        # equivalent(limit): more often than need be
        period = max(WHOLE_EVERY // REPAIR_EVERY, -(-A_SIDE * N // (n * REPAIR_EVERY)))
        self.frame.repair(self.age // REPAIR_EVERY % period == 0, self.length > 0)
        self.scatter()

    def publish(self, state: Any) -> None:
        """Show our state in state[p], if the rule has bound new objects since the last time."""
        bound = tuple(self.state.values())
        if self.bound is None or not same_objects(bound, self.bound):
            for p, entries in zip(self.params, shown(self), strict=True):
                there = state[p]
                there.update(entries)
                for key in there.keys() - entries.keys():
                    del there[key]
            self.bound = bound
            self.left.remember_state(state)

    # -- what others do between two steps

    def _differs(self, y: Tensor) -> Tensor:
        """Which points (M) are not the frame's, up to rounding."""
        point = self.frame.point()
        largest = y.abs().amax((-2, -1), keepdim=True).clamp_min(1)
        if not self.at.half:
            near = 4 * self.at.eps * (1 if self.frame.exact else y.shape[-2])
            return ~((point - y).abs() <= near * largest).flatten(1).all(1)
        # To the bit what is left of the frame's point; or a weight that has not moved yet.
        weights = self.at.read()
        kept = (self.at.in_units(point).to(self.at.kind) == weights).flatten(1).all(1)
        still = (self.at.nearest(self.at.unit(weights)) - point).abs() <= NEAR * largest
        return ~(kept | still.flatten(1).all(1))

    def _put(self, moved: Tensor, y: Tensor) -> None:
        """Put the frames of points that others have moved above them."""
        if bool(moved.any()):
            self.in_motion = True  # an interrupt here, too, drops the frame
            self.frame.put(moved, y[moved])
            self.in_motion = False
            say_changed(self.at, self.at.of_weights(moved))

    def dissolve(self, state: Any) -> None:
        """Leave the weights to other batches, which go on from them and from state[p].

        Frames that an interrupted step may have left off the group are dropped. Weights that others have
        written, be it with their own values, get moments of zero where these are not finite.
        """
        if self.in_motion:
            for entries in filter(None, map(state.get, self.params)):
                for key in (*FRAME_KEYS, "master"):
                    entries.pop(key, None)
            self.warn("interrupted", "the last step was interrupted; sections will be rebuilt, moments kept")
            return
        touched = self.left.touched()
        self._say_written(touched)
        for w, written in zip(self.weights, touched, strict=True):
            broken = [v for v in state.get(w.p, {}).values() if written and is_broken(v)]
            for value in broken:
                value.zero_()
            if broken:
                self.warn(
                    "reset",
                    f"{w.name} changed outside the optimizer: its moments, which were not finite, start "
                    "from zero",
                )

    def _say_written(self, touched: list[bool]) -> None:
        """Say which weights others have written with other points, or in another dtype."""
        if any(w.p.shape != w.shape for w in self.weights):
            return  # an error, a little later
        other = [p.dtype != self.at.kind for p in self.params]
        if not any(other) and not self.empty and (any(touched) or self.at.places() != self.left.places):
            self.at.locate()
            other = self.at.of_weights(self._differs(self.at.unit(self.at.read())))
        say_changed(self.at, other)


def is_broken(value: Any) -> bool:
    """Whether an entry of a state has numbers that are not finite."""
    return torch.is_tensor(value) and value.dim() > 0 and not bool(torch.isfinite(value).all())
