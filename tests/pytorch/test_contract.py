"""What users and trainers expect of any torch optimizer, for every lifted class."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from table import MANIFOLDS, SHAPES, accepts, name, point, randn
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import ghor
from ghor import probe

STIEFEL = ghor.Stiefel()
classes = pytest.mark.parametrize("cls", ghor.optim.__all__)
sections = pytest.mark.parametrize("section", ["transported", "implicit"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=name)

# More of an optimizer's options than the defaults: state of every kind it can have.
OPTIONS = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {"amsgrad": True},
    "RMSprop": {"momentum": 0.9},
}
OURS = ("section", "anchor", "master", "moves")


class Net(nn.Module):
    """Two weights of one kind, one by its rows, one on another space, and a Euclidean one."""

    def __init__(self, dtype=torch.float64, seed=0):
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        self.a, self.b, self.wide = (
            nn.Parameter(STIEFEL.random(*shape, generator=gen, dtype=torch.float64).to(dtype))
            for shape in ((7, 3), (7, 3), (2, 6))
        )
        self.sphere = nn.Parameter(ghor.Sphere().random(4, 5, generator=gen, dtype=torch.float64).to(dtype))
        self.bias = nn.Parameter(randn((4,), gen, dtype))
        for n in ("a", "b", "wide"):
            ghor.constrain(self, n, STIEFEL)
        ghor.constrain(self, "sphere", ghor.Sphere())


def build(cls, net, lr=1e-2, **options):
    return getattr(ghor.optim, cls)(net, lr=lr, **OPTIONS.get(cls, {}) | options)


def gradients(net, steps, seed=1):
    gen = torch.Generator().manual_seed(seed)
    return [[randn(tuple(p.shape), gen, p.dtype) for p in net.parameters()] for _ in range(steps)]


def train(net, opt, steps):
    """Steps with given gradients, one list a step; None is no gradient."""
    for step in steps:
        for p, g in zip(net.parameters(), step, strict=True):
            p.grad = g if g is None else g.clone()
        opt.step()


def values(net):
    return [p.detach().clone() for p in net.parameters()]


def exact(cls, dtype=torch.float64):
    """How many of the weights resume to the bit: all but the last, Euclidean one in NAdam, whose `mu_product` torch's
    own load_state_dict casts to the weight's dtype."""
    return -1 if cls == "NAdam" and dtype != torch.float32 else None


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def state_of(opt):
    return dict(sorted(copy.deepcopy(opt.state_dict()["state"]).items()))


