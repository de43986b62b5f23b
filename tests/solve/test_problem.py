"""When a run is over."""

import collections

import numpy as np
import pytest
import torch

import ghor
from ghor.solve.problem import Problem
from ghor.solve.result import PATIENCE, Log


def test_a_run_in_which_nothing_changes_ends():
    """After `PATIENCE` iterations at one place, though the gradient there is large."""
    problem = Problem(lambda x: x.square().sum(), torch.ones(3, dtype=torch.float64), None)
    log, it = Log(problem), problem.start()
    while not log.over(it):
        pass
    assert len(log.history) == PATIENCE + 1
    assert log.status.startswith("nothing has changed beyond rounding")
    assert not log.success


def test_the_default_device_need_not_be_that_of_the_points(gen):
    S = torch.diag(torch.arange(6.0, dtype=torch.float64))
    x = ghor.Sphere().random(6, generator=gen, dtype=torch.float64)

    def f(x):
        return x @ S @ x

    with torch.device("meta"):
        assert ghor.minimize(f, x, ghor.Sphere()).success
        assert ghor.check_gradient(f, x, ghor.Sphere(), generator=gen).ok


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize("make", [list, tuple, Pair._make, lambda x: dict(zip("ab", x, strict=True))])
def test_f_may_write_to_the_container_of_its_points(make):
    """It gets one of its own, of the kind of x0."""
    x0 = make([torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)])

    def f(x):
        assert type(x) is type(x0)
        a, b = x.values() if isinstance(x, dict) else x
        if isinstance(x, list | dict):
            x[0 if isinstance(x, list) else "a"] = a**3
        return (a**3 - 8).square().sum() + (b - a).square().sum()

    assert ghor.check_gradient(f, x0).ok
    result = ghor.minimize(f, x0)
    assert result.success
    assert type(result.x) is type(x0)
    for p in result.x.values() if isinstance(result.x, dict) else result.x:
        torch.testing.assert_close(p, torch.full_like(p, 2))


@pytest.mark.parametrize("x", [{"a": torch.ones(3)}, [torch.ones(3), torch.ones(3)]], ids=["fewer", "list"])
def test_spaces_by_name_are_for_points_of_these_names(x):
    with pytest.raises(
        ValueError, match=r"spaces are given for \['a', 'c'\], points are .*use the same names"
    ):
        ghor.minimize(lambda x: x["a"].sum(), x, {"a": ghor.Sphere(), "c": None})


def test_f_that_has_gradients_but_not_of_x():
    other = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="f does not depend on x"):
        ghor.minimize(lambda x: (x.detach() * other).sum(), torch.ones(3))


@pytest.mark.parametrize("true", [True, np.True_, np.array(True), torch.tensor(True), torch.tensor([True])])
def test_a_callback_may_return_any_truth(true):
    f, x = (lambda x: (x - 5).pow(4).sum()), torch.ones(3, dtype=torch.float64)
    assert ghor.minimize(f, x, callback=lambda record: true).iterations == 0
    assert ghor.minimize(f, x, callback=lambda record: not true).success


@pytest.mark.parametrize("method", ["lbfgs", "bfgs", "cg", "trust-region"])
@pytest.mark.parametrize(
    ("space", "shape"),
    [
        (ghor.Sphere(), (4,)),
        (ghor.Sphere(), (3, 4)),
        (ghor.Sphere(along="columns"), (4, 3)),
        (ghor.Stiefel(), (4, 1)),
        (ghor.Stiefel(), (3, 4, 1)),
        (ghor.Unitary(), (1, 1)),
        (ghor.Euclidean(), (4,)),
    ],
    ids=str,
)
def test_complex_vectors(space, shape, method, gen):
    """The nearest point is the projection. Gradients of conj(x) are conjugated in name only."""
    x, t = (space.random(*shape, generator=gen, dtype=torch.complex128) for _ in range(2))
    t = 2 * t if isinstance(space, ghor.Euclidean) else 2 * t + 0.3 * x
    for f in (lambda x: (x - t).abs().square().sum(), lambda x: (x.conj() - t.conj()).abs().square().sum()):
        assert ghor.check_gradient(f, x, space, generator=gen).ok
        result = ghor.minimize(f, x, space, method)
        torch.testing.assert_close(result.x, space.project(t), atol=1e-7, rtol=0)
