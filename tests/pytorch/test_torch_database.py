"""torch's own database of optimizers (torch.testing._internal.common_optimizers) as a contract.

It lists for every optimizer of torch the configurations that are tried there, and inputs that must be refused. Whatever
torch's class does with them the lifted one does: on Euclidean weights bit for bit, on Stiefel in the behaviours that
torch's suite (test/test_optim.py) checks. LEFT_OUT says which of that suite's tests have no counterpart here, and why.
"""

import copy
import inspect
import io
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
    optim_db,
)

import ghor

FLAT, STIEFEL = ghor.Euclidean(), ghor.Stiefel()

LEFT_OUT = {
    "steps with differentiable=True on Stiefel": "refused: nothing differentiates through the section's step in place",
    "complex weights on Stiefel": "refused: the spaces are real",
    "sparse gradients on Stiefel refused by Adam": "taken by every class: a gradient in g^hor is dense",
    "test_second_order_optims_return_consistent_types, test_step_iteration": "LBFGS, which does not lift",
    "test_optim_infos_do_not_specify_global_cliquey_kwargs": "about the database itself",
    "test_forloop_goes_right_direction_multigpu, test_mixed_device_dtype": "two GPUs",
    "test_foreach_large_tensor, test_fused_large_tensor": "GPU with 64 GB",
    "test_peak_memory_foreach, test_defaults_changed_to_foreach": "GPU: counts its memory, its default kernels",
    "test_state_dict_with_cuda_params, test_cpu_load_state_dict, test_fused_cpu_matches_cuda": "GPU beside the CPU",
    "test_fused_mixed_precision_*": "GPU: CPU kernels refuse bfloat16 state of float32 weights",
}


def paper_adam_errors(device, dtype):
    kinds = ({"lr": -1.0}, {"betas": (1.0, 0.0)}, {"betas": (0.9, -0.1)}, {"delta": -1e-8})
    own = [ErrorOptimizerInput(OptimizerInput(None, kwargs), error_type=ValueError) for kwargs in kinds]
    return get_error_inputs_for_all_optims(device, dtype) + own


DATABASE = {info.optim_cls.__name__: info for info in optim_db} | {
    "PaperAdam": OptimizerInfo(
        ghor.optim.PaperAdam.Base,
        optim_inputs_func=lambda device, dtype=None: [
            OptimizerInput(None, {}, "default"),
            OptimizerInput(None, {"lr": 0.01, "betas": (0.8, 0.95), "delta": 1e-6}, "all options"),
        ],
        supported_impls=(),
        optim_error_inputs_func=paper_adam_errors,
    )
}
CLASSES = ghor.optim.__all__
SWITCHES = ("foreach", "fused", "differentiable")


def implementations(cls):
    """forloop, and what else torch has for the class, as keyword arguments."""
    info = DATABASE[cls]
    known = [s for s in SWITCHES if s in info.supported_impls and (s != "fused" or "cpu" in info.supports_fused_on)]
    return {"forloop": {"foreach": False} if "foreach" in known else {}} | {s: {s: True} for s in known}


def inputs(cls, device="cpu"):
    """Fresh ones: they hold tensors."""
    return [i.kwargs for i in DATABASE[cls].optim_inputs_func(device=device)]


def case_id(case):
    cls, i, impl = case
    return f"{cls}-{DATABASE[cls].optim_inputs_func(device='cpu')[i].desc or i}-{impl}".replace(" ", "_")


CASES = [(cls, i, impl) for cls in CLASSES for i in range(len(inputs(cls))) for impl in implementations(cls)]
cases = pytest.mark.parametrize("case", CASES, ids=case_id)
moving_cases = pytest.mark.parametrize("case", [c for c in CASES if c[2] != "differentiable"], ids=case_id)
classes = pytest.mark.parametrize("cls", CLASSES)


def options(case):
    cls, i, impl = case
    return inputs(cls)[i] | implementations(cls)[impl]


