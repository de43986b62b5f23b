"""The spaces that weights may live on."""

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

# Optimizers of torch.distributed save parameter groups, and with them spaces, in files that are read with
# weights_only=True.
torch.serialization.add_safe_globals([globals()[name] for name in __all__])
