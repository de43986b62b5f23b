"""Rules as users write them, and a loss to try them on."""

import torch
from steps import STIEFEL
from torch import nn
from torch.optim import Optimizer

import ghor

DEPENDS = "depends on the value of the weight, or keeps a copy of it"
NOT_ELEMENTWISE = "not odd and elementwise"


class Plain(Optimizer):
    """The smallest optimizer a user may write; subclasses give the velocity."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.velocity(p, p.grad), alpha=-group["lr"])

    def velocity(self, p, g):
        return g


def lifted_or_refused(Base):
    """lift(Base), or None where it is refused as such; any other error is an error."""
    try:
        return ghor.lift(Base)
    except ValueError as error:
        if f"{Base.__name__} cannot be lifted to manifolds: " in str(error):
            return None
        raise


def loss_to(target):
    return lambda Y: (Y - target).square().sum()


def descend(opt, Y, loss, steps):
    values = []
    for _ in range(steps):
        opt.zero_grad()
        value = loss(Y)
        value.backward()
        opt.step()
        values.append(float(value.detach()))
    return values


def drawn(gen, shape=(49, 7)):
    return nn.Parameter(STIEFEL.random(*shape, generator=gen, dtype=torch.float64))
