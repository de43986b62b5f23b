"""Laws of conditioning: geometry against references of 60 digits, up to the condition that a space names."""

import math

import mpmath as mp
import pytest
import torch
from helpers.exact import error, exact, rounded
from helpers.table import frame, name

import ghor

SPD = ghor.SPD()
N = 3
# up to the limit that SPD's docstring names, 1/(n eps): 2.8e6 and 1.5e15
LIMITS = [
    (torch.float32, 1e2),
    (torch.float32, 1e5),
    (torch.float32, 1e6),
    (torch.float64, 1e6),
    (torch.float64, 1e10),
    (torch.float64, 5e14),
]
each_condition = pytest.mark.parametrize(("dtype", "condition"), LIMITS, ids=name)


def matrix(gen, condition, dtype):
    """A positive definite matrix with eigenvalues from 1 to 1/condition in random directions, as rounded."""
    Q = torch.linalg.qr(torch.randn(N, N, generator=gen, dtype=torch.float64))[0]
    P = (Q * condition ** -torch.linspace(0, 1, N, dtype=torch.float64)) @ Q.mT
    return ((P + P.mT) / 2).to(dtype)


def function(S, f):
    """f(S) of a symmetric matrix."""
    w, V = mp.eigsy((S + S.T) / 2)
    return V * mp.diag([f(x) for x in w]) * V.T


def whitened(A, X):
    """A^-1/2 X A^-1/2."""
    R = function(A, lambda x: 1 / mp.sqrt(x))
    return R * X * R


def dist(A, B):
    return mp.norm(function(whitened(A, B), mp.log))


@each_condition
def test_distances(dtype, condition, gen):
    """The smallest eigenvalue of a Cholesky factor's matrix is off by n eps cond(P) at most, relatively."""
    for _ in range(4):
        Y, Z = matrix(gen, condition, dtype), matrix(gen, condition, dtype)
        error = abs(float(SPD.dist(Y, Z)) - dist(exact(Y), exact(Z)))
        assert error <= N * torch.finfo(dtype).eps * condition


@each_condition
def test_distances_of_near_points(dtype, condition, gen):
    """Relative to the distance itself: Z - Y is exact, and its coordinates lose n eps cond(P)."""
    Y = matrix(gen, condition, dtype)
    Z = Y * (1 + 64 * torch.finfo(dtype).eps)
    true = dist(exact(Y), exact(Z))
    assert abs(float(SPD.dist(Y, Z)) - true) <= N * torch.finfo(dtype).eps * condition * true


@each_condition
def test_logarithms(dtype, condition, gen):
    """Relative to ||Y||: the coordinates are as exact as distances are."""
    for _ in range(3):
        Y, Z = matrix(gen, condition, dtype), matrix(gen, condition, dtype)
        A, B = exact(Y), exact(Z)
        R = function(A, mp.sqrt)
        true = R * function(whitened(A, B), mp.log) * R
        assert mp.norm(exact(SPD.log(Y, Z)) - true) <= N * torch.finfo(dtype).eps * condition * mp.norm(A)


@each_condition
@pytest.mark.parametrize("shrink", [0.0, -23.0], ids=["size one", "size 1e-10"])
def test_exponentials(dtype, condition, shrink, gen):
    """From well-conditioned points to matrices of this condition, of any size: 16 n eps of the result's norm,
    for ||W|| <= 33, and no more than n eps cond in the metric, in which small eigenvalues count."""
    Y, Q = matrix(gen, 3.0, dtype), torch.linalg.qr(torch.randn(N, N, generator=gen, dtype=torch.float64))[0]
    S = (Q * (shrink - torch.linspace(0, math.log(condition), N, dtype=torch.float64))) @ Q.mT
    L = torch.linalg.cholesky(Y.double())
    Delta = (L @ (S + S.mT) @ L.mT / 2).to(dtype)
    Delta, A = (Delta + Delta.mT) / 2, exact(Y)
    R = function(A, mp.sqrt)
    true, P = R * function(whitened(A, exact(Delta)), mp.exp) * R, exact(SPD.exp(Y, Delta))
    assert mp.norm(P - true) <= 16 * N * torch.finfo(dtype).eps * mp.norm(true)
    assert dist(true, P) <= N * torch.finfo(dtype).eps * condition


