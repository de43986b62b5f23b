"""A batch: weights of one kind, computed as one. It knows layouts, the radius and state[p]; frames know geometry.

A batch is derived: all that it knows can be made again from its weights and state[p], to the bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import chain, starmap
from typing import Any, NamedTuple

import torch
from ghor._torch.memory import keep_freed_memory
from ghor._torch.precision import COMPUTE_DTYPE
from torch import Tensor, nn

from ghor.spaces.frames import rows
from ghor.lifting.law import Traits
from ghor.linalg import perhaps
from ghor.spaces.retraction import RETRACTIONS
from ghor.spaces.base import Space

LOOK_EVERY = 10  # moves of a batch between two looks at its numbers, when rounding is repaired, too
WHOLE_EVERY = 100  # and between two repairs of whole sections
ROWS, ROOM = 64, 1 << 22  # of a stored frame that is made without being asked for: N <= 64 n, or so many numbers in all
FOLLOW = True  # writes through .data, which torch does not count

FRAME_KEYS = ("section", "frame_anchor")  # what a frame keeps in state[p]
POINT_KEYS = ("master", "decay_target")  # the point, where the weight is not it to the bit; the anchor of decay
OUR_KEYS = (*FRAME_KEYS, *POINT_KEYS, "developed", "moves")  # and the weight that the rule reads, and how often ours has moved

BESIDE = ".A"  # state[p]["momentum_buffer"] has K in the weight's shape, and state[p]["momentum_buffer.A"] the A beside it

_version, _grad = operator.attrgetter("_version"), operator.attrgetter("grad")


class Weight(NamedTuple):
    """A weight on a manifold, as its group has it."""

    gi: int
    space: Space
    section: str
    retraction: str
    anchor: Any
    p: Tensor
    shape: torch.Size
    name: str


class Batch:
    """Weights as points (M, N, n), with their frame, their velocity H, and the rule's state for H.

    Where weights may share a tensor, H is (M, N, n), too; else it is in the one weight's shape. A rule that does not read
    its weight finds H = 0. One that does finds the weight developed: H_0 = Lambda^-1 Y = E, H_t = E + W_1 + ... + W_t.
    state[p] shows live views of the batch's state. Whatever a batch is made of is in the weights and there.
    """

    def __init__(self, weights: list[Weight], states: list[dict[str, Any]], traits: Traits) -> None:
        keep_freed_memory()  # page faults of temporaries take longer than the arithmetic
        self.params, self.names = [w.p for w in weights], [w.name for w in weights]
        first, p = weights[0], weights[0].p
        self.gi, self.space, self.layout, self.shape = first.gi, first.space, first.space.layout, p.shape
        self.R, self.odd, self.even = RETRACTIONS[first.retraction], sorted(traits.odd), sorted(traits.even)
        self.stacks = traits.stacks
        self.dtype, self.eps = COMPUTE_DTYPE.get(p.dtype, p.dtype), torch.finfo(p.dtype).eps
        targets = [self.layout.points(p.detach()) for p in self.params]
        views = all(starmap(shares_memory, zip(targets, self.params, strict=True)))
        self.targets = targets if views else None  # the weights as points: writing there is one copy
        y, held = self._now(), self._held(states)
        self._check(y)
        y = self._nearest(y)
        kept = {k: held[k] for k in FRAME_KEYS if k in held}
        section = first.section
        if section == "auto" and not (traits.turns and (views or self.stacks)):
            section = "transported"
            self._check_room(y)
        geometry, at = self.space.geometry, held.get("master", y)
        if traits.free:
            began = any(k.endswith(BESIDE) for k in states[0])  # a run goes on with the frame that it began with
            self.frame = geometry.free_frame(at, "auto" if began else section, kept, self.eps, self.layout.blocks > 1)
        else:
            self.frame = geometry.frame(at, section, kept, self.eps)
        self._put(self._differs(y), y)
        # whether the weight is the point, to the bit; if not, a state keeps the point or the whole section
        self.exact = self.frame.exact and self.dtype == p.dtype and self.space.radius == 1
        self.master = None if self.exact or "section" in self.frame.tensors() else self.frame.point()
        self.written = None if self.exact else self._weights().clone()
        self.anchor = self._anchor(weights, y, held)
        self.H = nn.Parameter(self._room(), requires_grad=False)
        self.H.grad = self.G = self._room()
        self.developed = self._developed(y, states) if traits.reads else None
        self.state = self._gathered(states)
        self.moves = states[0].get("moves", torch.zeros((), dtype=torch.int64, device="cpu")).clone()
        self.age = int(self.moves)
        self.length = y.real.new_zeros(len(y), 1, 1)  # of this step's velocities, 0 of those that were left out
        self.peak = self.length[0].clone()  # and the longest, or NaN, since the last look
        self.lost = torch.zeros((), dtype=torch.bool, device=y.device)  # whether a write through .data was
        self.in_motion, self.decays = False, False
        self.bound, self.dicts, self.values = None, (), ()  # what state[p] shows
        self.leave()

    def _room(self) -> Tensor:
        """Memory for elements of g^hor: in the frame's order, unless its views could not be weights."""
        if not self.stacks:
            room = torch.zeros(self.shape, dtype=self.dtype, device=self.params[0].device)
            points = self.layout.points(room)
            return room if shares_memory(points, room) else self.layout.weight(torch.zeros_like(points), self.shape)
        room = self.frame.zeros()
        if room.dim() == 1:
            return room
        part = rows(room, len(self.params))[0]
        return room if shares_memory(self.layout.weight(part, self.shape), room) else room.contiguous()

    def _check_room(self, y: Tensor) -> None:
        """Raise where a frame that the rule wants stored would be large."""
        M, N, n = y.shape
        if N > ROWS * n and M * N * N > ROOM:
            raise ValueError(
                f"the rule of {self.names[0]} keeps state that cannot be taken to another frame, and a frame that stays has "
                f"{N} x {N} numbers for each of {M} points: take Adam, SGD or Muon, or section='transported' all the same"
            )

    def _developed(self, y: Tensor, states: list[dict[str, Any]]) -> Tensor:
        """The weight as a rule reads it, rolled out into flat space; from where a state has it."""
        if "developed" in states[0]:
            return self._like_H([s["developed"] for s in states])
        room = torch.zeros_like(self.H)
        self._seen_as_points(room).copy_(self.space.geometry.origin(y) * self.space.radius)
        return room

    def _anchor(self, weights: list[Weight], y: Tensor, held: dict[str, Tensor]) -> Tensor | None:
        """Where weight decay draws these weights: points, "start", or nowhere."""
        given = weights[0].anchor
        if given is None:
            return None
        if torch.is_tensor(given):
            return self._unit(self._points([w.anchor for w in weights]))
        return held["decay_target"] if "decay_target" in held else y.clone()

    # -- in and out: the copies of a step, which are not compiled: every weight would be a kernel

    def gather(self) -> Tensor:
        """Gradients as points; and points, where the frame reads them, or others have written them."""
        if FOLLOW:
            self.follow()
        if self.H.grad is not self.G:  # a rule may have let go of it
            self.H.grad = self.G
        return self._points([g.to_dense() if g.is_sparse else g for g in map(_grad, self.params)]).to(self.dtype)

    def follow(self) -> None:
        """Go on from points that were written through .data: read where that is cheap, else compared.

        To compare is to read a value: on the CPU in every step; elsewhere it is a flag for the next look.
        """
        now = self._weights()
        if self.frame.reads and self.exact:
            self.frame.take(now)
        elif now.device.type != "cpu":
            self.lost.logical_or_(self._differs(self._unit(now)).any())
        elif differ(now, self.frame.point() if self.written is None else self.written):
            y = self._unit(now)
            moved = self._differs(y)
            self._check(y, moved)
            self._put(moved, self._nearest(y))
            self.written = None if self.exact else now.clone()

    def scatter(self) -> None:
        """Points to weights. A weight that is not its point to the bit is written only if it has moved."""
        if self.exact and self.targets is not None:
            return self.frame.write(self.targets)
        new = self.frame.point() if self.master is None else self.master
        if self.master is not None:
            self.frame.write([new])
        if self.written is not None:
            new = (new * self.space.radius).to(self.written.dtype)
            if perhaps(self.length.amin() == 0):
                new = torch.where(self.length > 0, new, self.written)
            self.written = new
        weights = [self.layout.weight(P, self.shape) for P in rows(new, len(self.params))]
        torch._foreach_copy_([p.detach() for p in self.params], weights)

    def _points(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.layout.points(tensors[0] if len(tensors) == 1 else torch.stack(list(tensors)))

    def _seen_as_points(self, X: Tensor) -> Tensor:
        """What lies as H does, as points: a view."""
        return X if self.stacks else self.layout.points(X)

    def _like_H(self, tensors: Sequence[Tensor]) -> Tensor:
        """What lies as weights do, as H does: a copy, in H's precision if it is of numbers with digits."""
        value = tensors[0]
        room = torch.empty_like(self.H, dtype=None if value.is_floating_point() or value.is_complex() else value.dtype)
        self._like_points(room).copy_(self._points(tensors) if self.stacks else value)
        return room

    def _unit(self, X: Tensor) -> Tensor:
        """Weights as points in full precision, on the unit sphere."""
        return X.to(self.dtype) if self.space.radius == 1 else X.to(self.dtype) / self.space.radius

    def _now(self) -> Tensor:
        """The points that the weights are now."""
        return self._unit(self._weights())

    def _weights(self) -> Tensor:
        """The weights as points; one weight is a view."""
        if self.targets is None:
            return self._points([p.detach() for p in self.params])
        return self.targets[0] if len(self.targets) == 1 else torch.cat(self.targets)

    # -- the lines of Algorithm 3: compiled, and nothing is read

    def pull(self, G: Tensor) -> Tensor | None:
        """H.grad <- global_rep(Lambda, rgrad(Y, G)), and H <- where the rule starts; that is returned, unless it is 0.

        It is 0 for a rule that does not read its weight: there weight decay finds nothing to draw at. With an anchor
        it is the vector from there to Y: that is what decays. Else it is the developed weight.
        """
        self.frame.pull(G, self._seen_as_points(self.G))
        if self.developed is not None:
            self.unroll()
            return self.developed
        if not self.decays:
            self.H.zero_()  # it may be left from a step that was interrupted
            return None
        self.frame.pull(self.frame.point() - self.anchor, self._seen_as_points(self.H))
        return self.H.clone()

    def unroll(self) -> None:
        """Let the rule find the developed weight."""
        self.H.copy_(self.developed)

    def push(self, state: dict[str, Any], start: Tensor | None) -> None:
        """Lambda <- Lambda R(W), Y <- Lambda E. W is projected; long ones are shortened, infinite and NaN are 0."""
        W = self._seen_as_points(self.H if start is None else self.H.sub_(start))
        W = W if self.space.radius == 1 else W.div_(self.space.radius)
        self.frame.hor_(W)
        length = self.frame.length(W)
        longest = length.amax(0)
        torch.maximum(self.peak, longest, out=self.peak)  # keeps NaN
        if perhaps(~(longest <= self.frame.longest)):
            finite = length < torch.inf
            scale = torch.where(finite, (self.frame.longest / length).clamp_max_(1), 0)
            self.frame.scale_(W, scale)
            length = torch.where(finite, length * scale, 0)
            if self.frame.multiple is not None:
                self.frame.multiple = self.frame.multiple * scale
        self.length.copy_(length)
        if self.developed is not None:
            self._seen_as_points(self.developed).add_(W, alpha=self.space.radius)
        odd, even = ([self._seen_as_points(state[k]) for k in keys if k in state] for keys in (self.odd, self.even))
        self.frame.step(W, self.length, self.R, odd, even)

    # -- state[p]

    def _held(self, states: list[dict[str, Any]]) -> dict[str, Tensor]:
        """What the members' states keep of points and frames."""
        held = {}
        for key in (k for k in (*FRAME_KEYS, *POINT_KEYS) if k in states[0]):
            X = torch.stack([s[key] for s in states]).to(self.params[0].device, self.dtype)
            held[key] = self.layout.points(X).clone() if key in POINT_KEYS else X.reshape(-1, *X.shape[-2:])
        return held

    def _gathered(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """The rule's state for H: numbers per coordinate in H's layout, others from the first member."""
        state: dict[str, Any] = {}
        for key in (k for k in states[0] if k not in OUR_KEYS):
            value = states[0][key]
            if key.endswith(BESIDE):
                continue
            state[key] = value.clone() if torch.is_tensor(value) else value
            if is_per_coordinate(value, self.shape):
                state[key] = self._like_H([s[key] for s in states])
                for A in self._beside(state[key]):
                    A.copy_(torch.stack([s[key + BESIDE] for s in states]).reshape(A.shape))
            elif self._is_of_points(value):
                state[key] = torch.cat([s[key].reshape(-1, *value.shape[-2:]) for s in states])
        for key in (k for k in self.odd if k in state):  # an interrupt may have left it half turned
            self.frame.hor_(self._seen_as_points(state[key]))
        return state

    def _is_of_points(self, value: Any) -> bool:
        """Whether an entry of a state has a matrix, or a number (1, 1), for each point."""
        return self.stacks and torch.is_tensor(value) and value.dim() > 1

    def _like_points(self, X: Tensor) -> Tensor:
        """Of what lies as H does the part that has a point's shape."""
        return self.frame.blocks(X)[0] if X.dim() == 1 else X

    def _beside(self, X: Tensor) -> list[Tensor]:
        """And what there may be beside it: the A of a frame that keeps (K, A)."""
        return self.frame.blocks(X)[1:] if X.dim() == 1 else []

    def shown(self) -> list[dict[str, Any]]:
        """state[p] of every weight: views in p's shape; the members share what is not per coordinate."""
        count, columns = len(self.params), dict[str, Sequence[Any]]()
        in_shape = lambda X: [self.layout.weight(P, self.shape) for P in rows(X, count)]  # noqa: E731
        of_points = lambda X: [P.squeeze(0) for P in rows(X, count)]  # noqa: E731
        developed = {} if self.developed is None else {"developed": self.developed}
        for key, value in (self.state | developed).items():
            whole = torch.is_tensor(value) and value.shape == self.H.shape and self.stacks
            if whole:
                columns[key] = in_shape(self._like_points(value))
                columns |= {key + BESIDE: of_points(A) for A in self._beside(value)}
            else:
                columns[key] = of_points(value) if self._is_of_points(value) else [value] * count
        for key, value in self.frame.tensors().items():
            columns[key] = of_points(value)
        if self.master is not None:
            columns["master"] = in_shape(self.master)
        if self.anchor is not None:
            columns["decay_target"] = in_shape(self.anchor)
        columns["moves"] = [self.moves] * count
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

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

    # -- what others do between two steps

    def leave(self) -> None:
        """Remember the weights as they are now."""
        self.versions = tuple(map(_version, self.params))
        self.places = tuple(map(Tensor.data_ptr, self.params))

    def as_left(self, state: Any) -> bool:
        """Whether weights and state are the objects, at the places and in the versions, that we left."""
        dicts = tuple(map(state.get, self.params))
        return (
            same_objects(dicts, self.dicts)
            and tuple(map(_version, self.params)) == self.versions
            and tuple(map(Tensor.data_ptr, self.params)) == self.places
            and same_objects(tuple(chain.from_iterable(d.values() for d in dicts if d)), self.values)
        )

    def _differs(self, y: Tensor) -> Tensor:
        """Which points (M) are not the frame's, up to rounding."""
        size = y.abs().amax((-2, -1), keepdim=True).clamp_min(1)
        near = 4 * self.eps * (1 if self.frame.exact else y.shape[-2])
        return ~((self.frame.point() - y).abs() <= near * size).flatten(1).all(1)

    def _put(self, moved: Tensor, y: Tensor) -> None:
        """Put the frames of points that others have moved above them."""
        if bool(moved.any()):
            self.in_motion = True  # an interrupt here, too, drops the frame
            self.frame.put(moved, y[moved])
            self.in_motion = False

    def _nearest(self, y: Tensor) -> Tensor:
        """The points that weights of half precision stand for."""
        return y if self.dtype == self.params[0].dtype else self.space.geometry.nearest(y)

    def _off(self, y: Tensor) -> Tensor:
        """Which points are off their space."""
        geometry = self.space.geometry
        return ~(geometry.residual(y) <= geometry.allowed(y, self.eps))

    def _check(self, y: Tensor, moved: Tensor | bool = True) -> None:
        """A weight off its space is an error; nothing was moved."""
        off = self._off(y) & moved
        if bool(off.any()):
            name = self.names[int(off.nonzero()[0]) // (len(y) // len(self.params))]
            raise ValueError(f"{name} is not on {self.space}: write a point of it, or use its projection")

    def forgive(self, state: Any) -> None:
        """Writing a weight, be it with its own values, is the way to reset moments that are not finite."""
        for p, version in zip(self.params, self.versions, strict=False):
            for value in state.get(p, {}).values() if p._version != version else ():
                if is_per_coordinate(value, self.shape) and not bool(torch.isfinite(value).all()):
                    value.zero_()

    def look(self, warn: Callable[[str, str], None]) -> None:
        """Repair the rounding of points that have moved, and report what happened since the last look."""
        reads = self.frame.reads and self.exact
        off = self._off(y := self.frame.point()) if reads else self.lost
        seen = [x.to(self.peak) for x in (self.peak.amax(), self.lost, off.any())]
        (peak, lost, any_off), like = (torch.stack(seen).tolist(), f"{self.names[0]} or its like")  # the one read
        longest = self.frame.longest
        if peak > longest and peak < torch.inf:
            warn("long", f"a velocity of {like} was {peak:.1e} long, and was shortened to {longest:.0e}")
        elif not peak <= longest:
            warn("nonfinite", f"a velocity of {like} was not finite: write the weight to reset its moments")
        if lost:
            warn("lost", f"{like} was written through .data, which is not counted: the write was lost")
        if reads and any_off:
            warn("off", f"{like} is not on {self.space}, as after a write through .data: it was projected")
            self.frame.put(off, self.space.geometry.nearest(y[off]))
        self.peak.zero_(), self.lost.zero_()
        self.frame.repair(self.age % WHOLE_EVERY == 0, self.length > 0)
        self.scatter()


def same_objects(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two sequences hold the very same objects; comparing them by value would read tensors."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


def differ(X: Tensor, Y: Tensor) -> bool:
    """Not torch.equal, in half its time: that looks at one number after the other."""
    return float((X - Y).abs().amax()) != 0


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
        differs = k in FRAME_KEYS or k in POINT_KEYS or torch.is_tensor(v) and (v.dim() > 1 or v.shape == shape)
        out[k] = None if differs else v.tolist() if torch.is_tensor(v) else v
    return repr(sorted(out.items()))
