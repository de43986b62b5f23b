"""The precision that computations run in: float32 for half precision, and never under autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator, ExitStack
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

# LAPACK has no half precision, which also has too few digits for a group element: all is computed in float32.
COMPUTE_DTYPE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def wide(X: Tensor) -> Tensor:
    """Convert X to the widest dtype of its kind, float64 or complex128."""
    return X.to(torch.promote_types(X.dtype, torch.float64))


class full_precision(ContextDecorator):
    """A context, or decorator, without autocast: products rounded to bfloat16 are 2e-3 off the group."""

    devices = ("cpu", "cuda", "mps", "xpu")

    def __call__(self, function: F) -> F:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for device in self.devices:  # cheaper than entering the context, and torch.compile takes it
                if torch.is_autocast_enabled(device):
                    with torch.autocast(device, enabled=False):
                        return call(*args, **kwargs)
            return function(*args, **kwargs)

        return cast(F, call)

    def __enter__(self) -> None:
        self.off = ExitStack()
        for device in filter(torch.is_autocast_enabled, self.devices):
            self.off.enter_context(torch.autocast(device, enabled=False))

    def __exit__(self, *error: object) -> None:
        self.off.close()
