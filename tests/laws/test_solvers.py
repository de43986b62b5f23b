"""Laws of the solvers on every space: NaN is never a success, and no run depends on the number of threads."""

import math

import pytest
import torch
from helpers.table import SPACES, accepts, is_flat, name, one, point, shapes
from helpers.threads import threads

import ghor
from ghor.solve.minimize import METHODS

each_method = pytest.mark.parametrize("method", METHODS)
each_space = pytest.mark.parametrize("space", SPACES, ids=name)


class Spoiled(torch.autograd.Function):
    """x, of which the derivative is NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, G):
        return G * math.nan


def spoiled_losses(target, start):
    """By name: the value is NaN, or all but the first are, or those elsewhere, or the gradient."""
    calls = []

    def later(x):
        calls.append(x)
        return (x - target).abs().square().sum() * (1 if len(calls) == 1 else math.nan)

    def beyond(x):
        off = (x - target).abs().square().sum()
        return off if torch.equal(x.detach(), start) else off * math.nan

    return {
        "value": lambda x: (x - target).abs().square().sum() * math.nan,
        "later": later,
        "elsewhere": beyond,
        "gradient": lambda x: (Spoiled.apply(x) - target).abs().square().sum(),
    }


@each_method
@each_space
def test_nan_is_no_success(space, method, gen):
    shape = shapes(space)[0]
    x, target = point(space, shape, gen), point(space, shape, gen)
    for what, f in spoiled_losses(target, x).items():
        result = ghor.minimize(f, x, space, method, max_iterations=60)
        assert not result.success, what
        assert "not finite" in result.status or "no step lowers the value" in result.status, what
        assert torch.isfinite(result.x).all(), what


@each_method
@each_space
def test_a_start_with_nan_is_refused(space, method, gen):
    """Also where the loss does not depend on the entry that is NaN."""
    x, bad = point(space, shapes(space)[0], gen), []
    for i in (0, x.numel() - 1):
        for value in (math.nan, math.inf):
            X = x.clone()
            X.view(-1)[i] = value
            bad.append(X)
    for X in bad:
        with pytest.raises(ValueError, match=r"not finite|off"):
            ghor.minimize(lambda y: y.nan_to_num(0, 0, 0).square().sum(), X, space, method)


# Shapes of single points of sides 3 and 200; each space takes the first of each that it accepts.
SMALL = [(3,), (3, 2), (3, 3), (4, 2), (3, 4), (2, 3)]
LARGE = [(200,), (200, 3), (200, 4), (200, 200)]
CASES = [
    pytest.param(
        s,
        (k, *shape),
        method,
        marks=[] if (tried, k) == (SMALL, 3) else [pytest.mark.slow],
        id=f"{name(s)}-{k}x{name(shape)}-{method}",
    )
    for s in SPACES
    for tried in (SMALL, LARGE)
    for shape in [x for x in tried if accepts(s, x)][:1]
    for k in (1, 3)
    for method in METHODS
    if method != "bfgs" or k * math.prod(shape) <= 700  # the whole matrix of a larger one takes seconds
]


@pytest.mark.parametrize(("space", "shape", "method"), CASES)
def test_solvers_with_four_threads_do_what_they_do_with_one(space, shape, method):
    """Over a few iterations, in which rounding does not grow by more than the condition of the loss."""
    gen = torch.Generator().manual_seed(0)
    x, target = (space.random(*shape, generator=gen, dtype=torch.float64) for _ in range(2))
    weights = torch.linspace(1, 2, target.numel(), dtype=torch.float64).view(shape)

    def f(y):
        return (weights * (y - target).square()).sum()

    found = []
    for count in (1, 4):
        with threads(count):
            found.append(ghor.minimize(f, x, space, method, max_iterations=4))
    a, b = found
    assert (a.iterations, a.evaluations, a.hessian_products) == (
        b.iterations,
        b.evaluations,
        b.hessian_products,
    )
    assert a.value < float(f(x))
    off = torch.linalg.vector_norm(a.x - b.x, dim=one(space, x)) if not is_flat(space) else (a.x - b.x).norm()
    assert off.max() <= 1e-10 * (1 + x.abs().max())
    assert abs(a.value - b.value) <= 1e-10 * abs(a.value)
