"""No velocity is too long: whatever the learning rate, weights stay finite and on their spaces."""

import math

import pytest
import torch
from steps import STIEFEL, sections
from table import (
    MANIFOLDS,
    RETRACTIONS,
    SHAPES,
    accepts,
    has_frame,
    has_one_radius,
    is_compact,
    name,
    points,
    randn,
    shapes,
)
from torch import nn

import ghor

pytestmark = pytest.mark.filterwarnings("ignore:a velocity of length .* was clipped")
retractions = pytest.mark.parametrize("retraction", RETRACTIONS)


def huge(space):
    """Vectors where the space holds vectors; else n = N, N = n + 1, tall, very tall and wide, as far as it
    has them."""
    vectors, matrices = [(200,)], [(7, 7), (10, 9), (49, 7), (200, 3), (3, 200)]
    return [x for x in vectors if accepts(space, x)] or shapes(space, matrices)


HUGE = [(s, shape) for s in MANIFOLDS if is_compact(s) for shape in huge(s)]


def on(space, Y, state):
    """1e-5 in float32, measured in float64; for frames and anchors N columns in place of n."""
    assert torch.isfinite(Y).all()
    assert space.residual(Y.detach().double()).max() <= 1e-5
    for L in (state[key].double() for key in ("section", "frame_anchor") if key in state):
        if not has_one_radius(space):  # r times a rotation, and in a section one column more, which keeps r
            r = space.radius_of(L)
            assert (torch.linalg.vector_norm(Y.detach().double(), dim=-1) / r - 1).abs().max() <= 1e-5
            L = L[..., : L.shape[-2]] / r[..., None, None]
        off = L.mT @ L - torch.eye(L.shape[-1], dtype=torch.float64)
        assert torch.linalg.matrix_norm(off).max() <= 1e-5 * L.shape[-1]
        assert off.abs().max() <= 1e-5
    return True


@pytest.mark.parametrize(("space", "shape"), HUGE, ids=name)
@sections
@retractions
@pytest.mark.parametrize(
    ("cls", "lr", "scale"), [("SGD", 1e3, 1e30), ("SGD", 1e3, 1e3), ("Adam", 1e3, 1e30), ("Adam", 1e3, 1.0)]
)
def test_no_step_is_too_long_for_the_space(space, shape, section, retraction, cls, lr, scale, gen):
    """At every step, also at a short one after the long ones; nothing is lost to overflow."""
    Y = nn.Parameter(space.random(*shape, generator=gen))
    opt = getattr(ghor.optim, cls)([Y], lr=lr, space=space, section=section, retraction=retraction)
    for k in range(6):
        Y.grad = randn(shape, gen, torch.float32) * (scale if k < 5 else 1e-3)
        opt.step()
        assert on(space, Y, opt.state[Y])


@pytest.mark.parametrize(("space", "shape"), [c for c in HUGE if c[1] != (3, 200)], ids=name)
@sections
@retractions
@pytest.mark.parametrize(
    ("cls", "lr", "scale"),
    [("SGD", 1e3, 1e30), ("SGD", 1.0, 1e6), ("SGD", 1.0, 30.0), ("SGD", 1.0, 1.0), ("Adam", 1e3, 1e30)],
)
def test_long_steps_beside_short_ones(space, shape, section, retraction, cls, lr, scale, gen):
    """Entries of the velocity from 1 to 1e33, small ones in the same stack."""
    weights = [nn.Parameter(space.random(*shape, generator=gen)) for _ in range(3)]
    opt = getattr(ghor.optim, cls)(weights, space=space, lr=lr, section=section, retraction=retraction)
    for _ in range(5):
        for p, size in zip(weights, (scale, 1e-3 * scale, 1e-6), strict=True):
            p.grad = size * randn(shape, gen, torch.float32)
        opt.step()
        assert all(on(space, p, opt.state[p]) for p in weights)


@sections
@retractions
def test_a_velocity_of_a_million_in_every_entry(section, retraction, gen):
    """W itself: SGD's velocity is -lr B, so that entries of 1e6 reach the retraction unscaled."""
    for shape in ((7, 7), (10, 9), (49, 7), (200, 3)):
        Y = nn.Parameter(STIEFEL.random(*shape, generator=gen))
        opt = ghor.optim.SGD([Y], lr=1.0, space=STIEFEL, section=section, retraction=retraction)
        for _ in range(5):
            Y.grad = 1e6 * randn(shape, gen, torch.float32)
            opt.step()
            assert on(STIEFEL, Y, {})


def sgd_step(space, Y, opt, gen, length):
    """A step of SGD with velocities of this length.

    Returns the frames before it and the velocities in float64: from them the step can be computed.
    """
    frames = opt.state[Y]["section"].clone()
    G = randn(tuple(Y.shape), gen, Y.dtype)
    B = space.global_grad(frames.double(), G.double())
    size = points(space, (length / space.step_length(B)).view(-1, *[1] * space.dims))
    Y.grad = (G * size).to(Y.dtype)
    opt.step()
    return frames, -B * size


