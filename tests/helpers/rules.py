"""Rules as users write them, rules of other libraries, and a loss to try them on."""

import torch
from torch import nn
from torch.optim import Optimizer

from helpers.steps import STIEFEL


class Rule(Optimizer):
    """The smallest optimizer a user may write; subclasses give the velocity, or the whole move."""

    def __init__(self, params, lr=0.1, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(group, p, p.grad)

    def move(self, group, p, g):
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(self.velocity(p, g), alpha=-group["lr"])

    def velocity(self, p, g):
        return g


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
