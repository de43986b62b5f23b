"""Poses, and positions with orientations: SE(d) and SE(3)/SO(2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ghor.linalg import eye, polar, size
from ghor.spaces.retraction import Retraction, geodesic
from ghor.layout import Layout
from ghor.spaces.base import GroupSpace, on_points
from ghor.spaces.rotations import SpecialOrthogonal, hat, log_rotation
from ghor.spaces.stiefel import Stiefel


@dataclass(frozen=True, repr=False)
class SpecialEuclidean(GroupSpace):
    """SE(d): [R, t], (M, d, d+1); W = [omega, v] in the body's frame."""

    compact: ClassVar[bool] = False

    @cached_property
    def layout(self) -> Layout:
        return Layout(tall=False)

    def check_size(self, N: int, n: int) -> None:
        if n != N + 1:
            raise ValueError("it is not [R, t]")

    def longest(self, y: Tensor) -> float:
        return 4 * y.shape[-2] ** 0.5

    def length(self, w: Tensor) -> Tensor:
        """Of omega: a limit of translations would depend on the unit; but any v is a step."""
        return (
            size(w[..., :-1])
            + (w[..., -1:] != 0).any(-2, keepdim=True) * torch.finfo(w.dtype).tiny
            + (0 * w[..., -1:]).sum(-2, keepdim=True)
        )

    def hor_(self, w: Tensor, factor: float = 0.5) -> None:
        w[..., :-1] = (w[..., :-1] - w[..., :-1].mT) * factor

    def hor_blocks(self, w: Tensor) -> list[Tensor]:
        """omega and v."""
        return [w[..., :-1], w[..., -1:]]

    def hor_inner(self, w: Tensor, v: Tensor) -> Tensor:
        return (w * v)[..., :-1].sum((-2, -1)) / 2 + (w * v)[..., -1].sum(-1)

    def log(self, L: Tensor) -> Tensor:
        """[omega, v] of a pose [R, t] seen from I, a screw: t = phi(omega) v, phi^-1 = I - omega/2 + c omega^2.

        For d = 2, 3 c = (1 - theta/2 cot(theta/2))/theta^2, of the one angle that there is.
        """
        omega, t = log_rotation(L[..., :-1]), L[..., -1:]
        if omega.shape[-1] > 3:
            return torch.cat([omega, torch.linalg.solve_ex(geodesic.ratio(omega, 8.0), t)[0]], -1)
        s = (omega * omega).sum((-2, -1), True) / 2
        small = s < 1e-2
        h = torch.where(small, 1, s).sqrt() / 2
        c = torch.where(small, (1 + s / 60 * (1 + s / 42 * (1 + s / 40))) / 12, (1 - h * h.cos() / h.sin()) / (4 * h * h))
        return torch.cat([omega, t - omega @ t / 2 + c * (omega @ (omega @ t))], -1)

    def coordinates(self, L: Tensor, g: Tensor) -> Tensor:
        H = L[..., :-1].mT @ g
        return torch.cat([H[..., :-1] - H[..., :-1].mT, H[..., -1:]], -1)

    def moved(self, L: Tensor, w: Tensor, R: Retraction, longest: float, eps: float) -> Tensor:
        """[R, t] + R ratio(omega) [omega, v], which does not depend on the unit of v."""
        return L + L[..., :-1] @ (R.ratio(w[..., :-1], longest) @ w)

    def polish_(self, L: Tensor, moved: Tensor) -> None:
        X = L[..., :-1]
        X.add_(X @ (eye(X) - X.mT @ X) * moved, alpha=0.5)

    @on_points("p>n")
    def residual(self, y: Tensor) -> Tensor:
        return Stiefel().residual(y[..., :-1]) + (y[..., -1] * 0).sum(-1)

    def nearest(self, x: Tensor) -> Tensor:
        return torch.cat([polar(x[..., :-1]), x[..., -1:]], -1)

    def draw(self, normal: Tensor) -> Tensor:
        return torch.cat([SpecialOrthogonal().draw(normal[..., :-1]), normal[..., -1:]], -1)


@dataclass(frozen=True, repr=False)
class PositionsOrientations(SpecialEuclidean):
    """SE(3)/SO(2): (t, n = R e_3), (M, 2, 3), the poses up to turns about n; W = (v, (w_1, w_2, 0))."""

    exact: ClassVar[bool] = False

    def check_size(self, N: int, n: int) -> None:
        if (N, n) != (2, 3):
            raise ValueError("it is not a position and an orientation, (2, 3)")

    def longest(self, y: Tensor) -> float:
        return 4.0

    def length(self, w: Tensor) -> Tensor:
        return super().length(w.flip(-2).mT)

    def hor_(self, w: Tensor, factor: float = 0.5) -> None:
        w[..., 1, 2] = 0

    def origin(self, y: Tensor) -> Tensor:
        return y.new_tensor([[0.0, 0, 0], [0, 0, 1]])

    def section(self, y: Tensor) -> Tensor:
        """R = [e_1, e_2, n] after Duff et al. (2017); I at n = e_3."""
        x, y_, z = y[..., 1, :].unbind(-1)
        s = torch.where(z < 0, -1.0, 1.0).to(z)
        a = -1 / (s + z)
        e1 = torch.stack([1 + s * x * x * a, s * x * y_ * a, -s * x], -1)
        e2 = torch.stack([x * y_ * a, s + y_ * y_ * a, -y_], -1)
        return torch.stack([e1, e2, y[..., 1, :], y[..., 0, :]], -1)

    def point(self, L: Tensor) -> Tensor:
        return L[..., [3, 2]].mT

    def coordinates(self, L: Tensor, g: Tensor) -> Tensor:
        H = g @ L[..., :3]
        return torch.stack([H[..., 0, :], torch.stack([-H[..., 1, 1], H[..., 1, 0], 0 * H[..., 1, 0]], -1)], -2)

    def moved(self, L: Tensor, w: Tensor, R: Retraction, longest: float, eps: float) -> Tensor:
        return super().moved(L, torch.cat([hat(w[..., 1, :]), w[..., :1, :].mT], -1), R, 1.5 * longest, eps)

    def hor_blocks(self, w: Tensor) -> list[Tensor]:
        """v and w."""
        return [w[..., 0, :, None], w[..., 1, :, None]]

    def hor_inner(self, w: Tensor, v: Tensor) -> Tensor:
        return (w * v).sum((-2, -1))

    @on_points("p>n")
    def residual(self, y: Tensor) -> Tensor:
        return ((y[..., 1, :] ** 2).sum(-1) - 1).abs() + (y[..., 0, :] * 0).sum(-1)

    def nearest(self, x: Tensor) -> Tensor:
        return torch.stack([x[..., 0, :], x[..., 1, :] / x[..., 1, :].norm(dim=-1, keepdim=True)], -2)

    def draw(self, normal: Tensor) -> Tensor:
        return self.nearest(normal)
