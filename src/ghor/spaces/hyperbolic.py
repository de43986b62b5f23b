"""Hyperbolic space: the formulas of the sphere with k = -1, and its geometry on points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ghor.spaces.frames import Frame
from ghor.linalg import size
from ghor.spaces.retraction import geodesic
from ghor.spaces.base import on_points, room_of
from ghor.spaces.sphere import Sphere
from ghor.spaces.vectors import Carried, Vectors, dot, in_plane


@dataclass(frozen=True, repr=False)
class Hyperbolic(Sphere):
    """H^n = SO+(1, n)/SO(n): -x_0^2 + |x_s|^2 = -1, x_0 > 0. The formulas of the sphere with k = -1."""

    compact: ClassVar[bool] = False
    complex: ClassVar[bool] = False
    k: ClassVar[int] = -1

    def frame(self, y: Tensor, section: str, held: dict[str, Tensor], eps: float) -> Frame:
        """A closed form keeps nothing, and its coordinates are those of a stored frame that has not turned yet."""
        stored = "section" in held or section == "transported"
        return (Carried if stored else Vectors)(self, y, held, eps)

    def hor_(self, w: Tensor, factor: float = 0.5) -> None:
        w[..., 0, :] = 0

    @on_points("p>n")
    def residual(self, y: Tensor) -> Tensor:
        return (1 + (y[..., 1:, 0] ** 2).sum(-1) - y[..., 0, 0] * y[..., 0, 0].abs()).abs()

    def allowed(self, y: Tensor, eps: float) -> Tensor:
        """Rounding of <x, x> grows with x_0^2."""
        return room_of(eps) + 4 * eps * y[..., 0, 0] ** 2

    def nearest(self, x: Tensor) -> Tensor:
        return torch.cat([(1 + (x[..., 1:, :] ** 2).sum(-2, keepdim=True)).sqrt(), x[..., 1:, :]], -2)

    def draw(self, normal: Tensor) -> Tensor:
        """A uniform direction from e_0, at a uniform distance between 0 and 1."""
        r, v = torch.special.ndtr(normal[..., :1, :]), normal[..., 1:, :]
        return self.nearest(torch.cat([r, v / size(v) * r.sinh()], -2))

    def shortening(self, x0: Tensor, xb: Tensor, length: Tensor, eps: float) -> Tensor:
        """The part of a step that keeps x_0 <= far = 1/(4 eps), where the digits end.

        With the outward speed o, x_0 cosh t + o sinh t = far at this t; Cayley goes t <= 4/3 |b|.
        """
        out, far = xb / length.clamp_min(1e-30), x0.clamp_min(0.25 / eps)
        ahead = torch.where(out > 0, x0 + out, (1 + ((x0 - 1) * (x0 + 1) - out * out).clamp_min(0)) / (x0 - out))
        t = ((far + ((far - x0) * (far + x0) + out * out).clamp_min(0).sqrt()) / ahead).log().clamp_min(0)
        return (0.75 * t / length.clamp_min(1e-30)).clamp_max(1)

    # -- geometry on points, (..., N): right wherever the points are, because nothing cancels --

    @staticmethod
    def gap(y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """q = 4 sinh^2(d/2) = 2 (cosh d - 1), the same in both orders, and z_0 - y_0.

        From the nearer point x: the other is x + a x + w with a = <x, D>/x_0^2, and -2 x_0 e = q for e = x_0 (1 + a) - z_0,
        where e (x_0 (1 + a) + z_0) = -a^2 - |w|^2.
        """
        y0, z0, ys, zs = y[..., :1], z[..., :1], y[..., 1:], z[..., 1:]
        near, D = y0 <= z0, zs - ys
        x0, far = torch.minimum(y0, z0), torch.maximum(y0, z0)
        a = torch.where(near, dot(ys, D), -dot(zs, D)) / x0.square()
        w = torch.where(near, D - a * ys, D + a * zs)
        ahead, top = a > -1, x0 + a * x0
        e = (a * a + dot(w, w)) / -torch.where(ahead, top + far, 1)
        return -2 * x0 * torch.where(ahead, e, top - far), dot(D, ys + zs) / (y0 + z0)

    def dist(self, y: Tensor, z: Tensor) -> Tensor:
        """2 arsinh(sqrt(q)/2)."""
        return 2 * (self.gap(y, z)[0].sqrt() / 2).asinh()[..., 0]

    def log_coordinates(self, y: Tensor, z: Tensor) -> Tensor:
        """b, (..., N-1): log(y, z) in the closed form at y, d/sinh(d) (z_s - y_s - y_s (z_0 - y_0 + cosh d - 1)/(1 + y_0))."""
        q, rise = self.gap(y, z)
        root = q.sqrt()
        v = z[..., 1:] - y[..., 1:] - y[..., 1:] * ((rise + q / 2) / (1 + y[..., :1]))
        d = 2 * (root / 2).asinh()
        return v * torch.where(q < 1e-3, 1 - q / 6 * (1 - q / 5), d / torch.where(q == 0, 1, root * (1 + q / 4).sqrt()))

    def transported(self, y: Tensor, b: Tensor, m: Tensor) -> Tensor:
        """Coordinates m (..., N-1), transported along the geodesic of b: a rotation, whatever b and y."""
        ys, (c, s) = y[..., 1:], geodesic.half(-1, dot(b, b))
        yy, gamma = dot(ys, ys), -(1 + y[..., :1]) * c - s * dot(ys, b)
        for _ in range(2):
            b = b - ys * (dot(ys, b) / yy.clamp_min(torch.finfo(y.dtype).tiny))
        bb = dot(b, b)
        t = in_plane(gamma, s, torch.zeros_like(s), bb, yy, gamma * gamma + s * s * yy * bb)
        ym, bm = dot(ys, m), dot(b, m)
        return m + ys * (t[0] * ym + t[1] * bm) + b * (t[2] * ym + t[3] * bm)
