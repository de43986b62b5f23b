"""The symplectic autoencoder of the paper's second experiment, many networks at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .phase_space import PSD, Chain, Generators, GradientP, GradientQ, PhaseSpaceMap


class SymplecticAutoencoder(PhaseSpaceMap):
    """R^full_dim -> R^reduced_dim -> R^full_dim, encoder and decoder symplectic: the network of the paper.

    The encoder has `encoder_layers` gradient layers and a PSD layer down, the decoder `decoder_layers`
    gradient layers, a PSD layer up, and `decoder_output_layers` more. Gradient layers alternate, GradientQ
    first; those of dimension 2d have the width upscale * d.

    >>> model = SymplecticAutoencoder(copies=10)
    >>> z = torch.randn(256, 4)
    >>> model.encoder(z).shape, model(z).shape
    (torch.Size([10, 256, 2]), torch.Size([10, 256, 4]))
    """

    def __init__(
        self,
        full_dim: int = 4,
        reduced_dim: int = 2,
        encoder_layers: int = 10,
        decoder_layers: int = 20,
        decoder_output_layers: int = 10,
        upscale: int = 20,
        copies: int = 1,
        generators: Generators = (),
        **factory: Any,
    ) -> None:
        super().__init__(full_dim, full_dim, copies)
        if not reduced_dim < full_dim:
            raise ValueError(f"reduced_dim must be less than full_dim={full_dim}, got {reduced_dim}")

        def gradients(dim: int, count: int) -> list[PhaseSpaceMap]:
            width = upscale * (dim // 2)
            kinds = [(GradientQ, GradientP)[i % 2] for i in range(count)]
            return [kind(dim, width, copies, generators, **factory) for kind in kinds]

        def projection(dim: int, to: int) -> PSD:
            return PSD(dim, to, copies, generators, **factory)

        self.encoder = Chain([*gradients(full_dim, encoder_layers), projection(full_dim, reduced_dim)])
        up = [*gradients(reduced_dim, decoder_layers), projection(reduced_dim, full_dim)]
        self.decoder = Chain([*up, *gradients(full_dim, decoder_output_layers)])

    def features_first(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return self.decoder.features_first(*self.encoder.features_first(q, p))
