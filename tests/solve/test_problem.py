"""When a run is over."""

import pytest
import torch

import ghor
from ghor.solve.problem import PATIENCE, Log, Problem


def test_a_run_in_which_nothing_changes_ends():
    """After `PATIENCE` iterations at one place, though the gradient there is large."""
    problem = Problem(lambda x: x.square().sum(), torch.ones(3, dtype=torch.float64), None)
    log, place = Log(problem), problem.place(problem.points())
    while not log.over(place):
        pass
    assert len(log.history) == PATIENCE + 1
    assert log.status.startswith("nothing has changed beyond rounding")
    assert not log.success


@pytest.mark.parametrize("method", ["auto", "lbfgs", "cg", "bfgs", "trust-region"])
def test_values_that_fall_without_bound(method):
    """As of a function that is meant on a space, where the space was forgotten: no success."""
    found = ghor.minimize(lambda x: x.sum(), torch.ones(20, 3), method=method, max_iterations=200)
    assert not found.success


def test_arguments_in_another_order():
    with pytest.raises(TypeError, match=r"first comes the function of the points.*got Sphere\(\)"):
        ghor.minimize(ghor.Sphere(), torch.eye(3), lambda x: x.sum())
