"""Laws on the geometry of points: metric, gradients, geodesics, transport, logarithm.

A space may lack some of these; it says so when they are asked for, and the optimizer does without them
(test_frames.py has the laws that it needs).
"""

import pytest
import torch
from helpers.table import (
    RETRACTIONS,
    SPACES,
    close,
    eps,
    has_canonical_metric,
    has_distances,
    has_frame,
    has_one_radius,
    inner,
    is_flat,
    keeps_any_radius,
    law,
    name,
    point,
    randn,
    spoiled,
    tangent,
)

F64 = [torch.float64]


def is_manifold(space):
    return not is_flat(space)


def tol(Y):
    """For sums of the size of Y; tangent vectors have norm 1."""
    return (
        40 * eps(Y) * (1 + float(Y.double().norm() if not Y.is_complex() else Y.abs().double().norm()) ** 2)
    )


@pytest.mark.parametrize("space", SPACES, ids=name)
def test_a_space_says_what_it_has(space):
    for what in ("log", "dist", "mean", "metric", "nothing"):
        assert space.has(what) == (
            what != "nothing" and space.has("log" if what in ("dist", "mean") else what)
        )
    with pytest.raises(NotImplementedError, match="has no nothing here"):
        space.nothing()
    with pytest.raises(AttributeError, match="here it is called exp"):
        space.expmap()


# -- metric and gradient -------------------------------------------------------------------------------------


