"""Precision as training loops have it: autocast, determinism, averages of weights."""

import pytest
import torch
from helpers.loops import OPTIMIZERS, Net, data, furthest, loss_of, values
from helpers.steps import same, sections
from helpers.table import MANIFOLDS, RETRACTIONS, name, point, randn, shapes
from helpers.table import sections as sections_of
from torch import nn
from torch.optim import swa_utils

import ghor

optimizers = pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda c: c.__name__)
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
TRIED = [(12, 4), (4, 4), (3, 12)]


# -- autocast ----------------------------------------------------------------------------------------------


@optimizers
@sections
@halves
def test_autocast_forward(cls, section, dtype):
    """Weights and state stay float32 and on their spaces, the loss goes down, and it makes no difference
    whether the optimizer is built and stepped inside: no product of ours is rounded."""
    x, y = data()
    ends = []
    for inside in (False, True):
        net = Net()
        opt = None
        for _ in range(30):
            with torch.autocast("cpu", dtype=dtype):
                out = net(x)
                assert out.dtype == dtype
                loss = ((out - y) ** 2).mean()
                if inside:
                    opt = opt or cls(net, lr=0.02, section=section)
                    opt.zero_grad()
                    loss.backward()
                    opt.step()
            if not inside:
                opt = opt or cls(net, lr=0.02, section=section)
                opt.zero_grad()
                loss.backward()
                opt.step()
            assert loss.dtype == torch.float32
            ends.append(float(loss.detach()))
        assert furthest(net) <= 4e-6  # float32 rounding of 16 columns
        assert all(
            v.dtype == torch.float32 for p in net.parameters() for v in opt.state[p].values() if v.dim() > 0
        )
    assert ends[:30] == ends[30:]
    assert ends[29] < 0.9 * ends[0]


def test_autocast_does_not_reach_projections(gen):
    """constrain, project and distance, where a rounded product would show as 1e-3; and a closure keeps its
    autocast."""
    for space in MANIFOLDS:
        shape = shapes(space, TRIED)[0]
        X = point(space, shape, gen, torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = space.project(X), space.residual(1.1 * X)
            module = nn.Module()
            module.w = nn.Parameter(X.clone())
            ghor.constrain(module, "w", space)
            distances = ghor.project(module)
        same(inside, (space.project(X), space.residual(1.1 * X)))
        same(module.w.detach(), inside[0], 1e-6)  # projected once more
        assert distances["w"] <= 2e-6 * float(X.norm()) ** 2
    net, x = Net(), data()[0]
    opt = ghor.optim.SGD(net, lr=0.01)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert opt.step(lambda: net(x)).dtype == torch.bfloat16


# -- determinism -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "shape", "section"),
    [(s, shapes(s, TRIED)[0], k) for s in MANIFOLDS for k in sections_of(s)],
    ids=name,
)
@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_runs_repeat_to_the_bit(space, shape, section, retraction, dtype, gen):
    """Under torch.use_deterministic_algorithms, which also fills memory that nobody has written with NaN:
    nothing of it is read. And the run without it is the same."""
    start = [point(space, shape, gen, torch.float32).to(dtype) for _ in range(3)]
    gradients = [[randn(shape, gen, dtype) for _ in start] for _ in range(12)]
    ends = []
    for strict in (True, True, False):
        torch.use_deterministic_algorithms(strict)
        try:
            weights = [nn.Parameter(Y.clone()) for Y in start]
            opt = ghor.optim.Adam(weights, space=space, section=section, retraction=retraction, lr=0.02)
            for step in gradients:
                for p, g in zip(weights, step, strict=True):
                    p.grad = g
                opt.step()
        finally:
            torch.use_deterministic_algorithms(False)
        ends.append(([p.detach() for p in weights], opt.state_dict()["state"]))
    same(ends[1], ends[0])
    same(ends[2], ends[0])


# -- averages ----------------------------------------------------------------------------------------------


AVERAGES = {
    "swa": {},
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.8)},
    "buffers too": {"use_buffers": True},
}


@sections
@pytest.mark.parametrize("kind", AVERAGES)
def test_averaged_weights_come_back_by_one_call(section, kind):
    """The mean of points is off the space; ghor.project(averaged) brings each to its nearest point, which is
    what `constrain` would do, and says how far off it was. The run that is averaged does not notice."""
    x, y = data()
    net, twin = Net(norm=True), Net(norm=True)
    opt, other = (ghor.optim.Adam(n, lr=0.05, section=section) for n in (net, twin))
    averaged = swa_utils.AveragedModel(net, **AVERAGES[kind])
    schedules = [swa_utils.SWALR(o, swa_lr=0.02, anneal_epochs=3) for o in (opt, other)]
    for _ in range(12):
        for n, o, schedule in zip((net, twin), (opt, other), schedules, strict=True):
            o.zero_grad()
            loss_of(n, x, y).backward()
            o.step()
            schedule.step()
        averaged.update_parameters(net)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.02)
    off = furthest(averaged)
    assert off > 1e-2
    mean = values(averaged)
    distances = ghor.project(averaged)
    assert set(distances) == {"module.tall.weight", "module.turn.weight", "module.out.weight"}
    assert max(distances.values()) == off
    assert furthest(averaged) <= 4e-6
    for n, p, space in ghor.constraints.declared_spaces(averaged):
        assert torch.equal(p, space.project(mean[n]))
    same(values(averaged)["module.out.bias"], mean["module.out.bias"])
    swa_utils.update_bn([x[:32], x[32:]], averaged)
    assert averaged.module.norm.num_batches_tracked == 2
    assert loss_of(averaged.eval(), x, y) < loss_of(Net(norm=True).eval(), x, y)
    same(values(net), values(twin))
    same(opt.state_dict()["state"], other.state_dict()["state"])
    loss_of(averaged.train(), x, y).backward()  # training can go on from the average
    fresh = ghor.optim.Adam(averaged, lr=0.01)
    fresh.step()
    assert furthest(averaged) <= 4e-6


def test_project_moves_all_or_nothing():
    """A weight of too low rank: an error that names it, and the others are where they were."""
    net = Net()
    with torch.no_grad():
        net.tall.weight.mul_(1.1)
        net.out.weight[1] = net.out.weight[0]
    before = values(net)
    with pytest.raises(
        ValueError, match=r"^out\.weight: a matrix of rank 2 < 3 has no nearest point on Grassmann\(\)"
    ):
        ghor.project(net)
    same(values(net), before)
    assert ghor.project(nn.Linear(3, 2)) == {}
    with pytest.raises(ValueError, match=r"^tall\.weight is on the meta device"):
        ghor.project(net.to_empty(device="meta"))


@sections
def test_project_under_a_running_optimizer(section):
    """As after `constrain`: the step goes on from the projected point, with one warning where a section was
    rebuilt."""
    x, y = data()
    net = Net()
    opt = ghor.optim.Adam(net, lr=0.02, section=section)
    loss_of(net, x, y).backward()
    opt.step()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.01)
    with pytest.raises(ValueError, match=r"tall\.weight .* off Stiefel"):
        opt.step()
    assert ghor.project(net)["tall.weight"] > 0.01
    with pytest.warns(UserWarning, match="changed outside the optimizer"):
        opt.step()
    assert furthest(net) <= 4e-6
