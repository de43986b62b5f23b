"""The state: its shapes, that it is live, and what it is after saving, loading and copying, for every lifted
class."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from helpers.steps import (
    OPTIONS,
    OURS,
    STIEFEL,
    Net,
    build,
    classes,
    exact,
    gradients,
    needs_late_state,
    same,
    sections,
    state_of,
    take_steps,
    through_a_file,
    train,
    values,
    weight,
)
from helpers.table import MANIFOLDS, name, point, randn, shapes
from torch import nn

import ghor
import ghor.baselines
from ghor.lifting.state import shared_values

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=name)


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
        N, n = STIEFEL.layout.size(p.shape)
        state = opt.state[p]
        assert (
            state["section"].shape == (N, N)
            if section == "transported"
            else state["frame_anchor"].shape == (n, n)
        )
    assert set(opt.state_dict()) == {"state", "param_groups"}


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


def test_plain_data_in_the_state():
    """Nothing but tensors and numbers, so that weights_only loading and other tools can read it."""
    net = Net()
    opt = build("Adam", net)
    train(net, opt, gradients(net, 2))
    for entries in opt.state_dict()["state"].values():
        assert all(isinstance(v, (torch.Tensor, int, float)) for v in entries.values())


# -- saving and loading ------------------------------------------------------------------------------------


@classes
@sections
@dtypes
def test_resume_is_exact(cls, section, dtype):
    """5 steps, a file read with weights_only=True, 5 more, equals 10 steps, to the bit; gradients missing at
    times."""
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


@sections
def test_training_after_loading_leaves_the_state_dict_alone(section):
    """For the weights on manifolds; Euclidean state is torch's, which shares memory with what it was loaded
    from."""
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

    1e-12 in float64: ten steps of a few eps each, in two different orders of operations; float32 in
    proportion, and a weight in bfloat16 may round to the neighbour.
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
    key = {"transported": "section", "implicit": "frame_anchor"}[two]
    assert key in other.state[twin.a]


@classes
def test_changing_the_section_of_a_group_is_the_same_as_loading(cls):
    """A group key may be written to at any time."""
    net = Net()
    opt = build(cls, net, section="transported")
    train(net, opt, gradients(net, 3))
    opt.param_groups[0]["section"] = "implicit"
    train(net, opt, gradients(net, 3))
    assert "frame_anchor" in opt.state[net.a]
    assert "section" not in opt.state[net.a]
    assert all(STIEFEL.residual(p.detach()) <= 1e-13 for p in (net.a, net.b, net.wide))


@classes
def test_a_state_dict_of_the_plain_optimizer_loads(cls):
    """Euclidean moments are kept; those of manifold weights mean nothing in g^hor and start anew, with a
    warning. Spaces stay."""
    needs_late_state(cls)
    net, plain = Net(), Net()
    Base = getattr(ghor.optim, cls).Base
    options = {k: v for k, v in OPTIONS.get(cls, {}).items() if k != "adamw"}  # which is no option of Base
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
        assert STIEFEL.residual(p.detach()) <= 1e-13


def test_a_state_of_zeros_loads_without_a_word():
    """Of a plain optimizer that has seen no gradient but 0: a count is no moment."""
    Y = nn.Parameter(STIEFEL.random(5, 2))
    plain = torch.optim.Adam([Y])
    Y.grad = torch.zeros_like(Y)
    plain.step()
    opt = ghor.optim.Adam([Y], space=STIEFEL)
    opt.load_state_dict(plain.state_dict())
    assert opt.state[Y]["step"] == 1


def test_members_of_a_batch_have_the_same_numbers_to_the_bit():
    third = torch.tensor(1 / 3, dtype=torch.float64)
    many = third.expand(2000).clone()
    for x, y in ((third, third + 1e-15), (many, many.index_fill(0, torch.tensor(1000), 1)), (1, 2)):
        assert shared_values({"x": x}, (5, 2)) == shared_values({"x": copy.deepcopy(x)}, (5, 2))
        assert shared_values({"x": x}, (5, 2)) != shared_values({"x": y}, (5, 2))


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


# -- copies ------------------------------------------------------------------------------------------------


@classes
@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
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


def test_copies_of_lifted_and_derived_classes_go_on_alike(gen):
    for opt in (
        ghor.optim.Adam([weight(9, 3)], space=STIEFEL),
        ghor.lift(torch.optim.Adam)([weight(9, 3)], space=STIEFEL, section="implicit"),
        type("Mine", (ghor.optim.Adam,), {})([weight(9, 3)], space=STIEFEL),
    ):
        take_steps(opt, gen, 3)
        other = copy.deepcopy(opt)
        for o in (opt, other):
            take_steps(o, torch.Generator().manual_seed(5), 3)
        a, b = (o.param_groups[0]["params"][0] for o in (opt, other))
        assert a is not b
        assert torch.equal(a, b)
        other.add_param_group({"params": [weight(6, 2)]})  # the optimizer's own defaults are copied too
        assert other.param_groups[1]["space"] == STIEFEL


def test_pickled_options_go_on_alike(gen):
    opt = ghor.optim.Adam([weight(9, 3)], space=STIEFEL, retraction="geodesic")
    take_steps(opt, gen, 3)
    other = pickle.loads(pickle.dumps(opt))
    for o in (opt, other):
        take_steps(o, torch.Generator().manual_seed(5), 3)
    assert torch.equal(opt.param_groups[0]["params"][0], other.param_groups[0]["params"][0])


def test_copies_are_of_the_class_whatever_was_put_in_place_of_its_methods(gen):
    """Schedulers, and people who compile, put a `step` into the instance, which is bound to it."""
    net = Net(torch.float32)
    opt = build("Adam", net, lr=0.1)
    train(net, opt, gradients(net, 3))
    torch.optim.lr_scheduler.StepLR(opt, 5)
    other, twin = copy.deepcopy((net, opt))
    before = values(net)
    train(other, twin, gradients(net, 1))
    same(values(net), before)
    assert not any(map(torch.equal, other.parameters(), before))
    take_steps(pickle.loads(pickle.dumps(opt)), gen)


def test_another_anchor_in_a_loaded_state_is_said(gen):
    """The optimizer's own anchor holds, with a warning; the same one, rounded or not, is no news."""
    space = ghor.Stiefel()
    Y, mine, theirs = (space.random(6, 3, generator=gen) for _ in range(3))

    def build(anchor):
        p = nn.Parameter(Y.clone())
        opt = ghor.optim.AdamW([p], space=space, lr=0.1, weight_decay=0.1, anchor=anchor)
        p.grad = torch.zeros_like(p)
        opt.step()
        return p, opt

    _, old = build(theirs)
    p, opt = build(mine)
    with pytest.warns(UserWarning, match=r"parameter 0 of group 0 decayed towards another anchor"):
        opt.load_state_dict(old.state_dict())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*changed outside")  # the weights of the two are not the same
        opt.step()
    assert torch.equal(opt.state[p]["decay_target"], mine)
    opt.load_state_dict(opt.state_dict())  # warnings are errors


