"""Rigid motions, positions and orientations: screws near a half turn, any unit of length, both means."""

import math

import mpmath as mp
import pytest
import torch
from helpers.exact import exact, hat, nearest_rotation, rounded, vector
from helpers.table import close, name, randn

import ghor

SE, PO = ghor.SpecialEuclidean(), ghor.PositionsOrientations()
SHAPES = {SE: (4, 3, 4), PO: (4, 2, 3)}
F64 = torch.float64
each_space = pytest.mark.parametrize("space", SHAPES, ids=name)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, F64], ids=name)


def parts(space, W):
    """Turns (omega, or w) and ways v; views."""
    return (W[..., :-1], W[..., -1]) if space == SE else (W[..., 1, :], W[..., 0, :])


# -- logarithms, against 60 digits ---------------------------------------------------------------------------


def turned(d, dtype, angle, gen):
    """A rounded rotation by this angle."""
    w = torch.randn(1 if d == 2 else 3, generator=gen, dtype=F64)
    w = [mp.mpf(x) for x in (w / w.norm()).tolist()]
    R = mp.expm(hat([angle * x for x in w]))
    return rounded(R, dtype)


def screw(T):
    """(w, v) of a rounded pose: the logarithm of its rotation, and v by solving for phi."""
    d, w = T.rows, vector(T[:, : T.rows])
    W, t, theta = hat(w), T[:, d], mp.norm(w)
    phi = mp.eye(d) + (1 - mp.cos(theta)) / theta**2 * W + (1 - mp.sin(theta) / theta) / theta**2 * W * W
    return W, mp.lu_solve(phi, t)


ANGLES = {
    torch.float32: [1e-12, 1e-6, 1e-3, 0.1, 1.0, 2.5, math.pi - 1e-2, math.pi - 1e-4, math.pi - 1e-5],
    F64: [1e-12, 1e-8, 1e-3, 0.1, 1.0, 2.5, math.pi - 1e-4, math.pi - 1e-8, math.pi - 1e-12],
}


@each_dtype
@pytest.mark.parametrize("d", [2, 3])
def test_logarithms_of_screws(d, dtype, gen):
    """Of turns from 1e-12 to pi: the condition is 1 in the turn, relative to it below 1 radian, and at most
    pi/2, that of phi^-1, in v."""
    eps, I = torch.finfo(dtype).eps, torch.eye(d, d + 1, dtype=dtype)
    for angle in ANGLES[dtype]:
        for _ in range(3):
            t = torch.randn(d, 1, generator=gen, dtype=F64).to(dtype)
            T = torch.cat([turned(d, dtype, mp.mpf(angle), gen), t], -1)
            W, v = screw(exact(T))
            log = exact(SE.log(I, T))
            assert mp.norm(log[:, :d] - W) <= 16 * eps * min(1, angle), angle
            assert mp.norm(log[:, d] - v) <= 16 * eps * mp.norm(v), angle
            dist = mp.sqrt(mp.norm(W) ** 2 / 2 + mp.norm(v) ** 2)
            assert abs(float(SE.dist(I, T)) - dist) <= 16 * eps * dist, angle


