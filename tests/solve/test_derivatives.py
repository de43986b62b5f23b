"""check_gradient and check_hessian: a verdict is about what was measured, in every unit of x and of f."""

import math

import pytest
import torch
from helpers.problems import STIEFEL, gen, with_gradient

import ghor

CHECKS = [ghor.check_gradient, ghor.check_hessian]
DTYPES = [torch.float32, torch.float64]


WRONG = with_gradient(lambda x: x.square().sum(), lambda x: -5 * x)


def point(dtype, size=1.0):
    return size * torch.randn(10, generator=gen(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_gradient_is_found_whatever_the_size_of_x(dtype, size):
    """Steps of at most one unit are nothing at a point of size 1e6, and everything at one of size 1e-6."""
    x = point(dtype, size)
    assert abs(ghor.check_gradient(WRONG, x, generator=gen(1)).slope - 1) <= 0.1
    right = ghor.check_gradient(lambda x: x.square().sum(), x, generator=gen(1))
    assert abs(right.slope - 2) <= 0.1


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4, 1e7])
def test_the_scale_of_f_need_not_be_that_of_x(size):
    """sin has the scale 1."""
    x = point(torch.float64, size)
    for check, order in zip(CHECKS, (2, 3), strict=True):
        assert abs(check(lambda x: torch.sin(x + 1).sum(), x, generator=gen(1)).slope - order) <= 0.1


@pytest.mark.parametrize("f", [WRONG, lambda x: x.square().sum()], ids=["wrong", "right"])
def test_no_verdict_where_the_change_of_f_is_lost_in_rounding(f):
    """1e7 has no digits after the point in float32."""
    found = ghor.check_gradient(lambda x: f(x) + 1e7, point(torch.float32), generator=gen(1))
    assert not found.ok
    assert math.isnan(found.slope)
    assert str(found) == "Slope(gradient inconclusive: the change of f is below its rounding)"


def test_no_verdict_where_a_change_is_hardly_seen():
    """Some values differ beyond rounding, and the gradient is zero: it is not the gradient of a constant."""
    found = ghor.check_gradient(
        lambda x: x.detach().square().sum() + 0 * x.sum() + 1e5, point(torch.float32), generator=gen(1)
    )
    assert not found.ok
    assert "inconclusive" in str(found)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_expansions_are_ok(dtype, check):
    """Linear and constant functions; constants of a curved space, where zero is what cancels."""
    C = point(dtype)
    for size in (0.0, 1e-6, 1.0, 1e6):
        for f in (lambda x: (C * x).sum(), lambda x: 0 * x.sum() + 3, lambda x: 0 * x.sum()):
            found = check(f, C * size, generator=gen(1))
            assert found.ok
            assert found.slope == math.inf
    for space, x in (
        (STIEFEL, STIEFEL.random(7, 3, generator=gen(0), dtype=dtype)),
        (ghor.Sphere(radius=1e3), 1e3 * ghor.Sphere().random(5, generator=gen(0), dtype=dtype)),
    ):
        assert check(lambda Y: Y.square().sum(), x, space, generator=gen(1)).slope == math.inf


def test_steps_end_where_f_does():
    """log is not defined for negative numbers, exp overflows; nothing is defined for a loss that is NaN."""
    x = 1e6 + point(torch.float64).abs()
    for f, at in ((lambda x: x.log().sum(), x), (lambda x: x.exp().sum(), x / 2e3)):
        found = ghor.check_gradient(f, at, generator=gen(1))
        assert abs(found.slope - 2) <= 0.1
        assert not all(map(math.isfinite, found.error))
    for f in (
        lambda y: y.sum() * math.nan,
        lambda y: 0 * y.sum() + (0.0 if torch.equal(y, x) else math.nan),
    ):
        nothing = ghor.check_gradient(f, x, generator=gen(1))
        assert not nothing.ok
        assert "NOT ok" in str(nothing)


@pytest.mark.parametrize("far", [1e-4, 1.0, 1e6])
def test_positions_of_poses_move_by_their_size_and_turns_by_a_radian(far):
    space = ghor.SpecialEuclidean()
    x, goal = (space.random(3, 4, generator=gen(i), dtype=torch.float64) for i in (0, 1))
    for X in (x, goal):
        X[..., -1] *= far
    for check, order in zip(CHECKS, (2, 3), strict=True):
        found = check(lambda X: (X - goal).square().sum(), x, space, generator=gen(2))
        assert found.slope >= order - 0.1
        assert max(found.t) <= 1


@pytest.mark.parametrize(
    ("space", "shape"),
    [
        (ghor.Sphere(radius=1e3), (5,)),
        (ghor.Sphere(radius="start"), (3, 5)),
        (ghor.Sphere(radius="start", along="columns"), (5, 3)),
        (ghor.Sphere(radius="start", flatten=2), (3, 2, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("section", ["auto", "transported", "implicit"])
def test_derivatives_on_spheres_of_other_radii(space, shape, section):
    """By radians, at points of several radii, above every frame."""
    x = space.project(torch.randn(shape, generator=gen(0), dtype=torch.float64) * 1e3)
    for check, order in zip(CHECKS, (2, 3), strict=True):
        f = lambda Y: torch.sin(Y / 1e3 + 1).sum()  # noqa: E731
        found = check(f, x, space, section=section, generator=gen(2))
        assert found.ok
        assert abs(found.slope - order) <= 0.1


@pytest.mark.parametrize("scale", [1e-12, 1e9])
def test_errors_are_in_the_units_of_f(scale):
    x = point(torch.float32)
    one, other = (
        ghor.check_gradient(lambda x, s=s: s * (x**4).sum(), x, generator=gen(1)).error[-1]
        for s in (1.0, scale)
    )
    assert other == pytest.approx(scale * one, rel=1e-5)
