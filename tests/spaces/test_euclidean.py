"""The vector space: Algorithm 3 is the ordinary optimizer, and geometry is that of numbers."""

import torch
from table import randn

import ghor

R = ghor.Euclidean()


def test_every_map_is_the_identity_or_a_sum(gen):
    Y, V, U = randn((3, 4, 2), gen)
    assert R.section(Y) is Y
    assert R.global_grad(Y, V) is V
    assert torch.equal(R.update_section(Y, V), Y + V)
    assert torch.equal(R.exp(Y, V), R.retract(Y, V))
    assert torch.equal(R.transport(Y, V, U), U)
    assert torch.equal(R.log(Y, U), U - Y)
    torch.testing.assert_close(R.dist(Y, U), torch.linalg.vector_norm(Y - U))
    assert R.is_tangent(Y, V)


def test_out_is_written_and_may_be_the_section(gen):
    Y, V = randn((2, 4, 2), gen)
    out, before = torch.empty_like(Y), Y.clone()
    assert R.global_grad(Y, V, out=out) is out
    assert torch.equal(out, V)
    assert R.update_section(Y, V, out=Y) is Y
    assert torch.equal(Y, before + V)


def test_step_lengths_are_those_of_numbers(gen):
    V = randn((4, 2), gen)
    assert torch.equal(R.step_length(V), V.abs())


def test_nan_goes_through():
    Y = torch.tensor([1.0, torch.nan])
    assert R.dist(Y, torch.ones(2)).isnan()
    assert R.norm(Y, Y).isnan()


def test_empty_tensors():
    Y = torch.empty(0, 3)
    assert R.project(Y).shape == R.log(Y, Y).shape == (0, 3)
    assert R.dist(Y, Y) == 0