# -- spheres, rotations, subspaces: near points, and where the shortest geodesic ends to be unique -----------


@pytest.mark.parametrize(
    ("dtype", "angle"),
    [(torch.float32, a) for a in (1e-5, 1e-2, 1.0, math.pi - 1e-2)]
    + [(torch.float64, a) for a in (1e-12, 1e-7, 1e-3, 1.0, math.pi - 1e-2, math.pi - 1e-7)],
    ids=name,
)
def test_spheres(dtype, angle, gen):
    """Relatively, for near points, too. Near the antipode the direction is known to eps/(pi - angle)."""
    space, eps = ghor.Sphere(), torch.finfo(dtype).eps
    for _ in range(3):
        Y = space.random(5, generator=gen, dtype=torch.float64)
        V = space.tangent(Y, torch.randn(5, generator=gen, dtype=torch.float64))
        V = V * (angle / V.norm())
        Y, Z, V = Y.to(dtype), space.exp(Y, V).to(dtype), V.to(dtype)
        raw, v = exact(Y[:, None]), exact(V[:, None])
        y, z = raw / mp.norm(raw), exact(Z[:, None]) / mp.norm(exact(Z[:, None]))
        K, c, t = z - (y.T * z)[0] * y, (y.T * z)[0], mp.norm(v)
        theta = mp.atan2(mp.norm(K), c)
        assert error(space.log(Y, Z)[:, None], K / mp.norm(K) * theta) <= 16 * eps * angle / min(
            1, math.pi - angle
        )
        # a radial part of eps, which rounding leaves, counts in the square
        assert abs(float(space.dist(Y, Z)) - theta) <= 8 * eps * angle + eps**2 / angle
        assert error(space.exp(Y, V)[:, None], mp.cos(t) * raw + v * mp.sin(t) / t) <= 8 * eps


TO_PI = [(torch.float32, 1e-1), (torch.float32, 1e-2), (torch.float64, 1e-3), (torch.float64, 2e-6)]
each_gap = pytest.mark.parametrize(("dtype", "gap"), TO_PI, ids=name)


@each_gap
def test_subspaces_by_nearly_a_right_angle(dtype, gap, gen):
    """One principal angle near pi/2, whose tangent is 1/gap, beside small ones: all are known to eps/gap."""
    space, eps = ghor.Grassmann(), torch.finfo(dtype).eps
    Q, _ = torch.linalg.qr(torch.randn(6, 6, generator=gen, dtype=torch.float64))
    U, _ = torch.linalg.qr(torch.randn(3, 3, generator=gen, dtype=torch.float64))
    angles = torch.tensor([math.pi / 2 - gap, 0.3, 1e-3], dtype=torch.float64)
    Y = Q[:, :3] @ U.mT
    V = (Q[:, 3:] * angles) @ U.mT
    Z = mp.expm(exact(V) * exact(Y).T - exact(Y) * exact(V).T) * exact(Y)
    Y, Z, true = Y.to(dtype), rounded(Z, dtype), exact(V)
    assert error(space.log(Y, Z), true) <= 16 * eps / gap
    assert abs(float(space.dist(Y, Z)) - float(angles.norm())) <= 16 * eps / gap
    assert error(space.exp(Y, V.to(dtype)), exact(Z)) <= 16 * eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
