"""The vector space: Algorithm 3 is the ordinary optimizer, and geometry is that of numbers."""

import torch
from helpers.table import randn

import ghor

R = ghor.Euclidean()


def test_every_map_is_the_identity_or_a_sum(gen):
    """Every number is a point, on a line of its own."""
    Y, V, U = randn((3, 4, 2), gen)
    for f in (R.exp, R.retract):
        assert torch.equal(f(Y, V), Y + V)
    assert torch.equal(R.transport(Y, V, U), U)
    assert torch.equal(R.log(Y, U), U - Y)
    assert torch.equal(R.dist(Y, U), (U - Y).abs())
    assert torch.equal(R.metric(Y, U, V), U * V)
    assert torch.equal(R.E((4, 2)), torch.zeros(4, 2))
    assert R.is_tangent(Y, V)


def test_nan_and_empty_tensors():
    Y = torch.tensor([1.0, torch.nan])
    assert R.dist(Y, torch.ones(2)).isnan().tolist() == R.residual(Y).isnan().tolist() == [False, True]
    Y = torch.empty(0, 3)
    assert R.log(Y, Y).shape == R.dist(Y, Y).shape == (0, 3)
