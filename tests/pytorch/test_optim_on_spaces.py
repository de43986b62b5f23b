"""What torch asks of its own optimizers (test/test_optim.py), asked of ours on curved spaces.

Each configuration of torch's database runs on weights of each kind. Where plain torch refuses a configuration
on the same values, so may we.
"""

import copy
import warnings

import pytest
import torch
from helpers.database import CASES, DATABASE, case_id, inputs, options
from helpers.pairs import KINDS, Net, train
from helpers.steps import through_a_file

import ghor

CURVED = ["Hyperbolic", "SPD", "SpecialEuclidean", "SymplecticStiefel", "complex Stiefel"]
PLAIN = [c for c in CASES if c[2] == "forloop"]
FIRST = [c for c in PLAIN if c[1] == 0]
FAST = ("SGD", "Adam", "Adagrad")


def slow_but(cases):
    return [c if c[0] in FAST and c[1] == 0 else pytest.param(c, marks=pytest.mark.slow) for c in cases]


every_case = pytest.mark.parametrize("case", slow_but(PLAIN), ids=case_id)
every_class = pytest.mark.parametrize("case", slow_but(FIRST), ids=case_id)
every_kind = pytest.mark.parametrize("kind", CURVED)
pytestmark = [
    pytest.mark.filterwarnings("ignore:weight_decay="),
    pytest.mark.filterwarnings("ignore:.*(was clipped to|has come|has grown|is held)"),
]


def build(case, net, **more):
    space = net.space
    return getattr(ghor.optim, case[0])([net.a, net.b], space=space, **(options(case) | more))


def make(kind):
    net = Net(*KINDS[kind])
    net.space = KINDS[kind][0]
    return net


def numbers(net):
    return [p.detach().clone() for p in (net.a, net.b)]


def off(one, other):
    return max(float((a - b).abs().max() / (1 + b.abs().max())) for a, b in zip(one, other, strict=True))


def equal(one, other):
    return all(map(torch.equal, one, other))


@every_kind
@pytest.mark.parametrize("case", slow_but([c for c in CASES if c[2] in ("foreach", "fused")]), ids=case_id)
def test_every_implementation_goes_the_same_way(case, kind):
    if KINDS[kind][2].is_complex and case[2] == "fused":
        pytest.skip("torch's fused kernels take no complex weights")
    ends = []
    for impl in ("forloop", case[2]):
        net = make(kind)
        train(net, build((case[0], case[1], impl), net), 7)
        ends.append(numbers(net))
    assert off(*ends) <= 1e-9


@every_kind
@every_case
def test_a_learning_rate_that_is_a_tensor(case, kind):
    given = options(case)
    lr = float(given.get("lr", 1e-2))
    for one in (lr, torch.tensor(lr, dtype=torch.float64)):
        plain = make(kind)
        try:
            train(plain, getattr(ghor.optim, case[0]).Base([plain.a, plain.b], **(given | {"lr": one})), 1)
        except (ValueError, TypeError, RuntimeError):
            pytest.skip("torch refuses it, too")
    ends = []
    for one in (lr, torch.tensor(lr, dtype=torch.float64)):
        net = make(kind)
        train(net, build(case, net, lr=one), 4)
        ends.append(numbers(net))
    assert off(*ends) <= 1e-12


@every_kind
@every_class
def test_groups_are_optimizers_of_their_own(case, kind):
    """Two groups with learning rates of their own move as by two optimizers; one without a rate has the
    default."""
    lr = float(options(case).get("lr", 1e-2))
    net, apart = make(kind), make(kind)
    cls, space = getattr(ghor.optim, case[0]), net.space
    given = {k: v for k, v in options(case).items() if k != "lr"}
    opt = cls([{"params": [net.a], "lr": lr / 4}, {"params": [net.b]}], lr=lr, space=space, **given)
    alone = [cls([p], lr=x, space=space, **given) for p, x in ((apart.a, lr / 4), (apart.b, lr))]
    train(net, opt, 4)
    for _ in range(4):
        apart.zero_grad()
        apart.loss().backward()
        for o in alone:
            o.step()
    assert off(numbers(net), numbers(apart)) <= 1e-12


@every_kind
@every_case
def test_nothing_moves_without_gradients_or_with_zero_ones(case, kind):
    net = make(kind)
    opt, before = build(case, net), numbers(net)
    opt.step()
    assert equal(before, numbers(net))
    assert not opt.state[net.a] or all("exp" not in k for k in opt.state[net.a])
    for p in (net.a, net.b):
        p.grad = torch.zeros_like(p)
    opt.step()
    assert equal(before, numbers(net))


@every_kind
@every_case
def test_gradients_are_only_read(case, kind):
    net = make(kind)
    opt = build(case, net)
    train(net, opt, 2)
    net.loss().backward()
    before = [(p.grad, p.grad.clone(), p.grad._version) for p in (net.a, net.b)]
    opt.step()
    for p, (grad, values, version) in zip((net.a, net.b), before, strict=True):
        assert p.grad is grad
        assert grad._version == version
        assert torch.equal(grad, values)


