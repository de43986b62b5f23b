"""Steps that are broken off, by an interrupt or an error anywhere: groups and state are whole, and it goes
on."""

import copy
import inspect
import sys
import warnings
from pathlib import Path

import pytest
import torch
from steps import STIEFEL, Net, build, classes, gradients, same, sections, take_steps, train, values, weight
from torch import nn

import ghor
from ghor.lifting import guards as upkeep
from ghor.lifting.lifted import Lifted
from ghor.lifting.stack import Stack


def trained(section="transported", cls="Adam", steps=3, **options):
    """Two weights of a kind and a Euclidean one, after some steps; `move(opt)` makes one more."""
    gen = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(STIEFEL.random(8, 2, generator=gen)) for _ in range(2)]
    weights.append(nn.Parameter(torch.zeros(3)))
    groups = [{"params": weights[:2], "space": STIEFEL}, {"params": weights[2:]}]
    opt = getattr(ghor.optim, cls)(groups, lr=0.1, section=section, **options)
    for _ in range(steps):
        move(opt)
    return opt, weights


def move(opt, seed=1):
    gen = torch.Generator().manual_seed(seed)
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=gen).to(p.dtype)
    opt.step()


def off(weights):
    return max(float(STIEFEL.residual(p.detach().double())) for p in weights[:2])


def interrupted_after(monkeypatch, owner, name):
    """A KeyboardInterrupt once `owner.name` has done its work, one time."""
    real = getattr(owner, name)

    def call(*args, **kwargs):
        real(*args, **kwargs)
        monkeypatch.setattr(owner, name, real)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, call)


def test_interrupted_while_a_section_moves(monkeypatch):
    """Between the two writes of it a section is off the group: it is rebuilt from the weights."""
    opt, weights = trained()
    before = [p.detach().clone() for p in weights[:2]]
    interrupted_after(monkeypatch, torch.Tensor, "baddbmm_")
    with pytest.raises(KeyboardInterrupt):
        move(opt)
    assert all(map(torch.equal, weights, before))
    saved = copy.deepcopy(opt.state_dict())
    with pytest.warns(
        UserWarning, match="the last step was interrupted; sections will be rebuilt, moments kept"
    ):
        move(opt)
    assert off(weights) <= 2e-6
    twin, others = trained(steps=0)
    with torch.no_grad():
        for p, q in zip(others, [*before, weights[2]], strict=True):
            p.copy_(q)
    twin.load_state_dict(saved)
    move(twin)
    assert all(map(torch.equal, others[:2], weights))


WHERE = [(Stack, "reading"), (Stack, "global_grad"), (Stack, "update_section"), (Stack, "write_weights")]
WHERE += [(Stack, "as_left"), (upkeep, "after"), (Stack, "in_place"), (Stack, "publish")]


@pytest.mark.parametrize("where", WHERE, ids=lambda where: where[1])
@sections
def test_interrupted_anywhere(where, section, monkeypatch):
    """Groups and state are those of the weights afterwards, and the optimizer goes on."""
    opt, weights = trained(section)
    keys = set(opt.state)
    with monkeypatch.context() as patch:
        interrupted_after(patch, *where)
        with pytest.raises(KeyboardInterrupt):
            move(opt)
    opt.state_dict()
    assert [p for group in opt.param_groups for p in group["params"]] == weights
    assert set(opt.state) == keys == set(weights)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the last step was interrupted")
        for _ in range(3):
            move(opt)
    assert off(weights) <= 2e-6


FILES = (str(Path(ghor.__file__).parent), str(inspect.getsourcefile(torch.optim.Adam)))


def traced_step(opt, stop_at=0):
    """The lines of a step in our files and torch's rule, with a KeyboardInterrupt before one of them."""
    lines = []

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(FILES):
            return None
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(lines) == stop_at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        move(opt, seed=2)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return lines


