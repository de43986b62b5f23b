"""The laws that every space x retraction x dtype obeys. A new space is in the table as soon as its file is there."""

import pytest
import torch
from table import CASES, DTYPES, MANIFOLD_CASES, RETRACTIONS, SPACES, eps, name, point, randn, tangent

import ghor

cases = pytest.mark.parametrize(("space", "shape"), CASES, ids=name)
manifolds = pytest.mark.parametrize(("space", "shape"), MANIFOLD_CASES, ids=name)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=name)
retractions = pytest.mark.parametrize("retraction", RETRACTIONS)


def inner(space, U, V):
    """<U, V> over the matrices of a batch."""
    if space == ghor.Euclidean():
        return (U * V).sum()
    return (space.matrix(U) * space.matrix(V)).sum((-2, -1))


def close(a, b, tol):
    assert (a - b).abs().max() <= tol


# Tolerances: rounding of sums of at most 49 x 7 products, hence a few hundred eps, times the condition of the point
# where the group is not compact (||Y|| <= 4 in the table).
def tol(Y):
    return 500 * eps(Y)


def test_the_table_has_every_space_of_the_package():
    exported = {getattr(ghor, n)() for n in ghor.__all__ if n[0].isupper() and n != "Space"}
    assert exported == set(SPACES)
    assert {s for s, _ in CASES} == set(SPACES)


@cases
def test_a_space_is_a_value(space, shape):
    assert space == type(space)()
    assert hash(space) == hash(type(space)())
    assert repr(space) == f"{type(space).__name__}()"
    with pytest.raises(AttributeError):
        space.flatten = 2


@cases
@dtypes
def test_random_points_are_on_the_space(space, shape, dtype, gen):
    Y = space.random(*shape, generator=gen, dtype=dtype)
    assert Y.shape == shape
    assert Y.dtype == dtype
    assert Y.is_contiguous()
    assert space.distance(Y).max() <= tol(Y)


