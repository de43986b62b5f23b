"""The frame of rules that need none: Stiefel, Grassmann and flag manifolds, real and complex.

An element of g^hor is kept as (K, A): A is skew, n x n, and K = Q B is N x n with y^H K = 0. That is an
isometric picture of [A; B] in which no Q occurs: nothing is kept beside the point, and of a momentum only K
turns.

    pull   S = y^H G,  A = S - S^H,  K = G - y S                                      2 products of N n^2
    step   E = y^H K,  C = K^H K - E^H E,  M = A - C/2                                2
           D = (K + y (M - E)) (I - M/2)^-1          (or another retraction)          2
           k <- k - (y + D/2) (K^H k)  for every momentum k,  y <- y + D              2, or 1: see
           `Frame.multiple`

E is 0 but for rounding, and must be there. Where y is off its space by d, K = G - y S has the part -d S along
y, which moves y off by more: without E errors grow by |S|, or by what Muon's polynomial multiplies small
directions with, in every step. With E what y is off stays what rounding made it; so it does where others have
written the weight beside a momentum, or an interrupt has left one half turned.

A rule may live here if it is linear in its gradients (SGD), by numbers a point (ScalarMomentAdam) or by right
factors (Muon: K P): these do not depend on the frame. What divides coordinate by coordinate needs one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ghor.linalg import add_, defect, gram, plus, size
from ghor.spaces.frames import NARROW, UNREAD, Ends, Frame, Tensors
from ghor.spaces.retraction import Retraction

if TYPE_CHECKING:
    from ghor.spaces.stiefel import Orthogonal


class Tangent(Frame):
    """No frame at all: the point y, and tangent vectors at it.

    K and A lie one behind the other in a flat tensor: a momentum is one tensor to a rule, and K is whole, so
    that state[p] can show it in the weight's shape. Where A = 0 (Grassmann) an element is K alone.
    """

    geometry: Orthogonal

    def __init__(
        self,
        geometry: Orthogonal,
        y: Tensor,
        held: dict[str, Tensor],
        eps: float,
        by_rows: bool | None = None,
    ) -> None:
        """`by_rows` is for weights of several blocks, which state[p] can show in one order alone."""
        super().__init__(geometry, y, held, eps)
        M, N, n = y.shape
        # By columns, products of narrow matrices take a third to a fifth of the time.
        self.turned = n < NARROW if by_rows is None else not by_rows
        y = y.mT if self.turned else y
        y = y.clone(memory_format=torch.contiguous_format)
        self.y = y.mT if self.turned else y
        has_A = len(geometry.hor_blocks(self.y)) > 1
        self.shapes = [(M, n, N) if self.turned else (M, N, n), *[(M, n, n)] * has_A]
        self.sizes = list(map(math.prod, self.shapes))

    def parts(self) -> list[Tensor]:
        return [self.y]

    def point(self) -> Tensor:
        return self.y

    def zeros(self) -> Tensor:
        return self.y.new_zeros(sum(self.sizes))

    def blocks(self, w: Tensor) -> list[Tensor]:
        """[K, A], or [K] where A = 0."""
        K, *A = self._memory(w)
        return [K.mT if self.turned else K, *A]

    def _memory(self, w: Tensor) -> list[Tensor]:
        """The same, as they lie."""
        return [x.view(shape) for x, shape in zip(w.split(self.sizes), self.shapes, strict=True)]

    def hor_(self, w: Tensor) -> None:
        for A in self.blocks(w)[1:]:
            self.geometry.hor_(A)

    def scale_(self, w: Tensor, factor: Tensor | float) -> None:
        for X in self._memory(w):  # compilers cannot undo views of results that they have transposed
            super().scale_(X, factor)

    def inner(self, w: Tensor, v: Tensor) -> Tensor:
        """Re <A, A'>/2 + Re <K, K'>."""
        pairs = zip(self.blocks(w), self.blocks(v), (1.0, 0.5), strict=False)
        return sum((f * (X.conj() * Z).real.sum((-2, -1)) for X, Z, f in pairs), self.y.new_zeros(()).real)

    def length(self, w: Tensor) -> Tensor:
        K, *A = map(size, self.blocks(w))
        return torch.hypot(K, A[0]) if A else K

    def angle(self, w: Tensor) -> Tensor:
        """K = Q B turns as much as B."""
        K, *A = self.blocks(w)
        top = A[0] if A else torch.zeros_like(K[..., : self.n, :])
        return self.geometry.angle(torch.cat([top, K], -2))[:, None, None]

    def pull(self, g: Tensor, out: Tensor) -> None:
        (K, *A), S = self.blocks(out), gram(self.y, g)
        K.copy_(g)
        add_(K, self.y, S, -1)
        for X in A:
            self.geometry.hor_(X.copy_(S), 1)

    def step(
        self, w: Tensor, length: Tensor, R: Retraction, odd: Tensors, even: Tensors, ends: Ends = UNREAD
    ) -> None:
        """Algorithm 3 as above; K^H k is K^H K/a where w = a m for the one moment m."""
        y, (K, *A) = self.y, self.blocks(w)
        E = gram(y, K)
        C = gram(K, K) - gram(E, E)

        def V(M: Tensor | None) -> Tensor:  # Q B + y M
            return plus(K, y, -E if M is None else M - E)

        D, J, _ = R.act(y, V, A[0] if A else torch.zeros_like(C), C, self.longest)
        T = torch.add(y, D, alpha=0.5) if J is None else y + J
        a = self.multiple
        for m in odd:
            k = self.blocks(m)[0]
            add_(k, T, gram(K, k) if a is None else C / (a + (a == 0)), -1)
        y.add_(D)

    def repair(self, whole: bool, moved: Tensor) -> None:
        """Rounding of the point; what momenta have left of y is taken out of every velocity, by E."""
        add_(self.y, self.y, defect(self.y) * (moved / 2))
