"""Functions of autograd with a forward mode, which torch.compile does not take."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ghor._torch.transforms import transformed


def compilable(rule: Any) -> Any:
    """A Function with a `jvp`, and its twin without, for `apply`."""
    own = {key: value for key, value in vars(rule).items() if key in ("forward", "setup_context", "backward")}
    return rule, type(rule)(rule.__name__, (torch.autograd.Function,), own)


def apply(rules: Any, *args: Any) -> Tensor:
    """Apply a `compilable` Function: the twin in compiled code."""
    eager, compiled = rules
    out: Tensor = (compiled if torch.compiler.is_compiling() else eager).apply(*args)
    return out


def frozen(X: Tensor) -> Tensor:
    """X as a constant of every transform; `detach` acts on the innermost alone."""
    return cast(Tensor, _Frozen.apply(X)) if transformed(X) else X.detach()  # type: ignore[no-untyped-call]


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(X: Tensor) -> Tensor:
        return X.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, X: Tensor) -> tuple[Tensor, Any]:
        return frozen(X), in_dims[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        return None

    jvp = backward


def with_value(X: Tensor, value: Tensor) -> Tensor:
    """`value`, with the derivatives of X, which is the same up to rounding."""
    return frozen(value) + (X - frozen(X))
