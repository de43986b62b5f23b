"""The vision transformer of the paper's experiments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn

import ghor

from .attention import STIEFEL, Scale, StiefelAttention, glorot_


def patches(images: Tensor, size: int) -> Tensor:
    """Cut images (batch, height, width) into patches (size^2, batch, tokens).

    Patches, and the pixels in a patch, are numbered column by column.
    """
    B, height, width = images.shape
    # batch, row of patches, row in the patch, column of patches, column in the patch
    grid = images.reshape(B, height // size, size, width // size, size)
    return grid.permute(0, 4, 2, 3, 1).reshape(B, size * size, height * width // size**2).transpose(0, 1)


class TransformerBlock(nn.Module):
    """x <- attention(x); x <- x + tanh(A x + b), on (dim, batch, tokens)."""

    def __init__(self, dim: int, heads: int, space: ghor.Space | None, scale: Scale, **factory: Any) -> None:
        super().__init__()
        self.attention = StiefelAttention(dim, heads, space, scale, **factory)
        self.weight = nn.Parameter(torch.empty(dim, dim, **factory))
        self.bias = nn.Parameter(torch.empty(dim, **factory))

    def forward(self, x: Tensor) -> Tensor:
        """(dim, batch, tokens) -> (dim, batch, tokens)."""
        z = self.attention.features_first(x).flatten(1)
        return (z + torch.tanh(torch.addmm(self.bias[:, None], self.weight, z))).view(x.shape)


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
        patch_size: int = 7,
        blocks: int = 16,
        heads: int = 7,
        scale: Scale = "dim",
        space: ghor.Space | None = STIEFEL,
        image_size: int = 28,
        classes: int = 10,
        generator: Generator | None = None,
        **factory: Any,
    ) -> None:
        super().__init__()
        if patch_size < 1 or image_size % patch_size:
            raise ValueError(
                f"image_size must be a multiple of patch_size, got {image_size} and {patch_size}"
            )
        self.patch_size, dim = patch_size, patch_size**2
        made = [TransformerBlock(dim, heads, space, scale, **factory) for _ in range(blocks)]
        self.blocks = nn.ModuleList(made)
        self.head = nn.Parameter(torch.empty(classes, dim, **factory))
        # the Euclidean weights first, so that they are the same for every space
        glorot_(self.head, generator)
        for block in made:
            glorot_(block.weight, generator)
            nn.init.zeros_(block.bias)
        for block in made:
            block.attention.reset_parameters(generator)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 28, 28), values in [0, 1] -> (batch, classes), rows of sum 1."""
        x = patches(images, self.patch_size)
        for block in self.blocks:
            x = block(x)
        return torch.softmax(x[..., -1].mT @ self.head.mT, -1)
