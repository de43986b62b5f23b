"""What users do to optimizers, weights and state between steps: noticed, or refused, never ignored."""

import copy
import pickle
import warnings

import pytest
import torch
from table import randn
from torch import nn

import ghor
from ghor import probe
from ghor.spaces import base
from ghor.stack import Stack

ST = ghor.Stiefel()


def weight(*shape, dtype=torch.float32, seed=0):
    return nn.Parameter(ST.random(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))


def take_steps(opt, gen, n=1):
    for _ in range(n):
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = randn(tuple(p.shape), gen, p.dtype)
        opt.step()


@pytest.mark.parametrize("section", ["transported", "implicit"])
@pytest.mark.parametrize("steps_before", [0, 1, 12])
def test_a_weight_written_off_its_space_is_refused(section, steps_before, gen):
    Y = weight(9, 3)
    opt = ghor.optim.Adam([Y], space=ST, section=section)
    take_steps(opt, gen, steps_before)
    with torch.no_grad():
        Y.mul_(2)
    with pytest.raises(
        ValueError, match=r"parameter 0 of group 0 of shape \(9, 3\) is .* off Stiefel\(\); call ghor.constrain"
    ):
        take_steps(opt, gen)
    assert abs(float(Y.detach().norm()) - 2 * 3**0.5) < 1e-5  # and nothing was moved


def test_a_parameter_replaced_in_its_group_is_looked_at(gen):
    opt = ghor.optim.Adam([weight(9, 3)], space=ST)
    take_steps(opt, gen)
    opt.param_groups[0]["params"][0] = nn.Parameter(randn((9, 3), gen, torch.float32))
    with pytest.raises(ValueError, match="off Stiefel"):
        take_steps(opt, gen)


def test_dtype_of_the_model_changed(gen):
    layer = ghor.constrain(nn.Linear(9, 3, bias=False), "weight", ST)
    opt = ghor.optim.Adam(layer)
    take_steps(opt, gen, 3)
    layer.double()
    with pytest.raises(ValueError, match="off Stiefel"):  # 1e-7 is far in float64
        take_steps(opt, gen)
    ghor.constrain(layer, "weight", ST)
    with pytest.warns(UserWarning, match="changed outside"):
        take_steps(opt, gen)
    assert ST.distance(layer.weight.detach()) < 1e-13


@pytest.mark.parametrize(("key", "value"), [("retraction", "qr"), ("section", "explicit"), ("error_if_nonfinite", 1)])
def test_a_bad_option_set_live_is_refused_before_anything_moves(key, value, gen):
    Y, b = weight(9, 3), nn.Parameter(torch.zeros(3))
    opt = ghor.optim.SGD([{"params": [Y], "space": ST}, {"params": [b]}], lr=0.1, momentum=0.9)
    take_steps(opt, gen)
    good, before = opt.param_groups[0][key], [Y.detach().clone(), b.detach().clone()]
    opt.param_groups[0][key] = value
    with pytest.raises((ValueError, TypeError), match="in group 0"):
        take_steps(opt, gen)
    assert torch.equal(Y, before[0])
    assert torch.equal(b, before[1])
    opt.param_groups[0][key] = good
    take_steps(opt, gen)


def test_a_warning_turned_into_an_error_leaves_a_finished_step(gen):
    Y, Z = weight(5, 3), weight(7, 3)
    opt = ghor.optim.SGD([Y, Z], lr=1.0, space=ST)
    Y.grad, Z.grad = torch.full((5, 3), float("nan")), randn((7, 3), gen, torch.float32)
    start = Z.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="not finite"):
            opt.step()
    moved = Z.detach().clone()
    assert not torch.equal(moved, start)
    Y.grad, Z.grad = torch.zeros(5, 3), torch.zeros(7, 3)
    opt.step()
    assert torch.equal(Z, moved)  # the velocity is not applied twice


def test_an_error_in_the_base_leaves_no_velocity_behind(gen):
    class Fails(torch.optim.SGD):
        fail = False

        def step(self, closure=None):
            super().step()
            if Fails.fail:
                raise KeyError("base")

    Y = weight(5, 3)
    opt = ghor.lift(Fails)([Y], lr=0.1, space=ST)
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


def test_space_changed_after_steps_is_refused(gen):
    Y = weight(5, 3)
    opt = ghor.optim.Adam([Y], space=ghor.Euclidean())
    take_steps(opt, gen)
    with torch.no_grad():
        Y.copy_(ST.project(Y))
    opt.param_groups[0]["space"] = ST
    with pytest.raises(ValueError, match=r"went from Euclidean\(\) to Stiefel\(\) after steps were taken"):
        take_steps(opt, gen)


