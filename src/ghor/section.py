"""Sections: how the frame Lambda = [Y, Q] above a point is kept from step to step.

Transported: Q is stored, N (N-n) numbers, and moves with the step, Lambda <- Lambda R(W), O(N^2 n). The coordinates of
a transported vector do not change, so the optimizer's state is left alone.

Implicit: Q is a function of Y and one n x n rotation R (the anchor), never formed:

    Lambda X = Y X1 + E_c X2 - (Z + E)(I + Z1^T)^-1 Z2^T X2,    Z = [Z1; Z2] = Y R^T

in O(N n^2), with the state of the plain optimizer and n^2 numbers. The frame at the new point differs from the
transported one by a rotation of the complement, so state tensors that are vectors are carried over, exactly:
B <- Q(Y+)^T Q_transported B. Squares of coordinates cannot be rotated; they stay as they are, in a frame that turns
slowly while R is fixed. R is renewed, R = polar(Y1), where I + Z1 gets ill-conditioned.

Both work on stacks: matrices (P, N, n), P the only batch dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .linalg import add_product, eye_like
from .retraction import Retraction
from .spaces import Space
from .spaces.orthogonal import Orthogonal

POLISH_POINT = 10  # steps between two polishings of Y alone
AUTO_IMPLICIT = 512  # from this N on "auto" is implicit, see docs/sections.md for the measurement


class Transported:
    """Lambda = [Y, Q], (P, N, N), stored and moved."""

    def __init__(self, space: Space, n: int, Lambda: Tensor) -> None:
        self.space, self.n = space, n
        self.Lambda = Lambda.mT.contiguous().mT  # column by column in memory: Y is one piece

    @classmethod
    def start(cls, space: Space, Y: Tensor) -> Transported:
        """The space's section at Y, tall."""
        return cls(space, Y.shape[-1], space.section_matrix(Y))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What goes into the state, by key."""
        return {"section": self.Lambda}

    @property
    def period(self) -> int:
        """Steps between two polishings of Lambda: two N^3 products against three N^2 n ones a step, hence 4 % or less.

        In between Y alone is polished, O(N n^2): steps near one ulp round the same way every time, and would take it
        off by a few 1e-8 each.
        """
        return max(100, 17 * self.Lambda.shape[-1] // self.n)

    def Y(self) -> Tensor:
        """The point, a view."""
        return self.Lambda[..., : self.n]

    def global_grad(self, Y: Tensor, G: Tensor, out: Tensor) -> Tensor:
        """[skew(Y^T G); Q^T G]."""
        if out.mT.is_contiguous():  # as it lies in memory
            out.mT.baddbmm_(G.mT, self.Lambda, beta=0)
        else:
            out.baddbmm_(self.Lambda.mT, G, beta=0)
        A = out[..., : self.n, :]
        A.copy_(self.space.skew(A))
        return out

    def move(self, Y: Tensor, W: Tensor, retraction: Retraction, vectors: Sequence[Tensor], moved: Tensor) -> None:
        """Lambda <- Lambda R(W), in place."""
        self.space.move_section(self.Lambda, W, retraction, out=self.Lambda)

    def long_move(self, Y: Tensor, index: Tensor, W: Tensor, retraction: Retraction, vectors: Sequence[Tensor]) -> None:
        """The same for some of the stack and a step of any length: in float64, and back to the group at once."""
        L = self.Lambda[index].double()
        self.space.move_section(L, W, retraction, out=L)
        self.Lambda[index] = self.space.restore(L, self.n).to(self.Lambda.dtype)

    def is_due(self, age: int) -> bool:
        """Whether something is to be polished at this age."""
        return age % POLISH_POINT == 0 or age % self.period == 0

    def polish(self, Y: Tensor, age: int, moved: Tensor, now: bool) -> None:
        """Back to the group where rounding has left it; `moved` (P, 1, 1) is 0 for those that may not change."""
        if now or age % self.period == 0:
            self.space.polish(self.Lambda, self.n, moved)
        elif age % POLISH_POINT == 0:
            self.space.polish(self.Y(), self.n, moved)

    def rebuild(self, index: Tensor, Y: Tensor) -> None:
        """Anew from the points Y for some of the stack."""
        self.Lambda[index] = Transported.start(self.space, Y).Lambda

    def frame(self, Y: Tensor) -> Tensor:
        """Lambda itself."""
        return self.Lambda


class Implicit:
    """Q from Y and the anchor R, (P, n, n); Y itself is held by the weights."""

    def __init__(self, space: Space, n: int, R: Tensor) -> None:
        self.space, self.n, self.R = space, n, R
        self.look = True  # whether the next move may look at numbers, which waits for the device where that is no CPU

    @classmethod
    def start(cls, space: Space, Y: Tensor) -> Implicit:
        """Anchored at Y."""
        n = Y.shape[-1]
        return cls(space, n, polar(Y[..., :n, :]))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What goes into the state, by key."""
        return {"anchor": self.R}

    def Y(self) -> None:
        """Not stored."""

    def global_grad(self, Y: Tensor, G: Tensor, out: Tensor) -> Tensor:
        """[skew(Y^T G); Q^T G], Q^T G = G2 - Z2 (I + Z1)^-1 (Z^T G + G1)."""
        n, R = self.n, self.R
        YG = Y.mT @ G
        K = _inverse(Y[..., :n, :], R)
        out[..., :n, :].copy_(self.space.skew(YG))
        lower = out[..., n:, :].copy_(G[..., n:, :])
        add_product(lower, Y[..., n:, :], R.mT @ (K @ (R @ YG + G[..., :n, :])), -1)
        return out

    def move(self, Y: Tensor, W: Tensor, retraction: Retraction, vectors: Sequence[Tensor], moved: Tensor) -> None:
        """Y <- Lambda R(W) E in place, and the `vectors` (P, N, n) to the frame at the new Y.

        Everything that changes is Y2, B and the vectors' lower blocks times n x n matrices:
        Y+ = Y + Y G1 - E U F2 + E_c B F2,  U = K^T R Y2^T B,  G1 = F1 - R^T U F2. Vectors that did not move are left
        alone to the bit: there `moved` (P, 1, 1) is 0.
        """
        n, R = self.n, self.R
        Y1, Y2, B = Y[..., :n, :], Y[..., n:, :], W[..., n:, :]
        Bt = B.mT
        F1, F2, T1, T2 = retraction.thin(W[..., :n, :], Bt @ B)
        if T1 is None or T2 is None:
            T1, T2 = F2, F2 / 2
        KR = _inverse(Y1, R).mT @ R
        M = Y2.mT @ B
        U = KR @ M
        G1 = F1 - R.mT @ U @ F2
        Y1_new = Y1 + (Y1 @ G1 - U @ F2)
        R_new, K_new = self._anchor(Y1_new)
        for X in vectors:
            m = X[..., n:, :]
            c = Bt @ m
            u = KR @ (Y2.mT @ m - M @ (T2 @ c))
            a = -T1 @ c - R.mT @ u  # Q_transported m = Y a - E u + E_c (m - B T2 c)
            b = R_new.mT @ (K_new @ (Y1 @ a - u))  # and its lower block less Y2+ b is Q+^T of it
            add_product(add_product(m, Y2, (a - b - G1 @ b) * moved), B, (T2 @ c + F2 @ b) * moved, -1)
        D = Y2 @ G1
        add_product(Y2, B, F2).add_(D)
        Y1.copy_(Y1_new)
        self.R.copy_(R_new)

    def _anchor(self, Y1: Tensor) -> tuple[Tensor, Tensor]:
        """R and (I + Z1)^-1 at a new point; R renewed where that inverse, at most 1 when anchored, has grown."""
        K = _inverse(Y1, self.R)
        if not self.look:
            return self.R, K
        worn = ~(torch.linalg.vector_norm(K, dim=(-2, -1)) <= 4 * math.sqrt(self.n))
        if torch.compiler.is_compiling():
            anchors: tuple[Tensor, Tensor] = torch.cond(worn.any(), _renewed, _as_they_are, (Y1, self.R, K, worn))
            return anchors
        return _renewed(Y1, self.R, K, worn) if bool(worn.any()) else (self.R, K)

    def long_move(self, Y: Tensor, index: Tensor, W: Tensor, retraction: Retraction, vectors: Sequence[Tensor]) -> None:
        """The same for some of the stack and a step of any length: in float64, and back to the space at once."""
        part = Implicit(self.space, self.n, self.R[index].double())
        y, moved = Y[index].double(), [X[index].double() for X in vectors]
        part.move(y, W, retraction, moved, torch.ones((), dtype=y.dtype, device=y.device))
        Y[index] = self.space.restore(y, self.n).to(Y.dtype)
        self.R[index] = part.R.to(self.R.dtype)
        for X, x in zip(vectors, moved, strict=True):
            X[index] = x.to(X.dtype)

    def is_due(self, age: int) -> bool:
        """Whether Y is to be polished at this age."""
        return age % POLISH_POINT == 0

    def polish(self, Y: Tensor, age: int, moved: Tensor, now: bool) -> None:
        """Y back to the space, O(N n^2)."""
        if now or age % POLISH_POINT == 0:
            self.space.polish(Y, self.n, moved)

    def rebuild(self, index: Tensor, Y: Tensor) -> None:
        """Anchored anew at the points Y for some of the stack."""
        self.R[index] = polar(Y[..., : self.n, :])

    def frame(self, Y: Tensor) -> Tensor:
        """Lambda, formed: (P, N, N), for those who go over to a transported section."""
        return self.space.section_matrix(Y, self.R)


