"""The closed form for n = 1 and real numbers: spheres (k = 1) and hyperbolic space (k = -1).

Vectors      Lambda as a function of y and r = +-1: what both have in common
Reflections  of spheres: the frame is a reflection
Boosts       of hyperbolic space: the frame is a boost, and there is no r
Carried      Lambda(y) diag(1, O) with a rotation O that turns the other way: coordinates stay
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ghor.linalg import LONG as WELL
from ghor.linalg import eager, equal_bits, extremes, eye, size
from ghor.spaces.frames import LONG, SLOW, UNREAD, Ends, Frame, Framed, Tensors, cut, rows
from ghor.spaces.lines import Line, Moved
from ghor.spaces.retraction import Move, Retraction, geodesic

TURN, SINGULAR = 0.25, 0.1  # 1 + r y_1 where the sign r changes in a step, and for points that others wrote
SHORT, MANY = 16, 1000  # vectors so short, and more of them, are kept coordinate by coordinate


def dot(a: Tensor, b: Tensor, dim: int = -1) -> Tensor:
    """Sums of products along coordinates, kept as a dimension of one; of two or three in long loops."""
    if dim == -1 or len(a) > 3:
        return (a * b).sum(dim, keepdim=True)
    (x, y), *rest = zip(a.split(1), b.split(1), strict=True)
    sums: Tensor = x * y
    for x, y in rest:
        sums.addcmul_(x, y)
    return sums


def copy_(X: Tensor, Y: Tensor) -> Tensor:
    """X <- Y, both (M, N) or (N, M); of short vectors coordinate by coordinate where one lies so."""
    dim = -2 if X.shape[0] < X.shape[1] else -1
    if eager(X) and X.stride(dim) != Y.stride(dim) and X.shape[dim] <= SHORT:
        torch._foreach_copy_(X.unbind(dim), Y.unbind(dim))
        return X
    return X.copy_(Y)


def kept(*numbers: Tensor) -> tuple[Tensor, ...]:
    """Numbers of points, computed once: a compiler would repeat them for each coordinate, but not a stack."""
    return torch.stack(numbers).unbind() if torch.compiler.is_compiling() else numbers


class Vectors(Framed):
    """The closed form for n = 1 and real numbers, with rho = 1 + r y_1, a number for each point:

        Q b = (-k r y_2.b, b - k y_2 (y_2.b)/rho)

    Operations run in long loops. Along rows (M, N), `dim` = -1, nothing looks at coordinates: elements (0, b)
    of g^hor and moments have a first one of 0, and y_1 is before y_2. Many short vectors lie coordinate by
    coordinate, (N, M), `dim` = -2, and the first one is left out.
    """

    geometry: Any  # a sphere or hyperbolic space
    k: ClassVar[int]
    reads: ClassVar[bool] = True

    def __init__(
        self, geometry: Any, y: Tensor, held: dict[str, Tensor], eps: float, short: int = SHORT
    ) -> None:
        super().__init__(geometry, y, held, eps)
        # equivalent(branch): each order of memory has the same numbers
        self.dim = -2 if y.shape[-2] <= short and len(y) > MANY else -1
        self.one = y.new_ones(())
        self.whole = self.plain(y).clone(memory_format=torch.contiguous_format)
        self.r = torch.ones_like(self.y1)
        self.rho = 1 + self.y1

    @property
    def y1(self) -> Tensor:
        return self.whole.narrow(self.dim, 0, 1)

    @property
    def y(self) -> Tensor:
        return self.lower(self.whole)

    def plain(self, x: Tensor) -> Tensor:
        """(M, N, 1) as (M, N) or (N, M), a view; and back by `points`."""
        return x[..., 0] if self.dim == -1 else x[..., 0].mT

    def lower(self, x: Tensor) -> Tensor:
        """The same without the first coordinate, where that costs nothing."""
        return x if self.dim == -1 else x[1:]

    def points(self, x: Tensor) -> Tensor:
        return (x if self.dim == -1 else x.mT).unsqueeze(-1)

    def parts(self) -> list[Tensor]:
        return [self.points(x) for x in (self.whole, self.r, self.rho)]

    def point(self) -> Tensor:
        return self.points(self.whole)

    def zeros(self) -> Tensor:
        return self.points(torch.zeros_like(self.whole, memory_format=torch.contiguous_format))

    def length(self, w: Tensor) -> Tensor:
        w = self.lower(self.plain(w))
        if self.dim == -2 or w.shape[-1] > WELL:  # torch's norms lose digits of longer ones in float32
            return self.points(dot(w, w, self.dim).sqrt())
        return self.points(torch.linalg.vector_norm(w, dim=-1, keepdim=True))

    def take(self, y: Tensor) -> None:
        y = self.plain(y)
        if self.dim == -2 or not (eager(y) and equal_bits(y, self.whole)):
            copy_(self.whole, y)
            self._measure_()

    def _measure_(self) -> None:
        """rho of points that have changed."""
        torch.addcmul(self.one, self.r, self.y1, out=self.rho)

    def write(self, targets: list[Tensor]) -> None:
        """One call: an interrupt leaves weights whole. Coordinate by coordinate where points lie so."""
        if self.dim == -1:
            super().write(targets)
            return
        if self.sources is None:
            self.sources = [x for X in rows(self.point(), len(targets)) for x in X.unbind(-2)]
            self.targets = [x for X in targets for x in X.unbind(-2)]
        torch._foreach_copy_(self.targets, self.sources)

    def pieces(self) -> list[tuple[Self, Any]]:
        return cut(self, ("whole", "r", "rho"), -3 - self.dim, 8)

    def pull(self, g: Tensor, out: Tensor) -> None:
        """(0, g_2 - k y_2 (r g_1 + y_2.g_2/rho)), where the bracket is (y.g + r g_1)/rho."""
        G, B = self.plain(g), self.plain(out)
        G = G if self.dim == -1 else copy_(B, G)
        for part, i in self.pieces():
            first, lower = G[i].narrow(self.dim, 0, 1), self.lower(G[i])
            along = dot(part.whole, G[i], self.dim).addcmul_(part.r, first).div_(part.rho)
            torch.addcmul(lower, part.y, along, value=-self.k, out=self.lower(B[i]))
        out[..., 0, :] = 0

    def step(
        self, w: Tensor, length: Tensor, R: Retraction, odd: Tensors, even: Tensors, ends: Ends = UNREAD
    ) -> None:
        state = [self.plain(length), *(self.lower(self.plain(x)) for x in (w, *odd, *even))]
        for part, i in self.pieces():
            l, W, *rest = (x[i] for x in state)
            part._step(l, W, R, rest[: len(odd)], rest[len(odd) :], ends)
        if self.dim == -1:
            for x in (*odd, *even):
                x[..., 0, :] = 0

    def _step(self, l: Tensor, W: Tensor, R: Retraction, ms: Tensors, vs: Tensors, ends: Ends) -> None:
        raise NotImplementedError

    def push(self, w: Tensor) -> Tensor:
        """(-k r y_2.b, b - k y_2 (y_2.b)/rho)."""
        W = self.plain(w)
        along = dot(self.whole, W, self.dim)
        out = torch.addcmul(W, self.whole, along / self.rho, value=-self.k)
        out.narrow(self.dim, 0, 1).copy_(self.r * along * -self.k)
        return self.points(out)

    def bend(self, g: Tensor, B: Tensor) -> Callable[[Tensor], Tensor]:
        """Y''(0)[v, v] = -k y |v|^2: v -> -k <y, g> v."""
        normal = (self.point() * g).sum(-2, keepdim=True) * -self.k
        return lambda v: v * normal

    def reached(self, y: Tensor, low: Tensor, t: float, move: Move, whole: bool) -> Self:
        new = copy.copy(self)
        new.whole = self.plain(y).clone(memory_format=torch.contiguous_format)
        new.rho = 1 + new.r * new.y1
        return new


class Reflections(Vectors):
    """Of spheres. With u = y + r e_1, of length^2 2 rho, the frame is a reflection, but for a sign:

        Q^H G = G - u (u.G)/rho
        y+    = y (1 - g) + f b - v r e_1         f = 1/(1 + |b|^2/4),  v = f y.b/rho,  g = v + f |b|^2/2
        T m   = m - a y - c y+                    a = b.m/2 + y.m/rho,  c = (b.m - rho a)/rho+

    where first coordinates of b, m and T m are 0. That is Cayley's step; a geodesic is one of another length.
    (Momentum along a step has d digits less where that ends 10^-d from a half turn.) Squares are not spread:
    the frame turns slowly.
    """

    k: ClassVar[int] = 1

    def __init__(self, geometry: Any, y: Tensor, held: dict[str, Tensor], eps: float) -> None:
        super().__init__(geometry, y, held, eps)
        self.r = torch.where(self.y1 < 0, -1.0, 1.0).to(y)
        if "frame_anchor" in held:
            self.r.copy_(self.plain(held["frame_anchor"]))
        self._measure_()

    def tensors(self) -> dict[str, Tensor]:
        return {"frame_anchor": self.points(self.r)}

    def off(self) -> Tensor:
        return (self.points(self.r)[:, 0, 0].abs() - 1).abs()

    def _measure_(self) -> None:
        """A sign r stays while rho is not singular, as it is where a step has ended."""
        super()._measure_()
        if self.rho.numel() and not extremes(self.rho)[0] >= SINGULAR:
            self._turn_(self.rho < SINGULAR)

    def _turn_(self, where: Tensor) -> None:
        """r <- -r."""
        self.r.copy_(torch.where(where, -self.r, self.r))
        self.rho.copy_(torch.where(where, 2 - self.rho, self.rho))

    def step(
        self, w: Tensor, length: Tensor, R: Retraction, odd: Tensors, even: Tensors, ends: Ends = UNREAD
    ) -> None:
        stretch = R.stretch(length)
        if stretch is not None:
            length = length * stretch.abs()
            w.mul_(stretch)
        super().step(w, length, R, odd, (), ends)

    def _step(self, l: Tensor, W: Tensor, R: Retraction, ms: Tensors, vs: Tensors, ends: Ends) -> None:
        y, r, rho, dim = self.y, self.r, self.rho, self.dim
        yb, products = dot(y, W, dim), [(dot(y, m, dim), dot(W, m, dim)) for m in ms]
        bb = l * l
        f = torch.add(1, bb, alpha=0.25).reciprocal_()
        v = (yb * f).div_(rho)
        f, v, g = kept(f, v, torch.addcmul(v, bb, f, value=0.5))
        turns = []
        for m, (ym, bm) in zip(ms, products, strict=True):
            ym = ym if ends.moving else ym * (l > 0)  # where nothing moves no bit changes
            a = torch.addcdiv(bm, ym, rho, value=2)  # 2 a
            a, c = kept(a, torch.addcmul(bm, rho, a, value=-0.5))
            m.addcmul_(y, a, value=-0.5)
            turns.append((m, bm, c))
        self.whole.addcmul_(self.whole, g, value=-1)
        y.addcmul_(W, f)
        self.y1.addcmul_(r, v, value=-1)
        Vectors._measure_(self)
        if rho.numel() and not extremes(rho)[0] >= TURN:
            flip = (rho < TURN) & (l > 0)
            turns = [(m, bm, torch.where(flip, bm - c, c)) for m, bm, c in turns]
            self._turn_(flip)
        for m, _, c in turns:
            m.addcmul_(y, c / rho, value=-1)
        if not ends.short:  # such steps multiply what a point is off by several times
            self._unit_(l > LONG)

    def _unit_(self, where: Tensor) -> None:
        """Make points near the sphere unit vectors."""
        square = dot(self.whole, self.whole, self.dim)
        self.whole.mul_(torch.where(where, 1.5 - square / 2, 1))
        Vectors._measure_(self)

    def repair(self, whole: bool, moved: Tensor) -> None:
        self._unit_(self.plain(moved))

    def renewed(self) -> Self | None:
        worn = self.rho < TURN
        if not bool(worn.any()):
            return None
        new = copy.copy(self)
        new.r, new.rho = self.r.clone(), self.rho.clone()
        new._turn_(worn)
        return new


class Turn(NamedTuple):
    """A step b of hyperbolic space, see `Boosts`; b and its length are shortened already."""

    f: Tensor
    g: Tensor
    p: Tensor
    q: Tensor
    length: Tensor


def ahead(y1: Tensor, yb: Tensor, bb: Tensor, R: Retraction) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(f, h, e, g) of a step in hyperbolic space, see `Boosts`."""
    f, h = R.arc(bb)
    e = h * bb
    return f, h, e, torch.addcdiv(e, f * yb, 1 + y1)


