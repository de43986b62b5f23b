"""Logarithms of rotations up to pi, against 60 digits of the same rounded matrix.

The condition of log at an angle t < pi is that of its derivative, the inverse of exp's: (t/2)/sin(t/2), at
most pi/2. It is of the whole vector for small angles, too, because R - I keeps its digits there. Errors are
compared with 16 eps times that.
"""

import math

import mpmath as mp
import pytest
import torch
from helpers.exact import exact, hat, rounded, vector
from helpers.table import name, randn

import ghor
from ghor.spaces.logarithms import hat as cross
from ghor.spaces.logarithms import log_rotation, rotation_vector

F64 = torch.float64
SO = ghor.SpecialOrthogonal()
GAPS = [1e-12, 1e-8, 1e-6, 1e-4, 1e-2, 0.5]
ANGLES = [
    0.0,
    *(g for g in (1e-12, 1e-9, 1e-6, 1e-4, 1e-2)),
    0.5,
    1.0,
    2.0,
    3.0,
    *(math.pi - g for g in GAPS),
    math.pi,
]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, F64], ids=name)


def turn(axis, angle):
    """The rotation by an angle, in all digits."""
    w = mp.matrix(axis.tolist())
    K = hat(w) / mp.norm(w)
    t = mp.mpf(angle)
    return mp.eye(3) + mp.sin(t) * K + (1 - mp.cos(t)) * K * K


def inverse_slope(w):
    """The derivative of log along exp(h u) R is (I - W/2 + c W^2) u, c = (1 - t/2 cot(t/2))/t^2."""
    t, W = mp.norm(w), hat(w)
    c = (1 - t / 2 * mp.cot(t / 2)) / t**2 if t > mp.mpf(10) ** -12 else mp.mpf(1) / 12
    return mp.eye(3) - W / 2 + c * W * W


def condition(t):
    return (t / 2) / math.sin(t / 2) if t else 1.0


@each_dtype
@pytest.mark.parametrize("angle", ANGLES)
def test_so3_and_its_derivative(angle, dtype, gen):
    eps = torch.finfo(dtype).eps
    for _ in range(4):
        R = rounded(turn(randn((3,), gen), angle), dtype).requires_grad_()
        v = rotation_vector(R)
        want, found = vector(exact(R)), exact(v)
        sign = -1 if mp.norm(want + found) < mp.norm(want - found) else 1  # at pi either may be taken
        assert sign == 1 or abs(angle - math.pi) <= 4 * eps
        size = mp.norm(want)
        assert mp.norm(found - sign * want) <= 16 * eps * condition(angle) * size
        u, c = randn((3,), gen), randn((3,), gen)
        (G,) = torch.autograd.grad((v.double() * c).sum(), R)
        slope = float((G.double() * (cross(u) @ R.detach().double())).sum())
        J = inverse_slope(sign * want)
        true = (exact(c[:, None]).T * J * exact(u[:, None]))[0]
        assert abs(slope - true) <= 16 * eps * condition(angle) * mp.norm(J.T * exact(c[:, None])) * float(
            u.norm()
        )
        if size > 0:  # the distance, whose derivative is a unit vector
            X = R.detach().clone().requires_grad_()
            d = SO.dist(torch.eye(3, dtype=dtype), X)
            assert abs(float(d.detach()) - size) <= 16 * eps * size
            (G,) = torch.autograd.grad(d, X)
            slope = float((G.double() * (cross(u) @ X.detach().double())).sum())
            true = (want.T * exact(u[:, None]))[0] / size * sign
            assert abs(slope - true) <= 16 * eps * float(u.norm())


@each_dtype
@pytest.mark.parametrize("angle", ANGLES)
def test_so2(angle, dtype):
    for t in (angle, -angle):
        R = rounded(mp.matrix([[mp.cos(t), -mp.sin(t)], [mp.sin(t), mp.cos(t)]]), dtype)
        want = vector(exact(R))[0]
        assert abs(float(log_rotation(R)[1, 0]) - want) <= 4 * torch.finfo(dtype).eps * abs(want)


