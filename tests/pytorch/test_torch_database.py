"""torch's own database of optimizers as a contract: whatever torch's class does with its configurations and
inputs the lifted one does, on Euclidean weights bit for bit, on Stiefel in the behaviours that torch's suite
(test/test_optim.py) checks. LEFT_OUT says which of that suite's tests have no counterpart here, and why.
Hooks are in tests/_torch/test_bare_step.py, learning rates in test_learning_rates.py.
"""

import copy
import inspect

import pytest
import torch
from helpers.database import (
    CASES,
    CLASSES,
    DATABASE,
    FLAT,
    STIEFEL,
    Net,
    build,
    case_id,
    cases,
    every_kind,
    implementations,
    inputs,
    moving_cases,
    of_kind,
    on_spaces,
    on_stiefel,
    options,
    outcome,
    quiet,
    train,
)
from helpers.steps import classes, same, through_a_file, values
from torch import nn
from torch.testing._internal.common_optimizers import OptimizerErrorEnum

import ghor

pytestmark = pytest.mark.filterwarnings("ignore:Muon was given bare tensors")  # as torch's tests give them

LEFT_OUT = {
    "steps with differentiable=True on Stiefel": "refused: the section's step is in place",
    "complex weights on symplectic spaces": "refused: these are real",
    "sparse gradients on Stiefel refused by Adam": "taken by every class: a gradient in g^hor is dense",
    "test_second_order_optims_return_consistent_types, test_step_iteration": "LBFGS, which does not lift",
    "test_optim_infos_do_not_specify_global_cliquey_kwargs": "about the database itself",
    "test_forloop_goes_right_direction_multigpu, test_mixed_device_dtype": "two GPUs",
    "test_foreach_large_tensor, test_fused_large_tensor": "GPU with 64 GB",
    "test_peak_memory_foreach, test_defaults_changed_to_foreach": "GPU: its memory, its default kernels",
    "test_state_dict_with_cuda_params, test_cpu_load_state_dict": "GPU beside the CPU",
    "test_fused_cpu_matches_cuda": "GPU beside the CPU",
    "test_fused_mixed_precision_*": "GPU: CPU kernels refuse bfloat16 state of float32 weights",
}


# -- what is accepted and refused ----------------------------------------------------------------------------


def test_every_optimizer_of_torch_is_lifted():
    """Those that have no name here, too; SparseAdam shows its own error, as a lifted gradient is dense."""
    for name, info in DATABASE.items():
        if name not in (*CLASSES, "LBFGS"):  # which takes a closure: tests/optim
            Y = nn.Parameter(STIEFEL.random(6, 3, dtype=torch.float64))
            start, opt = Y.detach().clone(), ghor.lift(info.optim_cls)([Y], space=STIEFEL)
            Y.grad = torch.ones_like(Y)
            kind, message = outcome(lambda o=opt: o.step())
            sparse = name == "SparseAdam"
            assert (kind, "dense gradients" in message) == (RuntimeError if sparse else None, sparse)
            assert torch.equal(Y, start) == sparse
            assert STIEFEL.residual(Y.detach()) <= 1e-14


@classes
def test_errors_are_torchs_on_euclidean_weights(cls):
    """Same exception and message; ours may add which parameter is meant."""
    Lifted = getattr(ghor.optim, cls)
    for error in DATABASE[cls].optim_error_inputs_func("cpu", torch.float32):
        given = error.optimizer_error_input
        then = (
            (lambda opt: opt.step())
            if error.error_on == OptimizerErrorEnum.STEP_ERROR
            else (lambda opt: None)
        )
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
            theirs = outcome(
                lambda p=plain, k=kwargs: Base(p.parameters(), **k), lambda o, p=plain: train(p, o, 1)
            )
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
    z = nn.Parameter(torch.eye(4, 2, dtype=torch.complex64))
    kind, message = outcome(lambda: getattr(ghor.optim, cls)([z], space=ghor.SymplecticStiefel()))
    assert (kind, "real floating point" in message) == (TypeError, True)


