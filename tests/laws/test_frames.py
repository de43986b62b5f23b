"""Laws on the methods of a space that the optimizer calls, and no others.

These are section, apply_section, global_grad, update_section, and for points random, project, residual,
tolerance, polish, E. A new space is in the table as soon as its file is there.
"""

import dataclasses
import inspect

import pytest
import torch
from table import (
    CASES,
    RETRACTIONS,
    SPACES,
    can_be_left,
    close,
    eps,
    ghor_product,
    has_frame,
    horizontal,
    inner,
    is_flat,
    law,
    name,
    one,
    point,
    points,
    polished,
    randn,
    spoiled,
    tolerance,
)

import ghor
from ghor._torch.precision import COMPUTE_DTYPE

F64 = [torch.float64]
HALVES = [torch.bfloat16, torch.float16]


# Tolerances: rounding of sums of at most 49 x 7 products, hence a few hundred eps, times the condition of the
# point where the group is not compact (||Y|| <= 4 in the table).
def tol(Y):
    return 500 * eps(Y)


def is_manifold(space):
    return not is_flat(space)


def test_the_table_has_every_space_of_the_package():
    exported = {getattr(ghor, n)() for n in ghor.__all__ if n[0].isupper() and n != "Space"}
    assert exported == set(SPACES)
    assert {s for s, _ in CASES} >= set(SPACES)


@pytest.mark.parametrize("space", SPACES, ids=name)
def test_a_space_shows_its_options(space):
    """By name, in help() and editors; sizes and other options are refused."""
    cls = type(space)
    shown = inspect.signature(cls).parameters
    assert set(shown) == {f.name for f in dataclasses.fields(cls)}
    assert all(shown[f.name].default == f.default for f in dataclasses.fields(cls))
    options = f"its options are: {', '.join(shown) or 'none'}"
    with pytest.raises(TypeError, match=rf"{cls.__name__}\(\): .* 'no_option'; {options}"):
        cls(no_option=3)
    with pytest.raises(TypeError, match=rf"{cls.__name__}\(\).*{options}"):
        cls(2, 4, 4)


@pytest.mark.parametrize(
    ("space", "sizes", "words"),
    [
        (ghor.Stiefel(), (5, 3), r"as in Stiefel\(\)\.random\(5, 3\); its options are: flatten, blocks"),
        (ghor.SpecialOrthogonal(), (3,), r"as in SpecialOrthogonal\(\)\.random\(3, 3\)"),
        (ghor.SpecialEuclidean(), (3,), r"as in SpecialEuclidean\(\)\.random\(3, 4\)"),
        (ghor.SPD(), (3,), r"as in SPD\(\)\.random\(3, 3\)"),
        (ghor.Hyperbolic(), (3,), r"takes no sizes, got \(3,\): .* as in Hyperbolic\(\)\.random\(3\)"),
        (ghor.Flag(), (2, 1), r"Flag\(\): too many positional arguments; its options are: sizes"),
    ],
    ids=name,
)
def test_sizes_come_from_the_weight(space, sizes, words):
    with pytest.raises(TypeError, match=words):
        type(space)(*sizes)


@pytest.mark.parametrize("space", SPACES, ids=name)
def test_a_space_is_a_value(space):
    assert space == type(space)()
    assert hash(space) == hash(type(space)())
    assert repr(space) == f"{type(space).__name__}()"
    with pytest.raises(AttributeError):
        space.flatten = 2


# -- points --------------------------------------------------------------------------------------------------


@law()
def test_random_points_are_on_the_space(space, shape, dtype, gen):
    Y = space.random(*shape, generator=gen, dtype=dtype)
    assert Y.shape == shape
    assert Y.dtype == dtype
    assert Y.is_contiguous()
    assert space.residual(Y).max() <= tol(Y)


