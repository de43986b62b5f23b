"""Layers of `ghor_lab.networks` as compiled C: `use(model)`.

A layer computes by its `formula`. On an instance it can be set to one of the callables here, which are copied
and pickled with their layer. They give the same values up to rounding, in float32 on the CPU, if there is a C
compiler.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from ghor_lab.networks import StiefelAttention
from ghor_lab.networks.phase_space import Chain

from .attention import Attention
from .gradients import Gradients

Model = TypeVar("Model", bound=nn.Module)


def use(model: Model, wanted: bool = True) -> Model:
    """The model, with compiled C in all layers that have some, or in none of them."""
    for layer in model.modules():
        if isinstance(layer, StiefelAttention | Chain):
            vars(layer).pop("formula", None)
            if wanted:
                layer.formula = Attention() if isinstance(layer, StiefelAttention) else Gradients()
    return model


def used(model: nn.Module) -> bool:
    """Whether compiled C computed all layers that have some when they were last called."""
    formulas = [layer.formula for layer in model.modules() if isinstance(layer, StiefelAttention | Chain)]
    return bool(formulas) and all(isinstance(f, Attention | Gradients) and f.unused is None for f in formulas)