@every_kind
@every_class
def test_hooks_of_state_dicts(case, kind):
    """Each is called once, in order, and what it returns or changes counts."""
    net = make(kind)
    opt, called = build(case, net), []
    train(net, opt, 2)
    opt.register_state_dict_pre_hook(lambda o: called.append("pre"))
    opt.register_state_dict_post_hook(lambda o, s: called.append("post") or {**s, "mine": 3})
    opt.register_load_state_dict_pre_hook(
        lambda o, s: called.append("load pre") or {k: s[k] for k in s if k != "mine"}
    )
    opt.register_load_state_dict_post_hook(lambda o: called.append("load post"))
    saved = copy.deepcopy(opt.state_dict())
    assert saved["mine"] == 3
    opt.load_state_dict(saved)
    assert called == ["pre", "post", "load pre", "load post"]
    train(net, opt, 1)


@every_kind
@every_class
def test_a_step_count_that_is_a_number(case, kind):
    """State dicts of old versions hold one, where tensors are held now."""
    net, twin = make(kind), make(kind)
    opt = build(case, net)
    train(net, opt, 3)
    twin.load_state_dict(net.state_dict())
    saved = copy.deepcopy(opt.state_dict())
    for state in saved["state"].values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = float(state["step"])
    other = build(case, twin)
    other.load_state_dict(saved)
    train(net, opt, 2)
    train(twin, other, 2)
    assert equal(numbers(net), numbers(twin))


@every_kind
@every_class
def test_a_state_dict_without_newer_options(case, kind):
    """Options with a default that torch added later are filled in."""
    net, twin = make(kind), make(kind)
    opt = build(case, net)
    train(net, opt, 3)
    twin.load_state_dict(net.state_dict())
    saved = copy.deepcopy(opt.state_dict())
    for group in saved["param_groups"]:
        for key in ("maximize", "foreach", "fused", "differentiable", "capturable", "decoupled_weight_decay"):
            group.pop(key, None)
    other = build(case, twin)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*options")
        other.load_state_dict(saved)
    train(net, opt, 2)
    train(twin, other, 2)
    assert off(numbers(net), numbers(twin)) <= 1e-12


@every_kind
@every_case
def test_state_keeps_its_types_and_loads_safely(case, kind):
    """Through a file with weights_only=True: the same keys, dtypes and values, loaded and saved again."""
    net, twin = make(kind), make(kind)
    opt = build(case, net)
    train(net, opt, 3)
    twin.load_state_dict(net.state_dict())
    other = build(case, twin)
    other.load_state_dict(through_a_file(opt.state_dict()))
    mine, theirs = opt.state_dict(), other.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for i, state in mine["state"].items():
        assert list(state) == list(theirs["state"][i])
        for key, value in state.items():
            copied = theirs["state"][i][key]
            assert type(copied) is type(value), key
            if isinstance(value, torch.Tensor):
                assert (copied.dtype, copied.shape) == (value.dtype, value.shape), key
                assert torch.equal(copied, value), key


@every_kind
@every_class
def test_there_is_state_after_a_step_where_torch_has_some(case, kind):
    if case[0] == "Muon" and KINDS[kind][2].is_complex:
        pytest.skip("torch's Muon takes no complex weights; beside manifolds they are AdamW's")
    net, plain = make(kind), make(kind)
    opt = build(case, net)
    theirs = getattr(ghor.optim, case[0]).Base([plain.a, plain.b], **options(case))
    train(net, opt, 1)
    train(plain, theirs, 1)
    assert set(theirs.state[plain.a]) <= set(opt.state[net.a])
    for key, value in theirs.state[plain.a].items():
        if isinstance(value, torch.Tensor) and value.shape == plain.a.shape:
            assert opt.state[net.a][key].shape == value.shape, key


@every_kind
@pytest.mark.parametrize(
    "cls", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in DATABASE]
)
def test_capturable_is_torchs(cls, kind):
    """It is for accelerators: an optimizer is built, and a step is refused as torch refuses it, or goes the
    same way. The rule is tried without it, on the CPU."""
    configurations = [i for i, kwargs in enumerate(inputs(cls)) if kwargs.get("capturable")]
    if (
        not hasattr(ghor.optim, cls)
        or "capturable" not in getattr(ghor.optim, cls).Base([torch.ones(1)]).defaults
    ):
        pytest.skip("has no such option")
    assert not configurations  # the database lists them for accelerators alone
    ends = []
    for capturable in (False, True):
        net, plain = make(kind), make(kind)
        case = (cls, 0, "forloop")
        theirs = getattr(ghor.optim, cls).Base(
            [plain.a, plain.b], **(options(case) | {"capturable": capturable})
        )
        opt = build(case, net, capturable=capturable)
        try:
            train(plain, theirs, 2)
        except AssertionError:
            before = numbers(net)
            with pytest.raises(AssertionError):
                train(net, opt, 2)
            assert equal(before, numbers(net))
            return
        train(net, opt, 2)
        ends.append(numbers(net))
    assert off(*ends) <= 1e-12
