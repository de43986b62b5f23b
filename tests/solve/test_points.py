"""Frames above several points: what is the same whichever solver uses them."""

import pytest
import torch
from table import FIRST, name, randn

from ghor.retraction import by_name
from ghor.solve.curves import Ray
from ghor.solve.points import Points


@pytest.mark.parametrize(("space", "shape"), FIRST, ids=name)
def test_the_longest_step_is_the_one_that_no_point_takes_too_far(space, shape, gen):
    """All columns turned by four radians, or max_velocity: t d is that long where d is longest."""
    Y = space.random(*shape, generator=gen, dtype=torch.float64)
    points = Points([Y], [space], by_name("cayley"))
    (batch,) = points.batches
    d = points.gradient([randn(shape, gen)])
    W = batch.coordinates(d) * Ray(points, d).ceiling()
    length = batch.space.step_length(W).max()
    assert length == pytest.approx(min(4 * space.reach(shape), space.max_velocity))
