"""The spaces that weights may live on."""

from ghor.spaces.base import GroupSpace, Space
from ghor.spaces.euclidean import Euclidean
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
