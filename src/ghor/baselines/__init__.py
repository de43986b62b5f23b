"""Methods to compare with.

`ScalarMomentAdam` is the paper's baseline, like `ghor.optim` on weights of any space. The other published
methods are in `ghor_lab.baselines`; they have their names here as well.
"""

from typing import Any

from ghor.baselines.scalar_moment_adam import ScalarMomentAdam

__all__ = ["ScalarMomentAdam"]

PUBLISHED = (
    "AdamSO",
    "AdamStiefel",
    "CayleyAdam",
    "CayleySGD",
    "CheapOrthogonal",
    "ManifoldMuon",
    "QRAdam",
    "SoftConstraintAdam",
    "Trivialization",
    "soft_constraint",
)


def __getattr__(name: str) -> Any:
    if name not in PUBLISHED:
        raise AttributeError(f"ghor.baselines has no {name}")
    import ghor_lab.baselines

    return getattr(ghor_lab.baselines, name)
