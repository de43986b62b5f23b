"""The symplectic autoencoder of the paper's second experiment, many networks at once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from .phase_space import PSD, Chain, Generators, GradientP, GradientQ, PhaseSpaceMap


class SymplecticAutoencoder(PhaseSpaceMap):
    """R^full_dim -> R^reduced_dim -> R^full_dim, encoder and decoder symplectic: the network of the paper.

    There is a block for each dimension: with `blocks` of them, the halves go from N = full_dim / 2 to
    n = reduced_dim / 2 as

        d_i = N - floor(i (N - n) / (blocks - 1)),  i = 0, ..., blocks - 1

    so that two blocks are full_dim and reduced_dim. The encoder has, for every dimension but the last,
    `encoder_layers` gradient layers and a PSD layer down to the next one. The decoder takes its dimensions
    the other way: for all but the last, `decoder_layers` gradient layers and a PSD layer up, and then
    `decoder_output_layers` at full_dim. Gradient layers of one dimension alternate, GradientQ first; their
    width is upscale * d.

    >>> model = SymplecticAutoencoder(copies=10)
    >>> z = torch.randn(256, 4)
    >>> model.encoder(z).shape, model(z).shape
    (torch.Size([10, 256, 2]), torch.Size([10, 256, 4]))
    """

    def __init__(
        self,
        full_dim: int = 4,
        reduced_dim: int = 2,
        encoder_blocks: int = 2,
        decoder_blocks: int = 2,
        encoder_layers: int = 10,
        decoder_layers: int = 20,
        decoder_output_layers: int = 10,
        upscale: int = 20,
        copies: int = 1,
        generators: Generators = (),
        **factory: Any,
    ) -> None:
        super().__init__(full_dim, full_dim, copies)

        def gradients(dim: int, count: int) -> list[PhaseSpaceMap]:
            width = upscale * (dim // 2)
            return [
                (GradientQ, GradientP)[i % 2](dim, width, copies, generators, **factory) for i in range(count)
            ]

        def blocks(dims: list[int], count: int) -> list[PhaseSpaceMap]:
            layers: list[PhaseSpaceMap] = []
            for dim, following in pairwise(dims):
                layers += [*gradients(dim, count), PSD(dim, following, copies, generators, **factory)]
            return layers

        down = dimensions(full_dim, reduced_dim, encoder_blocks)
        up = dimensions(full_dim, reduced_dim, decoder_blocks)[::-1]
        self.encoder = Chain(blocks(down, encoder_layers))
        self.decoder = Chain([*blocks(up, decoder_layers), *gradients(full_dim, decoder_output_layers)])

    def features_first(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return self.decoder.features_first(*self.encoder.features_first(q, p))


def dimensions(full_dim: int, reduced_dim: int, blocks: int) -> list[int]:
    """Even dimensions from full_dim down to reduced_dim, in steps as equal as possible.

    >>> dimensions(12, 2, 4)
    [12, 10, 6, 2]
    """
    if reduced_dim < 2 or reduced_dim % 2 or reduced_dim >= full_dim:
        raise ValueError(f"reduced_dim must be even and less than full_dim={full_dim}, got {reduced_dim}")
    fall = (full_dim - reduced_dim) // 2
    if not 2 <= blocks <= fall + 1:
        raise ValueError(f"from {full_dim} to {reduced_dim} there are 2 to {fall + 1} blocks, got {blocks}")
    return [full_dim - 2 * (i * fall // (blocks - 1)) for i in range(blocks)]
