"""The spaces, one file each. A new space is a new file here and a line below."""

from .base import Space
from .euclidean import Euclidean
from .flag import Flag
from .grassmann import Grassmann
from .hyperbolic import Hyperbolic
from .positions_orientations import PositionsOrientations
from .spd import SPD
from .special_euclidean import SpecialEuclidean
from .special_orthogonal import SpecialOrthogonal
from .sphere import Sphere
from .stiefel import Stiefel
from .symplectic_grassmann import SymplecticGrassmann
from .symplectic_stiefel import SymplecticStiefel
from .unitary import Unitary

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
