"""Means, at any scale; and hints for what people write first."""

import re

import pytest
import torch
from helpers.table import (
    SPACES,
    close,
    each_space,
    has_distances,
    is_flat,
    kinds,
    name,
    point,
    randn,
    shapes,
    tangent,
)

import ghor
from ghor.spaces.messages import ELSEWHERE

METRICS = [(s, kinds(s)[-1]) for s in SPACES if s.has("metric")]
MEANS = [(s, kinds(s)[-1]) for s in SPACES if s.has("mean")]


@pytest.mark.parametrize("size", [1e-25, 1e25])
@pytest.mark.parametrize(("space", "shape"), METRICS, ids=name)
def test_norms_whose_squares_are_out_of_range(space, shape, size, gen):
    Y = point(space, shape, gen, torch.float32)
    V = tangent(space, Y, gen, 0.5)
    close(space.norm(Y, size * V) / size, space.norm(Y, V), 1e-5)
    assert float(space.norm(Y, 0 * V).abs().max()) == 0
    assert not torch.isfinite(space.norm(Y, V / 0)).any()
    assert space.is_tangent(Y, size * V)
    assert is_flat(space) or not space.is_tangent(Y, size * (V + randn(shape, gen, torch.float32)))


@pytest.mark.parametrize(("space", "shape"), MEANS, ids=name)
def test_logarithms_at_the_mean_cancel(space, shape, gen):
    """And the mean is that of the points in another order, hence from another start."""
    Y = point(space, shape, gen)
    points = torch.stack([space.exp(Y, tangent(space, Y, gen, 0.5)) for _ in range(5)])
    weights = torch.rand(5, generator=gen, dtype=torch.float64)
    M = space.mean(points, weights)
    assert M.shape == shape
    close(space.mean(points.flip(0), weights.flip(0)), M, 1e-10)
    logs = space.log(M.expand_as(points), points) * weights.view(-1, *[1] * len(shape))
    close(logs.sum(0), torch.zeros_like(M), 1e-10)
    close(space.mean(points.float()), space.mean(points), 1e-6)


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        (ghor.SpecialOrthogonal(), (4, 3, 3), torch.float64),
        (ghor.Unitary(), (3, 3), torch.complex128),
        (ghor.Stiefel(), (6, 2), torch.complex128),
        (ghor.Sphere(), (2, 5), torch.float64),
    ],
    ids=name,
)
def test_the_mean_of_a_geodesic_is_on_it(space, shape, dtype, gen):
    """Points exp(t V): at the mean of t, to 1e-10; a batch is what its members are."""
    Y = point(space, shape, gen, dtype)
    V = tangent(space, Y, gen, 0.9)
    t = torch.tensor([-1.0, 0.2, 0.9, 0.3], dtype=torch.float64)
    points = torch.stack([space.exp(Y, x * V) for x in t])
    close(space.mean(points), space.exp(Y, 0.1 * V), 1e-10)
    weights = torch.tensor([1.0, 0.0, 3.0, 0.0])
    close(space.mean(points, weights), space.exp(Y, 0.425 * V), 1e-10)
    one = slice(0, 1) if Y.dim() > space.dims else slice(None)
    close(space.mean(points[:, one]), space.mean(points)[one], 1e-12)


@pytest.mark.parametrize("size", [2.0, 6.0, 12.0])
@pytest.mark.parametrize(("space", "shape"), [(ghor.SPD(), (3, 3)), (ghor.Hyperbolic(), (4,))], ids=name)
def test_the_mean_of_points_apart_where_curvature_is_negative(space, shape, size, gen):
    """It is unique, however far apart they are: five at distance `size` from one point, and a batch."""
    Y = space.E(shape, dtype=torch.float64).expand(5, 2, *shape)
    V = space.tangent(Y, randn((5, 2, *shape), gen))
    points = space.exp(Y, V * (size / space.norm(Y, V)).view(5, 2, *[1] * len(shape)))
    M = space.mean(points)
    off = space.norm(M, space.log(M.expand_as(points), points).mean(0))
    assert float(off.max()) <= 1e-9 * size  # rounding of the logarithms, eps e^size


@pytest.mark.parametrize(("space", "shape"), MEANS, ids=name)
def test_the_mean_of_equal_and_of_nearly_equal_points(space, shape, gen):
    """There rounding is all the spread, and no iteration makes it smaller."""
    Y = point(space, shape, gen)
    close(space.mean(torch.stack([Y, Y, Y])), Y, 1e-14)
    points = torch.stack([space.exp(Y, tangent(space, Y, gen, 1e-15)) for _ in range(3)])
    close(space.mean(points), Y, 1e-13)


