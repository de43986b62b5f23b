"""max_angle: no step turns a vector by more than this, whatever the rule, the space and the learning rate."""

import copy
import io
import warnings

import pytest
import torch
from steps import Net, build, classes, gradients, train, values
from table import (
    MANIFOLD_CASES,
    MANIFOLDS,
    close,
    has_one_radius,
    keeps_any_radius,
    name,
    on,
    point,
    randn,
    sections,
    shapes,
)
from torch import nn

import ghor
from ghor.linalg import spectral_bound
from ghor.spaces.orthogonal import Orthogonal

ALL = [(s, k) for s in MANIFOLDS for k in sections(s)]
retractions = pytest.mark.parametrize("retraction", ["cayley", "geodesic"])


@pytest.mark.parametrize(("space", "shape"), MANIFOLD_CASES, ids=name)
def test_the_angle_is_that_of_the_full_matrix_at_most(space, shape, gen):
    """On the orthogonal spaces, ||[[A, -B^T], [B, 0]]||_2, and at most (1 + sqrt 5)/2 n^(1/16) times it; it
    grows with W, and is 0 for W = 0."""
    Y = point(space, shape, gen)
    W = space.split(space.global_grad(space.section(Y), randn(shape, gen)))
    angle = space.one.angle(W)
    assert angle.shape == W.shape[: W.dim() - space.one.dims]
    close(space.one.angle(3 * W), 3 * angle, 1e-12 * float(angle.max()))
    assert not space.one.angle(0 * W).any()
    if isinstance(space, Orthogonal) and has_one_radius(space):
        M = space.one.matrix(W)
        exact = torch.linalg.matrix_norm(space.algebra(M), 2)
        assert (angle >= exact * (1 - 1e-12)).all()
        assert (angle <= exact * 1.62 * M.shape[-1] ** (1 / 16)).all()


def test_a_bound_for_the_spectral_norm(gen):
    """Equal for rank one, and n^(1/16) too large if all n singular values are the same."""
    u, v = randn((5, 1), gen), randn((7, 1), gen)
    close(spectral_bound(u @ v.mT), u.norm() * v.norm(), 1e-12)
    Q = ghor.Stiefel().random(9, 4, generator=gen, dtype=torch.float64)
    close(
        spectral_bound(torch.stack([Q, 1e-30 * Q])) * Q.new_tensor([1, 1e30]),
        Q.new_tensor(4 ** (1 / 16)),
        1e-12,
    )
    w = torch.tensor([0.3, -0.2, 0.4], dtype=torch.float64)
    A = torch.linalg.cross(torch.eye(3, dtype=torch.float64), w.expand(3, 3))
    close(ghor.SpecialOrthogonal().angle(A), w.norm(), 1e-12)  # the angle of a turn in space


@retractions
@pytest.mark.parametrize(("space", "section"), ALL, ids=name)
def test_a_long_step_is_the_step_of_a_smaller_rate(space, section, retraction, gen):
    """Of the rate that makes the largest angle `max_angle`; a step that is short enough keeps every bit."""
    Y = point(space, shapes(space)[0], gen)
    G = randn(tuple(Y.shape), gen)
    angle = space.one.angle(space.split(space.global_grad(space.section(Y), G)))

    def step(lr, **options):
        p = nn.Parameter(Y.clone())
        opt = ghor.optim.SGD([p], lr=lr, space=space, section=section, retraction=retraction, **options)
        p.grad = G.clone()
        opt.step()
        return p.detach()

    if keeps_any_radius(space):  # which the space does not know
        angle = angle / space.lengths(Y)
    if section == "transported" and angle.numel() == 1:  # the frame in which `angle` was computed
        close(step(50.0, max_angle=0.1), step(0.1 / float(angle)), 1e-12 * float(1 + Y.abs().max()))
    assert on(space, step(50.0, max_angle=0.1))
    small = 0.01 / float(angle.max())
    assert torch.equal(step(small, max_angle=0.1), step(small))


@classes
@retractions
def test_no_column_turns_further(cls, retraction):
    """||Y_new - Y||_2 <= max_angle, by any rule; what is left of the limit is the slack of the bound."""
    net, free = Net(), Net()
    opt = build(cls, net, lr=100.0, max_angle=0.2, retraction=retraction)
    for step in gradients(net, 5):
        before = values(net)
        train(net, opt, [step])
        pairs = list(zip(values(net), before, strict=True))
        moved = [float(torch.linalg.matrix_norm(p - q, 2)) for p, q in pairs[:3]]
        assert max(moved) <= 0.2 * (1 + 1e-6)
        assert min(moved) >= 0.2 / 1.62 / 3 ** (1 / 16) / 1.1  # the chord of Cayley's angle is shorter by 1 %
        assert float((net.sphere.detach() - before[3]).norm(dim=-1).max()) <= 0.2 * (1 + 1e-6)
    train(free, build(cls, free, lr=100.0), gradients(free, 5))
    assert torch.equal(net.bias, free.bias)  # Euclidean weights have no angle