@classes
def test_state_dicts_that_do_not_fit_are_refused_as_torch_refuses_them(cls):
    Base = DATABASE[cls].optim_cls

    def built(make, groups):
        params = list(Net().parameters())
        return make([{"params": [params[i] for i in g]} for g in groups])

    def loaded(make, mine, other):
        return outcome(
            lambda: built(make, mine), lambda opt: opt.load_state_dict(built(make, other).state_dict())
        )

    for mine, other in (([[0, 1]], [[0, 1, 2]]), ([[0, 1]], [[0], [1]])):
        theirs = loaded(Base, mine, other)
        ours = loaded(lambda groups: getattr(ghor.optim, cls)(groups, space=STIEFEL), mine, other)
        assert ours == theirs
        assert ours[0] is ValueError


@pytest.mark.parametrize("cls", [c for c in CLASSES if "fused" in implementations(c)])
def test_fused_on_the_meta_device_fails_alike(cls):
    with torch.device("meta"):
        weight = nn.Parameter(torch.zeros(3, 2))
        weight.grad = torch.zeros(3, 2)
    lifted = getattr(ghor.optim, cls)
    theirs = outcome(lambda: lifted.Base([weight], fused=True), lambda o: o.step())
    ours = outcome(lambda: lifted([weight], fused=True, space=FLAT), lambda o: o.step())
    assert ours == theirs


# -- Euclidean weights ---------------------------------------------------------------------------------------


@cases
def test_euclidean_trajectories_are_torchs_to_the_bit(case):
    """With their state; a parameter without gradient at times, one without dimensions, complex where torch
    takes it."""
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


# -- on Stiefel ----------------------------------------------------------------------------------------------


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
    by_rule = [p for p in net.parameters() if cls != "Muon" or p.dim() == 2]  # it leaves the others to AdamW
    assert all(keys <= set(opt.state[p]) for p in by_rule)