def quiet(make):
    """On Stiefel a weight_decay of all weights warns that it has no effect: tested elsewhere."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "weight_decay=")
        return make()


class Net(nn.Module):
    """Two weights of one kind, one by its rows, and a Euclidean one."""

    def __init__(self, dtype=torch.float64, space=STIEFEL):
        super().__init__()
        gen = torch.Generator().manual_seed(0)
        shapes = {"a": (6, 3), "b": (6, 3), "wide": (3, 5)}
        for name, shape in shapes.items():
            point = STIEFEL.random(*shape, generator=gen, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(point.to(dtype)))
        self.bias = nn.Parameter(torch.randn(5, generator=gen, dtype=torch.float64).to(dtype))
        self.x = torch.randn(8, 6, generator=gen, dtype=torch.float64).to(dtype)
        self.y = torch.randn(8, 5, generator=gen, dtype=torch.float64).to(dtype)
        self.spaces = (space, space, space, FLAT)

    def loss(self):
        return (self.x @ (self.a + self.b) @ self.wide + self.bias - self.y).square().sum()


def build(cls, net, named=False, **kwargs):
    params = list(net.named_parameters()) if named else list(net.parameters())
    return quiet(lambda: getattr(ghor.optim, cls)([{"params": params, "space": net.spaces}], **kwargs))


def train(net, opt, steps, skip=()):
    """Steps of gradient descent; in those of `skip` the weight b gets no gradient."""
    for k in range(steps):
        opt.zero_grad()
        net.loss().backward()
        if k in skip:
            net.b.grad = None
        opt.step()


def same(a, b, **tolerance):
    torch.testing.assert_close(a, b, **tolerance or {"rtol": 0, "atol": 0})


def values(net):
    return [p.detach().clone() for p in net.parameters()]


def on_stiefel(net, tol):
    return all(STIEFEL.distance(p.detach()) <= tol for p in (net.a, net.b, net.wide))


def outcome(make, then=lambda opt: None):
    """What a constructor and what follows say: the exception, or the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            then(make())
        except Exception as error:
            return type(error), str(error)
    return None, "\n".join(str(w.message) for w in said)


# -- what is accepted and refused --------------------------------------------------------------------------------------


def test_every_optimizer_of_torch_is_lifted_or_refused():
    for name, info in DATABASE.items():
        assert name in CLASSES or outcome(lambda c=info.optim_cls: ghor.lift(c))[0] is ValueError


@classes
def test_errors_are_torchs_on_euclidean_weights(cls):
    """Same exception and message; ours may add which parameter is meant."""
    Lifted = getattr(ghor.optim, cls)
    for error in DATABASE[cls].optim_error_inputs_func("cpu", torch.float32):
        given = error.optimizer_error_input
        then = (lambda opt: opt.step()) if error.error_on == OptimizerErrorEnum.STEP_ERROR else (lambda opt: None)
        theirs = outcome(lambda g=given: Lifted.Base(g.params, **g.kwargs), then)
        ours = outcome(lambda g=given: Lifted(g.params, space=FLAT, **g.kwargs), then)
        assert theirs != (None, "")
        assert (ours[0], ours[1].startswith(theirs[1])) == (theirs[0], True), (given.desc, ours, theirs)


@classes
def test_errors_are_torchs_on_stiefel(cls):
    for error in DATABASE[cls].optim_error_inputs_func("cpu", torch.float32):
        given = error.optimizer_error_input
        if given.kwargs:
            net = Net(torch.float32)
            theirs = outcome(lambda n=net, g=given: DATABASE[cls].optim_cls(n.parameters(), **g.kwargs))
            ours = outcome(lambda n=net, g=given: build(cls, n, **g.kwargs))
            assert ours == theirs, given.desc


@classes
@pytest.mark.parametrize("space", [FLAT, STIEFEL], ids=str)
def test_configurations_of_other_devices_fail_alike(cls, space):
    """`capturable` on the CPU: built, and refused at the step, when nothing has moved."""
    Base = DATABASE[cls].optim_cls
    for kwargs, again in zip(inputs(cls, "cuda"), inputs(cls, "cuda"), strict=True):
        if kwargs.get("capturable"):
            plain, net = Net(), Net(space=space)
            theirs = outcome(lambda p=plain, k=kwargs: Base(p.parameters(), **k), lambda o, p=plain: train(p, o, 1))
            ours = outcome(lambda n=net, k=again: build(cls, n, **k), lambda o, n=net: train(n, o, 1))
            assert ours == theirs
            same(values(net), values(Net()))


@cases
def test_refused_on_stiefel(case):
    """What LEFT_OUT says."""
    cls, _, impl = case
    if impl == "differentiable":
        net = Net()
        kind, message = outcome(lambda: build(cls, net, **options(case)), lambda opt: train(net, opt, 1))
        assert (kind, "differentiable=True does not go through" in message) == (RuntimeError, True)
        same(values(net), values(Net()))
    z = nn.Parameter(torch.eye(3, 2, dtype=torch.complex64))
    kind, message = outcome(lambda: getattr(ghor.optim, cls)([z], space=STIEFEL))
    assert (kind, "real floating point" in message) == (TypeError, True)


