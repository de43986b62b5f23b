"""Weights of several kinds, gradients, and steps of any lifted class: what most tests of optimizers begin
with."""

import copy
import io

import pytest
import torch
from torch import nn

import ghor
from helpers.table import randn

STIEFEL = ghor.Stiefel()
classes = pytest.mark.parametrize("cls", ghor.optim.__all__)
sections = pytest.mark.parametrize("section", ["transported", "implicit"])

# More of an optimizer's options than the defaults: state of every kind it can have.
OPTIONS = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {"amsgrad": True},
    "RMSprop": {"momentum": 0.9},
    "Muon": {"adamw": {"weight_decay": 0.0}},
}
OURS = ("section", "frame_anchor", "master", "moves")


class Net(nn.Module):
    """Two weights of one kind, one by its rows, one on another space, and a Euclidean one."""

    def __init__(self, dtype=torch.float64, seed=0):
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        self.a, self.b, self.wide = (
            nn.Parameter(STIEFEL.random(*shape, generator=gen, dtype=torch.float64).to(dtype))
            for shape in ((7, 3), (7, 3), (2, 6))
        )
        self.sphere = nn.Parameter(ghor.Sphere().random(4, 5, generator=gen, dtype=torch.float64).to(dtype))
        self.bias = nn.Parameter(randn((4,), gen, dtype))
        for n in ("a", "b", "wide"):
            ghor.constrain(self, n, STIEFEL)
        ghor.constrain(self, "sphere", ghor.Sphere())


def build(cls, net, lr=1e-2, **options):
    return getattr(ghor.optim, cls)(net, lr=lr, **OPTIONS.get(cls, {}) | options)


def needs_late_state(cls):
    """Skips Adagrad where torch's own makes its state in the constructor only."""
    if cls == "Adagrad":
        p = nn.Parameter(torch.ones(1))
        opt, p.grad = torch.optim.Adagrad([p]), torch.ones(1)
        opt.state.clear()
        try:
            opt.step()
        except KeyError:
            pytest.skip("torch's Adagrad has no state for weights that come later")


def gradients(net, steps, seed=1):
    gen = torch.Generator().manual_seed(seed)
    return [[randn(tuple(p.shape), gen, p.dtype) for p in net.parameters()] for _ in range(steps)]


def train(net, opt, steps):
    """Steps with given gradients, one list a step; None is no gradient."""
    for step in steps:
        for p, g in zip(net.parameters(), step, strict=True):
            p.grad = g if g is None else g.clone()
        opt.step()


def values(net):
    return [p.detach().clone() for p in net.parameters()]


def weight(*shape, dtype=torch.float32, seed=0):
    return nn.Parameter(STIEFEL.random(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))


def take_steps(opt, gen, n=1):
    """Steps of any optimizer with random gradients."""
    for _ in range(n):
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = randn(tuple(p.shape), gen, p.dtype)
        opt.step()


def frame_of(opt, p, keys=("section", "frame_anchor")):
    """A copy of what of the state is ours."""
    return {k: v.clone() for k, v in opt.state[p].items() if k in keys}


def state_of(opt):
    return dict(sorted(copy.deepcopy(opt.state_dict()["state"]).items()))


def same(a, b, atol=0.0, rtol=0.0):
    """Values, shapes and dtypes, through lists and dicts; to the bit if nothing else is said."""
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def exact(cls, dtype=torch.float64):
    """How many of the weights resume to the bit: all but the last, Euclidean one in NAdam, whose `mu_product`
    torch's own load_state_dict casts to the weight's dtype."""
    return -1 if cls == "NAdam" and dtype != torch.float32 else None


def through_a_file(value, weights_only=True):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


def beside_torch(lifted, plain, gen, steps):
    """Euclidean weights, one on Stiefel beside them, gradients missing at times: values and state are those
    of torch's class to the bit."""
    start = [randn(shape, gen, torch.float32) for shape in [(5, 3), (4,), (), (2, 3, 4)]]
    ours, theirs = ([nn.Parameter(x.clone()) for x in start] for _ in range(2))
    Y = nn.Parameter(STIEFEL.random(6, 2, generator=gen))
    opt, ref = lifted([{"params": ours}, {"params": [Y], "space": STIEFEL}]), plain(theirs)
    for step in range(steps):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = randn(tuple(p.shape), gen, torch.float32) if (step + i) % 5 else None
            q.grad = None if p.grad is None else p.grad.clone()
        Y.grad = randn((6, 2), gen, torch.float32)
        opt.step()
        ref.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        for key, value in ref.state[q].items():
            assert torch.equal(torch.as_tensor(opt.state[p][key]), torch.as_tensor(value)), key
    assert STIEFEL.residual(Y.detach().double()) < 2e-6
