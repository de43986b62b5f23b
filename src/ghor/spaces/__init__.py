"""The spaces, one file each. A new space is a new file here and a line below."""

from .base import Space
from .euclidean import Euclidean
from .grassmann import Grassmann
from .special_orthogonal import SpecialOrthogonal
from .sphere import Sphere
from .stiefel import Stiefel
from .symplectic_stiefel import SymplecticStiefel

__all__ = ["Euclidean", "Grassmann", "Space", "SpecialOrthogonal", "Sphere", "Stiefel", "SymplecticStiefel"]
