"""The library takes the steps of examples/algorithm_3.py, the paper's page in plain torch."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import ghor

PAGE = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "algorithm_3.py"))


@pytest.mark.parametrize("shape", [(12, 3), (5, 5), (4, 1)])
def test_the_library_takes_the_steps_of_the_page(shape):
    """From one frame: Adam, coordinate by coordinate, depends on it."""
    N, n = shape
    generator = torch.Generator().manual_seed(0)
    S = torch.randn(N, N, generator=generator, dtype=torch.float64)
    Y = nn.Parameter(ghor.Stiefel().random(N, n, generator=generator, dtype=torch.float64))
    optimizer = ghor.optim.Adam([Y], lr=0.03, space=ghor.Stiefel(), section="transported")
    Y.grad = torch.zeros_like(Y)
    optimizer.step()  # makes the section, and moves nothing
    page = PAGE["Adam"](Y.detach().clone(), lr=0.03)
    page.Lambda, page.t = optimizer.state[Y]["section"].clone().squeeze(), 1
    for _ in range(30):
        Y.grad = S @ Y.detach() + Y.detach() ** 2
        expected = page.step(Y.grad.clone())
        optimizer.step()
        torch.testing.assert_close(Y.detach(), expected, rtol=0, atol=1e-12)
