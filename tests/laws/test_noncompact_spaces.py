"""Optimizers on hyperbolic space, SPD, rigid motions, positions and orientations."""

import math

import pytest
import torch
from helpers.steps import classes
from helpers.table import SPACES, close, is_flat, name, randn

import ghor
from ghor.spaces.group import GroupSpace

F64 = torch.float64
GROUPS = [s for s in SPACES if isinstance(s, GroupSpace) and not is_flat(s)]
each_space = pytest.mark.parametrize("space", GROUPS, ids=name)
SHAPES = {
    ghor.Hyperbolic(): (5, 4),
    ghor.SPD(): (5, 3, 3),
    ghor.SpecialEuclidean(): (5, 3, 4),
    ghor.PositionsOrientations(): (5, 2, 3),
}
HYPERBOLIC, SPD, SE, PO = SHAPES


def fit(space, Y, target, steps, cls="Adam", lr=0.05, loss=None, **options):
    """sum dist^2 to a target; returns the way of the weight."""
    Y = torch.nn.Parameter(Y.clone())
    opt = getattr(ghor.optim, cls)([Y], space=space, lr=lr, **options)
    way = [Y.detach().clone()]
    for _ in range(steps):
        opt.zero_grad()
        (space.dist(Y, target).square().sum() if loss is None else loss(Y)).backward()
        opt.step()
        way.append(Y.detach().clone())
    return torch.stack(way)


@classes
@each_space
def test_all_optimizers_descend(space, cls, gen):
    Y, target = (space.random(*SHAPES[space], generator=gen, dtype=F64) for _ in range(2))
    lr = {"Adagrad": 0.3, "Adadelta": 10.0}.get(cls, 0.03)
    way = fit(space, Y, target, 12, cls, lr)
    losses = space.dist(way, target).square().sum(-1)
    assert losses[-1] < 0.9 * losses[0]
    assert space.residual(way).max() < 1e-14


@pytest.mark.parametrize(("space", "shape"), [(SE, (1000, 3, 4)), (PO, (1000, 2, 3))], ids=name)
def test_adam_recovers_a_thousand_targets(space, shape, gen):
    """The chordal loss, which has no cut locus, from the start that `random` gives: one stacked weight."""
    target, Y = (space.random(*shape, generator=gen, dtype=F64) for _ in range(2))
    Y = torch.nn.Parameter(Y)
    opt = ghor.optim.Adam([Y], space=space, lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 600)
    for _ in range(600):
        Y.grad = (Y - target).detach()  # of |Y - target|^2/2
        opt.step()
        schedule.step()
    close(Y.detach(), target, 1e-6)


def moved_pose(g, Y):
    """g Y of poses [R, t]."""
    return torch.cat([g[:, :3] @ Y[..., :3], g[:, :3] @ Y[..., 3:] + g[:, 3:]], -1)


def moved_place(g, Y):
    """g Y of (t, n)."""
    return torch.stack([Y[..., 0, :] @ g[:, :3].mT + g[:, 3], Y[..., 1, :] @ g[:, :3].mT], -2)


ACTIONS = [
    (SE, moved_pose, (3, 4), {"cls": "Adam"}),
    (PO, moved_place, (3, 4), {"cls": "SGD", "momentum": 0.9, "lr": 0.02}),
    (SPD, lambda A, P: A @ P @ A.mT, (3, 3), {"cls": "SGD", "lr": 0.01}),
]


@pytest.mark.parametrize(
    ("space", "act", "motions", "options"), ACTIONS, ids=["poses", "places", "congruence"]
)
def test_a_motion_of_the_world_moves_the_whole_way(space, act, motions, options, gen):
    """Frames above SPD are any, so that A is, under SGD."""
    Y, target = (space.random(*SHAPES[space], generator=gen, dtype=F64) for _ in range(2))
    g = SE.random(3, 4, generator=gen, dtype=F64) if motions == (3, 4) else randn(motions, gen)
    way, other = fit(space, Y, target, 40, **options), fit(space, act(g, Y), act(g, target), 40, **options)
    close(act(g, way), other, 1e-10)


# -- SPD ---------------------------------------------------------------------------------------------------


def test_the_affine_invariant_mean(gen):
    """Gradient descent of the sum of squares, which is Karcher's iteration."""
    P = SPD.random(30, 10, 10, generator=gen, dtype=F64)
    Y = torch.nn.Parameter(P.mean(0))
    opt = ghor.optim.SGD([Y], space=SPD, lr=1 / 8, retraction="geodesic")
    for _ in range(60):
        opt.zero_grad()
        (SPD.dist(Y, P).square().mean()).backward()
        opt.step()
    y = Y.detach()
    assert SPD.norm(y, SPD.log(y.expand_as(P), P).mean(0)) < 1e-10
    assert torch.equal(y, y.mT)
    close(y, SPD.mean(P), 1e-10)


@pytest.mark.filterwarnings("ignore:.*(was clipped|no digits left|is held)")
def test_a_matrix_that_may_go_no_further_does_not_hold_the_others(gen):
    """The step of one of a batch leads beyond its digits: it stays, alone."""
    y, grads = SPD.random(2, 4, 4, generator=gen), torch.tensor([1e3, -0.01])[:, None, None]
    G = SPD.random(2, 4, 4, generator=gen)
    both, alone = (torch.nn.Parameter(x.clone()) for x in (y, y[1]))
    opts = [ghor.optim.SGD([p], space=SPD, lr=1.0) for p in (both, alone)]
    before = []
    for _ in range(12):
        before.append(both.detach().clone())
        both.grad, alone.grad = -G * grads, -G[1] * grads[1]
        for opt in opts:
            opt.step()
    assert torch.equal(before[-1][0], both[0].detach())
    assert not torch.equal(before[-1][1], both[1].detach())
    close(both[1].detach(), alone.detach(), 1e-5)


def test_what_has_no_digits_or_is_indefinite_is_off():
    """No rounding error of a point, however large the point is."""
    far = torch.tensor([1e8, 1e8, 0.0])  # 1 + |x_s|^2 = x_0^2 to the digits of float32
    assert HYPERBOLIC.residual(far) == math.inf
    assert HYPERBOLIC.residual(HYPERBOLIC.project(far.double())) < 1e3
    with pytest.raises(ValueError, match=r"distance 19 from the origin of .* has no digits left"):
        HYPERBOLIC.project(far)
    assert SPD.residual(torch.diag(torch.tensor([1.0, -1e-3]))) >= 1
