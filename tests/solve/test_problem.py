"""When a run is over."""

import torch

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