def test_state_written_by_the_user_counts(gen):
    Y, Z = weight(5, 3), weight(5, 3, seed=1)
    opt = ghor.optim.Adam([Y, Z], space=ST, lr=0.1)
    take_steps(opt, gen)
    opt.state[Y]["exp_avg"] = torch.zeros(5, 3)
    before = Y.detach().clone()
    Y.grad = torch.zeros(5, 3)
    opt.step()
    assert torch.equal(Y, before)
    opt.state[Y].clear()
    opt.step()
    assert opt.state[Y]["step"] == 1
    assert opt.state[Z]["step"] == 3
    opt.state.clear()
    opt.step()
    assert opt.state[Y]["step"] == opt.state[Z]["step"] == 1


def test_section_kind_switched_live(gen):
    Y, Z = weight(9, 3, dtype=torch.float64), weight(9, 3, dtype=torch.float64)
    opts = [ghor.optim.SGD([p], space=ST, lr=0.05, momentum=0.9, section="transported") for p in (Y, Z)]
    for t in range(20):
        opts[0].param_groups[0]["section"] = "implicit" if 5 <= t < 12 else "transported"
        Y.grad = randn((9, 3), gen)
        Z.grad = Y.grad.clone()
        for opt in opts:
            opt.step()
    assert (Y - Z).abs().max() < 1e-13


def test_copies_go_on_alike(gen):
    for opt in (
        ghor.optim.Adam([weight(9, 3)], space=ST),
        ghor.lift(torch.optim.Adam)([weight(9, 3)], space=ST, section="implicit"),
        type("Mine", (ghor.optim.Adam,), {})([weight(9, 3)], space=ST),
    ):
        take_steps(opt, gen, 3)
        other = copy.deepcopy(opt)
        for o in (opt, other):
            take_steps(o, torch.Generator().manual_seed(5), 3)
        a, b = (o.param_groups[0]["params"][0] for o in (opt, other))
        assert a is not b
        assert torch.equal(a, b)
        other.add_param_group({"params": [weight(6, 2)]})  # the optimizer's own defaults are copied too
        assert other.param_groups[1]["space"] == ST


def test_pickle(gen):
    opt = ghor.optim.Adam([weight(9, 3)], space=ST, retraction="geodesic")
    take_steps(opt, gen, 3)
    other = pickle.loads(pickle.dumps(opt))
    for o in (opt, other):
        take_steps(o, torch.Generator().manual_seed(5), 3)
    assert torch.equal(opt.param_groups[0]["params"][0], other.param_groups[0]["params"][0])


def test_load_hooks_are_heard(gen):
    Y = weight(9, 3)
    opt = ghor.optim.Adam([Y], space=ST)
    take_steps(opt, gen, 2)
    state = copy.deepcopy(opt.state_dict())

    def zero(_, loaded):
        loaded = copy.deepcopy(loaded)
        loaded["state"][0]["exp_avg"].zero_()
        return loaded

    opt.register_load_state_dict_pre_hook(zero)
    seen = []
    opt.register_load_state_dict_post_hook(lambda o: seen.append(o.state[Y]["section"].dtype))
    opt.load_state_dict(state)
    assert not opt.state[Y]["exp_avg"].any()
    assert opt.state[Y]["exp_avg_sq"].any()
    assert seen == [torch.float32]


