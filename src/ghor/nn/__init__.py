"""Layers whose weights start on their spaces and are declared, ready for the optimizers of `ghor.optim`.

The paper's networks, `VisionTransformer` and `SymplecticAutoencoder`, are in `ghor_lab.networks`; they can be
imported from here as well.
"""

from ghor.baselines.moved import moved
from ghor.nn.attention import StiefelAttention
from ghor.nn.phase_space import PSD, GradientP, GradientQ, symplecticity

__all__ = ["PSD", "GradientP", "GradientQ", "StiefelAttention", "symplecticity"]

__getattr__ = moved(
    __name__,
    {
        "Block": "networks.vision_transformer",
        "SymplecticAutoencoder": "networks.symplectic_autoencoder",
        "VisionTransformer": "networks.vision_transformer",
    },
    ["symplectic_autoencoder", "vision_transformer"],
)
