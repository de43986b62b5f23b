"""The paper's baseline, which like `ghor.optim` takes weights on any space; others are in `ghor_lab.baselines`."""

from ghor.baselines.scalar_moment_adam import ScalarMomentAdam

__all__ = ["ScalarMomentAdam"]
