"""Spheres and hyperbolic spaces from one set of formulas, O(N) per point and without matrices.

Points y = (y_1, y_2) along the last dimension satisfy y_1^2 + k |y_2|^2 = 1: k = 1 on the sphere, k = -1 on
hyperbolic space. The frame above y is a function of y,

    Lambda = [y, Q],   Q x = (-k r y_2.x, x - k r p y_2 (y_2.x)),   p = 1/(r + y_1)

with r = 1 on hyperbolic space (the boost) and r = 1 or -1 on the sphere, whichever keeps p small. Elements of
g^hor are W = [[0, -k b^T], [b, 0]], stored as (0, b).

A point of a sphere of radius |r| is |r| y. Squares of its numbers may be out of range, as 1e20 is in float32:
they are divided by r, one by one, before they are multiplied.

With k = -1 no large numbers are subtracted from each other: rounding is relative, for y_1 = 1e6 as for
y_1 = 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from ghor.linalg import MANY, row_dots, row_sums
from ghor.retraction import Retraction
from ghor.spaces.base import Space

SHORT = 16  # coordinates of the points that are stored coordinate by coordinate if there are many
FAST = 0.25  # length of a step from which on second moments follow the frame with care: 1/4 radian


def scalar(a: Tensor, b: Tensor) -> Tensor:
    """a.b, with the last dimension kept."""
    return (a * b).sum(-1, keepdim=True)


# -- retractions ---------------------------------------------------------------------------------------------


def sinhc(s: Tensor) -> Tensor:
    """sinh(t)/t as a function of s = t^2, smooth at 0."""
    small = s < 1e-3
    t = torch.where(small, 1, s).sqrt()
    return torch.where(small, 1 + s / 6 * (1 + s / 20 * (1 + s / 42)), torch.sinh(t) / t)


def sinc(s: Tensor) -> Tensor:
    """sin(t)/t as a function of s = t^2."""
    return torch.sinc(s.sqrt() / math.pi)


def coefficients(k: int, bb: Tensor, retraction: Retraction, long: bool = False) -> tuple[Tensor, Tensor]:
    """F and h of bb = |b|^2: R(W) e_1 = (1 - k h bb, F b), R(W) (0, m) = (-k F b.m, m - k h b (b.m)).

    On hyperbolic space Cayley moves by 2 artanh(|b|/2), which is infinite at |b| = 2. Where steps may be
    `long`, it is continued beyond |b| = 1 along the geodesic, at the speed 4/3 that it has there.
    """
    if retraction.name == "geodesic":
        ratio = sinc if k == 1 else sinhc
        return ratio(bb), ratio(bb / 4).square() / 2
    if retraction.name != "cayley":
        c = (k * bb).unsqueeze(-1)
        _, F, _, h = retraction.thin(torch.zeros_like(c), c)
        return F.squeeze(-1), h.squeeze(-1)
    if not long or k == 1:
        F = torch.reciprocal(torch.add(1, bb, alpha=k / 4))
        return F, F / 2
    beyond = bb > 1
    F, h = coefficients(k, torch.where(beyond, 0, bb), retraction)
    length = torch.where(beyond, bb, 1).sqrt()
    # b is stretched to the length of the geodesic: log 3 = 2 artanh(1/2), and 4/3 for each unit beyond.
    stretch = (math.log(3) + (length - 1) * 4 / 3) / length
    s = (stretch * length).square()
    F = torch.where(beyond, stretch * sinhc(s), F)
    return F, torch.where(beyond, (stretch * sinhc(s / 4)).square() / 2, h)


# -- frames and steps ----------------------------------------------------------------------------------------


def pull(
    k: int, y: Tensor, G: Tensor, p: Tensor, sign: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Q^T G = G_2 - k y_2 (G_1 + p y_2.G_2)/r: (..., N) -> (..., N - 1)."""
    y2, G2 = y[..., 1:], G[..., 1:]
    along = torch.addcmul(G[..., :1], p, scalar(y2, G2))
    along = along if sign is None else along / sign
    return torch.addcmul(G2, y2, along, value=-k, out=out)


