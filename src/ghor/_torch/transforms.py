"""Whether a tensor is being differentiated: autograd says so for reverse mode alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def differentiated(X: Tensor) -> bool:
    """Whether a derivative may be taken through X, in reverse or in forward mode."""
    return X.requires_grad or transformed(X)


def transformed(X: Tensor) -> bool:
    """Whether X has a tangent of forward mode, or is inside a transform of torch.func.

    There X may hide a tensor that an outer transform differentiates.
    """
    if torch.compiler.is_compiling():
        return False
    return _wrapped(X) or unpack_dual(X).tangent is not None
