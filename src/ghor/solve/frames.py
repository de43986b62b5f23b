"""Points of several spaces, the frames above them, and flat vectors of g^hor.

A flat vector holds the coordinates W of every weight, scaled so that its dot product is the inner product of g^hor
(<A, A'>/2 + <B, B'> on matrix spaces). Vectors at different points belong to one vector space, so they can be compared
and added: transported frames leave their coordinates alone, implicit ones turn them (`ghor.section`, `arrived`).
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..linalg import COMPUTE_DTYPE
from ..retraction import Retraction, by_name
from ..section import KINDS, Implicit, Section, from_state
from ..spaces import Euclidean, Space
from ..spaces.form import Form
from .slope import velocity

GEODESIC = by_name("geodesic")


class Block:
    """Weights of one space, shape and dtype: their points (M, *point), the section, their part of a flat vector."""

    section: Section
    Y: Tensor

    def __init__(self, space: Space, index: list[int], like: Tensor, begin: int) -> None:
        self.space, self.index, self.shape, self.out = space.one, index, like.shape, like.dtype
        self.dtype = COMPUTE_DTYPE.get(like.dtype, like.dtype)
        split = space.split(like).shape
        self.E = self.space.E(split[len(split) - space.dims :], device="meta")
        self.complex = like.is_complex()
        numel = len(index) * like.numel() * (2 if self.complex else 1)
        self.part = slice(begin, begin + numel)
        self.root = None if isinstance(space, Euclidean) else _root(self.space, self.E, like, self.dtype)
        # Longest ||W|| of one step: all columns turned by four radians.
        flat = isinstance(space, Euclidean)
        self.reach = 1.0 if flat else space.reach(self.shape)
        self.limit = math.inf if flat else min(4 * self.reach, space.max_velocity)

    def flat(self, X: Tensor) -> Tensor:
        """Coordinates (M, *point) as part of a flat vector."""
        X = X if self.root is None else X * self.root
        return (torch.view_as_real(X) if self.complex else X).reshape(-1)

    def scaled(self, u: Tensor) -> Tensor:
        """The part of a flat vector, (M, *point), still scaled; of the same dtype it is a view."""
        part = u[self.part]
        part = (torch.view_as_complex(part.view(-1, 2)) if self.complex else part).to(self.dtype)
        return part.view(-1, *self.E.shape)

    def coordinates(self, u: Tensor) -> Tensor:
        """W (M, *point) of a flat vector."""
        W = self.scaled(u)
        return W if self.root is None else W / self.root

    def moved(self, u: Tensor, t: float, retraction: Retraction, vectors: Sequence[Tensor]) -> Block:
        """At Lambda R(t W), with flat vectors taken to the new frame, in place."""
        new, W = copy.copy(self), self.coordinates(u) * t
        retraction = retraction if isinstance(self.space, Form) else GEODESIC  # along which the velocity is known
        kind, held = type(self.section), [X.clone() for X in self.section.tensors().values()]
        new.section = kind(self.space, self.E, *held)
        turning = [] if self.section.holds_point else [self.scaled(v) for v in vectors]
        length = torch.linalg.vector_norm(W.flatten(1), dim=1) if self.E.dim() else W.abs()
        new.Y = new.section.update(
            self.Y if new.section.holds_point else self.Y.clone(), W, retraction, turning, length > 0
        )
        for v, X in zip(vectors, turning, strict=False):
            if X.dtype != v.dtype:
                v[self.part] = (torch.view_as_real(X) if self.complex else X).reshape(-1).to(v.dtype)
        return new

    def pulled_back(self, u: Tensor) -> Tensor:
        """Y of Lambda R(W) E to second order in W, in which all retractions agree; differentiable in u."""
        space, W = self.space, self.space.hor(self.coordinates(u))
        if not isinstance(space, Form):
            section = self.section
            Lambda = space.implicit_frame(self.Y, section.R) if isinstance(section, Implicit) else section.Lambda
            return space.apply_section(space.update_section(Lambda, W, "geodesic"), self.E)
        M = space.matrix(W)
        A, B = M[..., : M.shape[-1], :], M[..., M.shape[-1] :, :]
        D = M + torch.cat([A @ A - space.star(B) @ B, B @ A], -2) / 2  # (W + W^2/2) E
        if isinstance(self.section, Implicit):
            P = space.implicit_inverse(self.Y, self.section.R)
            move = space.implicit_apply(self.Y, self.section.R, P, D)
        else:
            move = self.section.Lambda @ D
        return self.Y + space.unmatrix(move, self.Y.shape)


class Frames:
    """Where all weights are, by blocks. `moved` leaves the old place alone, so that steps can be tried."""

    def __init__(
        self,
        points: Sequence[Tensor],
        spaces: Sequence[Space],
        retraction: Retraction,
        section: str = "auto",
        states: Sequence[dict[str, Any]] | None = None,
        vectors: Sequence[Tensor] = (),
    ) -> None:
        """From points, or from what `states` hold of their sections; flat `vectors` turn if the kind has changed."""
        self.retraction, self.age, self.blocks = retraction, 0, list[Block]()
        kinds: dict[Any, list[int]] = defaultdict(list)
        for i, (p, space) in enumerate(zip(points, spaces, strict=True)):
            if getattr(space, "padding_idx", None) is not None:
                raise ValueError(f"{space}: solvers and LBFGS move every row; use another optimizer for this weight")
            kinds[(space, i) if isinstance(space, Euclidean) else (space, p.shape, p.dtype)].append(i)
        self.size, self.count = 0, len(points)
        for (space, *_), index in kinds.items():
            block = Block(space, index, points[index[0]], self.size)
            self.size = block.part.stop
            self.blocks.append(block)
            Y = torch.stack([points[i].detach().to(block.dtype) for i in index]).reshape(-1, *block.E.shape)
            held: dict[str, Tensor] = {}
            for key in ("section", "anchor", "master"):
                if states is not None and all(key in states[i] for i in index):
                    held[key] = torch.cat([states[i][key] for i in index])
                    self.age = int(states[index[0]]["moves"])
            if block.out != block.dtype:
                Y = held.pop("master") if "master" in held else block.space.project(Y)
            kind = "transported" if isinstance(space, Euclidean) else space.section_kind(section, block.shape)
            turning = [block.scaled(v) for v in vectors]
            block.section = from_state(KINDS[kind], block.space, block.E, held, Y, False, turning)
            block.Y = block.section.point(Y)
            if block.Y.data_ptr() == points[index[0]].data_ptr():
                block.Y = block.Y.clone()

    def states(self) -> list[dict[str, Tensor]]:
        """What has to be kept of the frames, for each weight."""
        out: list[dict[str, Tensor]] = [{} for _ in range(self.count)]
        for b in (b for b in self.blocks if not isinstance(b.space, Euclidean)):
            held = b.section.tensors()
            if b.out != b.dtype and not b.section.holds_point:
                held = {**held, "master": b.Y}
            for key, X in held.items():
                for i, part in zip(b.index, X.chunk(len(b.index)), strict=True):
                    out[i][key] = part
            for i in b.index:
                out[i]["moves"] = torch.tensor(self.age)
        return out

    def points(self) -> list[Tensor]:
        """The points, in the order and dtype in which they came."""
        return self._each([b.Y for b in self.blocks])

    def _each(self, parts: Sequence[Tensor]) -> list[Tensor]:
        out: dict[int, Tensor] = {}
        for b, X in zip(self.blocks, parts, strict=True):
            out |= zip(b.index, X.to(b.out).reshape(len(b.index), *b.shape).unbind(0), strict=True)
        return [out[i] for i in range(self.count)]

    def gradient(self, grads: Sequence[Tensor | None]) -> Tensor:
        """B of the Euclidean gradients, flat."""
        flat = []
        for b in self.blocks:
            G = torch.stack([_dense(grads[i], b) for i in b.index]).reshape(-1, *b.E.shape)
            B = torch.empty_like(G)
            b.section.global_grad(b.Y, G, B)
            flat.append(b.flat(B))
        return torch.cat(flat)

    def moved(self, d: Tensor, t: float, vectors: Sequence[Tensor] = ()) -> Frames:
        """At Lambda R(t d), with flat vectors taken to the new frames, in place."""
        new = copy.copy(self)
        new.blocks = [b.moved(d, t, self.retraction, vectors) for b in self.blocks]
        new.age += 1
        return new

    def arrived(
        self, d: Tensor, t: float, at: Frames | None, near: Sequence[Tensor], memory: Sequence[Tensor]
    ) -> Frames:
        """The frames after a step that is taken, `at` where a search has left some; flat vectors come along, in place.

        `near` are those that the next gradient is compared with. `memory` are older: while an anchor is kept, the
        implicit frame is a smooth function of the point and its coordinates are a transport themselves, an isometry,
        so they stay as they are, at no cost. They turn where an anchor is renewed.
        """
        held = [b.section for b in self.blocks if isinstance(b.section, Implicit)]
        if at is None or held:
            at = self.moved(d.clone(), t, near)
        new = [b.section for b in at.blocks if isinstance(b.section, Implicit)]
        if any(not torch.equal(a.R, b.R) for a, b in zip(held, new, strict=True)):
            self.moved(d.clone(), t, memory)
        at.polish(float(d.norm()) * t)
        return at

    def polish(self, length: float = 0.0) -> None:
        """Rounding repaired: of the points every time, of frames now and then, and after a step of a great length."""
        for b in (b for b in self.blocks if not isinstance(b.space, Euclidean)):
            share = torch.ones(len(b.Y), dtype=b.Y.real.dtype, device=b.Y.device)
            b.section.polish(b.Y, self.age, share, length > 0.5 * b.reach)

    def slope(self, B: Tensor, d: Tensor, t: float) -> float:
        """<B, V>, the derivative of the loss at R(t d): B the gradient there, V the velocity, d in the frames there."""
        if all(isinstance(b.space, Euclidean) for b in self.blocks):
            return float(B.dot(d))
        V = [b.flat(velocity(b.space, b.coordinates(d), t, self.retraction)) for b in self.blocks]
        return float(B.dot(torch.cat(V)))

    def ceiling(self, d: Tensor) -> float:
        """The largest t for which t d is a step that the retraction is exact for."""
        longest = [math.inf]
        for b in (b for b in self.blocks if b.limit < math.inf):
            length = float(torch.linalg.vector_norm(b.coordinates(d).flatten(1), dim=1).max())
            longest.append(b.limit / length if length > 0 else math.inf)
        return min(longest)

    def radius(self) -> float:
        """The length of a step that turns everything by about one radian."""
        return math.sqrt(sum(len(b.Y) * b.reach**2 for b in self.blocks))

    def pulled_back(self, u: Tensor) -> list[Tensor]:
        """The points Lambda R(u) E, to second order, differentiable in u: the loss as a function on g^hor."""
        return self._each([b.pulled_back(u) for b in self.blocks])


def _dense(G: Tensor | None, b: Block) -> Tensor:
    if G is None:
        return torch.zeros(b.shape, dtype=b.dtype, device=b.Y.device)
    return (G.to_dense() if G.is_sparse else G).detach().to(b.dtype)


def _root(space: Space, E: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Square roots of the weights of the inner product: by them coordinates become orthonormal."""
    with torch.enable_grad():
        ones = torch.ones(E.shape, dtype=dtype, device=like.device).real
        V = torch.zeros_like(ones, requires_grad=True)
        (weights,) = torch.autograd.grad(space.ghor_inner(ones, V).sum(), V)
    return weights.sqrt()
