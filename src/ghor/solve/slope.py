"""The velocity of a curve Lambda R(t W), in the frame that moves along: what the slope of a loss is made of."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg import eye_like
from ..retraction import Retraction
from ..spaces import Space
from ..spaces.form import Form


def velocity(space: Space, W: Tensor, t: float, retraction: Retraction) -> Tensor:
    """Lambda_t^-1 d/dt Lambda_t E at Lambda_t = Lambda R(t W): W along a geodesic, (I - t^2 W^2/4)^-1 W along Cayley.

    On the basis [E, E_c B] the matrix W is [[A, -C], [I, 0]], C = B* B: one solve of size 2n.
    """
    if retraction.name != "cayley" or not isinstance(space, Form) or t == 0:
        return W
    M = space.matrix(W)
    n = M.shape[-1]
    A, B = M[..., :n, :], M[..., n:, :]
    I = eye_like(A).expand_as(A)
    X = torch.cat([torch.cat([A, -space.star(B) @ B], -1), torch.cat([I, torch.zeros_like(A)], -1)], -2)
    x = torch.linalg.solve_ex(eye_like(X) - (t * t / 4) * (X @ X), torch.cat([A, I], -2))[0]
    return space.hor(space.unmatrix(torch.cat([x[..., :n, :], B @ x[..., n:, :]], -2), W.shape))
