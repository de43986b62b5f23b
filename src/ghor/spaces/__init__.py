"""The spaces, one file for each family. A new space is a new file here and a line below."""

from ghor.spaces.base import Space
from ghor.spaces.euclidean import Euclidean
from ghor.spaces.flag import Flag
from ghor.spaces.grassmann import Grassmann
from ghor.spaces.hyperbolic import Hyperbolic
from ghor.spaces.poses import PositionsOrientations, SpecialEuclidean
from ghor.spaces.rotations import SpecialOrthogonal, Unitary
from ghor.spaces.spd import SPD
from ghor.spaces.sphere import Sphere
from ghor.spaces.stiefel import Stiefel
from ghor.spaces.symplectic import SymplecticGrassmann, SymplecticStiefel

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
]
