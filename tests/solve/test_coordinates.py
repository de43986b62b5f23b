"""Flat vectors of g^hor: what is the same whichever solver uses them."""

import pytest
import torch
from helpers.table import FIRST, name, randn

import ghor
from ghor.solve.coordinates import Coordinates
from ghor.solve.iterate import Iterate, Ray, Sample
from ghor.spaces.retraction import cayley


def iterate(space, G):
    """The start, of a loss with the Euclidean gradients G."""
    points = [frame.point() for frame in space.frames]
    G = space.gradients(G)
    return Iterate(space.frames, Sample(points, 0.0, G), space.pull(space.frames, G))


@pytest.mark.parametrize(("space", "shape"), FIRST, ids=name)
def test_the_longest_step_is_the_one_that_no_point_takes_too_far(space, shape, gen):
    Y = space.random(*shape, generator=gen, dtype=torch.float64)
    coordinates = Coordinates([Y], [space], cayley)
    it = iterate(coordinates, [randn(shape, gen)])
    ray = Ray(coordinates, it, it.gradient)
    (frame,), (w,) = it.frames, coordinates.elements(it.gradient * ray.ceiling)
    assert frame.length(w).max() == pytest.approx(space.geometry.longest(frame.point()))


@pytest.mark.parametrize("section", ["transported", "implicit"])
def test_the_longest_step_on_a_sphere_is_four_radians_whatever_its_radius(section, gen):
    """And a flat vector is in radians, at the points of one part that have different radii."""
    radii = torch.tensor([1e-3, 1.0, 1e3], dtype=torch.float64)
    Y = ghor.Sphere().random(3, 5, generator=gen, dtype=torch.float64) * radii[:, None]
    space = Coordinates([Y], [ghor.Sphere(radius="start")], cayley, section)
    it = iterate(space, [randn((3, 5), gen)])
    ray = Ray(space, it, it.gradient)
    angles = it.gradient.view(3, 5).norm(dim=1) * ray.ceiling
    assert angles.max() == pytest.approx(4)
    (there,) = space.weights([trial.y for trial in ray.at(0.1 * ray.ceiling)])
    turned = (there * Y).sum(1) / radii**2
    bent = (0.05 * angles).square()  # Cayley turns by 2 arctan(angle/2)
    torch.testing.assert_close(turned, (1 - bent) / (1 + bent), rtol=0, atol=1e-12)


MIXED = [
    (ghor.Sphere(), (3, 5), torch.float64),
    (ghor.Stiefel(), (4, 2), torch.complex64),
    (ghor.SpecialEuclidean(), (3, 4), torch.float32),
    (None, (3,), torch.complex128),
    (ghor.SPD(), (3, 3), torch.float64),
    (ghor.Stiefel(), (6, 2), torch.float64),
    (ghor.Stiefel(), (6, 2), torch.float64),
    (None, (5,), torch.float64),
]


def test_the_dot_product_is_the_inner_product_of_every_part(gen):
    """Of spaces, dtypes and numbers of coordinates that do not go together; and parts are taken back."""
    spaces = [space or ghor.Euclidean() for space, *_ in MIXED]
    tensors = [
        space.random(*shape, generator=gen, dtype=dtype)
        for space, (_, shape, dtype) in zip(spaces, MIXED, strict=True)
    ]
    space = Coordinates(tensors, spaces, cayley)
    u, v = (
        space.pull(
            space.frames,
            space.gradients([torch.randn(p.shape, generator=gen, dtype=p.dtype) for p in tensors]),
        )
        for _ in range(2)
    )
    inner = sum(
        float(part.geometry.hor_inner(a, b).sum())
        for part, a, b in zip(space.parts, space.elements(u), space.elements(v), strict=True)
    )
    assert float(u.dot(v)) == pytest.approx(inner, rel=1e-5)
    w = space.elements(u)
    torch.testing.assert_close(space.flat(lambda k, out: out.copy_(w[k])), u, rtol=1e-5, atol=1e-6)
    assert sum(space.units) == space.size == len(u)
    for X, p in zip(space.weights([frame.point() for frame in space.frames]), tensors, strict=True):
        assert X.dtype == p.dtype
        torch.testing.assert_close(X, p, rtol=1e-6, atol=1e-6)
