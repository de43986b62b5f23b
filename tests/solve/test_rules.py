"""Rules for directions, on vectors alone."""

import pytest
import torch

from ghor.solve.rules import Conjugate, Dense, Limited


@pytest.mark.parametrize(
    "rule", [Limited(5, [3]), Limited(5, [2, 1]), Dense()], ids=["lbfgs", "factors", "bfgs"]
)
@pytest.mark.parametrize("along", [0.0, -1.0, 1e-16])
def test_a_pair_without_curvature_is_left_out(rule, along):
    """y^T s that is 0, negative or rounding: a pair with it would make H indefinite, or huge."""
    g = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    s, y = torch.eye(3, dtype=torch.float64)[0], torch.tensor([along, 1.0, 0.0], dtype=torch.float64)
    assert torch.equal(rule.learned(s, y).direction(g), -g)


def test_conjugate_gradients_start_afresh_uphill():
    g = torch.tensor([1.0, 0.0])
    assert Conjugate([2]).learned(g, -g).pair is None


def pairs(count, size, gen):
    """Steps, and changes of the gradient of a quadratic function along them."""
    X = torch.randn(size, size, generator=gen, dtype=torch.float64)
    S = torch.randn(count, size, generator=gen, dtype=torch.float64)
    return S, S @ (X @ X.mT + torch.eye(size))


@pytest.mark.parametrize("sizes", [[12], [7, 5]], ids=str)
@pytest.mark.parametrize("memory", [3, 40])
def test_it_is_the_dense_inverse_hessian(memory, sizes, gen):
    """H <- (I - ro s y^T) H (I - ro y s^T) + ro s s^T by the last pairs, from y^T s/y^T y of each factor."""
    S, Y = pairs(30, 12, gen)
    rule = Limited(memory, sizes)
    for s, y in zip(S, Y, strict=True):
        rule = rule.learned(s, y)
    s, y = S[-1].split(sizes), Y[-1].split(sizes)
    H = torch.cat([torch.full_like(a, float(a @ b / (b @ b))) for a, b in zip(s, y, strict=True)])
    H, eye = torch.diag(H), torch.eye(12, dtype=torch.float64)
    for s, y in list(zip(S, Y, strict=True))[-memory:]:
        ro = 1 / (y @ s)
        H = (eye - ro * torch.outer(s, y)) @ H @ (eye - ro * torch.outer(y, s)) + ro * torch.outer(s, s)
    g = torch.randn(12, generator=gen, dtype=torch.float64)
    torch.testing.assert_close(rule.direction(g), -H @ g, rtol=1e-9, atol=0)


@pytest.mark.parametrize("make", [lambda: Limited(4, [12]), lambda: Conjugate([12])], ids=["lbfgs", "cg"])
def test_a_rule_is_a_value(make, gen):
    """What has learned more leaves it what it was, also when a memory that is full moves on."""
    S, Y = pairs(20, 12, gen)
    g, rule, seen = torch.randn(12, generator=gen, dtype=torch.float64), make(), []
    for s, y in zip(S, Y, strict=True):
        seen.append((rule, rule.direction(g)))
        rule = rule.learned(s, y)
        assert all(torch.equal(old.direction(g), d) for old, d in seen[-2:])