class Boosts(Vectors):
    """Of hyperbolic space. A step b leads to y+, and the frame there is the transported one but for T.

    T is a rotation in the plane of y_2 and b. With (f, h) = R.arc(|b|^2) every number is a quotient in which
    nothing cancels, however far out:

        y_2+ = y_2 (1 + g) + f b,               e = h |b|^2,   g = e + f y_2.b/rho
        rho+ = rho + f y_2.b + e y_1
        T m  = m + y_2 (p.m) - b (q.m)          (s, t) = (f, h)/rho+
        p = (s + 2 t y_2.b/rho) b - e/(rho rho+) y_2,   q = s y_2 + t (rho - 2) b
    """

    k: ClassVar[int] = -1

    def __init__(
        self, geometry: Any, y: Tensor, held: dict[str, Tensor], eps: float, short: int = SHORT
    ) -> None:
        super().__init__(geometry, y, {}, eps, short)
        self.held = torch.zeros_like(y[:, 0, 0], dtype=torch.bool)

    def ends(self, least: float, most: float) -> Ends:
        safe = self.eps * extremes(self.y1)[1] * math.exp(4 / 3 * most) <= 0.25
        return super().ends(least, most)._replace(safe=safe)

    def turn(self, l: Tensor, W: Tensor, R: Retraction, ends: Ends) -> Turn:
        """The step W, which is shortened where its point would lose all digits."""
        y, y1, rho = self.y, self.y1, self.rho
        yb = dot(y, W, self.dim)
        if not ends.safe:
            share = self.geometry.shortening(y1, yb, l, self.eps)
            assert self.held is not None
            self.held.logical_or_(share.squeeze(self.dim) < 1)
            W.mul_(share)
            yb, l = yb * share, l * share
        bb = l * l
        f, h, e, g = ahead(y1, yb, bb, R)
        new = torch.addcmul(rho, f, yb).addcmul_(e, y1)
        s, t = f / new, h / new
        both = torch.addcdiv(s, t * yb, rho, value=2)
        f, g, s, t, both, across = kept(f, g, s, t * (y1 - 1), both, (e / new).div_(rho))
        p, q = (both * W).addcmul_(y, across, value=-1), (s * y).addcmul_(W, t)
        return Turn(f, g, p, q, l)

    def _step(self, l: Tensor, W: Tensor, R: Retraction, ms: Tensors, vs: Tensors, ends: Ends) -> None:
        y, dim = self.y, self.dim
        T = self.turn(l, W, R, ends)
        pairs = [(m, v) for m in ms for v in vs] if not ends.slow else []
        most = [ratio(m, v).amax(dim, keepdim=True) for m, v in pairs]
        for m in ms:
            pm, qm = kept(dot(T.p, m, dim), dot(T.q, m, dim))
            m.addcmul_(y, pm).addcmul_(W, qm, value=-1)
        for v in vs:
            self._spread_(v, W, T)
        for (m, v), largest in zip(pairs, most, strict=True):
            keep_large_(v, m, largest, T.length, dim)
        self.go_(T, W, ends)

    def _spread_(self, v: Tensor, b: Tensor, T: Turn) -> None:
        """v_i <- sum_j T_ij^2 v_j, the mean squares of uncorrelated coordinates; T = I + y p^T - b q^T."""
        y, dim, (vp, vq) = self.y, self.dim, (v * T.p, v * T.q)
        pp, pq, qq = kept(dot(vp, T.p, dim), dot(vp, T.q, dim), dot(vq, T.q, dim))
        v.addcmul_(y, vp.addcmul_(y, pp, value=0.5).addcmul_(b, pq, value=-0.5), value=2)
        v.addcmul_(b, vq.addcmul_(y, pq, value=0.5).addcmul_(b, qq, value=-0.5), value=-2)
        v.clamp_min_(0)

    def go_(self, T: Turn, W: Tensor, ends: Ends) -> None:
        """To the point where the step ends."""
        self.y.addcmul_(self.y, T.g).addcmul_(W, T.f)
        new = self._height()
        self.y1.copy_(new if ends.moving else torch.where(T.length > 0, new, self.y1))
        self._measure_()

    def _height(self) -> Tensor:
        """y_1 of y_2."""
        y2 = self.whole.narrow(self.dim, 1, self.whole.shape[self.dim] - 1)
        return (1 + dot(y2, y2, self.dim)).sqrt_()

    def repair(self, whole: bool, moved: Tensor) -> None:
        self.y1.copy_(torch.where(self.plain(moved), self._height(), self.y1))
        self._measure_()

    def along(self, w: Tensor, R: Retraction) -> Line:
        """Far out whole vectors cancel: a line goes by steps."""
        return Moved(self, w)

    def translated(self, w: Tensor, old: Frame) -> Tensor:
        return old.boost(w) if isinstance(old, Carried) else super().translated(w, old)


