"""pymanopt as an oracle: gradients, metrics, geodesics, logarithms, distances, means of the spaces that both
have."""

import warnings

import pytest
import torch
from helpers.table import close, randn

import ghor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    manifolds = pytest.importorskip("pymanopt.manifolds", exc_type=ImportError)

F64, C128 = torch.float64, torch.complex128
TOL = 1e-10

# (space, its manifold, shape, dtype, the metric there in units of ours)
CASES = [
    (ghor.Sphere(), manifolds.Sphere(6), (6,), F64, 1),
    (ghor.Grassmann(), manifolds.Grassmann(7, 3), (7, 3), F64, 1),
    (ghor.Grassmann(), manifolds.ComplexGrassmann(7, 3), (7, 3), C128, 1),
    (ghor.SpecialOrthogonal(), manifolds.SpecialOrthogonalGroup(5), (5, 5), F64, 2),
    (ghor.Unitary(), manifolds.UnitaryGroup(5), (5, 5), C128, 2),
    (ghor.SPD(), manifolds.SymmetricPositiveDefinite(5), (5, 5), F64, 1),
]


def theirs(x):
    return x.detach().numpy()


def ours(x):
    return torch.as_tensor(x)


@pytest.mark.parametrize(
    ("space", "oracle", "shape", "dtype", "factor"), CASES, ids=lambda x: str(x).partition("(")[0]
)
def test_the_same_geometry(space, oracle, shape, dtype, factor, gen):
    Y = space.random(*shape, generator=gen, dtype=dtype)
    U, V = (space.tangent(Y, randn(shape, gen, dtype)) / 4 for _ in range(2))
    G = randn(shape, gen, dtype)
    Z = space.exp(Y, U)

    group = space in (ghor.SpecialOrthogonal(), ghor.Unitary())  # tangent vectors there are skew: Y^H Delta

    def inside(Delta):
        return theirs(Y.mH @ Delta if group else Delta)

    def outside(Delta):
        return Y @ ours(Delta) if group else ours(Delta)

    def same_points(P, Q):
        """Subspaces by their projectors."""
        close(*(X @ X.mH if space == ghor.Grassmann() else X for X in (P, ours(Q))), TOL)

    # its gradient on UnitaryGroup transposes without conjugation, which its projection of matrices does not
    if group:
        rgrad = oracle.to_tangent_space(theirs(Y), inside(G))
    else:
        rgrad = oracle.euclidean_to_riemannian_gradient(theirs(Y), theirs(G))
    close(space.rgrad(Y, G), factor * outside(rgrad), TOL)
    inner = oracle.inner_product(theirs(Y), inside(U), inside(V)).real
    close(factor * space.inner(Y, U, V), ours(inner), TOL)
    same_points(Z, oracle.exp(theirs(Y), inside(U)))
    close(space.log(Y, Z), outside(oracle.log(theirs(Y), theirs(Z))), TOL)
    close(factor**0.5 * space.dist(Y, Z), ours(oracle.dist(theirs(Y), theirs(Z))), TOL)
    same_points(space.mean(torch.stack([Y, Z])), oracle.exp(theirs(Y), inside(U / 2)))


def test_the_same_hyperbolic_space(gen):
    """By the map to the ball: tangent vectors by its derivative, gradients by that of its inverse."""
    space, oracle = ghor.Hyperbolic(), manifolds.PoincareBall(4)
    Y, Z = (space.random(5, generator=gen, dtype=F64) for _ in range(2))
    u, v = (theirs(space.to_ball(X)) for X in (Y, Z))

    def down(Delta):
        return Delta[1:] / (1 + Y[0]) - Y[1:] * Delta[0] / (1 + Y[0]) ** 2

    U, V = (space.tangent(Y, randn((5,), gen)) / 2 for _ in range(2))
    G, w = randn((5,), gen), ours(u).requires_grad_()
    (g,) = torch.autograd.grad(space.from_ball(w), w, G)
    close(down(space.rgrad(Y, G)), ours(oracle.euclidean_to_riemannian_gradient(u, theirs(g))), TOL)
    close(space.inner(Y, U, V), ours(oracle.inner_product(u, theirs(down(U)), theirs(down(V)))), TOL)
    close(space.to_ball(space.exp(Y, U)), ours(oracle.exp(u, theirs(down(U)))), TOL)
    close(down(space.log(Y, Z)), ours(oracle.log(u, v)), TOL)
    close(space.dist(Y, Z), ours(oracle.dist(u, v)), TOL)
    close(space.to_ball(space.mean(torch.stack([Y, Z]))), ours(oracle.pair_mean(u, v)), TOL)
