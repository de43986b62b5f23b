"""Multi-head attention with projections on a space: all heads of Q, K and V are one parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from ghor.constraints.declare import constrain
from ghor.constraints.registry import declare
from ghor.spaces import Space, Stiefel

STIEFEL = Stiefel()
Scale = float | Literal["dim"] | None


def glorot_(p: Tensor, generator: Generator | None = None) -> Tensor:
    """Fill matrices (..., fan_out, fan_in) uniformly in +-sqrt(6 / (fan_in + fan_out)), in place.

    Numbers are drawn on the generator's device, so they do not depend on the device of p.
    """
    device = generator.device if generator is not None else p.device
    drawn = torch.rand(p.shape, generator=generator, dtype=p.dtype, device=device)
    with torch.no_grad():
        return p.copy_(math.sqrt(6 / sum(p.shape[-2:])) * (2 * drawn - 1))


def feed_forward(z: Tensor, A: Tensor, b: Tensor) -> Tensor:
    """z + tanh(A z + b) for (batch, dim, tokens)."""
    B, D, T = z.shape
    z = z.transpose(0, 1).reshape(D, B * T)
    return (z + torch.tanh(torch.addmm(b[:, None], A, z))).view(D, B, T).transpose(0, 1)


def formula(heads: int, x: Tensor, M: Tensor, A: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    """z = concat_h softmax(Q_h^T K_h) V_h, [Q; K; V] = M x for (batch, dim, tokens); then `feed_forward`.

    That only if A and b are given. Features come first in memory, so that the projections of all heads are
    one product, and splitting heads moves whole rows of tokens.
    """
    (B, D, T), H = x.shape, heads
    QKV = M @ x.transpose(0, 1).reshape(D, B * T)
    Q, K, V = QKV.view(3, H, D // H, B, T).transpose(2, 3).reshape(3, H * B, D // H, T).unbind()
    P = torch.softmax(Q.mT @ K, -1)  # (heads * batch, tokens, tokens), each query over the keys
    z = (V @ P.mT).view(H, B, D // H, T).transpose(1, 2).reshape(D, B, T).transpose(0, 1)
    return z if A is None or b is None else feed_forward(z, A, b)


class StiefelAttention(nn.Module):
    """Self-attention with projections on a space, heads concatenated, and no output projection:

        x <- concat_h softmax(scale (x Q_h)(x K_h)^T) x V_h

    `weight` is (3, heads, dim, dim / heads): Q, K and V of every head, each a point of `space` (Stiefel(),
    Grassmann(), or None: Glorot-uniform and unconstrained). `scale` is a number, "dim" for 1 / sqrt(dim), as
    in the paper's experiments, or None for the paper's formula, which has no scale.

    `formula` computes the output; it can be replaced by another function of the same arguments.

    >>> StiefelAttention(49, 7)(torch.randn(2, 16, 49)).shape
    torch.Size([2, 16, 49])
    """

    formula: Callable[..., Tensor] = staticmethod(formula)

    def __init__(
        self,
        dim: int,
        heads: int,
        space: Space | None = STIEFEL,
        scale: Scale = "dim",
        generator: Generator | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if heads < 1 or dim < 1 or dim % heads:
            raise ValueError(f"dim must be a multiple of heads, got dim={dim}, heads={heads}")
        if isinstance(scale, str) and scale != "dim":
            raise ValueError(f"scale is a number, 'dim' or None, got {scale!r}")
        self.dim, self.heads, self.space = dim, heads, space
        self.scale = dim**-0.5 if isinstance(scale, str) else 1.0 if scale is None else float(scale)
        self.weight = nn.Parameter(torch.empty(3, heads, dim, dim // heads, device=device, dtype=dtype))
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
        if p.is_meta:  # values come later, from here or from a state dict
            declare(self, "weight", self.space)
        else:
            constrain(self, "weight", self.space)

    def forward(self, x: Tensor) -> Tensor:
        """(..., tokens, dim) -> (..., tokens, dim)."""
        if x.dim() < 2 or x.shape[-1] != self.dim:
            raise ValueError(f"expected (..., tokens, {self.dim}), got {tuple(x.shape)}")
        batch = math.prod(x.shape[:-2])  # not -1, which has no value if there are no tokens
        return self.tokens_last(x.reshape(batch, *x.shape[-2:]).mT).mT.reshape(x.shape)

    def tokens_last(self, x: Tensor, A: Tensor | None = None, b: Tensor | None = None) -> Tensor:
        """`forward` in the layout (batch, dim, tokens); with A and b followed by x <- x + tanh(A x + b)."""
        # Scaling Q is a pass over the weights instead of one over the scores.
        M = torch.cat([self.weight[:1] * self.scale, self.weight[1:]]).mT.reshape(3 * self.dim, self.dim)
        return self.formula(self.heads, x, M, A, b)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, space={self.space}, scale={self.scale:.4g}"
