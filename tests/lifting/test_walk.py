"""The way of a step: few calls, however many weights, and few switches of file."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ghor

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from walk import walk


@pytest.mark.parametrize("count", [1, 40, 336])
def test_a_step_costs_few_calls_however_many_weights(count):
    space, gen = ghor.Stiefel(), torch.Generator().manual_seed(0)
    ws = [nn.Parameter(space.random(9, 3, generator=gen)) for _ in range(count)]
    free = [nn.Parameter(torch.zeros(3)) for _ in range(16)]
    opt = ghor.optim.Adam([{"params": ws, "space": space}, {"params": free}])
    for p in (*ws, *free):
        p.grad = torch.ones_like(p)
    found = walk(opt.step)
    assert found.calls.total() <= 54
    assert found.switches.total() <= 30
