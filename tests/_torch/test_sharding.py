"""Training on two processes is training on one: DDP, FSDP2, ZeroRedundancyOptimizer, over gloo, in
float64."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import ranks
from helpers.spread import (
    OPTIONS,
    SPACES,
    TOLERANCE,
    Net,
    batches,
    build,
    difference,
    mine,
    shard,
    train,
    whole,
)
from helpers.steps import STIEFEL, sections, through_a_file
from helpers.table import SECTIONS, name, point, randn, shapes
from torch import nn

import ghor

# -- replicas -----------------------------------------------------------------------------------------------


def ddp(rank, cls, section):
    net, twin = Net(implicit=section == "implicit"), Net(implicit=section == "implicit")
    model = nn.parallel.DistributedDataParallel(net)
    train(model, build(cls, model, section), mine(rank, batches()))
    train(twin, build(cls, twin, section), batches())
    return difference(net, twin)


@pytest.mark.parametrize("cls", ["SGD", "AdamW", "Muon"])
@sections
def test_ddp(cls, section):
    assert max(ranks().run(ddp, cls, section)) <= TOLERANCE


def zero(rank, cls):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def groups(net):  # it takes no names, and a group for each space so that groups can be cut
        return [{**g, "params": [p for _, p in g["params"]]} for g in ghor.param_groups(net)]

    net, twin = Net(), Net()
    model = nn.parallel.DistributedDataParallel(net)
    Lifted, options, data = getattr(ghor.optim, cls), {"lr": 0.01, **OPTIONS.get(cls, {})}, batches()
    opt = ZeroRedundancyOptimizer(groups(model), optimizer_class=Lifted, **options)
    one = Lifted(groups(twin), **options)
    train(model, opt, mine(rank, data[:5]))
    train(twin, one, data[:5])
    spread = len(opt.optim.state)
    found = [difference(net, twin)]
    # the state of all ranks, loaded into new optimizers of both kinds
    opt.consolidate_state_dict(to=0)
    saved = [opt.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(saved)
    saved = [through_a_file(saved[0])]  # read with weights_only=True: it holds spaces, which are safe
    opt = ZeroRedundancyOptimizer(groups(model), optimizer_class=Lifted, **options | {"lr": 1.0})
    opt.load_state_dict(copy.deepcopy(saved[0]))
    alone = copy.deepcopy(net)
    other = Lifted(groups(alone), **options | {"lr": 1.0})
    other.load_state_dict(saved[0])
    train(model, opt, mine(rank, data[5:]))
    train(alone, other, data[5:])
    train(twin, one, data[5:])
    return spread, max(*found, difference(net, twin), difference(alone, twin))


@pytest.mark.parametrize("cls", ["SGD", "Adam"])
def test_zero_redundancy_optimizer(cls):
    answers = ranks().run(zero, cls)
    assert sum(spread for spread, _ in answers) == 11  # each weight's state is on one process
    assert max(found for _, found in answers) <= TOLERANCE


# -- shards ------------------------------------------------------------------------------------------------


def fsdp(rank, cls, section, options, how="fsdp"):
    net, twin = Net(implicit=section == "implicit"), Net(implicit=section == "implicit")
    shard(net, how)
    assert all(p.to_local().shape != p.shape for p in net.parameters() if p.shape[0] > 1)
    data = batches(
        10 if cls == "Adam" else 7
    )  # RAdam changes its rule at 6; Y is polished at 10, whatever the rule
    train(net, build(cls, net, section, **options), mine(rank, data))
    train(twin, build(cls, twin, section, **options), data)
    return difference(net, twin)


# torch's Rprop does not run on DTensors: index_put_ keeps no placement
@pytest.mark.parametrize(
    ("cls", "section"),
    [
        (c, s) if s == "transported" or c in ("Adam", "Muon") else pytest.param(c, s, marks=pytest.mark.slow)
        for c in ghor.optim.__all__
        for s in ("transported", "implicit")
        if c != "Rprop"
    ],
)
def test_fsdp(cls, section):
    assert max(ranks().run(fsdp, cls, section, {})) <= TOLERANCE


class Every(nn.Module):
    """A weight of every space that has the section, of two shapes, and a Euclidean one."""

    def __init__(self, section):
        super().__init__()
        gen = torch.Generator().manual_seed(0)
        cases = [(s, shape) for s, kind in SECTIONS if kind == section for shape in shapes(s)[-2:]]
        for i, (space, shape) in enumerate(cases):
            self.register_parameter(f"{type(space).__name__}{i}", nn.Parameter(point(space, shape, gen)))
            ghor.constrain(self, f"{type(space).__name__}{i}", space)
        self.bias = nn.Parameter(randn((5,), gen))

    def forward(self, x):
        pairs = [(p.flatten(), x[:, : p.numel()]) for p in self.parameters()]
        return sum((part @ p).tanh().mean() for p, part in pairs)


def every_space(rank, cls, section):
    net, twin = Every(section), Every(section)
    shard(net)
    x = randn((8, 400), torch.Generator().manual_seed(1))
    train(net, build(cls, net, section), [x[4 * rank : 4 * rank + 4]] * 2)
    train(twin, build(cls, twin, section), [x] * 2)
    return difference(net, twin)


@pytest.mark.parametrize("cls", ["SGD", "Adam", "Muon"])
@sections
def test_fsdp_on_every_space(cls, section):
    assert max(ranks().run(every_space, cls, section)) <= 1e-14


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"fused": True}, {"weight_decay": 0.5, "anchor": "start"}], ids=str
)
def test_fsdp_with_one_kernel_for_all_weights(options):
    """The base optimizer sees Euclidean weights and shadows together, so both are DTensors."""
    assert max(ranks().run(fsdp, "Adam", "transported", options)) <= TOLERANCE


@pytest.mark.parametrize("how", ["hsdp", "columns"])
@sections
def test_fsdp_on_other_meshes_and_dimensions(how, section):
    assert max(ranks().run(fsdp, "Adam", section, {}, how)) <= TOLERANCE


def fsdp_in_bfloat16(rank):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    net = Net(("rows", "heads", "units")).float()
    for n in net.weights:
        ghor.constrain(net, n, SPACES[n][1])
    fully_shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    start = {n: whole(getattr(net, n)) for n in net.weights}
    data = [x.float() for x in mine(rank, batches())]
    train(net, build("Adam", net), data)
    return [
        (
            float(SPACES[n][1].residual(whole(getattr(net, n))).max()),
            float((whole(getattr(net, n)) - Y).abs().max()),
        )
        for n, Y in start.items()
    ]


def test_fsdp_mixed_precision():
    """Forward and backward in bfloat16, weights in float32: they stay on their spaces to float32's digits."""
    for answer in ranks().run(fsdp_in_bfloat16):
        for distance, moved in answer:
            assert distance <= 2e-6
            assert moved > 1e-2


