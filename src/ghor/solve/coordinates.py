"""g^hor of several weights as one space of flat vectors, whose dot product is its inner product.

Vectors at different points belong to one space, so they can be compared and added: coordinates in stored
frames stay along a step, and so they do in closed forms while a reference is kept. Turns are measured in
radians, and the turn of a step is limited. A radius is a scale of points and gradients, so a run is that on
the unit sphere. Positions and Euclidean entries come in a unit of the user's choice, so no constant here may
stand for a length of theirs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ghor._torch.precision import COMPUTE_DTYPE
from ghor.spaces.base import Space
from ghor.spaces.frames import Frame, rows
from ghor.spaces.retraction import Retraction

SHORT = 64  # frames are stored up to N = 64 n: N x N numbers, about those of 30 pairs of vectors
FRAME_KEYS = ("section", "frame_anchor")  # what a frame keeps in state[p]


class Part:
    """Weights of one space, shape and dtype as points (M, N, n), and their part of flat vectors."""

    def __init__(
        self,
        space: Space,
        index: list[int],
        tensors: Sequence[Tensor],
        begin: int,
        section: str,
        states: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        like = tensors[index[0]]
        self.space, self.index, self.shape, self.out = space, index, like.shape, like.dtype
        self.geometry, self.layout, self.section = space.geometry, space.layout, section
        self.dtype, self.complex = COMPUTE_DTYPE.get(like.dtype, like.dtype), like.is_complex()
        self.like = torch.empty(0, dtype=self.dtype, device=like.device)
        self.eps = torch.finfo(like.dtype).eps
        self.scale: float | Tensor = 1.0
        self.scale = self._scale(tensors, states)
        self.start = self.frame(tensors, states)
        room = self.start.zeros()
        self.dims, self.strides, self.count = room.shape, room.stride(), len(room)
        self.size = room.numel() * (2 if self.complex else 1)
        self.slice = slice(begin, begin + self.size)
        self.limit, self.turns = self.start.longest, self.positions(self.start.point()) is None
        # The length of a step that turns a point by about one radian; infinite where there is no such step.
        self.radian = max(1.0, self.limit / 4)
        self.plain, self.root = self._metric(room)

    def _metric(self, room: Tensor) -> tuple[bool, Tensor | None]:
        """Whether coordinates are free or 0, and roots of their weights in the inner product if not 1."""
        w = torch.linspace(
            1, 2, math.prod(self.dims[1:]), dtype=self.dtype.to_real(), device=room.device
        ).view(1, *self.dims[1:])
        w = torch.complex(w, w.square()) if self.complex else w
        hor = w.clone()
        self.geometry.hor_(hor)
        plain = bool(((hor == w) | (hor == 0)).all())
        with torch.enable_grad():
            v = torch.zeros_like(w.real, requires_grad=True)
            (weights,) = torch.autograd.grad(self.geometry.hor_inner(torch.ones_like(v), v).sum(), v)
        weights = torch.where(hor == 0, 1, weights)
        return plain, None if bool((weights == 1).all()) else weights.sqrt()

    def _scale(self, tensors: Sequence[Tensor], states: Sequence[Mapping[str, Any]] | None) -> float | Tensor:
        """The radius: one number, or that of each point, (M, 1, 1), which a state may know."""
        known = [r for i in self.index if states is not None and (r := states[i].get("radius")) is not None]
        y = self.points([tensors[i].detach() for i in self.index])
        own = self.space.scale(y)
        if self.space.radius != "start" or len(known) < len(self.index):
            return own
        radii = torch.cat([r.reshape(-1, 1, 1) for r in known]).to(self.dtype)
        off = self.geometry.residual(y / radii) > self.geometry.tolerance(y / radii, eps=self.eps)
        return torch.where(off[:, None, None], own, radii)  # of weights that are no longer there, their own

    def points(self, tensors: Sequence[Tensor]) -> Tensor:
        """Weights as points."""
        X = tensors[0] if len(tensors) == 1 else torch.stack(list(tensors))
        X = self.layout.points(X if X.dtype == self.dtype else X.to(self.dtype)).resolve_conj()
        return X if self.space.radius == 1 else X / self.scale

    def weights(self, y: Tensor) -> Sequence[Tensor]:
        """The weights of points, or how they move along tangent vectors; views where nothing is scaled."""
        y = y if self.space.radius == 1 else y * self.scale
        y = y if self.out == self.dtype else y.to(self.out)
        if len(self.index) == 1:
            return (self.layout.weight(y, self.shape),)
        return self.layout.weight(y, (len(self.index), *self.shape)).unbind(0)

    def gradient(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Euclidean gradients at the weights as one at the points: by radians on spheres of every radius."""
        own = [self._dense(grads[i]) for i in self.index]
        G = self.layout.points(own[0] if len(own) == 1 else torch.stack(own))
        return G if self.space.radius == 1 else G * self.scale

    def _dense(self, G: Tensor | None) -> Tensor:
        if G is None:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.like.device)
        G = G.to_dense() if G.is_sparse else G
        return (G if G.dtype == self.dtype else G.to(self.dtype)).resolve_conj()

    def frame(self, tensors: Sequence[Tensor], states: Sequence[Mapping[str, Any]] | None = None) -> Frame:
        """The frame above these weights: what states keep of one, or a new one."""
        held = dict[str, Tensor]()
        own = [] if states is None else [states[i] for i in self.index]
        for key in (*FRAME_KEYS, "master"):
            if own and all(key in state for state in own):
                held[key] = torch.stack([state[key].to(self.like) for state in own])
        if "master" in held:
            y = self.layout.points(held.pop("master"))
        else:
            y = self.points([tensors[i].detach() for i in self.index])
            y = y if self.out == self.dtype else self.geometry.nearest(y)
        held = {key: X.reshape(-1, *X.shape[-2:]) for key, X in held.items()}
        return self.geometry.frame(y.clone(), self.kind(y), held, self.eps)

    def states(self, frame: Frame, age: int) -> list[dict[str, Tensor]]:
        """What the states of these weights keep of a frame, from which `frame` makes it again, to the bit."""
        count, flat = len(self.index), self.geometry.flat
        columns = dict[str, Sequence[Tensor]]()
        if not flat:
            columns |= {key: _each(X, count) for key, X in frame.tensors().items()}
        exact = self.out == self.dtype and self.space.radius == 1
        if "section" not in columns and not exact:  # the weights hold the point only rounded
            columns["master"] = self.layout.weight(frame.point(), (count, *self.shape)).unbind(0)
        if torch.is_tensor(self.scale):
            columns["radius"] = self.scale.reshape(count, *self.layout.batch(self.shape)).unbind(0)
        if columns or not flat:
            columns["moves"] = [torch.tensor(age, device="cpu")] * count
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows] or [{}] * count

    def unchanged(self, frame: Frame, tensors: Sequence[Tensor]) -> list[bool]:
        """Which of these weights are still the points of a frame, rounded to their dtype.

        Those of half precision that project to their points are unchanged, too.
        """
        y = frame.point()
        now = [tensors[i].detach() for i in self.index]
        same = [torch.equal(p, X) for p, X in zip(now, self.weights(y), strict=True)]
        if self.out != self.dtype and not all(same):
            near = self.geometry.nearest(self.points(now)) == y
            same = [one or bool(x.all()) for one, x in zip(same, near.chunk(len(now)), strict=True)]
        return same

    def kind(self, y: Tensor) -> str:
        """The kind of frame that is asked for, where a state has none."""
        N, n = y.shape[-2:]
        return self.section if self.section != "auto" else "transported" if N <= SHORT * n else "implicit"

    def view(self, u: Tensor) -> Tensor:
        """This part of a flat vector as elements of g^hor (M, N, n), in the frames' order of memory."""
        part = u if u.numel() == self.size else u[self.slice]
        if self.complex:
            part = torch.view_as_complex(part.view(-1, 2))
        return part.as_strided(self.dims, self.strides)

    def positions(self, x: Tensor) -> Tensor | None:
        """The entries of points or coordinates that have a unit of length."""
        return self.geometry.positions(x)


