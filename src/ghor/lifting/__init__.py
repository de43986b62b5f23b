"""Algorithm 3 of the paper: any optimizer on homogeneous spaces."""

from ghor.lifting.lift import lift
from ghor.lifting.lifted import Lifted

__all__ = ["Lifted", "lift"]
