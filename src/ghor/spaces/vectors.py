"""The closed form for n = 1 and real numbers: spheres (k = 1) and hyperbolic space (k = -1), as one.

Turn      a step from y: the new point and the rotation of the frame, a few numbers a point
Vectors   Lambda as a function of y and a sign r: what is odd in the gradient turns with it
Carried   Lambda(y) diag(1, O) with a rotation O that turns the other way: coordinates stay
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ghor.linalg import extremes, eye, size
from ghor.spaces.frames import Frame, Framed, Tensors, rows
from ghor.spaces.lines import Line, Moved
from ghor.spaces.retraction import Move, Retraction, geodesic

TURN, SINGULAR = 0.25, 0.1  # 1 + r y_1 where the sign r changes in a step, and for points that others wrote
SHORT, MANY = 16, 1000  # vectors so short, and more of them, are kept coordinate by coordinate
WELL = 4096  # the most entries of which torch's norms in float32 have their digits; its sums have them always
CACHED = 1 << 17  # numbers of a piece that stays in the cache
SLOW, LONG = 0.05, 0.5  # steps so long keep squares large beside momentum, and make them equal


def dot(a: Tensor, b: Tensor, dim: int = -1) -> Tensor:
    """Sums of products along coordinates, kept as a dimension of one; of two or three in long loops."""
    if dim == -1 or len(a) > 3 or torch.compiler.is_compiling():
        return (a * b).sum(dim, keepdim=True)
    (x, y), *rest = zip(a.split(1), b.split(1), strict=True)
    sums: Tensor = x * y
    for x, y in rest:
        sums.addcmul_(x, y)
    return sums


def copy_(X: Tensor, Y: Tensor) -> Tensor:
    """X <- Y, both (M, N) or (N, M); of short vectors coordinate by coordinate where one lies so."""
    dim = -2 if X.shape[0] < X.shape[1] else -1
    if X.stride(dim) != Y.stride(dim) and X.shape[dim] <= SHORT and not torch.compiler.is_compiling():
        torch._foreach_copy_(X.unbind(dim), Y.unbind(dim))
        return X
    return X.copy_(Y)


def kept(*numbers: Tensor) -> tuple[Tensor, ...]:
    """Numbers of points, computed once: a compiler would repeat them for each coordinate, but not a stack."""
    return torch.stack(numbers).unbind() if torch.compiler.is_compiling() else numbers


def in_plane(
    gamma: Tensor, s: Tensor, yb: Tensor, bb: Tensor, yy: Tensor, square: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """t of T = I + y (t_0 y + t_1 b)^T + b (t_2 y + t_3 b)^T, see `Turn`; `square` is gamma^2 + |S|^2."""
    f = 2 * s / square
    return -f * s * bb, f * (s * yb - gamma), f * (s * yb + gamma), -f * s * yy


class Turn:
    """A step b from y in the closed form for n = 1: k = 1 for spheres, -1 for hyperbolic space.

    Takes r y_1, y_2.b and b.b, one number a point. The frame at y+ is the transported one up to the rotation
    T in the plane of y_2 and b: with c and s the half angle of the step, gamma = k rho c - s y_2.b and the
    bivector S = s (b y_2^T - y_2 b^T),

        T = I + 2 (gamma S + S^2)/(gamma^2 + |S|^2),      gamma^2 + |S|^2 = rho rho+,      rho = 1 + r y_1

    Multiplied out, with f = 2 c s and h = 2 s^2 (R.arc), every number is a quotient in which nothing cancels:

        y_2+ = y_2 (1 - k g) + f b,    g = h b.b + f y_2.b/rho
        rho+ = rho - k d,              d = rho g - h b.b
        T m  = m + k b (p y_2.m + q (rho - 2) b.m) - k y_2 ((p - 2 k q y_2.b/rho) b.m + k q b.b y_2.m/rho)

    with (p, q) = (f, h)/rho+.
    """

    def __init__(self, k: int, ry: Tensor, yb: Tensor, bb: Tensor, R: Retraction) -> None:
        self.k, self.ry, self.rho, self.yb = k, ry, 1 + ry, yb
        (self.f, self.h), rho = R.arc(k, bb), self.rho
        hbb, fyb = self.h * bb, self.f * yb
        d = torch.addcmul(fyb, hbb, ry)
        self.new, g = torch.sub(rho, d, alpha=k), torch.addcdiv(hbb, fyb, rho)
        p, q = self.f / self.new, self.h / self.new
        T = q * bb / rho, torch.addcdiv(p, q * yb, rho, value=-2 * k), p, torch.addcmul(q * -2, q, rho)
        self.d, self.g, self.f, *self.T = kept(d, g, self.f, *T)
        self.flip: Tensor | None = None  # where the sign r changes
        if k == 1 and bb.numel() and not extremes(self.new)[0] >= TURN:
            self.flip = (self.new < TURN) & (bb > 0)

    def along(self, ym: Tensor, bm: Tensor) -> tuple[Tensor, Tensor]:
        """T m = m - k y x + k b z: x and z from y.m and b.m."""
        t = self.T
        x, z = torch.addcmul(t[1] * bm, t[0], ym, value=self.k), torch.addcmul(t[2] * ym, t[3], bm)
        if self.flip is not None:  # the frames of r and -r are mirror images in y_2+
            h = torch.addcmul(ym, self.f * self.ry - self.h * self.yb, bm)
            h = torch.where(self.flip, 2 * h / (self.new * (2 - self.new)), 0)
            x, z = torch.addcmul(x, h, 1 - self.g), torch.addcmul(z, h, self.f, value=-1)
        x, z = kept(x, z)
        return x, z

    def each(self, ym: Tensor, bm: Tensor) -> tuple[Tensor, Tensor]:
        """-k x and k z for several vectors a point, (M, K, 1)."""
        t, k = [x.unsqueeze(-2) for x in self.T], self.k
        return torch.addcmul(-k * t[1] * bm, t[0], ym, value=-1), k * torch.addcmul(t[2] * ym, t[3], bm)

    def spread_(self, squares: Tensors, y: Tensor, b: Tensor, dim: int) -> None:
        """v_i <- sum_j T_ij^2 v_j, the mean squares of uncorrelated coordinates; T = I + y p^T + b q^T."""
        products, k, (t0, t1, t2, t3) = (y * y, y * b, b * b), self.k, self.T  # p = -t0 y - k t1 b, ...
        (between,) = kept(t2 - t1)

        def both(a: Tensor, X: Tensor, b: Tensor, Z: Tensor, k: int) -> Tensor:
            return torch.addcmul(a * X, b, Z, value=k)

        for v in squares:
            parts = [v * X for X in products]
            yy, yb, bb = (X.sum(dim, keepdim=True) for X in parts)
            py, pb = both(t0, yy, t1, yb, k), both(t0, yb, t1, bb, k)  # -sum_i v_i p_i y_i
            qy, qb = both(t2, yy, t3, yb, 1), both(t2, yb, t3, bb, 1)
            sums = kept(both(t0, py, t1, pb, k), both(t2, py, t3, pb, 1), both(t2, qy, t3, qb, 1))
            for X, s, f in zip(products, sums, (1, -2 * k, 1), strict=True):
                v.addcmul_(X, s, value=f)
            for part, d, f in zip(parts, (t0, between, t3), (-2, 2 * k, 2 * k), strict=True):
                v.addcmul_(part, d, value=f)
            v.clamp_min_(0)


class Vectors(Framed):
    """The closed form for n = 1 and real numbers: y_2, and y_1 and r = +-1 beside it, one a point.

    Operations run in long loops. Along rows (M, N), `dim` = -1, nothing looks at coordinates: y_2, elements
    (0, b) of g^hor and moments have a first one of 0. Many short vectors lie coordinate by coordinate,
    (N, M), `dim` = -2, and are (N - 1, M) without the first.
    """

    geometry: Any  # a sphere or hyperbolic space, in whose formulas k is the only difference
    reads: ClassVar[bool] = True

    def __init__(
        self, geometry: Any, y: Tensor, held: dict[str, Tensor], eps: float, short: int = SHORT
    ) -> None:
        super().__init__(geometry, y, held, eps)
        self.k, self.dim = geometry.k, -2 if y.shape[-2] <= short and len(y) > MANY else -1
        self.held = None if self.k == 1 else torch.zeros_like(y[:, 0, 0], dtype=torch.bool)
        self._stand(y)
        self.r = torch.where(self.y1 < 0, -1.0, 1.0).to(y) if self.k == 1 else torch.ones_like(self.y1)
        if "frame_anchor" in held:
            self.r.copy_(self.plain(held["frame_anchor"]))
            self._turn_singular_()

    def _stand(self, y: Tensor) -> None:
        """Above y, in memory of its own."""
        self.whole = self.plain(y).clone(memory_format=torch.contiguous_format)
        self.first = self.whole.narrow(self.dim, 0, 1)
        self.y, self.y1 = self.lower(self.points(self.whole)), self.first
        if self.dim == -1:
            self.y1 = self.first.clone()
            self.first.zero_()

    def plain(self, x: Tensor) -> Tensor:
        """(M, N, 1) as (M, N) or (N, M), a view; and back by `points`."""
        return x[..., 0] if self.dim == -1 else x[..., 0].mT

    def lower(self, x: Tensor) -> Tensor:
        """The same without the first coordinate, where that costs nothing."""
        return x[..., 0] if self.dim == -1 else x[..., 1:, 0].mT

    def points(self, x: Tensor) -> Tensor:
        return (x if self.dim == -1 else x.mT).unsqueeze(-1)

    def tensors(self) -> dict[str, Tensor]:
        return {"frame_anchor": self.points(self.r)} if self.k == 1 else {}

    def parts(self) -> list[Tensor]:
        return [self.points(x) for x in (self.whole, self.y1, self.r)]

    def point(self) -> Tensor:
        y = self.points(self.whole.clone())
        y[..., :1, :] = self.points(self.y1)
        return y

    def zeros(self) -> Tensor:
        return self.points(torch.zeros_like(self.whole))

    def length(self, w: Tensor) -> Tensor:
        w = self.lower(w)
        if self.dim == -2 or w.shape[-1] > WELL:
            return self.points(dot(w, w, self.dim).sqrt())
        return self.points(torch.linalg.vector_norm(w, dim=-1, keepdim=True))

    def take(self, y: Tensor) -> None:
        copy_(self.points(self.whole)[..., 0], y[..., 0])
        if self.dim == -1:
            self.y1.copy_(self.first)
            self.first.zero_()
        if self.k == 1:
            self._turn_singular_()

    def _turn_singular_(self) -> None:
        """A sign r stays while r + y_1 is not singular, as it is where a step has ended."""
        ry = self.r * self.y1
        if ry.numel() and not extremes(ry)[0] >= SINGULAR - 1:
            self.r.copy_(torch.where(ry < SINGULAR - 1, -self.r, self.r))

    def write(self, targets: list[Tensor]) -> None:
        """One call, so that an interrupt leaves weights whole; of parts that do not overlap, in any order."""
        if self.sources is None:
            count, rest = len(targets), self.whole.shape[self.dim] - 1 if self.dim == -1 else 1

            def cut(X: Tensor, first: Tensor) -> list[Tensor]:
                return [first, *torch.split(X[..., 1:, :], rest, -2)]

            parts = zip(*(rows(self.points(x), count) for x in (self.whole, self.y1)), strict=True)
            self.sources = [part for Y, y1 in parts for part in cut(Y, y1)]
            self.targets = [part for X in targets for part in cut(X, X[..., :1, :])]
        torch._foreach_copy_(self.targets, self.sources)

    def pieces(self) -> list[tuple[slice, ...]]:
        """Points so few that operation after operation finds them in the cache; compiled code has one loop.

        None at all of no points, as in an empty shard.
        """
        M, whole = self.y.shape[-3 - self.dim], self.y.numel() < 8 * CACHED or torch.compiler.is_compiling()
        size = max(M, 1) if whole else CACHED * M // self.y.numel() + 1
        return [(slice(None),) * (-1 - self.dim) + (slice(i, i + size),) for i in range(0, M, size)]

    def pull(self, g: Tensor, out: Tensor) -> None:
        """(0, g_2 - k y_2 (r g_1 + y_2.g_2/rho))."""
        first, G, B = self.plain(g[..., :1, :]), self.lower(g), self.lower(out)
        G = G if self.dim == -1 else copy_(B, G)
        for i in self.pieces():
            y, r = self.y[i], self.r[i]
            along = dot(y, G[i], self.dim).div_(1 + self.signed(r, self.y1[i])).addcmul_(r, first[i])
            torch.addcmul(G[i], y, along, value=-self.k, out=B[i])
        out[..., 0, :] = 0

    def step(self, w: Tensor, length: Tensor, R: Retraction, odd: Tensors, even: Tensors) -> None:
        k, dim, even = self.k, self.dim, even if self.k == -1 else ()  # the frame of a sphere turns slowly
        state = [self.y, self.y1, self.r, self.plain(length), *(self.lower(x) for x in (w, *odd, *even))]
        for i in self.pieces():
            y, y1, r, l, W, *rest = (x[i] for x in state)
            least, longest = extremes(l)  # NaN where they are not read
            T, ms, vs = self.turn(y, y1, r, W, l, longest, R, i), rest[: len(odd)], rest[len(odd) :]
            pairs = [(m, v) for m in ms for v in vs] if not longest <= SLOW else []
            most = [ratio(m, v).amax(dim, keepdim=True) for m, v in pairs]
            for m in ms:
                x, z = T.along(dot(y, m, dim), dot(W, m, dim))
                m.addcmul_(y, x, value=-k).addcmul_(W, z, value=k)
            if vs:
                T.spread_(vs, y, W, dim)
            for (m, v), largest in zip(pairs, most, strict=True):
                keep_large_(v, m, largest, l, dim)
            y.addcmul_(y, T.g, value=-k).addcmul_(W, T.f)
            if k == 1:
                y1.addcmul_(r, T.d, value=-1)
                if T.flip is not None:
                    r.copy_(torch.where(T.flip, -r, r))
                if not longest <= LONG:  # such steps multiply what a point is off by several times
                    scale = torch.where(l > LONG, self.to_unit(y, y1), 1)
                    y.mul_(scale)
                    y1.mul_(scale)
            else:
                new = (1 + dot(y, y, dim)).sqrt_()
                y1.copy_(new if least > 0 else torch.where(l > 0, new, y1))

    def signed(self, r: Tensor, y1: Tensor) -> Tensor:
        """r y_1."""
        return r * y1 if self.k == 1 else y1

    def turn(
        self,
        y: Tensor,
        y1: Tensor,
        r: Tensor,
        W: Tensor,
        length: Tensor,
        longest: float,
        R: Retraction,
        i: tuple[slice, ...],
    ) -> Turn:
        """The step W of the points i, which is shortened where its point would lose all digits."""
        yb = dot(y, W, self.dim)
        if self.held is not None and not self.eps * extremes(y1)[1] * math.exp(4 / 3 * longest) <= 0.25:
            share = self.geometry.shortening(y1, yb, length, self.eps)
            self.held[i[-1 if self.dim == -2 else 0]].logical_or_(share.squeeze(self.dim) < 1)
            W.mul_(share)
            yb, length = yb * share, length * share
        return Turn(self.k, self.signed(r, y1), yb, length * length, R)

    def push(self, w: Tensor) -> Tensor:
        """(-k r y_2.b, b - k y_2 (y_2.b)/rho)."""
        b = self.lower(w)
        along = dot(self.y, b, self.dim)
        lower = torch.addcmul(b, self.y, along / (1 + self.r * self.y1), value=-self.k)
        first = -self.k * self.r * along
        if self.dim == -2:
            return self.points(torch.cat([first, lower], -2))
        lower[..., :1] = first
        return self.points(lower)

    def along(self, w: Tensor, R: Retraction) -> Line:
        """Far out in hyperbolic space whole vectors cancel: there a line goes by steps."""
        return super().along(w, R) if self.k == 1 else Moved(self, w)

    def bend(self, g: Tensor, B: Tensor) -> Callable[[Tensor], Tensor]:
        return bend(self.k, self.point(), g)

    def reached(self, y: Tensor, low: Tensor, t: float, move: Move, whole: bool) -> Self:
        new = copy.copy(self)
        new._stand(y)
        return new

    def renewed(self) -> Self | None:
        worn = self.r * self.y1 < TURN - 1
        if self.k == -1 or not bool(worn.any()):
            return None
        new = copy.copy(self)
        new.r = torch.where(worn, -self.r, self.r)
        return new

    def translated(self, w: Tensor, old: Frame) -> Tensor:
        return old.boost(w) if isinstance(old, Carried) else super().translated(w, old)

    def off(self) -> Tensor:
        return (self.points(self.r)[:, 0, 0].abs() - 1).abs()

    def repair(self, whole: bool, moved: Tensor) -> None:
        moved = self.plain(moved)
        if self.k == -1:
            self.y1.copy_(torch.where(moved, (1 + dot(self.y, self.y, self.dim)).sqrt(), self.y1))
            return
        scale = torch.where(moved, self.to_unit(self.y, self.y1), 1)
        self.y.mul_(scale)
        self.y1.mul_(scale)

    def to_unit(self, y: Tensor, y1: Tensor) -> Tensor:
        """The factor that makes points near the sphere unit vectors."""
        return 1.5 - (dot(y, y, self.dim) + y1 * y1) / 2


def bend(k: int, y: Tensor, g: Tensor) -> Callable[[Tensor], Tensor]:
    """`Frame.bend` of vectors, where Y''(0)[v, v] = -k y |v|^2: v -> -k <y, g> v."""
    normal = (y * g).sum(-2, keepdim=True) * -k
    return lambda v: v * normal


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
        self.O = self.S[..., 1:, :]
        self.form = Vectors(geometry, self.S[..., :1, :].mT if held else y, {}, eps, short=0)
        self.held = self.form.held
        self._show()

    def _show(self) -> None:
        self.S[..., :1, :] = self.form.point().mT

    def tensors(self) -> dict[str, Tensor]:
        return {"section": self.S}

    def parts(self) -> list[Tensor]:
        return [*self.form.parts(), self.S]

    def point(self) -> Tensor:
        return self.form.point()

    def write(self, targets: list[Tensor]) -> None:
        self.form.write(targets)

    def pull(self, g: Tensor, out: Tensor) -> None:
        self.form.pull(g, out)
        out[..., 1:, :] = self.O @ out

    def boost(self, w: Tensor) -> Tensor:
        """Coordinates in the closed form."""
        return self.O.mT @ w[..., 1:, :]

    def step(self, w: Tensor, length: Tensor, R: Retraction, odd: Tensors, even: Tensors) -> None:
        f, O, b = self.form, self.O, self.boost(w)
        y, W, every = f.y.unsqueeze(-2), b.mT, (slice(None), slice(None))
        if len(y):
            longest = extremes(length)[1]
            T = f.turn(f.y, f.y1, f.r, W[..., 0, :], length[..., 0], longest, R, every)
            x, z = T.each(dot(y, O), dot(W, O))
            O.addcmul_(y, x).addcmul_(W, z)
        f.step(b, length, R, (), ())
        self._show()

    def push(self, w: Tensor) -> Tensor:
        return self.form.push(self.boost(w))

    def bend(self, g: Tensor, B: Tensor) -> Callable[[Tensor], Tensor]:
        return bend(self.form.k, self.point(), g)

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
        self._show()
