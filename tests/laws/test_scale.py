"""Laws of scale: nothing depends on the unit in which points are measured, from 1e-12 to 1e12.

A unit acts on points and on their tangent vectors: on all entries of positive definite matrices and of
vectors, on the positions of poses. Every function of points commutes with it. Units are powers of two, so
that changing them rounds nothing.
"""

import contextlib
from functools import partial

import pytest
import torch
from table import (
    MANIFOLDS,
    RETRACTIONS,
    can_be_left,
    close,
    eps,
    has,
    name,
    one,
    point,
    randn,
    shapes,
    tangent,
)

import ghor
from ghor._torch.values import as_on_an_accelerator

UNITS = [2.0**k for k in (-40, -20, 20, 40)]
SHAPES = {
    ghor.SPD(): (4, 3, 3),
    ghor.SpecialEuclidean(): (4, 3, 4),
    ghor.PositionsOrientations(): (4, 2, 3),
    ghor.Euclidean(): (4, 3),
}
SPD, SE, PO, _ = SHAPES
HOMOGENEOUS = [(s, shapes(s)[-1]) for s in MANIFOLDS]
each_space = pytest.mark.parametrize("space", SHAPES, ids=name)
each_unit = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: f"{unit:.0e}")
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)


def factors(space, unit):
    """What a unit multiplies points and vectors by."""
    if space == SE:
        return torch.tensor([1, 1, 1, unit])
    return torch.tensor([[unit], [1]]) if space == PO else torch.tensor(unit)


def in_unit(space, X, unit):
    return X * factors(space, unit).to(X.dtype)


@each_dtype
@each_unit
@each_space
def test_points_stay_points(space, unit, dtype, gen):
    Y = point(space, SHAPES[space], gen, dtype)
    X = in_unit(space, Y, unit)
    assert (space.residual(X) <= space.tolerance(X)).all()
    assert torch.equal(space.project(X), in_unit(space, space.project(Y), unit))


@each_dtype
@each_unit
@each_space
def test_functions_of_points_do_not_see_the_unit(space, unit, dtype, gen):
    Y = point(space, SHAPES[space], gen, dtype)
    V, U = tangent(space, Y, gen), tangent(space, Y, gen)
    Z = space.exp(Y, V)
    functions = {
        "exp": (space.exp, Y, V),
        "retract": (space.retract, Y, V),
        "log": (space.log, Y, Z),
        "transport": (space.transport, Y, V, U),
        "tangent": (space.tangent, Y, randn(SHAPES[space], gen, dtype)),
    }
    for what, (f, *given) in functions.items():
        other = in_unit(space, f(*(in_unit(space, X, unit) for X in given)), 1 / unit)
        assert (other - f(*given)).abs().max() <= 200 * eps(Y), what


@each_dtype
@each_unit
@each_space
def test_gradients_and_the_metric_do_not_see_the_unit(space, unit, dtype, gen):
    """Of the same loss in other units: Euclidean gradients are covectors, and <grad, V> is the derivative."""
    Y = point(space, SHAPES[space], gen, dtype)
    G, U, V = randn(SHAPES[space], gen, dtype), tangent(space, Y, gen), tangent(space, Y, gen)
    X, U1, V1 = (in_unit(space, A, unit) for A in (Y, U, V))
    grad, other = space.rgrad(Y, G), space.rgrad(X, in_unit(space, G, 1 / unit))
    if space == SPD:  # whose metric has no unit: gradients are vectors there
        close(other / unit, grad, 200 * eps(Y))
        close(SPD.metric(X, U1, V1), SPD.metric(Y, U, V), 50 * eps(Y))
    slope = (G * V).sum(one(space, Y))
    close(space.metric(X, other, V1), slope, 200 * eps(Y))
    if space in (SE, PO):  # turns alone, and positions alone
        turn, way = (in_unit(space, A, 0.0) for A in (U, V)), (A - in_unit(space, A, 0.0) for A in (U, V))
        turn, way = [*turn], [*way]
        close(space.metric(X, *turn), space.metric(Y, *turn), 50 * eps(Y))
        close(space.metric(X, *(A * unit for A in way)) / unit**2, space.metric(Y, *way), 50 * eps(Y))


