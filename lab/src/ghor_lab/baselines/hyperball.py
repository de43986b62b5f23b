"""Hyperball: Wen, Dang, Lyu, Ma, Liang, "Fantastic Pretraining Optimizers and Where to Find Them II:
Hyperball Optimization", 2026 (arXiv 2606.16899).

    W <- R n(W - lr R n(u)),    n(X) = X/||X||_F,    R = ||W||_F at the start

u is the update of a base optimizer (here Adam or Muon), of which only the direction counts, so `lr` is the
angle of a step. It replaces weight decay. The step leaves the sphere and is scaled back; u is not tangent,
and its part along W only makes the step shorter. Moments are those of the Euclidean gradient. A zero matrix
has no direction to keep and stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

import ghor


class Hyperball(Optimizer):
    """The base class's step, for matrices by Hyperball's rule unless their group has "hyperball": False."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The base steps from W = 0, where it leaves -lr u; then W moves."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = [
            (p, p.clone(), group["lr"])
            for group in self.param_groups
            if group.get("hyperball", True)
            for p in group["params"]
            if p.grad is not None and p.dim() == 2
        ]
        try:
            for p, _, _ in held:
                p.zero_()
            super().step()
        except BaseException:
            for p, W, _ in held:
                p.copy_(W)
            raise
        for p, W, lr in held:
            # only now: torch's optimizers take a state that is not empty as complete
            R = self.state[p].setdefault("radius", torch.linalg.vector_norm(W))
            size = torch.linalg.vector_norm(p)
            W.add_(p * torch.where(size > 0, lr * R / size, 0))
            length = torch.linalg.vector_norm(W)
            p.copy_(W * torch.where(length > 0, R / length, 1))
        return loss


class AdamH(Hyperball, torch.optim.AdamW):
    """Hyperball with Adam's update; all else is AdamW's."""


class MuonH(Hyperball, ghor.optim.Muon):
    """Hyperball with the update of torch.optim.Muon; groups with {"adamw": True, "hyperball": False} are
    AdamW's, and so is what is not a matrix.
    """
