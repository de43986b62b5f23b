"""Laws on the geometry of points: metric, gradients, geodesics, transport, logarithm.

A space may lack some of these; it says so when they are asked for, and the optimizer does without them
(test_frames.py has the laws that it needs).
"""

import inspect

import pytest
import torch
from functions import FUNCTIONS, REST
from table import (
    CASES,
    RETRACTIONS,
    SPACES,
    close,
    eps,
    ghor_product,
    has,
    has_canonical_metric,
    has_frame,
    inner,
    is_flat,
    law,
    name,
    point,
    randn,
    spoiled,
    tangent,
    wide,
)

import ghor
from ghor.linalg import log_positive
from ghor.spaces.matrix import MatrixSpace

F64 = [torch.float64]
OPTIONAL = [
    "metric",
    "inner",
    "norm",
    "rgrad",
    "tangent",
    "Omega",
    "retract",
    "exp",
    "transport",
    "log",
    "dist",
    "mean",
]


# Tolerances: rounding of sums of at most 49 x 7 products, hence a few hundred eps, times the condition of the
# point where the group is not compact (||Y|| <= 4 in the table).
def tol(Y):
    return 500 * eps(Y)


def is_manifold(space):
    return not is_flat(space)


def has_distances(space):
    """Whether `dist` is the length of the shortest way; that of a screw motion is not."""
    return not isinstance(space, ghor.SpecialEuclidean | ghor.PositionsOrientations)


ABSENT = [(space, shape, what) for space, shape in CASES for what in OPTIONAL if not has(space, what)]


@pytest.mark.parametrize(("space", "shape", "what"), ABSENT, ids=name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name)
def test_what_a_space_does_not_have_it_says(space, shape, what, dtype, gen):
    Y, Z = (point(space, shape, gen, dtype) for _ in range(2))
    arguments = {"metric": (Y, Z, Z), "inner": (Y, Z, Z), "transport": (Y, Z, Z), "mean": (Y[None],)}.get(
        what, (Y, Z)
    )
    words = "'log'" if what in ("log", "dist", "mean") else what
    with pytest.raises(NotImplementedError, match=words) as info:
        getattr(space, what)(*arguments)
    assert repr(space) in str(info.value)


# -- metric and gradient -------------------------------------------------------------------------------------


