"""Losses that misbehave, starts and limits at the edge: a run ends, says why, and harms nothing."""

import math

import pytest
import torch
from helpers.problems import STIEFEL, brockett, each_method, gen, values_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ghor

F, X, BEST = brockett(8, 2)
ZEROS = torch.zeros(3, dtype=torch.float64)


@each_method
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 10**6), share=st.floats(0.05, 0.6), bad=st.sampled_from([math.nan, math.inf]))
@example(seed=885440, share=0.6, bad=math.nan)  # not finite where "auto" goes on with the trust region
@example(seed=49774, share=0.6, bad=math.inf)
@example(seed=699464, share=0.6, bad=math.nan)  # nothing is found but the start
def test_a_loss_that_is_not_finite_now_and_then(method, seed, share, bad):
    """No step leads to where it is not, and none goes uphill beyond rounding."""
    chance = gen(seed)
    first = True

    def f(Y):
        nonlocal first
        fails, first = not first and float(torch.rand((), generator=chance)) < share, False
        return F(Y) * bad if fails else F(Y)

    result = ghor.minimize(f, X, STIEFEL, method, max_iterations=60)
    assert values_of(result).isfinite().all()
    assert (values_of(result).diff() <= 1e-13).all()
    assert float(STIEFEL.residual(result.x)) <= 1e-14
    assert result.value == result.history[-1]["value"]


@each_method
def test_a_discontinuous_loss_never_goes_up(method):
    result = ghor.minimize(lambda Y: F(Y) + torch.floor(3 * Y.detach()[0, 0]), X, STIEFEL, method)
    assert (values_of(result).diff() <= 1e-13).all()


@each_method
@pytest.mark.parametrize("f", [lambda x: (x * 0).sum(), lambda x: (x * 0).sum() + 3], ids=["0", "3"])
def test_a_constant_is_minimal_everywhere(method, f):
    for x, space in ((X, STIEFEL), (ZEROS, None)):
        result = ghor.minimize(f, x, space, method)
        assert result.success
        assert result.iterations == 0
        assert torch.equal(result.x, x)


@each_method
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_start_that_is_not_finite_is_no_success(method, bad):
    for f in (lambda Y: F(Y) * bad, lambda Y: F(Y) * 0 + bad):
        result = ghor.minimize(f, X, STIEFEL, method)
        assert not result.success
        assert "not finite" in result.status


@each_method
def test_a_loss_without_a_minimum_is_no_success(method):
    for f in (lambda x: x.sum(), lambda x: -(x**4).sum()):  # as where the space was forgotten
        assert not ghor.minimize(f, ZEROS + 1, None, method, max_iterations=200).success


@each_method
@pytest.mark.parametrize(
    ("dtype", "scales"), [(torch.float32, (1e-30, 1e30)), (torch.float64, (1e-290, 1e290))]
)
def test_squares_of_the_gradient_may_leave_the_range(method, dtype, scales):
    """f is divided by a power of two: the same steps, and numbers in the units of f."""
    x = STIEFEL.project(X.to(dtype))
    one = ghor.minimize(lambda Y: F(Y.double()).to(dtype), x, STIEFEL, method)
    for scale in (2.0 ** round(math.log2(c)) for c in scales):
        result = ghor.minimize(lambda Y, c=scale: F(Y.double()).to(dtype) * c, x, STIEFEL, method)
        assert result.success, result.status
        assert torch.equal(result.x, one.x)
        assert result.value == pytest.approx(one.value * scale, rel=1e-6)
        assert result.gradient_norm == pytest.approx(one.gradient_norm * scale, rel=1e-3)
        assert result.history[0]["value"] == pytest.approx(one.history[0]["value"] * scale, rel=1e-6)


@each_method
def test_points_without_entries_and_without_dimensions(method):
    empty = torch.zeros(0, dtype=torch.float64)
    assert ghor.minimize(lambda x: x.sum(), empty, None, method).success
    start = {"a": empty, "b": torch.zeros((), dtype=torch.float64)}
    result = ghor.minimize(lambda x: (x["b"] - 3) ** 2 + x["a"].sum(), start, None, method)
    assert result.success
    assert float(result.x["b"]) == pytest.approx(3)


