"""The networks of the paper, their layers, and a language model."""

from .attention import StiefelAttention
from .decoder import Decoder
from .phase_space import PSD, GradientP, GradientQ, symplecticity
from .symplectic_autoencoder import SymplecticAutoencoder
from .vision_transformer import TransformerBlock, VisionTransformer

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
