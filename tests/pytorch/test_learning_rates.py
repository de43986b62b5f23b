"""Learning rates that are tensors, schedules, and what schedulers write into the groups: as with torch's
optimizers."""

import pytest
import torch
from helpers import database
from helpers.database import DATABASE, STIEFEL, moving_cases, on_stiefel, options, outcome, quiet
from helpers.steps import Net, build, classes, gradients, same, train, values
from torch.optim import lr_scheduler, swa_utils

import ghor

TENSOR_LR = [c for c in ghor.optim.__all__ if c not in ("Muon", "PaperAdam")]


@pytest.mark.parametrize("cls", TENSOR_LR)
def test_a_tensor_learning_rate_is_live(cls):
    """A tensor lr of the same value gives the same run, and writing to it counts; torch wants foreach off for
    it."""
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


@moving_cases
def test_tensor_learning_rate(case):
    """The same run as with a number, where torch takes a tensor; the same refusal where not."""
    cls, i, impl = case
    net, twin = database.Net(), database.Net()
    shape = [(), (1,), (1, 1)][(i + len(impl)) % 3]  # each with every class
    rates = torch.full(shape, 1e-3, dtype=torch.float64)
    theirs = outcome(lambda: DATABASE[cls].optim_cls(net.parameters(), **options(case) | {"lr": rates}))
    ours = outcome(lambda: database.build(cls, net, **options(case) | {"lr": rates}))
    assert ours == theirs
    if ours == (None, "") and cls != "PaperAdam":
        for n, lr in ((net, rates), (twin, 1e-3)):
            database.train(n, database.build(cls, n, **options(case) | {"lr": lr}), 4)
        same(values(net), values(twin), rtol=0, atol=1e-14)  # a tensor enters products in another order


# -- schedules ---------------------------------------------------------------------------------------------


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
    net, plain = database.Net(), database.Net()
    # RMSprop and SGD have momentum to cycle only if they use it
    given = {"lr": 1e-2} | ({"momentum": 0.5} if cls in ("SGD", "RMSprop") else {})
    opt, theirs = database.build(cls, net, **given), DATABASE[cls].optim_cls(plain.parameters(), **given)
    schedules = [SCHEDULERS[scheduler](o) for o in (opt, theirs)]
    seen = []
    for _ in range(7):
        database.train(net, opt, 1)
        database.train(plain, theirs, 1)
        for s in schedules:
            s.step(*[1.0] if scheduler == "ReduceLROnPlateau" else [])
        keys = set(theirs.param_groups[0]) - {"params"}
        seen.append(opt.param_groups[0]["lr"])
        assert {k: opt.param_groups[0][k] for k in keys} == {k: theirs.param_groups[0][k] for k in keys}
    assert len(set(seen)) > 1
    assert on_stiefel(net, 1e-14)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_each_step_uses_the_numbers_of_its_time(scheduler):
    """A run whose groups are written by hand is the same, to the bit."""
    net, twin = Net(), Net()
    opt, by_hand = build("Adam", net), build("Adam", twin)
    schedule = SCHEDULERS[scheduler](opt)
    rates = []
    for step in gradients(net, 6):
        rates.append(opt.param_groups[0]["lr"])
        by_hand.param_groups[0] |= {k: opt.param_groups[0][k] for k in ("lr", "betas")}
        train(net, opt, [step])
        train(twin, by_hand, [step])
        schedule.step(*[1.0] if scheduler == "ReduceLROnPlateau" else [])
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


@classes
def test_schedules_of_the_database_go_the_right_way(cls):
    for schedule in DATABASE[cls].scheduler_inputs:
        net = database.Net()
        before = net.loss().item()
        params = list(net.parameters())
        groups = [{"params": params[:3], "space": STIEFEL}, {"params": params[3:], "lr": 0.01}]
        opt = quiet(lambda g=groups: getattr(ghor.optim, cls)(g))
        schedules = [make(opt) for make in schedule]
        for _ in range(10):
            database.train(net, opt, 1)
            for s in schedules:
                s.step(*[net.loss().item()] if isinstance(s, lr_scheduler.ReduceLROnPlateau) else [])
        assert net.loss().item() < before
