"""The paper's baseline, which like `ghor.optim` takes weights on any space; other methods are in the lab."""

from ghor.baselines.scalar_moment_adam import ScalarMomentAdam

__all__ = ["ScalarMomentAdam"]