@law()
def test_project_finds_the_space_and_keeps_its_points(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    close(space.project(Y), Y, tol(Y))
    Z = space.project(Y + 0.05 * randn(shape, gen, dtype))
    assert space.residual(Z).max() <= tol(Y)
    assert (Z - Y).abs().max() < 0.5


@law(where=can_be_left)
def test_the_residual_is_one_number_for_each_member_of_a_batch(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    X = Y.clone()
    batch = len(shape) - len(one(space, Y))
    last = points(space, X)[(-1,) * batch]
    last.copy_(spoiled(space, points(space, X), 0.5)[(-1,) * batch])
    on, off = space.residual(Y), space.residual(X)
    assert on.shape == off.shape == points(space, Y).shape[:batch]
    assert off.flatten()[-1] > 0.1
    assert torch.equal(off.flatten()[:-1], on.flatten()[:-1])


@law(where=can_be_left, dtypes=[torch.float64, torch.float32, *HALVES])
def test_rounding_is_within_the_tolerance_and_a_hundredth_is_not(space, shape, dtype, gen):
    """`random` and `project` give points of the space; 1 % longer (10 % in half precision) is off it."""
    wide = COMPUTE_DTYPE.get(dtype, dtype)
    Y = space.random(*shape, generator=gen, dtype=dtype)
    assert space.residual(Y.to(wide)).max() <= tolerance(space, Y)
    Y = space.project(Y + 0.05 * randn(shape, gen, dtype))
    assert space.residual(Y.to(wide)).max() <= tolerance(space, Y)
    by = 0.1 if dtype in HALVES else 0.01
    assert space.residual(spoiled(space, Y, by).to(wide)).min() > tolerance(space, Y)


@law(where=can_be_left, dtypes=HALVES)
def test_the_residual_of_half_precision_is_that_of_its_values(space, shape, dtype, gen):
    """To the digits of half precision: it takes the weight as it is, without a conversion by the user."""
    Y = space.random(*shape, generator=gen, dtype=dtype)
    off = space.residual(Y).float() - space.residual(Y.float())
    assert off.abs().max() <= 4 * eps(Y) * (1 + Y.float().norm() ** 2)


@law(where=can_be_left, dtypes=F64)
def test_polishing_squares_the_distance(space, shape, dtype, gen):
    """X + X (I - X* X)/2 takes a residual d to 3 d^2/4 and a little."""
    Y = point(space, shape, gen, dtype)
    X = (1 + 1e-4) * Y + 1e-5 * randn(shape, gen, dtype)
    d = space.residual(X)
    assert d.max() > 1e-5
    assert (space.residual(polished(space, X)) <= d**2 + tol(Y)).all()
    close(polished(space, Y), Y, tol(Y))


# -- sections ------------------------------------------------------------------------------------------------


@law()
def test_section_lies_above_its_point(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    Lambda, E = space.section(Y), space.E(shape, dtype=dtype)
    close(space.apply_section(Lambda, E), Y, 0)
    torch.testing.assert_close(Lambda, space.section(Y), atol=0, rtol=0)  # no random numbers


@law(where=is_manifold, dtypes=F64)
def test_section_of_e_lies_above_e(space, shape, dtype, gen):
    E = space.E(shape, dtype=dtype)
    assert space.residual(E).max() == 0
    close(space.apply_section(space.section(E), E), E, 0)


@law(where=has_frame)
def test_a_section_is_in_the_group(space, shape, dtype, gen):
    """Lambda^-1 = [Y*; Q*]."""
    Y = point(space, shape, gen, dtype)
    Lambda, n = space.section(Y), space.size(shape)[1]
    close(space.inverse(Lambda, n) @ Lambda, torch.eye(Lambda.shape[-1], dtype=dtype), tol(Y))


# -- steps ---------------------------------------------------------------------------------------------------


def moved(space, Y, Lambda, W, retraction):
    """The point below Lambda R(W)."""
    return space.apply_section(
        space.update_section(Lambda, W, retraction), space.E(tuple(Y.shape), dtype=Y.dtype)
    )


@law(retraction=RETRACTIONS)
def test_a_step_stays_on_the_space(space, shape, dtype, retraction, gen):
    """A step of length 0 changes no bit."""
    Y = point(space, shape, gen, dtype)
    Lambda = space.section(Y)
    W = horizontal(space, Y, Lambda, gen)
    Z = moved(space, Y, Lambda, W, retraction)
    assert Z.shape == shape
    assert space.residual(Z).max() <= 20 * tol(Y)
    assert (Z - Y).abs().max() > 1e-2
    torch.testing.assert_close(space.update_section(Lambda, 0 * W, retraction), Lambda, atol=0, rtol=0)


@law(dtypes=F64, retraction=RETRACTIONS)
def test_global_grad_is_the_derivative_of_the_loss_in_coordinates(space, shape, dtype, retraction, gen):
    """d/dt L(Lambda R(t W) E) at t = 0 is <global_grad, W> for every W of g^hor, whatever the retraction.

    L is linear and ||W|| = 1: central differences at h = 1e-4 have the error h^2 ||G|| ||Y||/6 and rounding
    eps/h.
    """
    Y = point(space, shape, gen, dtype)
    Lambda, G, h = space.section(Y), randn(shape, gen, dtype), 1e-4
    B = space.global_grad(Lambda, G.clone())
    for _ in range(3):
        W = horizontal(space, Y, Lambda, gen)
        ahead, behind = (moved(space, Y, Lambda, t * W, retraction) for t in (h, -h))
        close(inner(space, Y, G, ahead - behind) / (2 * h), ghor_product(space, B, W), 1e-6)


@law(dtypes=F64)
def test_a_geodesic_is_a_one_parameter_group(space, shape, dtype, gen):
    """Lambda exp(s W) exp(t W) = Lambda exp((s + t) W)."""
    Y = point(space, shape, gen, dtype)
    Lambda = space.section(Y)
    W = horizontal(space, Y, Lambda, gen)
    twice = space.update_section(space.update_section(Lambda, 0.3 * W, "geodesic"), 0.5 * W, "geodesic")
    close(twice, space.update_section(Lambda, 0.8 * W, "geodesic"), 20 * tol(Y))


@law(where=is_manifold, dtypes=F64)
def test_cayley_and_geodesic_differ_in_third_order(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    Lambda = space.section(Y)
    W = horizontal(space, Y, Lambda, gen)
    h = torch.tensor([0.04, 0.02, 0.01, 0.005], dtype=torch.float64)
    error = torch.stack(
        [
            (moved(space, Y, Lambda, t * W, "cayley") - moved(space, Y, Lambda, t * W, "geodesic")).norm()
            for t in h
        ]
    )
    slopes = (error[:-1] / error[1:]).log() / (h[:-1] / h[1:]).log()
    assert slopes.min() >= 2.9


ORTHONORMAL = [ghor.Stiefel(), ghor.Grassmann()]


@pytest.mark.parametrize("space", ORTHONORMAL, ids=name)
def test_projections_are_on_the_space_to_rounding(space, gen):
    """2 eps sqrt(n): the SVD of single precision alone leaves five times as much."""
    Y = space.project(randn((60, 40), gen, torch.float32))
    assert space.residual(Y.double()) <= 2 * eps(Y) * 40**0.5


@pytest.mark.parametrize("space", ORTHONORMAL, ids=name)
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_projections_with_a_derivative_do_not_depend_on_the_size(space, size, gen):
    X = randn((6, 3), gen, torch.float32)
    Y = space.project((size * X).requires_grad_())
    assert (Y - space.project(X)).abs().max() <= 1e-6
