"""A network and a loss as training loops have them: weights on three spaces, Euclidean ones, running
statistics."""

import torch
from torch import nn

import ghor
from ghor.baselines import ScalarMomentAdam
from helpers.table import is_flat, randn

OPTIMIZERS = [ghor.optim.SGD, ghor.optim.Adam, ScalarMomentAdam]


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
        ghor.constrain(self, "tall.weight", ghor.Stiefel())
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


def furthest(net):
    """The largest distance of a weight from its space, measured in float64."""
    found = [(p, s) for _, p, s in ghor.constraints.declared_spaces(net) if not is_flat(s)]
    return max(float(s.residual(p.detach().double()).max()) for p, s in found)
