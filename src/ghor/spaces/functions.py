"""Functions of matrices that the geometry of spaces needs: logarithms, and functions of symmetric matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..linalg import eye_like


def log_rotation(R: Tensor) -> Tensor:
    """The principal logarithm of rotations or unitary matrices, (..., N, N) -> (..., N, N) skew, for angles below pi.

    Square roots sqrt(R) = polar(I + R) until R is near I, then log R = 2 atanh((R - I)(R + I)^-1). Products and
    solves only, so autograd goes through it also where angles coincide.
    """
    I = eye_like(R)
    roots = 0
    while roots < 12 and float((R.detach() - I).abs().sum(-1).amax()) > 0.25:
        R = _polar_newton(I + R)
        roots += 1
    K = torch.linalg.solve_ex(R + I, R - I)[0]
    K = (K - K.mH) / 2
    K2, term, out = K @ K, K, K
    for j in range(3, 25, 2):
        term = term @ K2
        out = out + term / j
    return out * 2.0 ** (roots + 1)


def _polar_newton(X: Tensor) -> Tensor:
    """The unitary polar factor by Newton's iteration X <- (X + X^-H)/2, quadratic once ||X|| is near 1."""
    for _ in range(60):
        X, last = (X + torch.linalg.inv_ex(X)[0].mH) / 2, X
        if float((X - last).detach().abs().amax()) <= 8 * torch.finfo(X.dtype).eps:
            break
    return X


def symmetric(X: Tensor) -> Tensor:
    """(X + X^T)/2, symmetric to the bit."""
    return (X + X.mT) / 2


def log_positive(T: Tensor) -> Tensor:
    """The logarithm of symmetric positive definite matrices."""
    return symmetric_function(T, lambda t: (t.log(), 1 / t))


def symmetric_function(T: Tensor, f: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """f(T) of Hermitian matrices by their eigenvalues, differentiable where these coincide; f gives f and f'."""
    return _SymmetricFunction.apply(T, f)  # type: ignore[no-untyped-call]


class _SymmetricFunction(torch.autograd.Function):
    """The derivative is by divided differences of f."""

    @staticmethod
    def forward(ctx: Any, T: Tensor, f: Any) -> Tensor:
        t, V = torch.linalg.eigh(T)
        ft, dft = f(t)
        ctx.save_for_backward(t, V, ft, dft)
        return V @ (ft.unsqueeze(-1) * V.mH)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor, None]:
        t, V, ft, dft = ctx.saved_tensors
        dt, df = (x.unsqueeze(-1) - x.unsqueeze(-2) for x in (t, ft))
        # Near-equal eigenvalues: the mean derivative is exact to second order, the quotient is noise.
        near = dt.abs() <= torch.finfo(t.dtype).eps ** 0.5 * (1 + t.abs().unsqueeze(-1))
        quotient = torch.where(near, (dft.unsqueeze(-1) + dft.unsqueeze(-2)) / 2, df / torch.where(near, 1, dt))
        G = V.mH @ G @ V
        return V @ (quotient * (G + G.mH) / 2) @ V.mH, None
