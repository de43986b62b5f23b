"""Multi-head attention with projections on a space: all heads of Q, K and V are one parameter."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

import ghor

STIEFEL = ghor.Stiefel()
Scale = float | Literal["dim"] | None


def glorot_(p: Tensor, generator: Generator | None = None) -> Tensor:
    """Fill matrices (..., fan_out, fan_in) uniformly in +-sqrt(6 / (fan_in + fan_out)), in place.

    Numbers are drawn on the generator's device, so they do not depend on the device of p.
    """
    device = generator.device if generator is not None else p.device
    drawn = torch.rand(p.shape, generator=generator, dtype=p.dtype, device=device)
    with torch.no_grad():
        return p.copy_(math.sqrt(6 / sum(p.shape[-2:])) * (2 * drawn - 1))


class StiefelAttention(nn.Module):
    """Self-attention with projections on a space, heads concatenated, and no output projection:

        x <- concat_h softmax(scale (x Q_h)(x K_h)^T) x V_h

    `weight` is (3, heads, dim, dim / heads): Q, K and V of every head, each a point of `space` (Stiefel(),
    Grassmann(), or None: Glorot-uniform and unconstrained). `scale` is a number, "dim" for 1 / sqrt(dim), as
    in the paper's experiments, or None for the paper's formula, which has no scale.

    >>> StiefelAttention(49, 7)(torch.randn(2, 16, 49)).shape
    torch.Size([2, 16, 49])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        space: ghor.Space | None = STIEFEL,
        scale: Scale = "dim",
        generator: Generator | None = None,
        **factory: Any,
    ) -> None:
        super().__init__()
        if heads < 1 or dim < 1 or dim % heads:
            raise ValueError(f"dim must be a multiple of heads, got dim={dim}, heads={heads}")
        if isinstance(scale, str) and scale != "dim":
            raise ValueError(f"scale is a number, 'dim' or None, got {scale!r}")
        self.dim, self.heads, self.space = dim, heads, space
        self.scale = dim**-0.5 if isinstance(scale, str) else 1.0 if scale is None else float(scale)
        self.weight = nn.Parameter(torch.empty(3, heads, dim, dim // heads, **factory))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw weights uniformly on the space and declare them; Glorot-uniform if there is no space."""
        p = self.weight
        if self.space is None:
            glorot_(p, generator)
            return
        device = generator.device if generator is not None else p.device
        with torch.no_grad():
            p.copy_(self.space.random(*p.shape, generator=generator, dtype=p.dtype, device=device))
        ghor.constrain(self, "weight", self.space)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim)."""
        return self.features_first(x.permute(2, 0, 1)).permute(1, 2, 0)

    def features_first(self, x: Tensor) -> Tensor:
        """`forward` in the layout (dim, batch, tokens).

        There the projections of all heads are one product, and splitting heads moves whole rows of tokens.
        """
        (D, B, T), H = x.shape, self.heads
        # scaling Q is a pass over the weights instead of one over the scores
        M = torch.cat([self.weight[:1] * self.scale, self.weight[1:]]).mT.reshape(3 * D, D)
        QKV = (M @ x.reshape(D, B * T)).view(3, H, D // H, B, T)
        Q, K, V = QKV.transpose(2, 3).reshape(3, H * B, D // H, T).unbind()
        P = torch.softmax(Q.mT @ K, -1)  # (heads * batch, tokens, tokens), each query over the keys
        return (V @ P.mT).view(H, B, D // H, T).transpose(1, 2).reshape(D, B, T)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, space={self.space}, scale={self.scale:.4g}"
