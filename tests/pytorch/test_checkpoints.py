"""Checkpoints of every kind: torch.save, safetensors, torch.distributed.checkpoint between one and two
processes."""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.ranks import ranks
from helpers.spread import TOLERANCE, Net, batches, build, difference, mine, shard, train, whole
from helpers.steps import STIEFEL, classes, same, sections, through_a_file
from helpers.table import RETRACTIONS, each_section, each_shape, point, randn, shapes
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import ghor

OPTIONS = {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}, "RMSprop": {"momentum": 0.9}}

# torch says so when there is one process only
alone = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)


# -- torch.save --------------------------------------------------------------------------------------------


@classes
@each_section
def test_resume_is_exact_for_every_optimizer_space_and_section(cls, space, section, gen):
    """In the middle of a run with a schedule; the polishing of Y at move 10 comes after the break. Weights of
    all shapes, two of each so that there are stacks."""

    def make(start, lr):
        params = [nn.Parameter(Y.clone()) for Y in start]
        opt = getattr(ghor.optim, cls)(params, lr=lr, space=space, section=section, **OPTIONS.get(cls, {}))
        return params, opt, torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)

    def run(params, opt, schedule, steps):
        for step in steps:
            for p, g in zip(params, step, strict=True):
                p.grad = None if g is None else g.clone()
            opt.step()
            schedule.step()

    start = [point(space, s, gen) for s in shapes(space)[:3] for _ in range(2)]
    steps = [[randn(tuple(Y.shape), gen) / (1 + Y.norm()) for Y in start] for _ in range(12)]
    steps[3][0] = steps[8][1] = None
    params, opt, schedule = make(start, 0.01)
    run(params, opt, schedule, steps[:6])
    saved = through_a_file([params, opt.state_dict(), schedule.state_dict()])
    run(params, opt, schedule, steps[6:])
    again, other, second = make(saved[0], 0.5)
    other.load_state_dict(saved[1])
    second.load_state_dict(saved[2])
    run(again, other, second, steps[6:])
    same([p.detach() for p in again], [p.detach() for p in params])
    same(sorted(other.state_dict()["state"].items()), sorted(opt.state_dict()["state"].items()))


@each_shape
@pytest.mark.parametrize("retraction", RETRACTIONS)
def test_resume_is_exact_with_every_retraction(space, shape, retraction, gen):
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


# -- the model ---------------------------------------------------------------------------------------------


def test_safetensors(tmp_path):
    """The file holds tensors only; the spaces are the module's own business, and the module it goes into has
    them."""
    safetensors = pytest.importorskip("safetensors.torch")
    net = Net()
    opt = build("Adam", net)
    train(net, opt, batches(5))
    safetensors.save_model(net, str(tmp_path / "model.safetensors"))
    other = Net()
    safetensors.load_model(other, str(tmp_path / "model.safetensors"))
    assert difference(net, other) == 0
    resumed = build("Adam", other)
    assert resumed.param_groups[0]["space"] == opt.param_groups[0]["space"]
    resumed.load_state_dict(through_a_file(opt.state_dict()))
    for n, o in ((net, opt), (other, resumed)):
        train(n, o, batches(5))
    assert difference(net, other) == 0


@pytest.mark.parametrize("how", ["load_state_dict", "safetensors"])
@sections
def test_a_model_loaded_behind_the_optimizers_back_is_noticed(how, section, tmp_path):
    """One warning for all weights of a kind; the run goes on from the loaded point."""
    net, other = Net(("rows", "more", "heads")), Net(("rows", "more", "heads"))
    train(other, build("SGD", other), batches(7))
    opt = build("Adam", net, section)
    train(net, opt, batches(3))
    if how == "safetensors":
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(other.state_dict(), str(tmp_path / "model.safetensors"))
        safetensors.load_model(net, str(tmp_path / "model.safetensors"))
    else:
        net.load_state_dict(other.state_dict())
    with pytest.warns(UserWarning, match=r"changed outside the optimizer, within Stiefel\(\)") as caught:
        train(net, opt, batches(1))
    assert len(caught) == 1
    for p, q in ((net.rows, other.rows), (net.heads, other.heads)):
        assert 0 < (p - q).detach().abs().max() < 0.1  # Adam's step is a few lr = 0.01 long
        assert STIEFEL.residual(p.detach()).max() <= 1e-14


# -- torch.distributed.checkpoint --------------------------------------------------------------------------


def state_of(opt):
    """All values of the state, whole, by parameter and key."""
    return [
        {k: whole(v).clone() if torch.is_tensor(v) else v for k, v in opt.state[p].items()}
        for p in _params(opt)
    ]


def _params(opt):
    return [p for group in opt.param_groups for p in group["params"]]


def save(model, opt, folder, **options):
    model_state, optim_state = get_state_dict(model, opt, options=StateDictOptions(**options))
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=folder)


def load(model, opt, folder, **options):
    model_state, optim_state = get_state_dict(model, opt, options=StateDictOptions(**options))
    dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=folder)
    set_state_dict(
        model,
        opt,
        model_state_dict=model_state,
        optim_state_dict=optim_state,
        options=StateDictOptions(**options),
    )


def make(cls, section, how=None, lr=0.01):
    net = Net(implicit=section == "implicit")
    if how == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    elif how is not None:
        shard(net, how)
    opt = build(cls, net, section, **OPTIONS.get(cls, {}))
    opt.param_groups[0]["lr"] = lr
    return net, opt


