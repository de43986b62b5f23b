"""Adam in R^(N x n), then QR: everybody's first idea."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .matrices import OnMatrices, adam


class QRAdam(OnMatrices):
    """torch's Adam of the Euclidean gradient, then the Q of Y - lr m/(sqrt(v) + eps) = Q R, diag(R) > 0.

    It gives up the tangent space: m and v include the part of the gradient that is normal to the manifold,
    and average over tangent spaces of points that the weight has left; QR, a projection of sorts, takes away
    what it can. At a stationary point of the manifold the gradient is normal, Y S with S symmetric, but the
    step is not zero: dividing by sqrt(v) turns Y S out of the normal space.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps)

    def update(self, Y: Tensor, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """A step of Adam, and back to the manifold by QR."""
        Q, R = torch.linalg.qr(Y - group["lr"] * adam(state, G, group))
        Y.copy_(Q * torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1, 1).to(Q.dtype).unsqueeze(-2))
