"""A model with weights of every kind, to be spread over processes; and how far it is then from one that is
not.

1e-12: ten steps of an optimizer on numbers of order one whose gradients were summed in another order, some
eps each.
"""

import torch
from torch import nn

import ghor
from helpers.table import point, randn

STIEFEL = ghor.Stiefel()
TOLERANCE = 1e-12
OPTIONS = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9}}


SPACES = {
    "rows": ((7, 3), STIEFEL),
    "more": ((7, 3), STIEFEL),
    "wide": ((3, 8), STIEFEL),
    "heads": ((3, 6, 2), STIEFEL),
    "single": ((1, 6, 2), STIEFEL),
    "plane": ((5, 2), ghor.Grassmann()),
    "turn": ((4, 4), ghor.SpecialOrthogonal()),
    "pairs": ((6, 4), ghor.SymplecticStiefel()),
    "units": ((5, 4), ghor.Sphere()),
}


class Net(nn.Module):
    """Weights of every kind: matrices with an odd number of rows, by rows, batches of 3 and of 1, unit
    vectors, and Euclidean ones."""

    def __init__(self, names=tuple(SPACES), implicit=False):
        super().__init__()
        gen = torch.Generator().manual_seed(0)
        for n, (shape, space) in SPACES.items():
            if n in names and (space.implicit or not implicit):
                self.register_parameter(n, nn.Parameter(point(space, shape, gen)))
                ghor.constrain(self, n, space)
        self.last = nn.Linear(len(list(self.parameters())), 1, dtype=torch.float64)
        with torch.no_grad():
            for p in self.last.parameters():
                p.copy_(randn(tuple(p.shape), gen))
        self.weights = [n for n, _ in self.named_parameters(recurse=False)]

    def forward(self, x):
        """Of each sample (as many numbers as the largest weight has) one number for each weight, and their
        loss."""
        features = [
            torch.tanh(x[:, : getattr(self, n).numel()] @ getattr(self, n).flatten()) for n in self.weights
        ]
        return self.last(torch.stack(features, -1)).sub(x[:, :1]).square().mean()


def build(cls, model, section="auto", **options):
    return getattr(ghor.optim, cls)(model, lr=0.01, section=section, **OPTIONS.get(cls, {}) | options)


def batches(steps=10):
    gen = torch.Generator().manual_seed(1)
    return [randn((8, 49), gen) for _ in range(steps)]


def train(model, opt, data):
    for x in data:
        opt.zero_grad()
        model(x).backward()
        opt.step()


def whole(t):
    t = t.detach()
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def difference(model, other):
    a, b = dict(model.named_parameters()), dict(other.named_parameters())
    return max(float((whole(a[n]) - whole(b[n])).abs().max()) for n in a)


def mine(rank, data):
    return [x[4 * rank : 4 * rank + 4] for x in data]


def shard(net, how="fsdp"):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    if how == "hsdp":
        return fully_shard(net, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards")))
    if how == "columns":  # where torch can: it wants equal shards there
        return fully_shard(
            net, shard_placement_fn=lambda p: Shard(p.dim() - 1 if p.shape[-1] % 2 == 0 else 0)
        )
    return fully_shard(net)
