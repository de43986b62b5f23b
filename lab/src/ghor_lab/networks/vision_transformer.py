"""The vision transformer of the paper's experiments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ghor.spaces import Space
from ghor_lab.networks.attention import STIEFEL, Scale, StiefelAttention, feed_forward, glorot_


def patches(images: Tensor, size: int) -> Tensor:
    """Cut images (batch, height, width) into patches (size^2, batch, tokens).

    Patches, and the pixels in a patch, are numbered column by column.
    """
    B, height, width = images.shape
    # batch, row of patches, row in the patch, column of patches, column in the patch
    grid = images.reshape(B, height // size, size, width // size, size)
    return grid.permute(0, 4, 2, 3, 1).reshape(B, size * size, height * width // size**2).transpose(0, 1)


class TransformerBlock(nn.Module):
    """x <- attention(x); x <- x + tanh(A x + b), on (batch, dim, tokens).

    Both are one call of the attention's `formula`, unless hooks have to see the output of the attention.
    """

    def __init__(self, dim: int, heads: int, space: Space | None, scale: Scale, **factory: Any) -> None:
        super().__init__()
        self.attention = StiefelAttention(dim, heads, space, scale, **factory)
        self.weight = nn.Parameter(torch.empty(dim, dim, **factory))
        self.bias = nn.Parameter(torch.empty(dim, **factory))
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw A Glorot-uniform and set b to zero; the attention has a method of its own."""
        glorot_(self.weight, generator)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, dim, tokens) -> (batch, dim, tokens)."""
        if can_be_fused(self.attention):
            return self.attention.tokens_last(x, self.weight, self.bias)
        return feed_forward(self.attention(x.mT).mT, self.weight, self.bias)


Block = TransformerBlock  # its name in pickles of version 0.1.0


def can_be_fused(module: nn.Module) -> bool:
    """True if fusing the attention with what follows cannot be observed: no hooks, no other `forward`."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    ours = getattr(module.forward, "__func__", None) is StiefelAttention.forward
    return ours and not any(hooks) and not _has_any_global_hook()


class VisionTransformer(nn.Module):
    """Images (batch, 28, 28) to probabilities (batch, classes): the network of the paper.

        x <- patches(image);  16 times: x <- attention(x), x <- x + tanh(A x + b);  softmax(W x_last)

    No positional encoding, no class token, no normalisation, no residual around the attention. With the
    defaults 16 patches of 7 x 7 and 16 * 3 * 7 = 336 projections on St(7, 49). `space` and `scale` go to
    `StiefelAttention`. Euclidean weights are Glorot-uniform, biases zero. For one `generator` seed the
    Euclidean weights outside the attention are the same whatever `space` is.

    >>> VisionTransformer(blocks=2)(torch.rand(5, 28, 28)).shape
    torch.Size([5, 10])
    """

    def __init__(
        self,
        image_size: int = 28,
        patch_size: int = 7,
        blocks: int = 16,
        heads: int = 7,
        classes: int = 10,
        space: Space | None = STIEFEL,
        scale: Scale = "dim",
        generator: Generator | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if patch_size < 1 or image_size % patch_size:
            raise ValueError(
                f"image_size must be a multiple of patch_size, got {image_size} and {patch_size}"
            )
        self.image_size, self.patch_size = image_size, patch_size
        dim, factory = patch_size**2, {"device": device, "dtype": dtype}
        self.blocks = nn.ModuleList(
            TransformerBlock(dim, heads, space, scale, **factory) for _ in range(blocks)
        )
        self.head = nn.Parameter(torch.empty(classes, dim, **factory))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw everything again, the Euclidean weights first, so that they are the same for every space."""
        glorot_(self.head, generator)
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            block.reset_parameters(generator)
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            block.attention.reset_parameters(generator)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 28, 28) or (batch, 1, 28, 28), values in [0, 1] -> (batch, classes), rows of sum 1."""
        x = images.squeeze(1) if images.dim() == 4 else images
        if x.shape[1:] != (self.image_size, self.image_size):
            raise ValueError(
                f"expected images (batch, {self.image_size}, {self.image_size}) of one channel, got "
                f"{tuple(images.shape)}"
            )
        x = patches(x, self.patch_size).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return torch.softmax(x[..., -1] @ self.head.mT, -1)
