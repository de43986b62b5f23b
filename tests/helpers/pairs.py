"""Two weights of one kind, of every kind of space, and a loss that draws them to targets."""

import torch
from torch import nn

import ghor

C = torch.complex128
KINDS = {
    "complex Stiefel": (ghor.Stiefel(), (5, 2), C),
    "Unitary": (ghor.Unitary(), (3, 3), C),
    "Sphere": (ghor.Sphere(), (4, 3), torch.float64),
    "Hyperbolic": (ghor.Hyperbolic(), (4, 3), torch.float64),
    "Hyperbolic transported": (ghor.Hyperbolic(), (4, 3), torch.float64),
    "SpecialEuclidean": (ghor.SpecialEuclidean(), (3, 4), torch.float64),
    "PositionsOrientations": (ghor.PositionsOrientations(), (4, 2, 3), torch.float64),
    "SPD": (ghor.SPD(), (3, 3), torch.float64),
    "SymplecticStiefel": (ghor.SymplecticStiefel(), (6, 2), torch.float64),
    "SymplecticGrassmann": (ghor.SymplecticGrassmann(), (6, 2), torch.float64),
}


class Net(nn.Module):
    """Two weights on a space, and targets there."""

    def __init__(self, space, shape, dtype):
        super().__init__()
        gen = torch.Generator().manual_seed(0)
        self.a, self.b = (nn.Parameter(space.random(*shape, generator=gen, dtype=dtype)) for _ in range(2))
        self.targets = [space.random(*shape, generator=gen, dtype=dtype) for _ in range(2)]

    def loss(self):
        pairs = zip((self.a, self.b), self.targets, strict=True)
        return sum((p - t).abs().square().sum() for p, t in pairs)


def train(net, opt, steps):
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = net.loss()
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return losses
