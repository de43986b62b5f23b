"""Points of several spaces, the frames above them, and flat vectors of g^hor.

A flat vector holds the coordinates W of every weight, scaled so that its dot product is the inner product of
g^hor (<A, A'>/2 + <B, B'> on matrix spaces). Vectors at different points belong to one vector space, so they
can be compared and added: transported frames leave their coordinates alone, implicit ones turn them (see
`ghor.spaces.sections`).

Turns are measured in radians, and the turn of a step is limited. Positions and Euclidean entries come in a
unit of the user's choice, so no constant here may stand for a length of theirs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ghor._torch.precision import COMPUTE_DTYPE
from ghor.linalg import dot, eye_like, solve
from ghor.retraction import Retraction, by_name
from ghor.spaces import Euclidean, PositionsOrientations, Space, SpecialEuclidean
from ghor.spaces.matrix import MatrixSpace
from ghor.spaces.sections import KINDS, SECTION_KEYS, Implicit, Section, from_state

T = TypeVar("T")

GEODESIC = by_name("geodesic")

# The entries of points and coordinates that have a unit of length ("ways"); all others are turns.
WAYS: dict[type[Space], Any] = {
    Euclidean: ...,
    SpecialEuclidean: (..., -1),
    PositionsOrientations: (..., 0, slice(None)),
}

# The length of a step when no curvature is known, as a part of a radian or of the size of the positions.
FIRST = 0.1


class PointBatch:
    """Weights of one space, shape and dtype: points (M, *point), section, and their part of flat vectors."""

    section: Section
    Y: Tensor

    def __init__(self, space: Space, index: list[int], like: Tensor, begin: int) -> None:
        self.space, self.index, self.shape, self.out = space.one, index, like.shape, like.dtype
        self.dtype = COMPUTE_DTYPE.get(like.dtype, like.dtype)
        split = space.split(like).shape
        # Only the layout and dtype of E are used. (torch.eye on the meta device imports 800 modules.)
        self.E = torch.empty(split[len(split) - space.dims :], dtype=like.dtype, device="meta")
        self.complex, self.curved = like.is_complex(), not isinstance(space, Euclidean)
        self.part = slice(begin, begin + len(index) * like.numel() * (2 if self.complex else 1))
        self.root = _root(self.space, self.E, like, self.dtype) if self.curved else None
        # ||W|| of a turn by one radian, and that of the longest step: all columns turned by four radians.
        self.reach = space.reach(self.shape) if self.curved else 0.0
        self.limit = min(4 * self.reach, space.max_velocity) if self.curved else math.inf
        self.ways: Any = next((at for kind, at in WAYS.items() if isinstance(space, kind)), None)

    def way(self, X: Tensor) -> Tensor | None:
        """The entries of points or coordinates that have a unit of length: positions, Euclidean numbers."""
        return None if self.ways is None else X[self.ways]

    def stacked(self, grads: Sequence[Tensor | None]) -> Tensor:
        """The Euclidean gradients of these weights, (M, *point)."""
        own = [self.Y.new_zeros(self.shape) if (G := grads[i]) is None else G.detach() for i in self.index]
        own = [(G.to_dense() if G.is_sparse else G).to(self.dtype) for G in own]
        return (torch.stack(own) if len(own) > 1 else own[0]).reshape(-1, *self.E.shape)

    def flat(self, X: Tensor) -> Tensor:
        """Coordinates (M, *point) as part of a flat vector."""
        X = X if self.root is None else X * self.root
        return (torch.view_as_real(X) if self.complex else X).reshape(-1)

    def scaled(self, u: Tensor) -> Tensor:
        """This batch's part of a flat vector, (M, *point), still scaled; a view if the dtype is the same."""
        part = u[self.part]
        part = (torch.view_as_complex(part.view(-1, 2)) if self.complex else part).to(self.dtype)
        return part.view(-1, *self.E.shape)

    def take_back(self, vectors: Sequence[Tensor], scaled: Sequence[Tensor]) -> None:
        """Write `scaled` parts, changed since, back into the flat vectors if they are not views of them."""
        for v, X in zip(vectors, scaled, strict=False):
            if X.dtype.to_real() != v.dtype:
                v[self.part] = (torch.view_as_real(X) if self.complex else X).reshape(-1).to(v.dtype)

    def coordinates(self, u: Tensor) -> Tensor:
        """W (M, *point) of a flat vector."""
        W = self.scaled(u)
        return W if self.root is None else W / self.root

    def moved(
        self, u: Tensor, t: float, retraction: Retraction, vectors: Sequence[Tensor], age: int
    ) -> PointBatch:
        """The batch at Lambda R(t W), rounding repaired; flat vectors turn to the new frame, in place."""
        new, W = _copied(self), self.coordinates(u) * t
        # Along a geodesic the velocity is W; along Cayley `slope` has a formula on matrix spaces only.
        retraction = retraction if isinstance(self.space, MatrixSpace) else GEODESIC
        new.section = type(self.section)(
            self.space, self.E, *(X.clone() for X in self.section.tensors().values())
        )
        turning = [] if new.section.holds_point else [self.scaled(v) for v in vectors]
        length = torch.linalg.vector_norm(W.flatten(1), dim=1) if self.E.dim() else W.abs()
        Y = self.Y if new.section.holds_point else self.Y.clone()
        new.Y = new.section.update(Y, W, retraction, turning, length > 0)
        self.take_back(vectors, turning)
        if self.curved:
            far = float(self.space.step_length(W).max()) > 0.5 * self.reach
            new.section.polish(new.Y, age, (length > 0).to(length.dtype), far)
        return new

    def slope(self, g: Tensor, d: Tensor, t: float, retraction: Retraction) -> Tensor:
        """<B, V>, B the gradient at Lambda_t = Lambda R(t W), V = Lambda_t^-1 d/dt Lambda_t.

        Along a geodesic V = W. Along Cayley V = (I - W^2/4)^-1 W at t = 1: in the basis [E, E_c B] the matrix
        W is [[A, -B* B], [I, 0]], so one solve of size 2n gives V = [x1; B x2].
        """
        space = self.space
        if retraction.name != "cayley" or not isinstance(space, MatrixSpace):
            return g[self.part].dot(d[self.part])
        # With t W in place of W the solve does not depend on the scale of d, which at first is that of f.
        W, G = space.matrix(self.coordinates(d) * t), space.matrix(self.scaled(g))
        n = W.shape[-1]
        if n == 1 and not self.complex:  # A = 0, and the solve is a division
            B = W[..., 1:, :]
            return (dot(B, G[..., 1:, :]) / (1 + space.pair(B, B)[..., 0, 0] / 4)).sum() / t
        A, B, I = W[..., :n, :], W[..., n:, :], eye_like(W).expand(*W.shape[:-2], n, n)
        X = torch.cat([torch.cat([A, -space.pair(B, B)], -1), torch.cat([I, torch.zeros_like(I)], -1)], -2)
        x = solve(eye_like(X) - (X @ X) / 4, torch.cat([A, I], -2))
        # <A, A'>/2 + <B, B'>; the coordinates of g are still scaled
        top = dot(G[..., :n, :], x[..., :n, :]) * math.sqrt(0.5)
        return (top + dot(B.mH @ G[..., n:, :], x[..., n:, :])).sum() / t

    def expansion(self, G: Tensor, g: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """v -> Y'(0) v and <G, Y''(0) v> for Y(u) = Lambda R(u) E, the second in g^hor and flat.

        All retractions agree to second order. G are the Euclidean gradients, g is the gradient in g^hor. With
        Lambda^H G = [C; D] and W^2 E = [A^2 - B* B; B A] the second is
        [skew(C A^H + A^H C + B^H D); D A^H - (B*)^H (C + C*)]/2 on matrix spaces. Elsewhere both are
        derivatives of the product Y'(u)^H G.
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


class Points:
    """Where all weights are, by batches. `moved` leaves the old points alone, so that steps can be tried."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        spaces: Sequence[Space],
        retraction: Retraction,
        section: str = "auto",
        states: Sequence[dict[str, Any]] | None = None,
        vectors: Sequence[Tensor] = (),
    ) -> None:
        """Start from tensors, or from the frames in `states`; flat `vectors` turn if the kind has changed."""
        self.retraction, self.asked, self.age, self.batches = retraction, section, 0, list[PointBatch]()
        kinds: dict[Any, list[int]] = defaultdict(list)
        for i, (p, space) in enumerate(zip(tensors, spaces, strict=True)):
            if getattr(space, "padding_idx", None) is not None:
                raise ValueError(
                    f"{space}: solvers and LBFGS move every row; use another optimizer for this weight"
                )
            kinds[(space, i) if isinstance(space, Euclidean) else (space, p.shape, p.dtype)].append(i)
        self.size, self.count = 0, len(tensors)
        self.eps = max(torch.finfo(p.dtype).eps for p in tensors)  # of the coarsest
        for (space, *_), index in kinds.items():
            batch = PointBatch(space, index, tensors[index[0]], self.size)
            self.size = batch.part.stop
            self.batches.append(batch)
            Y = torch.stack([tensors[i].detach().to(batch.dtype) for i in index])
            Y = Y.contiguous().reshape(-1, *batch.E.shape)
            held: dict[str, Tensor] = {}
            for key in SECTION_KEYS:
                if states is not None and all(key in states[i] for i in index):
                    held[key] = torch.cat([states[i][key] for i in index])
                    self.age = int(states[index[0]]["moves"])
            if batch.out != batch.dtype:
                Y = held.pop("master") if "master" in held else batch.space.project(Y)
            # With "auto" a run goes on with the kind of frame that its state holds.
            held_kind = section == "auto" and "section" in held
            if isinstance(space, Euclidean) or held_kind:
                kind = "transported"
            else:
                kind = space.section_kind(section, batch.shape, batch.dtype)
            # In the other direction nothing turns: an implicit frame, once formed, is a transported one.
            turning = [batch.scaled(v) for v in vectors] if "section" in held and kind == "implicit" else []
            batch.section = from_state(KINDS[kind], batch.space, batch.E, held, Y, False, turning)
            batch.take_back(vectors, turning)
            batch.Y = batch.section.point(Y)
            if batch.Y.data_ptr() == tensors[index[0]].data_ptr():
                batch.Y = batch.Y.clone()

    def states(self) -> list[dict[str, Tensor]]:
        """The tensors that a state keeps of the frames, for each weight."""
        out: list[dict[str, Tensor]] = [{} for _ in range(self.count)]
        for b in self.batches:
            held = b.section.tensors() if b.curved else {}
            if b.out != b.dtype and not (b.curved and b.section.holds_point):
                held = {**held, "master": b.Y}  # the weights hold it only rounded
            for key, X in held.items():
                for i, part in zip(b.index, X.chunk(len(b.index)), strict=True):
                    out[i][key] = part
            for i in b.index if held else ():
                out[i]["moves"] = torch.tensor(self.age)
        return out

    def tensors(self) -> list[Tensor]:
        """The points, in the order and dtype in which they came."""
        return self._each([b.Y for b in self.batches])

    def changed(self, tensors: Sequence[Tensor]) -> list[int]:
        """Which of these tensors are no longer the points, rounded to their dtype.

        Half precision weights that project to their points are unchanged, too.
        """
        out = []
        for b in self.batches:
            for i, Y in zip(b.index, b.Y.chunk(len(b.index)), strict=True):
                X = tensors[i].detach().reshape(Y.shape)
                if not torch.equal(X, Y.to(b.out)) and (
                    b.out == b.dtype or not torch.equal(b.space.project(X.to(b.dtype)), Y)
                ):
                    out.append(i)
        return sorted(out)

    def _each(self, parts: Sequence[Tensor]) -> list[Tensor]:
        out: dict[int, Tensor] = {}
        for b, X in zip(self.batches, parts, strict=True):
            out |= zip(b.index, X.to(b.out).reshape(len(b.index), *b.shape).unbind(0), strict=True)
        return [out[i] for i in range(self.count)]

    def gradient(self, grads: Sequence[Tensor | None]) -> Tensor:
        """B of the Euclidean gradients, flat."""
        flat = []
        for b in self.batches:
            G = b.stacked(grads)
            B = torch.empty_like(G, memory_format=torch.contiguous_format)
            b.section.global_grad(b.Y, G, B)
            flat.append(b.flat(B))
        return _flat(flat)

    def moved(self, d: Tensor, t: float, vectors: Sequence[Tensor] = ()) -> Points:
        """The points at Lambda R(t d); flat vectors turn to the new frames, in place."""
        new = _copied(self)
        new.age += 1
        new.batches = [b.moved(d, t, self.retraction, vectors, new.age) for b in self.batches]
        return new

    def renew(self, at: Points, d: Tensor, t: float, memory: Sequence[Tensor]) -> None:
        """Take flat vectors that are older than the step t d along to `at`, in place.

        While its anchor is kept, the implicit frame is a smooth function of the point. Keeping coordinates in
        it is then a transport itself, and an isometry, so vectors stay as they are, at no cost. They turn
        when an anchor is renewed.
        """
        both = [(a.section, b.section) for a, b in zip(self.batches, at.batches, strict=True)]
        if any(
            isinstance(a, Implicit) and isinstance(b, Implicit) and not torch.equal(a.R, b.R) for a, b in both
        ):
            self.moved(d, t, memory)

    def slope(self, g: Tensor, d: Tensor, t: float) -> float:
        """The derivative of the loss in t at R(t d), from the gradient g and d in the frames there."""
        return float(sum(b.slope(g, d, t, self.retraction) for b in self.batches))

    def ceiling(self, d: Tensor) -> float:
        """The largest t for which no point turns by more than its `limit` in the step t d."""
        turns = [
            (float(b.space.step_length(b.coordinates(d)).max()), b.limit)
            for b in self.batches
            if b.limit < math.inf
        ]
        return min((limit / turn for turn, limit in turns if turn > 0), default=math.inf)

    def widest(self) -> float:
        """The length of a step that turns everything by about one radian; infinite if there are positions."""
        if any(b.way(b.Y) is not None for b in self.batches):
            return math.inf
        return math.sqrt(sum(len(b.Y) * b.reach**2 for b in self.batches))

    def extent(self) -> float:
        """The size of the points: one radian for all turns, and the length of all positions."""
        squares = [len(b.Y) * b.reach**2 for b in self.batches]
        ways = [b.way(b.Y) for b in self.batches]
        return math.hypot(*(math.sqrt(x) for x in squares), *(float(x.norm()) for x in ways if x is not None))

    def first_step(self, g: Tensor, value: float) -> float:
        """t for a step -t g where no curvature is known: `FIRST` of the extent of every batch, or less.

        Positions have no natural length. Theirs is taken from their own entries, with t at most |f|/|g|^2, at
        which the value would fall to zero along the tangent (Hager and Zhang, 2006). So -t g depends neither
        on the scale of f nor on the unit of length, unless both x and f are zero.
        """
        steps = []
        for b in self.batches:
            G = b.scaled(g)
            if b.curved:
                steps.append(
                    (
                        FIRST * b.reach * math.sqrt(len(b.Y)),
                        float(torch.linalg.vector_norm(b.space.step_length(G))),
                    )
                )
            if (way := b.way(b.Y)) is not None:
                steps.append((FIRST * float(way.norm()), float(b.way(G).norm())))  # type: ignore[union-attr]
        norm = float(g.norm())
        if self.widest() == math.inf:
            steps.append((abs(value) / norm, norm))
        return min((a / b for a, b in steps if a > 0 and b > 0 and a / b > 0), default=1 / norm)

    def expansion(
        self, grads: Sequence[Tensor | None], g: Tensor
    ) -> Callable[[Tensor], tuple[list[Tensor], Tensor]]:
        """v -> how the points move along v, and the second derivative of <grads, points> in g^hor, flat."""
        parts = [b.expansion(b.stacked(grads), g) for b in self.batches]

        def both(v: Tensor) -> tuple[list[Tensor], Tensor]:
            moves, bends = zip(*(part(v) for part in parts), strict=True)
            return self._each(moves), _flat(bends)

        return both


def _copied(one: T) -> T:
    """A shallow copy: copy.copy takes ten times as long."""
    new = object.__new__(type(one))
    new.__dict__.update(one.__dict__)
    return new


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _root(space: Space, E: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Square roots of the weights of the inner product, which make coordinates orthonormal."""
    with torch.enable_grad():
        ones = torch.ones(E.shape, dtype=dtype, device=like.device).real
        V = torch.zeros_like(ones, requires_grad=True)
        (weights,) = torch.autograd.grad(space.ghor_inner(ones, V).sum(), V)
    return weights.sqrt()