Section = Transported | Implicit
SECTIONS = ("auto", "transported", "implicit")


def polar(X: Tensor) -> Tensor:
    """The orthogonal polar factor of square X, any one where X is singular."""
    U, _, Vh = torch.linalg.svd(X)
    return U @ Vh


def _renewed(Y1: Tensor, R: Tensor, K: Tensor, worn: Tensor) -> tuple[Tensor, Tensor]:
    R = torch.where(worn[:, None, None], polar(Y1), R)
    return R, _inverse(Y1, R)


def _as_they_are(Y1: Tensor, R: Tensor, K: Tensor, worn: Tensor) -> tuple[Tensor, Tensor]:
    return R.clone(), K.clone()


def _inverse(Y1: Tensor, R: Tensor) -> Tensor:
    """K = (I + Z1)^-1, Z1 = Y1 R^T."""
    K: Tensor = torch.linalg.inv_ex(eye_like(R) + Y1 @ R.mT)[0]
    return K


def choose(section: str, space: Space, N: int, n: int) -> type[Transported] | type[Implicit]:
    """The section class for a group's `section` key and a space. Where N = n there is no complement to do without."""
    if section == "implicit" and not isinstance(space, Orthogonal):
        raise ValueError(f"{space} has no implicit section; use section='transported'")
    implicit = section == "implicit" or (section == "auto" and isinstance(space, Orthogonal) and N >= AUTO_IMPLICIT)
    return Implicit if implicit and N > n else Transported
