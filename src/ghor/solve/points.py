"""Points of several spaces, the frames above them, and flat vectors of g^hor.

A flat vector holds the coordinates W of every weight, scaled so that its dot product is the inner product of
g^hor (<A, A'>/2 + <B, B'> on matrix spaces). Vectors at different points belong to one vector space, so they
can be compared and added: transported frames leave their coordinates alone, implicit ones turn them (see
`ghor.spaces.sections`).

Turns are measured in radians, and the turn of a step is limited. On a sphere of radius r, where W is a
length, a flat vector holds W/r, and a gradient is that by radians, r B: a run is the same as on the unit
sphere. Positions and Euclidean entries come in a unit of the user's choice, so no constant here may stand for
a length of theirs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.linalg import vector_norm as norm

from ghor._torch.precision import COMPUTE_DTYPE
from ghor.retraction import Retraction
from ghor.spaces import Euclidean, PositionsOrientations, Space, SpecialEuclidean, Sphere
from ghor.spaces.grassmann import Subspaces
from ghor.spaces.matrix import MatrixSpace
from ghor.spaces.orthogonal import Orthogonal
from ghor.spaces.sections import KINDS, SECTION_KEYS, Implicit, Section, Transported, from_state

T = TypeVar("T")

# The entries of points and coordinates that have a unit of length ("ways"); all others are turns.
WAYS: dict[type[Space], Any] = {
    Euclidean: ...,
    SpecialEuclidean: (..., -1),
    PositionsOrientations: (..., 0, slice(None)),
}

SHORT = 64  # entries of vectors up to which frames are stored

# The length of a step when no curvature is known, as a part of a radian or of the size of the positions.
FIRST = 0.1
# A change of f by this many eps |f| can be told from rounding.
VISIBLE = 1000


class PointBatch:
    """Weights of one space, shape and dtype: points (M, *point), section, and their part of flat vectors.

    M = 1 is left out.
    """

    section: Section
    radius: Tensor | None = None  # of spheres where it is not one, as a factor of points
    lean: bool
    Y: Tensor
    G: Tensor  # the Euclidean gradient here, when it is known
    step: tuple[Tensor, Tensor, Any]  # D, M and P of the step by Cayley that led here, see `CayleyCurve`

    def __init__(self, space: Space, index: list[int], like: Tensor, begin: int) -> None:
        self.space, self.index, self.shape, self.out = space.one, index, like.shape, like.dtype
        # The space in which lengths of W are angles.
        self.angular: Any = space.one.unit if isinstance(space.one, Sphere) else space.one
        self.by_rows, self.laid = space.by_rows, space.by_rows(like).shape
        self.dtype = COMPUTE_DTYPE.get(like.dtype, like.dtype)
        split = space.split(like).shape
        # Only the layout and dtype of E are used. (torch.eye on the meta device imports 800 modules.)
        self.E = torch.empty(split[len(split) - space.dims :], dtype=like.dtype, device="meta")
        self.complex, self.curved = like.is_complex(), not isinstance(space, Euclidean)
        self.part = slice(begin, begin + len(index) * like.numel() * (2 if self.complex else 1))
        # A single point has no batch dimension: products of matrices cost less than those of batches.
        self.count = len(index) * like.numel() // max(1, self.E.numel())
        self.full_shape = self.E.shape if self.curved and self.count == 1 else (self.count, *self.E.shape)
        # ||W|| of a turn by one radian, and that of the longest step: all columns turned by four radians.
        self.reach = space.reach(self.shape) if self.curved else 0.0
        self.limit = min(4 * self.reach, space.max_velocity) if self.curved else math.inf
        # Whether frames are [Y, Q] in a group of matrices, with formulas; not so on spheres of radius r.
        self.matrices = isinstance(space, MatrixSpace) and getattr(space, "radius", 1.0) == 1
        # Vectors, and whether g^hor has no block A, so that all coordinates are free and have weight one.
        n = space.one.size(self.E.shape)[1] if isinstance(space, MatrixSpace) else 0
        self.vector = self.matrices and not self.complex and n == 1
        self.single = self.vector and self.count == 1
        self.free = not self.curved or self.vector or (self.matrices and isinstance(space, Subspaces))
        # Whether this is a single weight that is one matrix, as it is.
        self.straight = (
            self.matrices and self.full_shape == like.shape and self.dtype == like.dtype and space.plain
        )
        # Whether matrices are stored as their transposes.
        self.wide = self.matrices and n > 1 and space.one.matrix(self.E).stride(-1) != 1
        self.tall = self.matrices and not self.wide and space.dims == 2
        self.eye = torch.eye(n, dtype=self.dtype, device=like.device)
        self.root = None if self.free else _root(self.space, self.E, like, self.dtype)
        self.ways: Any = next((at for kind, at in WAYS.items() if isinstance(space, kind)), None)

    def way(self, X: Tensor) -> Tensor | None:
        """The entries of points or coordinates that have a unit of length: positions, Euclidean numbers."""
        return None if self.ways is None else X[self.ways]

    def stacked(self, grads: Sequence[Tensor | None]) -> Tensor:
        """The Euclidean gradients of these weights, (M, *point)."""
        if self.straight and (G := grads[self.index[0]]) is not None and G.layout is torch.strided:
            return G.detach().resolve_conj()
        own = []
        for i in self.index:
            G = self.Y.new_zeros(self.shape) if (G := grads[i]) is None else G.detach()
            G = G.to_dense() if G.is_sparse else G
            own.append((G if G.dtype == self.dtype else G.to(self.dtype)).resolve_conj())
        return self.points(torch.stack(own) if len(own) > 1 else own[0])

    def gradient(self, grads: Sequence[Tensor | None]) -> Tensor:
        """B of the Euclidean gradients, flat."""
        self.G = G = self.stacked(grads)
        if not self.curved:
            return self.flat(G)
        if not self.lean:
            B = torch.empty_like(G, memory_format=torch.contiguous_format)
            self.section.global_grad(self.Y, G, B)
            return self.flat(B) if self.radius is None else (B * self.radius).reshape(-1)
        # `MatrixSpace.global_grad` in fewer operations, with A scaled on the way.
        space, Lambda = cast(Orthogonal, self.space), cast(Transported, self.section).Lambda
        M = space.matrix(G)
        N, n = M.shape[-2:]
        if self.wide:
            B = M.mT @ Lambda.conj()
            H = B.mT
        else:
            B = H = (torch.mm if M.dim() == 2 else torch.bmm)(M.mH, Lambda).mH.contiguous()
            if self.complex:  # a single column is contiguous as it is, and would be conjugated in name only
                B = H = B.resolve_conj()
        A = H[..., :n, :] if N > n else H
        if self.free:
            A.zero_()
        else:
            torch.mul(space.skew(A), math.sqrt(0.5), out=A)
        return (torch.view_as_real(B) if self.complex else B).view(-1)

    def points(self, X: Tensor) -> Tensor:
        """(..., *shape) as points (M, *point)."""
        return self.by_rows(X).reshape(self.full_shape)

    def flat(self, X: Tensor) -> Tensor:
        """Coordinates (M, *point) as part of a flat vector."""
        X = X if self.root is None else X * self.root
        return (torch.view_as_real(X) if self.complex else X).reshape(-1)

    def scaled(self, u: Tensor) -> Tensor:
        """This batch's part of a flat vector, (M, *point), still scaled; a view if the dtype is the same."""
        part = self.own(u)
        part = torch.view_as_complex(part.view(-1, 2)) if self.complex else part
        return (part if part.dtype == self.dtype else part.to(self.dtype)).view(self.full_shape)

    def own(self, u: Tensor) -> Tensor:
        """This batch's part of a flat vector."""
        return u if u.numel() == self.part.stop - self.part.start else u[self.part]

    def parts(self, u: Tensor) -> Iterable[tuple[int, Tensor]]:
        """The index of each weight, and its part of a flat vector."""
        return zip(self.index, self.own(u).chunk(len(self.index)), strict=True)

    def each(self, X: Tensor) -> Sequence[Tensor]:
        """Split X, with one entry for each point, by weights: (points of a weight, ...)."""
        return (X if len(self.full_shape) > self.E.dim() else X.unsqueeze(0)).chunk(len(self.index))

    def take_back(self, vectors: Sequence[Tensor], scaled: Sequence[Tensor]) -> None:
        """Write `scaled` parts, changed since, back into the flat vectors if they are not views of them."""
        for v, X in zip(vectors, scaled, strict=False):
            if X.dtype.to_real() != v.dtype:
                v[self.part] = (torch.view_as_real(X) if self.complex else X).reshape(-1).to(v.dtype)

    def coordinates(self, u: Tensor) -> Tensor:
        """W (M, *point) of a flat vector."""
        W = self.scaled(u)
        return W if self.root is None else W / self.root

    def turns(self, W: Tensor) -> Tensor:
        """The `step_length` of coordinates at each point, on spheres the angle."""
        return self.angular.step_length(W if self.radius is None else W / self.radius)

    def expansion(self, G: Tensor, g: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """v -> Y'(0) v and <G, Y''(0) v> for Y(u) = Lambda R(u) E, the second in g^hor and flat.

        All retractions agree to second order. G are the Euclidean gradients, g is the gradient in g^hor. With
        Lambda^H G = [C; D] and W^2 E = [A^2 - B* B; B A] the second is
        [skew(C A^H + A^H C + B^H D); D A^H - (B*)^H (C + C*)]/2 on matrix spaces, which is -<Y, G> v on
        spheres. Elsewhere both are derivatives of the product Y'(u)^H G.
        """
        space, section, Y = self.space, self.section, self.Y
        if self.radius is not None:
            return self._expansion_on_spheres(G, self.radius)
        if not (self.matrices and isinstance(space, MatrixSpace)):
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

    def _expansion_on_spheres(self, G: Tensor, r: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """`expansion` on spheres of radius r: r Q v and -<Y, G> v."""
        section, Y, unit = self.section, self.Y, self.angular
        normal = (unit.matrix(Y) * unit.matrix(G)).sum((-2, -1), keepdim=True)
        if isinstance(section, Implicit):
            y, sign = Y / r, section.R.sign()
            P = unit.implicit_inverse(y, sign)

        def formula(v: Tensor) -> tuple[Tensor, Tensor]:
            V = unit.matrix(self.scaled(v))
            if isinstance(section, Implicit):
                Delta = unit.unmatrix(unit.implicit_apply(y, sign, P, V), Y.shape) * r
            else:
                Delta = unit.unmatrix(section.Lambda[..., :-1] @ V, Y.shape)
            return Delta, unit.unmatrix(V * -normal, Y.shape).reshape(-1)

        return formula


class Points:
    """Where all weights are, by batches. Steps leave the old points alone, so that they can be tried."""

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
            Y = batch.points(Y.contiguous())
            held: dict[str, Tensor] = {}
            for key in SECTION_KEYS:
                if states is not None and all(key in states[i] for i in index):
                    held[key] = torch.cat([states[i][key] for i in index]).to(batch.dtype)
                    held[key] = held[key].squeeze(0) if batch.full_shape == batch.E.shape else held[key]
                    self.age = int(states[index[0]]["moves"])
            if batch.out != batch.dtype:
                Y = held.pop("master") if "master" in held else batch.space.project(Y)
            # With "auto" a run goes on with the kind of frame that its state holds.
            held_kind = section == "auto" and "section" in held
            # Short vectors: a frame is smaller than the memory of a solver, and leaves that memory alone.
            short = (
                section == "auto" and "frame_anchor" not in held and batch.vector and batch.E.numel() <= SHORT
            )
            if isinstance(space, Euclidean) or held_kind or short:
                kind = "transported"
            else:
                kind = space.section_kind(section, batch.shape, batch.dtype)
            # In the other direction nothing turns: an implicit frame, once formed, is a transported one.
            turning = [batch.scaled(v) for v in vectors] if "section" in held and kind == "implicit" else []
            batch.section = from_state(KINDS[kind], batch.space, batch.E, held, Y, False, turning)
            batch.take_back(vectors, turning)
            batch.Y = batch.section.point(Y)
            if getattr(space, "radius", 1) != 1:
                # All coordinates that are not zero have weight one, so this is the whole scale.
                batch.radius = batch.space.each(batch.section.radius(), batch.Y)
                batch.root = 1 / batch.radius
            # Frames [Y, Q] that are stored have formulas with fewer operations.
            batch.lean = batch.matrices and isinstance(batch.space, Orthogonal) and kind == "transported"
            if batch.Y.data_ptr() == tensors[index[0]].data_ptr():
                batch.Y = batch.Y.clone()
        # The length of a step that turns everything by one radian.
        self.radian = math.hypot(*(math.sqrt(b.count) * b.reach for b in self.batches))
        # Whether vectors turn with the frames.
        self.turning = any(isinstance(b.section, Implicit) for b in self.batches)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of flat vectors."""
        return reduce(torch.promote_types, (b.dtype.to_real() for b in self.batches))

    def have_dtypes_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors still have the dtypes in which they came."""
        return all(tensors[i].dtype == b.out for b in self.batches for i in b.index)

    def states(self) -> list[dict[str, Tensor]]:
        """The tensors that a state keeps of the frames, for each weight."""
        out: list[dict[str, Tensor]] = [{} for _ in range(self.count)]
        for b in self.batches:
            held = b.section.tensors() if b.curved else {}
            if b.out != b.dtype and not (b.curved and b.section.holds_point):
                held = {**held, "master": b.Y}  # the weights hold it only rounded
            for key, X in held.items():
                for i, part in zip(b.index, b.each(X), strict=True):
                    out[i][key] = part
            for i in b.index if held else ():
                out[i]["moves"] = torch.tensor(self.age, device="cpu")
        return out

    def tensors(self) -> list[Tensor]:
        """The points, in the order and dtype in which they came."""
        b = self.batches[0]
        if self.count == 1 and b.Y.shape == b.laid and b.Y.dtype == b.out:
            return [b.by_rows(b.Y)]
        return self._each([b.Y for b in self.batches])

    def changed(self, tensors: Sequence[Tensor]) -> list[int]:
        """Which of these tensors are no longer the points, rounded to their dtype.

        Half precision weights that project to their points are unchanged, too.
        """
        out = []
        for b in self.batches:
            for i, Y in zip(b.index, b.each(b.Y), strict=True):
                X = b.by_rows(tensors[i].detach()).reshape(Y.shape)
                if not torch.equal(X, Y.to(b.out)) and (
                    b.out == b.dtype or not torch.equal(b.space.project(X.to(b.dtype)), Y)
                ):
                    out.append(i)
        return sorted(out)

    def _each(self, parts: Sequence[Tensor]) -> list[Tensor]:
        out: dict[int, Tensor] = {}
        for b, X in zip(self.batches, parts, strict=True):
            X = X if X.dtype == b.out else X.to(b.out)
            if len(b.index) == 1:
                out[b.index[0]] = b.by_rows(X.reshape(b.laid))
            else:
                X = b.by_rows(X.reshape(len(b.index), *b.laid))
                out |= zip(b.index, X.unbind(0), strict=True)
        return [out[i] for i in range(self.count)]

    def gradient(self, grads: Sequence[Tensor | None]) -> Tensor:
        """B of the Euclidean gradients, flat."""
        return _flat([b.gradient(grads) for b in self.batches])

    def widest(self) -> float:
        """The length of a step that turns everything by about one radian; infinite if there are positions."""
        return math.inf if any(b.ways is not None for b in self.batches) else self.radian

    def extent(self) -> float:
        """The size of the points: one radian for all turns, and the length of all positions."""
        ways = [way for b in self.batches if (way := b.way(b.Y)) is not None]
        return math.hypot(self.radian, *(float(norm(way.flatten())) for way in ways)) if ways else self.radian

    def sizes(self) -> list[float]:
        """The size of the positions of each batch; 1 where there are none, or all are zero."""
        ways = [b.way(b.Y) for b in self.batches]
        return [1.0 if way is None else float(norm(way)) or 1.0 for way in ways]

    def sized(self, u: Tensor) -> Tensor:
        """A flat vector, with the entries of positions multiplied by their size."""
        u = u.clone()
        for b, size in zip(self.batches, self.sizes(), strict=True):
            if (way := b.way(X := b.scaled(u))) is not None:
                way.mul_(size)
                b.take_back([u], [X])
        return u

    def first_step(self, g: Tensor, value: float) -> float:
        """t for a step -t g where no curvature is known: `FIRST` of the extent of every batch, or less.

        Positions have no natural length. Theirs is taken from their own entries, unless these are so close to
        0 that f could not show the change, with t at most |f|/|g|^2, at which the value would fall to zero
        along the tangent (Hager and Zhang, 2006). So -t g depends neither on the scale of f nor on the unit
        of length, unless both x and f are zero.
        """
        steps = []
        for b in self.batches:
            G = b.scaled(g)
            if b.curved:
                steps.append(
                    (
                        FIRST * b.reach * math.sqrt(b.count),
                        float(norm(b.angular.step_length(G))),
                    )
                )
            if (way := b.way(b.Y)) is not None:
                size, slope = FIRST * float(norm(way)), float(norm(b.way(G)))
                if size * slope >= VISIBLE * self.eps * abs(value):
                    steps.append((size, slope))
        length = float(norm(g))
        if self.widest() == math.inf:
            steps.append((abs(value) / length, length))
        return min((a / b for a, b in steps if a > 0 and b > 0 and a / b > 0), default=1 / length)

    def expansion(
        self, grads: Sequence[Tensor | None], g: Tensor
    ) -> Callable[[Tensor], tuple[list[Tensor], Tensor]]:
        """v -> how the points move along v, and the second derivative of <grads, points> in g^hor, flat."""
        parts = [b.expansion(b.stacked(grads), g) for b in self.batches]

        def both(v: Tensor) -> tuple[list[Tensor], Tensor]:
            moves, bends = zip(*(part(v) for part in parts), strict=True)
            return self._each(moves), _flat(bends)

        return both


def copied(one: T) -> T:
    """A shallow copy: copy.copy takes ten times as long."""
    new = object.__new__(type(one))
    new.__dict__.update(one.__dict__)
    return new


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _root(space: Space, E: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Square roots of the weights of the inner product, which make coordinates orthonormal."""
    ones = torch.ones(E.shape, dtype=dtype.to_real(), device=like.device)
    if isinstance(space, MatrixSpace):  # <A, A'>/2 + <B, B'>
        M = space.matrix(ones)
        M[..., : M.shape[-1], :] = math.sqrt(0.5)
        return ones
    with torch.enable_grad():
        V = torch.zeros_like(ones, requires_grad=True)
        (weights,) = torch.autograd.grad(space.ghor_inner(ones, V).sum(), V)
    return weights.sqrt()
