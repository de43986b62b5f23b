"""Methods to compare with.

`ScalarMomentAdam` is the paper's baseline and, like `ghor.optim`, takes weights on any space. Other published
methods are in `ghor_lab.baselines`; they can be imported from here as well.
"""

from ghor.baselines.moved import moved
from ghor.baselines.scalar_moment_adam import ScalarMomentAdam

__all__ = ["ScalarMomentAdam"]

__getattr__ = moved(
    __name__,
    {
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
    },
    ["kong2022", "lezcano2019", "li2020", "manifold_muon", "matrices", "qr_adam", "soft_constraint"],
)
