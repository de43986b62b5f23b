"""Mistakes: a type checker reports exactly the lines that end in `# wrong`."""

from torch import nn

import ghor

layer = ghor.constrain(nn.Linear(49, 7), "weight", ghor.Stiefel())
ghor.constrain(layer, ["*.weight"], ghor.Stiefel()).parameters()  # wrong
moved: dict[str, float] = ghor.constrain(nn.Linear(49, 7), "weight", ghor.Stiefel())  # wrong
ghor.constrain(layer, "weight", ghor.Stiefel)  # wrong
ghor.constrain(layer, "weight", ghor.Stiefel(), anchor="begin")  # wrong
ghor.Stiefel(block=3)  # wrong
ghor.Stiefel(blocks="3")  # wrong
ghor.Stiefel(blocks=3, along="column")  # wrong
ghor.Stiefel(5, 3)  # wrong
ghor.optim.Adam(layer, learning_rate=1e-3)  # wrong
ghor.optim.Adam(layer, lr="a")  # wrong
ghor.optim.Adam(layer, retraction="qr")  # wrong
ghor.optim.SGD(layer, lr=0.1, section="implict")  # wrong
ghor.optim.AdamW(layer, space="Stiefel")  # wrong
ghor.optim.RMSprop(layer, betas=(0.9, 0.99))  # wrong
ghor.optim.Muon(layer, adjust_lr_fn="orignal")  # wrong
ghor.optim.Adom(layer)  # wrong
ghor.optim.LBFGS(layer, line_search_fn="wolfe")  # wrong
Y = ghor.Stiefel().random(20, 3)
ghor.minimize(lambda Y: Y.sum(), Y, ghor.Stiefel(), method="trustregion")  # wrong
result = ghor.minimize(lambda Y: Y.sum(), Y, ghor.Stiefel())
result.x.transpoze(0, 1)  # wrong
