"""Layers and networks whose weights arrive on their spaces, declared: hand the model to `ghor.optim.Adam`."""

from .attention import StiefelAttention
from .vision_transformer import VisionTransformer

__all__ = ["StiefelAttention", "VisionTransformer"]
