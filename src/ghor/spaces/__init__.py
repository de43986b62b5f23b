"""The spaces that weights may live on."""

from typing import Any

import torch

from ghor.spaces.base import Space
from ghor.spaces.euclidean import Euclidean
from ghor.spaces.group import GroupSpace
from ghor.spaces.hyperbolic import Hyperbolic
from ghor.spaces.poses import PositionsOrientations, SpecialEuclidean
from ghor.spaces.rotations import SpecialOrthogonal, Unitary
from ghor.spaces.spd import SPD
from ghor.spaces.sphere import Sphere
from ghor.spaces.stiefel import Flag, Grassmann, Stiefel
from ghor.spaces.symplectic import SymplecticGrassmann, SymplecticStiefel

# Optimizers of torch.distributed save parameter groups, and with them spaces, in files that are read with
# weights_only=True.
_SPACES: list[Any] = [SPD, Euclidean, Flag, Grassmann, Hyperbolic, PositionsOrientations, SpecialEuclidean]
_SPACES += [SpecialOrthogonal, Sphere, Stiefel, SymplecticGrassmann, SymplecticStiefel, Unitary]
torch.serialization.add_safe_globals(_SPACES)

__all__ = [
    "SPD",
    "Euclidean",
    "Flag",
    "Grassmann",
    "GroupSpace",
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
]
