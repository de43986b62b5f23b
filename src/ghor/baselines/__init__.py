"""What the paper compares with, one file a method.

`ScalarMomentAdam` is the paper's baseline, like `ghor.optim` on weights of any space. The others are methods as they
were published, on matrices of Stiefel or SO(N): what each gives up is in its docstring.
"""

from .kong2022 import AdamSO, AdamStiefel
from .lezcano2019 import CheapOrthogonal, Trivialization
from .li2020 import CayleyAdam, CayleySGD
from .manifold_muon import ManifoldMuon
from .qr_adam import QRAdam
from .scalar_moment_adam import ScalarMomentAdam
from .soft_constraint import SoftConstraintAdam, soft_constraint

__all__ = [
    "AdamSO",
    "AdamStiefel",
    "CayleyAdam",
    "CayleySGD",
    "CheapOrthogonal",
    "ManifoldMuon",
    "QRAdam",
    "ScalarMomentAdam",
    "SoftConstraintAdam",
    "Trivialization",
    "soft_constraint",
]
