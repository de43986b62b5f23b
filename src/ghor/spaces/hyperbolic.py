"""H^n = SO+(1, n)/SO(n): hyperbolic space in the Lorentz model, the formulas of the sphere with k = -1.

Points are x = (x_0, x_s), (M, n + 1, 1). The frame above x is the boost, a function of x:

    Q b = (x_s.b, b + x_s (x_s.b)/(1 + x_0))

Nothing here subtracts large numbers from each other: rounding is relative, for x_0 = 1e6 as for x_0 = 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ghor._torch.functions import apply, compilable
from ghor._torch.precision import full_precision
from ghor.layout import Layout
from ghor.linalg import everywhere, largest, size
from ghor.spaces.base import unit_tolerance
from ghor.spaces.frames import Frame
from ghor.spaces.group import GroupSpace
from ghor.spaces.messages import warn_of_digits
from ghor.spaces.points import on_points
from ghor.spaces.retraction import Cayley, Retraction, cayley, geodesic
from ghor.spaces.sphere import check_padding
from ghor.spaces.vectors import Boosts, Carried, ahead


@dataclass(frozen=True, repr=False)
class Hyperbolic(GroupSpace):
    """Vectors (..., n+1) with -x_0^2 + x_1^2 + ... + x_n^2 = -1, x_0 > 0.

    g^hor: boosts b in R^n, stored as (0, b). The section is the boost at x, a function of x alone, so the
    implicit section stores nothing and is the default. A transported frame is that boost times a rotation:
    Lambda = [x; 0, o_1; ...; 0, o_n], o_j in R^n.

    At distance r from e_0 neighbouring floating point points are eps e^r/2 apart: in float32 5e-4 at r = 9
    and 0.2 at r = 15, in float64 1e-6 at r = 23. Where the digits run out, at eps x_0 = 1/4 (r = 15.2 in
    float32, 35.4 in float64, 4.2 in bfloat16), a weight is held, with a warning. The rounded coordinates of a
    tangent vector there say its direction only to eps e^r. So the end of a geodesic of length t is known to
    2 arsinh(eps e^r sinh(t)), and one that is to come back through the origin from r = 14 in float32 may end
    anywhere at that distance from it: use shorter vectors, or float64.

    The row `padding_idx` of a matrix, if given, is not a point, and optimizers leave it alone: it is the
    padding row of an nn.Embedding.
    """

    compact: ClassVar[bool] = False
    implicit: ClassVar[bool] = True
    curvature: ClassVar[float] = -1.0
    k: ClassVar[int] = -1

    padding_idx: int | None = field(default=None, kw_only=True)

    @cached_property
    def layout(self) -> Layout:
        return Layout(dims=1, padding=self.padding_idx)

    def check_size(self, N: int, n: int) -> None:
        if N < 2:
            raise ValueError("holds vectors (..., n+1) with n >= 1")

    def check_shape(self, shape: Sequence[int]) -> None:
        super().check_shape(shape)
        check_padding(self, shape)

    # -- points ----------------------------------------------------------------------------------------------

    @on_points("p>n")
    def residual(self, Y: Tensor, *, eps: float = 0.0) -> Tensor:
        """|<x, x> + 1|, and 0 for the padding row; infinite where 1 is less than the rounding of x_0."""
        x0, xs = Y[..., 0, 0], Y[..., 1:, 0]
        off = (1 + (xs * xs).sum(-1) - x0 * x0.abs()).abs()
        return torch.where(x0 * (eps or torch.finfo(Y.dtype).eps) >= 1, math.inf, off)

    @on_points("p>n")
    def tolerance(self, Y: Tensor, *, eps: float = 0.0) -> Tensor:
        """Rounding of <x, x> grows with x_0^2."""
        return unit_tolerance(eps) + 4 * eps * Y[..., 0, 0] ** 2

    def tangent_tolerance(self, y: Tensor, eps: float) -> Tensor:
        """(100 + 10 |x|^2) eps, as x <x, V> rounds."""
        return (100 + 10 * y.square().sum((-2, -1))) * eps

    def nearest(self, x: Tensor) -> Tensor:
        return lifted(x[..., 1:, :])

    def project(self, X: Tensor) -> Tensor:
        """The point with X's spatial part: x_0 = sqrt(1 + |x_s|^2). The padding row stays as it is."""
        Y = super().project(X)
        y = self.layout.points(Y.detach())
        far = largest(self.layout.padded(y, Y.shape, self.geometry.distinct(y))[:, 0])
        if not far * torch.finfo(X.dtype).eps < 1:
            wider = "" if X.dtype == torch.float64 else ", or use float64"
            raise ValueError(
                f"the point is at distance {math.log(2 * far):.0f} from the origin of {self}, where "
                f"{X.dtype} has no digits left; scale it down{wider}"
            )
        return Y

    def draw(self, normal: Tensor) -> Tensor:
        """The point in a uniform direction from e_0, at a uniform distance between 0 and 1."""
        r, v = torch.special.ndtr(normal[..., :1, :]), normal[..., 1:, :]
        return lifted(v / size(v) * r.sinh())

    @full_precision()
    def to_ball(self, Y: Tensor) -> Tensor:
        """The point of the Poincare ball: x_s/(1 + x_0), (..., n+1) -> (..., n)."""
        return Y[..., 1:] / (1 + Y[..., :1])

    @full_precision()
    def from_ball(self, u: Tensor) -> Tensor:
        """The inverse of `to_ball`: (1 + |u|^2, 2 u)/(1 - |u|^2), for |u| < 1."""
        square = (u * u).sum(-1, keepdim=True)
        if not everywhere(~(square.detach() >= 1)):
            raise ValueError(
                f"{self}.from_ball takes points of the open unit ball, got one of norm "
                f"{largest(square.detach()) ** 0.5:.6g}"
            )
        return lifted((2 * u / (1 - square)).unsqueeze(-1)).squeeze(-1)

    # -- Algorithm 3: Lambda is the boost above x, and x stands for it ---------------------------------------

    def frame(self, y: Tensor, section: str, held: dict[str, Tensor], eps: float) -> Frame:
        """A closed form keeps nothing: a stored frame that has not turned yet has the same coordinates."""
        stored = "section" in held or section == "transported"
        return (Carried if stored else Boosts)(self, y, held, eps)

    def hor_(self, w: Tensor, factor: float = 0.5) -> None:
        w[..., 0, :] = 0

    def coordinates(self, L: Tensor, g: Tensor) -> Tensor:
        """(0, Q^T G)."""
        xs, gs = L[..., 1:, :], g[..., 1:, :]
        return with_zero(gs + xs * (g[..., :1, :] + dot(xs, gs) / (1 + L[..., :1, :])))

    def global_rep(self, L: Tensor, v: Tensor) -> Tensor:
        return with_zero(v[..., 1:, :] - L[..., 1:, :] * (v[..., :1, :] / (1 + L[..., :1, :])))

    def velocity(self, L: Tensor, w: Tensor) -> Tensor:
        """Q b."""
        xs, b = L[..., 1:, :], w[..., 1:, :]
        along = dot(xs, b)
        return torch.cat([along, b + xs * (along / (1 + L[..., :1, :]))], -2)

    def away(self, frame: Frame, y0: Tensor, out: Tensor) -> None:
        """-log(Y, Y0) in g^hor, so that the rate of decay does not depend on how far out Y is."""
        y = frame.point()
        b = -self.seen(y, y0)
        out[..., :1, :] = 0
        out[..., 1:, :] = frame.O[..., 1:] @ b if isinstance(frame, Carried) else b

    def moved(self, L: Tensor, w: Tensor, R: Retraction, longest: float, eps: float) -> Tensor:
        """The point of the boost times R(W), or of as much of W as leads to where the digits end.

        Cayley moves by 2 artanh(|b|/2), which is infinite at |b| = 2: it goes on beyond |b| = 1 along the
        geodesic, at the speed 4/3 that it has there.
        """
        x0, xs, b = L[..., :1, :], L[..., 1:, :], w[..., 1:, :]
        b = b * self._share(x0, xs, b, R, eps)
        xb, bb = dot(xs, b), dot(b, b)
        f, _, _, g = ahead(x0, xb, bb, CayleyAndOn() if R is cayley else R)
        return lifted(xs + xs * g + b * f)

    def _share(self, x0: Tensor, xs: Tensor, b: Tensor, R: Retraction, eps: float) -> Tensor:
        """`shortening`, with a warning; a constant for autograd."""
        with torch.no_grad():
            share = self.shortening(x0, dot(xs, b), size(b), eps, 1 if R is geodesic else 4 / 3)
        warn_of_digits(self, share < 1, eps)
        return share

    def digits_end(self, eps: float) -> str:
        """Where the digits end, for a warning."""
        return f"to distance {math.log(0.5 / eps):.1f} from the origin"

    def shortening(self, x0: Tensor, xb: Tensor, length: Tensor, eps: float, speed: float = 4 / 3) -> Tensor:
        """The part of a step b that keeps x_0 <= far = 1/(4 eps), where the digits end.

        Along a geodesic with the outward speed o = <x_s, b>/|b|, x_0 cosh(t) + o sinh(t) = far at

            t = log((far + sqrt(far^2 - x_0^2 + o^2))/(x_0 + o))

        and steps of this length go at most `speed` times as far. Points beyond `far` may still move inwards.
        """
        tiny = torch.finfo(length.dtype).tiny
        out, far = xb / length.clamp_min(tiny), x0.clamp_min(0.25 / eps)
        inward = (1 + ((x0 - 1) * (x0 + 1) - out * out).clamp_min(0)) / (x0 - out)  # x_0 + o, where o < 0
        ahead = torch.where(out > 0, x0 + out, inward)
        t = ((far + ((far - x0) * (far + x0) + out * out).clamp_min(0).sqrt()) / ahead).log().clamp_min(0)
        return (t / (speed * length).clamp_min(tiny)).clamp_max(1)

    # -- geometry --------------------------------------------------------------------------------------------

    @on_points("pv>v")
    def tangent(self, Y: Tensor, X: Tensor) -> Tensor:
        """X + x <x, X>."""
        return X + Y * (dot(Y[..., 1:, :], X[..., 1:, :]) - Y[..., :1, :] * X[..., :1, :])

    @on_points("pvv>v")
    def transport(self, Y: Tensor, Delta: Tensor, V: Tensor, *, eps: float | None = None) -> Tensor:
        """Transport V along the geodesic of Delta: lengths and angles stay, to rounding.

        In the boost frames it is the rotation I + 2 (gamma S + S^2)/(gamma^2 + |S|^2) in the plane of x_s and
        b, with the bivector S = s (b x_s^T - x_s b^T), gamma = -(1 + x_0) c - s x_s.b and c, s the half angle
        of b: a rotation however gamma rounds.
        """
        eps = eps or torch.finfo(Y.dtype).eps
        x0, xs = Y[..., :1, :], Y[..., 1:, :]
        b, m = (self.global_rep(Y, X)[..., 1:, :] for X in (Delta, V))
        b = b * self._share(x0, xs, b, geodesic, eps)
        c, s = geodesic.half(dot(b, b))
        xx, gamma = dot(xs, xs), -(1 + x0) * c - s * dot(xs, b)
        for _ in range(2):  # the second time against the rounding of the first
            b = b - xs * (dot(xs, b) / xx.clamp_min(torch.finfo(Y.dtype).tiny))
        bb = dot(b, b)
        f, xm, bm = 2 * s / (gamma * gamma + s * s * xx * bb), dot(xs, m), dot(b, m)
        m = m - xs * (f * (s * bb * xm + gamma * bm)) + b * (f * (gamma * xm - s * xx * bm))
        end = self.moved(Y, self.global_rep(Y, Delta), geodesic, math.inf, eps)
        return self.velocity(end, with_zero(m))

    @on_points("pp>v")
    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """The tangent vector at Y of the geodesic to Z, which is unique."""
        return self.velocity(Y, with_zero(self.seen(Y, Z)))

    def seen(self, y: Tensor, z: Tensor) -> Tensor:
        """Coordinates b of log(y, z), d/sinh(d) (z_s - y_s - y_s (z_0 - y_0 + cosh(d) - 1)/(1 + y_0))."""
        c, rise = gap(y, z)
        small = c < 5e-4
        series = 1 - c / 3 * (1 - c * 2 / 5 * (1 - c * 3 / 7 * (1 - c * 4 / 9)))
        safe = c.masked_fill(small, 1)
        ratio = torch.where(small, series, 2 * (safe / 2).sqrt().asinh() / sinh_of(safe))
        return towards(y, z, c, rise) * ratio

    @on_points("pp>d")
    def dist(self, Y: Tensor, Z: Tensor) -> Tensor:
        """2 arsinh(sqrt(c/2)), c = cosh(d) - 1: the same in both orders, and exact for near points, too.

        Its derivative where Y = Z is 0.
        """
        return apply(Distance, Y, Z)