@pytest.mark.filterwarnings("ignore:the last step was interrupted", "ignore:.*changed outside")
@pytest.mark.parametrize("first", [True, False], ids=["the first step", "a later step"])
@sections
def test_an_interrupt_at_any_line(section, first):
    """Groups hold the weights, state is theirs, gradients can be cleared, the next step stays on the space.

    A first step, which is long, is interrupted where it comes to a line for the last time.
    """
    opt, weights = trained(section, steps=1)
    if first:
        opt.state.clear()
    lines = traced_step(opt)
    last = {line: i for i, line in enumerate(lines, 1)}
    assert len(last) > 300
    for i in last.values() if first else range(1, len(lines) + 1):
        if first:
            opt.state.clear()
        where = traced_step(opt, i)[-1]
        held = [p for group in opt.param_groups for p in group["params"]]
        assert list(map(id, held)) == list(map(id, weights)), where
        assert [len(group["params"]) for group in opt.state_dict()["param_groups"]] == [2, 1]
        assert set(opt.state) <= set(weights)
        opt.zero_grad()
        assert all(p.grad is None for p in weights)
        move(opt, seed=3)
        assert off(weights) <= 2e-6


@pytest.mark.filterwarnings("ignore:the last step was interrupted", "ignore:.*changed outside")
def test_a_step_right_after_an_interrupted_one():
    """Nothing is called in between: it ends the last one first, wherever that was."""
    opt, weights = trained(steps=1)
    for i in range(1, len(traced_step(opt)) + 1):
        where = traced_step(opt, i)[-1]
        for p in weights:
            p.grad = torch.ones_like(p)
        opt.step()
        held = [p for group in opt.param_groups for p in group["params"]]
        assert list(map(id, held)) == list(map(id, weights)), where
        assert set(opt.state) == set(weights)
        assert off(weights) <= 2e-6