# -- Euclidean weights -------------------------------------------------------------------------------------------------


@cases
def test_euclidean_trajectories_are_torchs_to_the_bit(case):
    """With their state; a parameter without gradient at times, one without dimensions, complex where torch takes it."""
    cls, _, impl = case
    Lifted = getattr(ghor.optim, cls)
    gen = torch.Generator().manual_seed(0)
    kinds = [((4, 3), torch.float64), ((3,), torch.float64), ((), torch.float64), ((2, 2), torch.float32)]
    if DATABASE[cls].supports_complex and impl == "forloop" and cls != "PaperAdam":
        kinds.append(((2, 3), torch.complex64))
    start = [torch.randn(shape, generator=gen, dtype=dtype) for shape, dtype in kinds]
    grads = [[torch.randn(shape, generator=gen, dtype=dtype) for shape, dtype in kinds] for _ in range(7)]
    ends = []
    for make in (Lifted.Base, lambda params, **kwargs: Lifted(params, space=FLAT, **kwargs)):
        params = [p.clone().requires_grad_(impl != "differentiable") for p in start]
        opt = make(params, **options(case))
        for k, step in enumerate(grads):
            for i, (p, g) in enumerate(zip(params, step, strict=True)):
                p.grad = None if k == 3 and i == 1 else g.clone()
            opt.step()
        ends.append((opt, params))
    (theirs, a), (ours, b) = ends
    same(a, b)
    keys = [k for k in theirs.param_groups[0] if k != "params"]
    assert [ours.param_groups[0][k] for k in keys] == [theirs.param_groups[0][k] for k in keys]
    same(ours.state_dict()["state"], theirs.state_dict()["state"])
    assert set(str(theirs).splitlines()[1:]) <= set(str(ours).splitlines())


# -- on Stiefel --------------------------------------------------------------------------------------------------------


@moving_cases
def test_goes_the_right_way_and_stays(case):
    cls, _, _ = case
    net, kwargs = Net(), options(case)
    before = net.loss().item()
    opt = build(cls, net, **kwargs)
    train(net, opt, 20)
    after = net.loss().item()
    assert after > before if kwargs.get("maximize") else after < before
    assert on_stiefel(net, 1e-14)
    theirs = DATABASE[cls].optim_cls([nn.Parameter(torch.ones(2, 2))], **options(case))
    theirs.param_groups[0]["params"][0].grad = torch.ones(2, 2)
    theirs.step()
    keys = set(next(iter(theirs.state.values()), ()))
    assert all(keys <= set(opt.state[p]) for p in net.parameters())


@pytest.mark.parametrize("case", [c for c in CASES if c[2] in ("foreach", "fused")], ids=case_id)
def test_other_implementations_match_the_loop(case):
    """Weights and state, over 7 steps, one without and two partly without gradients.

    1e-12: some eps a step; RAdam divides by a small number when its rectification sets in.
    """
    cls, i, _ = case
    runs = []
    for c in ((cls, i, "forloop"), case):
        net = Net()
        opt = build(cls, net, **options(c))
        train(net, opt, 2)
        opt.zero_grad()
        opt.step()
        train(net, opt, 4, skip=(0, 1))
        runs.append((values(net), opt.state_dict()["state"]))
    same(*runs, rtol=1e-12, atol=1e-12)


@moving_cases
def test_resumes_from_its_state_dict(case):
    """To the bit, through weights_only loading, and the dict is left as it was; names or none make no difference."""
    cls, _, _ = case
    net, twin = Net(torch.float32), Net(torch.float32)
    opt, other = build(cls, net, **options(case)), build(cls, twin, named=True, **options(case))
    train(net, opt, 3)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    kept = copy.deepcopy(saved["opt"]["state"])
    twin.load_state_dict(saved["net"])
    other.load_state_dict(saved["opt"])
    for n, o in ((net, opt), (twin, other)):
        train(n, o, 3, skip=(1,))
    same(values(net), values(twin))
    same(opt.state_dict()["state"], other.state_dict()["state"])
    for i in range(3):  # Euclidean state shares memory with what it was loaded from, as in torch
        same(saved["opt"]["state"][i], kept[i])
    opt.load_state_dict(other.state_dict())


