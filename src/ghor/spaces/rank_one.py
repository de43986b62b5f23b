"""Vectors of Minkowski space R^(1,n), along the last dimension: what `hyperbolic.py` is made of, O(n) each.

A point x, -x_0^2 + |x_s|^2 = -1, has the boost as its frame: Lambda(x) = [x, e_c + (x + e_0) x_s^T/(1 +
x_0)]. Nothing here subtracts what is large: with x_0 = 1e6 as with x_0 = 1 rounding is relative.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ghor.retraction import Retraction

Shorten = Callable[[Tensor, Tensor, Tensor], Tensor]


def dot(a: Tensor, b: Tensor) -> Tensor:
    """<a, b>, with the last dimension kept."""
    return (a * b).sum(-1, keepdim=True)


def lifted(xs: Tensor) -> Tensor:
    """The point with this spatial part: x_0 = sqrt(1 + |x_s|^2)."""
    return torch.cat([(1 + dot(xs, xs)).sqrt(), xs], -1)


def pull(x: Tensor, G: Tensor) -> Tensor:
    """Q^T G, Q the columns of Lambda(x) beyond the first: (..., n+1) -> (..., n)."""
    xs, Gs = x[..., 1:], G[..., 1:]
    return torch.addcmul(Gs, xs, G[..., :1] + dot(xs, Gs) / (1 + x[..., :1]))


def push(x: Tensor, b: Tensor) -> Tensor:
    """Q b."""
    xs = x[..., 1:]
    a = dot(xs, b)
    return torch.cat([a, b + xs * (a / (1 + x[..., :1]))], -1)


def coordinates(x: Tensor, Delta: Tensor) -> Tensor:
    """The inverse of `push` on tangent vectors at x."""
    return Delta[..., 1:] - x[..., 1:] * (Delta[..., :1] / (1 + x[..., :1]))


def sinhc(s: Tensor) -> Tensor:
    """sinh(r)/r as a function of s = r^2, smooth at 0."""
    small = s < 1e-3
    r = torch.where(small, 1, s).sqrt()
    return torch.where(small, 1 + s / 6 * (1 + s / 20 * (1 + s / 42)), torch.sinh(r) / r)


def boost(s: Tensor, retraction: Retraction) -> tuple[Tensor, Tensor]:
    """R(W) e_0 = (1 + F1, F2 b) for W = [[0, b^T], [b, 0]], s = |b|^2: what `Retraction.thin` gives, in
    closed form."""
    if retraction.name == "geodesic":  # a boost by |b|
        return s / 2 * sinhc(s / 4) ** 2, sinhc(s)
    if retraction.name == "cayley":  # by 2 artanh(|b|/2)
        return s / 2 / (1 - s / 4), 1 / (1 - s / 4)
    F1, F2, _, _ = retraction.thin(torch.zeros_like(s).unsqueeze(-1), -s.unsqueeze(-1))
    return F1.squeeze(-1), F2.squeeze(-1)


class Step:
    """The step from x by Lambda(x) R(W), and how vectors turn in it. Beside sums over n all is one number a
    point.

    `shorten(x_0, |b|^2, <x_s, b>)`, where it is given, is a factor for b. The rotation T of Lambda(x) R(W) =
    Lambda(x+) diag(1, T) is Thomas' or Wigner's, which two boosts make. In the ball, u = p x_s and v = q b
    the images of x and R(W) e_0, it is Ungar's gyration gyr[u, v], in which everything is bounded by 1:

        T = I + x_s alpha^T + b beta^T,   alpha = alpha_x x_s + alpha_b b,   beta = beta_x x_s + beta_b b
    """

    def __init__(self, x: Tensor, b: Tensor, retraction: Retraction, shorten: Shorten | None = None) -> None:
        self.x0, self.xs, self.b = x[..., :1], x[..., 1:], b
        self.products = self.xs * b, b * b
        xb, bb = (y.sum(-1, keepdim=True) for y in self.products)
        f = 1 if shorten is None else shorten(self.x0, bb, xb)
        self.F1, F2 = boost(f * f * bb, retraction)
        self.F2 = f * F2
        p, q = 1 / (1 + self.x0), self.F2 / (2 + self.F1)
        self.along = self.F1 + self.F2 * p * xb
        uu, vv, uv, pq = p * (self.x0 - 1), q * q * bb, p * q * xb, p * q
        scale = 2 / (1 + 2 * uv + uu * vv)
        self.alpha = -p * p * scale * vv, pq * scale * (1 + 2 * uv)
        self.beta = -pq * scale, -q * q * scale * uu

    def spatial(self) -> Tensor:
        """The spatial part of Lambda(x) R(W) e_0."""
        return torch.addcmul(self.xs, self.along, self.xs).addcmul(self.F2, self.b)

    def turn(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """<alpha, w> and <beta, w>: T w = w + x_s <alpha, w> + b <beta, w>."""
        xw, bw = dot(self.xs, w), dot(self.b, w)
        return self.alpha[0] * xw + self.alpha[1] * bw, self.beta[0] * xw + self.beta[1] * bw

    def turned(self, w: Tensor) -> Tensor:
        """T w; of several vectors (..., k, n) with `x` and `b` (..., 1, n)."""
        along_x, along_b = self.turn(w)
        return w + torch.addcmul(along_x * self.xs, along_b, self.b)

    def spread(self, s: Tensor) -> Tensor:
        """sum_j T_ij^2 s_j: what squares of coordinates become on average."""
        xb, bb = self.products
        xx = self.xs * self.xs
        sxx, sxb, sbb = dot(s, xx), dot(s, xb), dot(s, bb)
        (ax, ab), (bx, b_) = self.alpha, self.beta
        aa = ax * ax * sxx + 2 * ax * ab * sxb + ab * ab * sbb  # sum_j s_j alpha_j^2, and so on
        mixed = ax * bx * sxx + (ax * b_ + ab * bx) * sxb + ab * b_ * sbb
        cc = bx * bx * sxx + 2 * bx * b_ * sxb + b_ * b_ * sbb
        out = torch.addcmul(s, xx, torch.addcmul(aa, 2 * ax, s))
        out = out.addcmul(xb, torch.addcmul(2 * mixed, 2 * (ab + bx), s))
        return out.addcmul(bb, torch.addcmul(cc, 2 * b_, s))


def square_of_distance(x: Tensor, z: Tensor) -> Tensor:
    """d(x, z)^2 from q = 4 sinh^2(d/2) = <z - x, z - x>, exact to rounding for near points, smooth where they
    meet.

    Where <x_s, z_s> > 0 the chord is split along and across m = x_s + z_s: q = (across^2 + 4 t)/(1 - t), and
    elsewhere q = -2 <x, z> - 2: with x_0 - 1 = |x_s|^2/(1 + x_0) everything is a sum of positive terms.
    """
    xs, zs, s = x[..., 1:], z[..., 1:], x[..., :1] + z[..., :1]
    a, b, xz = dot(xs, xs) / (1 + x[..., :1]), dot(zs, zs) / (1 + z[..., :1]), dot(xs, zs)
    more, m, D = a + b + a * b, xs + zs, zs - xs  # more = x_0 z_0 - 1
    mm = torch.where(xz > 0, dot(m, m), 1)
    along = dot(D, m) / mm
    across, t = D - along * m, along * along * mm / (s * s)
    q = torch.where(
        xz > 0, (dot(across, across) + 4 * t) * mm / torch.where(xz > 0, 2 * (xz + more), 1), 2 * (more - xz)
    )
    small = q < 1e-3
    d = 2 * torch.asinh(torch.where(small, 1, q).sqrt() / 2)
    return torch.where(small, q * (1 - q / 12 * (1 - q * 2 / 15 * (1 - q * 9 / 56))), d * d)


def direction(x: Tensor, z: Tensor) -> Tensor:
    """sinh(d) times the unit vector towards z, in the frame Lambda(x).

    Away from e_0 by radius and angle: with unit vectors x^, z^ along x_s, z_s and e = z^ - x^ it is
    |z_s| (e + x^ |e|^2/2) + x^ (sinh(r_z - r_x) - x_0 |z_s| |e|^2/2), where nothing large is subtracted.
    """
    x0, z0, xs, zs = x[..., :1], z[..., :1], x[..., 1:], z[..., 1:]
    D = zs - xs
    near = D - xs * (dot(D, xs + zs) / (x0 + z0) - dot(xs, D) / (1 + x0))
    far = (x0 > 2) & (z0 > 2)
    nx, nz = (torch.where(far, dot(y, y), 1).sqrt() for y in (xs, zs))
    unit = xs / nx
    e = zs / nz - unit
    half = dot(e, e) / 2
    radial = (z0 - x0) * (z0 + x0) / (x0 * nz + nx * z0) - x0 * nz * half
    return torch.where(far, nz * (e + unit * half) + unit * radial, near)
