"""Spheres and hyperbolic spaces from one set of formulas, O(N) a point, with no matrix anywhere.

Points y = (y_1, y_2) along the last dimension satisfy y_1^2 + k |y_2|^2 = 1: k = 1 on the sphere, k = -1 on
hyperbolic space. The frame above y is a function of y,

    Lambda = [y, Q],   Q x = (-k r y_2.x, x - k r p y_2 (y_2.x)),   p = 1/(r + y_1)

with r = 1 on hyperbolic space (the boost) and r = 1 or -1 on the sphere, whichever keeps p small. Elements of
g^hor are W = [[0, -k b^T], [b, 0]], stored as (0, b).

With k = -1 nothing here subtracts what is large: with y_1 = 1e6 as with y_1 = 1 rounding is relative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ghor.retraction import Retraction
from ghor.spaces.base import Space

Coefficients = tuple[Tensor, Tensor, Tensor]  # F1, F2, h


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


def coefficients(k: int, bb: Tensor, retraction: Retraction, long: bool = False) -> Coefficients:
    """F1, F2 and h of bb = |b|^2: R(W) e_1 = (1 + F1, F2 b), R(W) (0, m) = (-k F2 b.m, m - k h b (b.m)).

    On hyperbolic space Cayley moves by 2 artanh(|b|/2), which ends at |b| = 2. Where steps may be `long`, it
    goes on from |b| = 1 with the speed 4/3 that it has there.
    """
    c = k * bb
    if retraction.name == "geodesic":
        ratio = sinc if k == 1 else sinhc
        h = ratio(bb / 4).square() / 2
        return -c * h, ratio(bb), h
    if retraction.name != "cayley":
        F1, F2, _, h = (X.squeeze(-1) for X in retraction.thin(torch.zeros_like(c)[..., None], c[..., None]))
        return F1, F2, h
    if not long or k == 1:
        F2 = torch.reciprocal(torch.add(1, c, alpha=0.25))
        h = F2 / 2
        return -c * h, F2, h
    beyond = bb > 1
    _, F2, h = coefficients(k, torch.where(beyond, 0, bb), retraction)
    length = torch.where(beyond, bb, 1).sqrt()
    stretch = (math.log(3) + (length - 1) * 4 / 3) / length  # of b, for a boost along the geodesic
    s = (stretch * length).square()
    F2 = torch.where(beyond, stretch * sinhc(s), F2)
    h = torch.where(beyond, (stretch * sinhc(s / 4)).square() / 2, h)
    return -c * h, F2, h


# -- frames and steps ----------------------------------------------------------------------------------------


def pull(k: int, y: Tensor, G: Tensor, p: Tensor, sign: Tensor | None = None) -> Tensor:
    """Q^T G = G_2 - k r y_2 (G_1 + p y_2.G_2): (..., N) -> (..., N - 1)."""
    y2, G2 = y[..., 1:], G[..., 1:]
    along = torch.addcmul(G[..., :1], p, scalar(y2, G2))
    along = along if sign is None else along * sign
    return torch.addcmul(G2, y2, along, value=-k)


class Step:
    """The step from y by Lambda R(W), and how vectors turn in it: Lambda R(W) = Lambda(y+) diag(1, T).

    T = I + y_2 a^T + b c^T is a rotation, with a and c in the plane of y_2 and b; beside sums over the
    coordinates everything is one number a point. On hyperbolic space it is the rotation of Thomas and Wigner.
    `sign` and `p` are r and p above; `moved` (..., 1) is false where the sign must stay.
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
    ) -> None:
        y1, self.y2, self.b = y[..., :1], y[..., 1:], b
        r = y1.new_ones(()) if sign is None else sign
        p = torch.reciprocal(r + y1) if p is None else p
        yb, self.bb = scalar(self.y2, b), scalar(b, b)
        F1, self.F2, h = coefficients(k, self.bb, retraction, long)
        s = k * r
        u = s * p * yb * self.F2
        self.g = F1 - u
        self.y1 = torch.addcmul(y1, y1, self.g) - r * u
        self.sign, self.p = r, torch.reciprocal(r + self.y1)
        if sign is None:
            # alpha = p+ (1 + g) y1 - 1 and beta = p - p+ (1 + g), without their cancellation far out
            alpha, beta = self.p * (u - 1), -p * self.p * F1
        else:
            turns = self.p.abs() > 4
            self.sign = torch.where(turns if moved is None else turns & moved, -sign, sign)
            self.p = torch.reciprocal(self.sign + self.y1)
            scale = torch.addcmul(self.p, self.p, self.g)
            alpha, beta = scale * y1 - 1, p - scale
        q, kF2, hyb = self.p * self.F2, k * self.F2, k * h * yb
        # T m = m + y_2 (ay y_2.m + ab b.m) + b (cy y_2.m + cb b.m)
        self.ay = -s * beta
        self.ab = kF2 * alpha - self.ay * hyb
        self.cy = s * q
        self.cb = q * kF2 * y1 - k * h - self.cy * hyb

    def point(self) -> Tensor:
        """The coordinates y_2 of y+ = Lambda R(W) E; the first one is `y1`."""
        return torch.addcmul(self.y2, self.g, self.y2).addcmul(self.F2, self.b)

    def turn(self, m: Tensor) -> tuple[Tensor, Tensor]:
        """<a, m> and <c, m>: T m = m + y_2 <a, m> + b <c, m>."""
        ym, bm = scalar(self.y2, m), scalar(self.b, m)
        return torch.addcmul(self.ay * ym, self.ab, bm), torch.addcmul(self.cy * ym, self.cb, bm)

    def turned(self, m: Tensor) -> Tensor:
        """T m; for several vectors (..., n, N) with y and b (..., 1, N)."""
        along_y, along_b = self.turn(m)
        return m + torch.addcmul(along_y * self.y2, along_b, self.b)

    def turn_(self, vectors: Sequence[Tensor]) -> None:
        """Vectors (0, m) of g^hor <- (0, T m), in place; where b = 0 they keep every bit."""
        for X in vectors:
            along_y, along_b = self.turn(X[..., 1:])
            X[..., 1:].addcmul_(along_y, self.y2).addcmul_(along_b, self.b)

    def spread(self, s: Tensor) -> Tensor:
        """sum_j T_ij^2 s_j: what squares of coordinates become on average."""
        a = torch.addcmul(self.ay * self.y2, self.ab, self.b)
        c = torch.addcmul(self.cy * self.y2, self.cb, self.b)
        diagonal = torch.addcmul(a * self.y2, c, self.b)  # of T - I
        sa, sc = s * a, s * c
        aa, ac, cc = scalar(sa, a), scalar(sa, c), scalar(sc, c)
        # the rest is sum_j s_j (y_i a_j + b_i c_j)^2, which is not negative but for rounding
        across = torch.addcmul(aa * self.y2, ac, self.b) * self.y2
        across.addcmul_(torch.addcmul(ac * self.y2, cc, self.b), self.b)
        return across.addcmul_(s, diagonal, value=2).add_(s)

    def spread_(self, squares: Sequence[Tensor], where: Tensor | None = None) -> None:
        """Squares stored as (0, s) spread, in place, at all points or at some, `where` (..., 1)."""
        for X in squares:
            s = X[..., 1:]
            spread = self.spread(s).clamp_min_(0)
            s.copy_(spread if where is None else torch.where(where, spread, s))


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

    def check_padding(self, shape: Sequence[int]) -> None:
        """Raise ValueError unless there is such a row."""
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