def ratio(m: Tensor, v: Tensor) -> Tensor:
    """m^2/v, and 0 where both are 0."""
    return m.square() / v.clamp_min(torch.finfo(v.dtype).tiny)


def keep_large_(v: Tensor, m: Tensor, most: Tensor, length: Tensor, dim: int) -> None:
    """Make squares v so large beside the turned m that no m^2/v exceeds the largest one before the step.

    In long steps all become the largest. Spreading is right on average, but momentum is a single vector: far
    out gradients grow with the point, and momentum that turned across them would be divided by squares from
    nearer in.
    """
    large = torch.maximum(v, ratio(m, most))
    large = torch.where(length > LONG, large.amax(dim, keepdim=True), large)
    v.copy_(torch.where(length > SLOW, large, v))


class Carried(Frame):
    """A stored frame, Lambda(y) diag(1, O) over a closed form: O turns as moments would; coordinates stay."""

    geometry: Any

    def __init__(self, geometry: Any, y: Tensor, held: dict[str, Tensor], eps: float) -> None:
        super().__init__(geometry, y, held, eps)
        S = held["section"] if held else eye(y.mT).expand(len(y), -1, -1)
        self.S = S.clone(memory_format=torch.contiguous_format)  # by rows: the point, and o_j as (0, o_j)
        if not held:
            self.S[..., :1, :] = y.mT
        self.O = self.S[..., 1:, :]
        self.form = Boosts(geometry, self.S[..., :1, :].mT, {}, eps, short=0)
        self.form.whole = self.S[..., 0, :]
        self.held = self.form.held

    def tensors(self) -> dict[str, Tensor]:
        return {"section": self.S}

    def parts(self) -> list[Tensor]:
        return [*self.form.parts(), self.S]

    def point(self) -> Tensor:
        return self.form.point()

    def zeros(self) -> Tensor:
        return self.form.zeros()

    def pull(self, g: Tensor, out: Tensor) -> None:
        self.form.pull(g, out)
        out[..., 1:, :] = self.O @ out

    def ends(self, least: float, most: float) -> Ends:
        return self.form.ends(least, most)

    def boost(self, w: Tensor) -> Tensor:
        """Coordinates in the closed form."""
        return self.O.mT @ w[..., 1:, :]

    def step(
        self, w: Tensor, length: Tensor, R: Retraction, odd: Tensors, even: Tensors, ends: Ends = UNREAD
    ) -> None:
        f, O, W = self.form, self.O, self.boost(w)[..., 0]
        if not len(W):
            return
        T = f.turn(length[..., 0], W, R, ends)
        y, b, p, q = (x.unsqueeze(-2) for x in (f.whole, W, T.p, T.q))
        pO, qO = dot(p, O), dot(q, O)
        O.addcmul_(y, pO).addcmul_(b, qO, value=-1)
        O[..., 0] = 0
        f.go_(T, W, ends)

    def push(self, w: Tensor) -> Tensor:
        return self.form.push(self.boost(w))

    def bend(self, g: Tensor, B: Tensor) -> Callable[[Tensor], Tensor]:
        return self.form.bend(g, B)

    def translated(self, w: Tensor, old: Frame) -> Tensor:
        out = torch.zeros_like(w)
        out[..., 1:, :] = self.O @ (old.boost(w) if isinstance(old, Carried) else w)
        return out

    def off(self) -> Tensor:
        X = self.O[..., 1:]
        return size(X.mT @ X - eye(X))[..., 0, 0] / math.sqrt(X.shape[-1])

    def put(self, mask: Tensor, y: Tensor) -> None:
        """O goes along the geodesic to y, so moments go on to mean what they did."""
        part = type(self)(self.geometry, y, {"section": self.S[mask]}, self.eps)
        w = torch.zeros_like(y)
        w[..., 1:, :] = part.O[..., 1:] @ self.geometry.seen(part.point(), y)
        part.step(w, size(w), geodesic, (), ())
        lost = ~(part.off() <= part.eps**0.5)[:, None, None]
        rotation = torch.where(lost, eye(y.mT)[1:], part.O)
        new = type(self)(self.geometry, y, {"section": torch.cat([y.mT, rotation], -2)}, self.eps)
        for mine, its in zip(self.parts(), new.parts(), strict=True):
            mine[mask] = its

    def repair(self, whole: bool, moved: Tensor) -> None:
        self.form.repair(whole, moved)
        if whole:
            X = self.O[..., 1:]
            X.add_(X @ (eye(X) - X.mT @ X) * moved, alpha=0.5)