# fewer shapes than in the table of laws, each along every dimension; a kernel with and without a batch
SPREAD = [
    (7,),
    (3, 5),
    (6, 4),
    (5, 5),
    (2, 10),
    (3, 12, 4),
    (2, 3, 6, 2),
    (2, 4, 4),
    (8, 3, 2, 1),
    (2, 7, 3, 1, 2),
]


def spread_by_hand(rank, space, section, dtype, every):
    """Adam, with the same gradients, on a weight that is spread along each of its dimensions in turn."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, worst = init_device_mesh("cpu", (2,)), {}
    tried = shapes(space, [shape for shape in SPREAD if len(shape) < 4 or getattr(space, "flatten", 1) > 1])
    for shape in tried if every else [*tried[:-1:2], tried[-1]]:
        gen = torch.Generator().manual_seed(0)
        start = [point(space, shape, gen, dtype) for _ in range(2)]
        steps = [[randn(shape, gen, dtype) for _ in start] for _ in range(3)]
        steps[1][1] = None  # the stack is cut in two

        def trained(distribute, start=start, steps=steps):
            weights = [nn.Parameter(distribute(Y.clone())) for Y in start]
            opt = ghor.optim.Adam(weights, lr=0.05, space=space, section=section)
            for step in steps:
                for p, g in zip(weights, step, strict=True):
                    p.grad = None if g is None else distribute(g)
                opt.step()
            return torch.stack([whole(p) for p in weights])

        plain = trained(lambda t: t)
        for placement in (Replicate(), *map(Shard, range(len(shape)))):
            spread = trained(lambda t, placement=placement: distribute_tensor(t, mesh, [placement]))
            worst[shape, str(placement)] = float((spread - plain).abs().max())
    return worst


@pytest.mark.parametrize(
    ("space", "section"),
    [
        *SECTIONS,
        *((ghor.Stiefel(flatten=3), k) for k in ("transported", "implicit")),
        (ghor.Sphere(along="columns"), "implicit"),
    ],
    ids=name,
)
@pytest.mark.parametrize(
    ("dtype", "every"),
    [
        (torch.float64, False),
        *(pytest.param(dtype, True, marks=pytest.mark.slow) for dtype in (torch.float64, torch.bfloat16)),
    ],
    ids=name,
)
def test_a_step_does_not_depend_on_how_a_weight_is_spread(space, section, dtype, every):
    """Whole matrices are computed from the same numbers; batches in other pieces, where a kernel may add in
    another order. A weight in bfloat16 may then round to the neighbour."""
    for worst in ranks().run(spread_by_hand, space, section, dtype, every):
        assert len(worst) >= 3
        for case, value in worst.items():
            assert value <= (1e-13 if dtype == torch.float64 else 2**-8), case


def messages(rank, section):
    from torch.distributed.tensor.debug import CommDebugMode

    sent, state = {}, {}
    for names in (("heads", "single", "units"), ("rows", "more"), ("wide",)):
        net = Net(names)
        shard(net)
        opt = ghor.optim.Adam(net, lr=0.01, section=section)
        data = mine(rank, batches(3))
        train(net, opt, data[:2])
        net(data[2]).backward()
        with CommDebugMode() as log:
            opt.step()
        sent[names] = log.get_total_counts()
        for n in net.weights:
            p = getattr(net, n)
            state[n] = {k: str(v.placements[0]) for k, v in opt.state[p].items() if hasattr(v, "placements")}
            state[n] |= {"like the weight": {str(p.placements[0])}}
            for k in opt.state[p].keys() & {"exp_avg", "exp_avg_sq"}:
                assert opt.state[p][k].shape == p.shape
    return sent, state


@sections
def test_batches_of_matrices_need_no_communication(section):
    """Matrices that are cut are gathered, a stack in one message: gradient and weight. State lies where it is
    used."""
    key = {"transported": "section", "implicit": "frame_anchor"}[section]
    for sent, state in ranks().run(messages, section):
        assert sent == {("heads", "single", "units"): 0, ("rows", "more"): 2, ("wide",): 2}
        for n, entries in state.items():
            cut = n in ("rows", "more", "wide")
            assert entries.pop("like the weight") == {"S(0)"}
            assert entries == dict.fromkeys(["exp_avg", "exp_avg_sq", key], "R" if cut else "S(0)")


# -- declarations, and what is wrong -----------------------------------------------------------------------


def declarations(rank):
    nets = [Net(), Net()]
    for net in nets:
        shard(net)
    bare = ghor.optim.Adam(nets[1].parameters())
    found = [
        {n: repr(space) for n, _, space in ghor.constraints.declared_spaces(nets[0])},
        {n: repr(s) for n, s in zip(SPACES, bare.param_groups[0]["space"], strict=False)},
    ]
    table = ghor.check(nets[0])
    # declared when it is spread already
    net = nn.Module()
    net.register_parameter("weight", nn.Parameter(randn((7, 3), torch.Generator().manual_seed(2))))
    net.register_parameter("units", nn.Parameter(randn((5, 3), torch.Generator().manual_seed(3))))
    shard(net)
    expected = STIEFEL.project(whole(net.weight)), ghor.Sphere().project(whole(net.units))
    ghor.constrain(ghor.constrain(net, "weight", STIEFEL), "units", ghor.Sphere())
    for p, Y in zip((net.weight, net.units), expected, strict=True):
        assert (whole(p) - Y).abs().max() <= 1e-15
    assert [g["space"] for g in ghor.optim.SGD(ghor.param_groups(net)).param_groups] == [
        STIEFEL,
        ghor.Sphere(),
    ]
    return found, table


def test_declared_spaces_survive_fully_shard():
    """It puts new parameters into the modules; the modules know."""
    for found, table in ranks().run(declarations):
        for spaces in found:
            assert {n: spaces[n] for n in SPACES} == {n: repr(space) for n, (_, space) in SPACES.items()}
        rows = {line.split()[0]: line.split() for line in table.splitlines()[2:]}
        assert rows["rows"][1:3] == ["7x3", "Stiefel()"]
        assert float(rows["rows"][3]) <= 1e-14


def after_a_forward(rank):
    """A forward pass leaves whole weights in the module, which are thrown away before the next one."""

    def used():
        net = shard(Net(("rows", "units")))
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1.1)
            net(batches(1)[0])
        assert type(net.rows.data) is torch.Tensor
        return net

    def off(net):
        net.reshard()
        return [float(SPACES[n][1].residual(whole(getattr(net, n))).max()) for n in net.weights]

    projected, constrained = used(), used()
    ghor.project(projected)
    for n in constrained.weights:
        ghor.constrain(constrained, n, SPACES[n][1])
    moved = []
    for source in (lambda net: net, ghor.param_groups):
        with torch.no_grad():
            projected(batches(1)[0])
        opt = ghor.optim.SGD(source(projected), lr=0.1)
        before = whole(projected.rows).clone()
        train(projected, opt, batches(1))
        moved.append(not torch.equal(whole(projected.rows), before))
    with torch.no_grad():
        projected(batches(1)[0])
    opt = ghor.optim.SGD(projected.parameters(), lr=0.1)
    try:
        train(projected, opt, batches(1))
    except ValueError as error:
        return off(projected), off(constrained), moved, str(error)


def test_weights_that_fsdp_has_gathered():
    for projected, constrained, moved, told in ranks().run(after_a_forward):
        assert max(projected + constrained) <= 1e-14
        assert moved == [True, True]
        assert told.startswith("parameter 0 of group 0 has no memory any more")


def wrongs(rank, section):
    net = Net(("rows", "more", "heads"))
    shard(net)
    opt = build("Adam", net, section, error_if_nonfinite=True)
    data = mine(rank, batches(10))
    train(net, opt, data)
    before = {n: whole(p) for n, p in net.named_parameters()}
    told = []

    def attempt():
        net(data[0]).backward()
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                opt.step()
            told.append([str(w.message).split(",")[0] for w in caught])
        except (ValueError, RuntimeError) as error:
            told.append(str(error))
        opt.zero_grad()

    # a gradient that is not finite on one process only
    net(data[0]).backward()
    if rank == 1:
        net.rows.grad.to_local().fill_(float("nan"))
    try:
        opt.step()
    except RuntimeError as error:
        told.append(str(error))
    opt.zero_grad()
    # off the space
    with torch.no_grad():
        net.rows.mul_(1.5)
    attempt()
    with torch.no_grad():
        net.rows.div_(1.5)
    still = {n: float((whole(p) - before[n]).abs().max()) for n, p in net.named_parameters()}
    ghor.constrain(net, "rows", STIEFEL)
    # to another point of the space
    with torch.no_grad():
        net.more.neg_()
        net.heads.neg_()
    attempt()
    moved = float((whole(net.more) + before["more"]).abs().max())
    return told, still, moved


@sections
def test_what_is_wrong_is_found_on_all_processes(section):
    for told, still, moved in ranks().run(wrongs, section):
        assert told[0].startswith("the gradient of rows is not finite; nothing was moved")
        assert told[1].startswith("rows of shape (7, 3) is 2.2e+00 off Stiefel(); call ghor.constrain")
        assert max(still.values()) <= 1e-15
        assert told[2][0].endswith("changed outside the optimizer")
        assert len(told[2]) == 1
        assert 1e-4 < moved < 0.1  # no jump back


def odd_placements(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    Y = DTensor.from_local(torch.eye(6, 2) / 2, init_device_mesh("cpu", (2,)), [Partial()])
    try:
        ghor.optim.SGD([nn.Parameter(Y)], space=STIEFEL)
    except ValueError as error:
        return str(error)


def test_other_placements_are_refused():
    for told in ranks().run(odd_placements):
        assert told.startswith(
            "a weight of shape (6, 2) is placed as (Partial(sum),); only Shard and Replicate"
        )


def written_state(rank):
    net = Net(("rows", "heads"))
    shard(net)
    opt = build("SGD", net)
    train(net, opt, mine(rank, batches(3)))
    before = [whole(p) for p in net.parameters()]
    for p in net.parameters():
        for key in [k for k in opt.state[p] if k.startswith("momentum_buffer")]:
            opt.state[p][key].zero_()
        p.grad = torch.zeros_like(p)
    opt.step()
    return all(torch.equal(whole(p), Y) for p, Y in zip(net.parameters(), before, strict=True))


def test_state_of_shards_is_live():
    """As that of whole weights: what is written into it counts."""
    assert ranks().run(written_state) == [True, True]


def flat_parameters(rank, keep):
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(Net(), use_orig_params=keep, device_id=torch.device("cpu"))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ghor.optim.Adam(model)
        return str(caught[0].message)
    except ValueError as error:
        return str(error)


def test_the_first_fsdp_is_not_taken_in_silence():
    """It makes vectors of the weights, which have no place on the spaces."""
    for told in ranks().run(flat_parameters, True):
        assert "rows: Stiefel() needs 2 or more dimensions" in told
    for told in ranks().run(flat_parameters, False):
        assert "rows was constrained to Stiefel() and is not a parameter any more (8 others likewise)" in told
