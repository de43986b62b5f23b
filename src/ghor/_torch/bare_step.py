"""The step of a torch optimizer without the wrappers that torch puts around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _use_grad_for_differentiable


def bare_step(Base: type[Optimizer], differentiable: bool = True) -> Callable[..., Any]:
    """Base.step without the hooks that torch puts around it: these fire around the lifted step alone.

    If the step is not `differentiable`, it also loses the wrapper by which torch's own steps turn gradients
    off: that one breaks a compiled graph in two, on purpose, and the lifted step has turned them off already.
    """
    step: Any = Base.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return step.__wrapped__ if not differentiable and getattr(step, "__code__", None) is _NO_GRAD else step


_NO_GRAD = _use_grad_for_differentiable(lambda: None).__code__
