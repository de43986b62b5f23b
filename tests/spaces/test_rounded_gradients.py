"""Coordinates of a gradient that are 0 but for rounding are 0: Adam divides them by themselves."""

import pytest
import torch
from helpers.table import name
from torch import nn

import ghor

SPACE = ghor.SymplecticStiefel()
LOSSES = {
    "target": lambda Y, T: (Y - T).square().sum(),
    "linear": lambda Y, T: (Y * T).sum(),
    "fourth power": lambda Y, T: Y.pow(4).sum(),
}


@pytest.mark.parametrize("momentum_decay", [4e-3, 6e-3])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shape", [(2, 2), (4, 2), (6, 2), (4, 4), (6, 4), (8, 4)], ids=name)
def test_foreach_is_the_loop(shape, loss, momentum_decay):
    """Random points are orthogonal, too, so many coordinates are 0; rounding there grew a millionfold a step.

    Where such a point is an unstable one, rounding of the points grows as well, but later.
    """
    ends = []
    for foreach in (True, False):
        gen = torch.Generator().manual_seed(0)
        *starts, T = (SPACE.random(*shape, generator=gen, dtype=torch.float64) for _ in range(3))
        params = [nn.Parameter(Y) for Y in starts]
        options = {"lr": 1e-2, "momentum_decay": momentum_decay, "foreach": foreach}
        opt = ghor.optim.NAdam(params, space=SPACE, **options)
        for _ in range(7):
            opt.zero_grad()
            sum(LOSSES[loss](p, T) for p in params).backward()
            opt.step()
        ends.append(torch.stack([p.detach() for p in params]))
    assert (ends[0] - ends[1]).abs().max() <= 1e-7


def test_what_is_small_beside_another_column_stays(gen):
    """The bound is that of its own column."""
    Y = SPACE.random(8, 4, generator=gen, dtype=torch.float64)
    frame = SPACE.geometry.frame(Y[None], "transported", {}, 2e-16)
    g = torch.randn(1, 8, 4, generator=gen, dtype=torch.float64) * torch.tensor([1, 1e-20, 1, 1e-30])
    out = frame.zeros()
    frame.pull(g, out)
    assert bool(out[:, 4:].all())