class Coordinates:
    """Flat vectors of g^hor at several weights.

    However many weights there are, a product of vectors is one kernel, and a memory of 30 pairs is two
    matrices. Frames read and write views of flat vectors; parts are copied only where dtypes differ.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        spaces: Sequence[Space],
        R: Retraction,
        section: str = "auto",
        states: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.R, self.section, self.count, self.size = R, section, len(tensors), 0
        self.parts = list[Part]()
        for index in kinds(tensors, spaces, section):
            self.parts.append(Part(spaces[index[0]], index, tensors, self.size, section, states))
            self.size = self.parts[-1].slice.stop
        self.frames = tuple(part.start for part in self.parts)
        self.sizes = [part.size for part in self.parts]
        self.euclidean = all(part.space.flat for part in self.parts)
        self.eps = max(part.eps for part in self.parts)  # of the coarsest
        dtype = reduce(torch.promote_types, (part.dtype.to_real() for part in self.parts))
        self.like = torch.empty(0, dtype=dtype, device=tensors[0].device)
        # The length of a turn of everything by one radian, and of the widest step that has a natural length.
        turning = [part for part in self.parts if part.limit < math.inf]
        self.radian = math.hypot(*(math.sqrt(part.count) * part.radian for part in turning))
        self.widest = self.radian if all(part.turns for part in self.parts) else math.inf

    @property
    def units(self) -> list[int]:
        """How many coordinates, one after the other, have one unit: all turns have."""
        parts = groupby(enumerate(self.parts), key=lambda kind: kind[1].turns or kind[0])
        return [sum(part.size for _, part in same) for _, same in parts]

    @property
    def places(self) -> list[list[int]]:
        """Which weights are in each part."""
        return [part.index for part in self.parts]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors have the shapes and dtypes in which they came."""
        if len(tensors) != self.count:
            return False
        kinds = ((tensors[i], part) for part in self.parts for i in part.index)
        return all(p.shape == part.shape and p.dtype == part.out for p, part in kinds)

    def states(self, frames: Sequence[Frame], age: int) -> list[dict[str, Any]]:
        """What the state of each weight keeps of the frames."""
        out: list[dict[str, Any]] = [{} for _ in range(self.count)]
        for part, frame in zip(self.parts, frames, strict=True):
            for i, own in zip(part.index, part.states(frame, age), strict=True):
                out[i] = own
        return out

    def weights(self, points: Sequence[Tensor]) -> list[Tensor]:
        """The weights of points, in the order in which they came."""
        if len(points) == 1:
            return list(self.parts[0].weights(points[0]))
        out = dict[int, Tensor]()
        for part, y in zip(self.parts, points, strict=True):
            out.update(zip(part.index, part.weights(y), strict=True))
        return [out[i] for i in range(self.count)]

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Euclidean gradients at the weights, as such at the points."""
        return [part.gradient(grads) for part in self.parts]

    def flat(self, write: Callable[[int, Tensor], object]) -> Tensor:
        """The vector whose parts write(k, out) puts into `out`, as elements of g^hor."""
        u = self.like.new_empty(self.size)
        for k, part in enumerate(self.parts):
            out = part.view(u)
            own = out if out.dtype == part.dtype else torch.empty_like(out, dtype=part.dtype)
            write(k, own)
            if part.root is not None:
                own.mul_(part.root)
            if own is not out:
                out.copy_(own)
        return u

    def pull(self, frames: Sequence[Frame], G: Sequence[Tensor]) -> Tensor:
        """The gradient in g^hor of Euclidean gradients."""
        return self.flat(lambda k, out: frames[k].pull(G[k], out))

    def elements(self, u: Tensor) -> list[Tensor]:
        """The elements of g^hor that make up u; sums of flat vectors lie there to rounding only."""
        out = []
        for part in self.parts:
            w = part.view(u)
            w = w if w.dtype == part.dtype else w.to(part.dtype)
            if not part.plain or part.root is not None:
                w = w.clone() if part.root is None else w / part.root
                part.geometry.hor_(w)
            out.append(w)
        return out

    def ceiling(self, frames: Sequence[Frame], w: Sequence[Tensor]) -> float:
        """The largest t for which t w turns no point by more than its limit."""
        rows = zip(self.parts, frames, w, strict=True)
        turns = [(p.limit, frame.length(x)) for p, frame, x in rows if p.limit < math.inf and p.count]
        longest = ((limit, float(x.max() if len(x) > 1 else x)) for limit, x in turns)
        return min((limit / length for limit, length in longest if length > 0), default=math.inf)


def kinds(tensors: Sequence[Tensor], spaces: Sequence[Space], section: str) -> list[list[int]]:
    """Weights of one space, shape and dtype together; complex numbers first, so that they lie at even places.

    Parts that turn are next to each other. Every Euclidean weight may have a unit of length of its own.
    """
    found: dict[Any, list[int]] = defaultdict(list)
    for i, (p, space) in enumerate(zip(tensors, spaces, strict=True)):
        if getattr(space, "padding_idx", None) is not None:
            raise ValueError(
                f"{space}: solvers and LBFGS move every row; use another optimizer for this weight"
            )
        if section == "implicit" and not (space.flat or space.implicit):
            raise ValueError(f"{space} has no implicit section; use section='transported'")
        turns = space.geometry.positions(space.layout.points(p)) is None
        place = not p.is_complex(), turns == p.is_complex()
        found[(*place, space, i) if space.flat else (*place, space, p.shape, p.dtype)].append(i)
    return [index for _, index in sorted(found.items(), key=lambda kind: kind[0][:2])]


def _each(X: Tensor, count: int) -> list[Tensor]:
    """The entries of each of so many weights; those of a single point without its dimension."""
    return [x.squeeze(0) for x in rows(X, count)]
