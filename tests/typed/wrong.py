"""Mistakes: `make lint` fails if mypy does not see one of them (`type: ignore` would be unused)."""

from torch import nn

import ghor

layer = ghor.constrain(nn.Linear(49, 7), "weight", ghor.Stiefel())
ghor.constrain(layer, ["*.weight"], ghor.Stiefel()).parameters()  # type: ignore[attr-defined]
moved: dict[str, float] = ghor.constrain(nn.Linear(49, 7), "weight", ghor.Stiefel())  # type: ignore[assignment]
ghor.constrain(layer, "weight", ghor.Stiefel)  # type: ignore[arg-type]
ghor.constrain(layer, "weight", ghor.Stiefel(), anchor="begin")  # type: ignore[call-overload]
ghor.Stiefel(block=3)  # type: ignore[call-arg]
ghor.Stiefel(blocks="3")  # type: ignore[arg-type]
ghor.Stiefel(blocks=3, along="column")  # type: ignore[arg-type]
ghor.Stiefel(5, 3)  # type: ignore[call-arg]
ghor.optim.Adam(layer, learning_rate=1e-3)  # type: ignore[call-arg]
ghor.optim.Adam(layer, lr="a")  # type: ignore[arg-type]
ghor.optim.Adam(layer, retraction="qr")  # type: ignore[arg-type]
ghor.optim.SGD(layer, lr=0.1, section="implict")  # type: ignore[arg-type]
ghor.optim.AdamW(layer, space="Stiefel")  # type: ignore[arg-type]
ghor.optim.RMSprop(layer, betas=(0.9, 0.99))  # type: ignore[call-arg]
ghor.optim.Muon(layer, adjust_lr_fn="orignal")  # type: ignore[arg-type]
ghor.optim.Adom(layer)  # type: ignore[attr-defined]
ghor.optim.LBFGS(layer, line_search_fn="wolfe")  # type: ignore[arg-type]
Y = ghor.Stiefel().random(20, 3)
ghor.minimize(lambda Y: Y.sum(), Y, ghor.Stiefel(), method="trustregion")  # type: ignore[arg-type]
ghor.minimize(lambda Y: Y.sum(), Y, ghor.Stiefel(), retraction="caley")  # type: ignore[arg-type]
ghor.minimize(lambda Y: Y.sum(), Y, ghor.Stiefel(), section="implict")  # type: ignore[arg-type]
ghor.minimize(lambda Y: Y.sum(), Y, ghor.Stiefel(), max_iter=5)  # type: ignore[call-arg]
ghor.minimize(lambda Y: Y.sum(), Y, ghor.Stiefel)  # type: ignore[arg-type]
ghor.minimize(lambda Y: Y.sum(), 1.0)  # type: ignore[type-var, attr-defined]
result = ghor.minimize(lambda Y: Y.sum(), Y, ghor.Stiefel())
result.x.transpoze(0, 1)  # type: ignore[attr-defined]
