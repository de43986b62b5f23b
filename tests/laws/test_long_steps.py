"""No velocity is too long: whatever the learning rate, weights stay finite and on their spaces."""

import warnings

import pytest
import torch
from helpers.steps import sections
from helpers.table import MANIFOLDS, RETRACTIONS, name, point, randn, shapes, tangent
from helpers.table import sections as sections_of
from torch import nn

import ghor

retractions = pytest.mark.parametrize("retraction", RETRACTIONS)
RULES = [("SGD", 1e3, 1e30), ("SGD", 1.0, 30.0), ("Adam", 1e3, 1.0)]
SECTIONS = [(s, k) for s in MANIFOLDS for k in sections_of(s)]
OPEN = [(s, shape) for s in MANIFOLDS if not s.compact for shape in shapes(s)[:2]]


@pytest.mark.parametrize(("rule", "lr", "scale"), RULES)
@pytest.mark.parametrize(("space", "section"), SECTIONS, ids=name)
@retractions
def test_no_step_is_too_long_for_the_space(space, section, retraction, rule, lr, scale, gen):
    """Uphill, in float32, long steps beside short ones in one batch, and a short one after the long ones."""
    shape = shapes(space)[0]
    weights = [nn.Parameter(point(space, shape, gen, torch.float32)) for _ in range(3)]
    opt = getattr(ghor.optim, rule)(weights, space=space, lr=lr, section=section, retraction=retraction)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(was clipped|not finite|has come|has grown|is held)")
        for k in range(12):
            for p, part in zip(weights, (scale, 1e-3 * scale, 1e-6), strict=True):
                p.grad = randn(shape, gen, torch.float32) * (part if k < 11 else 1e-3)
            opt.step()
    for p in map(torch.Tensor.detach, weights):
        assert torch.isfinite(p).all()
        assert (space.residual(p.double()) <= space.tolerance(p)).all()
        ghor.optim.SGD([nn.Parameter(p)], space=space)  # a new optimizer takes it


@sections
@retractions
def test_a_velocity_of_a_million_in_every_entry(section, retraction, gen):
    """W itself: SGD's velocity is -lr B, so that entries of 1e6 reach the retraction unscaled."""
    space = ghor.Stiefel()
    for shape in ((7, 7), (49, 7), (200, 3), (20, 15), (10, 9), (16, 14)):
        Y = nn.Parameter(space.random(*shape, generator=gen))
        opt = ghor.optim.SGD([Y], lr=1.0, space=space, section=section, retraction=retraction)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*was clipped")
            for _ in range(5):
                Y.grad = 1e6 * randn(shape, gen, torch.float32)
                opt.step()
        assert space.residual(Y.detach().double()) <= 1e-5


@pytest.mark.parametrize(("space", "section"), SECTIONS, ids=name)
def test_of_a_long_velocity_the_direction_alone_counts(space, section, gen):
    """Up to the largest numbers of float32, whose squares it does not hold."""
    Y = point(space, shape := shapes(space)[0], gen, torch.float32)
    G, ends = randn(shape, gen, torch.float32), []
    for scale in (1e6, 1e16, 1e36):
        p = nn.Parameter(Y.clone())
        p.grad = G.clone()
        opt = ghor.optim.SGD([p], space=space, section=section, lr=scale)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            opt.step()
        assert [str(w.message) for w in said if "not finite" in str(w.message)] == []
        ends.append(p.detach())
    for end in ends[1:]:
        assert (end - ends[0]).abs().max() <= 1e-4 * (1 + ends[0].abs().max())


@retractions
@pytest.mark.parametrize(("space", "shape"), [c for c in OPEN if c[0].has("log")], ids=name)
def test_longer_vectors_lead_further(space, shape, retraction, gen):
    """Where points can be arbitrarily far away. Cayley alone has a pole, and beyond it comes back.

    Up to 3: rotations turn back at pi, and positive definite matrices have digits for not much more.
    """
    for _ in range(3):
        Y = point(space, shape, gen)
        V = tangent(space, Y, gen)
        before = torch.zeros(())
        for length in [0.1, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, *([6.0, 20.0] if space.has("to_ball") else [])]:
            Z = space.retract(Y, length * V, retraction)
            assert (space.residual(Z) <= space.tolerance(Z)).all()
            far = space.dist(Y, Z).min()
            assert far > before, length
            before = far


@pytest.mark.parametrize(("space", "shape"), [c for c in OPEN if not c[0].has("log")], ids=name)
def test_cayley_leads_about_as_far_as_the_geodesic(space, shape, gen):
    """Where some directions are those of rotations, and no distance tells how far it is. Before its pole,
    Cayley stretches by (1 + 3/4)/(1 - 3/4) = 7 at most, where the geodesic does by exp(3/2) = 4.5."""
    for _ in range(3):
        Y = point(space, shape, gen)
        V = tangent(space, Y, gen)
        for length in (1.0, 2.0, 3.0, 4.0, 6.0, 10.0):
            ends = [space.retract(Y, length * V, r) for r in RETRACTIONS]
            for Z in ends:
                assert (space.residual(Z) <= space.tolerance(Z)).all()
            ratio = float(ends[0].norm() / ends[1].norm())
            assert 0.4 < ratio < 2.5, length
