"""The networks of the paper: the vision transformer and the symplectic autoencoder."""

from ghor_lab.networks.symplectic_autoencoder import SymplecticAutoencoder
from ghor_lab.networks.vision_transformer import TransformerBlock, VisionTransformer

__all__ = ["SymplecticAutoencoder", "TransformerBlock", "VisionTransformer"]