def through_a_file(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# -- one step ----------------------------------------------------------------------------------------------------------


@classes
def test_step_hooks_fire_once_and_in_order(cls):
    net = Net()
    opt = build(cls, net)
    fired = []
    hooks = [
        register_optimizer_step_pre_hook(lambda o, *_: fired.append(("global pre", o))),
        register_optimizer_step_post_hook(lambda o, *_: fired.append(("global post", o))),
        opt.register_step_pre_hook(lambda o, *_: fired.append(("local pre", o))),
        opt.register_step_post_hook(lambda o, *_: fired.append(("local post", o))),
    ]
    try:
        train(net, opt, gradients(net, 1))
    finally:
        for hook in hooks:
            hook.remove()
    assert fired == [(kind, opt) for kind in ("global pre", "local pre", "local post", "global post")]


@classes
def test_a_pre_hook_sees_weights_and_may_change_gradients(cls):
    """Hooks see the optimizer as users do: the weights in the groups, not the shadows."""
    net, twin = Net(), Net()
    opt, other = build(cls, net), build(cls, twin)
    seen = []

    def halve(o, *_):
        seen.append([id(p) for group in o.param_groups for p in group["params"]])
        for p in net.parameters():
            p.grad.mul_(0.5)

    opt.register_step_pre_hook(halve)
    steps = gradients(net, 2)
    train(net, opt, steps)
    train(twin, other, [[g / 2 for g in step] for step in steps])
    assert seen == [[id(p) for p in net.parameters()]] * 2
    same(values(net), values(twin))


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
@sections
def test_state_has_the_shapes_of_the_weights(cls, section):
    net = Net()
    opt = build(cls, net, section=section)
    train(net, opt, gradients(net, 2))
    assert set(opt.state) == set(net.parameters())
    for p in net.parameters():
        for key, value in opt.state[p].items():
            if key not in OURS and torch.is_tensor(value) and value.dim() > 0:
                assert value.shape == p.shape
    for p in (net.a, net.b, net.wide):
        N, n = STIEFEL.size(p.shape)
        state = opt.state[p]
        assert state["section"].shape == (N, N) if section == "transported" else state["anchor"].shape == (n, n)
    keys = set(getattr(torch.optim, cls, opt.Base)([torch.zeros(2)], **OPTIONS.get(cls, {})).state_dict())
    assert set(opt.state_dict()) == keys


@classes
@sections
def test_state_tensors_are_live(cls, section):
    """state[p] are views of what the next step uses: writing to them counts, as in torch."""
    net, twin = Net(), Net()
    opt, other = build(cls, net, section=section), build(cls, twin, section=section)
    steps = gradients(net, 4)
    for n, o in ((net, opt), (twin, other)):
        train(n, o, steps[:2])
    for p in net.parameters():
        for key, value in opt.state[p].items():
            if key not in OURS and torch.is_tensor(value) and value.dim() > 0:
                value.mul_(0.5)
    loaded = other.state_dict()
    for entries in loaded["state"].values():
        for key in [k for k, v in entries.items() if k not in OURS and torch.is_tensor(v) and v.dim() > 0]:
            entries[key] = entries[key] * 0.5
    other.load_state_dict(loaded)
    for n, o in ((net, opt), (twin, other)):
        train(n, o, steps[2:])
    same(values(net)[: exact(cls)], values(twin)[: exact(cls)])


# -- steps that do not move --------------------------------------------------------------------------------------------


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
    ours = {p: {k: v.clone() for k, v in opt.state[p].items() if k in OURS} for p in net.parameters()}
    for group in opt.param_groups:
        group["lr"] = 0.0
    train(net, opt, gradients(net, 4, seed=2) * 3)
    same(values(net)[:-1], before[:-1])
    for p in net.parameters():
        same({k: v for k, v in opt.state[p].items() if k in OURS}, ours[p])


@classes
@sections
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_zero_gradients_from_the_start_are_a_no_op_to_the_bit(cls, section, dtype):
    net = Net(dtype)
    opt = build(cls, net, section=section, **({"weight_decay": 0.0} if cls == "AdamW" else {}))
    before = values(net)
    zeros = [torch.zeros_like(p) for p in net.parameters()]
    train(net, opt, [zeros])
    ours = {p: {k: v.clone() for k, v in opt.state[p].items() if k in OURS} for p in net.parameters()}
    train(net, opt, [zeros] * 12)
    same(values(net), before)
    for p in net.parameters():
        same({k: v for k, v in opt.state[p].items() if k in OURS}, ours[p])


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
    train(net, opt, gradients(net, 2))  # together again
    assert all(STIEFEL.distance(p.detach()) <= 1e-13 for p in (net.a, net.b, net.wide))


# -- saving and loading ------------------------------------------------------------------------------------------------


@classes
@sections
@dtypes
def test_resume_is_exact(cls, section, dtype):
    """5 steps, a file read with weights_only=True, 5 more, equals 10 steps, to the bit; gradients missing at times."""
    net, twin = Net(dtype), Net(dtype, seed=7)
    steps = gradients(net, 10)
    steps[1][1] = steps[6][0] = None
    opt = build(cls, net, section=section)
    train(net, opt, steps[:5])
    saved = through_a_file({"net": net.state_dict(), "opt": opt.state_dict()})
    twin.load_state_dict(saved["net"])
    other = build(cls, twin, lr=0.5, section=section)
    other.load_state_dict(saved["opt"])
    assert [g["space"] for g in other.param_groups] == [g["space"] for g in opt.param_groups]
    kept = slice(exact(cls, dtype))
    for p, q in list(zip(net.parameters(), twin.parameters(), strict=True))[kept]:
        for key, value in opt.state[p].items():
            if torch.is_tensor(value):
                assert other.state[q][key].dtype == value.dtype
    train(net, opt, steps[5:])
    train(twin, other, steps[5:])
    same(values(net)[kept], values(twin)[kept])
    same(list(state_of(opt).values())[kept], list(state_of(other).values())[kept])


@pytest.mark.parametrize("space", MANIFOLDS, ids=name)
@pytest.mark.parametrize("retraction", ["cayley", "geodesic"])
def test_resume_is_exact_on_every_space(space, retraction, gen):
    shape = next(s for s in SHAPES if accepts(space, s))
    p = nn.Parameter(point(space, shape, gen))
    q = nn.Parameter(p.detach().clone())
    group = {"space": space, "retraction": retraction}
    opt = ghor.optim.Adam([{"params": [p], **group}], lr=1e-2)
    other = ghor.optim.Adam([{"params": [q], **group}], lr=1e-2)
    steps = [randn(shape, gen) for _ in range(10)]

    def run(opt, p, steps):
        for g in steps:
            p.grad = g
            opt.step()

    run(opt, p, steps[:5])
    with torch.no_grad():
        q.copy_(p)
    other.load_state_dict(through_a_file(opt.state_dict()))
    run(opt, p, steps[5:])
    run(other, q, steps[5:])
    assert torch.equal(p, q)


@sections
def test_training_after_loading_leaves_the_state_dict_alone(section):
    """For the weights on manifolds; Euclidean state is torch's, which shares memory with what it was loaded from."""
    net, twin = Net(), Net()
    opt, other = build("Adam", net, section=section), build("Adam", twin, section=section)
    train(net, opt, gradients(net, 3))
    saved = opt.state_dict()
    kept = copy.deepcopy(saved)
    twin.load_state_dict(net.state_dict())
    other.load_state_dict(saved)
    train(twin, other, gradients(net, 3))
    for i in range(4):
        same(saved["state"][i], kept["state"][i])


@pytest.mark.parametrize(("one", "two"), [("transported", "implicit"), ("implicit", "transported")])
@pytest.mark.parametrize("retraction", ["cayley", "geodesic"])
@dtypes
def test_a_checkpoint_of_one_section_loads_into_the_other(one, two, retraction, dtype):
    """SGD with momentum does not see the basis of the complement, so the further run is the same.

    1e-12 in float64: ten steps of a few eps each, in two different orders of operations; float32 in proportion, and a
    weight in bfloat16 may round to the neighbour.
    """
    tol = {torch.float64: 1e-12, torch.float32: 1e-12 * 2**29, torch.bfloat16: 2**-8}[dtype]
    net, twin = Net(dtype), Net(dtype)
    options = {"lr": 0.05, "momentum": 0.9, "retraction": retraction}
    opt = ghor.optim.SGD(net, section=one, **options)
    other = ghor.optim.SGD(twin, section=two, **options)
    steps = gradients(net, 10)
    train(net, opt, steps[:5])
    saved = through_a_file({"net": net.state_dict(), "opt": opt.state_dict()})
    twin.load_state_dict(saved["net"])
    for group in saved["opt"]["param_groups"]:
        del group["section"]  # the optimizer's own choice stays, as for a checkpoint that lacks the key
    other.load_state_dict(saved["opt"])
    assert [g["section"] for g in other.param_groups] == [two]
    train(net, opt, steps[5:])
    train(twin, other, steps[5:])
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert (p.detach() - q.detach()).abs().max() <= tol
    key = {"transported": "section", "implicit": "anchor"}[two]
    assert key in other.state[twin.a]


@classes
def test_changing_the_section_of_a_group_is_the_same_as_loading(cls):
    """A group key may be written to at any time."""
    net = Net()
    opt = build(cls, net, section="transported")
    train(net, opt, gradients(net, 3))
    opt.param_groups[0]["section"] = "implicit"
    train(net, opt, gradients(net, 3))
    assert "anchor" in opt.state[net.a]
    assert "section" not in opt.state[net.a]
    assert all(STIEFEL.distance(p.detach()) <= 1e-13 for p in (net.a, net.b, net.wide))


@classes
@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
@sections
def test_copies_go_on_alike(cls, how, section):
    net = Net()
    opt = build(cls, net, section=section, error_if_nonfinite=True)
    steps = gradients(net, 6)
    train(net, opt, steps[:3])
    twin, other = how((net, opt))
    assert type(other) is type(opt)
    assert [p for g in other.param_groups for p in g["params"]] == list(twin.parameters())
    assert {k for k in vars(opt) if k[0] != "_"} == {k for k in vars(other) if k[0] != "_"}
    train(net, opt, steps[3:])
    train(twin, other, steps[3:])
    same(values(net), values(twin))
    same(state_of(opt), state_of(other))
    other.add_param_group({"params": [("new", nn.Parameter(torch.eye(5, 2)))], "space": STIEFEL})
    assert other.param_groups[1]["error_if_nonfinite"] is True


@classes
def test_a_state_dict_of_the_plain_optimizer_loads(cls):
    """Euclidean moments are kept; those of manifold weights mean nothing in g^hor and start anew, with a warning.
    Spaces stay."""
    net, plain = Net(), Net()
    Base = getattr(ghor.optim, cls).Base
    options = OPTIONS.get(cls, {})
    theirs = Base(plain.parameters(), lr=1e-3, **options)
    train(plain, theirs, gradients(net, 3))
    opt = ghor.optim.__dict__[cls](net.parameters(), lr=1e-2, **options)
    spaces = opt.param_groups[0]["space"]
    with pytest.warns(UserWarning, match="loaded state has no section for 4 weights on manifolds") as caught:
        opt.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert len(caught) == 1
    assert opt.param_groups[0]["space"] == spaces
    assert opt.param_groups[0]["retraction"] == "cayley"
    assert opt.param_groups[0]["lr"] == 1e-3
    for p in (net.a, net.b, net.wide, net.sphere):
        assert not opt.state.get(p)
    with torch.no_grad():
        net.bias.copy_(plain.bias)
    steps = gradients(net, 3, seed=5)
    train(net, opt, steps)
    train(plain, theirs, steps)
    if exact(cls) is None:
        assert torch.equal(net.bias, plain.bias)
    for p in (net.a, net.b, net.wide):
        assert STIEFEL.distance(p.detach()) <= 1e-13


def test_state_dicts_of_another_space_are_refused():
    net, other = Net(), nn.Module()
    other.weight = nn.Parameter(ghor.Grassmann().random(7, 3).double())
    ghor.constrain(other, "weight", ghor.Grassmann())
    opt, wrong = ghor.optim.SGD([net.a]), ghor.optim.SGD(other)
    with pytest.raises(ValueError, match=r"is on Grassmann\(\), the loaded state has it on Stiefel\(\)"):
        wrong.load_state_dict(opt.state_dict())
    assert wrong.param_groups[0]["space"] == ghor.Grassmann()


@classes
def test_named_and_unnamed_state_dicts_load_into_each_other(cls):
    """And the optimizer may be loaded before the model: the weights are then where the sections have them."""
    net, twin = Net(), Net()
    named = build(cls, net)
    unnamed = getattr(ghor.optim, cls)(twin.parameters(), lr=1e-2, **OPTIONS.get(cls, {}))
    steps = gradients(net, 6)
    train(net, named, steps[:3])
    unnamed.load_state_dict(state_dict=copy.deepcopy(named.state_dict()))
    twin.load_state_dict(net.state_dict())
    train(net, named, steps[3:])
    train(twin, unnamed, steps[3:])
    same(values(net)[: exact(cls)], values(twin)[: exact(cls)])
    named.load_state_dict(unnamed.state_dict())


def test_plain_data_in_the_state():
    """Nothing but tensors and numbers, so that weights_only loading and other tools can read it."""
    net = Net()
    opt = build("Adam", net)
    train(net, opt, gradients(net, 2))
    for entries in opt.state_dict()["state"].values():
        assert all(isinstance(v, (torch.Tensor, int, float)) for v in entries.values())


# -- groups ------------------------------------------------------------------------------------------------------------


@classes
def test_groups_added_later(cls, gen):
    """Their weights move, those that were there go on undisturbed, and a state dict holds both."""
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
    assert STIEFEL.distance(Y.detach()) <= 1e-13
    assert len(opt.state_dict()["state"]) == 6


TENSOR_LR = [c for c in ghor.optim.__all__ if c != "PaperAdam"]


@pytest.mark.parametrize("cls", TENSOR_LR)
def test_tensor_learning_rate(cls):
    """A tensor lr of the same value gives the same run, and writing to it counts; torch wants foreach off for it."""
    net, twin = Net(), Net()
    lr = torch.tensor(1e-2, dtype=torch.float64)
    opt, other = build(cls, net, lr=lr, foreach=False), build(cls, twin, lr=1e-2, foreach=False)
    steps = gradients(net, 6)
    for n, o in ((net, opt), (twin, other)):
        train(n, o, steps[:3])
    lr.fill_(3e-3)
    other.param_groups[0]["lr"] = 3e-3
    for n, o in ((net, opt), (twin, other)):
        train(n, o, steps[3:])
    assert opt.param_groups[0]["lr"] is lr
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        # a tensor lr enters products in another order, so a few eps a step
        torch.testing.assert_close(p, q, rtol=0, atol=1e-14)


SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=7, cycle_momentum=False),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, 3, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers(scheduler):
    """The learning rates are those of plain Adam, and each step uses the one of its time."""
    net, plain = Net(), Net()
    twin = Net()
    opt, theirs, by_hand = build("Adam", net), torch.optim.Adam(plain.parameters(), lr=1e-2), build("Adam", twin)
    a, b = SCHEDULERS[scheduler](opt), SCHEDULERS[scheduler](theirs)
    rates = []
    for step in gradients(net, 6):
        rates.append(opt.param_groups[0]["lr"])
        assert rates[-1] == theirs.param_groups[0]["lr"]
        by_hand.param_groups[0]["lr"] = rates[-1]
        train(net, opt, [step])
        train(twin, by_hand, [step])
        theirs.step()
        for s in (a, b):
            s.step(*([1.0] if scheduler == "ReduceLROnPlateau" else []))
    assert len(set(rates)) > 1
    same(values(net), values(twin))


