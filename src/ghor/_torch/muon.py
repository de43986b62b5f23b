"""The parts of torch.optim.Muon that are not public: imported only when they are called."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# The defaults of torch.optim.Muon, from its signature: the constants themselves have private names.
DEFAULTS: dict[str, Any] = {
    name: p.default
    for name, p in inspect.signature(torch.optim.Muon.__init__).parameters.items()
    if p.default is not p.empty
}


def orthogonalised(update: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz as torch.optim.Muon runs it: a matrix in bfloat16."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    out: Tensor = _zeropower_via_newtonschulz(update, tuple(coefficients), steps, eps)  # type: ignore[arg-type]
    return out
