"""Correct use, and what comes out: `make lint` fails if mypy complains."""

from typing import assert_type

import torch
from torch import Tensor, nn

import ghor

layer: nn.Linear = ghor.constrain(nn.Linear(49, 7), "weight", ghor.Stiefel())
moved: dict[str, float] = ghor.constrain(nn.Sequential(nn.Linear(4, 3)), ["*.weight"], ghor.Stiefel())
ghor.constrain(nn.Linear(4, 3), "weight", lambda name, p: ghor.Stiefel(), anchor="start")
ghor.Stiefel(blocks=(3, 4), along="columns")
ghor.Stiefel(flatten=3)
ghor.Sphere()
opt = ghor.optim.Adam(layer, lr=1e-3, betas=(0.9, 0.99), retraction="geodesic", section="implicit")
ghor.optim.AdamW(
    [{"params": [layer.weight], "space": ghor.Stiefel()}], 1e-3, weight_decay=0.1, anchor="start"
)
ghor.optim.SGD(layer.parameters(), lr=torch.tensor(0.1), momentum=0.9, max_angle=0.3)
ghor.optim.Muon(layer, lr=0.02, adamw={"lr": 3e-4}, adamw_names=["bias"], space=ghor.Stiefel())
ghor.optim.LBFGS(layer, line_search_fn="strong_wolfe")
ghor.lift(torch.optim.Adam)(layer, lr=1e-3)
opt.step()
Y = ghor.Stiefel().random(20, 3, dtype=torch.float64)
b = torch.zeros(5)
one = ghor.minimize(lambda Y: -Y.square().sum(), Y, ghor.Stiefel(), "trust-region", max_seconds=5)
assert_type(one.x, Tensor)
assert_type(one.history[0], dict[str, float])
named = ghor.minimize(lambda x: (x["Y"].sum(1) - x["b"]).sum(), {"Y": Y, "b": b}, {"Y": ghor.Stiefel()})
assert_type(named.x, dict[str, Tensor])
several = ghor.minimize(lambda x: (x[0] @ x[1].mT).sum(), [Y, Y], ghor.Stiefel(), callback=print)
assert_type(several.x, list[Tensor])
pair = ghor.minimize(lambda x: x[0].sum(), (Y, b), [ghor.Stiefel(), ghor.Euclidean()], retraction="geodesic")
assert_type(pair.x, tuple[Tensor, Tensor])
