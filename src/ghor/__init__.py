"""ghor: any torch optimizer on weights that live on a homogeneous space.

import ghor, torch
ghor.constrain(model.proj, "weight", ghor.Stiefel())
opt = ghor.optim.AdamW(model, lr=1e-3)
"""

from . import interop, optim
from .declare import check, constrain, param_groups, project
from .optimizer import lift
from .solve import check_gradient, check_hessian, minimize
from .spaces import (
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

levi_civita = SpecialOrthogonal().levi_civita

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
    "interop",
    "levi_civita",
    "lift",
    "minimize",
    "optim",
    "param_groups",
    "project",
]
