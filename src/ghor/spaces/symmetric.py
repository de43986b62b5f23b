"""Functions of Hermitian matrices by their eigenvalues, differentiable twice even where these coincide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ghor._torch.functions import apply, compilable
from ghor.linalg import eye_of, finite

Slopes = Callable[[Tensor], tuple[Tensor, Tensor]]  # f(t) and f'(t)


def exp_symmetric(T: Tensor) -> Tensor:
    """exp(T), accurate in its small eigenvalues, too."""
    return symmetric_function(T, lambda t: (t.exp(), t.exp()))


def log_gram(M: Tensor) -> Tensor:
    """log(M M^T) of square M."""
    return gram_function(M, lambda t: (t.log(), 1 / t), zero=0.0)


def symmetric_function(T: Tensor, f: Slopes, zero: float = 1.0) -> Tensor:
    """f(T) of Hermitian T by its eigenvalues t, differentiable twice even where these coincide.

    f returns f(t) and f'(t). Eigenvalues count as equal where they differ by a small part of zero + |t|:
    zero=0 for functions that are singular at 0, such as log. NaN where T is not finite, for which LAPACK
    would raise, and the rest of the batch be lost.
    """
    good = finite(T)
    t, V = torch.linalg.eigh(torch.where(good, T.detach(), 0))
    return torch.where(good, apply(_Function, torch.where(good, T, 0), t, V, f, zero), torch.nan)


def gram_function(M: Tensor, f: Slopes, zero: float = 1.0) -> Tensor:
    """f(M M^H), f as in `symmetric_function`, by the singular values of M.

    The eigenvalues of the computed product would have lost half of the digits.
    """
    good = finite(M)
    M = torch.where(good, M, eye_of(M))
    U, s, _ = torch.linalg.svd(M.detach(), full_matrices=False)
    t, V = s.square().flip(-1), U.flip(-1)  # ascending, as from eigh
    return torch.where(good, apply(_Function, M @ M.mH, t, V, f, zero), torch.nan)


@compilable
class _Function(torch.autograd.Function):
    """V f(t) V^H, as a function of T = V t V^H alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(T: Tensor, t: Tensor, V: Tensor, f: Any, zero: float) -> Tensor:
        ft: Tensor = f(t)[0]
        return V @ (ft.unsqueeze(-1) * V.mH)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.save_for_forward(*inputs[:3])
        ctx.of = inputs[3:]

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor | None, ...]:
        return _derivative(ctx, G), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dT: Tensor, *_: Any) -> Tensor:
        return _derivative(ctx, dT)


def _derivative(ctx: Any, G: Tensor) -> Tensor:
    """The derivative of f(T) along G, which is its own adjoint."""
    T, t, V = ctx.saved_tensors
    return apply(_Derivative, T, G, t, V, *ctx.of)


@compilable
class _Derivative(torch.autograd.Function):
    """V (f[t_i, t_j] G_ij) V^H, with G in the basis V, as a function of T and G."""

    generate_vmap_rule = True

    @staticmethod
    def forward(T: Tensor, G: Tensor, t: Tensor, V: Tensor, f: Any, zero: float) -> Tensor:
        return V @ (_first(t, f, zero) * _in_basis(G, V)) @ V.mH

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.save_for_forward(*inputs[:4])
        ctx.of = inputs[4:]

    @staticmethod
    def backward(ctx: Any, H: Tensor) -> tuple[Tensor | None, ...]:
        return *_bend(ctx, H, H), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dT: Tensor | None, dG: Tensor | None, *_: Any) -> Tensor | None:
        bend, along = _bend(ctx, dT, dG)
        return along if bend is None else bend if along is None else bend + along


def _bend(ctx: Any, H: Tensor | None, dG: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The second derivative of f(T) along G and H, and the first along dG; None where there is no direction.

    sum_k f[t_i, t_k, t_j] (G_ik H_kj + H_ik G_kj): f[., ., .] is symmetric in its three arguments.
    """
    T, G, t, V = ctx.saved_tensors
    along = None if dG is None else apply(_Derivative, T, dG, t, V, *ctx.of)
    if H is None:
        return None, along
    A, B, F = _in_basis(G.detach(), V), _in_basis(H.detach(), V), _second(t, *ctx.of)
    bend = torch.einsum("...ikj,...ik,...kj->...ij", F.to(A.dtype), A, B)
    bend = apply(_Last, V @ (bend + bend.mH) @ V.mH, T, G, H)
    return bend, along


@compilable
class _Last(torch.autograd.Function):
    """The identity; raises when differentiated, instead of silently giving a zero third derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(X: Tensor, *of: Tensor) -> Tensor:
        return X.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "functions of symmetric matrices (log, dist, project) are differentiated twice here, not more"
        )

    jvp = backward


def _in_basis(G: Tensor, V: Tensor) -> Tensor:
    """The Hermitian part of V^H G V."""
    G = V.mH @ G @ V
    return (G + G.mH) / 2


def _near(t: Tensor, zero: float) -> Tensor:
    """h at which a divided difference of f, of error eps/h, is no better than Simpson's rule, of h^4."""
    part: float = torch.finfo(t.dtype).eps ** 0.25
    return part * (zero + t.abs())


def _first(t: Tensor, f: Any, zero: float) -> Tensor:
    """f[a, b] = (f(a) - f(b))/(a - b), and the mean of f' between a and b where they nearly coincide."""
    a, b = t.unsqueeze(-1), t.unsqueeze(-2)
    near, (ft, dft) = (b - a).abs() <= _near(a, zero), f(t)
    # Simpson's rule for the integral of f' from a to b, divided by b - a
    mean = (dft.unsqueeze(-1) + 4 * f((a + b) / 2)[1] + dft.unsqueeze(-2)) / 6
    return torch.where(near, mean, (ft.unsqueeze(-1) - ft.unsqueeze(-2)) / torch.where(near, 1, a - b))


def _second(t: Tensor, f: Any, zero: float) -> Tensor:
    """f[a, b, c] = (f[b, c] - f[a, b])/(c - a), a <= b <= c; f''/2 at their mean where all three coincide."""
    i = torch.arange(t.shape[-1], device=t.device)
    low, middle, high = torch.stack(torch.meshgrid(i, i, i, indexing="ij")).sort(0)[0]  # eigenvalues ascend
    a, b, c, F = t[..., low], t[..., middle], t[..., high], _first(t, f, zero)
    near, mean = (c - a).abs() <= _near(a, zero), (a + b + c) / 3
    h = _near(mean, zero)
    one, two = (f(mean + k * h)[1] - f(mean - k * h)[1] for k in (1, 2))
    bend = (8 * one - two) / (12 * h)  # f'' by differences of f', of error h^4
    apart = (F[..., middle, high] - F[..., low, middle]) / torch.where(near, 1, c - a)
    return torch.where(near, bend / 2, apart)