class CayleyAndOn(Cayley):
    """Cayley up to |b| = 1, then along the geodesic: log(3) = 2 artanh(1/2), and 4/3 for each unit more."""

    def arc(self, bb: Tensor) -> tuple[Tensor, Tensor]:
        beyond = bb > 1
        length = torch.where(beyond, bb, 1).sqrt()
        stretch = (math.log(3) + (length - 1) * 4 / 3) / length
        near = super().arc(torch.where(beyond, 0, bb))
        f, h = geodesic.arc((stretch * length).square())
        return torch.where(beyond, stretch * f, near[0]), torch.where(beyond, stretch * stretch * h, near[1])


def dot(a: Tensor, b: Tensor) -> Tensor:
    """a.b, (M, n, 1) -> (M, 1, 1)."""
    return (a * b).sum(-2, keepdim=True)


def with_zero(b: Tensor) -> Tensor:
    """(0, b)."""
    return torch.cat([torch.zeros_like(b[..., :1, :]), b], -2)


def lifted(xs: Tensor) -> Tensor:
    """The point with this spatial part: x_0 = sqrt(1 + |x_s|^2)."""
    return torch.cat([(1 + dot(xs, xs)).sqrt(), xs], -2)


# -- two points ----------------------------------------------------------------------------------------------


