"""What the paper compares with, one file a method. Like `ghor.optim`, on weights of any space."""

from .scalar_moment_adam import ScalarMomentAdam

__all__ = ["ScalarMomentAdam"]
