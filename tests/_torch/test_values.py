"""As on an accelerator: no step waits for a value, and everything holds all the same."""

import copy
import functools
import re
import warnings

import pytest
import torch
from table import MANIFOLDS, can_be_left, is_compact, name, point, points, randn, sections, shapes, spoiled
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ghor
from ghor._torch.values import SELDOM, as_on_an_accelerator

CASES = [(s, section) for s in MANIFOLDS for section in sections(s)]
cases = pytest.mark.parametrize(("space", "section"), CASES, ids=name)
retractions = pytest.mark.parametrize("retraction", ["cayley", "geodesic"])


@pytest.fixture(autouse=True)
def accelerator():
    with as_on_an_accelerator():
        yield


@functools.cache
def waits(op):
    reading = ("_local_scalar_dense", "nonzero", "aten.equal", "is_nonzero", "unique", "masked_select")
    return any(part in str(op) for part in reading)


class Reads(TorchDispatchMode):
    """Counts what would wait for a device."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if waits(op):
            self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


def build(space, section, retraction, optimizer="Adam", shape=None, **options):
    gen = torch.Generator().manual_seed(0)
    shape = shape or shapes(space)[0]
    ws = [nn.Parameter(point(space, shape, gen, torch.float32)) for _ in range(2)]
    free = nn.Parameter(torch.ones(3))
    groups = [{"params": ws, "space": space}, {"params": [free], "space": ghor.Euclidean()}]
    opt = getattr(ghor.optim, optimizer)(
        groups, section=section, retraction=retraction, fused=True, **options
    )
    return opt, [*ws, free], gen


def steps(opt, ws, gen, count=1, size=1.0):
    for _ in range(count):
        for p in ws:
            p.grad = size * randn(tuple(p.shape), gen, torch.float32)
        opt.step()


@cases
@retractions
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_step_reads_no_value(space, section, retraction, optimizer):
    """Nor does torch's fused rule. In 12 steps points are polished once."""
    opt, ws, gen = build(space, section, retraction, optimizer, lr=1e-3, max_angle=1e-2)
    steps(opt, ws, gen, 2)
    with Reads() as reads:
        steps(opt, ws, gen, 12)
    assert reads.seen == []


@pytest.mark.parametrize(
    ("space", "section"),
    [c if c[0] == ghor.Stiefel() else pytest.param(*c, marks=pytest.mark.slow) for c in CASES],
    ids=name,
)
def test_no_step_between_two_checks_reads_a_value(space, section):
    """As many as there are."""
    opt, ws, gen = build(space, section, "cayley", lr=1e-3, max_angle=1e-2)
    steps(opt, ws, gen, 2)
    with Reads() as reads:
        steps(opt, ws, gen, SELDOM - 3)
    assert reads.seen == []


@cases
def test_every_so_often_it_looks_for_changes_from_outside(space, section):
    """After SELDOM steps. Writes through `.data` leave no trace but the values: off the space they raise, and
    within it the section is rebuilt at the new point, from which the step goes on."""
    opt, ws, gen = build(space, section, "cayley", lr=1e-4)
    steps(opt, ws, gen, SELDOM)
    good = ws[0].detach().clone()
    if can_be_left(space):
        ws[0].data.copy_(spoiled(space, good, 0.1))
        with pytest.raises(ValueError, match=f"parameter 0 of group 0 .* off {re.escape(str(space))}"):
            steps(opt, ws, gen)
    target = point(space, tuple(good.shape), gen, torch.float32)
    ws[0].data.copy_(target)
    with pytest.warns(UserWarning, match=r"parameter 0 of group 0 changed outside.*the section was rebuilt"):
        steps(opt, ws, gen)
    # a step of Adam is a few lr long in every coordinate; two random points or frames are about 1 apart
    assert (ws[0] - target).abs().max() <= 1e-2 * (1 + target.abs().max())
    held = opt.state[ws[0]]
    if "section" in held:  # a frame above the weight
        off = points(space, space.apply_section(held["section"], ws[0])) - space.split(ws[0].detach())
        assert off.abs().max() <= 1e-6 * (1 + target.abs().max())
    else:  # an anchor with which the frame is well conditioned
        P = space.one.implicit_inverse(space.split(ws[0].detach()), held["frame_anchor"])
        assert torch.linalg.vector_norm(P, dim=(-1,)).max() <= 4 * P.shape[-1] ** 0.5


@cases
def test_writes_are_seen_when_a_stack_is_split(space, section):
    """torch's version counters tell of them, without a value: those of before the split count."""
    opt, ws, gen = build(space, section, "cayley", "SGD", lr=1e-4)
    steps(opt, ws, gen, 3)
    with torch.no_grad():
        ws[0].copy_(point(space, tuple(ws[0].shape), gen, torch.float32))
    for p, here in zip(ws, (True, False, True), strict=True):
        p.grad = torch.zeros_like(p) if here else None
    with pytest.warns(UserWarning, match="parameter 0 of group 0 changed outside"):
        opt.step()


