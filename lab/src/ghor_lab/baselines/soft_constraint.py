"""The soft constraint, equation 1 of the paper: L~ = L + mu ||Y^T Y - I||_F^2, and Adam in R^(N x n).

The first thing to try, and what optimizing on a manifold replaces. It gives up the constraint: the minimum of
L~ is off the manifold by O(1/mu), and mu has to be tuned against L.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from .matrices import OnMatrices, adam, eye, tall


def soft_constraint(Y: Tensor, mu: float = 1.0) -> Tensor:
    """mu ||Y^T Y - I||_F^2, summed over matrices (..., N, n) or their transposes: a term to add to a loss.

    >>> import torch
    >>> soft_constraint(torch.eye(3)[:, :2])
    tensor(0.)
    """
    Y = tall(Y)
    return mu * (Y.mT @ Y - eye(Y)).square().sum()


class SoftConstraintAdam(OnMatrices):
    """torch's Adam with the gradient of the penalty added to that of the loss: G + 4 mu Y (Y^T Y - I).

    The weights need not start on the manifold, and do not stay there.
    """

    room = math.inf

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        mu: float = 1.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, mu=mu)

    def update(self, Y: Tensor, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Adam of G + 4 mu Y (Y^T Y - I)."""
        penalty = 4 * group["mu"] * (Y @ (Y.mT @ Y - eye(Y)))
        Y -= group["lr"] * adam(state, G + penalty, group)