@each_dtype
@pytest.mark.parametrize(("space", "shape"), HOMOGENEOUS, ids=name)
def test_vectors_have_no_unit(space, shape, dtype, gen):
    """rgrad, tangent, metric, norm, Omega and transport are homogeneous in vectors, to the bit.

    Powers of two round nothing, from 1e-12 to 1e12: what is smaller or larger is computed in the same way.
    """
    Y = point(space, shape, gen, dtype)
    G, U, V = randn(shape, gen, dtype), tangent(space, Y, gen), tangent(space, Y, gen)
    linear = {"rgrad": [G], "tangent": [G], "transport": [V, U], "norm": [U], "Omega": [U]}
    for what in (w for w in linear if has(space, w)):
        *fixed, X = linear[what]
        f = partial(getattr(space, what), Y, *fixed)
        for unit in UNITS:
            assert torch.equal(f(unit * X), unit * f(X)), what
    if has(space, "metric"):
        for unit in UNITS:
            assert torch.equal(space.metric(Y, unit * U, V), unit * space.metric(Y, U, V))
            assert torch.equal(space.metric(Y, U, unit * V), unit * space.metric(Y, U, V))


@each_dtype
@pytest.mark.parametrize(("space", "shape"), [c for c in HOMOGENEOUS if has(c[0], "exp")], ids=name)
def test_short_vectors_lead_straight_on(space, shape, dtype, gen):
    """exp and both retractions of t V are Y + t V + O(t^2), relatively to t V as far as Y has digits; log and
    dist of the way there give it back."""
    Y = point(space, shape, gen, dtype)
    V = tangent(space, Y, gen)
    for t in (2.0**-k for k in (20, 30, 40)):
        slack = 4 * t * t + 40 * eps(Y) * float(Y.abs().max())
        for Z in (space.exp(Y, t * V), *(space.retract(Y, t * V, r) for r in RETRACTIONS)):
            close(Z - Y, t * V, slack)
            if has(space, "log") and can_be_left(space):
                close(space.log(Y, Z), t * V, 10 * slack)
                close(space.dist(Y, Z), space.norm(Y, t * V), 10 * slack)


@each_dtype
@each_unit
def test_distances_of_positive_definite_matrices_have_no_unit(unit, dtype, gen):
    P, Q = SPD.random(2, 4, 3, 3, generator=gen, dtype=dtype)
    V = tangent(SPD, P, gen)
    close(SPD.dist(unit * P, unit * Q), SPD.dist(P, Q), 50 * eps(P))
    close(SPD.norm(unit * P, unit * V), SPD.norm(P, V), 50 * eps(P))
    close(SPD.log_euclidean(unit * P, unit * Q), SPD.log_euclidean(P, Q), 200 * eps(P))


@each_unit
@each_space
def test_means_do_not_see_the_unit(space, unit, gen):
    Y = space.random(*SHAPES[space][1:], generator=gen, dtype=torch.float64)
    V = space.tangent(Y, randn((5, *Y.shape), gen) / 2)
    X = space.exp(Y.expand_as(V), V)
    mean = in_unit(space, space.mean(in_unit(space, X, unit)), 1 / unit)
    close(mean, space.mean(X), 1e-12)


@each_dtype
@each_unit
@pytest.mark.parametrize("blind", [False, True], ids=["cpu", "accelerator"])
@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize("space", [SPD, SE, PO], ids=name)
def test_steps_do_not_see_the_unit(space, retraction, blind, unit, dtype, gen):
    """Positions go as far as they are told; only turns have a longest step."""
    Y, G = point(space, SHAPES[space], gen, dtype), randn(SHAPES[space], gen, dtype)
    ends = []
    for s in (1.0, unit):
        X = torch.nn.Parameter(in_unit(space, Y, s))
        with as_on_an_accelerator() if blind else contextlib.nullcontext():
            opt = ghor.optim.SGD([X], space=space, lr=0.005, retraction=retraction)
            for _ in range(3):
                # a gradient is a covector; here W = -lr B is to scale as a vector does
                X.grad = G / s if space == SPD else in_unit(space, G, s)
                opt.step()
        ends.append(in_unit(space, X.detach(), 1 / s))
    close(ends[1], ends[0], 200 * eps(Y))