@each_dtype
@pytest.mark.parametrize("d", [2, 3])
def test_derivatives_of_the_logarithm(d, dtype, gen):
    """Along T exp(h X): the inverse of the right Jacobian, by central differences of the exact logarithm."""
    eps, h = torch.finfo(dtype).eps, mp.mpf(10) ** -15
    for angle in ANGLES[dtype]:
        t, x = (torch.randn(d, 1, generator=gen, dtype=F64).to(dtype) for _ in range(2))
        T = torch.cat([turned(d, dtype, mp.mpf(angle), gen), t], -1)
        w = torch.randn(1 if d == 2 else 3, generator=gen, dtype=F64).to(dtype).tolist()
        C = torch.randn(d, d + 1, generator=gen, dtype=F64).to(dtype)
        X = mp.zeros(d + 1)
        X[:d, :d], X[:d, d] = hat([mp.mpf(a) for a in w]), exact(x)
        T0 = exact(T)
        T0[:, :d] = nearest_rotation(T0[:, :d])
        P = mp.eye(d + 1)
        P[:d, :] = T0
        gap = mp.pi - angle
        step = h * min(1, gap, angle)
        ends = [screw((P * mp.expm(s * step * X))[:d, :]) for s in (1, -1)]
        slope = [(a - b) / (2 * step) for a, b in zip(*ends, strict=True)]
        Z = T.clone().requires_grad_()
        (SE.log(torch.eye(d, d + 1, dtype=dtype), Z) * C).sum().backward()
        G, D, K = exact(Z.grad), (P * X)[:d, :], exact(C)
        found = sum(G[i, j] * D[i, j] for i in range(d) for j in range(d + 1))
        true = sum(K[i, j] * slope[0][i, j] for i in range(d) for j in range(d))
        true += sum(K[i, d] * slope[1][i] for i in range(d))
        scale = mp.norm(K) * (mp.norm(slope[0]) + mp.norm(slope[1])) + mp.norm(G) * mp.norm(D)
        assert abs(found - true) <= 16 * eps * scale, angle


@each_dtype
@pytest.mark.parametrize("d", [2, 3])
def test_half_turns_take_nothing_from_their_batch(d, dtype, gen):
    """Turns by pi go one of the two ways, in a batch of 2000 random pairs; and a NaN stays alone."""
    Y, Z = SE.random(2, 2000, d, d + 1, generator=gen, dtype=dtype)
    half = torch.diag(torch.tensor([-1.0, -1.0, 1.0][:d], dtype=dtype))
    Z[7] = torch.cat([Y[7][:, :d] @ half, Z[7][:, d:]], -1)
    close(SE.exp(Y, SE.log(Y, Z)), Z, 200 * torch.finfo(dtype).eps)
    Y[3, 0, 0] = torch.nan
    assert SE.dist(Y, Z).isnan().nonzero().tolist() == [[3]]


# -- any unit of length --------------------------------------------------------------------------------------


@each_space
def test_only_turns_count_for_the_longest_step(space, gen):
    W, geometry = randn(SHAPES[space], gen), space.geometry
    geometry.hor_(W)
    turn, way = parts(space, W)
    length = geometry.length(W)[:, 0, 0]
    close(length, torch.linalg.vector_norm(turn.flatten(1), dim=1), 1e-15)
    way *= 1e300
    assert torch.equal(geometry.length(W)[:, 0, 0], length)
    turn.zero_()
    assert (geometry.length(W) > 0).all()  # it moves
    assert (geometry.length(W) < 1e-300).all()
    assert (geometry.length(0 * W) == 0).all()
    for bad in (torch.inf, torch.nan):
        way[1, 0] = bad
        assert geometry.length(W).flatten().isnan().tolist() == [False, True, False, False]


@each_space
def test_screw_motions_of_any_pitch(space, gen):
    """The exponential of [[omega, v], [0, 0]] is linear in v; by squarings, v = 1e6 would take 21."""
    Y, W = space.random(*SHAPES[space], generator=gen, dtype=F64), randn(SHAPES[space], gen)
    space.geometry.hor_(W)
    turn, way = parts(space, W)
    way *= 1e6
    L = space.geometry.section(Y)
    moved = space.exp(Y, space.geometry.velocity(L, W))
    X = torch.zeros(4, 4, 4, dtype=F64)
    for k in range(4):
        w = turn[k] if space == SE else torch.tensor(hat(turn[k].tolist()).tolist(), dtype=F64)
        X[k, :3, :3], X[k, :3, 3] = w, way[k] / 1e6
    M = torch.linalg.matrix_exp(X)[:, :3]
    position = moved[..., -1] if space == SE else moved[..., 0, :]
    close(position / 1e6, L[..., 3] / 1e6 + (L[..., :3] @ M[..., 3:]).squeeze(-1), 1e-14)