def test_one_cycle_with_momentum():
    net = Net()
    opt = ghor.optim.SGD(net, lr=1e-2, momentum=0.9)
    schedule = lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=6)
    momenta = []
    for step in gradients(net, 5):
        momenta.append(opt.param_groups[0]["momentum"])
        train(net, opt, [step])
        schedule.step()
    assert len(set(momenta)) == 5


def test_gradient_clipping_sees_the_weights():
    net = Net()
    opt = build("SGD", net)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    total = torch.nn.utils.clip_grad_norm_([p for g in opt.param_groups for p in g["params"]], 1.0)
    assert total > 1
    opt.step()
    assert STIEFEL.distance(net.a.detach()) <= 1e-13


@pytest.mark.parametrize(
    ("cls", "fused"),
    [("SGD", False), ("SGD", True), ("Adam", False), ("Adam", True), ("AdamW", True), ("Adagrad", True)],
)
def test_grad_scaler_skips_a_step_with_inf(cls, fused):
    """An inf step moves nothing and halves the scale; the others are those of a run without scaler."""
    net, twin = Net(torch.float32), Net(torch.float32)
    options = {"fused": True} if fused else {}
    opt = getattr(ghor.optim, cls)(net, lr=1e-2, **options)
    other = getattr(ghor.optim, cls)(twin, lr=1e-2, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    steps = gradients(net, 5)

    def scaled(step, bad=False):
        opt.zero_grad()
        scaler.scale(sum((p * g).sum() for p, g in zip(net.parameters(), step, strict=True))).backward()
        if bad:
            net.b.grad[0, 0] = float("inf")
        scaler.step(opt)
        scaler.update()

    for k, step in enumerate(steps):
        if k == 2:
            before, state = values(net), state_of(opt)
            scaled(step, bad=True)
            same(values(net), before)
            same(state_of(opt), state)
            assert scaler.get_scale() == 2.0
        else:
            scaled(step)
            train(twin, other, [step])
    same(values(net), values(twin))  # scales are powers of two


# -- behind the optimizer's back ---------------------------------------------------------------------------------------


def write(how, p, Y):
    with torch.no_grad():
        if how == "copy_":
            p.copy_(Y)
        elif how == ".data":
            p.data.copy_(Y)
        else:
            p.data = Y.clone()


@pytest.mark.parametrize("how", ["copy_", ".data", ".data ="])
@sections
def test_a_weight_moved_within_its_space(how, section, gen):
    """One warning, no jump back: the next step starts at the new point, with the moments that were there."""
    net = Net()
    opt = ghor.optim.SGD(net, lr=1e-2, section=section)
    train(net, opt, gradients(net, 3))
    twin = Net()
    target = STIEFEL.random(7, 3, generator=gen, dtype=torch.float64)
    write(how, net.a, target)
    twin.load_state_dict(net.state_dict())
    fresh = ghor.optim.SGD(twin, lr=1e-2, section=section)
    steps = gradients(net, 3, seed=4)
    train(twin, fresh, steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(net, opt, steps)
    said = [str(w.message).split(",")[0] for w in caught]
    # an implicit section is a function of the weight: nothing has to be rebuilt, and writes through .data go unnoticed
    assert said == ["a changed outside the optimizer"] or (section == "implicit" and said == [])
    # SGD does not see the basis of the complement: as a new optimizer from the new point, up to rounding
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert (p.detach() - q.detach()).abs().max() <= 1e-13


@pytest.mark.parametrize("how", ["copy_", ".data", ".data ="])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name)
@sections
def test_a_weight_moved_off_its_space(how, section, dtype):
    """The step raises before anything moves, and names the weight and the call; after the call it goes on."""
    net = Net(dtype)
    opt = build("Adam", net, section=section)
    train(net, opt, gradients(net, 10))  # an implicit section looks at the weight's distance every 10 moves
    write(how, net.b, net.b.detach() * 1.5)
    before, state = values(net), state_of(opt)
    with pytest.raises(ValueError, match=r"b of shape \(7, 3\) is .* off Stiefel\(\); call ghor\.constrain"):
        train(net, opt, gradients(net, 1))
    same(values(net), before)
    same(state_of(opt), state)
    ghor.constrain(net, "b", STIEFEL)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*changed outside the optimizer")
        train(net, opt, gradients(net, 2))
    assert not torch.equal(net.b, before[1])


def test_load_state_dict_on_the_model_is_noticed():
    net, other = Net(), Net(seed=3)
    opt = build("Adam", net)
    train(net, opt, gradients(net, 3))
    net.load_state_dict(other.state_dict())
    with pytest.warns(UserWarning, match=r"a and 1 other weights changed outside the optimizer, within Stiefel\(\)"):
        train(net, opt, gradients(net, 1))
    # Adam's steps are a few lr = 1e-2 long
    assert (net.a - other.a).detach().abs().max() < 0.1


@classes
def test_an_exception_inside_the_base_step_leaves_groups_and_weights(cls, monkeypatch):
    """Also a keyboard interrupt: the groups hold the weights again, manifold weights have not moved, and a retry is
    an ordinary step."""
    net, twin = Net(), Net()
    opt, other = build(cls, net), build(cls, twin)
    steps = gradients(net, 4)
    for n, o in ((net, opt), (twin, other)):
        train(n, o, steps[:2])
    groups, params = list(opt.param_groups), list(opt.param_groups[0]["params"])
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
        assert all(a is b for a, b in zip(opt.param_groups[0]["params"], params, strict=True))
        assert {p: set(opt.state[p]) for p in params} == keys
        assert set(opt.state) == set(params)
        same(values(net), before)
    assert step is not broken
    for n, o in ((net, opt), (twin, other)):
        train(n, o, steps[2:])
    same(values(net), values(twin))


# -- gradients of other kinds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", ["SGD", "Adagrad"])
def test_sparse_gradient(cls):
    """As the dense one on a manifold weight; an embedding on the sphere is the case in mind."""
    embedding = [nn.Embedding(6, 4, sparse=sparse, dtype=torch.float64) for sparse in (True, False)]
    embedding[1].load_state_dict(embedding[0].state_dict())
    opts = []
    for e in embedding:
        ghor.constrain(e, "weight", ghor.Sphere())
        opts.append(getattr(ghor.optim, cls)(e, lr=0.1))
    for _ in range(3):
        for e, opt in zip(embedding, opts, strict=True):
            opt.zero_grad()
            e(torch.tensor([0, 2, 2])).pow(3).sum().backward()
            assert e.weight.grad.is_sparse == e.sparse
            opt.step()
    assert torch.equal(embedding[0].weight, embedding[1].weight)
    assert ghor.Sphere().distance(embedding[0].weight.detach()).max() <= 1e-14


def test_sparse_gradient_that_is_not_finite_raises_too():
    e = ghor.constrain(nn.Embedding(6, 4, sparse=True), "weight", ghor.Sphere())
    opt = ghor.optim.SGD(e, lr=0.1, error_if_nonfinite=True)
    (e(torch.tensor([1])).sum() * float("nan")).backward()
    with pytest.raises(RuntimeError, match="gradient of weight is not finite"):
        opt.step()


# -- cost --------------------------------------------------------------------------------------------------------------


@classes
def test_an_implicit_step_does_not_probe(cls, monkeypatch):
    """Which state turns with the frame is a property of the class and its options: found out once, not every step."""
    net = Net()
    opt = build(cls, net, section="implicit")
    train(net, opt, gradients(net, 2))
    calls, try_it = [], probe._parity
    monkeypatch.setattr(probe, "_parity", lambda *a: calls.append(a) or try_it(*a))
    train(net, opt, gradients(net, 5))
    assert calls == []
