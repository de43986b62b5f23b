"""ghor: any torch optimizer on weights that live on a homogeneous space.

import ghor, torch
ghor.constrain(model.proj, "weight", ghor.Stiefel())
opt = ghor.optim.AdamW(model, lr=1e-3)
"""

from ghor import adapters as adapters
from ghor import interop, optim
from ghor.adapters import release
from ghor.constraints.declare import constrain, param_groups, project
from ghor.constraints.multiples import constrain_multiples
from ghor.constraints.report import check
from ghor.lifting import lift
from ghor.solve import check_gradient, check_hessian, minimize
from ghor.spaces import (
    SPD,
    Euclidean,
    Flag,
    Grassmann,
    Hyperbolic,
    PositionsOrientations,
    Space,
    SpecialEuclidean,
    SpecialOrthogonal,
    Sphere,
    Stiefel,
    SymplecticGrassmann,
    SymplecticStiefel,
    Unitary,
)

__version__ = "0.1.0"

__all__ = [
    "SPD",
    "Euclidean",
    "Flag",
    "Grassmann",
    "Hyperbolic",
    "PositionsOrientations",
    "Space",
    "SpecialEuclidean",
    "SpecialOrthogonal",
    "Sphere",
    "Stiefel",
    "SymplecticGrassmann",
    "SymplecticStiefel",
    "Unitary",
    "check",
    "check_gradient",
    "check_hessian",
    "constrain",
    "constrain_multiples",
    "interop",
    "lift",
    "minimize",
    "optim",
    "param_groups",
    "project",
    "release",
]
