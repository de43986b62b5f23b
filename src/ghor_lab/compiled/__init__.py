"""Layers of `ghor.nn` as compiled C: `use(model)`.

A layer computes by its `formula`. Set on an instance, it is one of the callables here, which are copied and
pickled with their layer: the same values up to rounding, where there is a C compiler, in float32 on the CPU.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from ghor.nn import StiefelAttention
from ghor.nn.phase_space import Chain

from .attention import Attention
from .gradients import Gradients

Model = TypeVar("Model", bound=nn.Module)


def use(model: Model, wanted: bool = True) -> Model:
    """The model, with compiled C in all layers that there is some for, or in none of them."""
    for layer in model.modules():
        if isinstance(layer, StiefelAttention | Chain):
            vars(layer).pop("formula", None)
            if wanted:
                layer.formula = Attention() if isinstance(layer, StiefelAttention) else Gradients()
    return model


def used(model: nn.Module) -> bool:
    """Whether compiled C computed all layers that there is some for, when they were last called."""
    formulas = [layer.formula for layer in model.modules() if isinstance(layer, StiefelAttention | Chain)]
    return bool(formulas) and all(isinstance(f, Attention | Gradients) and f.unused is None for f in formulas)