def test_scaled_gradients_with_inf_are_the_scalers_business(gen):
    Y = weight(9, 3)
    opt = ghor.optim.Adam([Y], space=ST, fused=True, error_if_nonfinite=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = Y.detach().clone()
    scaler.scale((Y * float("inf")).sum()).backward()
    scaler.step(opt)
    scaler.update()
    assert torch.equal(Y, before)
    opt.zero_grad()
    scaler.scale((Y**3).sum()).backward()
    scaler.step(opt)
    assert not torch.equal(Y, before)


def test_deepcopied_layers_are_declared_too():
    layer = ghor.constrain(nn.Linear(9, 4, bias=False), "weight", ST)
    model = nn.Sequential(layer, copy.deepcopy(layer), copy.deepcopy(copy.deepcopy(layer)))
    assert ghor.optim.Adam(model.parameters()).param_groups[0]["space"] == ST


def test_constrained_anew_to_another_space(gen):
    layer = ghor.constrain(nn.Linear(9, 4, bias=False), "weight", ST)
    opt = ghor.optim.Adam(layer)
    take_steps(opt, gen)
    ghor.constrain(layer, "weight", ghor.Grassmann())
    with pytest.raises(ValueError, match=r"constrained to Grassmann\(\) after this optimizer took it on Stiefel\(\)"):
        take_steps(opt, gen)


class PerTensorNorm(torch.optim.Optimizer):
    """Normalised gradient: fine on one weight, wrong over a stack."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


def test_rules_with_a_norm_a_tensor_are_lifted_one_by_one(gen):
    with pytest.raises(ValueError, match="norm or mean over the whole tensor"):
        ghor.lift(PerTensorNorm)
    Lifted = ghor.lift(PerTensorNorm, stack=False)
    assert Lifted is ghor.lift(PerTensorNorm, stack=False)
    together, alone = [weight(9, 3, seed=i) for i in range(3)], [weight(9, 3, seed=i) for i in range(3)]
    opt, single = Lifted(together, space=ST), [Lifted([p], space=ST) for p in alone]
    for _ in range(5):
        for i, (p, q) in enumerate(zip(together, alone, strict=True)):
            p.grad = 10**i * randn((9, 3), gen, torch.float32)
            q.grad = p.grad.clone()
        opt.step()
        for s in single:
            s.step()
    assert all(torch.equal(p, q) for p, q in zip(together, alone, strict=True))
    take_steps(copy.deepcopy(opt), gen)
    assert all(ST.distance(p.detach()) < 2e-6 for p in together)


class Counted(torch.optim.Optimizer):
    """Momentum with a step count of shape (1,), which belongs to no coordinate."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    s = self.state[p]
                    if not s:
                        s["t"], s["m"] = torch.zeros(1, dtype=p.dtype), torch.zeros_like(p)
                    s["t"] += 1
                    s["m"].mul_(0.9).add_(p.grad)
                    p.sub_(s["m"] / s["t"], alpha=group["lr"])


def test_state_of_other_shapes_is_shared_saved_and_split(gen):
    def make():
        return [weight(9, 3, seed=i) for i in range(3)]

    a, b = make(), make()
    first, second = ghor.lift(Counted)(a, space=ST), ghor.lift(Counted)(b, space=ST)
    for opt in (first, second):
        take_steps(opt, torch.Generator().manual_seed(1), 3)
    third = ghor.lift(Counted)(b, space=ST)
    third.load_state_dict(second.state_dict())
    for ps, opt in ((a, first), (b, third)):
        g = torch.Generator().manual_seed(2)
        for t in range(4):
            for i, p in enumerate(ps):
                p.grad = randn((9, 3), g, torch.float32) if (t + i) % 3 else None
            opt.step()
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_the_probe_runs_once_for_a_rule(gen):
    Y = weight(40, 3)
    opt = ghor.optim.Adam([Y], space=ST, section="implicit")
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    take_steps(opt, gen)
    known = len(probe._parities)
    for _ in range(5):
        take_steps(opt, gen)
        schedule.step()
    assert len(probe._parities) == known


def test_adam_without_eps(gen):
    """A's diagonal is 0 by its structure: 0/0 there is no NaN of the gradient's."""
    Y = weight(9, 3)
    opt = ghor.optim.Adam([Y], space=ST, eps=0.0)
    before = Y.detach().clone()
    take_steps(opt, gen, 3)
    assert (Y - before).abs().max() > 1e-4
    assert ST.distance(Y.detach()) < 2e-6


def test_dist_has_a_derivative_where_the_points_meet():
    for space, shape in ((ST, (5, 2)), (ghor.Sphere(), (4,)), (ghor.Grassmann(), (5, 2)), (ghor.Euclidean(), (3,))):
        Y = space.E(shape, dtype=torch.float64)
        Z = Y.clone().requires_grad_()
        space.dist(Y, Z).sum().backward()
        assert torch.isfinite(Z.grad).all()


def test_flattened_log():
    space = ghor.Stiefel(flatten=3)
    g = torch.Generator().manual_seed(0)
    Y = space.random(8, 3, 2, 1, generator=g, dtype=torch.float64)
    V = 0.1 * space.tangent(Y, randn((8, 3, 2, 1), g))
    assert (space.log(Y, space.exp(Y, V)) - V).abs().max() < 1e-13


# -- steps that are broken off, and what people do to optimizers ------------------------------------------------------


def trained(section="transported", cls="Adam", steps=3, **options):
    """Two weights of a kind and a Euclidean one, after some steps; `move(opt)` makes one more."""
    gen = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(ghor.Stiefel().random(8, 2, generator=gen)) for _ in range(2)]
    weights.append(nn.Parameter(torch.zeros(3)))
    groups = [{"params": weights[:2], "space": ghor.Stiefel()}, {"params": weights[2:]}]
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
    return max(float(ghor.Stiefel().distance(p.detach().double())) for p in weights[:2])


