"""Frames above several points: what is the same whichever solver uses them."""

import pytest
import torch
from table import FIRST, name, randn

from ghor.retraction import by_name
from ghor.solve.points import Frames


@pytest.mark.parametrize(("space", "shape"), FIRST, ids=name)
def test_the_longest_step_is_the_one_that_no_point_takes_too_far(space, shape, gen):
    """All columns turned by four radians, or max_velocity: t d is that long where d is longest."""
    Y = space.random(*shape, generator=gen, dtype=torch.float64)
    frames = Frames([Y], [space], by_name("cayley"))
    (block,) = frames.blocks
    d = frames.gradient([randn(shape, gen)])
    W = block.coordinates(d) * frames.ceiling(d)
    length = torch.linalg.vector_norm(W.flatten(1), dim=1).max()
    assert length == pytest.approx(min(4 * space.reach(shape), space.max_velocity))
