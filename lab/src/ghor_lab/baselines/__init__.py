"""Published methods on Stiefel, SO(N) or spheres, one file each; the docstring says what each gives up."""

from .hyperball import AdamH, MuonH
from .kong2022 import AdamSO, AdamStiefel
from .lezcano2019 import CheapOrthogonal, Trivialization
from .li2020 import SGDG, CayleyAdam, CayleySGD
from .manifold_muon import ManifoldMuon
from .qr_adam import QRAdam
from .soft_constraint import SoftConstraintAdam, soft_constraint
from .unit_rows import UnitRowsAdam

__all__ = [
    "SGDG",
    "AdamH",
    "AdamSO",
    "AdamStiefel",
    "CayleyAdam",
    "CayleySGD",
    "CheapOrthogonal",
    "ManifoldMuon",
    "MuonH",
    "QRAdam",
    "SoftConstraintAdam",
    "Trivialization",
    "UnitRowsAdam",
    "soft_constraint",
]
