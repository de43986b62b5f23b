"""SE(d), rigid motions of R^d, and SE(3)/SO(2), positions with orientations.

Lengths have no natural scale, so no result depends on the unit of length: only turns are limited.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ghor.linalg import eye, inverse, size
from ghor.spaces.group import GroupSpace
from ghor.spaces.logarithms import hat, log_rotation
from ghor.spaces.means import center, least_squares, mean
from ghor.spaces.messages import no_nearest
from ghor.spaces.points import on_points
from ghor.spaces.retraction import Retraction, geodesic
from ghor.spaces.rotations import SpecialOrthogonal
from ghor.spaces.sphere import Sphere

SO, S2 = SpecialOrthogonal().geometry, Sphere().geometry
MeanKind = Literal["group", "frechet"]


@dataclass(frozen=True, repr=False)
class SpecialEuclidean(GroupSpace):
    """Poses [R, t], (..., d, d+1): x -> R x + t. g^hor: [omega, v] in the body's frame, omega skew, v in R^d.

    <W, W'> = <omega, omega'>/2 + <v, v'>, in which a turn by one radian is as long as a translation by one
    unit of length. Everything is left-invariant: a change of the world's coordinates changes nothing. SE(d)
    has no metric that is invariant on both sides; `exp` and `log` are those of the group, screw motions, and
    `dist` is the length of `log`.
    """

    compact: ClassVar[bool] = False
    holds: ClassVar[str] = "poses [R, t], (..., d, d+1) with d >= 2"

    def check_size(self, N: int, n: int) -> None:
        if N == n >= 3:
            raise ValueError(
                f"holds {self.holds}: of a homogeneous matrix T = [[R, t], [0, 1]] take T[..., :-1, :]; for "
                "rotations alone use ghor.SpecialOrthogonal()"
            )
        if not n == N + 1 >= 3:
            raise ValueError(f"holds {self.holds}")

    # -- points

    @on_points("p>n")
    def residual(self, Y: Tensor) -> Tensor:
        """The residual of R as a rotation; NaN where t is not finite."""
        return SO.residual(Y[..., :-1]) + (Y[..., -1] * 0).sum(-1)

    def nearest(self, x: Tensor) -> Tensor:
        return torch.cat([SO.nearest(x[..., :-1]), x[..., -1:]], -1)

    def check_near(self, x: Tensor, y: Tensor, shape: Sequence[int]) -> None:
        try:
            SO.check_near(x[..., :-1], y[..., :-1], shape)
        except ValueError:
            raise ValueError(no_nearest(self, shape)) from None

    def draw(self, normal: Tensor) -> Tensor:
        """Uniform rotations, normal positions."""
        return torch.cat([SO.draw(normal[..., :-1]), normal[..., -1:]], -1)

    # -- Algorithm 3: Lambda is the pose L

    def hor_(self, w: Tensor, factor: float = 0.5) -> None:
        w[..., :-1] = (w[..., :-1] - w[..., :-1].mT) * factor

    def positions(self, x: Tensor) -> Tensor:
        """t, and v."""
        return x[..., -1:]

    def hor_blocks(self, w: Tensor) -> list[Tensor]:
        """omega and v."""
        return [w[..., :-1], w[..., -1:]]

    def hor_inner(self, w: Tensor, v: Tensor) -> Tensor:
        """<omega, omega'>/2 + <v, v'>: every coordinate of omega occurs twice."""
        P = w * v
        return P[..., :-1].sum((-2, -1)) / 2 + P[..., -1].sum(-1)

    def longest(self, y: Tensor) -> float:
        return 4 * math.sqrt(y.shape[-2])

    def length(self, w: Tensor) -> Tensor:
        """||omega||_F: a limit of translations would depend on the unit."""
        return size(w[..., :-1]) + any_length(w[..., -1:])

    def angle(self, w: Tensor) -> Tensor:
        """That of omega; translations are not limited."""
        return SO.angle(w[..., :-1])

    def coordinates(self, L: Tensor, g: Tensor) -> Tensor:
        """[R^T G_R - G_R^T R, R^T G_t], omega *exactly* skew."""
        H = L[..., :-1].mT @ g
        return torch.cat([H[..., :-1] - H[..., :-1].mT, H[..., -1:]], -1)

    def global_rep(self, L: Tensor, v: Tensor) -> Tensor:
        """R^T Delta, its left block made skew."""
        omega, t = self.coordinates(L, v).split((v.shape[-2], 1), -1)
        return torch.cat([omega / 2, t], -1)

    def velocity(self, L: Tensor, w: Tensor) -> Tensor:
        """R W."""
        return L[..., :-1] @ w

    def moved(self, L: Tensor, w: Tensor, R: Retraction, longest: float, eps: float) -> Tensor:
        """[R, t] + R ratio(omega) [omega, v]: linear in v, so that its unit does not count."""
        return L + L[..., :-1] @ (R.ratio(w[..., :-1], longest) @ w)

    def polish_(self, L: Tensor, moved: Tensor) -> None:
        """R <- R (3 I - R^T R)/2 where poses have moved."""
        X = L[..., :-1]
        X.add_(X @ (eye(X) - X.mT @ X) * moved, alpha=0.5)

    # -- logarithms

    @on_points("pp>v")
    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """Y log(Y^-1 Z): the screw motion from Y to Z; of a turn by pi, one of the two."""
        R = Y[..., :-1]
        D = R.mT @ (Z - Y)  # Y^-1 Z - [I, 0], with the digits of near poses
        omega = log_rotation(eye(R) + D[..., :-1])
        return R @ torch.cat([omega, screw_velocity(omega, D[..., -1:])], -1)

    def mean(self, points: Tensor, weights: Tensor | None = None, kind: MeanKind = "group") -> Tensor:
        """The mean of points (K, ..., *point), of one of two kinds:

            group     sum_k w_k log(Y, points[k]) = 0; it moves with the world and with the body's frame
            frechet   minimises sum_k w_k dist(Y, points[k])^2; it moves with the world

        They differ, because `dist` is the length of a screw motion and not of a geodesic.
        """
        of = {"group": center, "frechet": least_squares}
        if kind not in of:
            raise ValueError(f"{self}.mean is of kind 'group' or 'frechet', got {kind!r}")
        return mean(self, points, weights, of[kind])


@dataclass(frozen=True, repr=False)
class PositionsOrientations(SpecialEuclidean):
    """(t, n), (..., 2, 3): a position and a unit vector, the pose (R, t) with n = R e_3 up to turns about n.

    g^hor: (v, (w_1, w_2, 0)), a translation and a turn in the frame of R. `exp` is that of SE(3), a screw
    motion, and `log` its inverse in closed form; `dist` is the length of `log`. Everything is invariant under
    rigid motions.
    """

    holds: ClassVar[str] = "positions and orientations (..., 2, 3)"

    def check_size(self, N: int, n: int) -> None:
        if (N, n) != (2, 3):
            raise ValueError(f"holds {self.holds}")

    # -- points

    @on_points("p>n")
    def residual(self, Y: Tensor) -> Tensor:
        """| |n|^2 - 1 |; NaN where t is not finite."""
        return S2.residual(Y[..., 1, :, None]) + (Y[..., 0, :] * 0).sum(-1)

    def nearest(self, x: Tensor) -> Tensor:
        return torch.stack([x[..., 0, :], S2.nearest(x[..., 1, :, None])[..., 0]], -2)

    def check_near(self, x: Tensor, y: Tensor, shape: Sequence[int]) -> None:
        GroupSpace.check_near(self, x, y, shape)

    def draw(self, normal: Tensor) -> Tensor:
        """Normal positions, uniform orientations."""
        return self.nearest(normal)

    def origin(self, y: Tensor) -> Tensor:
        """(0, e_3)."""
        return y.new_tensor([[0.0, 0, 0], [0, 0, 1]])

    # -- Algorithm 3: Lambda is a pose [R, t]

    def hor_(self, w: Tensor, factor: float = 0.5) -> None:
        w[..., 1, 2] = 0

    def positions(self, x: Tensor) -> Tensor:
        """t, and v."""
        return x[..., :1, :]

    def hor_blocks(self, w: Tensor) -> list[Tensor]:
        """v and w."""
        return [w[..., 0, :, None], w[..., 1, :, None]]

    def hor_inner(self, w: Tensor, v: Tensor) -> Tensor:
        return (w * v).sum((-2, -1))

    def longest(self, y: Tensor) -> float:
        return 4.0

    def length(self, w: Tensor) -> Tensor:
        """|w|, see `SpecialEuclidean.length`."""
        return size(w[..., 1:, :]) + any_length(w[..., :1, :].mT)

    def angle(self, w: Tensor) -> Tensor:
        """|w|."""
        return size(w[..., 1:, :])[..., 0, 0]

    def section(self, y: Tensor) -> Tensor:
        """R = [e_1, e_2, n] after Duff et al. (2017), Building an orthonormal basis; I at n = e_3."""
        a, b, c = y[..., 1, :].unbind(-1)
        s = torch.where(c < 0, -1, 1).to(c)  # not torch.sign, which is 0 at 0
        f = -1 / (s + c)
        e1 = torch.stack([1 + s * a * a * f, s * a * b * f, -s * a], -1)
        e2 = torch.stack([a * b * f, s + b * b * f, -b], -1)
        return torch.stack([e1, e2, y[..., 1, :], y[..., 0, :]], -1)

    def point(self, L: Tensor) -> Tensor:
        return L[..., [3, 2]].mT

    def transported(self, L: Tensor, y: Tensor) -> Tensor:
        """R turned in the plane of n and n', unless these are nearly opposite.

        e - (n + n') n'.e/(1 + n.n')
        """
        t, n = y[..., 0, :, None], y[..., 1, :, None]
        frame, old = L[..., :2], L[..., 2:3]
        c = old.mT @ n
        turned = torch.cat([frame - (old + n) * ((n.mT @ frame) / (1 + c)), n, t], -1)
        return torch.where(c > -0.9, turned, self.section(y))

    def coordinates(self, L: Tensor, g: Tensor) -> Tensor:
        """(R^T G_t, (-g_2, g_1, 0)), g = R^T G_n."""
        H = g @ L[..., :3]
        a, b, _ = H[..., 1, :].unbind(-1)
        return torch.stack([H[..., 0, :], torch.stack([-b, a, torch.zeros_like(a)], -1)], -2)

    def global_rep(self, L: Tensor, v: Tensor) -> Tensor:
        return self.coordinates(L, v)

    def velocity(self, L: Tensor, w: Tensor) -> Tensor:
        """(R v, R (w x e_3))."""
        return self.point(super().velocity(L, of_pose(w)))

    def moved(self, L: Tensor, w: Tensor, R: Retraction, longest: float, eps: float) -> Tensor:
        return super().moved(L, of_pose(w), R, 1.5 * longest, eps)

    # -- logarithms

    @on_points("pp>v")
    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """n turns along the great circle; of opposite orientations, along one of them."""
        L, n = self.section(Y), S2.log(Y[..., 1, :, None], Z[..., 1, :, None])[..., 0]
        way, w = self.global_rep(L, torch.stack([Z[..., 0, :] - Y[..., 0, :], n], -2)).unbind(-2)
        return self.velocity(L, torch.stack([screw_velocity(hat(w), way.unsqueeze(-1))[..., 0], w], -2))


def of_pose(w: Tensor) -> Tensor:
    """[omega, v] of (v, w)."""
    return torch.cat([hat(w[..., 1, :]), w[..., :1, :].mT], -1)


def any_length(v: Tensor) -> Tensor:
    """0 where v = 0, NaN where it is not finite, else the smallest positive number, (M, d, 1) -> (M, 1, 1).

    Added to the length of a turn, it makes a pure translation count as a step, whatever the unit.
    """
    some = (v != 0).any(-2, keepdim=True).to(v.dtype)
    return some * torch.finfo(v.dtype).tiny + (0 * v).sum(-2, keepdim=True)


def screw_velocity(omega: Tensor, t: Tensor) -> Tensor:
    """v of the screw motion [omega, v] that ends at t = phi(omega) v, phi(X) = (exp(X) - I)/X.

    For d = 2 and 3, where theta is the one angle, phi^-1 = I - omega/2 + c omega^2 with

        c = (1 - theta/2 cot(theta/2))/theta^2
    """
    if omega.shape[-1] > 3:
        return inverse(geodesic.ratio(omega, 4 * omega.shape[-1] ** 0.5)) @ t
    s = (omega * omega).sum((-2, -1), keepdim=True) / 2  # theta^2
    small = s < 1e-2
    h = torch.where(small, 1, s).sqrt() / 2
    series = (1 + s / 60 * (1 + s / 42 * (1 + s / 40))) / 12
    c = torch.where(small, series, (1 - h * h.cos() / h.sin()) / (4 * h * h))
    turned = omega @ t
    return t - turned / 2 + c * (omega @ turned)
