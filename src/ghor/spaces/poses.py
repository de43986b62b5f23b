"""SE(d), rigid motions of R^d, and SE(3)/SO(2), positions with orientations.

SE(d) is the group itself, so the section is the point and g^hor is se(d). Lengths have no natural scale, so
no result may depend on the unit of length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ghor._torch.precision import full_precision
from ghor.linalg import phi, solve, wide
from ghor.retraction import Retraction
from ghor.spaces.framed import Framed, orthonormalised
from ghor.spaces.rotations import SpecialOrthogonal
from ghor.spaces.sphere import Sphere

SO = SpecialOrthogonal()
MeanKind = Literal["group", "frechet"]


@dataclass(frozen=True, repr=False)
class SpecialEuclidean(Framed):
    """Poses [R, t], (..., d, d+1): x -> R x + t. g^hor: [omega, v] in the body's frame, omega skew, v in R^d.

    <W, W'> = <omega, omega'>/2 + <v, v'>, in which a turn by one radian is as long as a translation by one
    unit of length. Everything is left-invariant: a change of the world's coordinates changes nothing. SE(d)
    has no metric that is invariant on both sides; `exp` and `log` are those of the group, screw motions, and
    `dist` is the length of `log`.
    """

    holds: ClassVar[str] = "poses [R, t], (..., d, d+1) with d >= 2"

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) >= 2 and shape[-1] == shape[-2] >= 3:
            raise ValueError(
                f"{self} holds {self.holds}, got shape {tuple(shape)}. Of a homogeneous matrix "
                "T = [[R, t], [0, 1]] take T[..., :-1, :]; for rotations alone use ghor.SpecialOrthogonal()"
            )
        self.refuse_shape(shape, len(shape) >= 2 and shape[-1] == shape[-2] + 1 and shape[-2] >= 2)

    def E(self, shape: Sequence[int], dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """[I, 0]."""
        self.check_shape(shape)
        E = torch.zeros(tuple(shape), dtype=dtype, device=device)
        E.diagonal(dim1=-2, dim2=-1).fill_(1)
        return E

    def residual(self, Y: Tensor) -> Tensor:
        """The residual of R as a rotation; NaN where t is not finite."""
        self.check_shape(Y.shape)
        return SO.residual(Y[..., :-1]) + (Y[..., -1] * 0).sum(-1)

    def project(self, X: Tensor) -> Tensor:
        """The nearest point: R by polar decomposition, t as it is."""
        return torch.cat([self.project_part(SO, X[..., :-1], X), X[..., -1:]], -1)

    def section(self, Y: Tensor) -> Tensor:
        """Lambda = Y."""
        return Y

    def apply_section(self, Lambda: Tensor, E: Tensor) -> Tensor:
        return Lambda

    def pullback(self, Lambda: Tensor, G: Tensor) -> Tensor:
        """[R^T G_R - G_R^T R, R^T G_t], omega *exactly* skew."""
        H = Lambda[..., :-1].mT @ G
        return torch.cat([SO.skew(H[..., :-1]), H[..., -1:]], -1)

    def global_rep(self, Lambda: Tensor, Delta: Tensor) -> Tensor:
        """R^T Delta, its left block made skew."""
        return self.hor(Lambda[..., :-1].mT @ Delta)

    def push(self, Lambda: Tensor, W: Tensor) -> Tensor:
        """R W."""
        return Lambda[..., :-1] @ W

    def ghor_inner(self, W: Tensor, V: Tensor) -> Tensor:
        P = W * V  # every coordinate of omega occurs twice, hence the half
        return P[..., :-1].sum((-2, -1)) / 2 + P[..., -1].sum(-1)

    def hor(self, W: Tensor) -> Tensor:
        return torch.cat([SO.skew(W[..., :-1]) / 2, W[..., -1:]], -1)

    def ghor_blocks(self, W: Tensor) -> list[Tensor]:
        """omega and v."""
        return [W[..., :-1], W[..., -1:]]

    def step_length(self, W: Tensor) -> Tensor:
        """||omega||_F: only turns are limited, since a limit for translations would depend on the unit."""
        return torch.linalg.vector_norm(W[..., :-1], dim=(-2, -1)) + _any_length(W[..., -1])

    def angle(self, W: Tensor) -> Tensor:
        """That of omega; translations are not limited."""
        return SO.angle(W[..., :-1])

    def moved(self, Lambda: Tensor, W: Tensor, R: Retraction) -> Tensor:
        """[R, t] + R (R(X) - I), X = [[omega, v], [0, 0]]: by Cayley R (I - omega/2)^-1 W."""
        return Lambda + Lambda[..., :-1] @ _increment(W, R)

    def polish(
        self, Lambda: Tensor, E: Tensor, share: Tensor | float = 1.0, point_only: bool = False
    ) -> Tensor:
        """Repair R by one Newton-Schulz step."""
        orthonormalised(Lambda[..., :-1], share)
        return Lambda

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """Y log(Y^-1 Z): the screw motion from Y to Z, for turns by less than pi."""
        self.check_shape(Y.shape)
        R = Y[..., :-1]
        turn = SO.log(R, Z[..., :-1])
        v = solve(phi(R.mT @ turn), R.mT @ (Z[..., -1:] - Y[..., -1:]))
        return torch.cat([turn, R @ v], -1)

    def mean(self, points: Tensor, weights: Tensor | None = None, kind: MeanKind = "group") -> Tensor:
        """The mean of points (K, ..., *point), of one of two kinds:

            group     sum_k w_k log(Y, points[k]) = 0; it moves with the world and with the body's frame
            frechet   minimises sum_k w_k dist(Y, points[k])^2; it moves with the world

        They differ, because `dist` is the length of a screw motion and not of a geodesic.
        """
        return _mean_of_kind(self, super().mean(points, weights), points, weights, kind)


S2 = Sphere()


@dataclass(frozen=True, repr=False)
class PositionsOrientations(Framed):
    """(t, n), (..., 2, 3): a position and a unit vector, the pose (R, t) with n = R e_3 up to turns about n.

    g^hor: (v, (w_1, w_2, 0)), a translation and a turn in the frame of R. Lambda = [t; n; R e_1; R e_2],
    (..., 4, 3). `exp` is that of SE(3), a screw motion, and `log` its inverse in closed form; `dist` is the
    length of `log`. Everything is invariant under rigid motions.
    """

    holds: ClassVar[str] = "positions and orientations (..., 2, 3)"

    def check_shape(self, shape: Sequence[int]) -> None:
        self.refuse_shape(shape, tuple(shape[-2:]) == (2, 3))

    def E(self, shape: Sequence[int], dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """(0, e_3)."""
        self.check_shape(shape)
        E = torch.zeros(tuple(shape), dtype=dtype, device=device)
        E[..., 1, 2] = 1
        return E

    def residual(self, Y: Tensor) -> Tensor:
        """| |n|^2 - 1 |; NaN where t is not finite."""
        return S2.residual(Y[..., 1, :]) + (Y[..., 0, :] * 0).sum(-1)

    def project(self, X: Tensor) -> Tensor:
        """The nearest point (t, n/|n|)."""
        return torch.stack([X[..., 0, :], self.project_part(S2, X[..., 1, :], X)], -2)

    def section(self, Y: Tensor) -> Tensor:
        """R e_1 and R e_2 from n, after Duff et al. (2017), Building an orthonormal basis; I at n = e_3."""
        x, y, z = Y[..., 1, :].unbind(-1)
        s = torch.where(z < 0, -1, 1).to(z.dtype)  # not torch.sign, which is 0 at z = 0
        a = -1 / (s + z)
        b = x * y * a
        e1 = torch.stack([1 + s * x * x * a, s * b, -s * x], -1)
        e2 = torch.stack([b, s + y * y * a, -y], -1)
        return torch.cat([Y, torch.stack([e1, e2], -2)], -2)

    def apply_section(self, Lambda: Tensor, E: Tensor) -> Tensor:
        return Lambda[..., :2, :]

    def pullback(self, Lambda: Tensor, G: Tensor) -> Tensor:
        """(R^T G_t, (-g_2, g_1, 0)), g = R^T G_n."""
        return self.global_rep(Lambda, G)

    def global_rep(self, Lambda: Tensor, Delta: Tensor) -> Tensor:
        H = Delta @ _rotation(Lambda)
        g1, g2, _ = H[..., 1, :].unbind(-1)
        return torch.stack([H[..., 0, :], torch.stack([-g2, g1, torch.zeros_like(g1)], -1)], -2)

    def push(self, Lambda: Tensor, W: Tensor) -> Tensor:
        """(R v, R (w x e_3))."""
        w1, w2, w3 = W[..., 1, :].unbind(-1)
        turn = torch.stack([w2, -w1, torch.zeros_like(w3)], -1)
        return torch.stack([W[..., 0, :], turn], -2) @ _rotation(Lambda).mT

    def hor(self, W: Tensor) -> Tensor:
        """W without its turn about e_3."""
        return W * (W.new_tensor([[1, 1, 1], [1, 1, 0]]))

    def ghor_blocks(self, W: Tensor) -> list[Tensor]:
        """v and w."""
        return [W[..., 0, :, None], W[..., 1, :, None]]

    def step_length(self, W: Tensor) -> Tensor:
        """|w|; see `SpecialEuclidean.step_length`."""
        return torch.linalg.vector_norm(W[..., 1, :], dim=-1) + _any_length(W[..., 0, :])

    def moved(self, Lambda: Tensor, W: Tensor, R: Retraction) -> Tensor:
        """[R, t] + R (R(X) - I), X = [[w^, v], [0, 0]], by rows."""
        X = torch.cat([_hat(W[..., 1, :]), W[..., 0, :].unsqueeze(-1)], -1)
        return Lambda + _increment(X, R)[..., [3, 2, 0, 1]].mT @ _rotation(Lambda).mT

    def polish(
        self, Lambda: Tensor, E: Tensor, share: Tensor | float = 1.0, point_only: bool = False
    ) -> Tensor:
        """Repair R, or n alone, by one Newton-Schulz step."""
        if point_only:
            S2.implicit_polish(Lambda[..., 1, :], None, share)
        else:
            orthonormalised(Lambda[..., 1:, :], share)
        return Lambda

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """n turns along the great circle, and v = phi(w^)^-1 R^T (t' - t)."""
        Lambda = self.section(Y)
        turn = torch.stack([Z[..., 0, :] - Y[..., 0, :], S2.log(Y[..., 1, :], Z[..., 1, :])], -2)
        way, w = self.global_rep(Lambda, turn).unbind(-2)
        v = solve(phi(_hat(w)), way.unsqueeze(-1)).squeeze(-1)
        return self.push(Lambda, torch.stack([v, w], -2))

    def mean(self, points: Tensor, weights: Tensor | None = None, kind: MeanKind = "group") -> Tensor:
        """The mean of kind "group" or "frechet", see `SpecialEuclidean.mean`."""
        return _mean_of_kind(self, super().mean(points, weights), points, weights, kind)


@full_precision()
def _mean_of_kind(space: Framed, Y: Tensor, points: Tensor, weights: Tensor | None, kind: MeanKind) -> Tensor:
    """The group mean Y, or from there the Frechet mean: Newton's method, steps halved until f falls."""
    if kind not in ("group", "frechet"):
        raise ValueError(f"{space}.mean is of kind 'group' or 'frechet', got {kind!r}")
    if kind == "group" or not Y.numel():
        return Y
    X = space.project(wide(points.detach()))
    w = X.new_ones(len(X)) if weights is None else weights.detach()
    w = w.to(X).reshape(*w.shape, *[1] * (X.dim() - 2 - w.dim()))
    X = torch.where(w[..., None, None] > 0, X, wide(Y))

    def squares(Y: Tensor) -> Tensor:
        V = space.log(Y.expand_as(X), X)
        return (w * space.metric(Y.expand_as(X), V, V)).sum(0)

    Y = space.project(wide(Y))
    for _ in range(50):
        Lambda = space.section(Y)
        with torch.enable_grad():
            W = torch.zeros_like(Y, requires_grad=True)
            value = squares(space.exp(Y, space.push(Lambda, space.hor(W))))
            (G,) = torch.autograd.grad(value.sum(), W, create_graph=True)
            G = G.flatten(-2)
            rows = [torch.autograd.grad(g.sum(), W, retain_graph=True)[0] for g in G.unbind(-1)]
        value, G = value.detach(), G.detach()
        H = torch.stack([row.flatten(-2) for row in rows], -2)
        # Scaled to the diagonal 1, so that no unit of length counts; coordinates that are not there have 0.
        d = H.diagonal(dim1=-2, dim2=-1).abs()
        d = torch.where(d > 0, d, 1).rsqrt()
        e, V = torch.linalg.eigh(d[..., :, None] * (H + H.mT) / 2 * d[..., None, :])
        e = torch.where(e.abs() > 1e-8, e.abs(), torch.inf)  # |e|: downhill also where f is not convex
        W = -d * (V @ ((V.mT @ (d * G)[..., None]) / e[..., None]))[..., 0]
        Delta = space.push(Lambda, space.hor(W.unflatten(-1, Y.shape[-2:])))
        slope, step = (G * W).sum(-1), torch.ones_like(value)
        if bool((-slope <= 1e-20 * value).all()):
            break
        for _ in range(60):
            moved = space.exp(Y, Delta * step[..., None, None])
            falls = squares(moved) < value
            if bool(falls.all()):
                break
            step = torch.where(falls, step, step / 2)
        Y = torch.where(falls[..., None, None], moved, Y)
        if not bool(falls.any()):  # nothing is left but rounding
            break
    return space.project(Y).to(points.dtype)


def _increment(W: Tensor, R: Retraction) -> Tensor:
    """[R(omega) - I, u] of W = [omega, v]: R(X) - I for X = [[omega, v], [0, 0]] without its last row.

    exp(X) - I = phi(omega) [omega, v]. `R.dense(X)` would give the same, but with more squarings for a longer
    v, so it would depend on the unit of length. Cayley's solve is linear in v.
    """
    if R.name == "geodesic":
        return phi(W[..., :-1]) @ W
    return R.dense(torch.nn.functional.pad(W, (0, 0, 0, 1)))[..., :-1, :]


def _any_length(v: Tensor) -> Tensor:
    """0 where v = 0, NaN where v is not finite, and the smallest positive number otherwise.

    Added to the length of a turn, it makes a pure translation count as a step, whatever the unit.
    """
    return (v != 0).any(-1).to(v.dtype) * torch.finfo(v.dtype).tiny + (0 * v).sum(-1)


def _rotation(Lambda: Tensor) -> Tensor:
    """R, whose columns are the rows 2, 3 and 1 of Lambda, counted from 0."""
    return torch.cat([Lambda[..., 2:, :], Lambda[..., 1:2, :]], -2).mT


def _hat(w: Tensor) -> Tensor:
    """The matrix of the cross product with w."""
    a, b, c = w.unbind(-1)
    o = torch.zeros_like(a)
    return torch.stack([o, -c, b, c, o, -a, -b, a, o], -1).unflatten(-1, (3, 3))
