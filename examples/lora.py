"""LoRA with orthonormal factors: W = W0 + U diag(s) V^T, U and V on the Stiefel manifold.

The frozen weight W0 does not change. The update has rank 4, and s holds its singular values at every step.
"""

import torch
from torch import nn
from torch.nn.utils import parametrize

import ghor


class LowRank(nn.Module):
    def __init__(self, weight, rank):
        super().__init__()
        self.U, self.V = (nn.Parameter(torch.randn(size, rank)) for size in weight.shape)
        self.s = nn.Parameter(torch.zeros(rank))
        for factor in ("U", "V"):
            ghor.constrain(self, factor, ghor.Stiefel())

    def forward(self, weight):
        return weight + (self.U * self.s) @ self.V.mT


torch.manual_seed(0)
layer = nn.Linear(32, 16).requires_grad_(False)
target = nn.Linear(32, 16)
target.load_state_dict(layer.state_dict())
with torch.no_grad():
    target.weight += torch.randn(16, 4) @ torch.randn(4, 32) / 4  # what there is to learn

parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank=4))
optimizer = ghor.optim.Adam(ghor.param_groups(layer), lr=5e-2)  # param_groups leaves out what is frozen

for step in range(501):
    x = torch.randn(64, 32)
    optimizer.zero_grad()
    loss = (layer(x) - target(x)).square().mean()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.1e}")
ghor.check(layer)