class Step:
    """The step from y by Lambda R(W), and how vectors turn in it: Lambda R(W) = Lambda(y+) diag(1, T).

    T = I + y_2 a^T + b c^T is a rotation, with a and c in the plane of y_2 and b; apart from sums over the
    coordinates everything is one number per point. On hyperbolic space T is the Thomas-Wigner rotation.
    `sign` and `p` are r and p above; `moved` (..., 1) is false where the sign must stay. `length` (..., 1) is
    |b| and `yb` y_2.b, if they are known.
    """

    def __init__(
        self,
        k: int,
        y: Tensor,
        b: Tensor,
        retraction: Retraction,
        sign: Tensor | None = None,
        p: Tensor | None = None,
        moved: Tensor | None = None,
        long: bool = False,
        length: Tensor | None = None,
        yb: Tensor | None = None,
    ) -> None:
        y1, self.y2, self.b = y[..., :1], y[..., 1:], b
        p = torch.reciprocal((1 if sign is None else sign) + y1) if p is None else p
        yb = scalar(self.y2, b) if yb is None else yb
        self.bb = scalar(b, b) if length is None else length * length
        self.F2, h = coefficients(k, self.bb, retraction, long)
        # One number per point each. Factors k are left out until an addcmul can apply them at no cost.
        self.k, e, bh = k, p * yb * self.F2, self.bb * h
        v = e if sign is None else e / sign
        self.g = v + bh  # y+ = y (1 - k g) + F2 b in the coordinates y_2
        self.y1 = torch.addcmul(y1, y1, self.g, value=-k).add_(e, alpha=-k)
        self.sign, self.p = sign, torch.reciprocal((1 if sign is None else sign) + self.y1)
        if sign is None:
            # alpha = 1 - p+ (1 - k g) y1 and beta = p - p+ (1 - k g), without their cancellation far out
            alpha, beta = torch.addcmul(self.p, self.p, v, value=-k), p * self.p * bh
        else:
            turns = (self.p * sign).abs_() > 4
            self.sign = torch.where(turns if moved is None else turns & moved, -sign, sign)
            self.p = torch.reciprocal(self.sign + self.y1)
            scale = torch.addcmul(self.p, self.p, self.g, value=-k)
            alpha, beta = 1 - scale * y1, (p - scale) / sign
        q, F = self.p * self.F2, self.F2
        self.cy = q if sign is None else q / sign
        f = h * yb
        # T m = m + k y_2 (ab b.m - k ay y_2.m) + k b (cy y_2.m + cb b.m)
        self.ay = beta
        self.ab = torch.addcmul(beta * f, F, alpha, value=-1)
        f = f if sign is None else f / sign
        self.cb = q * torch.add(F * y1, f, alpha=-k) - h

    def point(self) -> Tensor:
        """The coordinates y_2 of y+ = Lambda R(W) E; the first one is `y1`."""
        return torch.addcmul(self.y2, self.g, self.y2, value=-self.k).addcmul_(self.F2, self.b)

    def turn(self, ym: Tensor, bm: Tensor) -> tuple[Tensor, Tensor]:
        """k <a, m> and k <c, m> from y_2.m and b.m: T m = m + y_2 <a, m> + b <c, m>."""
        along_y = torch.addcmul(self.ab * bm, self.ay, ym, value=-self.k)
        return along_y, torch.addcmul(self.cy * ym, self.cb, bm)

    def turned(self, m: Tensor) -> Tensor:
        """T m; for several vectors (..., n, N) with y and b (..., 1, N)."""
        along_y, along_b = self.turn(scalar(self.y2, m), scalar(self.b, m))
        return torch.add(m, torch.addcmul(along_y * self.y2, along_b, self.b), alpha=self.k)

    def turn_(self, vectors: Sequence[Tensor]) -> None:
        """Vectors (0, m) of g^hor <- (0, T m), in place; where b = 0 they keep every bit."""
        for X in vectors:
            m = X[..., 1:]
            along_y, along_b = self.turn(scalar(self.y2, m), scalar(self.b, m))
            m.addcmul_(along_y, self.y2, value=self.k).addcmul_(along_b, self.b, value=self.k)

    def spread(self, s: Tensor) -> Tensor:
        """sum_j T_ij^2 s_j: the new mean squares of coordinates that are uncorrelated."""
        a = torch.addcmul(self.ab * self.b, self.ay, self.y2, value=-self.k)  # k a and k c
        c = torch.addcmul(self.cy * self.y2, self.cb, self.b)
        diagonal = torch.addcmul(a * self.y2, c, self.b)  # of T - I, times k
        sa, sc = s * a, s * c
        aa, ac, cc = scalar(sa, a), scalar(sa, c), scalar(sc, c)
        # The rest is sum_j s_j (y_i a_j + b_i c_j)^2, which only rounding can make negative.
        across = torch.addcmul(aa * self.y2, ac, self.b).mul_(self.y2)
        across.addcmul_(torch.addcmul(ac * self.y2, cc, self.b), self.b)
        return across.addcmul_(s, diagonal, value=2 * self.k).add_(s)

    def spread_rows_(self, y: Tensor, W: Tensor, squares: Sequence[Tensor]) -> None:
        """`spread_` on whole rows y, W = (0, b) and (0, s), multiplied out: fewer passes, for short steps.

        With k a = ab b - k ay y_2 and k c = cy y_2 + cb b, the sum is
        s + y_2^2 (aa + 2 k s (-k ay)) + y_2 b (2 ac + 2 k s (ab + cy)) + b^2 (cc + 2 k s cb).
        """
        ay, ab, cy, cb, k = -self.k * self.ay, self.ab, self.cy, self.cb, self.k
        yy, yb, bb = y * y, y * W, W * W
        twice_diagonal = [x * (2 * k) for x in (ay, ab + cy, cb)]
        for s in squares:
            products = [s * X for X in (yy, yb, bb)]
            syy, syb, sbb = map(row_sums, products)  # the first coordinate of s is 0
            say, sab = torch.addcmul(ab * syb, ay, syy), torch.addcmul(ab * sbb, ay, syb)
            scy, scb = torch.addcmul(cb * syb, cy, syy), torch.addcmul(cb * sbb, cy, syb)
            aa, cc = torch.addcmul(ab * sab, ay, say), torch.addcmul(cb * scb, cy, scy)
            ac = torch.addcmul(cb * sab, cy, say)
            for X, rest, sX, d in zip(
                (yy, yb, bb), (aa, ac.mul_(2), cc), products, twice_diagonal, strict=True
            ):
                s.addcmul_(X, rest).addcmul_(sX, d)
            s.clamp_min_(0)
            s[..., 0] = 0

    def spread_(self, squares: Sequence[Tensor], where: Tensor | None = None) -> None:
        """Spread squares stored as (0, s), in place, at all points or at those of `where` (..., 1)."""
        for X in squares:
            s = X[..., 1:]
            if where is None:
                torch.clamp_min(self.spread(s), 0, out=s)
            else:
                s.copy_(torch.where(where, self.spread(s).clamp_min_(0), s))


