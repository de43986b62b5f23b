"""Logarithms of rotations and unitary matrices, up to angles of pi; no member of a batch is lost for another.

At an angle of exactly pi there are two logarithms, and one of them is taken. NaN stays where it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ghor._torch.functions import frozen
from ghor._torch.transforms import differentiated
from ghor.linalg import det, eye, finite, inverse, largest, solve

AFAR, NEAR = -0.3, -0.9  # between these cosines lies the widest gap that parts angles near pi from the others


def log_rotation(R: Tensor) -> Tensor:
    """log R of rotations or unitary matrices (M, N, N), skew; N = 2, 3 in closed form."""
    N = R.shape[-1]
    if R.is_complex():
        return 1j * torch.angle(R) if N == 1 else _by_planes(R)
    if N == 1:
        return R - R
    if N == 2:
        t = torch.atan2(R[..., 1, 0] - R[..., 0, 1], R[..., 0, 0] + R[..., 1, 1])
        return t[..., None, None] * R.new_tensor([[0.0, -1.0], [1.0, 0.0]])
    return hat(rotation_vector(R)) if N == 3 else _by_planes(R)


def hat(w: Tensor) -> Tensor:
    """The matrix of the cross product with w."""
    a, b, c = w.unbind(-1)
    o = torch.zeros_like(a)
    return torch.stack([o, -c, b, c, o, -a, -b, a, o], -1).unflatten(-1, (3, 3))


def rotation_vector(R: Tensor) -> Tensor:
    """The axis times the angle, by the quaternion q: in the longest column of 4 q q^T nothing cancels."""
    d, u = R.diagonal(dim1=-2, dim2=-1), torch.stack([R[..., 2, 1], R[..., 0, 2], R[..., 1, 0]], -1)
    v = torch.stack([R[..., 1, 2], R[..., 2, 0], R[..., 0, 1]], -1)
    t, odd = d.sum(-1), u - v
    (s12, s20, s01), (p, q, r) = (u + v).unbind(-1), (1 + 2 * d - t.unsqueeze(-1)).unbind(-1)
    (a, b, c), K = odd.unbind(-1), 1 + t
    rows = [K, a, b, c], [a, p, s01, s20], [b, s01, q, s12], [c, s20, s12, r]
    columns = torch.stack([torch.stack(x, -1) for x in rows], -2)
    best = torch.stack([K, p, q, r], -1).argmax(-1)[..., None, None].expand(*R.shape[:-2], 1, 4)
    w, v = columns.gather(-2, best)[..., 0, :].split((1, 3), -1)
    w, v = torch.where(w < 0, -w, w), torch.where(w < 0, -v, v)  # abs() has no derivative where w = 0
    square = (v * v).sum(-1, keepdim=True)
    small = square < 1e-8 * w * w
    length = torch.where(small, 1, square).sqrt()
    series = 2 / w.clamp_min(0.1) * (1 - square / (3 * w * w).clamp_min(0.1))
    return v * torch.where(small, series, 2 * torch.atan2(length, w) / length)


def _by_planes(R: Tensor) -> Tensor:
    """log R with two derivatives, for all but repeated angles of pi."""
    good, value = finite(R), frozen(R)
    L = _value(torch.where(good, value, eye(R)))
    if differentiated(R):
        L = _with_derivatives(R, L)
    return torch.where(good, (L - L.mH) / 2, torch.nan)


def _with_derivatives(R: Tensor, L: Tensor) -> Tensor:
    """L as a function of R, by two Newton steps with the derivative of the logarithm at L = U diag(i t) U^H:

    U^H X U  ->  U^H X U * f[t_j, t_k],    f[a, b] = (i a - i b)/(e^ia - e^ib)
    """
    t, U = torch.linalg.eigh(-1j * frozen(L))
    half = (t.unsqueeze(-1) - t.unsqueeze(-2)) / 2
    f = torch.exp(-0.5j * (t.unsqueeze(-1) + t.unsqueeze(-2))) / torch.sinc(half / torch.pi)
    # two angles of pi, of which one became -pi: there is no derivative
    f = torch.where((half.abs() < torch.pi - 4 * torch.finfo(t.dtype).eps), f, 0)

    def newton(X: Tensor) -> Tensor:
        M = U.mH @ (X - frozen(X)).to(U.dtype) @ U
        out = U @ (f * M) @ U.mH
        return out if R.is_complex() else out.real

    first = frozen(L) + newton(R)
    return first + newton(R - torch.linalg.matrix_exp(first))


def _value(R: Tensor) -> Tensor:
    """log R = log(R (I - 2 E)) + pi J: E projects to the eigenvectors whose angle is next to +-pi.

    R (I - 2 E) has the angles t -+ pi there, and J = i on eigenvectors with t > 0, -i on the others; where
    t = pi any J with J^2 = -E will do that is real where R is.
    """
    N, eps = R.shape[-1], torch.finfo(R.dtype).eps
    c, V = torch.linalg.eigh((R + R.mH) / 2)  # the cosines, ascending; those of a real plane twice
    ends = c[..., :1] * 0
    inside = torch.cat([ends + NEAR, c.clamp(NEAR, AFAR), ends + AFAR], -1)
    count, place = inside.diff(dim=-1).argmax(-1, keepdim=True), torch.arange(N, device=R.device)
    V = V * (place < count).to(V).unsqueeze(-2)
    E = V @ V.mH
    L = _below_pi(R - 2 * R @ E)
    B = E @ (L - L.mH) @ E / 2
    if R.is_complex():
        w, U = torch.linalg.eigh(4 * E - 1j * B)  # 4 + t -+ pi on E
        sign = torch.where(w > 2, torch.where(w > 4, -1.0, 1.0), 0.0)
        return L + 1j * torch.pi * (U * sign.unsqueeze(-2)) @ U.mH
    even, odd = V[..., 0 : N - 1 : 2], V[..., 1::2]
    some = odd @ even.mT
    some = some - some.mT  # right angles in E, to start from where t = pi
    B = B + 32 * eps * torch.where((some * B).sum((-2, -1), True) < 0, -some, some)
    U = torch.linalg.eigh(torch.complex(2 * E, B))[1]
    half, last = count // 2, N - 1 - place
    sign = torch.where(last < half, 1.0, torch.where(last < 2 * half, -1.0, 0.0))
    S = (U * sign.to(U).unsqueeze(-2)) @ U.mH
    J = (S.imag - S.imag.mT) / 2
    for _ in range(5):
        J = J @ (3 * E + J @ J) / 2  # towards J^2 = -E
    return L - torch.pi * (J - J.mT) / 2


def _below_pi(R: Tensor) -> Tensor:
    """log R where angles stay away from pi: 2^5 artanh((X - I)(X + I)^-1) of X = R^(1/16)."""
    for _ in range(4):
        R = eye(R) + R
        for _ in range(6):  # sqrt(R) = polar(I + R), by Newton's iteration
            R = (R + inverse(R).mH) / 2
    K = solve(R + eye(R), R - eye(R))
    K = (K - K.mH) / 2
    K2, term, out = K @ K, K, K
    for j in range(3, 25, 2):
        term = term @ K2
        out = out + term / j
    return out * 2.0**5


# -- the canonical metric of Stiefel manifolds ---------------------------------------------------------------

STEPS = 200


def canonical_log(V: Tensor, n: int) -> Tensor:
    """[A; B] of the logarithm in the canonical metric, of V E as seen from E: (M, N, N) -> (M, N, n).

    V is any completion to a rotation. Zimmermann's iteration (arXiv 1604.05054) rotates its last columns,
    V <- V diag(I, exp(-C)), C the lower right block of log V, until C = 0: then log V lies in g^hor. NaN
    where that is not so after STEPS, or V is a reflection.
    """
    N = V.shape[-1]
    if not V.is_complex():  # a reflection has no real logarithm; the last columns may be chosen freely
        flip = torch.where(det(frozen(V)) < 0, -1 if N > n else torch.nan, 1).to(V)[..., None, None]
        V = torch.cat([V[..., :-1], V[..., -1:] * flip], -1)
    if N == n:
        return log_rotation(V)
    Q, off, _ = _rotation(frozen(V), n)
    V = _rotated(V, Q)
    if differentiated(V):  # the errors of derivatives shrink at the rate of those of the value
        steps = _rotation(_rotated(frozen(V), torch.linalg.matrix_exp(_generic(V, n))), n)[2]
        for _ in range(steps):
            V = _rotated(V, torch.linalg.matrix_exp(-log_rotation(V)[..., n:, n:]))
    near = (off <= torch.finfo(V.dtype).eps ** 0.5)[..., None, None]
    return torch.where(near, log_rotation(V)[..., :n], torch.nan)


def _rotation(V: Tensor, n: int) -> tuple[Tensor, Tensor, int]:
    """The rotation of the last columns of V, the largest entry of C then, and the steps."""
    I, Q = eye(V[..., n:, n:]), eye(V[..., n:, n:])
    for step in range(STEPS + 1):
        C = log_rotation(_rotated(V, Q))[..., n:, n:]
        off = C.abs().amax((-2, -1))
        if step == STEPS or largest(off.nan_to_num(0)) <= 4 * torch.finfo(V.dtype).eps * V.shape[-1]:
            break
        Q = Q @ torch.linalg.matrix_exp(torch.where(finite(C), -C, 0 * I))
    return Q, off, step


def _rotated(V: Tensor, Q: Tensor) -> Tensor:
    """V diag(I, Q)."""
    n = V.shape[-1] - Q.shape[-1]
    return torch.cat([V[..., :n], V[..., n:] @ Q], -1)


def _generic(V: Tensor, n: int) -> Tensor:
    """A skew matrix of norm 0.1, of the size of the lower right block of V, without any pattern."""
    p = V.shape[-1] - n
    X = torch.arange(1, p * p + 1, dtype=torch.float64, device="cpu").square().sin().view(p, p)
    X = (X * (1 + 1j) if V.is_complex() else X).to(V)
    S = X - X.mH
    return 0.1 * S / torch.linalg.matrix_norm(S).clamp_min(torch.finfo(V.dtype).tiny)
