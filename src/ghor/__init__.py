"""ghor: any torch optimizer on weights that live on a homogeneous space.

import ghor, torch
ghor.constrain(model.proj, "weight", ghor.Stiefel())
opt = ghor.optim.AdamW(model, lr=1e-3)
"""

import sys

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

# Modules that have moved since version 0.1.0, under the names by which its pickles look for them.
_MOVED = {
    "ghor.declare": "ghor.constraints.declare",
    "ghor.parts": "ghor.adapters",
    "ghor.records": "ghor.constraints.registry",
    "ghor.saving": "ghor.lifting.lift",
    "ghor.warn": "ghor._torch.warn",
    "ghor.spaces.positions_orientations": "ghor.spaces.poses",
    "ghor.spaces.special_euclidean": "ghor.spaces.poses",
    "ghor.spaces.special_orthogonal": "ghor.spaces.rotations",
    "ghor.spaces.symplectic_grassmann": "ghor.spaces.symplectic",
    "ghor.spaces.symplectic_stiefel": "ghor.spaces.symplectic",
    "ghor.spaces.unitary": "ghor.spaces.rotations",
}
sys.modules.update((old, sys.modules[new]) for old, new in _MOVED.items())

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
    "constrain_multiples",
    "interop",
    "levi_civita",
    "lift",
    "minimize",
    "optim",
    "param_groups",
    "project",
    "release",
]
