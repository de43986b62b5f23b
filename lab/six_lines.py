"""What to write next, for your own model: the end of `make demo`."""

import torch

import ghor

model = torch.nn.Linear(64, 10)  # or yours
ghor.constrain(model, "weight", ghor.Stiefel())  # its 10 rows are orthonormal, and stay so
optimizer = ghor.optim.Adam(model, lr=1e-3)  # biases and all other weights: torch's Adam
# ... your training loop, as it is ...
ghor.check(model)  # how far is each weight from its space?
