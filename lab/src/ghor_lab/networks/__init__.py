"""The networks of the paper, their layers, and a language model."""

from ghor_lab.networks.attention import StiefelAttention
from ghor_lab.networks.decoder import Decoder
from ghor_lab.networks.phase_space import PSD, GradientP, GradientQ, symplecticity
from ghor_lab.networks.symplectic_autoencoder import SymplecticAutoencoder
from ghor_lab.networks.vision_transformer import TransformerBlock, VisionTransformer

__all__ = [
    "PSD",
    "Decoder",
    "GradientP",
    "GradientQ",
    "StiefelAttention",
    "SymplecticAutoencoder",
    "TransformerBlock",
    "VisionTransformer",
    "symplecticity",
]
