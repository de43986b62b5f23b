"""Points of several spaces, the frames above them, and flat vectors of g^hor.

A flat vector holds the coordinates W of every weight, scaled so that its dot product is the inner product of
g^hor (<A, A'>/2 + <B, B'> on matrix spaces). Vectors at different points belong to one vector space, so they
can be compared and added: transported frames leave their coordinates alone, implicit ones turn them
(`ghor.section`).
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ghor._torch.precision import COMPUTE_DTYPE
from ghor.linalg import dot, eye_like, solve
from ghor.retraction import Retraction, by_name
from ghor.spaces import Euclidean, Space
from ghor.spaces.matrix import MatrixSpace
from ghor.spaces.sections import KINDS, Implicit, Section, from_state

GEODESIC = by_name("geodesic")


class Block:
    """Weights of one space, shape and dtype: their points (M, *point), the section, their part of a flat
    vector."""

    section: Section
    Y: Tensor

    def __init__(self, space: Space, index: list[int], like: Tensor, begin: int) -> None:
        self.space, self.index, self.shape, self.out = space.one, index, like.shape, like.dtype
        self.dtype = COMPUTE_DTYPE.get(like.dtype, like.dtype)
        split = space.split(like).shape
        self.E = self.space.E(split[len(split) - space.dims :], dtype=like.dtype, device="meta")
        self.complex, self.curved = like.is_complex(), not isinstance(space, Euclidean)
        self.part = slice(begin, begin + len(index) * like.numel() * (2 if self.complex else 1))
        self.root = _root(self.space, self.E, like, self.dtype) if self.curved else None
        # Longest ||W|| of one step: all columns turned by four radians.
        self.reach = space.reach(self.shape) if self.curved else 1.0
        self.limit = min(4 * self.reach, space.max_velocity) if self.curved else math.inf

    def stacked(self, grads: Sequence[Tensor | None]) -> Tensor:
        """The Euclidean gradients of these weights, (M, *point)."""
        zero = torch.zeros((), dtype=self.dtype, device=self.Y.device).expand(self.shape)
        own = [zero if (G := grads[i]) is None else G.detach() for i in self.index]
        own = [(G.to_dense() if G.is_sparse else G).to(self.dtype) for G in own]
        return (torch.stack(own) if len(own) > 1 else own[0]).reshape(-1, *self.E.shape)

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

    def moved(
        self, u: Tensor, t: float, retraction: Retraction, vectors: Sequence[Tensor], age: int
    ) -> Block:
        """At Lambda R(t W), rounding repaired; flat vectors are taken to the new frame, in place."""
        new, W = copy.copy(self), self.coordinates(u) * t
        retraction = (
            retraction if isinstance(self.space, MatrixSpace) else GEODESIC
        )  # along which the velocity is known
        new.section = type(self.section)(
            self.space, self.E, *(X.clone() for X in self.section.tensors().values())
        )
        turning = [] if new.section.holds_point else [self.scaled(v) for v in vectors]
        length = torch.linalg.vector_norm(W.flatten(1), dim=1) if self.E.dim() else W.abs()
        Y = self.Y if new.section.holds_point else self.Y.clone()
        new.Y = new.section.update(Y, W, retraction, turning, length > 0)
        for v, X in zip(vectors, turning, strict=False):
            if X.dtype != v.dtype:
                v[self.part] = (torch.view_as_real(X) if self.complex else X).reshape(-1).to(v.dtype)
        if self.curved:
            new.section.polish(
                new.Y, age, (length > 0).to(length.dtype), float(length.max()) > 0.5 * self.reach
            )
        return new

    def slope(self, g: Tensor, d: Tensor, t: float, retraction: Retraction) -> Tensor:
        """<B, V>, B the gradient at Lambda_t = Lambda R(t W), V = Lambda_t^-1 d/dt Lambda_t: W along a
        geodesic.

        Along Cayley it is (I - t^2 W^2/4)^-1 W: on the basis [E, E_c B] the matrix W is [[A, -B* B], [I, 0]],
        so one solve of size 2n gives V = [x1; B x2].
        """
        space = self.space
        if retraction.name != "cayley" or not isinstance(space, MatrixSpace):
            return g[self.part].dot(d[self.part])
        W, G = space.matrix(self.coordinates(d)), space.matrix(self.scaled(g))
        n = W.shape[-1]
        A, B, I = W[..., :n, :], W[..., n:, :], eye_like(W).expand(*W.shape[:-2], n, n)
        X = torch.cat([torch.cat([A, -space.pair(B, B)], -1), torch.cat([I, torch.zeros_like(I)], -1)], -2)
        x = solve(eye_like(X) - (t * t / 4) * (X @ X), torch.cat([A, I], -2))
        # <A, A'>/2 + <B, B'>; the coordinates of g are still scaled
        top = dot(G[..., :n, :], x[..., :n, :]) * math.sqrt(0.5)
        return (top + dot(B.mH @ G[..., n:, :], x[..., n:, :])).sum()

    def expansion(self, G: Tensor, g: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Of Y(u) = Lambda R(u) E at 0, in which all retractions agree: v -> Y'(0) v, and <G, Y''(0) v> in
        g^hor, flat.

        G are the Euclidean gradients, g that in g^hor. With Lambda^H G = [C; D] and W^2 E = [A^2 - B* B; B A]
        the second is [skew(C A^H + A^H C + B^H D); D A^H - (B*)^H (C + C*)]/2 on matrix spaces. Elsewhere
        both are derivatives of the product Y'(u)^H G.
        """
        space, section, Y = self.space, self.section, self.Y
        if not isinstance(space, MatrixSpace):
            with torch.enable_grad():
                u, G = torch.zeros_like(g, requires_grad=True), G.requires_grad_()
                W = space.hor(self.coordinates(u))
                Lambda = (
                    space.implicit_frame(Y, section.R) if isinstance(section, Implicit) else section.Lambda
                )
                at = space.apply_section(space.update_section(Lambda, W, "geodesic"), self.E)
                (p,) = torch.autograd.grad(at, u, G, create_graph=True)

            def derivatives(v: Tensor) -> tuple[Tensor, Tensor]:
                bend, Delta = torch.autograd.grad(p, (u, G), v, retain_graph=True, materialize_grads=True)
                return Delta.detach(), bend.detach()[self.part]

            return derivatives
        C, n = space.matrix(Y).mH @ space.matrix(G), space.matrix(Y).shape[-1]
        D, S = space.matrix(self.coordinates(g))[..., n:, :], (C + space.star(C)) / 2
        P = space.implicit_inverse(Y, section.R) if isinstance(section, Implicit) else None

        def formula(v: Tensor) -> tuple[Tensor, Tensor]:
            V = space.matrix(self.coordinates(v))
            A, B = V[..., :n, :], V[..., n:, :]
            if isinstance(section, Implicit):
                Delta = space.implicit_apply(Y, section.R, P, V)
            else:
                Delta = section.Lambda @ V
            bend = torch.empty_like(V)
            bend[..., :n, :] = space.skew(C @ A.mH + A.mH @ C + B.mH @ D) / 2
            bend[..., n:, :] = D @ (A.mH / 2) - space.star(B).mH @ S
            return space.unmatrix(Delta, Y.shape), self.flat(space.unmatrix(bend, Y.shape))

        return formula


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
        """From points, or from what `states` hold of their sections; flat `vectors` turn if the kind has
        changed."""
        self.retraction, self.age, self.blocks = retraction, 0, list[Block]()
        kinds: dict[Any, list[int]] = defaultdict(list)
        for i, (p, space) in enumerate(zip(points, spaces, strict=True)):
            if getattr(space, "padding_idx", None) is not None:
                raise ValueError(
                    f"{space}: solvers and LBFGS move every row; use another optimizer for this weight"
                )
            kinds[(space, i) if isinstance(space, Euclidean) else (space, p.shape, p.dtype)].append(i)
        self.size, self.count = 0, len(points)
        self.eps = max(torch.finfo(p.dtype).eps for p in points)  # of the coarsest
        for (space, *_), index in kinds.items():
            block = Block(space, index, points[index[0]], self.size)
            self.size = block.part.stop
            self.blocks.append(block)
            Y = (
                torch.stack([points[i].detach().to(block.dtype) for i in index])
                .contiguous()
                .reshape(-1, *block.E.shape)
            )
            held: dict[str, Tensor] = {}
            for key in ("section", "anchor", "master"):
                if states is not None and all(key in states[i] for i in index):
                    held[key] = torch.cat([states[i][key] for i in index])
                    self.age = int(states[index[0]]["moves"])
            if block.out != block.dtype:
                Y = held.pop("master") if "master" in held else block.space.project(Y)
            flat = isinstance(space, Euclidean)
            kind = "transported" if flat else space.section_kind(section, block.shape, block.dtype)
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
            G = b.stacked(grads)
            B = torch.empty_like(G, memory_format=torch.contiguous_format)
            b.section.global_grad(b.Y, G, B)
            flat.append(b.flat(B))
        return _flat(flat)

    def moved(self, d: Tensor, t: float, vectors: Sequence[Tensor] = ()) -> Frames:
        """At Lambda R(t d), with flat vectors taken to the new frames, in place."""
        new = copy.copy(self)
        new.age += 1
        new.blocks = [b.moved(d, t, self.retraction, vectors, new.age) for b in self.blocks]
        return new

    def renew(self, at: Frames, d: Tensor, t: float, memory: Sequence[Tensor]) -> None:
        """Flat vectors that are older than the step t d to `at`, in place.

        While an anchor is kept, the implicit frame is a smooth function of the point and its coordinates are
        a transport themselves, an isometry, so they stay as they are, at no cost. They turn where an anchor
        is renewed.
        """
        both = [(a.section, b.section) for a, b in zip(self.blocks, at.blocks, strict=True)]
        if any(
            isinstance(a, Implicit) and isinstance(b, Implicit) and not torch.equal(a.R, b.R) for a, b in both
        ):
            self.moved(d, t, memory)

    def slope(self, g: Tensor, d: Tensor, t: float) -> float:
        """The derivative of the loss at R(t d): g the gradient there, d in the frames there."""
        return float(sum(b.slope(g, d, t, self.retraction) for b in self.blocks))

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

    def expansion(
        self, grads: Sequence[Tensor | None], g: Tensor
    ) -> Callable[[Tensor], tuple[list[Tensor], Tensor]]:
        """v -> how the points move along v, and the second derivative of <grads, points> in g^hor, flat."""
        parts = [b.expansion(b.stacked(grads), g) for b in self.blocks]

        def both(v: Tensor) -> tuple[list[Tensor], Tensor]:
            moves, bends = zip(*(part(v) for part in parts), strict=True)
            return self._each(moves), _flat(bends)

        return both


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _root(space: Space, E: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Square roots of the weights of the inner product: by them coordinates become orthonormal."""
    with torch.enable_grad():
        ones = torch.ones(E.shape, dtype=dtype, device=like.device).real
        V = torch.zeros_like(ones, requires_grad=True)
        (weights,) = torch.autograd.grad(space.ghor_inner(ones, V).sum(), V)
    return weights.sqrt()
