"""Manifold Muon: Bernstein, "Modular Manifolds", Thinking Machines Lab: Connectionism, 2025,
thinkingmachines.ai/blog/modular-manifolds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .matrices import OnMatrices, norm, polar


def steepest(Y: Tensor, G: Tensor, alpha: float, steps: int, tol: float) -> Tensor:
    """Minimise <G, A> over A (..., N, n), ||A||_2 <= 1, A^T Y + Y^T A = 0 up to `tol`, by dual ascent:

        Lambda_0 = -(Y^T G + G^T Y)/4,    A = -msign(G + 2 Y Lambda),    H = A^T Y + Y^T A
        Lambda <- Lambda + alpha (1 - k/steps) H    until ||H||_F <= tol n: a root mean square of tol

    H is the gradient of the dual function -||G + 2 Y Lambda||_nuclear, Lambda symmetric. On square matrices
    Lambda_0 is the solution. Matrices of a batch stop one by one.
    """
    n = Y.shape[-1]
    Lambda = (Y.mT @ G + G.mT @ Y) / -4
    for k in range(steps + 1):
        A = -polar(G + 2 * Y @ Lambda)
        H = A.mT @ Y
        H = H + H.mT
        off = norm(H) > tol * n
        if k == steps or not bool(off.any()):
            break
        Lambda = torch.where(off, Lambda + alpha * (1 - k / steps) * H, Lambda)
    return A


class ManifoldMuon(OnMatrices):
    """Steepest descent on Stiefel in the spectral norm: Y <- msign(Y + lr A), A as `steepest` finds it.

    The published iteration has no momentum and neither has this. It gives up Adam's second moments (all
    singular values of a step are lr, whatever the gradient), a step is an inner loop of up to `steps` polar
    decompositions, and `alpha` has the unit of the gradient: if the gradient is a thousand times smaller,
    `alpha` has to be, too. msign is exact, by SVD, where the authors iterate. Where the gradient vanishes
    there is no direction, and the weight stays.
    """

    def __init__(
        self, params: Any, lr: float = 0.1, *, alpha: float = 0.01, steps: int = 100, tol: float = 1e-6
    ) -> None:
        super().__init__(params, lr=lr, alpha=alpha, steps=steps, tol=tol)

    def update(self, Y: Tensor, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Y <- msign(Y + lr A); there is no state."""
        A = steepest(Y, G, group["alpha"], group["steps"], group["tol"])
        A = torch.where(G.abs().amax((-2, -1), keepdim=True) > 0, A, 0)
        Y.copy_(polar(Y + group["lr"] * A))
