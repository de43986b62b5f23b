"""Precision as training loops have it: autocast, scaled and accumulated gradients, dtypes, determinism, averages."""

import copy

import pytest
import torch
from table import MANIFOLDS, accepts, name, point, randn
from torch import nn
from torch.optim import swa_utils

import ghor
from ghor.baselines import ScalarMomentAdam
from ghor.spaces.orthogonal import Orthogonal

ST = ghor.Stiefel()
OPTIMIZERS = [ghor.optim.SGD, ghor.optim.Adam, ScalarMomentAdam]
optimizers = pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda c: c.__name__)
sections = pytest.mark.parametrize("section", ["transported", "implicit"])
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
SPACES = [
    pytest.param(s, next(x for x in ((12, 4), (4, 4), (3, 12)) if accepts(s, x)), k, id=f"{name(s)}-{k}")
    for s in MANIFOLDS
    for k in ("transported", "implicit")
    if k == "transported" or isinstance(s, Orthogonal)
]
each_space = pytest.mark.parametrize(("space", "shape", "section"), SPACES)


class Net(nn.Module):
    """Weights on three spaces, Euclidean ones, and a normalisation with running statistics."""

    def __init__(self, dtype=torch.float32, norm=False):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.tall, self.turn = nn.Linear(6, 16, bias=False), nn.Linear(16, 16, bias=False)
            self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
            self.out = nn.Linear(16, 3)
        self.to(dtype)
        ghor.constrain(self, "tall.weight", ST)
        ghor.constrain(self, "turn.weight", ghor.SpecialOrthogonal())
        ghor.constrain(self, "out.weight", ghor.Grassmann())

    def forward(self, x):
        return self.out(self.norm(torch.tanh(self.turn(torch.tanh(self.tall(x))))))


def data(n=64, dtype=torch.float32, seed=1):
    gen = torch.Generator().manual_seed(seed)
    return randn((n, 6), gen, dtype), randn((n, 3), gen, dtype)


def loss_of(net, x, y):
    return ((net(x).float() - y.float()) ** 2).mean()


def values(net):
    return {n: p.detach().clone() for n, p in net.named_parameters()}


def same(a, b, tol=0.0):
    torch.testing.assert_close(a, b, rtol=0, atol=tol)


def furthest(net):
    """The largest distance of a weight from its space, measured in float64."""
    found = [(p, s) for _, p, s in ghor.declare.spaces(net) if s != ghor.Euclidean()]
    return max(float(s.distance(p.detach().double()).max()) for p, s in found)


# -- autocast ----------------------------------------------------------------------------------------------------------


@optimizers
@sections
@halves
def test_autocast_forward(cls, section, dtype):
    """Weights and state stay float32 and on their spaces, the loss goes down, and it makes no difference whether the
    optimizer is built and stepped inside: no product of ours is rounded."""
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
        assert all(v.dtype == torch.float32 for p in net.parameters() for v in opt.state[p].values() if v.dim() > 0)
    assert ends[:30] == ends[30:]
    assert ends[29] < 0.9 * ends[0]


