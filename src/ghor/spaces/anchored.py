"""A section in closed form: Q is a function of Y and of one n x n rotation R, the anchor, and is never formed.

With P = (R + Y1)^-1, Y = [Y1; Y2], E_c the columns of the identity beyond those of E,

    Q X = E_c X - (Y R^H + E) P^H Y2^H X,         Q^H G = G2 - Y2 P (R Y^H G + G1)

in O(N n^2). P is well conditioned where R is near the polar factor of Y1: at most 1 when R *is* it, whatever Y.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..linalg import add_product, eye_like, frobenius, inverse, phases, polar, product, solve
from ..reads import may_read
from ..retraction import Retraction
from .form import Form


class Anchored(Form):
    """Matrix spaces of the orthogonal or unitary group."""

    implicit: ClassVar[bool] = True

    def section_matrix(self, Y: Tensor, R: Tensor | None = None) -> Tensor:
        """Lambda = [Y, Q] formed. By default R is the polar factor of Y1, so that section(E) = I.

        Autograd takes R as fixed, which is a smooth section too.
        """
        n = Y.shape[-1]
        R = polar(Y[..., :n, :].detach()) if R is None else R
        Z = Y @ R.mH
        Z1, Z2 = Z[..., :n, :], Z[..., n:, :]
        X = solve(eye_like(Z1) + Z1.mH, Z2.mH)  # (..., n, N-n)
        Q = torch.cat([-(X + Z1 @ X), eye_like(Z2.mH) - Z2 @ X], -2)
        return torch.cat([Y, Q], -1)

    def section_kind(self, asked: str, shape: Sequence[int]) -> str:
        """Where N = n there is no complement to do without. "auto" goes by time: `benchmarks/step.py --crossover`."""
        N, n = self.size(shape)
        faster = N >= 512 and 4 * n <= N
        return "implicit" if N > n and (asked == "implicit" or (asked == "auto" and faster)) else "transported"

    def implicit_start(self, Y: Tensor) -> Tensor:
        """The anchor for a point: R = polar(Y1)."""
        M = self.matrix(Y)
        return polar(M[..., : M.shape[-1], :])

    def implicit_frame(self, Y: Tensor, R: Tensor) -> Tensor:
        """Lambda itself, formed: for those who go over to a transported section."""
        return self.section_matrix(self.matrix(Y), R).mT.contiguous().mT

    def implicit_turn(self, Y: Tensor, R: Tensor, Lambda: Tensor, vectors: Sequence[Tensor]) -> None:
        """Vectors of g^hor from the frame Lambda to that of the anchor R, in place."""
        n = R.shape[-1]
        turn = self.implicit_frame(Y, R)[..., n:].mH @ Lambda[..., n:]
        for X in map(self.matrix, vectors):
            X[..., n:, :] = turn @ X[..., n:, :]

    def implicit_polish(self, Y: Tensor, share: Tensor | float) -> None:
        """`polish` of the point alone, in place, O(N n^2)."""
        self.polish(self.matrix(Y), Y, share, point_only=True)

    def implicit_restore(self, Y: Tensor) -> Tensor:
        """Back to the space from further away."""
        return self.unmatrix(self.restore(self.matrix(Y), Y), Y.shape)

    def checked_anchor(self, R: Tensor) -> Tensor:
        """An anchor that comes from a file: rounding repaired, ValueError if it is none."""
        off = frobenius(R.mH @ R - eye_like(R))
        if not bool((off <= 0.005 * math.sqrt(R.shape[-1])).all()):
            raise ValueError(
                f"a loaded anchor is {float(off.max()):.1e} off a rotation; load another state, or delete the key "
                "'anchor' from it: it is then found from the weight"
            )
        good = off <= 100 * torch.finfo(R.dtype).eps * math.sqrt(R.shape[-1])
        return R if bool(good.all()) else torch.where(good[..., None, None], R, polar(R))

    def implicit_inverse(self, Y: Tensor, R: Tensor) -> Tensor:
        """P = (R + Y1)^-1."""
        return inverse(R + self.matrix(Y)[..., : R.shape[-1], :])

    def implicit_apply(self, Y: Tensor, R: Tensor, P: Tensor, X: Tensor) -> Tensor:
        """Lambda X of tall X: Y X1 + Q X2, Q X2 = E_c X2 - (Y R^H + E) P^H Y2^H X2. Differentiable in X."""
        Y, n = self.matrix(Y), R.shape[-1]
        U = P.mH @ (Y[..., n:, :].mH @ X[..., n:, :])
        return Y @ (X[..., :n, :] - R.mH @ U) + torch.cat([-U, X[..., n:, :]], -2)

    def implicit_grad(self, Y: Tensor, R: Tensor, P: Tensor, G: Tensor, out: Tensor) -> Tensor:
        """`global_grad` in this frame: [skew(Y^H G); G2 - Y2 P (R Y^H G + G1)]."""
        Y, G, M = self.matrix(Y), self.matrix(G), self.matrix(out)
        n = R.shape[-1]
        YG = Y.mH @ G
        M[..., :n, :] = self.skew(YG)
        lower = M[..., n:, :].copy_(G[..., n:, :])
        add_product(lower, Y[..., n:, :], P @ (R @ YG + G[..., :n, :]), -1)
        return out

    def implicit_update(
        self,
        Y: Tensor,
        R: Tensor,
        P: Tensor,
        W: Tensor,
        retraction: Retraction,
        vectors: Sequence[Tensor],
        moved: Tensor,
        squares: Sequence[Tensor] = (),
    ) -> Tensor:
        """Y <- Lambda R(W) E and the `vectors` of g^hor to the frame at the new Y, in place; returns the new P.

        Everything that changes is Y2, B and the vectors' lower blocks times n x n matrices:
        Y+ = Y + Y G1 - E U F2 + E_c B F2,  U = P^H Y2^H B,  G1 = F1 - R^H U F2. Vectors that did not move are left
        alone to the bit: there `moved`, (...), is 0. Where P has grown the anchor is renewed.
        """
        Y, W, moved = self.matrix(Y), self.matrix(W), moved[..., None, None]
        n = R.shape[-1]
        Y1, Y2, B = Y[..., :n, :], Y[..., n:, :], W[..., n:, :]
        F1, F2, T1, T2 = retraction.thin(W[..., :n, :], product(B.mH, B))
        M = Y2.mH @ B
        UF = P.mH @ M @ F2
        G1 = F1 - R.mH @ UF
        Y1_new = Y1 + (Y1 @ G1 - UF)
        R_new, P_new = self._anchor(Y1_new, R)
        for X in map(self.matrix, vectors):
            m = X[..., n:, :]
            c = B.mH @ m
            T1c, T2c = T1 @ c, T2 @ c
            u = P.mH @ (Y2.mH @ m - M @ T2c)
            a = -T1c - R.mH @ u  # Q_transported m = Y a - E u + E_c (m - B T2 c)
            b = P_new @ (Y1 @ a - u)  # and its lower block less Y2+ b is Q+^H of it
            add_product(add_product(m, Y2, (a - b - G1 @ b) * moved), B, (T2c + F2 @ b) * moved, -1)
        D = Y2 @ G1
        add_product(Y2, B, F2).add_(D)
        Y1.copy_(Y1_new)
        R.copy_(R_new)
        return P_new

    def _anchor(self, Y1: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
        """R and P at a new point; R renewed where P, at most 1 when anchored, has grown."""
        P = inverse(R + Y1)
        worn = ~(torch.linalg.vector_norm(P, dim=(-2, -1)) <= 4 * math.sqrt(R.shape[-1]))
        if torch.compiler.is_compiling():
            anchors: tuple[Tensor, Tensor] = torch.cond(worn.any(), _renewed, _as_they_are, (Y1, R, P, worn))
            return anchors
        if not may_read(P):  # Y1 = Q T, T with a positive diagonal: I + T is well enough conditioned, too
            Q, T = torch.linalg.qr(Y1)
            R = torch.where(worn[..., None, None], Q * phases(T.diagonal(dim1=-2, dim2=-1)).unsqueeze(-2), R)
            return R, inverse(R + Y1)
        return _renewed(Y1, R, P, worn) if bool(worn.any()) else (R, P)


def _renewed(Y1: Tensor, R: Tensor, P: Tensor, worn: Tensor) -> tuple[Tensor, Tensor]:
    R = torch.where(worn[..., None, None], polar(Y1), R)
    return R, inverse(R + Y1)


def _as_they_are(Y1: Tensor, R: Tensor, P: Tensor, worn: Tensor) -> tuple[Tensor, Tensor]:
    return R.clone(), P.clone()