BREAK = 8  # of 10 steps; Y is polished at the last, if the count of moves was kept


def first_part(rank, cls, section, how, folder, options):
    """Steps, saved; then a new model and optimizer are loaded from that, and both go on to the end."""
    data = mine(rank, batches())
    net, opt = make(cls, section, how)
    train(net, opt, data[:BREAK])
    save(net, opt, folder, **options)
    saved = state_of(opt)
    other, resumed = make(cls, section, how, lr=1.0)
    load(other, resumed, folder, **options)
    same(state_of(resumed), saved)
    train(net, opt, data[BREAK:])
    train(other, resumed, data[BREAK:])
    same(state_of(resumed), state_of(opt))
    return saved, difference(other, net)


def second_part(rank, cls, section, how, folder, options):
    net, opt = make(cls, section, how, lr=1.0)
    load(net, opt, folder, **options)
    loaded = state_of(opt)
    train(net, opt, mine(rank, batches()[BREAK:]))
    return loaded, {n.removeprefix("module."): whole(p) for n, p in net.named_parameters()}


DCP = [
    ("Adam", "fsdp", {"flatten_optimizer_state_dict": True}),
    ("Adam", "ddp", {}),
    ("Adam", "hsdp", {}),
    # no state but the momentum; squares; state from the start on; four tensors a weight
    *((cls, "fsdp", {}) for cls in ("Adagrad", "SGD", "Adam", "RMSprop")),
]


@pytest.mark.parametrize(
    ("cls", "how", "options", "section"),
    [
        (*case, section)
        if i < (4 if section == "transported" else 1)
        else pytest.param(*case, section, marks=pytest.mark.slow)
        for i, case in enumerate(DCP)
        for section in ("transported", "implicit")
    ],
)
@alone
def test_dcp_between_one_process_and_two(cls, how, options, section, tmp_path):
    """Saved by two and loaded by two: exact. Saved by two and loaded by one, and the reverse: the state is
    that which was saved, and the run is that of one process."""
    one, opt = make(cls, section)
    train(one, opt, batches()[:BREAK])
    saved_by_one = state_of(opt)
    save(one, opt, tmp_path / "by one", **options)
    train(one, opt, batches()[BREAK:])

    answers = ranks().run(first_part, cls, section, how, tmp_path / "by two", options)
    assert [found for _, found in answers] == [0, 0]
    net, resumed = make(cls, section, lr=1.0)
    load(net, resumed, tmp_path / "by two", **options)
    for saved, _ in answers:
        same(state_of(resumed), saved)
    train(net, resumed, batches()[BREAK:])
    assert difference(net, one) <= TOLERANCE

    for loaded, weights in ranks().run(second_part, cls, section, how, tmp_path / "by one", options):
        same(loaded, saved_by_one)
        assert (
            max(float((weights[n] - p.detach()).abs().max()) for n, p in one.named_parameters()) <= TOLERANCE
        )


def full(rank, section):
    """What one process could write to one file, and from there to all."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    data = mine(rank, batches())
    net, opt = make("Adam", section, "fsdp")
    train(net, opt, data[:BREAK])
    model_state, optim_state = get_state_dict(net, opt, options=options)
    kept = through_a_file([model_state, optim_state]) if rank == 0 else None
    other, resumed = make("Adam", section, "fsdp", lr=1.0)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model_state, optim_state = copy.deepcopy(kept) if rank == 0 else ({}, {})
    set_model_state_dict(other, model_state, options=options)
    set_optimizer_state_dict(other, resumed, optim_state, options=options)
    train(net, opt, data[BREAK:])
    train(other, resumed, data[BREAK:])
    return difference(other, net), kept


@sections
@alone
def test_full_state_dicts(section):
    answers = ranks().run(full, section)
    assert [found for found, _ in answers] == [0, 0]
    net, opt = make("Adam", section, lr=1.0)
    model_state, optim_state = answers[0][1]
    set_state_dict(net, opt, model_state_dict=model_state, optim_state_dict=optim_state)
    train(net, opt, batches()[BREAK:])
    one, single = make("Adam", section)
    train(one, single, batches())
    assert difference(net, one) <= TOLERANCE


@alone
def test_a_plain_adams_checkpoint_by_names():
    """Euclidean moments go on, also when the groups are others; those of manifold weights start anew."""
    net, plain = Net(("rows", "heads")), Net(("rows", "heads"))
    theirs = torch.optim.Adam(plain.parameters(), lr=0.02)
    train(plain, theirs, batches(3))
    saved = through_a_file(get_optimizer_state_dict(plain, theirs))
    opt = build("Adam", net)
    with pytest.warns(UserWarning, match="loaded state has no section for 2 weights on manifolds"):
        set_optimizer_state_dict(net, opt, saved)
    assert opt.param_groups[0]["space"] == (STIEFEL, STIEFEL, ghor.Euclidean(), ghor.Euclidean())
    assert opt.param_groups[0]["lr"] == 0.02
    same(dict(opt.state[net.last.weight]), dict(theirs.state[plain.last.weight]))
    assert not opt.state.get(net.rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(net, opt, batches(2))
    assert STIEFEL.residual(net.heads.detach()).max() <= 1e-14
