"""Methods to compare with.

`ScalarMomentAdam` is the paper's baseline and, like `ghor.optim`, takes weights on any space. Other published
methods are in `ghor_lab.baselines`; they can be imported from here as well.
"""

import importlib
import sys
from typing import Any

from ghor.baselines.scalar_moment_adam import ScalarMomentAdam

__all__ = ["ScalarMomentAdam"]

_MOVED = {
    "AdamSO": "baselines.kong2022",
    "AdamStiefel": "baselines.kong2022",
    "CayleyAdam": "baselines.li2020",
    "CayleySGD": "baselines.li2020",
    "CheapOrthogonal": "baselines.lezcano2019",
    "ManifoldMuon": "baselines.manifold_muon",
    "QRAdam": "baselines.qr_adam",
    "SoftConstraintAdam": "baselines.soft_constraint",
    "Trivialization": "baselines.lezcano2019",
    "soft_constraint": "baselines.soft_constraint",
}

# Pickles of version 0.1.0 look for these classes in modules of their own; `__getattr__` finds them here.
for _module in [
    "kong2022",
    "lezcano2019",
    "li2020",
    "manifold_muon",
    "matrices",
    "qr_adam",
    "soft_constraint",
]:
    sys.modules[f"{__name__}.{_module}"] = sys.modules[__name__]


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"ghor.baselines has no {name}")
    try:
        return getattr(importlib.import_module(f"ghor_lab.{_MOVED[name]}"), name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("ghor_lab"):  # something that the lab itself needs
            raise
        raise ModuleNotFoundError(
            f"ghor.baselines.{name} has moved to ghor_lab, which is not installed: install it from the "
            "source of ghor",
            name=error.name,
        ) from None
