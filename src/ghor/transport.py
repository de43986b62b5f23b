"""Parallel transport (paper, appendix "Parallel Transport").

Along the canonical connection of the second kind every space has it: `space.transport(Y, Delta, V)` is
exp(Omega(Delta)) V, and the coordinates of V in g^hor stay what they are, which is why a cache kept in g^hor needs no
transport. Along the Levi-Civita connection it is known in closed form on the group itself; on symmetric spaces
(Grassmann, Sphere) the two connections agree.
"""

from __future__ import annotations

import torch
from torch import Tensor


def levi_civita(Y: Tensor, Delta: Tensor, V: Tensor, t: float = 1.0) -> Tensor:
    """On SO(N), V along the geodesic of Delta to time t: Y exp(t A/2) B exp(t A/2), A = Y^T Delta, B = Y^T V.

    The connection of the second kind gives Y exp(t A) B instead: both are isometries, and they agree where A and B
    commute.
    """
    A, B = Y.mT @ Delta, Y.mT @ V
    half = torch.linalg.matrix_exp(t * A / 2)
    return Y @ half @ B @ half
