"""Layers whose weights start on their spaces and are declared, ready for the optimizers of `ghor.optim`.

The paper's networks, `VisionTransformer` and `SymplecticAutoencoder`, are in `ghor_lab.networks`; they can be
imported from here as well.
"""

import importlib
import sys
from typing import Any

from ghor.nn.attention import StiefelAttention
from ghor.nn.phase_space import PSD, GradientP, GradientQ, symplecticity

__all__ = ["PSD", "GradientP", "GradientQ", "StiefelAttention", "symplecticity"]

_MOVED = {
    "Block": "networks.vision_transformer",
    "SymplecticAutoencoder": "networks.symplectic_autoencoder",
    "VisionTransformer": "networks.vision_transformer",
}

# Pickles of version 0.1.0 look for these classes in modules of their own; `__getattr__` finds them here.
for _module in ["symplectic_autoencoder", "vision_transformer"]:
    sys.modules[f"{__name__}.{_module}"] = sys.modules[__name__]


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"ghor.nn has no {name}")
    try:
        return getattr(importlib.import_module(f"ghor_lab.{_MOVED[name]}"), name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("ghor_lab"):  # something that the lab itself needs
            raise
        raise ModuleNotFoundError(
            f"ghor.nn.{name} has moved to ghor_lab, which is not installed: install it from the "
            "source of ghor",
            name=error.name,
        ) from None
