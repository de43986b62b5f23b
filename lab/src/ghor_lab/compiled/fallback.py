"""What compiled functions leave to torch's operations: unsupported inputs, derivatives of derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def not_plain(*tensors: Tensor) -> str | None:
    """Why no compiled function can take these now, forward or backward (None if one can)."""
    for t in tensors:
        if not t.is_cpu or t.dtype is not torch.float32:
            return (
                f"it is for float32 on the CPU, not {str(t.dtype).removeprefix('torch.')} on {t.device.type}"
            )
        if type(t) not in (Tensor, nn.Parameter):
            return f"it is for tensors of torch itself, not {type(t).__name__}"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on, and it computes in float32"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "torch.func and forward mode differentiate operations of torch only"
    if is_in_torch_dispatch_mode() or torch._C._get_tracing_state() is not None:
        return "a tracer or dispatch mode is active, and it is not an operation of torch"
    if not all(map(torch._C._has_storage, tensors)):
        return "it is for numbers that lie in memory, not for sparse tensors or a batch of gradients"
    return None


def derivatives(f: Callable[..., Tensor], inputs: Sequence[Tensor | None], dy: Tensor) -> list[Tensor | None]:
    """The derivatives of sum(f(*inputs) * dy) by autograd, differentiable again if gradients are enabled."""
    again = torch.is_grad_enabled()
    with (
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):  # as in the forward pass, which was compiled
        inputs = [
            t if t is None else t.view_as(t) for t in inputs
        ]  # a weight may be used before, too: not through x
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(f(*inputs), wanted, dy, create_graph=again))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]
