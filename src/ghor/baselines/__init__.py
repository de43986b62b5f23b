"""The paper's baseline, for weights on any space as `ghor.optim`; others are in `ghor_lab.baselines`."""

from ghor.baselines.scalar_moment_adam import ScalarMomentAdam

__all__ = ["ScalarMomentAdam"]