@pytest.mark.parametrize(
    ("space", "shape", "lengths"),
    [
        (ghor.Stiefel(), (5, 2), (1e-6, 1.0, 5.0, 30.0)),
        (ghor.SymplecticStiefel(), (4, 2), (1e-6, 1.0, 5.0)),
        (ghor.SpecialOrthogonal(), (4, 4), (1e-6, 1.0, 5.0)),
    ],
    ids=name,
)
def test_frames_by_the_dense_exponential(space, shape, lengths, dtype, gen):
    """exp(Omega) Y, as exact as products of its size are; the logarithm on Stiefel where it is unique."""
    eps = torch.finfo(dtype).eps
    for length in lengths:
        Y = space.random(*shape, generator=gen, dtype=torch.float64)
        V = space.tangent(Y, torch.randn(shape, generator=gen, dtype=torch.float64))
        Y, V = Y.to(dtype), (V * (length / V.norm())).to(dtype)
        Z = mp.expm(exact(space.Omega(Y.double(), V.double()))) * exact(Y)
        assert error(space.exp(Y, V), Z) <= 16 * eps * (1 + length) * max(1, float(mp.norm(Z)))
        if length <= 1 and space.has("log"):
            assert error(space.log(Y, rounded(Z, dtype)), exact(V)) <= 500 * eps


# -- hyperbolic space, inwards -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
def test_geodesics_to_the_origin_and_beyond(dtype):
    """From far out, straight inwards: the end is as exact as the rounded vector knows its direction, eps e^r.

    That is 2 arsinh(eps e^r sinh(t)) at worst: from r = 5 in float32 a few digits, from r = 14 none.
    """
    space, eps = ghor.Hyperbolic(), torch.finfo(dtype).eps
    for r in (2.0, 5.0, 9.0) if dtype == torch.float32 else (2.0, 9.0, 20.0):
        for t in (r / 2, r, 1.4 * r):
            for angle in (0.1, 1.9, 4.0):
                way = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
                Y = space.project(torch.cat([torch.zeros(1), math.sinh(r) * way]).to(dtype))
                w = torch.cat([torch.zeros(1), -t * way]).to(dtype)
                V = frame(space, Y, "implicit").push(w.view(1, -1, 1)).flatten()
                y, v = exact(Y[1:, None]), exact(V[1:, None])
                y0 = mp.sqrt(1 + (y.T * y)[0])
                v0 = (y.T * v)[0] / y0  # tangent
                length = mp.sqrt((v.T * v)[0] - v0 * v0)
                end = mp.cosh(length) * y + mp.sinh(length) / length * v
                found = exact(space.exp(Y, V)[1:, None])
                a, b = (mp.sqrt(1 + (x.T * x)[0]) for x in (end, found))
                off = mp.acosh(max(1, a * b - (end.T * found)[0]))
                assert off <= 2 * math.asinh(8 * eps * math.exp(r) * math.sinh(t)) + 8 * eps, (r, t)


@pytest.mark.parametrize(
    ("dtype", "condition"),
    [(torch.float32, 1e2), (torch.float32, 1e5), (torch.float64, 1e6), (torch.float64, 1e12)],
    ids=name,
)
@pytest.mark.parametrize("space", [ghor.Stiefel(), ghor.Grassmann()], ids=name)
def test_the_derivative_of_a_projection(space, dtype, condition, gen):
    """Against that of the polar factor U V^T of M = U S V^T in 50 digits. Its own condition is that of M."""
    Q, R = (torch.linalg.qr(torch.randn(k, N, generator=gen, dtype=torch.float64))[0] for k in (5, N))
    M = ((Q * condition ** -torch.linspace(0, 1, N, dtype=torch.float64)) @ R.mT).to(dtype)
    C, dM = (torch.randn(5, N, generator=gen, dtype=torch.float64).to(dtype) for _ in range(2))
    X = M.clone().requires_grad_()
    (space.project(X) * C).sum().backward()
    U, s, Vt = mp.svd_r(exact(M))
    D, within = exact(dM), mp.matrix(N, N)
    T = U.T * D * Vt.T
    for i in range(N):
        for j in range(N):
            within[i, j] = (T[i, j] - T[j, i]) / (s[i] + s[j])
    dY = U * within * Vt + (D - U * U.T * D) * Vt.T * mp.diag([1 / x for x in s]) * Vt
    G, Cs = exact(X.grad), exact(C)
    found, true = (sum(a * b for a, b in zip(A, B, strict=True)) for A, B in ((G, D), (Cs, dY)))
    assert abs(found - true) <= 20 * condition * torch.finfo(dtype).eps * mp.norm(dY) * mp.norm(Cs)
