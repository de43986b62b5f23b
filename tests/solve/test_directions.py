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


def test_a_scale_of_an_entry_does_not_vanish_in_rounding():
    """The first entry of the Hessian's diagonal is the difference of equal numbers here."""
    rule, g = Conjugate(by_entry=True), torch.tensor([1.0, 1.0], dtype=torch.float64)
    rule.update(torch.tensor([1.0, 1e-9], dtype=torch.float64), 0 * g, torch.tensor([0.0, 1.0]).double())
    d = rule.direction(g)
    assert torch.isfinite(d).all()
    assert float(d.dot(g)) < 0
