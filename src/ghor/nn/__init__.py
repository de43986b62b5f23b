"""Layers whose weights arrive on their spaces, declared: hand the model to `ghor.optim.Adam`.

The paper's networks, `VisionTransformer` and `SymplecticAutoencoder`, are in `ghor_lab.networks`; they have
their names here as well.
"""

from typing import Any

from ghor.nn.attention import StiefelAttention
from ghor.nn.phase_space import PSD, GradientP, GradientQ, symplecticity

__all__ = ["PSD", "GradientP", "GradientQ", "StiefelAttention", "symplecticity"]

NETWORKS = ("SymplecticAutoencoder", "VisionTransformer")


def __getattr__(name: str) -> Any:
    if name not in NETWORKS:
        raise AttributeError(f"ghor.nn has no {name}")
    import ghor_lab.networks

    return getattr(ghor_lab.networks, name)
