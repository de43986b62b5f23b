"""Retractions from g^hor to the group (paper, "The Cayley Retraction" and "Computing Exponentials").

An element of g^hor is W = [[A, -B*], [B, 0]], A = -A* (n x n), B ((N-n) x n). Both retractions are given by
n x n matrices F1, F2, T1, T2 that are functions of two small matrices, A and C = B* B:

    R(W) E   = E   + F,       F = [F1; B F2]
    R(W) E_c = E_c - T B*,    T = [T1; B T2]         E_c: the columns of the identity beyond those of E

so that nothing of size N x N is formed: the *thin* form. If N < 2n it is no smaller than the N x N matrix W,
and C = B* B would lose the small singular values of B: then the retraction is evaluated *densely*. (Cayley
only if N is small as well: its n x n inverse is cheaper than an N x N solve, and short steps lose nothing.)
Both forms return the *increment* R - I, which is small for small W: adding it to Lambda drifts a thousand
times less than forming R and multiplying.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ghor.linalg import eye_like, frobenius, inverse_beside_identity, phi, solve

Thin = tuple[Tensor, Tensor, Tensor, Tensor]  # F1, F2, T1, T2
RetractionName = Literal["cayley", "geodesic"]


@dataclass(frozen=True)
class Retraction:
    """A retraction: its name, the dense increment R(W) - I and the thin form (A, C) -> F1, F2, T1, T2.

    `right(X, W)` is X (R(W) - I). `factors`, for a retraction with F1 = M F2 and T = E + F/2, gives M and F2
    alone: F = [M; B] F2; its last argument says whether M is to overwrite A. The dense form is used if
    N < 2n and N <= `dense_up_to`, and if N = n.
    """

    name: str
    dense: Callable[[Tensor], Tensor]
    right: Callable[[Tensor, Tensor], Tensor]
    thin: Callable[[Tensor, Tensor], Thin]
    dense_up_to: float = math.inf
    factors: Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]] | None = None

    def __repr__(self) -> str:
        return self.name


def _cayley_dense(W: Tensor) -> Tensor:
    """(I - W/2)^-1 (I + W/2) - I = (I - W/2)^-1 W."""
    return solve(eye_like(W) - W / 2, W)


def _cayley_right(X: Tensor, W: Tensor) -> Tensor:
    """X W (I - W/2)^-1: LAPACK solves from the right without copies if matrices are stored by rows."""
    return solve(eye_like(W) - W / 2, X @ W, left=False)


def _cayley_factors(A: Tensor, C: Tensor, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """M = A - C/2, in the place of A if asked, and S^-1, S = I - M/2.

    On orthogonal spaces the symmetric part of S is >= I, so that ||S^-1|| <= 1.
    """
    M = A.sub_(C, alpha=0.5) if overwrite else torch.sub(A, C, alpha=0.5)
    return M, inverse_beside_identity(M)


def _cayley_thin(A: Tensor, C: Tensor) -> Thin:
    """F1 = M S^-1, F2 = S^-1, T = E + F/2; T1 = I + F1/2 equals S^-1, which has more digits for large W."""
    M, F2 = _cayley_factors(A, C)
    return M @ F2, F2, F2, F2 / 2


def _geodesic_dense(W: Tensor) -> Tensor:
    """exp(W) - I = W A(W), with A(W) = `phi`(W)."""
    return W @ phi(W)


def _geodesic_right(X: Tensor, W: Tensor) -> Tensor:
    return X @ _geodesic_dense(W)


def _geodesic_thin(A: Tensor, C: Tensor) -> Thin:
    """exp(W) - I = B' A(X) B''^T with the 2n x 2n matrix X = B''^T B' = [[A/2, I], [A^2/4 - C, A/2]].

    X is balanced by diag(I, c I) with c a power of two (exact) near ||W||, so that ||X|| grows like ||W|| and
    not like ||W||^2.
    """
    n = A.shape[-1]
    with torch.no_grad():
        size = torch.maximum(frobenius(A), frobenius(C).sqrt())[..., None, None]
        c = torch.exp2(torch.round(torch.log2(size.clamp(1e-6, 1e6))))
    I = eye_like(A).expand_as(A)
    X = torch.cat([torch.cat([A / 2, c * I], -1), torch.cat([(A @ A / 4 - C) / c, A / 2], -1)], -2)
    P = phi(X)
    p11, p12, p21, p22 = P[..., :n, :n], P[..., :n, n:] / c, P[..., n:, :n] * c, P[..., n:, n:]
    F2 = p11 + p12 @ A / 2
    return A @ F2 / 2 + p21 + p22 @ A / 2, F2, A @ p12 / 2 + p22, p12


cayley = Retraction(
    "cayley", _cayley_dense, _cayley_right, _cayley_thin, dense_up_to=192, factors=_cayley_factors
)
geodesic = Retraction("geodesic", _geodesic_dense, _geodesic_right, _geodesic_thin)

RETRACTIONS = {r.name: r for r in (cayley, geodesic)}


def by_name(retraction: str | Retraction) -> Retraction:
    """The retraction of this name, "cayley" or "geodesic"; a Retraction is returned as it is."""
    if isinstance(retraction, Retraction):
        return retraction
    if retraction not in RETRACTIONS:
        raise ValueError(f"unknown retraction {retraction!r}; there are {sorted(RETRACTIONS)}")
    return RETRACTIONS[retraction]
