"""The README's example: a transformer whose attention heads have orthonormal queries, keys and values."""

import torch

import ghor

layer = torch.nn.TransformerEncoderLayer(64, nhead=4, dropout=0, batch_first=True)
model = torch.nn.TransformerEncoder(layer, num_layers=2)
# queries, keys and values of each of the 4 heads: 12 orthonormal blocks per layer
ghor.constrain(model, "*.self_attn.in_proj_weight", ghor.Stiefel(blocks=(3, 4)))
optimizer = ghor.optim.AdamW(model, lr=1e-3)  # other weights: torch's AdamW

x = torch.randn(64, 10, 64)
for step in range(101):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), x.roll(1, dims=1))
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
ghor.check(model)  # how far is each weight from its space?
