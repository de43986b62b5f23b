"""A linear layer with adapters: what it computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ghor.adapters.kinds import AdapterLayer, LowRankLayer


class Adapted(nn.Module):
    """A linear layer, `base`, with adapters by name; `active` lists those in use.

    `before_merge` holds the original weight while adapters are merged into it. It is in the state dict, which
    therefore fits merged layers only: in others the adapters would be applied twice.
    """

    before_merge: Tensor | None

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.parts = base, nn.ModuleDict()
        self.active: list[str] = []
        self.tied: tuple[Tensor, ...] = ()  # the tied weight, while the merged layer has one of its own
        self.register_buffer("before_merge", None)

    bias = property(lambda self: self.base.bias)
    in_features = property(lambda self: matrix_of(self.base).shape[1])
    out_features = property(lambda self: matrix_of(self.base).shape[0])

    def active_layers(self) -> list[AdapterLayer]:
        """The adapters to compute, the innermost first: none while they are merged.

        L_1 L_2 W R_2 R_1 x, and then the terms that are added, each a function of x itself.
        """
        if self.before_merge is not None:
            return []
        parts: list[Any] = [self.parts[name] for name in self.active]
        added = [part for part in parts if isinstance(part, LowRankLayer)]
        return [part for part in reversed(parts) if part not in added] + added

    def forward(self, x: Tensor) -> Tensor:
        output: Callable[[Tensor], Tensor] = self.base
        for part in self.active_layers():
            output = partial(part.output, output, self.bias)
        return output(x)

    @property
    def weight(self) -> Tensor:
        """The weight as it acts: L_1 ... L_k W R_k ... R_1 + sum of U diag(s) V^T, in the base's layout."""
        return self.effective(self.base.weight)

    def effective(self, W: Tensor) -> Tensor:
        """W with the active adapters, computed in their precision."""
        parts = self.active_layers()
        if not parts:
            return W
        M = W.to(next(parts[0].parameters()).dtype)
        M = M.mT if is_conv1d(self.base) else M
        for part in parts:
            M = part.weight(M)
        return (M.mT.contiguous() if is_conv1d(self.base) else M).to(W.dtype)


def adapted_layers(model: nn.Module) -> dict[str, Adapted]:
    """The adapted layers of a model, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, Adapted)}


def exchange(model: nn.Module, new: dict[Any, nn.Module]) -> None:
    """Replace some layers by others wherever they occur in the model."""
    for parent in list(model.modules()):
        for leaf, child in list(parent._modules.items()):
            if child in new and not isinstance(parent, Adapted):
                setattr(parent, leaf, new[child])


def is_conv1d(layer: nn.Module) -> bool:
    """Whether a layer is the Conv1D of Hugging Face's transformers: a linear layer, its weight in x out."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def matrix_of(layer: Any) -> Tensor:
    """The weight of a layer as a matrix out x in."""
    W: Tensor = layer.weight
    return W.mT if is_conv1d(layer) else W
