"""Layers and networks whose weights arrive on their spaces, declared: hand the model to `ghor.optim.Adam`."""

from .attention import StiefelAttention
from .symplectic_autoencoder import PSD, GradientP, GradientQ, SymplecticAutoencoder, symplecticity
from .vision_transformer import VisionTransformer

__all__ = [
    "PSD",
    "GradientP",
    "GradientQ",
    "StiefelAttention",
    "SymplecticAutoencoder",
    "VisionTransformer",
    "symplecticity",
]
