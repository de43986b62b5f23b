"""What users and trainers expect of a step of any torch optimizer, for every lifted class."""

import copy

import pytest
import torch
from helpers.steps import (
    OURS,
    STIEFEL,
    Net,
    build,
    classes,
    frame_of,
    gradients,
    needs_late_state,
    same,
    sections,
    state_of,
    take_steps,
    train,
    values,
    weight,
)
from helpers.table import MANIFOLDS, each_section, kinds, name, point, randn
from torch import nn

import ghor
from ghor.lifting import law


@classes
def test_closure_runs_once_with_gradients_enabled_and_its_value_is_returned(cls):
    net, twin = Net(), Net()
    opt, other = build(cls, net), build(cls, twin)
    calls = []

    def loss(n):
        return sum((p * torch.arange(p.numel(), dtype=p.dtype).view_as(p)).sum() for p in n.parameters())

    def closure():
        assert torch.is_grad_enabled()
        opt.zero_grad()
        value = loss(net)
        value.backward()
        calls.append(value)
        return value

    assert opt.step(closure) is calls[0]
    assert len(calls) == 1
    loss(twin).backward()
    assert other.step() is None
    same(values(net), values(twin))
    with torch.no_grad():
        opt.step(closure)
    assert len(calls) == 2


@classes
def test_a_step_touches_the_weights_and_nothing_else(cls):
    """Gradients keep values and versions, weights keep memory and strides, global random state stays."""
    net = Net()
    net.wide.data = net.wide.data.mT.contiguous().mT  # column-major strides are kept too
    opt = build(cls, net)
    places = [(p.data_ptr(), p.stride()) for p in net.parameters()]
    before, rng = values(net), torch.get_rng_state()
    steps = gradients(net, 3)
    for step in steps:
        for p, g in zip(net.parameters(), step, strict=True):
            p.grad = g.clone()
        versions = [(p.grad, p.grad._version) for p in net.parameters()]
        opt.step()
        for p, g, (grad, version) in zip(net.parameters(), step, versions, strict=True):
            assert p.grad is grad
            assert grad._version == version
            assert torch.equal(grad, g)
    assert [(p.data_ptr(), p.stride()) for p in net.parameters()] == places
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(not torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
    assert all(p.is_leaf and p.requires_grad for p in net.parameters())


@classes
def test_groups_added_later(cls, gen):
    """Their weights move, those that were there go on undisturbed, and a state dict holds both."""
    needs_late_state(cls)
    net, twin = Net(), Net()
    opt, other = build(cls, net), build(cls, twin)
    steps = gradients(net, 6)
    for n, o in ((net, opt), (twin, other)):
        train(n, o, steps[:3])
    Y = nn.Parameter(STIEFEL.random(7, 3, generator=gen, dtype=torch.float64))
    start = Y.detach().clone()
    opt.add_param_group({"params": [("Y", Y)], "space": STIEFEL, "retraction": "geodesic", "lr": 0.05})
    Y.grad = randn((7, 3), gen)
    for n, o in ((net, opt), (twin, other)):
        train(n, o, steps[3:])
    same(values(net), values(twin))
    assert not torch.equal(Y, start)
    assert STIEFEL.residual(Y.detach()) <= 1e-13
    assert len(opt.state_dict()["state"]) == 6


# -- steps that do not move --------------------------------------------------------------------------------


# Rprop's step sizes are state: lr is the first of them only
@pytest.mark.parametrize("cls", [c for c in ghor.optim.__all__ if c != "Rprop"])
@sections
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_zero_learning_rate_is_a_no_op_to_the_bit(cls, section, dtype):
    """After training, so that there are moments; over 12 steps, so that a polishing of Y would come."""
    net = Net(dtype)
    opt = build(cls, net, section=section)
    train(net, opt, gradients(net, 3))
    before = values(net)
    ours = {p: frame_of(opt, p, OURS) for p in net.parameters()}
    for group in opt.param_groups:
        group["lr"] = 0.0
    train(net, opt, gradients(net, 4, seed=2) * 3)
    same(values(net)[:-1], before[:-1])
    for p in net.parameters():
        same(frame_of(opt, p, OURS), ours[p])


@classes
@sections
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_zero_gradients_from_the_start_are_a_no_op_to_the_bit(cls, section, dtype):
    net = Net(dtype)
    opt = build(cls, net, section=section, **({"weight_decay": 0.0} if cls == "AdamW" else {}))
    before = values(net)
    zeros = [torch.zeros_like(p) for p in net.parameters()]
    train(net, opt, [zeros])
    ours = {p: frame_of(opt, p, OURS) for p in net.parameters()}
    train(net, opt, [zeros] * 12)
    same(values(net), before)
    for p in net.parameters():
        same(frame_of(opt, p, OURS), ours[p])


@sections
def test_zero_gradients_without_momentum_are_a_no_op_after_training(section):
    """Over 120 steps, so that every polishing would come."""
    net = Net(torch.float32)
    opt = ghor.optim.SGD(net, lr=0.1, section=section)
    train(net, opt, gradients(net, 7))
    before, state = values(net), state_of(opt)
    train(net, opt, [[torch.zeros_like(p) for p in net.parameters()]] * 120)
    same(values(net), before)
    same(state_of(opt), state)


@sections
def test_one_still_weight_in_a_moving_stack_stays_to_the_bit(section):
    """a and b are one stack; b gets zero gradients, through polishings of Y (10) and of the section (100)."""
    net = Net(torch.float32)
    opt = ghor.optim.SGD(net, lr=0.1, section=section)
    train(net, opt, gradients(net, 3))
    before = net.b.detach().clone()
    for step in gradients(net, 6) * 20:
        train(net, opt, [[torch.zeros_like(g) if i == 1 else g for i, g in enumerate(step)]])
    assert torch.equal(net.b, before)


@sections
def test_a_step_that_does_not_move_changes_no_bit(section, gen):
    """lr = 0, and one of three weights with a zero gradient: weight, section and first moment's frame."""
    weights = [torch.nn.Parameter(STIEFEL.random(12, 3, generator=gen)) for _ in range(3)]
    opt = ghor.optim.SGD(weights, space=STIEFEL, lr=0.1, momentum=0.9, section=section)
    for p in weights:
        p.grad = randn((12, 3), gen, torch.float32)
    opt.step()
    key = "section" if section == "transported" else "frame_anchor"
    opt.param_groups[0]["lr"] = 0.0
    before = [(p.detach().clone(), opt.state[p][key].clone()) for p in weights]
    for _ in range(25):  # polishing periods pass
        opt.step()
    for p, (y, frame_) in zip(weights, before, strict=True):
        assert torch.equal(p, y)
        assert torch.equal(opt.state[p][key], frame_)
    still = torch.nn.Parameter(STIEFEL.random(12, 3, generator=gen))
    opt = ghor.optim.Adam([weights[0], still], space=STIEFEL, section=section)
    still.grad = torch.zeros(12, 3)
    y = still.detach().clone()
    for _ in range(25):
        weights[0].grad = randn((12, 3), gen, torch.float32)
        opt.step()
    assert torch.equal(still, y)


@each_section
@pytest.mark.parametrize("cls", [ghor.optim.SGD, ghor.optim.Adam], ids=lambda c: c.__name__)
def test_no_velocity_is_no_step(space, section, cls, gen):
    """Zero gradients from the start, or lr = 0 at any time: still, through the polishing of every tenth
    step."""
    for what in ("gradient", "lr"):
        weights = [nn.Parameter(point(space, shape, gen, torch.float32)) for shape in kinds(space)]
        opt = cls(weights, lr=0.0 if what == "lr" else 1e-2, space=space, section=section)
        for Y in weights:
            Y.grad = torch.zeros_like(Y) if what == "gradient" else randn(tuple(Y.shape), gen, torch.float32)
        opt.step()
        before = [(Y.detach().clone(), frame_of(opt, Y)) for Y in weights]
        for _ in range(11):
            opt.step()
        for Y, (start, frame) in zip(weights, before, strict=True):
            assert torch.equal(Y, start)
            same(frame_of(opt, Y), frame)


@classes
@sections
def test_a_weight_without_gradient_is_skipped_as_in_torch(cls, section):
    net = Net()
    opt = build(cls, net, section=section)
    train(net, opt, gradients(net, 3))
    before = values(net)
    states = {p: copy.deepcopy(dict(opt.state[p])) for p in net.parameters()}
    steps = [[g if i == 0 else None for i, g in enumerate(step)] for step in gradients(net, 2)]
    train(net, opt, steps)
    opt.zero_grad()
    opt.step()
    for i, p in enumerate(net.parameters()):
        assert torch.equal(p, before[i]) == (i != 0)
        if i != 0:
            same(dict(opt.state[p]), states[p])
        elif "step" in states[p]:
            assert opt.state[p]["step"] == states[p]["step"] + 2
    train(net, opt, gradients(net, 2))  # together again
    assert all(STIEFEL.residual(p.detach()) <= 1e-13 for p in (net.a, net.b, net.wide))


@pytest.mark.parametrize("space", MANIFOLDS, ids=name)
def test_the_default_device_need_not_be_that_of_the_weights(space, gen):
    """Rules are asked, constants made and steps counted on no other device than before."""
    start = point(space, kinds(space)[0], gen)
    grad, ends = randn(tuple(start.shape), gen), []

    class Rule(torch.optim.SGD):
        """A new class, so that it is asked anew."""

    for device in ("meta", "cpu"):
        p = nn.Parameter(start.clone())
        p.grad = grad
        with torch.device(device):
            opt = ghor.lift(Rule)([p], lr=1e-2, momentum=0.9, space=space)
            opt.step()
            opt.step()
        ends.append(p.detach())
    assert torch.equal(*ends)


# -- cost --------------------------------------------------------------------------------------------------


@sections
def test_a_rule_is_asked_once(section, monkeypatch, gen):
    """What it is holds for the class and its options: a schedule, and steps, do not ask again."""
    Y = weight(40, 3)
    opt = ghor.optim.Adam([Y], space=STIEFEL, section=section)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    take_steps(opt, gen)
    monkeypatch.setattr(law, "_answers", lambda *_: pytest.fail("asked again"))
    for _ in range(5):
        take_steps(opt, gen)
        schedule.step()
