"""Accelerate: the loop is the usual one; `prepare` wraps model, optimizer and data."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import ghor

x = torch.randn(512, 49, generator=torch.Generator().manual_seed(0))
data = DataLoader(TensorDataset(x, x[:, :7].argmax(dim=1)), batch_size=128)

model = torch.nn.Sequential(torch.nn.Linear(49, 7, bias=False), torch.nn.Linear(7, 7))
ghor.constrain(model[0], "weight", ghor.Stiefel())
optimizer = ghor.optim.AdamW(model, lr=1e-2)

accelerator = Accelerator(cpu=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)

for _ in range(40):
    for batch, target in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch), target)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
print(f"loss {loss.item():.3f}")
ghor.check(model)
