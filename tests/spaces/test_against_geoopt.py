"""geoopt as an oracle: gradients, geodesics, logarithms, distances and transport of the spaces that both
have, and the digits that are left far out in hyperbolic space."""

import math

import pytest
import torch
from helpers.table import close, randn

import ghor

geoopt = pytest.importorskip("geoopt")
pytestmark = pytest.mark.filterwarnings("ignore")  # it compiles with torch.jit.script

F64 = torch.float64
CASES = [(ghor.Hyperbolic(), "Lorentz", (200, 6)), (ghor.SPD(), "SymmetricPositiveDefinite", (50, 5, 5))]


@pytest.mark.parametrize(("space", "theirs", "shape"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_the_same_geometry(space, theirs, shape, gen):
    oracle = getattr(geoopt, theirs)()
    P, Q = (space.random(*shape, generator=gen, dtype=F64) for _ in range(2))
    U, V, W = (space.rgrad(P, randn(shape, gen)) / 4 for _ in range(3))
    G = randn(shape, gen)
    close(space.rgrad(P, G), oracle.egrad2rgrad(P, G), 1e-10)
    close(space.inner(P, U, V), oracle.inner(P, U, V).reshape(-1), 1e-10)
    close(space.exp(P, V), oracle.expmap(P, V), 1e-10)
    close(space.log(P, Q), oracle.logmap(P, Q), 1e-10)
    close(space.dist(P, Q), oracle.dist(P, Q), 1e-10)
    close(space.transport(P, space.log(P, Q), W), oracle.transp(P, Q, W), 1e-10)


def test_the_same_sphere(gen):
    """Its transport is a projection, so that is left out."""
    space, oracle = ghor.Sphere(), geoopt.Sphere()
    Y, Z = (space.random(100, 5, generator=gen, dtype=F64) for _ in range(2))
    U, V, G = (oracle.proju(Y, randn(Y.shape, gen)) for _ in range(3))
    close(space.rgrad(Y, G), oracle.egrad2rgrad(Y, G), 1e-10)
    close(space.inner(Y, U, V), oracle.inner(Y, U, V), 1e-10)
    close(space.exp(Y, V), oracle.expmap(Y, V), 1e-10)
    close(space.log(Y, Z), oracle.logmap(Y, Z), 1e-10)
    close(space.dist(Y, Z), oracle.dist(Y, Z), 1e-10)


def test_the_same_stiefel_manifold(gen):
    """Its canonical `expmap` is a retraction. The Euclidean metric has our geodesics where Y^T Delta = 0."""
    space, canonical, euclidean = ghor.Stiefel(), geoopt.Stiefel(), geoopt.EuclideanStiefel()
    Y, G = space.random(50, 6, 3, generator=gen, dtype=F64), randn((50, 6, 3), gen)
    U, V = (euclidean.proju(Y, randn(Y.shape, gen)) for _ in range(2))
    close(space.tangent(Y, G), euclidean.proju(Y, G), 1e-10)
    close(space.rgrad(Y, G), canonical.egrad2rgrad(Y, G), 1e-10)
    close(space.inner(Y, U, V), canonical.inner(Y, U, V), 1e-10)
    close(space.inner(Y, space.rgrad(Y, G), V), euclidean.inner(Y, euclidean.egrad2rgrad(Y, G), V), 1e-10)
    H = V - Y @ (Y.mT @ V)
    close(space.exp(Y, H), euclidean.expmap(Y, H), 1e-10)
    close(space.project(Y + G / 4), canonical.projx(Y + G / 4), 1e-10)


def test_the_same_rotations(gen):
    """Square matrices: both metrics have the geodesics of the group; ours counts half."""
    space, oracle = ghor.SpecialOrthogonal(), geoopt.EuclideanStiefel()
    Y, G = space.random(50, 4, 4, generator=gen, dtype=F64), randn((50, 4, 4), gen)
    V = oracle.proju(Y, G)
    close(space.rgrad(Y, G), 2 * oracle.egrad2rgrad(Y, G), 1e-10)
    close(space.inner(Y, V, V), oracle.inner(Y, V, V) / 2, 1e-10)
    close(space.exp(Y, V), oracle.expmap(Y, V), 1e-10)


def test_the_ball(gen):
    space, ball = ghor.Hyperbolic(), geoopt.PoincareBall()
    x, z = (space.random(200, 6, generator=gen, dtype=F64) for _ in range(2))
    close(space.from_ball(space.to_ball(x)), x, 1e-14)
    close(space.dist(x, z), ball.dist(space.to_ball(x), space.to_ball(z)), 1e-12)


def test_log_euclidean_distance(gen):
    space = ghor.SPD()
    P, Q = (space.random(20, 5, 5, generator=gen, dtype=F64) for _ in range(2))
    oracle = geoopt.SymmetricPositiveDefinite(default_metric="LEM")
    close(space.log_euclidean(P, Q), oracle.dist(P, Q), 1e-10)


def at(r, angle):
    return torch.tensor(
        [math.cosh(r), math.sinh(r) * math.cos(angle), math.sinh(r) * math.sin(angle)], dtype=F64
    )


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("r", [0.0, 1.0, 5.0, 10.0, 14.5])
def test_digits_that_are_left_far_out(r, dtype):
    """Rounding moves a point by eps x_0 at most: two of them, log and its end are off by a few times that."""
    space = ghor.Hyperbolic()
    a, b = at(r, 0.3), at(r + 0.5, 0.3 + math.exp(-r))
    d, room = float(space.dist(a, b)), 8 * torch.finfo(dtype).eps * float(b[0])
    x, z = a.to(dtype), b.to(dtype)
    Delta = space.log(x, z)
    assert abs(float(space.dist(x, z)) - d) <= room
    assert abs(float(space.norm(x, Delta)) - d) <= room
    assert float(space.dist(space.exp(x, Delta).double(), b)) <= room


def test_near_points_have_all_digits():
    """geoopt's arcosh(-<x, z>) has none here."""
    x = at(3.0, 0.3)
    for h in (1e-3, 1e-6, 1e-9):
        z = at(3.0, 0.3 + h)
        exact = 2 * math.asinh(math.sinh(3.0) * math.sin(h / 2))
        assert (
            abs(float(ghor.Hyperbolic().dist(x, z)) / exact - 1) < 1e-6
        )  # the points' own rounding, 1e-16/1e-9