def turns(N, dtype, gen, angles):
    """Q T Q^H of rotations in planes, or of phases, by angles a < pi, or by pi + a where a < 0."""
    Q = torch.linalg.qr(randn((N, N), gen, dtype))[0]
    c = torch.tensor([math.cos(a) if a >= 0 else -math.cos(-a) for a in angles], dtype=F64)
    s = torch.tensor([math.sin(a) if a >= 0 else math.sin(-a) for a in angles], dtype=F64)
    if dtype.is_complex:
        return (Q * torch.complex(c, s * torch.tensor([1.0, -1.0] * N, dtype=F64)[: len(s)])) @ Q.mH
    T = torch.eye(N, dtype=F64)
    for j in range(N // 2):
        T[2 * j : 2 * j + 2, 2 * j : 2 * j + 2] = torch.tensor([[c[j], -s[j]], [s[j], c[j]]])
    return Q @ T @ Q.mT


NEAR_PI = [0.0, 1e-15, 1e-12, 1e-9, 1e-7, 1e-5, 1e-3, 0.1, 0.5, 0.7, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.complex64, torch.complex128], ids=name)
@pytest.mark.parametrize("N", [4, 5, 8, 20])
@pytest.mark.parametrize("near", [0, 1, 2, 20], ids=lambda k: f"{k} near pi")
def test_by_planes(N, near, dtype, gen):
    """Backward error at most 100 eps for one, two or all planes at or near pi; there it is one of two."""
    eps, wide = torch.finfo(dtype).eps, torch.promote_types(dtype, F64)
    count = N if dtype.is_complex else N // 2
    R = []
    for gap in NEAR_PI:
        angles = (2 * torch.rand(count, generator=gen)).tolist()
        angles[: min(near, count)] = [-gap * (1 + 0.3 * k) or math.pi for k in range(min(near, count))]
        R.append(turns(N, wide, gen, angles))
    R = torch.stack(R).to(dtype)
    L = log_rotation(R)
    assert torch.equal(L, -L.mH)
    L, R = L.to(wide), R.to(wide)
    assert torch.linalg.matrix_norm(torch.linalg.matrix_exp(L) - R, 2).max() <= 100 * eps
    assert torch.linalg.matrix_norm(L, 2).max() <= math.pi + 40 * eps


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # what torch says of its own imports
@pytest.mark.parametrize("N", [4, 5, 8])
def test_derivatives_beside_an_angle_near_pi(N, gen):
    """Away from repeated angles: differences of fourth order at h = 1e-4, whose error is eps/h and h^4."""
    R = turns(N, F64, gen, [-1e-2, 1.0, 0.3, 2.0][: N // 2])
    K = randn((N, N), gen)
    K = K - K.mT
    a, b, c, d = (log_rotation(torch.linalg.matrix_exp(h * 1e-4 * K) @ R) for h in (-2, -1, 1, 2))
    slope = (8 * (c - b) - (d - a)) / 12e-4
    found = torch.func.jvp(log_rotation, (R,), (K @ R,))[1]
    assert (found - slope).abs().max() <= 1e-7 * slope.abs().max()


@pytest.mark.parametrize("N", [2, 3, 4, 7])
def test_no_member_takes_its_batch_with_it(N, gen):
    """Beside NaN, a reflection, and a turn by exactly pi, in values and in derivatives."""
    Y = SO.random(5, N, N, generator=gen, dtype=F64)
    Z = SO.random(5, N, N, generator=gen, dtype=F64)
    alone = SO.log(Y[:2], Z[:2])
    Z[2] = torch.nan
    Z[3] = Y[3] @ torch.diag(torch.tensor([-1.0, -1.0, *[1.0] * (N - 2)], dtype=F64))
    Z.requires_grad_()
    V = SO.log(Y, Z)
    (G,) = torch.autograd.grad((V[[0, 1, 3, 4]] * randn((4, N, N), gen)).sum(), Z)
    assert torch.equal(V[:2], alone)
    assert torch.isnan(V[2]).all()
    assert torch.isfinite(G[[0, 1, 4]]).all()
    V, Z = V.detach(), Z.detach()
    assert abs(float(SO.norm(Y[3], V[3])) - math.pi) <= 1e-14
    assert (SO.exp(Y[3], V[3]) - Z[3]).abs().max() <= 1e-13
    assert torch.isfinite(SO.dist(Y, Z)[[0, 1, 3, 4]]).all()


def test_ten_thousand_pairs_of_float32(gen):
    """The pairs nearest to pi are a few eps from it: they must not raise."""
    Y, Z = (SO.random(10_000, 3, 3, generator=gen) for _ in range(2))
    off = torch.linalg.matrix_norm(SO.exp(Y, SO.log(Y, Z)).double() - Z.double())
    assert off.max() <= 32 * torch.finfo(torch.float32).eps
    Q = ghor.Unitary().random(1000, 4, 4, generator=gen, dtype=torch.complex64)
    off = torch.linalg.matrix_norm(ghor.Unitary().exp(Q, ghor.Unitary().log(Q, Q.flip(0))) - Q.flip(0))
    assert off.max() <= 200 * torch.finfo(torch.float32).eps


def test_there_is_no_logarithm_to_another_component():
    O = ghor.Unitary()
    assert torch.isnan(O.log(torch.eye(4), torch.diag(torch.tensor([1.0, 1.0, 1.0, -1.0])))).all()
    assert torch.isnan(ghor.Stiefel().dist(torch.eye(2), torch.diag(torch.tensor([1.0, -1.0]))))
    with pytest.raises(ValueError, match=r"SpecialOrthogonal\(\).log: a matrix is 2.0e\+00 off the space"):
        SO.log(torch.eye(4), torch.diag(torch.tensor([1.0, 1.0, 1.0, -1.0])))


@pytest.mark.parametrize("what", ["log", "dist"])
@pytest.mark.parametrize("space", [ghor.Stiefel(), ghor.Grassmann(), ghor.Unitary()], ids=name)
def test_matrices_that_are_no_points_are_named_so(space, what):
    X = torch.ones(3, 3) if space == ghor.Unitary() else torch.ones(4, 2)
    with pytest.raises(ValueError, match=rf"\.{what}: a matrix is .* off the space; project it first"):
        getattr(space, what)(X, X)


def test_subspaces_at_a_right_angle():
    """One of the shortest geodesics, of length sqrt(2) pi/2, also where the cosines are exactly 0."""
    Y, I = torch.eye(4, 2, dtype=F64), torch.eye(4, dtype=F64)
    for Z in (I[:, 2:], I[:, [2, 1]]):
        V = ghor.Grassmann().log(Y, Z)
        assert ghor.Grassmann().dist(ghor.Grassmann().exp(Y, V), Z) <= 1e-14
        angles = int((Z.mT @ Y).diagonal().eq(0).sum())
        assert abs(float(ghor.Grassmann().dist(Y, Z)) - math.sqrt(angles) * math.pi / 2) <= 1e-14


@pytest.mark.parametrize("length", [0.1, 1.0, 2.5])
def test_logarithms_on_stiefel_are_as_long_as_they_are(length, gen):
    """Zimmermann's iteration on logarithms near pi; a member that it does not find is NaN, and no other."""
    space = ghor.Stiefel()
    Y = space.random(6, 5, 2, generator=gen, dtype=F64)
    V = space.tangent(Y, randn((6, 5, 2), gen))
    V = V * (length / space.norm(Y, V))[:, None, None]
    Z = space.exp(Y, V)
    assert (space.exp(Y, space.log(Y, Z)) - Z).abs().max() <= 1e-11
    assert (space.dist(Y, Z) <= length + 1e-11).all()
    Z[3] = torch.nan
    assert torch.isfinite(space.dist(Y, Z)).tolist() == [True] * 3 + [False] + [True] * 2
