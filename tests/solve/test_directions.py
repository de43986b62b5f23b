"""Rules for directions, on vectors alone."""

import pytest
import torch

from ghor.solve.directions import Conjugate, Dense, Limited


@pytest.mark.parametrize("make", [lambda: Limited(5), Dense], ids=["lbfgs", "bfgs"])
@pytest.mark.parametrize("along", [0.0, -1.0, 1e-16])
def test_a_pair_without_curvature_is_left_out(make, along):
    """y^T s that is 0, negative or rounding: a pair with it would make H indefinite, or huge."""
    rule, before, s = (
        make(),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
        torch.eye(3, dtype=torch.float64)[0],
    )
    rule.update(s, before, before + torch.tensor([along, 1.0, 0.0], dtype=torch.float64))
    assert torch.equal(rule.direction(before), -before)


def test_conjugate_gradients_start_afresh_uphill():
    rule, g = Conjugate(), torch.tensor([1.0, 0.0])
    rule.update(g, g, -g)  # a step uphill
    assert rule.vectors() == []