def interrupted_after(monkeypatch, owner, name):
    """A KeyboardInterrupt once `owner.name` has done its work, one time."""
    real = getattr(owner, name)

    def call(*args, **kwargs):
        real(*args, **kwargs)
        monkeypatch.setattr(owner, name, real)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, call)


def test_interrupted_while_a_section_moves(monkeypatch):
    """Between the two writes of it a section is off the group: it begins anew, from the weights."""
    opt, weights = trained()
    before = [p.detach().clone() for p in weights[:2]]
    interrupted_after(monkeypatch, base, "add_product")
    with pytest.raises(KeyboardInterrupt):
        move(opt)
    assert all(map(torch.equal, weights, before))
    saved = copy.deepcopy(opt.state_dict())
    with pytest.warns(UserWarning, match="a step was broken off: sections begin anew, moments are kept"):
        move(opt)
    assert off(weights) <= 2e-6
    twin, others = trained(steps=0)
    with torch.no_grad():
        for p, q in zip(others, [*before, weights[2]], strict=True):
            p.copy_(q)
    twin.load_state_dict(saved)
    move(twin)
    assert all(map(torch.equal, others[:2], weights))


@pytest.mark.parametrize("where", ["point", "global_grad", "update_section", "apply_section", "look_after", "version"])
@pytest.mark.parametrize("section", ["transported", "implicit"])
def test_interrupted_anywhere(where, section, monkeypatch):
    """Groups and state are those of the weights afterwards, and the optimizer goes on."""
    opt, weights = trained(section)
    keys = set(opt.state)
    with monkeypatch.context() as patch:
        interrupted_after(patch, Stack, where)
        with pytest.raises(KeyboardInterrupt):
            move(opt)
    assert [p for group in opt.param_groups for p in group["params"]] == weights
    assert set(opt.state) == keys == set(weights)
    opt.state_dict()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a step was broken off")
        for _ in range(3):
            move(opt)
    assert off(weights) <= 2e-6


def test_copies_are_of_the_class_whatever_was_put_in_place_of_its_methods():
    """Schedulers, and people who compile, put a `step` into the instance, which is bound to it."""
    opt, weights = trained()
    torch.optim.lr_scheduler.StepLR(opt, 5)
    twin, others = copy.deepcopy((opt, weights))
    before = [p.detach().clone() for p in weights]
    move(twin)
    assert all(map(torch.equal, weights, before))
    assert not any(map(torch.equal, others, before))
    move(pickle.loads(pickle.dumps(opt)))


@pytest.mark.parametrize("section", ["transported", "implicit"])
def test_a_weight_off_its_space_is_refused_as_often_as_it_is_tried(section):
    opt, weights = trained(section)
    with torch.no_grad():
        weights[0].mul_(2)
    for _ in range(3):
        with pytest.raises(ValueError, match="parameter 0 of group 0"):
            move(opt)


def test_groups_can_be_other_dicts():
    opt, weights = trained()
    opt.param_groups = [dict(group, lr=0.0) for group in opt.param_groups]
    before = [p.detach().clone() for p in weights]
    move(opt)
    assert all(map(torch.equal, weights, before))


def test_a_stack_that_cannot_be_split_stays_whole(monkeypatch):
    opt, weights = trained()
    weights[1].grad = None

    def fails(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Stack, "part", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            opt.step()
    before = [p.detach().clone() for p in weights]
    move(opt)
    assert not any(map(torch.equal, weights, before))


@pytest.mark.parametrize("cls", ["SGD", "Adam"])
def test_steps_in_inference_mode(cls):
    """What is made there for a stack that is split serves later steps, too."""
    opt, weights = trained(cls=cls, steps=0 if cls == "SGD" else 2)
    for p in weights:
        p.grad = torch.ones_like(p)
    weights[1].grad = None
    with torch.inference_mode():
        opt.step()
    move(opt)
    assert off(weights) <= 2e-6


def test_one_weight_of_a_stack_gets_another_dtype():
    opt, weights = trained(cls="SGD")
    weights[1].data = ST.project(weights[1].data.double())
    with pytest.warns(UserWarning, match="parameter 1 of group 0 changed outside"):
        move(opt)
    assert off(weights[1:2] * 2) <= 1e-14
