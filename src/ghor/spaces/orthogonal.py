"""Spaces of SO(N), or of U(N) for complex tensors: points, the canonical metric, and the closed-form section.

The closed-form ("implicit") section: write Y = [Y1; Y2] with Y1 n x n, and let R be a unitary n x n matrix
near Y1, the *anchor*. With P = (R + Y1)^-1

    Lambda X = Y X1 + Q X2,    Q X2 = E_c X2 - (Y R^H + E) P^H Y2^H X2,    X = [X1; X2]

is a frame above Y that is never formed: applying it costs O(N n^2), and its state is the n^2 numbers of R.
||P|| <= 1 for R = polar(Y1). R stays fixed, so that the frame turns slowly, and is renewed once P has grown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from ghor._torch.transforms import differentiated
from ghor._torch.values import may_read
from ghor.linalg import (
    NARROW,
    add_product,
    dot,
    everywhere,
    eye_like,
    frobenius,
    gram_function,
    inverse,
    inverse_near,
    largest,
    phases,
    plus_product,
    polar,
    product,
    solve,
    spectral_bound,
    times,
    with_value,
)
from ghor.retraction import Retraction
from ghor.spaces.base import Space, compute
from ghor.spaces.matrix import MatrixSpace


class Orthogonal(MatrixSpace):
    """Spaces of SO(N), X* = X^T, or of U(N), X* = X^H."""

    implicit: ClassVar[bool] = True

    def angle(self, W: Tensor) -> Tensor:
        """(a + sqrt(a^2 + 4 b^2))/2 with a >= ||A||_2 and b >= ||B||_2, a bound of ||[[A, -B^H], [B, 0]]||_2.

        That norm is the largest angle of exp(W); Cayley turns by less. The bound is exact if A or B is 0 and
        the other has rank one (two for A), and up to rounding and n^(1/16) in general if one of them is 0.
        """
        M = self.matrix(W)
        n = M.shape[-1]
        a = spectral_bound(M[..., :n, :], 1 if W.is_complex() else 2)
        b = spectral_bound(M[..., n:, :])
        return (a + torch.hypot(a, 2 * b)) / 2

    # -- points ----------------------------------------------------------------------------------------------

    def check_dtype(self, dtype: torch.dtype) -> None:
        if not (dtype.is_floating_point or dtype in (torch.complex64, torch.complex128)):
            kinds = "floating point tensors, real, complex64 or complex128"
            raise TypeError(f"weights on {self} are {kinds}, not {dtype}; convert with .float()")

    def random(
        self,
        *shape: int,
        generator: Generator | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> Tensor:
        """A uniform (Haar) point: the Q of a normal matrix Q R, with diag(R) made positive."""
        self.check(shape, dtype or torch.get_default_dtype())
        X = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        M, R = torch.linalg.qr(compute(self.matrix(X)))
        M = self._orient(M * phases(R.diagonal(dim1=-2, dim2=-1)).unsqueeze(-2), eye_like(M))
        return self.unmatrix(M, shape).to(X.dtype).contiguous()

    def project(self, X: Tensor) -> Tensor:
        """The nearest point, X (X^H X)^(-1/2), the polar factor of X; X must have full rank."""
        self.check(X.shape, X.dtype)
        M = compute(self.matrix(X))
        if not everywhere(torch.isfinite(M)):
            raise ValueError(f"a matrix with NaN or infinite entries has no nearest point on {self}")
        tiny = torch.finfo(M.dtype).tiny
        # Scaled by the largest entry, because 1e30 squared overflows float32.
        M = M / M.detach().abs().amax((-2, -1), keepdim=True).clamp_min(tiny)
        U, s, Vh = torch.linalg.svd(M.detach(), full_matrices=False)
        rank = (s > s[..., :1] * max(M.shape[-2:]) * torch.finfo(M.dtype).eps).sum(-1)
        if not everywhere(rank == M.shape[-1]):
            raise ValueError(
                f"a matrix of rank {-int(largest(-rank))} < {M.shape[-1]} has no nearest point on {self}; "
                f"initialise it first, for example with {self}.random{tuple(X.shape)}"
            )
        Y = self._orient(U, Vh) @ Vh
        Y = Y + Y @ (eye_like(Y) - product(Y.mH, Y)) / 2  # LAPACK's U V^H is orthogonal to 1e-5 in float32
        # The SVD has no derivative where singular values coincide, as all of them do on the space.
        if differentiated(X):
            smooth = M @ gram_function(M.mH, lambda t: (t.rsqrt(), -(t**-1.5) / 2), zero=0.0)
            Y = with_value(smooth, Y)
        return self.unmatrix(Y, X.shape).to(X.dtype).contiguous()

    def _orient(self, U: Tensor, V: Tensor) -> Tensor:
        """U, with its last column negated where U V is not in the component that is the space."""
        return U

    # -- the canonical metric --------------------------------------------------------------------------------

    def metric(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """The canonical metric Re tr(U^H (I - Y Y^H/2) V) = Re tr(Omega(U)^H Omega(V))/2."""
        M, UM, VM = self.matrix(Y), self.matrix(U), self.matrix(V)
        return dot(UM, VM) - dot(M.mH @ UM, M.mH @ VM) / 2

    def rgrad(self, Y: Tensor, G: Tensor) -> Tensor:
        """G - Y Y^H G + Y skew(Y^H G), the gradient in the canonical metric; on Stiefel, G - Y G^H Y."""
        M, GM = self.matrix(Y), self.matrix(G)
        YG = M.mH @ GM
        return self.unmatrix(GM + M @ (self.skew(YG) - YG), Y.shape)

    # -- sections --------------------------------------------------------------------------------------------

    def inverse(self, Lambda: Tensor, n: int) -> Tensor:
        """Lambda^H."""
        return Lambda.mH

    def section_matrix(self, Y: Tensor, R: Tensor | None = None) -> Tensor:
        """The closed-form section Lambda = [Y, Q], formed. By default R = polar(Y1), so that section(E) = I.

        Autograd takes R as constant: a section with a fixed anchor is smooth, too.
        """
        n = Y.shape[-1]
        R = polar(Y[..., :n, :].detach()) if R is None else R
        Z = Y @ R.mH
        Z1, Z2 = Z[..., :n, :], Z[..., n:, :]
        X = solve(eye_like(Z1) + Z1.mH, Z2.mH)  # (..., n, N-n)
        Q = torch.cat([-(X + Z1 @ X), eye_like(Z2.mH) - Z2 @ X], -2)
        return torch.cat([Y, Q], -1)

    def restore(self, Lambda: Tensor, E: Tensor) -> Tensor:
        """The Q of Lambda = Q R, diag(R) > 0: Householder reflections work from any distance."""
        Q, R = torch.linalg.qr(Lambda)
        return Q * phases(R.diagonal(dim1=-2, dim2=-1)).unsqueeze(-2)

    def section_kind(self, asked: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> str:
        """Transported if N = n, where there is no Q to save storing; otherwise "auto" is the faster kind.

        `benchmarks/step.py --crossover` measures where the two are equally fast.
        """
        N, n = self.size(shape)
        faster = N >= 512 and 4 * n <= N
        implicit = asked == "implicit" or (asked == "auto" and faster)
        return "implicit" if N > n and implicit else "transported"

    # -- the closed-form section: Algorithm 3 ----------------------------------------------------------------

    def implicit_start(self, Y: Tensor) -> Tensor:
        """The anchor R = polar(Y1)."""
        M = self.matrix(Y)
        return polar(M[..., : M.shape[-1], :])

    def implicit_near(self, R: Tensor, Y: Tensor) -> Tensor:
        """The anchor R, or where that is too far from Y1, a new one."""
        P = self.implicit_inverse(Y, R).flatten(1)  # of norm sqrt(n) at most where just anchored
        worn = ~(torch.linalg.vector_norm(P, dim=1) <= 4 * P.shape[1] ** 0.25)
        return torch.where(worn.view(-1, *[1] * (R.dim() - 1)), self.implicit_start(Y), R)

    def implicit_inverse(self, Y: Tensor, R: Tensor) -> Tensor:
        """P = (R + Y1)^-1."""
        return inverse(R + self.matrix(Y)[..., : R.shape[-1], :])

    def implicit_grad(self, Y: Tensor, R: Tensor, P: Tensor, G: Tensor, out: Tensor) -> Tensor:
        """`global_grad` in this frame: [skew(Y^H G); G2 - Y2 P (R Y^H G + G1)]."""
        Y, G, M = self.matrix(Y), self.matrix(G), self.matrix(out)
        n = R.shape[-1]
        YG = Y.mH @ G
        lower = M[..., n:, :].copy_(G[..., n:, :])
        add_product(lower, Y[..., n:, :], P @ plus_product(G[..., :n, :], R, YG), -1)
        M[..., :n, :] = self.skew(YG)
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
        span: tuple[float, float] | None = None,
        scratch: Tensor | None = None,
    ) -> Tensor:
        """Y <- Lambda R(W) E, and `vectors` of g^hor to the frame at the new Y, in place; returns the new P.

        With U = -P^H Y2^H B, Z = [U; B], that is Q B = Z + Y R^H U, and F1, F2, T1, T2 of `ghor.retraction`:

            D = Y (F1 + R^H U F2) + Z F2,    Y+ = Y + D

        For Cayley, D = (Y (M + R^H U) + Z) F2. A vector with the lower block m is transported to Q m - T c,
        c = B^H m; with y = R^H P^H Y2^H m its coordinates at the new point are

            m + D2 f - B T2 c - Y2+ P+ (D1 f - U T2 c + (R+ - R) y + R+ h),    f = y + h

        where h = (T1 + R^H U T2) c. For Cayley, D2 f - Y2+ P+ (D1 f + (R+ - R) y + R+ c), f = y + c/2, is
        added. Terms are as small as the step, so that nothing of the size of m cancels, and W = 0 changes no
        bit. The anchor is renewed where P has grown. W is overwritten.
        """
        Y, W = self.matrix(Y), self.matrix(W)
        n = R.shape[-1]
        Y1, Y2, A, B = Y[..., :n, :], Y[..., n:, :], W[..., :n, :], W[..., n:, :]
        lower = [self.matrix(X)[..., n:, :] for X in vectors]
        # Side by side, if that makes products faster and not only larger.
        pieces = [torch.cat([B, *lower], -1)] if lower and n <= NARROW else [B, *lower]
        YZ = [Y2.mH @ Z for Z in pieces]
        PZ = [plus_product(X, P.mH, X, alpha=-1, beta=0) for X in YZ]
        C, *cs = _split([product(B.mH, Z) for Z in pieces], n)
        U, *Rys = _split(PZ, n)  # R y, y and f with a minus sign from here on
        RU, *ys = _split([R.mH @ X for X in PZ], n)
        turns: list[tuple[Tensor, Tensor, Tensor | None]]  # h, f, T2 c
        if retraction.factors is not None:
            M, F2 = retraction.factors(A, C, False)
            A.copy_(U)
            D = times(add_product(W, Y, M.add_(RU)), F2)
            turns = [(c, torch.sub(y, c, alpha=0.5), None) for c, y in zip(cs, ys, strict=True)]
        else:
            F1, F2, T1, T2 = retraction.thin(A, C)
            A.copy_(U)
            D = add_product(times(W, F2), Y, plus_product(F1, RU, F2))
            turns = [(h := T1 @ c + RU @ (T2 @ c), y - h, T2 @ c) for c, y in zip(cs, ys, strict=True)]
        Y.add_(D)
        R_new, P_new = self._anchor(Y1, R, P)
        for m, (h, f, T2c), Ry in zip(lower, turns, Rys, strict=True):
            V = plus_product(R_new @ h, D[..., :n, :], f, -1)
            V = V if R_new is R else plus_product(V, (R_new - R) @ R.mH, Ry, -1)
            add_product(m, D[..., n:, :], f, -1)
            if T2c is not None:
                V = plus_product(V, U, T2c, -1)
                add_product(m, B, T2c, -1)
            add_product(m, Y2, P_new @ V, -1)
        if R_new is not R:
            R.copy_(R_new)
        return P_new

    def _anchor(self, Y1: Tensor, R: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
        """R and P at a point near; R is renewed where P, of norm at most 1 when anchored, has grown."""
        P = inverse_near(R + Y1, P)
        norm, most = torch.linalg.vector_norm(P, dim=(-2, -1)), 4 * math.sqrt(R.shape[-1])  # fresh: sqrt(n)
        readable = may_read(P) and not torch.compiler.is_compiling()
        if readable and largest(norm) <= most:
            return R, P
        worn = ~(norm <= most)  # written with ~ so that a NaN counts as worn, too
        if readable:
            return _renewed(Y1, R, P, worn)
        if torch.compiler.is_compiling():
            anchors: tuple[Tensor, Tensor] = torch.cond(worn.any(), _renewed, _as_they_are, (Y1, R, P, worn))
            return anchors
        # Where `worn` may not be read, every step computes a new anchor, by QR, since an SVD would wait for
        # the device: Y1 = Q T with diag(T) > 0, and R + Y1 = Q (I + T) is well enough conditioned, too.
        Q, T = torch.linalg.qr(Y1)
        R = torch.where(worn[..., None, None], Q * phases(T.diagonal(dim1=-2, dim2=-1)).unsqueeze(-2), R)
        return R, inverse(R + Y1)

    # -- the closed-form section: repair, checks, conversion -------------------------------------------------

    def implicit_polish(self, Y: Tensor, R: Tensor, share: Tensor | float) -> None:
        """Repair rounding of the point, in place, O(N n^2); see `polish`."""
        self.polish(self.matrix(Y), Y, share, point_only=True)

    def implicit_restore(self, Y: Tensor, R: Tensor) -> Tensor:
        """Bring Y back to the space from further away."""
        return self.unmatrix(self.restore(self.matrix(Y), Y), Y.shape)

    def checked_anchor(self, R: Tensor) -> Tensor:
        """An anchor read from a file, its rounding repaired; ValueError if it is not unitary."""
        off = frobenius(R.mH @ R - eye_like(R))
        if not bool((off <= 0.005 * math.sqrt(R.shape[-1])).all()):
            raise ValueError(
                f"a loaded anchor is {float(off.max()):.1e} off a rotation; load another state, or delete "
                "the key 'frame_anchor' from it: it is then found from the weight"
            )
        good = off <= 100 * torch.finfo(R.dtype).eps * math.sqrt(R.shape[-1])
        return R if bool(good.all()) else torch.where(good[..., None, None], R, polar(R))

    def implicit_apply(self, Y: Tensor, R: Tensor, P: Tensor, X: Tensor) -> Tensor:
        """Lambda X for tall X, differentiable in X."""
        Y, n = self.matrix(Y), R.shape[-1]
        U = P.mH @ (Y[..., n:, :].mH @ X[..., n:, :])
        return Y @ (X[..., :n, :] - R.mH @ U) + torch.cat([-U, X[..., n:, :]], -2)

    def implicit_frame(self, Y: Tensor, R: Tensor) -> Tensor:
        """Lambda, formed: the start of a transported section."""
        return self.section_matrix(self.matrix(Y), R).mT.contiguous().mT

    def implicit_turn(self, Y: Tensor, R: Tensor, Lambda: Tensor, vectors: Sequence[Tensor]) -> None:
        """Turn vectors of g^hor from the frame Lambda to that of the anchor R, in place."""
        n = R.shape[-1]
        turn = self.implicit_frame(Y, R)[..., n:].mH @ Lambda[..., n:]
        for X in map(self.matrix, vectors):
            X[..., n:, :] = turn @ X[..., n:, :]


def _split(pieces: Sequence[Tensor], n: int) -> list[Tensor]:
    """The n x n matrices that lie side by side in each of the pieces."""
    return [X for piece in pieces for X in piece.split(n, -1)]


# The branches of torch.cond, which must take the same tensors and may not return one of their arguments.


def _renewed(Y1: Tensor, R: Tensor, P: Tensor, worn: Tensor) -> tuple[Tensor, Tensor]:
    R = torch.where(worn[..., None, None], polar(Y1), R)
    return R, inverse(R + Y1)


def _as_they_are(Y1: Tensor, R: Tensor, P: Tensor, worn: Tensor) -> tuple[Tensor, Tensor]:
    return R.clone(), P.clone()


def require_geodesic(space: Space, Y: Tensor, Z: Tensor, Delta: Tensor) -> Tensor:
    """Delta, if exp(Y, Delta) = Z; else ValueError.

    At the cut locus a logarithm is not unique, and an iteration for it may fail to converge.
    """
    with torch.no_grad():
        off = largest((space.exp(Y, Delta) - Z).abs())
    if not off <= torch.finfo(Y.dtype).eps ** 0.5:
        if not everywhere(torch.isfinite(Y) & torch.isfinite(Z)):
            raise ValueError(f"{space}.log: there are NaN or infinite entries among the points")
        raise ValueError(
            f"{space}.log: the points are at or near the cut locus, or in different components (exp(log) "
            f"misses by {off:.1e})"
        )
    return Delta
