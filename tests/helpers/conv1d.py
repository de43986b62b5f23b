"""Hugging Face's Conv1D, of which GPT-2 is made, without its library: a linear layer whose weight is in x
out."""

import torch
from torch import nn


class Conv1D(nn.Module):
    def __init__(self, nf, nx):
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.02 * torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"  # by which it is known
