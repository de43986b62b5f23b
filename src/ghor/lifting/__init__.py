"""Algorithm 3 of the paper: any optimizer on homogeneous spaces."""

from ghor.lifting.lifted import Lifted, lift

__all__ = ["Lifted", "lift"]
