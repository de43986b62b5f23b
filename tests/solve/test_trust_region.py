"""The trust region."""

import torch
from helpers.problems import values_of

import ghor


def test_it_never_goes_uphill(gen):
    """On a loss with many hills, where Newton's step often overshoots: values fall, but for rounding."""
    target = ghor.Stiefel().random(8, 3, generator=gen, dtype=torch.float64)
    Y = ghor.Stiefel().random(8, 3, generator=gen, dtype=torch.float64)
    result = ghor.minimize(
        lambda Y: torch.sin(25 * (Y - target)).square().sum(),
        Y,
        ghor.Stiefel(),
        "trust-region",
        max_iterations=40,
    )
    assert len(result.history) > 5
    assert (values_of(result).diff() <= 1e-10).all()


def test_second_derivatives_that_are_zero_everywhere(gen):
    """torch returns zeros that have no memory for those of |x|."""
    result = ghor.minimize(lambda x: x.abs().sum(), torch.ones(3, dtype=torch.float64), method="trust-region")
    assert result.value < 3
