"""Unit rows: after Loshchilov et al., "nGPT: Normalized Transformer with Representation Learning on the
Hypersphere", 2024 (arXiv 2410.01131).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class UnitRowsAdam(torch.optim.AdamW):
    """Adam in R^(m x n), then every row is divided by its length; nGPT's treatment of matrices.

    The moments are those of the Euclidean gradient, the part along the row included. Groups with
    {"unit_rows": False} are AdamW's, and so is what is not a matrix. A zero row stays.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """AdamW's step, then the division."""
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"] if group.get("unit_rows", True) else ():
                if p.grad is not None and p.dim() == 2:
                    length = torch.linalg.vector_norm(p, dim=-1, keepdim=True)
                    p.div_(torch.where(length > 0, length, 1))
        return loss
