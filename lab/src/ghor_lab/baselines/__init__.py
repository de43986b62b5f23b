"""Published methods on Stiefel, SO(N) or spheres, one file each; the docstring says what each gives up."""

from ghor_lab.baselines.hyperball import AdamH, MuonH
from ghor_lab.baselines.kong2022 import AdamSO, AdamStiefel
from ghor_lab.baselines.lezcano2019 import CheapOrthogonal, Trivialization
from ghor_lab.baselines.li2020 import SGDG, CayleyAdam, CayleySGD
from ghor_lab.baselines.manifold_muon import ManifoldMuon
from ghor_lab.baselines.qr_adam import QRAdam
from ghor_lab.baselines.soft_constraint import SoftConstraintAdam, soft_constraint
from ghor_lab.baselines.unit_rows import UnitRowsAdam

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
