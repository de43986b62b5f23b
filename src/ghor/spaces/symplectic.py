"""The spaces of Sp(2N): symplectic Stiefel and symplectic Grassmann."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ghor.linalg import everywhere, extremes, eye, finite, inner, inverse, largest, polar, size, solve
from ghor.spaces.base import unit_tolerance
from ghor.spaces.frames import Frame
from ghor.spaces.matrix import Matrices, Subspaces
from ghor.spaces.points import on_points
from ghor.spaces.retraction import Retraction, by_name, geodesic
from ghor.spaces.stiefel import Stiefel

# The largest eps ||Lambda||^2 that a step may lead to: so far may rounding take a point off its space.
LOST = 1e-3


class Symplectic(Matrices):
    """Spaces of Sp(2N), X* = X+ = J^T X^T J, J = [[0, I], [-I, 0]].

    E is the columns 1..n and N+1..N+n of I_2N. In Lambda = [U, Q] the columns of U come first, not in the
    places that E gives them, so that Lambda^T J Lambda = diag(J_2n, J_2(N-n)). The group is not compact:
    points can grow without bound, a matrix far away has no nearest point, and some pairs of points are not
    joined by a canonical geodesic. Rounding takes a point off the space by eps ||U||^2, so each dtype has
    room only for points up to a certain size, see `shortening`.
    """

    compact: ClassVar[bool] = False

    def check_size(self, N: int, n: int) -> None:
        super().check_size(N, n)
        if N % 2 or n % 2:
            raise ValueError("holds matrices with even sides 2N x 2n")

    def star(self, X: Tensor) -> Tensor:
        """X+ = J^T X^T J: blocks [[a, b], [c, d]] -> [[d^T, -b^T], [-c^T, a^T]]."""
        (a, b), (c, d) = (half.chunk(2, -1) for half in X.chunk(2, -2))
        return torch.cat([torch.cat([d.mT, -b.mT], -1), torch.cat([-c.mT, a.mT], -1)], -2)

    def distinct(self, y: Tensor) -> Tensor:
        """Columns 1..n and N+1..N+n of I_2N."""
        N, n = y.shape[-2] // 2, y.shape[-1] // 2
        I = torch.eye(2 * N, dtype=y.dtype, device=y.device)
        return torch.cat([I[:, :n], I[:, N : N + n]], -1)

    @on_points("p>n")
    def tolerance(self, Y: Tensor, *, eps: float = 0.0) -> Tensor:
        """The rounding of U+ U, which grows with ||U||^2; half precision has few digits to spare."""
        grown = (2 if eps > 1e-4 else 10) * size(Y)[..., 0, 0] ** 2
        return unit_tolerance(eps) * Y.shape[-1] ** 0.5 + eps * grown

    def tangent_tolerance(self, y: Tensor, eps: float) -> Tensor:
        """(100 + 10 ||U||^2) eps, as U U+ V rounds."""
        return (100 + 10 * size(y)[..., 0, 0] ** 2) * eps

    def complement(self, y: Tensor) -> Tensor:
        """Q: an orthonormal basis Z of ker(U+), made symplectic by the eigenvectors V of i Z^T J Z.

        Eigenvalues are repeated, so V is any unitary basis of its eigenspaces. Q is made of that basis which
        is nearest to a fixed matrix C, Z V w^(-1/2) polar((Z V)^H C): a function of U alone, up to rounding.
        """
        N, n = y.shape[-2:]
        if N == n:
            return y[..., :0]
        good = finite(y)  # eigh would raise
        y = torch.where(good, y, self.distinct(y))
        m, Z = (N - n) // 2, torch.linalg.qr(times_J(y), mode="complete")[0][..., n:]  # the kernel of U+
        K = Z.mT @ times_J(Z)
        w, V = torch.linalg.eigh(1j * (K - K.mT) / 2)  # ascending pairs -w, w: the last m are positive
        V = Z.to(V.dtype) @ V[..., m:]
        # C is generic: with one of zeros and ones, points of zeros and ones could have two nearest bases.
        gen = torch.Generator().manual_seed(0)
        C = torch.randn(N, m, generator=gen, dtype=torch.complex128, device="cpu")
        V = (V * (2 / w[..., m:]).sqrt().unsqueeze(-2)) @ polar(V.mH @ C.to(V))
        Q = torch.cat([V.imag, V.real], -1)
        Q = Q - y @ (self.star(y) @ Q)
        return torch.where(good, Q @ (3 * eye(Q) - self.star(Q) @ Q) / 2, torch.nan)

    def away(self, frame: Frame, y0: Tensor, out: Tensor) -> None:
        """The difference y - y0 in g^hor, shortened to at most one radian.

        It stands in for the logarithm, which does not exist here. global_rep takes Lambda^-1 where the
        gradient of |y - y0|^2/2 has Lambda^T, so near y0 the rate of decay is the same for weights of any
        size; far away the bound holds.
        """
        y = frame.point()
        out.copy_(self.global_rep(frame.tensors()["section"], y - self.representative(y, y0)))
        out.mul_((1 / size(out).clamp_min(torch.finfo(out.dtype).tiny)).clamp_max(1))

    # -- points ----------------------------------------------------------------------------------------------

    def nearest(self, x: Tensor) -> Tensor:
        """X (X+ X)^(-1/2), by Newton's iteration for the root (Denman and Beavers)."""
        P = self.star(x) @ x
        Z = eye(P).expand_as(P)
        for _ in range(40):  # P -> the root of X+ X, Z -> its inverse
            P, Z = (P + inverse(Z)) / 2, (Z + inverse(P)) / 2
        x = x @ Z
        for _ in range(2):  # Newton-Schulz: the inverses have lost digits
            x = x @ (3 * eye(x) - self.star(x) @ x) / 2
        return x

    def check_near(self, x: Tensor, y: Tensor, shape: Sequence[int]) -> None:
        """X must be near the space."""
        rounding = 1e3 * torch.finfo(y.dtype).eps * (1 + size(y)[..., 0, 0] ** 2)
        if not everywhere(self.residual(y) <= rounding.clamp_max(1)):  # at most 1, however large the point is
            raise ValueError(
                f"the matrix is {largest(self.residual(x)):.1e} off {self}, too far to tell which point "
                f"is meant; initialise it first, for example with {self}.random{tuple(shape)}"
            )

    def draw(self, normal: Tensor) -> Tensor:
        """A uniform orthogonal point [[Re Q, -Im Q], [Im Q, Re Q]] of a complex N x n matrix, Q^H Q = I."""
        re, im = normal.chunk(2, -2)[0].chunk(2, -1)
        Q = Stiefel().geometry.draw(torch.complex(re.contiguous(), im.contiguous()))
        return torch.cat([torch.cat([Q.real, -Q.imag], -1), torch.cat([Q.imag, Q.real], -1)], -2)

    # -- steps -----------------------------------------------------------------------------------------------

    def limit(self, L: Tensor) -> float:
        """The largest ||Lambda||_F allowed; that of an orthogonal frame is sqrt(2N)."""
        return math.sqrt(LOST / torch.finfo(L.dtype).eps + L.shape[-1])

    def digits_end(self, eps: float) -> str:
        """Where the digits end, for a warning."""
        return f"to a section of norm {math.sqrt(LOST / eps):.0e}"

    def shortening(self, L: Tensor, w: Tensor, length: Tensor) -> Tensor | None:
        """The part of w that keeps ||Lambda|| <= limit; L is Lambda^T. The greatest s <= 1 with

        log ||Lambda|| + s g + 2 s^2 (||A|| + ||B||)^2 <= log limit,  g = <Lambda, Lambda W>/||Lambda||^2
        """
        n, total = w.shape[-1], size(L)
        most = extremes(length)[1]
        bound = most * (2 + 4 * most)  # g <= 2 l and ||A|| + ||B|| <= sqrt(2) l for the length l of w
        if bound < 1e2 and extremes(total)[1] * math.exp(bound) <= self.limit(L):
            return None
        A, B = w[..., :n, :], w[..., n:, :]
        room, square = (self.limit(L) / total).log().clamp_min(0), 2 * (size(A) + size(B)) ** 2
        K = (L[..., :n, :] @ L.mT).mT  # Lambda^T y
        growth = (inner(K, w) - inner(K[..., n:, :].mT, self.star(B)))[:, None, None] / total**2
        least = torch.finfo(L.dtype).tiny
        s = ((growth**2 + 4 * square * room).sqrt() - growth) / (2 * square.clamp_min(least))
        return torch.where(length * (2 + 4 * length) > room, s.clamp(0, 1), 1)

    @on_points("pv>p")
    def retract(self, Y: Tensor, Delta: Tensor, retraction: str | Retraction = "cayley") -> Tensor:
        """R(Omega(Delta)) Y; Cayley as long as Omega has no eigenvalue above 3/2, continued by the geodesic.

        Cayley's (I - Omega/2)^-1 has a pole where Omega has the eigenvalue 2; beyond it longer vectors would
        lead to nearer points. With A = Y+ Delta and K = Delta - Y A, the eigenvalues are those of
        [[A, -K+ K], [I, 0]], and their squares are at most ||A||^2 + 2 ||K+ K||, 2 for ||W|| = 1.
        """
        R = by_name(retraction)
        if R is geodesic:
            return Y + self.displacement(Y, Delta, Y, R)
        A = self.star(Y) @ Delta
        K = Delta - Y @ A
        square = (size(A) ** 2 + 2 * size(self.star(K) @ K)).detach()
        long = square > 2.25
        share = torch.where(long, 1.5 * square.rsqrt(), 1)
        Z = Y if everywhere(~long) else Y + self.displacement(Y, (1 - share) * Delta, Y, geodesic)
        return Z + self.displacement(Y, share * Delta, Z, R)


