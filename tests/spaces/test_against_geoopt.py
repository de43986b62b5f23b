"""geoopt as an oracle, for what pymanopt has not: transport, the canonical metric of Stiefel, the two models
of hyperbolic space, the log-Euclidean metric."""

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


def test_other_distances(gen):
    space, ball = ghor.Hyperbolic(), geoopt.PoincareBall()
    x, z = (space.random(200, 6, generator=gen, dtype=F64) for _ in range(2))
    close(space.from_ball(space.to_ball(x)), x, 1e-14)
    close(space.dist(x, z), ball.dist(space.to_ball(x), space.to_ball(z)), 1e-12)
    P, Q = (ghor.SPD().random(20, 5, 5, generator=gen, dtype=F64) for _ in range(2))
    oracle = geoopt.SymmetricPositiveDefinite(default_metric="LEM")
    close(ghor.SPD().log_euclidean(P, Q), oracle.dist(P, Q), 1e-10)
