"""Layers and networks whose weights arrive on their spaces, declared: hand the model to `ghor.optim.Adam`."""

from .attention import StiefelAttention
from .phase_space import PSD, GradientP, GradientQ, symplecticity
from .symplectic_autoencoder import SymplecticAutoencoder
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
