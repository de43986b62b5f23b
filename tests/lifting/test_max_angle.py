"""`max_angle`: no step turns a vector by more, and the steps of others keep every bit."""

import math

import pytest
import torch
from helpers.table import name, point, randn
from torch import nn

import ghor

ROTATED = [
    (ghor.Stiefel(), (9, 3), torch.float64),
    (ghor.Stiefel(), (4, 3, 8), torch.float64),
    (ghor.Stiefel(blocks=2), (12, 3), torch.float64),
    (ghor.Stiefel(), (9, 3), torch.complex128),
    (ghor.Grassmann(), (9, 3), torch.float64),
    (ghor.SpecialOrthogonal(), (6, 6), torch.float64),
    (ghor.Sphere(), (5, 7), torch.float64),
    (ghor.Sphere(radius=2.5), (5, 7), torch.float64),
]
each = pytest.mark.parametrize(("space", "shape", "dtype"), ROTATED, ids=name)


def stepped(space, Y, G, section="auto", retraction="geodesic", **options):
    p = nn.Parameter(Y.clone())
    p.grad = G.clone()
    ghor.optim.SGD([p], space=space, section=section, retraction=retraction, **options).step()
    return p.detach()


@pytest.mark.filterwarnings("ignore:a velocity of length")
@each
@pytest.mark.parametrize("section", ["auto", "transported", "implicit"])
def test_no_column_turns_further(space, shape, dtype, section, gen):
    """The way of a unit vector that turns by t is 2 sin(t/2)."""
    Y, G = space.random(*shape, generator=gen, dtype=dtype), randn(shape, gen, dtype)
    limit = 0.1
    for size in (1e3, 1e150):
        Z = stepped(space, Y, size * G, section, lr=1.0, max_angle=limit)
        x, y = (space.layout.points(X) / space.radius for X in (Y, Z))
        way = torch.linalg.vector_norm(y - x, dim=-2)
        assert way.max() <= 2 * math.sin(limit / 2) * (1 + 1e-12)
        assert way.max() >= 0.02


@each
def test_a_long_step_is_that_of_a_smaller_rate(space, shape, dtype, gen):
    """For one point: the step goes the same way, and others of the batch are not touched."""
    Y, G = space.random(*shape, generator=gen, dtype=dtype), randn(shape, gen, dtype)
    first = torch.zeros_like(space.layout.points(Y))
    first[0] = space.layout.points(G)[0]
    G = space.layout.weight(first, shape)
    Z = stepped(space, Y, G, lr=1.0, max_angle=0.1)
    lower, upper = 0.0, 1.0
    way = torch.linalg.vector_norm(Z - Y)
    for _ in range(60):
        lr = (lower + upper) / 2
        longer = torch.linalg.vector_norm(stepped(space, Y, G, lr=lr) - Y) > way
        lower, upper = (lower, lr) if longer else (lr, upper)
    assert (stepped(space, Y, G, lr=upper) - Z).abs().max() <= 1e-12
    moved = (space.layout.points(Z) != space.layout.points(Y)).flatten(1).any(1)
    assert moved.tolist() == [True] + [False] * (len(moved) - 1)


@each
def test_short_steps_keep_every_bit(space, shape, dtype, gen):
    Y, G = space.random(*shape, generator=gen, dtype=dtype), 1e-3 * randn(shape, gen, dtype)
    assert torch.equal(stepped(space, Y, G, lr=1.0, max_angle=0.5), stepped(space, Y, G, lr=1.0))


def test_translations_are_not_limited(gen):
    space = ghor.SpecialEuclidean()
    Y = point(space, (3, 4), gen)
    G = torch.zeros_like(Y)
    G[:, 3] = Y[:, :3] @ randn((3,), gen, Y.dtype) * 100
    assert torch.equal(stepped(space, Y, G, lr=1.0, max_angle=0.1), stepped(space, Y, G, lr=1.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad, gen):
    """It is reported, and the weight stays."""
    Y, G = ghor.Stiefel().random(9, 3, generator=gen), randn((9, 3), gen, torch.float32)
    G[5, 1] = bad
    with pytest.warns(UserWarning, match="is not finite"):
        assert torch.equal(stepped(ghor.Stiefel(), Y, G, lr=1.0, max_angle=0.1), Y)


def test_groups_have_their_own_and_may_change_it(gen):
    Y = [nn.Parameter(ghor.Sphere().random(4, generator=gen, dtype=torch.float64)) for _ in range(2)]
    groups = [{"params": [Y[0]], "max_angle": 0.1}, {"params": [Y[1]], "max_angle": 0.2}]
    opt = ghor.optim.SGD(groups, space=ghor.Sphere(), lr=1e3, retraction="geodesic")
    opt.load_state_dict(opt.state_dict())
    for limits in ((0.1, 0.2), (0.05, 0.2)):
        before = [p.detach().clone() for p in Y]
        for p, limit, group in zip(Y, limits, opt.param_groups, strict=True):
            p.grad, group["max_angle"] = randn((4,), gen), limit
        opt.step()
        for p, x, limit in zip(Y, before, limits, strict=True):
            assert abs(float(ghor.Sphere().dist(p.detach(), x)) - limit) <= 1e-9


def test_sgd_with_a_rate_that_is_far_too_large_descends():
    Y = nn.Parameter(ghor.SpecialOrthogonal().random(16, 16, generator=torch.Generator().manual_seed(2)))
    S = torch.diag(torch.arange(16.0))
    opt = ghor.optim.SGD([Y], lr=50, space=ghor.SpecialOrthogonal(), max_angle=0.1)
    for _ in range(200):
        opt.zero_grad()
        (-(Y.mT @ S @ Y).diagonal().square().sum()).backward()
        opt.step()
    assert Y.detach().abs().max(0).values.min() > 0.9  # the eigenvectors of S
