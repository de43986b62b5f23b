"""The README's example: find 7 of 49 coordinates with an orthonormal layer."""

import torch

import ghor

x = torch.randn(512, 49)
target = x[:, :7].argmax(dim=1)  # only 7 directions matter

model = torch.nn.Sequential(torch.nn.Linear(49, 7, bias=False), torch.nn.Linear(7, 7))
ghor.constrain(model[0], "weight", ghor.Stiefel())  # moves the weight onto the space and declares it
optimizer = ghor.optim.AdamW(model, lr=1e-2)  # the other weights: ordinary AdamW

for step in range(301):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), target)
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
ghor.check(model)  # how far is each weight from its space?