def gap(y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """cosh(d) - 1, the same in both orders, and z_0 - y_0.

    Seen from the point x that is nearer to e_0, the other one, f, has f_s = x_s + D, D = a x_s + w with
    a = <x_s, D>/x_0^2, and cosh(d) - 1 = x_0 e for e = f_0 - x_0 (1 + a). For near points e is a difference
    of large numbers, which is avoided by (f_0 - x_0 (1 + a)) (f_0 + x_0 (1 + a)) = a^2 + |w|^2.
    """
    near, ys, zs = y[..., :1, :] <= z[..., :1, :], y[..., 1:, :], z[..., 1:, :]
    x, far = torch.where(near, y, z), torch.where(near, z, y)
    x0, f0, xs = x[..., :1, :], far[..., :1, :], x[..., 1:, :]
    D = far[..., 1:, :] - xs
    a = dot(xs, D) / x0.square()
    w, top = torch.addcmul(D, a, xs, value=-1), torch.addcmul(x0, a, x0)
    both = f0 + top.abs()
    e = torch.where(top > 0, torch.addcmul(dot(w, w), a, a) / both, both)
    return x0 * e, dot(zs - ys, zs + ys) / (x0 + f0)


def sinh_of(c: Tensor) -> Tensor:
    """sinh(d) of c = cosh(d) - 1 > 0."""
    return (c * (c + 2)).sqrt()


def towards(y: Tensor, z: Tensor, c: Tensor, rise: Tensor) -> Tensor:
    """sinh(d) times the unit vector from y to z, in the boost frame at y."""
    ys = y[..., 1:, :]
    return torch.addcmul(z[..., 1:, :] - ys, ys, (rise + c) / (1 + y[..., :1, :]), value=-1)


def slopes(y: Tensor, z: Tensor, c: Tensor, rise: Tensor, factor: Tensor | float) -> tuple[Tensor, Tensor]:
    """The derivatives of factor d(y, z) by the spatial parts, as (0, g): away from the other, or 0."""
    zero = c == 0
    factor = (-factor / sinh_of(c.masked_fill(zero, 1))).masked_fill(zero, 0)

    def slope(y: Tensor, z: Tensor, rise: Tensor) -> Tensor:
        y0, ys = y[..., :1, :], y[..., 1:, :]
        u = towards(y, z, c, rise) * factor  # a unit vector: what cancels next is of order one
        return with_zero(torch.addcmul(u, ys, dot(ys, u) / torch.addcmul(y0, y0, y0), value=-1))

    return slope(y, z, rise), slope(z, y, -rise)


@compilable
class Distance(torch.autograd.Function):
    """d(y, z), (M, N, 1) -> (M), with its derivative in closed form; the second one is that of this form.

    `gap` is computed once more for a derivative: vmap takes no outputs without one that are saved.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, z: Tensor) -> Tensor:
        return 2 * (gap(y, z)[0] / 2).sqrt().asinh()[..., 0, 0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, z = ctx.saved_tensors
        return slopes(y, z, *gap(y, z), grad[..., None, None])

    @staticmethod
    def jvp(ctx: Any, dy: Tensor | None, dz: Tensor | None) -> Tensor:
        y, z = ctx.saved_tensors
        pairs = zip(slopes(y, z, *gap(y, z), 1.0), (dy, dz), strict=True)
        d: Any = sum((g * v).sum((-2, -1)) for g, v in pairs if v is not None)
        return d