# -- few passes over memory ----------------------------------------------------------------

LARGE, CACHED = 1 << 20, 1 << 17  # numbers in a tensor that is cut, and in each piece, for each thread


def pieces(X: Tensor, dim: int) -> list[slice]:
    """Slices of X (M, N) along `dim`, so small that operation after operation finds them in the cache.

    Rows, dim = -1, are cut only if there is one of them. On devices other than CPUs, and compiled, X is not
    cut, and neither is a small one, for which there need not be an M.
    """
    if X.numel() < LARGE or X.device.type != "cpu" or torch.compiler.is_compiling():
        return [slice(None)]
    if X.shape[dim] < X.numel() if dim == -1 else X.dim() == 1:
        return [slice(None)]
    size = max(1, CACHED * torch.get_num_threads() * X.shape[dim] // X.numel())
    return [slice(i, i + size) for i in range(0, X.shape[dim], size)]


@cache
def one(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The number 1, for operations that take tensors only."""
    with torch.inference_mode(False):  # it is kept, and may meet autograd later
        return torch.ones((), dtype=dtype, device=device)


def inner(*pairs: tuple[Tensor, Tensor], out: Tensor | None = None) -> list[Tensor]:
    """a.b for pairs of rows (M, N), (M, 1) each; `out` (M, N) may be overwritten, to save allocating memory.

    Sums are torch's, which adds pairwise: products of BLAS lose digits for long rows.
    """
    columns = pieces(pairs[0][0], -1)
    if len(columns) == 1:
        return [row_dots(a, b, out=out) for a, b in pairs]
    sums = [[(a[..., c] * b[..., c]).sum(-1) for a, b in pairs] for c in columns]
    return [torch.stack(parts, -1).sum(-1, keepdim=True) for parts in zip(*sums, strict=True)]


def turn_by_cayley(
    y: Tensor,
    W: Tensor,
    r: Tensor,
    rho: Tensor,
    length: Tensor,
    vectors: Sequence[Tensor],
    unit: bool,
    shortest: float | None,
    scratch: Tensor | None = None,
) -> Tensor:
    """The step of points y (M, N) by W, and `vectors` turned by it, all in place; returns the new rho.

    The frame is a reflection: with rho = 1 + y_1/r, u = y + r e_1 and |r| = 1,

        [G] = G - u (u.G)/rho                 coordinates of G in it; the first is that along y
        y+  = y (1 - g) + F W - v r e_1       F = 1/(1 + |W|^2/4),  v = F y.W/rho,  g = v + F |W|^2/2
        X   = [m] - (W.m/2) (y + y+)          m, transported along the step
        m+  = m - alpha y - beta y+           alpha = W.m/2 + y.m/rho,  beta = (W.m - rho alpha)/rho+

    where the first coordinates of W, m and m+ are 0. `length` (M, 1) is the angle of W; `shortest` the least
    of these, None if values may not be read. On a sphere of another radius y/r and W/r take the places of y
    and W, which is overwritten. Where rho+ < 1/4, r changes its sign, and then beta = rho alpha/rho+.

    What is larger than the cache goes through it piece by piece: by rows, or by pieces of one long vector.
    """
    rows = pieces(y, 0)
    if len(rows) > 1:
        new = torch.empty_like(rho)
        for i in rows:
            part, some = None if scratch is None else scratch[i], [m[i] for m in vectors]
            new[i] = turn_by_cayley(y[i], W[i], r[i], rho[i], length[i], some, unit, shortest, part)
        return new
    u, per = y, None if unit else r.reciprocal()
    if per is not None:
        u, W, scratch = torch.mul(y, per, out=scratch), W.mul_(per), None
    v, *products = inner((u, W), *((X, m) for m in vectors for X in (u, W)), out=scratch)
    bb = length * length
    F = torch.add(1, bb, alpha=0.25).reciprocal_()
    v.mul_(F).div_(rho)
    g = torch.addcmul(v, bb, F, value=0.5)
    F = F if unit else F * r
    turns = []
    for m, ym, wm in zip(vectors, products[::2], products[1::2], strict=True):
        if shortest is None or shortest == 0:
            ym = ym * (bb > 0)  # points that do not move keep every bit
        alpha = torch.addcdiv(wm, ym, rho, value=2)  # 2 alpha
        turns.append((m, alpha, wm, torch.addcmul(wm, rho, alpha, value=-0.5)))
    for c in pieces(y, -1):
        yc, uc = y[..., c], u[..., c]
        for m, alpha, _, _ in turns:
            m[..., c].addcmul_(uc, alpha, value=-0.5)
        yc.addcmul_(yc, g, value=-1).addcmul_(W[..., c], F)
        if not c.start:  # the first coordinate is known now, and with it beta
            y1 = yc[..., :1].addcmul_(r, v, value=-1)
            new = torch.addcdiv(one(y.dtype, y.device), y1, r)
            if shortest is None or float(new.min()) < 0.25:
                flip = new < 0.25
                r.copy_(torch.where(flip, -r, r))
                new = 1 + y1 / r
                turns = [(m, alpha, wm, torch.where(flip, wm - n, n)) for m, alpha, wm, n in turns]
            betas = [n / new for _, _, _, n in turns]
        if per is not None:
            torch.mul(yc, per, out=uc)
        for m, beta in zip(vectors, betas, strict=True):
            m[..., c].addcmul_(uc, beta, value=-1)
    for m in vectors:
        m[..., 0] = 0
    return new


# -- a row that is not a point -------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Padded(Space):
    """Vectors, of which the row `padding_idx`, if given, is not a point and is left alone.

    That is the padding row of an nn.Embedding.
    """

    padding_idx: int | None = field(default=None, kw_only=True)

    @property
    def one(self) -> Space:
        return super().one if self.padding_idx is None else replace(self, padding_idx=None).one

    def narrow(self, M: int, point: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
        # One number per point is broadcast along rows in loops of length N, along coordinates in long ones.
        many_short = M > MANY and len(point) == 1 and point[0] <= SHORT
        return many_short and device.type == "cpu" and not dtype.is_complex

    def check_padding(self, shape: Sequence[int]) -> None:
        """Raise ValueError unless the padding row exists."""
        rows = shape[-self.dims - 1] if len(shape) > self.dims else 0
        if self.padding_idx is not None and not -rows <= self.padding_idx < rows:
            raise ValueError(f"{self} has no row {self.padding_idx} in a tensor of shape {tuple(shape)}")

    def padding(self, X: Tensor) -> Tensor:
        """The row of weights (..., rows, *point) that is left alone, a view."""
        assert self.padding_idx is not None
        return X.select(-self.dims - 1, self.padding_idx)

    def read(self, weights: Tensor, gradient: bool = False) -> Tensor:
        if self.padding_idx is None:
            return weights
        points = weights.clone()
        self.padding(points).zero_()
        if not gradient:
            self.padding(points).add_(self.padding(self.E(weights.shape, weights.dtype, weights.device)))
        return points

    def write(self, weights: list[Tensor], points: list[Tensor]) -> None:
        kept = [] if self.padding_idx is None else [self.padding(w).clone() for w in weights]
        super().write(weights, points)
        for w, row in zip(weights, kept, strict=bool(kept)):
            self.padding(w).copy_(row)

    def keep_padding(self, Y: Tensor, X: Tensor) -> Tensor:
        """Y with the padding row of X."""
        if self.padding_idx is not None:
            self.padding(Y).copy_(self.padding(X))
        return Y
