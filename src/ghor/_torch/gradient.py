"""torch.autograd.grad of one number, without what it does before it calls the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_engine: Any = torch.autograd.Variable._execution_engine


def gradients(value: Tensor, x: Sequence[Tensor], twice: bool = False) -> tuple[Tensor | None, ...]:
    """The gradients of a value without dimensions, None where it does not depend on an x.

    On small problems the checks of torch.autograd.grad take as long as the derivatives of f.
    """
    if type(value) is not Tensor:  # a subclass may have a way of its own
        return torch.autograd.grad(value, x, allow_unused=True, create_graph=twice)
    out: tuple[Tensor | None, ...] = _engine.run_backward(
        (value,),
        (torch.ones_like(value),),
        twice,
        twice,
        tuple(x),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return out