class SymplecticStiefel(Symplectic):
    """The symplectic Stiefel manifold {U: U+ U = I}, U+ = J^T U^T J, of real (..., 2N, 2n) matrices.

    Metric: the right-invariant one of Bendokat and Zimmermann (2021, arXiv 2108.12447). g^hor: A Hamiltonian
    (2n x 2n), B arbitrary (2(N-n) x 2n).

    >>> U = SymplecticStiefel().random(8, 4)
    >>> bool(SymplecticStiefel().residual(U) < 1e-5)
    True
    """

    @on_points("pvv>m")
    def metric(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """tr(U^T (I - J^T Y (Y^T Y)^-1 Y^T J/2) V (Y^T Y)^-1)."""
        P, JY = Y.mT @ Y, -times_J(Y)
        a = solve(P, V, left=False)
        return inner(U, a) - ((JY.mT @ U) * solve(P, JY.mT @ a)).sum((-2, -1)) / 2

    @on_points("pv>v")
    def rgrad(self, Y: Tensor, G: Tensor) -> Tensor:
        """G Y^T Y + J Y G^T J Y, the gradient in the right-invariant metric.

        A step uses the derivative along W instead: this metric has an Omega of its own, and the signs of this
        gradient, taken to g^hor by the canonical Omega, need not point downhill.
        """
        JY = times_J(Y)
        return G @ (Y.mT @ Y) + JY @ (G.mT @ JY)


class SymplecticGrassmann(Subspaces, Symplectic):
    """The symplectic Grassmann manifold of subspaces span(U), U+ U = I, held by real (..., 2N, 2n) matrices.

    U and U K, K symplectic, are the same point; the projection onto it is U U+. Tangent vectors have
    U+ V = 0. g^hor: A = 0, B arbitrary (2(N-n) x 2n).

    >>> SymplecticGrassmann().random(8, 4).shape
    torch.Size([8, 4])
    """

    @on_points("pvv>m")
    def metric(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """tr(U^T V (Y^T Y)^-1): symplectic Stiefel's for Y+ U = 0, and the same for every basis Y K."""
        return inner(U, solve(Y.mT @ Y, V, left=False))

    @on_points("pv>v")
    def rgrad(self, Y: Tensor, G: Tensor) -> Tensor:
        """(I - J Y (Y^T Y)^-1 Y^T J^T) G Y^T Y, the gradient in this metric."""
        P, JY = Y.mT @ Y, times_J(Y)
        X = G @ P
        return X - JY @ solve(P, JY.mT @ X)


def times_J(X: Tensor) -> Tensor:
    """J X."""
    a, b = X.chunk(2, -2)
    return torch.cat([b, -a], -2)
