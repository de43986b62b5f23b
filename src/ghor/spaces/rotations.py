"""Rotations: SO(N), U(N), and logarithms that are never lost for a batch because of one of its members."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ghor.linalg import eye
from ghor.spaces.stiefel import Stiefel
from ghor.spaces.vectors import dot


@dataclass(frozen=True, repr=False)
class OrthogonalGroup(Stiefel):
    """SO(N) and U(N): Lambda is the point."""

    def complement(self, y: Tensor) -> Tensor:
        return y[..., :0]

    def draw(self, normal: Tensor) -> Tensor:
        """Haar, det = 1 for real matrices."""
        Q = super().draw(normal)
        return Q if Q.is_complex() else torch.cat([Q[..., :-1], Q[..., -1:] * torch.linalg.det(Q)[..., None, None]], -1)


def log_rotation(R: Tensor) -> Tensor:
    """log R of rotations (..., N, N), skew; at angles of pi one of the logarithms."""
    N = R.shape[-1]
    if N == 2:
        t = torch.atan2(R[..., 1, 0] - R[..., 0, 1], R[..., 0, 0] + R[..., 1, 1])
        return t[..., None, None] * R.new_tensor([[0.0, -1.0], [1.0, 0.0]])
    return hat(rotation_vector(R)) if N == 3 else log_by_planes(R)


def hat(w: Tensor) -> Tensor:
    """The matrix of the cross product with w."""
    a, b, c = w.unbind(-1)
    o = torch.zeros_like(a)
    return torch.stack([o, -c, b, c, o, -a, -b, a, o], -1).unflatten(-1, (3, 3))


def rotation_vector(R: Tensor) -> Tensor:
    """By the quaternion: the four columns of 4 q q^T, of which the longest has no cancellation."""
    d, u = R.diagonal(dim1=-2, dim2=-1), torch.stack([R[..., 2, 1], R[..., 0, 2], R[..., 1, 0]], -1)
    v = torch.stack([R[..., 1, 2], R[..., 2, 0], R[..., 0, 1]], -1)
    t, odd, (s01, s12, s20) = d.sum(-1), u - v, (R + R.mT)[..., [0, 1, 2], [1, 2, 0]].unbind(-1)
    p, q, r = (1 + 2 * d - t.unsqueeze(-1)).unbind(-1)
    (a, b, c), K = odd.unbind(-1), 1 + t
    columns = torch.stack([torch.stack(x, -1) for x in ([K, a, b, c], [a, p, s01, s20], [b, s01, q, s12], [c, s20, s12, r])], -2)
    best = torch.stack([K, p, q, r], -1).argmax(-1)[..., None, None].expand(*R.shape[:-2], 1, 4)
    w, v = columns.gather(-2, best)[..., 0, :].split((1, 3), -1)
    w, v = w.abs(), torch.where(w < 0, -v, v)
    square = dot(v, v)
    small = square < 1e-8 * w * w
    size = torch.where(small, 1, square).sqrt()
    return v * torch.where(
        small, 2 / w.clamp_min(0.1) * (1 - square / (3 * w * w).clamp_min(0.1)), 2 * torch.atan2(size, w) / size
    )


def log_by_planes(R: Tensor) -> Tensor:
    """log R = log(R (I - 2 E)) + pi J: E projects to the planes whose angle is next to pi, J is a right angle in each.

    R (I - 2 E) has angles -delta there, and J = -sign(log) of it, a skew matrix; where delta = 0 any will do.
    """
    N, eps = R.shape[-1], torch.finfo(R.dtype).eps
    c, V = torch.linalg.eigh((R + R.mT) / 2)  # ascending pairs, cos of the angles
    pairs = ((c[..., 0 : N - 1 : 2] + c[..., 1::2]) < -1.6).to(R).unsqueeze(-2)
    even, odd = V[..., 0 : N - 1 : 2] * pairs, V[..., 1::2] * pairs
    E = even @ even.mT + odd @ odd.mT
    L = log_below_pi(R - 2 * R @ E)
    some = odd @ even.mT
    some = some - some.mT  # a right angle in planes of E, to start from where delta = 0
    Lb = E @ (L - L.mT) @ E / 2
    Lb = Lb + 32 * eps * torch.where((some * Lb).sum((-2, -1), True) < 0, -some, some)
    U = torch.linalg.eigh(torch.complex(2 * E, Lb))[1]
    m, place = pairs.sum(-1, keepdim=True), torch.arange(N, 0, -1, device=R.device)
    S = (U * torch.where(place <= m, 1.0, torch.where(place <= 2 * m, -1.0, 0.0)).to(U)) @ U.mH
    J = (S.imag - S.imag.mT) / 2
    for _ in range(5):
        J = J @ (3 * E + J @ J) / 2  # towards J^2 = -E
    return L - torch.pi * (J - J.mT) / 2


def log_below_pi(R: Tensor) -> Tensor:
    """2^(k+1) artanh of the k-th square root of R, where angles stay away from pi; k and Newton's steps are fixed."""
    I = eye(R)
    for _ in range(4):
        X = I + R
        for _ in range(6):
            X = (X + torch.linalg.inv_ex(X)[0].mT) / 2
        R = X
    K = torch.linalg.solve_ex(R + I, R - I)[0]
    K = (K - K.mT) / 2
    K2, term, out = K @ K, K, K
    for j in range(3, 25, 2):
        term = term @ K2
        out = out + term / j
    return out * 2.0**5


@dataclass(frozen=True, repr=False)
class SpecialOrthogonal(OrthogonalGroup):
    """SO(N)."""

    complex: ClassVar[bool] = False


@dataclass(frozen=True, repr=False)
class Unitary(OrthogonalGroup):
    """U(N)."""
