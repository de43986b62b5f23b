"""What loops do to gradients between backward and step: scaled, accumulated, clipped; and gradients that are
sparse."""

import copy

import pytest
import torch
from helpers import loops
from helpers.loops import OPTIMIZERS, data, furthest, loss_of
from helpers.steps import STIEFEL, Net, build, gradients, same, sections, state_of, train, values, weight
from torch import nn

import ghor

optimizers = pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda c: c.__name__)


# -- GradScaler --------------------------------------------------------------------------------------------


@sections
@optimizers
@pytest.mark.parametrize("culprit", ["tall.weight", "turn.weight", "out.bias"])
def test_grad_scaler_with_autocast(section, cls, culprit):
    """A gradient that overflows anywhere skips the whole step: weights, sections, moments and counters keep
    every bit, and the scale halves. The other steps are those of a loop without scaler, scales being powers
    of two."""
    x, y = data()
    nets = loops.Net(), loops.Net()
    opts = [cls(net, lr=0.02, section=section) for net in nets]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for k in range(6):
        for net, opt in zip(nets, opts, strict=True):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(net, x, y)
            (scaler.scale(loss) if net is nets[0] else loss).backward()
        before = loops.values(nets[0]), copy.deepcopy(opts[0].state_dict()["state"])
        if k == 3:
            nets[0].get_parameter(culprit).grad.view(-1)[0] = float("inf")
        scaler.unscale_(opts[0])
        nn.utils.clip_grad_norm_(nets[0].parameters(), 10.0)  # as loops do it; does nothing here
        scaler.step(opts[0])
        scaler.update()
        scales.append(scaler.get_scale())
        if k == 3:
            same((loops.values(nets[0]), opts[0].state_dict()["state"]), before)
        else:
            opts[1].step()
    assert scales == [2.0**10, 2.0**11, 2.0**11, 2.0**10, 2.0**10, 2.0**11]
    same(loops.values(nets[0]), loops.values(nets[1]))
    same(opts[0].state_dict()["state"], opts[1].state_dict()["state"])


@pytest.mark.parametrize(
    ("cls", "fused"),
    [("SGD", False), ("SGD", True), ("Adam", False), ("Adam", True), ("AdamW", True), ("Adagrad", True)],
)
def test_grad_scaler_skips_a_step_with_inf(cls, fused):
    """An inf step moves nothing and halves the scale; the others are those of a run without scaler."""
    net, twin = Net(torch.float32), Net(torch.float32)
    options = {"fused": True} if fused else {}
    opt = getattr(ghor.optim, cls)(net, lr=1e-2, **options)
    other = getattr(ghor.optim, cls)(twin, lr=1e-2, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    steps = gradients(net, 5)

    def scaled(step, bad=False):
        opt.zero_grad()
        scaler.scale(sum((p * g).sum() for p, g in zip(net.parameters(), step, strict=True))).backward()
        if bad:
            net.b.grad[0, 0] = float("inf")
        scaler.step(opt)
        scaler.update()

    for k, step in enumerate(steps):
        if k == 2:
            before, state = values(net), state_of(opt)
            scaled(step, bad=True)
            same(values(net), before)
            same(state_of(opt), state)
            assert scaler.get_scale() == 2.0
        else:
            scaled(step)
            train(twin, other, [step])
    same(values(net), values(twin))  # scales are powers of two


def test_scaled_gradients_with_inf_are_the_scalers_business(gen):
    Y = weight(9, 3)
    opt = ghor.optim.Adam([Y], space=STIEFEL, fused=True, error_if_nonfinite=True)
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


# -- accumulated and clipped -------------------------------------------------------------------------------


@optimizers
@sections
def test_accumulated_gradients_are_one_large_batch(cls, section):
    """Four parts of a batch, each loss over four: the gradients add up to the batch's but for rounding."""
    x, y = data(dtype=torch.float64)
    nets = loops.Net(torch.float64), loops.Net(torch.float64)
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
    same(
        loops.values(nets[0]), loops.values(nets[1]), 1e-11
    )  # 10 steps; Adam divides by gradients of 1e-3 or so
    assert furthest(nets[0]) <= 1e-13


@optimizers
@sections
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_clipping_is_a_change_of_gradients(cls, section, clip):
    """torch's clipping sees the gradients of the weights, in the Euclidean norm, and the step takes what it
    leaves."""
    x, y = data()
    nets = loops.Net(), loops.Net()
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
            p.grad = (
                p.grad * (1e-2 / (total + 1e-6)).clamp(max=1.0)
                if clip == "norm"
                else p.grad.clamp(-1e-3, 1e-3)
            )
        for opt in opts:
            opt.step()
    same(loops.values(nets[0]), loops.values(nets[1]))
    assert furthest(nets[0]) <= 4e-6


def test_gradient_clipping_sees_the_weights():
    net = Net()
    opt = build("SGD", net)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    total = torch.nn.utils.clip_grad_norm_([p for g in opt.param_groups for p in g["params"]], 1.0)
    assert total > 1
    opt.step()
    assert STIEFEL.residual(net.a.detach()) <= 1e-13


# -- sparse ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", ["SGD", "Adagrad"])
def test_sparse_gradient(cls):
    """As the dense one on a manifold weight; an embedding on the sphere is the case in mind."""
    embedding = [nn.Embedding(6, 4, sparse=sparse, dtype=torch.float64) for sparse in (True, False)]
    embedding[1].load_state_dict(embedding[0].state_dict())
    opts = []
    for e in embedding:
        ghor.constrain(e, "weight", ghor.Sphere())
        opts.append(getattr(ghor.optim, cls)(e, lr=0.1))
    for _ in range(3):
        for e, opt in zip(embedding, opts, strict=True):
            opt.zero_grad()
            e(torch.tensor([0, 2, 2])).pow(3).sum().backward()
            assert e.weight.grad.is_sparse == e.sparse
            opt.step()
    assert torch.equal(embedding[0].weight, embedding[1].weight)
    assert ghor.Sphere().residual(embedding[0].weight.detach()).max() <= 1e-14