def test_autocast_does_not_reach_projections(gen):
    """constrain, project and distance, where a rounded product would show as 1e-3; and a closure keeps its autocast."""
    for space in MANIFOLDS:
        shape = next(x for x in ((12, 4), (4, 4)) if accepts(space, x))
        X = point(space, shape, gen, torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = space.project(X), space.distance(1.1 * X)
            module = nn.Module()
            module.w = nn.Parameter(X.clone())
            ghor.constrain(module, "w", space)
            distances = ghor.project(module)
        same(inside, (space.project(X), space.distance(1.1 * X)))
        same(module.w.detach(), inside[0], 1e-6)  # projected once more
        assert distances["w"] <= 2e-6 * float(X.norm()) ** 2
    net, x = Net(), data()[0]
    opt = ghor.optim.SGD(net, lr=0.01)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert opt.step(lambda: net(x)).dtype == torch.bfloat16


# -- scaled, accumulated, clipped gradients ----------------------------------------------------------------------------


@sections
@optimizers
@pytest.mark.parametrize("culprit", ["tall.weight", "turn.weight", "out.bias"])
def test_grad_scaler_with_autocast(section, cls, culprit):
    """A gradient that overflows anywhere skips the whole step: weights, sections, moments and counters keep every bit,
    and the scale halves. The other steps are those of a loop without scaler, scales being powers of two."""
    x, y = data()
    nets = Net(), Net()
    opts = [cls(net, lr=0.02, section=section) for net in nets]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for k in range(6):
        for net, opt in zip(nets, opts, strict=True):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(net, x, y)
            (scaler.scale(loss) if net is nets[0] else loss).backward()
        before = values(nets[0]), copy.deepcopy(opts[0].state_dict()["state"])
        if k == 3:
            nets[0].get_parameter(culprit).grad.view(-1)[0] = float("inf")
        scaler.unscale_(opts[0])
        nn.utils.clip_grad_norm_(nets[0].parameters(), 10.0)  # as loops do it; does nothing here
        scaler.step(opts[0])
        scaler.update()
        scales.append(scaler.get_scale())
        if k == 3:
            same((values(nets[0]), opts[0].state_dict()["state"]), before)
        else:
            opts[1].step()
    assert scales == [2.0**10, 2.0**11, 2.0**11, 2.0**10, 2.0**10, 2.0**11]
    same(values(nets[0]), values(nets[1]))
    same(opts[0].state_dict()["state"], opts[1].state_dict()["state"])


@optimizers
@sections
def test_accumulated_gradients_are_one_large_batch(cls, section):
    """Four parts of a batch, each loss over four: the gradients add up to the batch's but for rounding."""
    x, y = data(dtype=torch.float64)
    nets = Net(torch.float64), Net(torch.float64)
    opts = [cls(net, lr=0.02, section=section) for net in nets]
    for _ in range(10):
        for opt in opts:
            opt.zero_grad()
        for part in range(4):
            rows = slice(16 * part, 16 * part + 16)
            (((nets[0](x[rows]) - y[rows]) ** 2).mean() / 4).backward()
        ((nets[1](x) - y) ** 2).mean().backward()
        for opt in opts:
            opt.step()
    same(values(nets[0]), values(nets[1]), 1e-11)  # 10 steps; Adam divides by gradients of 1e-3 or so
    assert furthest(nets[0]) <= 1e-13


@optimizers
@sections
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_clipping_is_a_change_of_gradients(cls, section, clip):
    """torch's clipping sees the gradients of the weights, in the Euclidean norm, and the step takes what it leaves."""
    x, y = data()
    nets = Net(), Net()
    opts = [cls(net, lr=0.02, section=section) for net in nets]
    for _ in range(5):
        for net, opt in zip(nets, opts, strict=True):
            opt.zero_grad()
            loss_of(net, x, y).backward()
        if clip == "norm":
            params = [p for g in opts[0].param_groups for p in g["params"]]
            total = nn.utils.clip_grad_norm_(params, 1e-2)
            same(total, torch.stack([p.grad.norm() for p in nets[1].parameters()]).norm(), 1e-6)
            assert total > 1e-2
        else:
            nn.utils.clip_grad_value_(nets[0].parameters(), 1e-3)
        for p in nets[1].parameters():
            p.grad = p.grad * (1e-2 / (total + 1e-6)).clamp(max=1.0) if clip == "norm" else p.grad.clamp(-1e-3, 1e-3)
        for opt in opts:
            opt.step()
    same(values(nets[0]), values(nets[1]))
    assert furthest(nets[0]) <= 4e-6


# -- dtypes ------------------------------------------------------------------------------------------------------------


@optimizers
@sections
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=name)
def test_a_run_in_each_dtype_follows_float32(cls, section, dtype):
    """The same gradients to weights of each dtype, 40 steps: half precision weights are the float32 run's, rounded;
    moments are float32 there, and the float64 run differs by float32's rounding."""
    nets = Net(), Net()
    nets[0].to(dtype)
    if dtype == torch.float64:
        ghor.project(nets[0])  # what is on its space to float32's rounding is off it in float64
    else:
        nets[1].load_state_dict(nets[0].state_dict())
        assert max(ghor.project(nets[1]).values()) > 1e-4  # half precision was that far off
    opts = [cls(net, lr=0.01, section=section) for net in nets]
    gen = torch.Generator().manual_seed(2)
    for _ in range(40):
        for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            q.grad = randn(tuple(p.shape), gen, torch.float16).bfloat16().float()
            p.grad = q.grad.to(dtype)
        for opt in opts:
            opt.step()
    on_spaces = [n for n, _, s in ghor.declare.spaces(nets[0]) if s != ghor.Euclidean()]
    for n in on_spaces:
        p, q = nets[0].get_parameter(n), nets[1].get_parameter(n)
        assert p.dtype == dtype
        # |q| <= 1: half an ulp of it, and what float32 has lost in 40 steps
        assert (p.detach().double() - q.detach().double()).abs().max() <= torch.finfo(dtype).eps / 2 + 1e-5
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert all(v.dtype == wide for v in opts[0].state[p].values() if v.dim() > 0)
    assert furthest(nets[0]) <= (1e-13 if dtype == torch.float64 else 16 * torch.finfo(dtype).eps)


@each_space
@pytest.mark.parametrize("retraction", ["cayley", "geodesic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_runs_repeat_to_the_bit(space, shape, section, retraction, dtype, gen):
    """Under torch.use_deterministic_algorithms, which also fills memory that nobody has written with NaN: nothing of it
    is read. And the run without it is the same."""
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


# -- averages ----------------------------------------------------------------------------------------------------------


AVERAGES = {
    "swa": {},
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.8)},
    "buffers too": {"use_buffers": True},
}


@sections
@pytest.mark.parametrize("kind", AVERAGES)
def test_averaged_weights_come_back_by_one_call(section, kind):
    """The mean of points is off the space; ghor.project(averaged) brings each to its nearest point, which is what
    `constrain` would do, and says how far off it was. The run that is averaged does not notice."""
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
    for n, p, space in ghor.declare.spaces(averaged):
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
    with pytest.raises(ValueError, match=r"^out\.weight: a matrix of rank 2 < 3 has no nearest point on Grassmann\(\)"):
        ghor.project(net)
    same(values(net), before)
    assert ghor.project(nn.Linear(3, 2)) == {}
    with pytest.raises(ValueError, match=r"^tall\.weight is on the meta device"):
        ghor.project(net.to_empty(device="meta"))


@sections
def test_project_under_a_running_optimizer(section):
    """As after `constrain`: the step goes on from the projected point, with one warning where a section was rebuilt."""
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
