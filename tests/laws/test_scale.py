"""Laws of scale: nothing depends on the unit in which points are measured, from 1e-12 to 1e12.

A unit acts on points and on their tangent vectors: on all entries of positive definite matrices and of
vectors, on the positions of poses. Every function of points commutes with it. Units are powers of two, so
that changing them rounds nothing.
"""

import pytest
import torch
from helpers.functions import arguments, called, functions
from helpers.table import RETRACTIONS, close, eps, inner, name, point, randn, tangent

import ghor

UNITS = [2.0**k for k in (-40, -20, 20, 40)]
SHAPES = {
    ghor.SPD(): (4, 3, 3),
    ghor.SpecialEuclidean(): (4, 3, 4),
    ghor.PositionsOrientations(): (4, 2, 3),
    ghor.Euclidean(): (4, 3),
}
SPD, SE, PO, _ = SHAPES
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
    assert torch.equal(space.project(X), in_unit(space, space.project(Y), unit))  # to the bit


@each_dtype
@each_unit
@each_space
def test_functions_of_points_do_not_see_the_unit(space, unit, dtype, gen):
    """Whatever gives points or vectors, of those; `rgrad` takes covectors, and is below."""
    Y = point(space, SHAPES[space], gen, dtype)
    for what, of in functions(space).items():
        if what != "rgrad" and of[-1] in "pv" and "x" not in of:
            given = arguments(space, what, of, Y, gen)
            if what == "tangent":
                given[1] = randn(SHAPES[space], gen, dtype)
            found = called(space, what, [in_unit(space, X, unit) for X in given])
            assert (in_unit(space, found, 1 / unit) - called(space, what, given)).abs().max() <= 200 * eps(Y)


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
    slope = inner(space, Y, G, V)
    close(space.metric(X, other, V1), slope, 200 * eps(Y))
    if space in (SE, PO):  # turns alone, and positions alone
        turn, way = (in_unit(space, A, 0.0) for A in (U, V)), (A - in_unit(space, A, 0.0) for A in (U, V))
        turn, way = [*turn], [*way]
        close(space.metric(X, *turn), space.metric(Y, *turn), 50 * eps(Y))
        close(space.metric(X, *(A * unit for A in way)) / unit**2, space.metric(Y, *way), 50 * eps(Y))


@each_dtype
@each_unit
def test_distances_of_positive_definite_matrices_have_no_unit(unit, dtype, gen):
    P, Q = SPD.random(2, 4, 3, 3, generator=gen, dtype=dtype)
    V = tangent(SPD, P, gen)
    close(SPD.dist(unit * P, unit * Q), SPD.dist(P, Q), 50 * eps(P))
    close(SPD.norm(unit * P, unit * V), SPD.norm(P, V), 50 * eps(P))
    close(SPD.log_euclidean(unit * P, unit * Q), SPD.log_euclidean(P, Q), 200 * eps(P))


@each_dtype
@each_unit
@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize("space", [SPD, SE, PO], ids=name)
def test_steps_do_not_see_the_unit(space, retraction, unit, dtype, gen):
    """Positions go as far as they are told; only turns have a longest step."""
    Y, G = point(space, SHAPES[space], gen, dtype), randn(SHAPES[space], gen, dtype)
    ends = []
    for s in (1.0, unit):
        X = torch.nn.Parameter(in_unit(space, Y, s))
        opt = ghor.optim.SGD([X], space=space, lr=0.005, retraction=retraction)
        for _ in range(3):
            # a gradient is a covector; here W = -lr B is to scale as a vector does
            X.grad = G / s if space == SPD else in_unit(space, G, s)
            opt.step()
        ends.append(in_unit(space, X.detach(), 1 / s))
    close(ends[1], ends[0], 200 * eps(Y))
