"""The spaces of Sp(2N): symplectic Stiefel and symplectic Grassmann."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from ghor._torch.precision import COMPUTE_DTYPE
from ghor._torch.values import may_read
from ghor.linalg import dot, everywhere, eye_like, frobenius, inverse, largest, phases, solve
from ghor.retraction import Retraction, by_name
from ghor.spaces.base import compute
from ghor.spaces.framed import readable
from ghor.spaces.grassmann import Subspaces
from ghor.spaces.matrix import MatrixSpace

# The largest eps ||Lambda||^2 that `bounded` allows: so far may rounding take a point off its space.
LOST = 1e-3


class Symplectic(MatrixSpace):
    """Spaces of Sp(2N), X* = X+ = J^T X^T J, J = [[0, I], [-I, 0]].

    E is the columns 1..n and N+1..N+n of I_2N. In Lambda = [U, Q] the columns of U come first, not in the
    places that E gives them, so that Lambda^T J Lambda = diag(J_2n, J_2(N-n)). The group is not compact:
    points can grow without bound, a matrix far away has no nearest point, and some pairs of points are not
    joined by a canonical geodesic. Rounding takes a point off the space by eps ||U||^2, so each dtype has
    room only for points up to a certain size, see `bounded`.
    """

    compact: ClassVar[bool] = False

    # ||W|| < 2 keeps I - W/2 invertible; a longer velocity would also multiply U's condition by e^||W||.
    max_velocity: ClassVar[float] = 1.0

    def check_shape(self, shape: Sequence[int]) -> None:
        super().check_shape(shape)
        if any(side % 2 for side in self.size(shape)):
            raise ValueError(f"{self} holds matrices with even sides 2N x 2n, got shape {tuple(shape)}")

    def star(self, X: Tensor) -> Tensor:
        """X+ = J^T X^T J: blocks [[a, b], [c, d]] -> [[d^T, -b^T], [-c^T, a^T]]."""
        a, b = X.shape[-2] // 2, X.shape[-1] // 2
        top = torch.cat([X[..., a:, b:].mT, -X[..., :a, b:].mT], -1)
        return torch.cat([top, torch.cat([-X[..., a:, :b].mT, X[..., :a, :b].mT], -1)], -2)

    def tolerance(self, Y: Tensor) -> Tensor:
        """The rounding of U+ U, which grows with ||U||^2; half precision has few digits to spare."""
        eps = torch.finfo(Y.dtype).eps * (2 if Y.dtype in COMPUTE_DTYPE else 10)
        return self.room(Y) + eps * frobenius(compute(self.matrix(Y))) ** 2

    def is_tangent(self, Y: Tensor, V: Tensor, tol: float | Tensor | None = None) -> bool:
        """||V - tangent(Y, V)|| <= tol ||V||, by default tol = (100 + 10 ||U||^2) eps, as U U+ V rounds."""
        square = frobenius(compute(self.matrix(Y))) ** 2
        tol = (100 + 10 * square) * torch.finfo(V.dtype).eps if tol is None else tol
        return super().is_tangent(Y, V, tol)

    def bounded(self, Lambda: Tensor, W: Tensor) -> Tensor:
        """s W with the largest s in [0, 1] that keeps ||Lambda R(s W)|| <= limit, by its second-order bound:

            log ||Lambda exp(s W)|| <= log ||Lambda|| + s g + s^2 ||W||^2,
            g = <Lambda, Lambda W>/||Lambda||^2

        with 2 ||W||^2 in place of ||W||^2, which covers Cayley as well. Steps that shrink Lambda are always
        possible.
        """
        M, size = self.matrix(W), frobenius(Lambda).to(W.dtype)
        n = M.shape[-1]
        A, B = M[..., :n, :], M[..., n:, :]
        square = 2 * (frobenius(A) + frobenius(B)) ** 2
        room = (self.limit(Lambda) / size).log().clamp_min(0)
        if may_read(W) and not torch.compiler.is_compiling() and bool((square.sqrt() + square <= room).all()):
            return W
        K = (Lambda.mT @ Lambda[..., :n]).to(W.dtype)
        growth = (dot(K, M) - dot(K[..., n:, :].mT, self.star(B))) / size**2
        square = square.clamp_min(torch.finfo(W.dtype).tiny)
        s = ((growth**2 + 4 * square * room).sqrt() - growth) / (2 * square)
        return W * s.clamp(0, 1).view(-1, *[1] * (W.dim() - 1))

    def away_from(self, Lambda: Tensor, Y: Tensor, Y0: Tensor) -> Tensor:
        """The difference Y - Y0 in g^hor, shortened to at most one radian.

        It stands in for the logarithm, which does not exist here. global_rep takes Lambda^-1 where the
        gradient of |Y - Y0|^2/2 has Lambda^T, so near Y0 the rate of decay is the same for weights of any
        size; far away the bound holds.
        """
        W = self.global_rep(Lambda, Y - self.representative(Y, Y0))
        length = self.step_length(W).clamp_min(torch.finfo(W.dtype).tiny)
        return W * (1 / length).clamp_max(1).view(*length.shape, *[1] * self.dims)

    def outgrown(self, Lambda: Tensor) -> Tensor:
        return frobenius(Lambda) > 0.9 * self.limit(Lambda)

    def limit(self, Lambda: Tensor) -> float:
        """The largest ||Lambda||_F allowed; that of an orthogonal frame is sqrt(2N)."""
        return math.sqrt(LOST / torch.finfo(Lambda.dtype).eps + Lambda.shape[-1])

    def retract(self, Y: Tensor, Delta: Tensor, retraction: str | Retraction = "cayley") -> Tensor:
        """R(Omega(Delta)) Y; Cayley as long as Omega has no eigenvalue above 3/2, continued by the geodesic.

        Cayley's (I - Omega/2)^-1 has a pole where Omega has the eigenvalue 2; beyond it longer vectors would
        lead to nearer points. With A = Y+ Delta and K = Delta - Y A, the eigenvalues are those of
        [[A, -K+ K], [I, 0]], and their squares are at most ||A||^2 + 2 ||K+ K||, 2 for ||W|| = 1.
        """
        R, M, D = by_name(retraction), self.matrix(Y), self.matrix(Delta)
        if R.name != "cayley" or not readable(D):
            return super().retract(Y, Delta, R)
        A = self.star(M) @ D
        K = D - M @ A
        square = frobenius(A) ** 2 + 2 * frobenius(self.star(K) @ K)
        long = square.detach() > 2.25
        if everywhere(~long):
            return super().retract(Y, Delta, R)
        share = torch.where(long, 1.5 * torch.where(long, square, 1).rsqrt(), 1)[..., None, None]
        Z = M + self._act(M, (1 - share) * D, M, by_name("geodesic"))
        return self.unmatrix(Z + self._act(M, share * D, Z, R), Y.shape)

    def E(self, shape: Sequence[int], dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """Columns 1..n and N+1..N+n of I_2N, in the layout of `shape`."""
        self.check_shape(shape)
        M = torch.zeros(tuple(shape), dtype=dtype, device=device)
        N, n = (side // 2 for side in self.size(shape))
        for rows, columns in ((slice(0, n), slice(0, n)), (slice(N, N + n), slice(n, 2 * n))):
            self.matrix(M)[..., rows, columns].diagonal(dim1=-2, dim2=-1).fill_(1)
        return M

    def random(
        self,
        *shape: int,
        generator: Generator | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> Tensor:
        """A uniform orthogonal point [[Re Q, -Im Q], [Im Q, Re Q]] of a complex N x n matrix, Q^H Q = I."""
        self.check(shape, dtype or torch.get_default_dtype())
        N, n = (side // 2 for side in self.size(shape))
        batch = self.split(torch.empty(shape, device="meta")).shape[: -1 - self.flatten]
        X = torch.randn(*batch, N, 2 * n, generator=generator, dtype=dtype, device=device)
        Q, R = torch.linalg.qr(torch.complex(compute(X[..., :n]), compute(X[..., n:])))
        Q = Q * phases(R.diagonal(dim1=-2, dim2=-1)).unsqueeze(-2)
        U = torch.cat([torch.cat([Q.real, -Q.imag], -1), torch.cat([Q.imag, Q.real], -1)], -2)
        return self.unmatrix(U, shape).to(X.dtype).contiguous()

    def project(self, X: Tensor) -> Tensor:
        """X (X+ X)^(-1/2), by Newton's iteration for the root; X must be near the space."""
        self.check(X.shape, X.dtype)
        M = compute(self.matrix(X))
        I = eye_like(M)
        P = self.star(M) @ M
        Z = I.expand_as(P)
        for _ in range(40):  # Denman-Beavers: P -> the root of X+ X, Z -> its inverse
            P, Z = (P + inverse(Z)) / 2, (Z + inverse(P)) / 2
        U = M @ Z
        for _ in range(2):  # Newton-Schulz: the inverses above have lost digits
            U = U @ (3 * I - self.star(U) @ U) / 2
        off = frobenius(self.star(U) @ U - I)
        rounding = 1e3 * torch.finfo(U.dtype).eps * (1 + frobenius(U) ** 2)
        if not everywhere(off <= rounding.clamp_max(1)):  # at most 1, however large U is
            raise ValueError(
                f"the matrix is {largest(self.residual(X)):.1e} off {self}, too far to tell which point "
                f"is meant; initialise it first, for example with {self}.random{tuple(X.shape)}"
            )
        return self.unmatrix(U, X.shape).to(X.dtype).contiguous()

    def section_matrix(self, Y: Tensor) -> Tensor:
        """[U, Q]: an orthonormal basis Z of ker(U+), made symplectic by the eigenvectors V of i Z^T J Z.

        Eigenvalues are repeated, so V is any unitary basis of its eigenspaces. Q is made of that basis which
        is nearest to a fixed matrix C, Z V w^(-1/2) polar((Z V)^H C): a function of U alone, up to rounding.
        """
        U = Y
        N2, n2 = U.shape[-2:]
        m = (N2 - n2) // 2
        if m == 0:
            return U
        JU = torch.cat([U[..., N2 // 2 :, :], -U[..., : N2 // 2, :]], -2)
        Z = torch.linalg.qr(JU, mode="complete")[0][..., n2:]  # orthogonal to J U: the kernel of U+
        K = Z.mT @ torch.cat([Z[..., N2 // 2 :, :], -Z[..., : N2 // 2, :]], -2)
        w, V = torch.linalg.eigh(1j * (K - K.mT) / 2)  # ascending pairs -w, w: the last m are positive
        V = Z.to(V.dtype) @ V[..., m:]
        # C is generic: with one of zeros and ones, points of zeros and ones could have two nearest bases.
        gen = torch.Generator().manual_seed(0)
        C = torch.randn(N2, m, generator=gen, dtype=torch.complex128, device="cpu").to(V.device, V.dtype)
        A, _, Bh = torch.linalg.svd(V.mH @ C)
        V = (V * (2 / w[..., m:]).sqrt().unsqueeze(-2)) @ (A @ Bh)
        Q = torch.cat([V.imag, V.real], -1)
        Q = Q - U @ (self.star(U) @ Q)
        return torch.cat([U, Q @ (3 * eye_like(Q) - self.star(Q) @ Q) / 2], -1)


class SymplecticStiefel(Symplectic):
    """The symplectic Stiefel manifold {U: U+ U = I}, U+ = J^T U^T J, of real (..., 2N, 2n) matrices.

    Metric: the right-invariant one of Bendokat and Zimmermann (2021, arXiv 2108.12447). g^hor: A Hamiltonian
    (2n x 2n), B arbitrary (2(N-n) x 2n).

    >>> U = SymplecticStiefel().random(8, 4)
    >>> bool(SymplecticStiefel().residual(U) < 1e-5)
    True
    """

    def metric(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """tr(U^T (I - J^T Y (Y^T Y)^-1 Y^T J/2) V (Y^T Y)^-1)."""
        M, UM, VM = self.matrix(Y), self.matrix(U), self.matrix(V)
        h = M.shape[-2] // 2
        P = M.mT @ M
        JY = torch.cat([-M[..., h:, :], M[..., :h, :]], -2)  # J^T Y
        a, b = solve(P, VM, left=False), JY.mT @ UM
        c = JY.mT @ a
        return (UM * a).sum((-2, -1)) - (b * solve(P, c)).sum((-2, -1)) / 2

    def rgrad(self, Y: Tensor, G: Tensor) -> Tensor:
        """G Y^T Y + J Y G^T J Y, the gradient in the right-invariant metric.

        The optimizer uses `global_grad` instead: this metric has an Omega of its own, and the signs of this
        gradient, taken to g^hor by the canonical Omega, need not point downhill.
        """
        M, GM = self.matrix(Y), self.matrix(G)
        h = M.shape[-2] // 2
        JY = torch.cat([M[..., h:, :], -M[..., :h, :]], -2)
        return self.unmatrix(GM @ (M.mT @ M) + JY @ (GM.mT @ JY), Y.shape)


class SymplecticGrassmann(Subspaces, Symplectic):
    """The symplectic Grassmann manifold of subspaces span(U), U+ U = I, held by real (..., 2N, 2n) matrices.

    U and U K, K symplectic, are the same point; the projection onto it is U U+. Tangent vectors have
    U+ V = 0. g^hor: A = 0, B arbitrary (2(N-n) x 2n).

    >>> SymplecticGrassmann().random(8, 4).shape
    torch.Size([8, 4])
    """

    def metric(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """tr(U^T V (Y^T Y)^-1): symplectic Stiefel's for Y+ U = 0, and the same for every basis Y K."""
        M, UM, VM = self.matrix(Y), self.matrix(U), self.matrix(V)
        return dot(UM, solve(M.mT @ M, VM, left=False))

    def rgrad(self, Y: Tensor, G: Tensor) -> Tensor:
        """(I - J Y (Y^T Y)^-1 Y^T J^T) G Y^T Y, the gradient in this metric."""
        M, GM = self.matrix(Y), self.matrix(G)
        h = M.shape[-2] // 2
        P, JY = M.mT @ M, torch.cat([M[..., h:, :], -M[..., :h, :]], -2)
        X = GM @ P
        return self.unmatrix(X - JY @ solve(P, JY.mT @ X), Y.shape)