# -- means ---------------------------------------------------------------------------------------------------


@each_space
def test_the_mean_is_that_of_the_group(space, gen):
    """Logarithms sum to 0; the sum of squared distances has its minimum elsewhere."""
    Y = space.random(*SHAPES[space][1:], generator=gen, dtype=F64)
    V = space.tangent(Y, 0.8 * randn((6, *Y.shape), gen))
    X = space.exp(Y.expand_as(V), V)
    mean = space.mean(X)
    close(space.log(mean.expand_as(X), X).sum(0), 0 * mean, 1e-13)

    def squares(Y):
        return space.dist(Y, X).square().sum()

    frechet = ghor.minimize(squares, mean, space)
    assert frechet.success
    assert squares(frechet.x) < squares(mean) - 0.01
    other = space.mean(X, kind="frechet")
    assert squares(other) <= squares(frechet.x) + 1e-12
    close(other, frechet.x, 1e-5)
    with pytest.raises(ValueError, match="mean is of kind 'group' or 'frechet', got 'karcher'"):
        space.mean(X, kind="karcher")


@each_space
def test_the_frechet_mean_of_far_points(space, gen):
    """Far apart, where whole steps lead over a ridge, to a worse minimum than descent from the group mean."""
    ridge = torch.Generator().manual_seed(0 if space == PO else 2)
    X = space.random(5, *SHAPES[space][1:], generator=ridge, dtype=F64)
    parts(space, X)[1].mul_(30)

    def squares(Y):
        return float(space.dist(Y, X).square().sum())

    other, start = space.mean(X, kind="frechet"), space.mean(X)
    assert squares(other) < squares(start)
    for v in randn((10, *other.shape), gen):
        v = space.tangent(other, v)
        assert squares(space.exp(other, 1e-3 * v / space.norm(other, v))) > squares(other)


@each_space
def test_the_frechet_mean_of_batches_and_with_weights(space, gen):
    """Each member of a batch as it is alone; a weight counts a point as often as it says."""
    Y = space.random(*SHAPES[space][1:], generator=gen, dtype=F64)
    V = space.tangent(Y, 0.5 * randn((3, 2, *Y.shape), gen))
    X = space.exp(Y.expand_as(V), V)
    both = space.mean(X, kind="frechet")
    weights = torch.tensor([2.0, 1.0, 0.0], dtype=F64)
    close(both[1], space.mean(X[:, 1], kind="frechet"), 1e-7)
    twice = space.mean(torch.cat([X[:1, 0], X[:2, 0]]), kind="frechet")
    close(space.mean(X[:, 0], weights, kind="frechet"), twice, 1e-7)
    close(space.mean(X.float(), kind="frechet").double(), both, 1e-5)


# -- shapes --------------------------------------------------------------------------------------------------


def test_homogeneous_matrices_are_told_apart():
    T = torch.eye(4).expand(5, 4, 4)
    for use in (SE.project, SE.residual, SE.mean, lambda T: SE.log(T, T), lambda T: SE.check_shape((3, 3))):
        with pytest.raises(ValueError, match=r"take T\[\.\.\., :-1, :\]; for rotations alone"):
            use(T)
    assert SE.residual(T[..., :-1, :]).max() == 0
    with pytest.raises(ValueError, match=r"holds poses \[R, t\], \(\.\.\., d, d\+1\) .* got shape \(3, 5\)"):
        SE.random(3, 5)
    with pytest.raises(ValueError, match=r"holds positions and orientations \(\.\.\., 2, 3\), got shape"):
        PO.random(3, 3)
    with pytest.raises(ValueError, match="degenerate or indefinite has no nearest point on Positions"):
        PO.project(torch.zeros(2, 2, 3))