# Points times a factor are where no shortest geodesic leads: opposite, or turned by pi.
FAR = [
    (ghor.Sphere(), (2, 5), -torch.ones(1)),
    (ghor.Sphere(radius=2.5), (5,), -torch.ones(1)),
    (ghor.SpecialOrthogonal(), (4, 4), torch.tensor([-1.0, -1, 1, 1])),
    (ghor.Stiefel(), (5, 2), -torch.ones(1)),
    (ghor.SpecialEuclidean(), (3, 4), torch.tensor([-1.0, -1, 1, 1])),
    (ghor.PositionsOrientations(), (2, 3), torch.tensor([[1.0], [-1]])),
]


@pytest.mark.parametrize(("space", "shape", "factor"), FAR, ids=name)
def test_points_without_weight_do_not_count(space, shape, factor, gen):
    """Not even those to which no shortest geodesic leads."""
    Y = point(space, shape, gen)
    points = torch.stack([Y, space.exp(Y, tangent(space, Y, gen, 0.3)), Y * factor])
    expected = space.mean(points[:2], torch.tensor([2.0, 1]))
    close(space.mean(points, torch.tensor([2.0, 1, 0])), expected, 1e-13)
    batch = torch.stack([points, points.flip(0)], 1)  # each with its own weights
    weights = torch.tensor([[2.0, 0], [1, 1], [0, 2]]).view(3, 2, *[1] * (len(shape) - space.dims))
    close(space.mean(batch, weights.expand(3, 2, *shape[: -space.dims])), expected, 1e-13)
    if not has_distances(space):  # the mean of the group is another
        close(
            space.mean(points, torch.tensor([2.0, 1, 0]), kind="frechet"),
            space.mean(points[:2], torch.tensor([2.0, 1]), kind="frechet"),
            1e-9,
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name)
@pytest.mark.parametrize(("space", "shape"), MEANS, ids=name)
def test_the_mean_of_an_empty_batch_is_empty(space, shape, dtype):
    points = torch.zeros(4, 0, *shape, dtype=dtype)
    for weights in (None, torch.ones(4), torch.ones(4, 0)):
        M = space.mean(points, weights)
        assert (M.shape, M.dtype) == ((0, *shape), dtype)


def test_what_has_no_mean(gen):
    sphere = ghor.Sphere()
    Y = sphere.random(3, generator=gen, dtype=torch.float64)
    with pytest.raises(ValueError, match="are the points too far apart"):
        ghor.Stiefel().mean(torch.stack([torch.eye(2), torch.eye(2).flip(0)]))  # two components
    with pytest.raises(ValueError, match="NaN or infinite"):
        sphere.mean(torch.stack([Y, torch.nan * Y]))
    with pytest.raises(ValueError, match="stacked along dimension 0"):
        sphere.mean(Y)
    with pytest.raises(ValueError, match="nonnegative weights"):
        sphere.mean(torch.stack([Y, Y]), randn((2,), gen).abs() * torch.tensor([1, -1]))
    with pytest.raises(ValueError, match=r"2 points take weights \(2\), got shape \(3,\)"):
        sphere.mean(torch.stack([Y, Y]), torch.ones(3))
    assert not ghor.SymplecticStiefel().has("mean")


# -- what people write first -------------------------------------------------------------------------------


@each_space
def test_a_shape_in_place_of_sizes(space):
    shape = shapes(space)[0]
    sizes = re.escape(", ".join(map(str, shape)))
    for given in (shape, list(shape), torch.Size(shape)):
        with pytest.raises(TypeError, match=rf"takes sizes, not a shape: write .*\.random\({sizes}\)"):
            space.random(given)


def test_sizes_in_place_of_options():
    for given in [(5, 3), ((5, 3),)]:
        with pytest.raises(
            TypeError, match=r"takes no sizes, got \(5, 3\).* as in Stiefel\(\)\.random\(5, 3\)"
        ):
            ghor.Stiefel(*given)
    with pytest.raises(TypeError, match=r"as in SpecialOrthogonal\(\)\.random\(3, 3\)"):
        ghor.SpecialOrthogonal(3)


def test_names_of_other_libraries():
    """Each leads to a method that is there; `hasattr` is still False."""
    for theirs, ours in ELSEWHERE.items():
        assert not hasattr(ghor.Stiefel(), theirs)
        with pytest.raises(AttributeError, match=f"has no {theirs}: here it is called {ours}"):
            getattr(ghor.Stiefel(), theirs)
        assert ghor.Stiefel().has(ours.partition(",")[0])


def test_misspelt_options():
    with pytest.raises(TypeError, match=r"'block' \(did you mean 'blocks'\?\); its options are: flatten, "):
        ghor.Stiefel(block=3)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'xyz'; its options are"):
        ghor.Stiefel(xyz=3)


def test_the_mean_of_a_list_says_how_to_stack_it():
    with pytest.raises(TypeError, match=r"Sphere\(\)\.mean .* got a list; write torch\.stack\(points\)"):
        ghor.Sphere().mean([ghor.Sphere().random(3) for _ in range(3)])
