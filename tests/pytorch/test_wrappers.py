"""What torch wraps around optimizers and their weights: averages, steps within backward, averages over
processes, and weights of other processes."""

import warnings

import pytest
import torch
from helpers.ranks import Ranks, ranks
from helpers.spread import SPACES, TOLERANCE, Net, batches, difference, mine, train
from helpers.table import MANIFOLDS, name, point, randn, shapes
from torch import nn
from torch.optim import swa_utils

import ghor

AVERAGES = {
    "equal": {},
    "exponential": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.8)},
    "swa": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("space", MANIFOLDS, ids=name)
def test_averaged_models(space, average, gen):
    """An average knows its spaces; projected, it is near what it averages, and can be trained."""
    model = nn.Module()
    model.register_parameter("Y", nn.Parameter(point(space, shapes(space)[0], gen)))
    ghor.constrain(model, "Y", space)
    opt = ghor.optim.SGD(model, lr=0.02)
    averaged = swa_utils.AveragedModel(model, **AVERAGES[average])
    schedule = swa_utils.SWALR(opt, swa_lr=0.01, anneal_epochs=2)
    G = randn(tuple(model.Y.shape), gen)
    for _ in range(4):
        model.Y.grad = G / G.norm()
        opt.step()
        schedule.step()
        averaged.update_parameters(model)
    distances = ghor.project(averaged)
    assert list(distances) == ["module.Y"]
    Y = averaged.module.Y
    assert (space.residual(Y.detach()) <= space.tolerance(Y.detach())).all()
    # four steps of 0.02 at most, on points that may be large
    assert (Y - model.Y).detach().norm() <= 0.3 * (1 + Y.detach().norm()) ** 2
    before, Y.grad = Y.detach().clone(), G
    ghor.optim.Adam(averaged, lr=0.01).step()
    assert not torch.equal(Y, before)
    assert (space.residual(Y.detach()) <= space.tolerance(Y.detach())).all()


def test_batch_norm_of_an_averaged_model(gen):
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    ghor.constrain(model[0], "weight", ghor.Stiefel())
    averaged = swa_utils.AveragedModel(model)
    weight = averaged.module[0].weight.detach().clone()
    swa_utils.update_bn([torch.randn(8, 6, generator=gen) for _ in range(3)], averaged)
    assert torch.equal(averaged.module[0].weight, weight)
    assert int(averaged.module[1].num_batches_tracked) == 3


# -- more than one process ---------------------------------------------------------------------------------


def in_backward(rank):
    """torch makes an optimizer for each weight, and steps when its gradient is there. (Under DDP it does so
    on accelerators only.)"""
    from torch.distributed.optim import _apply_optimizer_in_backward

    net, twin = Net(), Net()
    options = {"lr": 0.01, "momentum": 0.9}
    spread = [getattr(net, n) for n in net.weights]
    _apply_optimizer_in_backward(ghor.optim.SGD, spread, options)
    _apply_optimizer_in_backward(torch.optim.SGD, net.last.parameters(), options)
    for x in batches():
        net(x).backward()
    train(twin, ghor.optim.SGD(twin, **options), batches())
    return difference(net, twin)


def test_steps_within_backward():
    assert max(ranks().run(in_backward)) <= TOLERANCE


def local_steps(rank, projected):
    """Weights are averaged over the processes every other step."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    class Averager(PeriodicModelAverager):
        def average_parameters(self, params):
            due = self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0
            super().average_parameters(params)
            if due and projected:
                ghor.project(net)

    net = Net()
    opt = PostLocalSGDOptimizer(ghor.optim.SGD(net, lr=0.01), Averager(period=2, warmup_steps=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train(net, opt, mine(rank, batches(6)))
        except ValueError as error:
            return str(error)
    told = [str(w.message) for w in caught]
    off = max(float(SPACES[n][1].residual(getattr(net, n).detach()).max()) for n in net.weights)
    return told, off, {n: p.detach().clone() for n, p in net.named_parameters()}


def test_averages_over_processes_are_projected():
    """They are off the spaces: the next step says so, unless they are projected. Then all processes agree."""
    for told in ranks().run(local_steps, False):
        assert told.startswith("rows of shape (7, 3) is ")
        assert "or ghor.project(model)" in told
    (told, off, one), (_, _, two) = ranks().run(local_steps, True)
    assert off <= 1e-12
    assert len([line for line in told if "changed outside the optimizer" in line]) <= 1
    assert all(torch.equal(one[n], two[n]) for n in one)


def product_there(weight, G):
    return (weight.local_value() * G).sum()


def weights_elsewhere(rank, path):
    import torch.distributed.autograd as autograd
    from torch.distributed import rpc
    from torch.distributed.optim import DistributedOptimizer

    warnings.simplefilter("ignore")  # torch's own: its optimizers are compiled there, others are not
    backend = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=60)
    rpc.init_rpc(f"process{rank}", rank=rank, world_size=2, rpc_backend_options=backend)
    found = None
    if rank == 0:
        gen, space = torch.Generator().manual_seed(0), ghor.Stiefel()
        start, G = point(space, (6, 2), gen), randn((6, 2), gen)
        weights = [rpc.remote(f"process{i}", nn.Parameter, args=(start.clone(),)) for i in (0, 1)]
        options = {"lr": 0.05, "momentum": 0.9, "space": space}
        opt = DistributedOptimizer(ghor.optim.SGD, weights, **options)
        twin = nn.Parameter(start.clone())
        alone = ghor.optim.SGD([twin], **options)
        for _ in range(4):
            with autograd.context() as context:
                loss = sum(rpc.rpc_sync(w.owner(), product_there, args=(w, G)) for w in weights)
                autograd.backward(context, [loss])
                opt.step(context)
            twin.grad = G
            alone.step()
        found = max(float((w.to_here() - twin).detach().abs().max()) for w in weights)
    rpc.shutdown()
    return found


@pytest.mark.slow
def test_an_optimizer_of_weights_on_other_processes(tmp_path):
    processes = Ranks(2)  # of their own, which rpc may leave as it likes
    try:
        assert processes.run(weights_elsewhere, str(tmp_path / "rpc"))[0] <= 1e-15
    finally:
        processes.stop()