@each_method
def test_every_kind_of_space_and_dtype_in_one_problem(method):
    spaces = {
        "Y": STIEFEL,
        "P": ghor.SPD(),
        "h": ghor.Hyperbolic(),
        "T": ghor.SpecialEuclidean(),
        "s": ghor.Sphere(),
        "z": STIEFEL,
    }
    shapes = {"Y": (8, 2), "P": (3, 3), "h": (4,), "T": (3, 4), "s": (5, 3), "z": (4, 2)}
    dtypes = {"Y": torch.float32, "z": torch.complex64}
    x = {
        key: space.random(*shapes[key], generator=gen(i), dtype=dtypes.get(key, torch.float64))
        for i, (key, space) in enumerate(spaces.items())
    }
    x["u"] = torch.ones(2)

    def f(x):
        far = (x["P"] - torch.eye(3)).square().sum() + x["h"][0] ** 2 + x["T"].square().sum()
        return F(x["Y"].double()) + far + (x["u"] - 2).square().sum() + x["s"].sum() - x["z"].real.sum()

    result = ghor.minimize(f, x, spaces, method)
    assert result.success, result.status
    assert all(result.x[key].dtype == x[key].dtype for key in x)
    best = BEST + 1 + 3 - 5 * math.sqrt(3) - float(torch.linalg.svdvals(torch.ones(4, 2)).sum())
    assert result.value == pytest.approx(best, rel=1e-4)


@each_method
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_goes_through_and_leaves_the_start_alone(method, error):
    """From the loss, at any call, and from the callback."""
    x, calls = X.clone().requires_grad_(), 0

    def interrupted(Y):
        nonlocal calls
        calls += 1
        if calls == 7:
            raise error
        return F(Y)

    def callback(record):
        if record["iteration"] == 2:
            raise error

    for f, options in ((interrupted, {}), (F, {"callback": callback})):
        with pytest.raises(error):
            ghor.minimize(f, x, STIEFEL, method, **options)
    assert torch.equal(x, X)
    assert x.grad is None
    assert ghor.minimize(F, x, STIEFEL, method).success
    assert torch.is_grad_enabled()


@each_method
def test_a_loss_under_no_grad_and_with_a_graph_of_its_own(method):
    """Solvers differentiate under no_grad, too, and parameters of the loss collect no gradients."""
    shift = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        result = ghor.minimize(lambda Y: F(Y + shift), X, STIEFEL, method)
    assert result.success
    assert shift.grad is None
    assert not result.x.requires_grad


@pytest.mark.parametrize("name", ["tol", "rtol", "max_iterations", "max_evaluations", "max_seconds"])
@pytest.mark.parametrize("bad", [-1, math.nan])
def test_limits_that_are_none(name, bad):
    with pytest.raises(ValueError, match=f"{name} is a number from 0 on, got {bad}"):
        ghor.minimize(F, X, STIEFEL, **{name: bad})


@each_method
@settings(deadline=None, max_examples=6)
@given(iterations=st.integers(0, 5), evaluations=st.integers(1, 8))
def test_limits_are_kept(method, iterations, evaluations):
    result = ghor.minimize(
        F, X, STIEFEL, method, max_iterations=iterations, max_evaluations=evaluations, tol=0.0
    )
    assert not result.success
    assert result.iterations <= iterations
    # A line search that has begun is ended.
    assert result.evaluations <= evaluations + 25
    assert "max_iterations" in result.status or "max_evaluations" in result.status


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_stays_a_list_and_a_tuple_a_tuple(kind):
    seen = set()

    def f(x):
        seen.add(type(x))
        return F(x[0]) + x[1].square().sum()

    result = ghor.minimize(f, kind([X, ZEROS]), [STIEFEL, ghor.Euclidean()])
    assert type(result.x) is kind
    assert seen == {kind}