@sections
@retractions
@pytest.mark.parametrize(
    ("dtype", "scale", "rounding"), [(torch.float32, 1.0, 2), (torch.float64, 1e30, 20)], ids=name
)
def test_rounding_of_a_long_step_is_repaired_at_once(section, retraction, dtype, scale, rounding, gen):
    """Of 2 radians, and of as many as there may be.

    A few eps sqrt(columns) are the rounding of the repair itself, by Newton-Schulz and by QR. Without it they
    are 3 times and 1e4 times further off, for up to 10 steps.
    """
    Y = nn.Parameter(STIEFEL.random(8, 12, 6, generator=gen, dtype=dtype))
    opt = ghor.optim.SGD([Y], lr=1.0, space=STIEFEL, section=section, retraction=retraction)
    for _ in range(4):
        Y.grad = scale * randn((8, 12, 6), gen, dtype)
        opt.step()
        for X in (Y.detach(), opt.state[Y].get("section", Y.detach())):
            off = X.double().mT @ X.double() - torch.eye(X.shape[-1])
            assert (
                torch.linalg.matrix_norm(off).max() <= rounding * torch.finfo(dtype).eps * X.shape[-1] ** 0.5
            )


@retractions
def test_after_a_long_step_both_sections_go_on_alike(retraction, gen):
    """SGD does not see the frame: nothing of the one before the step is left in it."""
    Y = nn.Parameter(STIEFEL.random(9, 3, generator=gen, dtype=torch.float64))
    Z = nn.Parameter(Y.detach().clone())
    opts = [
        ghor.optim.SGD([p], lr=1.0, space=STIEFEL, section=section, retraction=retraction)
        for p, section in ((Y, "transported"), (Z, "implicit"))
    ]
    for size in (0.1, 30.0, 0.1, 0.1):
        Y.grad = size * randn((9, 3), gen)
        Z.grad = Y.grad.clone()
        for opt in opts:
            opt.step()
        assert (Y - Z).abs().max() <= 1e-12


ANY = [(s, shapes(s)[0]) for s in MANIFOLDS]


@pytest.mark.parametrize(("space", "shape"), ANY, ids=name)
@retractions
@pytest.mark.parametrize(("dtype", "radians"), [(torch.float32, 9.0), (torch.float64, 1e200)], ids=name)
def test_a_long_step_is_the_step_in_float64(space, shape, retraction, dtype, radians, gen):
    """It is taken, from the frame where it was, by the velocity as it is or clipped to max_velocity."""
    Y = nn.Parameter(space.random(2, *shape[-space.dims :], generator=gen, dtype=dtype))
    opt = ghor.optim.SGD([Y], lr=1.0, space=space, section="transported", retraction=retraction)
    Y.grad = 1e-3 * randn(tuple(Y.shape), gen, dtype)
    opt.step()
    frames, W = sgd_step(space, Y, opt, gen, radians * space.reach(Y.shape))
    W = W * min(1.0, space.max_velocity / (radians * space.reach(Y.shape)))
    moved = space.update_section(frames.double(), space.bounded(frames, W), retraction)
    expected = space.apply_section(moved, Y.detach())
    unit = 1.0  # of length: 1e6 radians may come with a way of as many units
    if type(space).step_length is not ghor.Space.step_length:
        unit = max(1.0, float(expected.abs().max()))
    # exp of 1e6 radians: 10 digits, and its last squarings
    assert (Y.detach() - expected).abs().max() <= 2e-5 * unit


OPEN = [(s, shapes(s, [(12, 4), *SHAPES])[0]) for s in MANIFOLDS if not is_compact(s)]


@pytest.mark.parametrize(("space", "shape"), OPEN, ids=name)
@retractions
@pytest.mark.parametrize(
    ("cls", "lr", "scale"), [("SGD", 1e3, 1e30), ("Adam", 1e3, 1.0), ("Adam", 1e-1, 1.0)]
)
def test_points_of_a_group_that_is_not_compact_stay_finite(space, shape, retraction, cls, lr, scale, gen):
    """A frame may grow, by exp(max_velocity) a step at most, and the distance is relative to ||Y||^2."""
    Y = nn.Parameter(space.random(*shape, generator=gen))
    opt = getattr(ghor.optim, cls)([Y], lr=lr, space=space, retraction=retraction)
    for _ in range(5):
        size = Y.detach().norm()
        Y.grad = scale * randn(shape, gen, torch.float32)
        opt.step()
        assert torch.isfinite(Y).all()
        if has_frame(space):
            assert Y.detach().norm() <= 1.1 * math.exp(space.max_velocity) * size
        assert space.residual(Y.detach().double()).max() <= 1e-5 * (1 + Y.detach().norm() ** 2)


def step_by_step(opt, count):
    for _ in range(count):
        opt.step()


@pytest.mark.filterwarnings("default")
def test_a_clipped_velocity_warns_once(gen):
    """It names the weight and points at the caller."""
    Y = nn.Parameter(STIEFEL.random(9, 3, generator=gen))
    opt = ghor.optim.SGD([("proj", Y)], lr=1e3, space=STIEFEL)
    Y.grad = 1e30 * randn((9, 3), gen, torch.float32)
    with pytest.warns(UserWarning, match=r"velocity of length .* of proj was clipped to 1e\+06") as caught:
        step_by_step(opt, 3)
    assert len(caught) == 1
    assert caught[0].filename == __file__
