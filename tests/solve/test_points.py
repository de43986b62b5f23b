"""Frames above several points: what is the same whichever solver uses them."""

import pytest
import torch
from table import FIRST, name, randn

import ghor
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


@pytest.mark.parametrize("section", ["transported", "implicit"])
def test_the_longest_step_on_a_sphere_is_four_radians_whatever_its_radius(section, gen):
    """And a flat vector is in radians, at the points of one batch that have different radii."""
    radii = torch.tensor([1e-3, 1.0, 1e3], dtype=torch.float64)
    Y = ghor.Sphere().random(3, 5, generator=gen, dtype=torch.float64) * radii[:, None]
    points = Points([Y], [ghor.Sphere(radius="start")], by_name("cayley"), section)
    d = points.gradient([randn((3, 5), gen)])
    ray = Ray(points, d)
    angles = d.view(3, 5).norm(dim=1) * ray.ceiling()
    assert angles.max() == pytest.approx(4)
    (there,) = ray.at(0.1 * ray.ceiling()).tensors()
    turned = (there * Y).sum(1) / radii**2
    torch.testing.assert_close(turned, (0.1 * angles).cos(), rtol=0, atol=1e-12)