def test_a_rate_that_is_far_too_large_descends():
    """SGD at lr 50 on a Brockett function: without a limit it jumps about, with one it goes down."""
    S = torch.diag(torch.arange(1.0, 13))
    ends = {}
    for limit in (None, 0.1):
        Y = nn.Parameter(ghor.Stiefel().random(12, 3, generator=torch.Generator().manual_seed(0)))
        opt = ghor.optim.SGD([Y], lr=50, space=ghor.Stiefel(), max_angle=limit)
        for _ in range(100):
            opt.zero_grad()
            loss = (Y.mT @ S @ Y).trace()
            loss.backward()
            opt.step()
        ends[limit] = loss.item()
    assert ends[0.1] < 7 < 10 < ends[None]  # 1 + 2 + 3 = 6 is the smallest


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e38])
@pytest.mark.parametrize("section", ["transported", "implicit"])
def test_gradients_that_are_not_finite_or_overflow(bad, section):
    """NaN and infinity are dealt with as without a limit; squares that overflow are no obstacle to it."""
    Y = nn.Parameter(ghor.Stiefel().random(6, 2, generator=torch.Generator().manual_seed(0)))
    opt = ghor.optim.SGD([Y], lr=1.0, space=ghor.Stiefel(), section=section, max_angle=0.1)
    before, Y.grad = Y.detach().clone(), torch.ones_like(Y)
    Y.grad[3, 1] = bad
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    if bad == 1e38:
        assert not caught
        assert 0.05 < torch.linalg.matrix_norm(Y.detach() - before, 2) <= 0.1 + 1e-6
    else:
        assert "not finite" in str(caught[0].message)
        assert torch.equal(Y, before)


def test_zero_over_zero_in_a_structural_zero():
    """Adam with eps = 0 leaves NaN on the diagonal of A, which counts as 0: the limit holds all the same."""
    Y = nn.Parameter(torch.eye(4, dtype=torch.float64))
    opt = ghor.optim.Adam([Y], lr=1.0, eps=0.0, space=ghor.SpecialOrthogonal(), max_angle=0.1)
    Y.grad = randn((4, 4), torch.Generator().manual_seed(0))
    opt.step()
    assert 0.05 < torch.linalg.matrix_norm(Y.detach() - torch.eye(4), 2) <= 0.1


def test_on_an_accelerator_it_is_the_same():
    ends = []
    for there in (False, True):
        net = Net(torch.float32)
        opt = build("SGD", net, lr=10.0, max_angle=0.3)
        if there:
                train(net, opt, gradients(net, 5))
        else:
            train(net, opt, gradients(net, 5))
        ends.append(values(net))
    for a, b in zip(*ends, strict=True):
        close(a, b, 1e-5 * float(1 + b.abs().max()))


def test_by_group_live_saved_and_copied(gen):
    """A group has its own; it may change between steps, and is part of the state dict."""
    weights = [nn.Parameter(point(ghor.Stiefel(), (6, 2), gen)) for _ in range(2)]
    groups = [{"params": [p], "space": ghor.Stiefel()} for p in weights]
    groups[0]["max_angle"] = 0.1
    opt = ghor.optim.SGD(groups, lr=50.0, max_angle=None)

    def moved(opt, weights):
        before = [p.detach().clone() for p in weights]
        for p in weights:
            p.grad = torch.ones_like(p)
        opt.step()
        return [
            float(torch.linalg.matrix_norm(p.detach() - q, 2)) for p, q in zip(weights, before, strict=True)
        ]

    first, second = moved(opt, weights)
    assert first <= 0.1 < 0.5 < second
    opt.param_groups[0]["max_angle"], opt.param_groups[1]["max_angle"] = 0.01, 0.02
    first, second = moved(opt, weights)
    assert 0.001 < first <= 0.01
    assert 0.01 < second <= 0.02
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    other = ghor.optim.SGD([{"params": [p], "space": ghor.Stiefel()} for p in weights], lr=50.0)
    other.load_state_dict(torch.load(file, weights_only=True))
    (again,), twin = copy.deepcopy(((weights,), opt))
    for loaded, at in ((other, weights), (twin, again)):
        assert [g["max_angle"] for g in loaded.param_groups] == [0.01, 0.02]
        assert max(moved(loaded, at)) <= 0.02


def test_a_file_without_it_leaves_it_as_it_is(gen):
    """As written before there was such a key, and by torch."""
    net = Net()
    opt = build("Adam", net, max_angle=0.1)
    train(net, opt, gradients(net, 2))
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        del group["max_angle"]
    opt.load_state_dict(saved)
    assert all(group["max_angle"] == 0.1 for group in opt.param_groups)


def test_lbfgs_has_its_own_lengths(gen):
    Y = nn.Parameter(point(ghor.Stiefel(), (6, 2), gen))
    with pytest.raises(
        ValueError, match="LBFGS chooses the lengths of its steps itself: leave max_angle out"
    ):
        ghor.optim.LBFGS([Y], space=ghor.Stiefel(), max_angle=0.1)