@law("metric", "rgrad", "tangent")
def test_the_gradient_represents_the_derivative(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    G, V = randn(shape, gen, dtype), tangent(space, Y, gen)
    grad = space.rgrad(Y, G)
    close(space.metric(Y, grad, V), inner(space, Y, G, V), 20 * tol(Y))
    assert space.is_tangent(Y, grad, tol(Y))


@law("metric", "tangent")
def test_the_metric_is_an_inner_product(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    U, V = tangent(space, Y, gen), tangent(space, Y, gen)
    close(space.metric(Y, U, V), space.metric(Y, V, U), tol(Y))
    close(space.inner(Y, U, V), space.metric(Y, U, V), 0)
    assert (space.metric(Y, V, V) > 0).all()
    close(space.norm(Y, V) ** 2, space.metric(Y, V, V), tol(Y))
    close(space.metric(Y, U, U + V), space.metric(Y, U, U) + space.metric(Y, U, V), 2 * tol(Y))


@law("tangent")
def test_tangent_is_a_projection(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    V = space.tangent(Y, randn(shape, gen, dtype))
    close(space.tangent(Y, V), V, tol(Y) * 10)
    assert space.is_tangent(Y, V, tol(Y))
    if not is_flat(space):
        X = V + spoiled(space, Y, 0.1) - Y
        assert not space.is_tangent(Y, X)
        assert not space.is_tangent(Y, 1e-12 * X)  # whatever its unit


@law("Omega", "tangent", where=has_frame)
def test_omega_and_global_rep_are_those_of_the_paper(space, shape, dtype, gen):
    """Omega(V) Y = V is in the algebra, and Lambda^-1 Omega(V) Lambda in g^hor, with A exactly skew."""
    Y = point(space, shape, gen, dtype)
    V, Lambda = tangent(space, Y, gen), space.section(Y)
    y, v, L, Omega, w = (
        X.reshape(-1, *X.shape[-2:]) if frame else space.layout.points(X)
        for X, frame in (
            (Y, False),
            (V, False),
            (Lambda, True),
            (space.Omega(Y, V), True),
            (space.global_rep(Lambda, V), False),
        )
    )
    close(Omega @ y, v, tol(Y))
    close(Omega, -space.star(Omega), tol(Y))
    A = w[..., : w.shape[-1], :]
    close(A, -space.star(A), 0)
    close(L @ w, v, tol(Y))
    close(space.algebra(w), torch.linalg.solve(L, Omega @ L), 20 * tol(Y))


# -- retractions and geodesics -------------------------------------------------------------------------------


@law("retract", "tangent", dtypes=F64, retraction=RETRACTIONS)
def test_retraction_is_first_order(space, shape, dtype, retraction, gen):
    """Central differences at h = 1e-4: error h^2 ||W||^3/6 and rounding eps/h. And a step of 0 is none."""
    Y = point(space, shape, gen, dtype)
    V, h = tangent(space, Y, gen), 1e-4
    derivative = (space.retract(Y, h * V, retraction) - space.retract(Y, -h * V, retraction)) / (2 * h)
    close(derivative, V, 1e-6)
    close(space.retract(Y, 0 * V, retraction), Y, 0 if has_one_radius(space) else eps(Y))
    assert space.residual(space.retract(Y, V, retraction)).max() <= 20 * tol(Y)


@law("retract", "exp", "tangent", where=is_manifold, dtypes=F64)
def test_cayley_is_second_order_to_the_geodesic(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    V = tangent(space, Y, gen)
    h = torch.tensor([0.04, 0.02, 0.01, 0.005], dtype=torch.float64)
    error = torch.stack([(space.retract(Y, t * V) - space.exp(Y, t * V)).norm() for t in h])
    slopes = (error[:-1] / error[1:]).log() / (h[:-1] / h[1:]).log()
    assert slopes.min() >= 2.9


@law("exp", "tangent")
def test_short_vectors_lead_straight_on(space, shape, dtype, gen):
    """exp and both retractions of t V are Y + t V + O(t^2), relatively to t V as far as Y has digits."""
    Y = point(space, shape, gen, dtype)
    V = tangent(space, Y, gen)
    for t in (2.0**-k for k in (10, 20, 40)):
        for Z in (space.exp(Y, t * V), *(space.retract(Y, t * V, r) for r in RETRACTIONS)):
            close(Z - Y, t * V, 4 * t * t * float(1 + Y.abs().max()) + 40 * eps(Y) * float(Y.abs().max()))


@law("exp", "transport", "tangent", dtypes=F64)
def test_geodesics_continue_themselves(space, shape, dtype, gen):
    """gamma(s + t) = gamma_(gamma(s))(t), the velocity carried along by transport."""
    Y = point(space, shape, gen, dtype)
    V = tangent(space, Y, gen)
    Z, velocity = space.exp(Y, 0.3 * V), space.transport(Y, 0.3 * V, V)
    close(space.exp(Z, 0.5 * velocity), space.exp(Y, 0.8 * V), 40 * tol(Y))


@law("exp", "transport", "metric", "tangent", where=has_canonical_metric, length=[0.3, 2.0, 10.0])
def test_transport_is_an_isometry(space, shape, dtype, length, gen):
    """In the metric of g^hor, whose coordinates it keeps: lengths and angles, on ways of any length."""
    length = length if space.compact else min(length, 2.0)
    Y = point(space, shape, gen, dtype)
    V, U, W = tangent(space, Y, gen, length), tangent(space, Y, gen), tangent(space, Y, gen)
    Z, u, w = space.exp(Y, V), space.transport(Y, V, U), space.transport(Y, V, W)
    slack = 20 * (tol(Y) + tol(Z)) * (1 + length)
    assert space.is_tangent(Z, u, slack)
    close(space.metric(Z, u, w), space.metric(Y, U, W), slack)
    close(space.norm(Z, u), space.norm(Y, U), slack)


# -- logarithm and distance ----------------------------------------------------------------------------------


@law("exp", "log", "dist", "tangent")
def test_log_inverts_exp_and_dist_is_its_length(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    V = tangent(space, Y, gen, 0.5)
    Z = space.exp(Y, V)
    close(space.log(Y, Z), V, 10 * tol(Y))
    close(space.dist(Y, Z), space.norm(Y, V), 10 * tol(Y))
    close(space.log(Y, Y), 0 * V, tol(Y))


@law("exp", "log", "dist", dtypes=F64)
def test_exp_inverts_log_of_any_points(space, shape, dtype, gen):
    """Of points far apart, or it is NaN; and no way is shorter than the shortest, nor longer back."""
    X, Y, Z = (point(space, shape, gen, dtype) for _ in range(3))
    V, sides = space.log(Y, Z), [space.dist(*ends) for ends in ((X, Y), (Y, Z), (X, Z))]
    there = torch.isfinite(torch.stack(sides)).all(0)
    far, length, back = space.dist(space.exp(Y, V), Z), space.norm(Y, V), space.dist(Z, Y)
    for a, b in ((far, 0 * far), (sides[1], length), (sides[1], back)):
        close(torch.where(there, a, 0), torch.where(there, b, 0), 1e-9)
    if space.has("metric") and has_distances(space):
        assert (sides[2] <= sides[0] + sides[1] + tol(Y))[there].all()


@law("exp", "log", "transport", "tangent", dtypes=F64)
def test_transport_there_and_back(space, shape, dtype, gen):
    """The velocity of a geodesic arrives as that of the way back, reversed; others return as they were."""
    Y = point(space, shape, gen, dtype)
    V, U = tangent(space, Y, gen, 0.5), tangent(space, Y, gen)
    Z, velocity = space.exp(Y, V), space.transport(Y, V, V)
    close(space.log(Z, Y), -velocity, 20 * tol(Y))
    close(space.transport(Z, -velocity, space.transport(Y, V, U)), U, 20 * tol(Y))


@law("dist")
def test_dist_and_its_derivative_are_0_where_the_points_meet(space, shape, dtype, gen):
    for Y in (space.E(shape, dtype=dtype), point(space, shape, gen, dtype)):
        Y, Z = Y.requires_grad_(), Y.detach().clone().requires_grad_()
        d = space.dist(Y, Z)
        for X in (d, *torch.autograd.grad(d.sum(), (Y, Z))):
            close(X, torch.zeros_like(X), 4 * eps(X) if keeps_any_radius(space) else 0)


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


@law("norm", "tangent", dtypes=F64)
def test_the_norm_has_derivative_0_at_0(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    V = torch.zeros_like(Y).requires_grad_()
    length = space.norm(Y, V)
    close(length, torch.zeros_like(length), 0)
    (g,) = torch.autograd.grad(length.sum(), V)
    close(g, torch.zeros_like(g), 0)