@classes
def test_loads_state_dicts_of_older_versions(cls):
    """Options that came later are filled in, and step counts that are numbers become what they are today."""
    info = DATABASE[cls]
    for kwargs in inputs(cls):
        net, twin = Net(torch.float32), Net(torch.float32)
        opt, other = (build(cls, n, **copy.deepcopy(kwargs)) for n in (net, twin))
        for n, o in ((net, opt), (twin, other)):
            train(n, o, 2)
        old = copy.deepcopy(opt.state_dict())
        for group in old["param_groups"]:
            for flag in info.not_og_supported_flags:
                group.pop(flag, None)
        for entries in old["state"].values():
            entries |= {k: v.item() for k, v in entries.items() if k == "step" and torch.is_tensor(v)}
        opt.load_state_dict(old)
        if kwargs.get("maximize"):  # an old state dict minimises
            opt.param_groups[0]["maximize"] = True
        for n, o in ((net, opt), (twin, other)):
            train(n, o, 2)
        same(values(net), values(twin))


@classes
def test_state_dicts_that_do_not_fit_are_refused_as_torch_refuses_them(cls):
    Base = DATABASE[cls].optim_cls

    def built(make, groups):
        params = list(Net().parameters())
        return make([{"params": [params[i] for i in g]} for g in groups])

    def loaded(make, mine, other):
        return outcome(lambda: built(make, mine), lambda opt: opt.load_state_dict(built(make, other).state_dict()))

    for mine, other in (([[0, 1]], [[0, 1, 2]]), ([[0, 1]], [[0], [1]])):
        theirs = loaded(Base, mine, other)
        ours = loaded(lambda groups: getattr(ghor.optim, cls)(groups, space=STIEFEL), mine, other)
        assert ours == theirs
        assert ours[0] is ValueError


@moving_cases
def test_tensor_learning_rate(case):
    """The same run as with a number, where torch takes a tensor; the same refusal where not."""
    cls, i, impl = case
    net, twin = Net(), Net()
    shape = [(), (1,), (1, 1)][(i + len(impl)) % 3]  # each with every class
    rates = torch.full(shape, 1e-3, dtype=torch.float64)
    theirs = outcome(lambda: DATABASE[cls].optim_cls(Net().parameters(), **options(case) | {"lr": rates}))
    ours = outcome(lambda: build(cls, net, **options(case) | {"lr": rates}))
    assert ours == theirs
    if ours == (None, "") and cls != "PaperAdam":
        opt, other = build(cls, net, **options(case) | {"lr": rates}), build(cls, twin, **options(case) | {"lr": 1e-3})
        train(net, opt, 4)
        train(twin, other, 4)
        same(values(net), values(twin), rtol=0, atol=1e-14)  # a tensor enters products in another order


@moving_cases
def test_options_of_groups_override_those_of_the_optimizer(case):
    """A group whose learning rate is next to nothing stays, the other one moves."""
    cls, _, _ = case
    net = Net(torch.float32)
    before = values(net)
    outer = {"lr": 1e-28} | ({"step_sizes": (0, 50)} if cls == "Rprop" else {})
    params = list(net.parameters())
    groups = [{"params": params[:1], "lr": 1e-3, **options(case)}, {"params": params[1:3]}]
    opt = quiet(lambda: getattr(ghor.optim, cls)(groups, space=STIEFEL, **outer))
    train(net, opt, 5)
    assert not torch.equal(net.a, before[0])
    same(values(net)[1:3], before[1:3], rtol=0, atol=1e-7)


@classes
def test_weight_decay_of_a_group(cls):
    """It reaches the Euclidean weight, as torch's, and only it."""
    if "weight_decay" not in inspect.signature(DATABASE[cls].optim_cls.__init__).parameters:
        return
    nets = Net(), Net(), Net()
    for net, decay in zip(nets, (0.0, 0.5, 0.5), strict=True):
        params, spaces = list(net.parameters()), net.spaces
        groups = [{"params": params[:3], "space": spaces[:3]}, {"params": params[3:], "weight_decay": decay}]
        if net is nets[2]:
            groups[0]["weight_decay"] = 0.5
        opt = quiet(lambda g=groups: getattr(ghor.optim, cls)(g, weight_decay=0.0))
        for p in params:
            p.grad = torch.ones_like(p)
        for _ in range(3):
            opt.step()
    without, with_decay, everywhere = map(values, nets)
    same(without[:3], with_decay[:3])
    same(with_decay, everywhere)
    assert not torch.equal(without[3], with_decay[3])