def huge_steps(space, section, retraction, optimizer, size, shape):
    """The weights after each of 12 steps whose velocities are far too long."""
    opt, ws, gen = build(space, section, retraction, optimizer, shape, lr=1e3)
    for _ in range(12):
        steps(opt, ws, gen, 1, size)
        yield [p.detach().double() for p in ws[:2]]


long_steps = pytest.mark.parametrize(
    ("optimizer", "size"), [("SGD", 1e30), pytest.param("SGD", 1e3, marks=pytest.mark.slow), ("Adam", 1.0)]
)
COMPACT = [case for case in CASES if is_compact(case[0])]
OPEN = [case for case in CASES if not is_compact(case[0])]


@pytest.mark.parametrize(("space", "section"), COMPACT, ids=name)
@retractions
@long_steps
def test_huge_steps_stay_on_the_space(space, section, retraction, optimizer, size):
    for shape in shapes(space)[:6]:
        for ws in huge_steps(space, section, retraction, optimizer, size, shape):
            for Y in ws:
                assert space.residual(Y).max() <= 1e-5


@pytest.mark.parametrize(("space", "section"), OPEN, ids=name)
@retractions
@long_steps
def test_huge_steps_are_short_where_points_can_grow(space, section, retraction, optimizer, size):
    """A velocity that is clipped to max_velocity = 1 makes a frame larger by e at most, or by 3, Cayley's
    (1 + 1/2)/(1 - 1/2), and a point of SPD by the square of that. Positions have no longest way."""
    for shape in shapes(space)[:3]:
        before = None
        for ws in huge_steps(space, section, retraction, optimizer, size, shape):
            for Y in ws:
                assert torch.isfinite(Y).all()
                assert (space.residual(Y) <= 1e-5 * (1 + Y.norm() ** 2)).all()
            if before is not None and type(space).step_length is ghor.Space.step_length:
                for X, Y in zip(before, ws, strict=True):
                    assert Y.norm() <= 10 * (1 + X.norm())
            before = ws


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_step_is_shortened_too(gen):
    """It used to be dropped without a word: nobody takes a step that is deferred where nothing may be
    read."""
    ends = []
    for compiled in (False, True):
        opt, ws, gen = build(ghor.Stiefel(), "transported", "cayley", "SGD", (8, 3), lr=1.0)
        opt.step = torch.compile(opt.step, backend="eager") if compiled else opt.step
        start = ws[0].detach().clone()
        steps(opt, ws, gen, 1, 1e3)
        ends.append(ws[0].detach())
        assert (ends[-1] - start).norm() > 1
    torch.testing.assert_close(*ends)


@cases
@pytest.mark.parametrize("retraction", ["cayley", pytest.param("geodesic", marks=pytest.mark.slow)])
def test_no_drift(space, section, retraction):
    """105 steps, polished when due, the whole section at 100; the bound is that of the mode that reads."""
    opt, ws, gen = build(space, section, retraction, lr=1e-3)
    steps(opt, ws, gen, 105)
    for p in ws[:2]:
        Y = p.detach()
        assert (space.residual(Y.double()) <= 0.2 * space.tolerance(Y)).all()


@cases
def test_the_numbers_are_those_of_the_mode_that_reads(space, section):
    opt, ws, gen = build(space, section, "cayley", lr=1e-2)
    other, us = copy.deepcopy((opt, ws))
    steps(opt, ws, gen, 30)
    gen_2 = torch.Generator()
    gen_2.set_state(build(space, section, "cayley", lr=1e-2)[2].get_state())
    import ghor._torch.values as reads

    reads._forbidden = False
    steps(other, us, gen_2, 30)
    for p, q in zip(ws, us, strict=True):
        assert (p - q).abs().max() <= 1e-4


@cases
def test_nan_gradients_move_nothing(space, section):
    opt, ws, gen = build(space, section, "cayley", lr=1e-2)
    steps(opt, ws, gen, 3)
    before = ws[0].detach().clone()
    ws[0].grad = torch.full_like(ws[0], torch.nan)
    ws[1].grad = torch.ones_like(ws[1])
    opt.step()
    assert (ws[0] - before).abs().max() <= 1e-6
    assert torch.isfinite(ws[1]).all()


@cases
def test_save_load_and_go_on(space, section):
    opt, ws, gen = build(space, section, "cayley", lr=1e-2)
    steps(opt, ws, gen, 12)
    us = [nn.Parameter(p.detach().clone()) for p in ws]
    groups = [{"params": us[:2], "space": space}, {"params": us[2:], "space": ghor.Euclidean()}]
    other = ghor.optim.Adam(groups, section=section, fused=True, lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for seed in range(3):
        for weights, o in ((ws, opt), (us, other)):
            steps(o, weights, torch.Generator().manual_seed(seed))
    for p, q in zip(ws, us, strict=True):
        assert torch.equal(p, q)
