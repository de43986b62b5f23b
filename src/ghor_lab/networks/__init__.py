"""The networks of the paper, the vision transformer and the symplectic autoencoder, and a language model."""

from ghor_lab.networks.decoder import Decoder
from ghor_lab.networks.symplectic_autoencoder import SymplecticAutoencoder
from ghor_lab.networks.vision_transformer import TransformerBlock, VisionTransformer

__all__ = ["Decoder", "SymplecticAutoencoder", "TransformerBlock", "VisionTransformer"]