@moving_cases
def test_steps_that_do_not_move(case):
    """No gradient, and gradients of zero: no bit changes, gradients keep their versions."""
    cls, _, _ = case
    net = Net(torch.float32)
    before, opt = values(net), build(cls, net, **options(case))
    opt.step()
    same(values(net), before)
    assert all(len(opt.state[p]) == 0 for p in net.parameters()) or cls == "Adagrad"  # whose state is there at once
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    versions = [p.grad._version for p in net.parameters()]
    opt.step(lambda: torch.ones(()))
    same(values(net)[:3], before[:3])
    assert [p.grad._version for p in net.parameters()] == versions
    opt.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in net.parameters())
    opt.zero_grad()
    assert all(p.grad is None for p in net.parameters())


@moving_cases
def test_copies(case):
    """deepcopy has all public attributes and goes on alike; a layer frozen for a while as well."""
    cls, _, _ = case
    net = Net(torch.float32)
    opt = build(cls, net, **options(case))
    train(net, opt, 2)
    twin, other = copy.deepcopy((net, opt))
    assert {k for k in vars(opt) if k[0] != "_"} == {k for k in vars(other) if k[0] != "_"}
    for n, o in ((net, opt), (twin, other)):
        n.b.requires_grad_(False)
        train(n, o, 2)
        n.b.requires_grad_(True)
        train(n, o, 2)
    same(values(net), values(twin))
    assert on_stiefel(net, 2e-6)


@pytest.mark.parametrize("cls", [c for c in CLASSES if "fused" in implementations(c)])
def test_fused_does_not_step_where_an_inf_was_found(cls):
    for kwargs in inputs(cls):
        net = Net(torch.float32)
        before, opt = values(net), build(cls, net, fused=True, **kwargs)
        opt.grad_scale, opt.found_inf = torch.ones(1), torch.ones(())
        train(net, opt, 1)
        same(values(net), before)
        assert all(not opt.state[p].get("step", 0) for p in net.parameters())


@pytest.mark.parametrize("cls", [c for c in CLASSES if "fused" in implementations(c)])
def test_fused_on_the_meta_device_fails_alike(cls):
    with torch.device("meta"):
        weight = nn.Parameter(torch.zeros(3, 2))
        weight.grad = torch.zeros(3, 2)
    lifted = getattr(ghor.optim, cls)
    theirs = outcome(lambda: lifted.Base([weight], fused=True), lambda o: o.step())
    ours = outcome(lambda: lifted([weight], fused=True, space=FLAT), lambda o: o.step())
    assert ours == theirs


@classes
def test_default_dtype_float64_on_float32_weights(cls):
    """Step counts are float64 then, and every implementation takes them."""
    torch.set_default_dtype(torch.float64)
    try:
        for impl in implementations(cls):
            if impl != "differentiable":
                net = Net(torch.float32)
                train(net, build(cls, net, **implementations(cls)[impl]), 3)
                assert on_stiefel(net, 2e-6)
    finally:
        torch.set_default_dtype(torch.float32)


def test_adam_and_adamw_load_each_others_state_dicts():
    """And `decoupled_weight_decay` comes out as in torch: kept by Adam, always on in AdamW, also from older dicts."""
    for one, two in (("AdamW", "Adam"), ("Adam", "AdamW"), ("AdamW", "AdamW")):
        saved = build(one, Net()).state_dict()
        if one == two:
            del saved["param_groups"][0]["decoupled_weight_decay"]
        opt = build(two, Net())
        opt.load_state_dict(saved)
        assert opt.param_groups[0]["decoupled_weight_decay"] is True or two == "Adam"
        if (one, two) == ("AdamW", "Adam"):
            assert opt.param_groups[0]["decoupled_weight_decay"] is True


# -- hooks -------------------------------------------------------------------------------------------------------------


@classes
def test_hooks_of_the_step(cls):
    """Global pre, local pre, local post, global post; removed ones are silent; a pre-hook may change the arguments."""
    net = Net()
    opt, calls = build(cls, net), []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append(0)),
        opt.register_step_pre_hook(lambda *_: calls.append(1)),
        opt.register_step_post_hook(lambda *_: calls.append(2)),
        register_optimizer_step_post_hook(lambda *_: calls.append(3)),
    ]
    for _ in range(2):
        train(net, opt, 1)
    for handle in handles:
        handle.remove()
    train(net, opt, 1)
    assert calls == [0, 1, 2, 3] * 2
    opt.register_step_pre_hook(lambda o, args, kwargs: ((*args, lambda: calls.append("closure")), kwargs))
    opt.step()
    assert calls[-1] == "closure"