@cases
@dtypes
def test_section_lies_above_its_point(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    Lambda, E = space.section(Y), space.E(shape, dtype=dtype)
    close(space.apply_section(Lambda, E), Y, 0)
    if space != ghor.Euclidean():
        n = space.size(shape)[1]
        close(space.inverse(Lambda, n) @ Lambda, torch.eye(Lambda.shape[-1], dtype=dtype), tol(Y))
        torch.testing.assert_close(Lambda, space.section(Y), atol=0, rtol=0)  # no random numbers


@manifolds
def test_section_of_e_lies_above_e(space, shape):
    E = space.E(shape, dtype=torch.float64)
    assert space.distance(E).max() == 0
    close(space.apply_section(space.section(E), E), E, 0)


@cases
@dtypes
def test_rgrad_represents_the_differential(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    G, V = randn(shape, gen, dtype), tangent(space, Y, gen)
    grad = space.rgrad(Y, G)
    assert space.is_tangent(Y, grad, tol(Y))
    close(space.metric(Y, grad, V), inner(space, G, V), 40 * tol(Y))


@cases
@dtypes
def test_metric_is_symmetric_positive_and_inner(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    U, V = tangent(space, Y, gen), tangent(space, Y, gen)
    close(space.metric(Y, U, V), space.metric(Y, V, U), tol(Y))
    close(space.metric(Y, U, V), space.inner(Y, U, V), 0)
    assert (space.metric(Y, V, V) > 0).all()
    close(space.norm(Y, V) ** 2, space.metric(Y, V, V), tol(Y))


@cases
@dtypes
def test_tangent_is_a_projection(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    X = randn(shape, gen, dtype)
    V = space.tangent(Y, X)
    close(space.tangent(Y, V), V, tol(Y) * 10)
    assert space.is_tangent(Y, V, tol(Y))
    if space != ghor.Euclidean():
        assert not space.is_tangent(Y, V + 0.1 * Y)


@manifolds
@dtypes
def test_omega_lifts_tangent_vectors(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    V = tangent(space, Y, gen)
    Omega = space.Omega(Y, V)
    close(space.unmatrix(Omega @ space.matrix(Y), shape), V, tol(Y))
    close(Omega + space.star(Omega), torch.zeros_like(Omega), tol(Y))


@cases
@dtypes
def test_global_rep_is_the_isomorphism_to_ghor(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    V, Lambda = tangent(space, Y, gen), space.section(Y)
    H = space.global_rep(Lambda, V)
    assert H.shape == V.shape
    if space == ghor.Euclidean():
        close(H, V, 0)
        return
    M = space.matrix(H)
    n = M.shape[-1]
    A = M[..., :n, :]
    close(A + space.star(A), torch.zeros_like(A), 0)  # exactly skew
    close(space.unmatrix(Lambda @ M, shape), V, tol(Y))
    dense = torch.linalg.solve(Lambda, space.Omega(Y, V) @ Lambda)  # the paper's Lambda^-1 Omega Lambda
    close(space.algebra(M), dense, 20 * tol(Y))


@manifolds
@dtypes
def test_global_grad_is_the_derivative_in_coordinates(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    Lambda, G = space.section(Y), randn(shape, gen, dtype)
    W = space.global_rep(Lambda, tangent(space, Y, gen))
    B = space.global_grad(Lambda, G)
    n = space.size(shape)[1]
    b, w = space.matrix(B), space.matrix(W)
    product = (b[..., :n, :] * w[..., :n, :]).sum((-2, -1)) / 2 + (b[..., n:, :] * w[..., n:, :]).sum((-2, -1))
    close(product, inner(space, G, space.unmatrix(Lambda @ w, shape)), 40 * tol(Y))
    A = b[..., :n, :]
    close(A + space.star(A), torch.zeros_like(A), 0)
    if not isinstance(space, ghor.SymplecticStiefel):  # there rgrad belongs to another metric
        close(B, space.global_rep(Lambda, space.rgrad(Y, G)), 40 * tol(Y))


@manifolds
@dtypes
@retractions
def test_update_section_is_lambda_times_the_dense_retraction(space, shape, dtype, retraction, gen):
    Y = point(space, shape, gen, dtype)
    Lambda = space.section(Y)
    W = space.global_rep(Lambda, tangent(space, Y, gen))
    M = space.algebra(space.matrix(W)).double()
    I = torch.eye(M.shape[-1], dtype=torch.float64)
    R = torch.linalg.matrix_exp(M) if retraction == "geodesic" else torch.linalg.solve(I - M / 2, I + M / 2)
    close(space.update_section(Lambda, W, retraction), Lambda.double() @ R, 20 * tol(Y))
    torch.testing.assert_close(space.update_section(Lambda, 0 * W, retraction), Lambda, atol=0, rtol=0)


@cases
@dtypes
@retractions
def test_retract_and_sections_agree(space, shape, dtype, retraction, gen):
    Y = point(space, shape, gen, dtype)
    V, Lambda = tangent(space, Y, gen), space.section(Y)
    moved = space.update_section(Lambda, space.global_rep(Lambda, V), retraction)
    Z = space.retract(Y, V, retraction)
    close(Z, space.apply_section(moved, space.E(shape, dtype=dtype)), 20 * tol(Y))
    assert space.distance(Z).max() <= 20 * tol(Y)
    torch.testing.assert_close(space.retract(Y, 0 * V, retraction), Y, atol=0, rtol=0)


@cases
@retractions
def test_retraction_is_first_order(space, shape, retraction, gen):
    """Central differences at h = 1e-4: error h^2 ||W||^3/6 and rounding eps/h."""
    Y = point(space, shape, gen)
    V, h = tangent(space, Y, gen), 1e-4
    derivative = (space.retract(Y, h * V, retraction) - space.retract(Y, -h * V, retraction)) / (2 * h)
    close(derivative, V, 1e-6)


@manifolds
def test_cayley_is_second_order_to_the_geodesic(space, shape, gen):
    Y = point(space, shape, gen)
    V = tangent(space, Y, gen)
    h = torch.tensor([0.4, 0.2, 0.1, 0.05], dtype=torch.float64)
    error = torch.stack([(space.retract(Y, t * V) - space.exp(Y, t * V)).norm() for t in h])
    slopes = (error[:-1] / error[1:]).log() / (h[:-1] / h[1:]).log()
    assert slopes.min() >= 2.9


@cases
def test_geodesics_continue_themselves(space, shape, gen):
    """gamma(s + t) = gamma_(gamma(s))(t), the velocity carried along by transport."""
    Y = point(space, shape, gen)
    V = tangent(space, Y, gen)
    Z, velocity = space.exp(Y, 0.3 * V), space.transport(Y, 0.3 * V, V)
    close(space.exp(Z, 0.5 * velocity), space.exp(Y, 0.8 * V), 40 * tol(Y))


@cases
@dtypes
def test_transport_keeps_coordinates(space, shape, dtype, gen):
    """Along the connection of the second kind: coordinates in g^hor stay, so it is an isometry where H is compact."""
    Y = point(space, shape, gen, dtype)
    V, U, Lambda = tangent(space, Y, gen), tangent(space, Y, gen), space.section(Y)
    moved, Z = space.transport(Y, V, U), space.exp(Y, V)
    assert space.is_tangent(Z, moved, 20 * tol(Y))
    Lambda2 = space.update_section(Lambda, space.global_rep(Lambda, V), "geodesic")
    close(space.global_rep(Lambda2, moved), space.global_rep(Lambda, U), 40 * tol(Y))
    if not isinstance(space, ghor.SymplecticStiefel):
        close(space.norm(Z, moved), space.norm(Y, U), 20 * tol(Y))


@cases
@dtypes
def test_log_inverts_exp_and_dist_is_its_length(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    V = tangent(space, Y, gen, 0.5)
    Z = space.exp(Y, V)
    if isinstance(space, ghor.SymplecticStiefel):
        with pytest.raises(NotImplementedError, match="logarithm"):
            space.log(Y, Z)
        return
    close(space.log(Y, Z), V, 10 * tol(Y))
    close(space.dist(Y, Z), space.norm(Y, V), 10 * tol(Y))
    close(space.dist(Y, Z), space.dist(Z, Y), 10 * tol(Y))
    close(space.log(Y, Y), 0 * V, tol(Y))


@cases
@dtypes
def test_project_finds_the_space_and_keeps_its_points(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    close(space.project(Y), Y, tol(Y))
    Z = space.project(Y + 0.05 * randn(shape, gen, dtype))
    assert space.distance(Z).max() <= tol(Y)
    assert (Z - Y).abs().max() < 0.5


@cases
@pytest.mark.parametrize(
    "what", ["retract", "exp", "transport", "log", "dist", "metric", "rgrad", "tangent", "project"]
)
def test_autograd_goes_through_the_point_functions(space, shape, what, gen):
    if isinstance(space, ghor.SymplecticStiefel) and what in ("log", "dist", "project"):
        pytest.skip("no logarithm; the projection is an iteration for values only")
    if len(shape) > 2 or shape == (49, 7):
        shape = shape[-2:] if shape != (49, 7) else (9, 3)
    Y = point(space, shape, gen)
    V, U = tangent(space, Y, gen, 0.5), tangent(space, Y, gen)
    Z = space.exp(Y, V).detach()
    functions = {
        "retract": (lambda v, u: space.retract(Y, space.tangent(Y, v)), (V, U)),
        "exp": (lambda v, u: space.exp(Y, space.tangent(Y, v)), (V, U)),
        "transport": (lambda v, u: space.transport(Y, space.tangent(Y, v), u), (V, U)),
        "log": (lambda z: space.log(Y, space.project(z)), (Z,)),
        "dist": (lambda z: space.dist(Y, space.project(z)), (Z,)),
        "metric": (lambda v, u: space.metric(Y, v, u), (V, U)),
        "rgrad": (lambda y: space.rgrad(y, U), (Y,)),
        "tangent": (lambda y: space.tangent(y, U), (Y,)),
        "project": (lambda x: space.project(x), (Y + 0.1 * U,)),
    }
    f, inputs = functions[what]
    assert torch.autograd.gradcheck(
        f, tuple(x.detach().clone().requires_grad_() for x in inputs), atol=1e-5, fast_mode=True
    )


@pytest.mark.parametrize(
    ("space", "shape"),
    [(ghor.Stiefel(), (8, 2, 3, 3)), (ghor.Stiefel(), (30, 2, 3, 3)), (ghor.Sphere(), (5, 2, 3, 3))],
    ids=name,
)
def test_flatten_counts_the_last_dimensions_as_one(space, shape, gen):
    flat = type(space)(flatten=3)
    assert flat != space
    assert repr(flat) == f"{type(space).__name__}(flatten=3)"
    Y = flat.random(*shape, generator=gen, dtype=torch.float64)
    V = flat.tangent(Y, randn(shape, gen))
    y, v = Y.flatten(1), V.flatten(1)
    close(flat.exp(Y, V).flatten(1), space.exp(y, v), 1e-13)
    close(flat.distance(Y), space.distance(y), 0)
    close(flat.apply_section(flat.section(Y), flat.E(shape, dtype=torch.float64)), Y, 0)
    with pytest.raises(ValueError, match="flatten counts"):
        type(space)(flatten=0)
