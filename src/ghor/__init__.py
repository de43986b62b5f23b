"""ghor: any torch optimizer on weights that live on a homogeneous space.

import ghor, torch
ghor.constrain(model.proj, "weight", ghor.Stiefel())
opt = ghor.optim.AdamW(model, lr=1e-3)
"""

from . import optim
from .declare import check, constrain, param_groups, project
from .optimizer import lift
from .spaces import Euclidean, Grassmann, Space, SpecialOrthogonal, Sphere, Stiefel, SymplecticStiefel
from .transport import levi_civita

__version__ = "0.1.0"

__all__ = [
    "Euclidean",
    "Grassmann",
    "Space",
    "SpecialOrthogonal",
    "Sphere",
    "Stiefel",
    "SymplecticStiefel",
    "check",
    "constrain",
    "levi_civita",
    "lift",
    "optim",
    "param_groups",
    "project",
]
