"""The test problems of Moré, Garbow and Hillstrom, by every method."""

import sys
from pathlib import Path

import pytest

from ghor.solve.minimize import METHODS

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from more_garbow_hillstrom import PROBLEMS

FAST = ("Powell, badly scaled", "Brown, badly scaled", "Beale", "Wood")


def case(problem, method):
    marks = [] if problem.name in FAST else [pytest.mark.slow]
    return pytest.param(problem, method, marks=marks, id=f"{problem.name}-{method}")


@pytest.mark.parametrize(("problem", "method"), [case(p, m) for p in PROBLEMS for m in METHODS])
def test_a_minimum_is_found(problem, method):
    result = problem.run(method)
    assert problem.solved(result.value), result