@law("rgrad", "metric", "tangent")
def test_rgrad_represents_the_differential(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    G, V = randn(shape, gen, dtype), tangent(space, Y, gen)
    grad = space.rgrad(Y, G)
    assert space.is_tangent(Y, grad, tol(Y))
    close(space.metric(Y, grad, V), inner(space, Y, G, V), 40 * tol(Y))


@law("metric", "tangent")
def test_metric_is_symmetric_positive_and_inner(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    U, V = tangent(space, Y, gen), tangent(space, Y, gen)
    close(space.metric(Y, U, V), space.metric(Y, V, U), tol(Y))
    close(space.metric(Y, U, V), space.inner(Y, U, V), 0)
    assert (space.metric(Y, V, V) > 0).all()
    close(space.norm(Y, V) ** 2, space.metric(Y, V, V), tol(Y))


@law("metric", "tangent", where=has_canonical_metric)
def test_the_canonical_metric_is_that_of_ghor(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    U, V, Lambda = tangent(space, Y, gen), tangent(space, Y, gen), space.section(Y)
    product = ghor_product(space, space.global_rep(Lambda, U), space.global_rep(Lambda, V))
    close(product, space.metric(Y, U, V), tol(Y))


@law("rgrad", where=has_canonical_metric)
def test_global_grad_is_the_gradient_of_the_canonical_metric(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    Lambda, G = space.section(Y), randn(shape, gen, dtype)
    B = space.global_grad(Lambda, G.clone())
    close(B, space.global_rep(Lambda, space.rgrad(Y, G)), 40 * tol(Y))


@law("tangent")
def test_tangent_is_a_projection(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    X = randn(shape, gen, dtype)
    V = space.tangent(Y, X)
    close(space.tangent(Y, V), V, tol(Y) * 10)
    assert space.is_tangent(Y, V, tol(Y))
    if not is_flat(space):
        X = V + spoiled(space, Y, 0.1) - Y
        assert not space.is_tangent(Y, X)
        assert not space.is_tangent(Y, 1e-12 * X)  # whatever its unit


# -- tangent vectors in g^hor --------------------------------------------------------------------------------


@law("Omega", "tangent", where=has_frame)
def test_omega_lifts_tangent_vectors(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    V = tangent(space, Y, gen)
    Omega = space.Omega(Y, V)
    close(space.unmatrix(Omega @ space.matrix(Y), shape), V, tol(Y))
    close(Omega + space.star(Omega), torch.zeros_like(Omega), tol(Y))


@law("tangent", where=is_flat)
def test_global_rep_of_a_vector_space_is_the_identity(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    V = tangent(space, Y, gen)
    close(space.global_rep(space.section(Y), V), V, 0)


@law("Omega", "tangent", where=has_frame)
def test_global_rep_is_the_isomorphism_to_ghor(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    V, Lambda = tangent(space, Y, gen), space.section(Y)
    H = space.global_rep(Lambda, V)
    assert H.shape == V.shape
    M = space.matrix(H)
    n = M.shape[-1]
    A = M[..., :n, :]
    close(A + space.star(A), torch.zeros_like(A), 0)  # exactly skew
    close(space.unmatrix(Lambda @ M, shape), V, tol(Y))
    dense = torch.linalg.solve(Lambda, space.Omega(Y, V) @ Lambda)  # the paper's Lambda^-1 Omega Lambda
    close(space.algebra(M), dense, 20 * tol(Y))


@law("tangent", where=has_frame)
def test_global_grad_is_the_derivative_along_lambda_w(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    Lambda, G = space.section(Y), randn(shape, gen, dtype)
    W = space.global_rep(Lambda, tangent(space, Y, gen))
    B = space.global_grad(Lambda, G.clone())
    close(
        ghor_product(space, B, W),
        inner(space, Y, G, space.unmatrix(Lambda @ space.matrix(W), shape)),
        40 * tol(Y),
    )
    A = space.matrix(B)[..., : space.size(shape)[1], :]
    close(A + space.star(A), torch.zeros_like(A), 0)  # exactly skew


@law("tangent", where=has_frame, retraction=RETRACTIONS)
def test_update_section_is_lambda_times_the_dense_retraction(space, shape, dtype, retraction, gen):
    Y = point(space, shape, gen, dtype)
    Lambda = space.section(Y)
    W = space.global_rep(Lambda, tangent(space, Y, gen))
    M = space.algebra(space.matrix(W)).to(wide(dtype))
    I = torch.eye(M.shape[-1], dtype=wide(dtype))
    R = torch.linalg.matrix_exp(M) if retraction == "geodesic" else torch.linalg.solve(I - M / 2, I + M / 2)
    close(space.update_section(Lambda, W, retraction), Lambda.to(wide(dtype)) @ R, 20 * tol(Y))


# -- retractions and geodesics -------------------------------------------------------------------------------


@law("retract", "tangent", retraction=RETRACTIONS)
def test_retract_and_sections_agree(space, shape, dtype, retraction, gen):
    Y = point(space, shape, gen, dtype)
    V, Lambda = tangent(space, Y, gen), space.section(Y)
    moved = space.update_section(Lambda, space.global_rep(Lambda, V), retraction)
    Z = space.retract(Y, V, retraction)
    close(Z, space.apply_section(moved, space.E(shape, dtype=dtype)), 20 * tol(Y))
    assert space.residual(Z).max() <= 20 * tol(Y)
    torch.testing.assert_close(space.retract(Y, 0 * V, retraction), Y, atol=0, rtol=0)


@law("retract", "tangent", dtypes=F64, retraction=RETRACTIONS)
def test_retraction_is_first_order(space, shape, dtype, retraction, gen):
    """Central differences at h = 1e-4: error h^2 ||W||^3/6 and rounding eps/h."""
    Y = point(space, shape, gen, dtype)
    V, h = tangent(space, Y, gen), 1e-4
    derivative = (space.retract(Y, h * V, retraction) - space.retract(Y, -h * V, retraction)) / (2 * h)
    close(derivative, V, 1e-6)


@law("retract", "exp", "tangent", where=is_manifold, dtypes=F64)
def test_cayley_is_second_order_to_the_geodesic(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    V = tangent(space, Y, gen)
    h = torch.tensor([0.04, 0.02, 0.01, 0.005], dtype=torch.float64)
    error = torch.stack([(space.retract(Y, t * V) - space.exp(Y, t * V)).norm() for t in h])
    slopes = (error[:-1] / error[1:]).log() / (h[:-1] / h[1:]).log()
    assert slopes.min() >= 2.9


@law("exp", "transport", "tangent", dtypes=F64)
def test_geodesics_continue_themselves(space, shape, dtype, gen):
    """gamma(s + t) = gamma_(gamma(s))(t), the velocity carried along by transport."""
    Y = point(space, shape, gen, dtype)
    V = tangent(space, Y, gen)
    Z, velocity = space.exp(Y, 0.3 * V), space.transport(Y, 0.3 * V, V)
    close(space.exp(Z, 0.5 * velocity), space.exp(Y, 0.8 * V), 40 * tol(Y))


@law("exp", "transport", "tangent")
def test_transport_keeps_coordinates(space, shape, dtype, gen):
    """Along the connection of the second kind: coordinates in g^hor stay, so it is an isometry of their
    metric."""
    Y = point(space, shape, gen, dtype)
    V, U, Lambda = tangent(space, Y, gen), tangent(space, Y, gen), space.section(Y)
    moved, Z = space.transport(Y, V, U), space.exp(Y, V)
    assert space.is_tangent(Z, moved, 20 * tol(Y))
    Lambda2 = space.update_section(Lambda, space.global_rep(Lambda, V), "geodesic")
    close(space.global_rep(Lambda2, moved), space.global_rep(Lambda, U), 40 * tol(Y))
    if has_canonical_metric(space):
        close(space.norm(Z, moved), space.norm(Y, U), 20 * tol(Y))


@law("exp", "log", "dist", "tangent")
def test_log_inverts_exp_and_dist_is_its_length(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    V = tangent(space, Y, gen, 0.5)
    Z = space.exp(Y, V)
    close(space.log(Y, Z), V, 10 * tol(Y))
    close(space.dist(Y, Z), space.norm(Y, V), 10 * tol(Y))
    close(space.dist(Y, Z), space.dist(Z, Y), 10 * tol(Y))
    close(space.log(Y, Y), 0 * V, tol(Y))


@law("exp", "log", "dist", dtypes=F64)
def test_exp_inverts_log_of_any_points(space, shape, dtype, gen):
    """Of points far apart, or `log` says that it cannot; and no way is shorter than the shortest."""
    X, Y, Z = (point(space, shape, gen, dtype) for _ in range(3))
    try:
        V, sides = space.log(Y, Z), [space.dist(*ends) for ends in ((X, Y), (Y, Z), (X, Z))]
    except ValueError as error:
        pytest.skip(str(error))
    close(space.dist(space.exp(Y, V), Z), 0, 1e-9)  # the same point; on Grassmann perhaps another basis
    close(space.dist(Y, Z), space.norm(Y, V), 1e-9)
    if space.has("metric") and has_distances(space):
        assert (sides[2] <= sides[0] + sides[1] + tol(Y)).all()


@law("exp", "log", "transport", "tangent", dtypes=F64)
def test_transport_there_and_back(space, shape, dtype, gen):
    """The velocity of a geodesic arrives as that of the way back, reversed; other vectors return as they
    were."""
    Y = point(space, shape, gen, dtype)
    V, U = tangent(space, Y, gen, 0.5), tangent(space, Y, gen)
    Z, velocity = space.exp(Y, V), space.transport(Y, V, V)
    close(space.log(Z, Y), -velocity, 20 * tol(Y))
    close(space.transport(Z, -velocity, space.transport(Y, V, U)), U, 20 * tol(Y))


@law("rgrad", "transport", "metric", "tangent", dtypes=F64)
def test_what_is_linear_is_additive(space, shape, dtype, gen):
    """In vectors; multiples of them are in test_scale.py."""
    Y = point(space, shape, gen, dtype)
    G, H = randn(shape, gen, dtype), randn(shape, gen, dtype)
    U, V, W = (tangent(space, Y, gen) for _ in range(3))
    for f, a, b in (
        (lambda X: space.tangent(Y, X), G, H),
        (lambda X: space.rgrad(Y, X), G, H),
        (lambda X: space.transport(Y, W, X), U, V),
        (lambda X: space.metric(Y, W, X), U, V),
    ):
        close(f(a + b), f(a) + f(b), 40 * tol(Y))


@law("dist")
def test_dist_and_its_derivative_are_0_where_the_points_meet(space, shape, dtype, gen):
    for Y in (space.E(shape, dtype=dtype), point(space, shape, gen, dtype)):
        Y, Z = Y.requires_grad_(), Y.detach().clone().requires_grad_()
        d = space.dist(Y, Z)
        for X in (d, *torch.autograd.grad(d.sum(), (Y, Z))):
            close(X, torch.zeros_like(X), 0)


@law("dist", "exp", "norm", "rgrad", "tangent")
def test_dist_of_near_points_has_its_digits_and_its_derivative(space, shape, dtype, gen):
    """As many as the distance leaves of those of the points; the gradient of a distance has length 1."""
    Y = point(space, shape, gen, dtype)
    size = eps(Y) ** 0.4  # 5e-7 and 2e-3
    V = tangent(space, Y, gen, size)
    Z = space.exp(Y, V).requires_grad_()
    d = space.dist(Y, Z)
    (G,) = torch.autograd.grad(d.sum(), Z)
    close(d, space.norm(Y, V), 2 * tol(Y))
    Z = Z.detach()
    length = space.norm(Z, space.rgrad(Z, G))
    close(length, torch.ones_like(length), 2 * tol(Y) / size + 10 * size)


@law("log", "dist", "exp", "metric", dtypes=F64)
def test_an_empty_batch_gives_empty_results(space, shape, dtype, gen):
    one = shape[len(shape) - space.dims :]
    Y, count = (
        torch.zeros(0, *one, dtype=dtype),
        () if is_flat(space) else space.residual(torch.zeros(0, *one)).shape,
    )
    for what in (space.log, space.exp, space.retract, space.tangent, space.rgrad):
        assert what(Y, Y).shape == Y.shape
    for number in (space.dist(Y, Y), space.norm(Y, Y), space.metric(Y, Y, Y)):
        assert number.shape == count
    assert space.is_tangent(Y, Y)
    if not isinstance(space, MatrixSpace | ghor.Euclidean):  # matrices say that they have no such points
        assert space.project(Y).shape == Y.shape


@law("norm", "tangent", dtypes=F64)
def test_the_norm_has_derivative_0_at_0(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    V = torch.zeros_like(Y).requires_grad_()
    size = space.norm(Y, V)
    close(size, torch.zeros_like(size), 0)
    (g,) = torch.autograd.grad(size.sum(), V)
    close(g, torch.zeros_like(g), 0)


# -- autograd ------------------------------------------------------------------------------------------------


@law(
    "exp",
    "tangent",
    dtypes=F64,
    what=["retract", "exp", "transport", "log", "dist", "metric", "rgrad", "tangent", "project"],
)
def test_autograd_goes_through_the_point_functions(space, shape, dtype, what, gen):
    if not has(space, what):
        pytest.skip(f"{space} has no {what}")
    if len(shape) > 2 or shape == (49, 7):
        shape = shape[-2:] if shape != (49, 7) else (9, 3)
    Y = point(space, shape, gen, dtype)
    V, U = tangent(space, Y, gen, 0.5), tangent(space, Y, gen)
    Z = space.exp(Y, V).detach()
    functions = {
        "retract": (lambda v: space.retract(Y, space.tangent(Y, v)), (V,)),
        "exp": (lambda v: space.exp(Y, space.tangent(Y, v)), (V,)),
        "transport": (lambda v, u: space.transport(Y, space.tangent(Y, v), u), (V, U)),
        "log": (lambda z: space.log(Y, space.project(z)), (Z,)),
        "dist": (lambda z: space.dist(Y, space.project(z)), (Z,)),
        "metric": (lambda v, u: space.metric(Y, v, u), (V, U)),
        "rgrad": (lambda y: space.rgrad(y, U), (Y,)),
        "tangent": (lambda y: space.tangent(y, U), (Y,)),
        "project": (lambda x: space.project(x), (Y + 0.1 * U,)),
    }
    f, inputs = functions[what]
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    assert torch.autograd.gradcheck(f, inputs, atol=1e-5, fast_mode=True)
    if what in ("log", "dist", "project"):
        assert torch.autograd.gradgradcheck(f, inputs, atol=1e-4, fast_mode=True)


def test_logarithms_are_differentiated_twice_where_eigenvalues_meet():
    for values in (
        [1.0, 1.0, 2.0, 2.0],
        [1e-3, 1e-3 + 1e-9, 1e-3 + 1e-7, 30.0],
        [1.0, 1 + 1e-5, 1 + 3e-4, 5.0],
    ):
        X = torch.diag(torch.tensor(values, dtype=torch.float64).sqrt()).requires_grad_()
        assert torch.autograd.gradgradcheck(
            lambda X: log_positive(X @ X.mT) * X.mT, (X,), eps=1e-7, rtol=1e-3, atol=1e-3
        )
    (g,) = torch.autograd.grad(log_positive(X @ X.mT).square().sum(), X, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), X, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(h.sum(), X)


# -- kernels -------------------------------------------------------------------------------------------------


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
    close(flat.residual(Y), space.residual(y), 0)
    close(flat.apply_section(flat.section(Y), flat.E(shape, dtype=torch.float64)), Y, 0)
    with pytest.raises(ValueError, match="flatten counts"):
        type(space)(flatten=0)


def test_log_of_kernels(gen):
    space = ghor.Stiefel(flatten=3)
    Y = space.random(8, 3, 2, 1, generator=gen, dtype=torch.float64)
    V = 0.1 * space.tangent(Y, randn((8, 3, 2, 1), gen))
    close(space.log(Y, space.exp(Y, V)), V, 1e-13)


def test_every_function_of_points_and_frames_runs_through_the_laws():
    """If a space adds one, it goes into the tables of tests/functions.py."""
    found = set()
    for space in SPACES:
        for n in (n for n in dir(type(space)) if not n.startswith(("_", "implicit_", "check"))):
            function = getattr(type(space), n)
            taken = [*inspect.signature(function).parameters][1:2] if inspect.isfunction(function) else []
            found |= {n} if taken in (["Y"], ["Lambda"]) else set()
    assert found <= {*FUNCTIONS, *REST}
    assert len(found) >= 30
