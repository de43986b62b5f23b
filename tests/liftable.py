"""A small rule to derive others from, and whether the lift refuses them."""

import torch
from torch import nn
from torch.optim import Optimizer

import ghor

ST = ghor.Stiefel()
NO = "cannot be lifted to manifolds: "


class Rule(Optimizer):
    """The smallest optimizer; subclasses give the velocity."""

    def __init__(self, params, lr=0.1, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(group, p, p.grad)

    def move(self, group, p, g):
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(self.velocity(g, group), alpha=-group["lr"])

    def velocity(self, g, group):
        return g


def points(space, shape, count=2, dtype=torch.float64):
    gen = torch.Generator().manual_seed(0)
    return [nn.Parameter(space.random(*shape, generator=gen, dtype=dtype)) for _ in range(count)]


def refusal(Base, space=ST, shape=(9, 3), stack=True, count=2, dtype=torch.float64, group=None, **options):
    """The reason why Base is refused there, or None."""
    try:
        Lifted = ghor.lift(Base, stack=stack)
        params = {"params": points(space, shape, count, dtype), **(group or {})}
        Lifted([params], space=space, **options)
    except ValueError as error:
        if NO in str(error):
            return str(error).split(NO)[1]
        raise
    return None