def test_two_interrupts_of_one_step(monkeypatch):
    """The second one hits the undoing of the first: the next step ends that first, and is an ordinary one."""
    (opt, weights), (twin, others) = trained(), trained()
    real, calls = Lifted._put_everything_back, []

    def interrupted(self):
        calls.append(self)
        if len(calls) <= 2:
            raise KeyboardInterrupt
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Lifted, "_put_everything_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            move(opt)
    assert len(calls) == 2
    move(twin)  # the weights had moved
    for o in (opt, twin):
        move(o, seed=2)
    for p, q in zip(weights, others, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
    assert [p for group in opt.param_groups for p in group["params"]] == weights
    assert set(opt.state) == set(weights)


class Begins(torch.optim.SGD):
    """Makes its state in two parts, and may fail between them."""

    fails = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["fast"] = torch.zeros_like(p)
                    if Begins.fails:
                        raise KeyError("base")
                    state["slow"] = torch.zeros_like(p)
                state["fast"].lerp_(p.grad, 0.5)
                state["slow"].lerp_(state["fast"], 0.1)
                p.add_(state["slow"], alpha=-group["lr"])


def test_state_that_a_rule_has_begun_is_made_again(monkeypatch):
    weights = [weight(8, 2), nn.Parameter(torch.zeros(3))]
    opt = ghor.lift(Begins)([{"params": weights[:1], "space": STIEFEL}, {"params": weights[1:]}], lr=0.1)
    monkeypatch.setattr(Begins, "fails", True)
    with pytest.raises(KeyError, match="base"):
        move(opt)
    monkeypatch.setattr(Begins, "fails", False)
    move(opt)
    assert all({"fast", "slow"} <= opt.state[p].keys() for p in weights)


@classes
def test_an_exception_inside_the_base_step_leaves_groups_and_weights(cls, monkeypatch):
    """Also a keyboard interrupt: the groups hold the weights again, manifold weights have not moved, and a
    retry is an ordinary step."""
    net, twin = Net(), Net()
    opt, other = build(cls, net), build(cls, twin)
    steps = gradients(net, 4)
    for n, o in ((net, opt), (twin, other)):
        train(n, o, steps[:2])
    groups, members = list(opt.param_groups), [list(group["params"]) for group in opt.param_groups]
    params = [p for group in members for p in group]
    keys = {p: set(opt.state[p]) for p in params}
    before = values(net)
    step = getattr(opt.Base.step, "__wrapped__", opt.Base.step)
    for error in (RuntimeError, KeyboardInterrupt):

        def broken(*args, error=error, **kwargs):
            raise error("from the base")

        monkeypatch.setattr(opt.Base, "step", broken)
        with pytest.raises(error, match="from the base"):
            train(net, opt, steps[2:3])
        monkeypatch.undo()
        assert all(a is b for a, b in zip(opt.param_groups, groups, strict=True))
        for group, before_it in zip(groups, members, strict=True):
            assert all(a is b for a, b in zip(group["params"], before_it, strict=True))
        assert {p: set(opt.state[p]) for p in params} == keys
        assert set(opt.state) == set(params)
        same(values(net), before)
    assert step is not broken
    for n, o in ((net, opt), (twin, other)):
        train(n, o, steps[2:])
    same(values(net), values(twin))


def test_an_error_in_the_base_leaves_no_velocity_behind(gen):
    class Fails(torch.optim.SGD):
        fail = False

        def step(self, closure=None):
            super().step()
            if Fails.fail:
                raise KeyError("base")

    Y = weight(5, 3)
    opt = ghor.lift(Fails)([Y], lr=0.1, space=STIEFEL)
    take_steps(opt, gen)
    before, params = Y.detach().clone(), opt.param_groups[0]["params"]
    Fails.fail = True
    with pytest.raises(KeyError, match="base"):
        take_steps(opt, gen)
    Fails.fail = False
    assert opt.param_groups[0]["params"] is params
    Y.grad = torch.zeros(5, 3)
    opt.step()
    assert torch.equal(Y, before)


def test_a_stack_that_cannot_be_split_stays_whole(monkeypatch):
    opt, weights = trained()
    weights[1].grad = None

    def fails(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Stack, "subset", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            opt.step()
    before = [p.detach().clone() for p in weights]
    move(opt)
    assert not any(map(torch.equal, weights, before))


@pytest.mark.parametrize(("cls", "steps"), [("SGD", 0), ("Adam", 0), ("Adam", 2)])
def test_steps_in_inference_mode(cls, steps):
    """What is made there, also by the rule, for a stack that is split serves later steps, too."""
    opt, weights = trained(cls=cls, steps=steps)
    for p in weights:
        p.grad = torch.ones_like(p)
    weights[1].grad = None
    with torch.inference_mode():
        opt.step()
    move(opt)
    assert off(weights) <= 2e-6


@pytest.mark.parametrize("name", sorted({"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Muon"}))
def test_euclidean_weights_made_in_inference_mode(name, gen):
    """Step there as torch's do, bit for bit; the other weights, and their state, do not notice."""
    shape, options = (4, 3), {"lr": 0.1} | ({"momentum": 0.9} if name == "SGD" else {})
    start, target = torch.randn(shape, generator=gen), ghor.Sphere().random(5, generator=gen)

    def run(inference):
        with torch.inference_mode(inference):
            p = start.clone()
        q, Y = start.clone(), target.clone()
        with torch.inference_mode(inference):
            if name == "Muon":
                opt = ghor.optim.Muon([p, q, Y], space=[None, None, ghor.Sphere()], **options)
            else:
                cls = getattr(ghor.optim, name)
                opt = cls([{"params": [p, q]}, {"params": [Y], "space": ghor.Sphere()}], **options)
            theirs = getattr(torch.optim, name)([t := start.clone()], **options)
            for _ in range(3):
                p.grad, q.grad, t.grad, Y.grad = (X.sin() for X in (p, q, t, torch.arange(5.0)))
                opt.step()
                theirs.step()
        assert torch.equal(p, t)
        for X in (q, Y):
            X.grad = X.cos()
        p.grad = None
        opt.step()
        return p, q, Y

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


def test_an_optimizer_made_in_inference_mode(gen):
    """Adagrad has a state from the start."""
    start, runs = ghor.Sphere().random(2, 5, generator=gen), []
    for inference in (True, False):
        q, Y = start.clone()
        with torch.inference_mode(inference):
            opt = ghor.optim.Adagrad([q, Y], space=[None, ghor.Sphere()], lr=0.1)
            q.grad, Y.grad = q.cos(), Y.cos()
            opt.step()
        q.grad, Y.grad = q.sin(), Y.sin()
        opt.step()
        runs.append(torch.stack([q, Y]))
    assert torch.equal(*runs)


def test_weights_on_manifolds_made_in_inference_mode_are_refused(gen):
    with torch.inference_mode():
        Y = ghor.Sphere().random(5, generator=gen)
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 .*inference_mode.* clone\(\) it outside"):
        ghor.optim.Adam([Y], space=ghor.Sphere())
