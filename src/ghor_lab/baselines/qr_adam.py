"""Adam in R^(N x n), then QR: everybody's first idea."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ghor_lab.baselines.matrices import OnMatrices, adam, check_options


class QRAdam(OnMatrices):
    """torch's Adam of the Euclidean gradient, then the Q of Y - lr m/(sqrt(v) + eps) = Q R, diag(R) > 0.

    It gives up the tangent space: m and v are also those of the part of the gradient that is normal to the
    manifold, and of points that the weight has left; QR, a projection of sorts, takes away what it can. Where
    the gradient is normal, Y S with S symmetric, the weight is at rest on the manifold, but the step is not:
    entries of equal size have another direction than Y S has.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        check_options(lr, betas, eps=eps)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def update(self, Y: Tensor, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Adam, and back."""
        Q, R = torch.linalg.qr(Y - group["lr"] * adam(state, G, group))
        Y.copy_(Q * torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1, 1).to(Q.dtype).unsqueeze(-2))