@every_kind
@pytest.mark.parametrize("case", [c for c in CASES if c[2] in ("foreach", "fused")], ids=case_id)
def test_other_implementations_match_the_loop(case, kind):
    """Weights and state, over 7 steps, one without and two partly without gradients.

    1e-12: some eps a step; RAdam divides by a small number when its rectification sets in. On other spaces
    coordinates are larger.
    """
    cls, i, _ = case
    runs = []
    for c in ((cls, i, "forloop"), case):
        net = of_kind(kind, case, torch.float64)
        opt = build(cls, net, **options(c))
        train(net, opt, 2)
        opt.zero_grad()
        opt.step()
        train(net, opt, 4, skip=(0, 1))
        runs.append((values(net), opt.state_dict()["state"]))
    tolerance = 1e-12 if kind == "Stiefel" else 1e-9
    same(*runs, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:a velocity of length")  # maximized, on SPD
@moving_cases
@every_kind
def test_groups_are_optimizers_of_their_own(case, kind):
    """Groups with learning rates of their own, one of next to nothing, move as by one optimizer each."""
    lr = float(options(case).get("lr", 1e-2))
    net, apart = of_kind(kind, case), of_kind(kind, case)
    given = {k: v for k, v in options(case).items() if k != "lr"} | {"section": net.section}
    cls, rates = (
        getattr(ghor.optim, case[0]),
        [lr / 4, 1e-28, lr / 2, lr] if kind == "Stiefel" else [lr / 4, lr],
    )
    groups, alone = [], []
    for p, q, space, rate in zip(net.parameters(), apart.parameters(), net.spaces, rates, strict=True):
        own = {} if rate == lr else {"lr": rate}
        groups.append({"params": [p], "space": space, **own})
        alone.append(quiet(lambda q=q, s=space, rate=rate: cls([q], lr=rate, space=s, **given)))
    opt = quiet(lambda: cls(groups, lr=lr, **given))
    train(net, opt, 4)
    for _ in range(4):
        apart.zero_grad()
        apart.loss().backward()
        for o in alone:
            o.step()
    same(values(net), values(apart))


DECAYING = [
    c for c in CLASSES if "weight_decay" in inspect.signature(DATABASE[c].optim_cls.__init__).parameters
]


@pytest.mark.parametrize("cls", DECAYING)
def test_weight_decay_of_a_group(cls):
    """It reaches the Euclidean weight, as torch's, and only it."""
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
@every_kind
def test_steps_that_do_not_move(case, kind):
    """No gradient, and gradients of zero: no bit changes, gradients keep their versions."""
    cls, _, _ = case
    net = of_kind(kind, case)
    before, opt = values(net), build(cls, net, **options(case))
    opt.step()
    same(values(net), before)
    assert all(len(opt.state[p]) == 0 for p in net.parameters()) or cls == "Adagrad"  # it is there at once
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


@pytest.mark.parametrize("cls", [c for c in CLASSES if "fused" in implementations(c)])
def test_fused_does_not_step_where_an_inf_was_found(cls):
    for kwargs in inputs(cls):
        net = Net(torch.float32)
        before, opt = values(net), build(cls, net, fused=True, **kwargs)
        opt.grad_scale, opt.found_inf = torch.ones(1), torch.ones(())
        train(net, opt, 1)
        same(values(net), before)
        assert all(not opt.state[p].get("step", 0) for p in net.parameters())


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


# -- saving, loading, copying --------------------------------------------------------------------------------


@moving_cases
@every_kind
def test_resumes_from_its_state_dict(case, kind):
    """To the bit, through weights_only loading, and the dict is left as it was; names or none make no
    difference. Gradients are only read, and weights stay on their spaces."""
    cls, _, _ = case
    net, twin = of_kind(kind, case), of_kind(kind, case)
    opt, other = build(cls, net, **options(case)), build(cls, twin, named=True, **options(case))
    train(net, opt, 3)
    grads = [(p.grad, p.grad.clone(), p.grad._version) for p in net.parameters()]
    opt.step()
    assert all(torch.equal(g, g0) and g._version == v for g, g0, v in grads)
    saved = through_a_file({"net": net.state_dict(), "opt": opt.state_dict()})
    kept = copy.deepcopy(saved["opt"]["state"])
    twin.load_state_dict(saved["net"])
    other.load_state_dict(saved["opt"])
    for n, o in ((net, opt), (twin, other)):
        train(n, o, 3, skip=(1,))
    # torch's fused SGD rounds otherwise at the end of a tensor, and after loading batches may lie otherwise
    close = {"rtol": 1e-6, "atol": 1e-6} if cls == "SGD" and options(case).get("fused") else {}
    same(values(net), values(twin), **close)
    same(opt.state_dict()["state"], other.state_dict()["state"], **close)
    for i in range(
        3 if kind == "Stiefel" else 2
    ):  # Euclidean state shares memory with what it was loaded from
        same(saved["opt"]["state"][i], kept[i])
    opt.load_state_dict(other.state_dict())
    assert on_spaces(net)


@moving_cases
@every_kind
def test_loads_state_dicts_of_older_versions(case, kind):
    """Options that came later are filled in, and step counts that are numbers become what they are today."""
    cls, _, _ = case
    net, twin = of_kind(kind, case), of_kind(kind, case)
    opt, other = (build(cls, n, **options(case)) for n in (net, twin))
    for n, o in ((net, opt), (twin, other)):
        train(n, o, 2)
    old = copy.deepcopy(opt.state_dict())
    for group in old["param_groups"]:
        for flag in DATABASE[cls].not_og_supported_flags:
            group.pop(flag, None)
    for entries in old["state"].values():
        entries |= {k: v.item() for k, v in entries.items() if k == "step" and torch.is_tensor(v)}
    opt.load_state_dict(old)
    opt.param_groups[0]["maximize"] = options(case).get("maximize", False)  # an old state dict minimises
    for n, o in ((net, opt), (twin, other)):
        train(n, o, 2)
    same(values(net), values(twin), rtol=1e-6, atol=1e-6)


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


def test_adam_and_adamw_load_each_others_state_dicts():
    """And `decoupled_weight_decay` comes out as in torch: kept by Adam, always on in AdamW, also from older
    dicts."""
    for one, two in (("AdamW", "Adam"), ("Adam", "AdamW"), ("AdamW", "AdamW")):
        saved = build(one, Net()).state_dict()
        if one == two:
            del saved["param_groups"][0]["decoupled_weight_decay"]
        opt = build(two, Net())
        opt.load_state_dict(saved)
        assert opt.param_groups[0]["decoupled_weight_decay"] is True or two == "Adam"
        if (one, two) == ("AdamW", "Adam"):
            assert opt.param_groups[0]["decoupled_weight_decay"] is True
