"""A plain decoder for bytes: RMSNorm, rotary positions, causal attention, the embedding as head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

BYTES = 256


class Matrix(nn.Module):
    """x -> x W^T, or x -> (x W^T) s: `scale` has a learned number for each of `parts` equal groups of rows.

    A weight on a space of fixed size needs the scale.
    """

    scale: Tensor | None

    def __init__(self, rows: int, columns: int, parts: int = 1, **factory: Any) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(rows, columns, **factory))
        self.register_parameter("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        """(..., columns) -> (..., rows)."""
        if self.scale is None:
            return F.linear(x, self.weight)
        # a pass over the weight instead of one over the tokens
        W = self.weight.unflatten(0, (self.parts, -1)) * self.scale[:, None, None]
        return F.linear(x, W.flatten(0, 1))


def rotations(context: int, size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (context, size/2) of the angles t 10000^(-2i/size), position t, pair i."""
    rates = 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(context, dtype=torch.float64)[:, None] * rates
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_(i + size/2)) of (..., tokens, size) by the angles of their positions."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Layer(nn.Module):
    """x <- x + o(attention(norm(x)));  x <- x + down(relu(up(norm(x)))^2)."""

    def __init__(self, width: int, heads: int, **factory: Any) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width, **factory)
        self.q, self.k, self.v = (Matrix(width, width, heads, **factory) for _ in range(3))
        self.o = Matrix(width, width, **factory)
        self.feed_norm = nn.RMSNorm(width, **factory)
        self.up, self.down = Matrix(4 * width, width, **factory), Matrix(width, 4 * width, **factory)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, tokens, width) -> (batch, tokens, width)."""
        z = self.attention_norm(x)
        q, k, v = (f(z).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).flatten(-2))
        return x + self.down(F.relu(self.up(self.feed_norm(x))).square())


class Decoder(nn.Module):
    """Bytes (batch, tokens) to the logits (batch, tokens, 256) of the bytes that follow.

    With the defaults 820,352 weights: 24 matrices, the embedding, which is also the head, and gains of norms.
    Matrices are normal with variance 1/columns, those that end a residual branch with 1/(2 layers) of that.

    >>> Decoder(layers=1, width=16, heads=2, context=8)(torch.zeros(3, 8, dtype=torch.long)).shape
    torch.Size([3, 8, 256])
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        context: int = 128,
        generator: Generator | None = None,
        **factory: Any,
    ) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"width must be a multiple of 2 * heads, got width={width}, heads={heads}")
        self.embedding = nn.Embedding(BYTES, width, **factory)
        self.layers = nn.ModuleList(Layer(width, heads, **factory) for _ in range(layers))
        self.norm = nn.RMSNorm(width, **factory)
        for name, values in zip(("cos", "sin"), rotations(context, width // heads), strict=True):
            self.register_buffer(name, values.to(self.embedding.weight), persistent=False)
        sizes = {self.embedding.weight: 0.02}
        for name, matrix in self.matrices().items():
            of_branch = (2 * layers) ** -0.5 if name.endswith((".o", ".down")) else 1.0
            sizes[matrix.weight] = matrix.weight.shape[1] ** -0.5 * of_branch
        with torch.no_grad():
            for p, size in sizes.items():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * size)

    def matrices(self) -> dict[str, Matrix]:
        """The modules of the 24 matrices, by name."""
        return {name: m for name, m in self.named_modules() if isinstance(m, Matrix)}

    def forward(self, text: Tensor) -> Tensor:
        """(batch, tokens) -> (batch, tokens, 256)."""
        x, tokens = self.embedding(text), text.shape[-1]
        for layer in self.layers:
            x = layer(x, self.cos[:tokens], self.sin[:tokens])
        return F.linear(self.norm(x), self.embedding.weight)