@classes
def test_hooks_of_state_dict_and_load_state_dict(cls):
    """Pre-hooks in their order and before, post-hooks after; `prepend` comes first; what they return counts."""
    net = Net()
    opt, calls = build(cls, net), []
    train(net, opt, 1)
    opt.register_state_dict_pre_hook(lambda o: calls.append("pre"))
    opt.register_state_dict_pre_hook(lambda o: calls.append("first"), prepend=True)
    opt.register_state_dict_post_hook(lambda o, d: calls.append("post") or {**d, "more": 1})
    opt.state["note"] = 1
    saved = opt.state_dict()
    assert saved["state"].pop("note") == opt.state.pop("note") == 1
    assert (calls, saved.pop("more")) == (["first", "pre", "post"], 1)

    def halved(o, loaded):
        calls.append("halve")
        groups = [{**g, "lr": g["lr"] / 2} for g in loaded["param_groups"]]
        return {**loaded, "param_groups": groups}

    lr = opt.param_groups[0]["lr"]
    opt.register_load_state_dict_pre_hook(halved)
    opt.register_load_state_dict_pre_hook(lambda o, d: calls.append("before"), prepend=True)
    opt.register_load_state_dict_post_hook(lambda o: calls.append(("after", o.param_groups[0]["lr"])))
    opt.load_state_dict(saved)
    assert calls[3:] == ["before", "halve", ("after", lr / 2)]
    train(net, opt, 1)
    assert on_stiefel(net, 1e-14)


def test_the_profiler_sees_the_step():
    net = Net()
    opt = build("Adam", net)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(net, opt, 2)
    counts = {e.key: e.count for e in profile.key_averages()}
    assert counts["Optimizer.step#Adam.step"] == counts["Optimizer.zero_grad#Adam.zero_grad"] == 2


# -- learning rate schedules -------------------------------------------------------------------------------------------


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5, 1.0, 4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, 3, cycle_momentum=has_momentum(o)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=8, cycle_momentum=has_momentum(o)),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=3),
}


def has_momentum(opt):
    return "momentum" in opt.defaults or "betas" in opt.defaults


def test_all_schedulers_of_torch_are_tried():
    assert set(lr_scheduler.__all__) - {"LRScheduler"} <= set(SCHEDULERS)


@classes
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedules_are_torchs(cls, scheduler):
    """Every number in the groups, at every step, is that of torch's optimizer under the same schedule."""
    net, plain = Net(), Net()
    # RMSprop and SGD have momentum to cycle only if they use it
    given = {"lr": 1e-2} | ({"momentum": 0.5} if cls in ("SGD", "RMSprop") else {})
    opt, theirs = build(cls, net, **given), DATABASE[cls].optim_cls(plain.parameters(), **given)
    schedules = [SCHEDULERS[scheduler](o) for o in (opt, theirs)]
    seen = []
    for _ in range(7):
        train(net, opt, 1)
        train(plain, theirs, 1)
        for s in schedules:
            s.step(*[1.0] if scheduler == "ReduceLROnPlateau" else [])
        keys = set(theirs.param_groups[0]) - {"params"}
        seen.append(opt.param_groups[0]["lr"])
        assert {k: opt.param_groups[0][k] for k in keys} == {k: theirs.param_groups[0][k] for k in keys}
    assert len(set(seen)) > 1
    assert on_stiefel(net, 1e-14)


@classes
def test_schedules_of_the_database_go_the_right_way(cls):
    for schedule in DATABASE[cls].scheduler_inputs:
        net = Net()
        before = net.loss().item()
        params = list(net.parameters())
        groups = [{"params": params[:3], "space": STIEFEL}, {"params": params[3:], "lr": 0.01}]
        opt = quiet(lambda g=groups: getattr(ghor.optim, cls)(g))
        schedules = [make(opt) for make in schedule]
        for _ in range(10):
            train(net, opt, 1)
            for s in schedules:
                s.step(*[net.loss().item()] if isinstance(s, lr_scheduler.ReduceLROnPlateau) else [])
        assert net.loss().item() < before
