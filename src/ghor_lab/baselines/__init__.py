"""Published methods on Stiefel or SO(N), one file each; the docstring says what each gives up."""

from ghor_lab.baselines.kong2022 import AdamSO, AdamStiefel
from ghor_lab.baselines.lezcano2019 import CheapOrthogonal, Trivialization
from ghor_lab.baselines.li2020 import CayleyAdam, CayleySGD
from ghor_lab.baselines.manifold_muon import ManifoldMuon
from ghor_lab.baselines.qr_adam import QRAdam
from ghor_lab.baselines.soft_constraint import SoftConstraintAdam, soft_constraint

__all__ = [
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
]
