"""Functions of autograd with a forward mode, which torch.compile does not take."""

from __future__ import annotations

from typing import Any

import torch


def compilable(rule: Any) -> Any:
    """A Function with a `jvp`, and its twin without, for `apply`."""
    own = {key: value for key, value in vars(rule).items() if key in ("forward", "setup_context", "backward")}
    return rule, type(rule)(rule.__name__, (torch.autograd.Function,), own)


def apply(rules: Any, *args: Any) -> Any:
    """Apply a `compilable` Function: the twin in compiled code."""
    eager, compiled = rules
    return (compiled if torch.compiler.is_compiling() else eager).apply(*args)