@pytest.mark.parametrize("cls", [ghor.optim.Adam, ghor.baselines.ScalarMomentAdam])
def test_a_state_dict_is_checked_as_the_users_hooks_have_left_it(cls, gen):
    """A hook may repair what would be refused: a damaged section, the name of the space, an option."""
    p = weight(9, 3)
    opt = cls([p], space=STIEFEL, section="transported")
    take_steps(opt, gen, 2)
    saved = copy.deepcopy(opt.state_dict())
    good = copy.deepcopy(saved)
    saved["state"][0]["section"] *= 2
    saved["param_groups"][0]["space"] = "Sphere()"
    saved["param_groups"][0].pop("norm", None)
    with pytest.raises(ValueError, match=r"on Sphere\(\)|no 'norm'"):
        opt.load_state_dict(saved)
    opt.register_load_state_dict_pre_hook(lambda _, found: good)
    opt.load_state_dict(saved)
    assert torch.equal(opt.state[p]["section"], good["state"][0]["section"])
    take_steps(opt, gen)


@pytest.mark.parametrize(
    ("made", "keys"),
    [
        (lambda s: {"optimizer": s}, ["optimizer"]),
        (lambda s: {"state": {}, "param_groups": []}, ["state", "param_groups"]),
        (lambda s: s["param_groups"].append({"mine": 3}), ["state", "param_groups"]),
    ],
)
def test_hooks_see_what_is_saved_and_may_return_anything(made, keys, gen):
    opt, seen = ghor.optim.Adam([weight(9, 3)], space=STIEFEL), []
    take_steps(opt, gen)
    opt.register_state_dict_post_hook(lambda _, s: seen.append(through_a_file(s)) or made(s), prepend=True)
    assert list(opt.state_dict()) == keys
    assert seen[0]["param_groups"][0]["space"] == "Stiefel()"
    assert seen[0]["state"][0]["section"].is_contiguous()
    assert len(opt._optimizer_state_dict_post_hooks) == 1


def test_a_hook_cannot_let_damage_through(gen):
    opt = ghor.optim.Adam([weight(9, 3)], space=STIEFEL, section="transported")
    take_steps(opt, gen, 2)

    def damage(_, found):
        found["state"][0]["section"] = 2 * found["state"][0]["section"]

    opt.register_load_state_dict_pre_hook(damage)
    with pytest.raises(ValueError, match=r"a loaded section is .* off"):
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    take_steps(opt, gen)


@pytest.mark.parametrize("space", [s for s in MANIFOLDS if not s.compact], ids=name)
def test_a_damaged_section_is_refused_on_every_space(space, gen):
    """Where it holds the point, it would take the weight off its space. On SPD every invertible L is one."""
    shape = shapes(space)[0]
    Y = nn.Parameter(point(space, shape, gen))
    opt = ghor.optim.SGD([Y], space=space, lr=0.001, section="transported", momentum=0.9)
    Y.grad = randn(shape, gen)
    opt.step()
    before = Y.detach().clone()
    for factor in (0.0, math.nan) if isinstance(space, ghor.SPD) else (0.0, 1.5, math.nan):
        saved = copy.deepcopy(opt.state_dict())
        saved["state"][0]["section"] *= factor
        with pytest.raises(ValueError, match="section"):
            opt.load_state_dict(saved)
        opt.step()
    assert not torch.equal(Y.detach(), before)
    assert (space.residual(Y.detach()) <= space.tolerance(Y.detach())).all()
