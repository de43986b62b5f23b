"""A retraction is one function, R(X) = I + X ratio(X), in the forms that frames ask for.

ratio(X)            of square X
act(y, V, A, C)     on frames: D = y F1 + Q B F2 and J = y (T1 - I) + Q B T2, where V(M) = Q B + y M,
                    R(W) E = E + [F1; B F2], R(W) E_c = E_c - [T1; B T2] B*, C = B* B. J = None for D/2.
                    A is done with, and may be overwritten, when V is asked for
velocity(..., t)    the derivative of y_t = Lambda R(t W) E: `act` was asked for t W, and the rest is of W
stretch(length)     on spheres Cayley goes as far with a step so many times as long; None for once
arc(bb)             in hyperbolic space: f = sinh(t)/|b| and h = (cosh(t) - 1)/|b|^2 for the distance t that a
                    step b goes, bb = |b|^2
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ghor._torch.transforms import transformed
from ghor.linalg import extremes, eye, inverse, plus, size, times

Product = Callable[[Tensor | None], Tensor]


class Move(NamedTuple):
    """What a step does to frames."""

    D: Tensor
    J: Tensor | None
    F2: Tensor


class Cayley:
    """R(X) = (I - X/2)^-1 (I + X/2)."""

    dense_up_to: ClassVar[float] = 192  # if N < 2 n: beyond, an n x n inverse is cheaper than an N x N one

    def ratio(self, X: Tensor, longest: float) -> Tensor:
        return inverse(torch.sub(eye(X), X, alpha=0.5))

    def act(self, y: Tensor, V: Product, A: Tensor, C: Tensor, longest: float) -> Move:
        M = A.sub_(C, alpha=0.5)
        F2 = inverse(torch.sub(eye(M), M, alpha=0.5))
        return Move(times(V(M), F2), None, F2)

    def velocity(self, y: Tensor, QB: Tensor, A: Tensor, C: Tensor, t: float, move: Move) -> Tensor:
        """y_t' = (D/t - t (y + D/2) C/2) F2."""
        D, _, F2 = move
        return times(plus(D / t, torch.add(y, D, alpha=0.5), C, -t / 2), F2)

    def stretch(self, length: Tensor) -> Tensor | None:
        return None

    def arc(self, bb: Tensor) -> tuple[Tensor, Tensor]:
        f = torch.add(1, bb, alpha=-0.25).reciprocal_()
        return f, f / 2


class Geodesic:
    """R(X) = exp(X)."""

    dense_up_to: ClassVar[float] = math.inf

    def ratio(self, X: Tensor, longest: float) -> Tensor:
        """sum_k X^(k-1)/k! by scaling and modified squaring W <- 2 W + W X W, as often as X needs.

        That is so often where it may be read for nothing; elsewhere as `longest` may need, 12 times at most.
        """
        norm = torch.linalg.matrix_norm(X, ord=1, keepdim=True)
        s = torch.ceil(torch.log2(norm.clamp_min(0.5)) + 1)
        I, down = eye(X), torch.exp2(-s)
        degree = 9 if torch.finfo(X.dtype).eps > 1e-10 else 15
        Y = X * down
        W = torch.add(I, Y, alpha=1 / degree)
        for k in range(degree - 1, 1, -1):
            W = torch.add(I, Y @ W, alpha=1 / k)
        W = W * down
        bound = 2 * longest * X.shape[-1] ** 0.5 + 1  # of 2 norm
        for j in range(most(s, math.ceil(math.log2(bound)) if longest < math.inf else 12)):
            W = torch.where(j < s, torch.add(W @ X @ W, W, alpha=2), W)
        return W

    def act(self, y: Tensor, V: Product, A: Tensor, C: Tensor, longest: float) -> Move:
        """By the 2n x 2n matrix [[A/2, c I], [(A^2/4 - C)/c, A/2]], c a power of two near ||W||."""
        n, I = A.shape[-1], eye(A)
        scale = torch.maximum(size(A.detach()), size(C.detach()).sqrt()).clamp(1e-6, 1e6)
        c = torch.exp2(torch.round(torch.log2(scale)))
        top, below = torch.cat([A / 2, c * I.expand_as(A)], -1), torch.cat([(A @ A / 4 - C) / c, A / 2], -1)
        B = torch.cat([top, below], -2)
        P = self.ratio(B, 2 * longest)
        p11, p12, p21, p22 = P[..., :n, :n], P[..., :n, n:] / c, P[..., n:, :n] * c, P[..., n:, n:]
        F2 = p11 + p12 @ A / 2
        F1, T1, Z = A @ F2 / 2 + p21 + p22 @ A / 2, A @ p12 / 2 + p22 - I, V(None)
        return Move(y @ F1 + Z @ F2, y @ T1 + Z @ p12, F2)

    def velocity(self, y: Tensor, QB: Tensor, A: Tensor, C: Tensor, t: float, move: Move) -> Tensor:
        """y_t' = y_t A + Q_t B = (y + D) A + Q B - t (y + J) C."""
        assert move.J is not None
        return QB + times(y + move.D, A) - times(y + move.J, C * t)

    def stretch(self, length: Tensor) -> Tensor | None:
        """tan(t/2)/(t/2)."""
        return torch.sinc(length / (2 * math.pi)) / (length / 2).cos()

    def arc(self, bb: Tensor) -> tuple[Tensor, Tensor]:
        c, s = self.half(bb)
        return 2 * c * s, 2 * s * s

    def half(self, bb: Tensor) -> tuple[Tensor, Tensor]:
        """cosh(t/2) and sinh(t/2)/|b|."""
        small = bb < 1e-3  # where sqrt has no derivative
        t = torch.where(small, 1, bb).sqrt() / 2
        c = torch.where(small, 1 + bb / 8 * (1 + bb / 48 * (1 + bb / 120)), t.cosh())
        return c, torch.where(small, 1 + bb / 24 * (1 + bb / 80 * (1 + bb / 168)), t.sinh() / t) / 2


def most(s: Tensor, elsewhere: int) -> int:
    """The largest number of doublings, where it may be read for nothing."""
    if transformed(s):
        return elsewhere
    largest = extremes(s.detach())[1]
    if not math.isfinite(largest):  # of others, where one matrix is not finite
        largest = extremes(s.detach().nan_to_num(0, 0, 0))[1]
    return int(largest) if math.isfinite(largest) else elsewhere


cayley, geodesic = Cayley(), Geodesic()
Retraction = Cayley | Geodesic
RetractionName = Literal["cayley", "geodesic"]

RETRACTIONS: dict[str, Retraction] = {"cayley": cayley, "geodesic": geodesic}


def by_name(retraction: str | Retraction) -> Retraction:
    """The retraction of this name, "cayley" or "geodesic"; a retraction is returned as it is."""
    if not isinstance(retraction, str):
        return retraction
    if retraction not in RETRACTIONS:
        raise ValueError(f"unknown retraction {retraction!r}; there are {sorted(RETRACTIONS)}")
    return RETRACTIONS[retraction]
