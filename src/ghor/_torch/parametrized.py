"""Parametrizations of torch: how to remove one from a copy of a module."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize


def remove_parametrizations(module: nn.Module, name: str) -> None:
    """Torch's function of this name, which leaves copies of the module alone.

    A parametrized weight is a property of a class that torch makes for the module. A deepcopy has the same
    class, so torch, which deletes the property there, would take the weight from all copies.
    """
    cls = type(module)
    own = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    module.__class__ = type(cls.__name__, cls.__bases__, own)
    parametrize.remove_parametrizations(module, name)
