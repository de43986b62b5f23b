"""What every space has: one code for all of them, written with the adjoint X* of the group's form.

X* is X^T on the orthogonal spaces and J^T X^T J on the symplectic ones; Y* Y = I on the space, Lambda^-1 = Lambda* in
the group. Lambda = [Y, Q] always has Y as its first columns, so Lambda E = Y with E = [I; 0], and an element of g^hor

    W = [[A, -B*], [B, 0]],   A = -A*

is stored as its first columns W E = [A; B], a tensor of Y's shape. A space differs from another in `star`, in what `A`
may be, in its metric, and in how points are found; each file in this folder holds one such difference.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from ..linalg import COMPUTE_DTYPE, add_product, eye_like, frobenius, full_precision
from ..retraction import Retraction, by_name


@dataclass(frozen=True, repr=False)
class Space(ABC):
    """A homogeneous space G/H as a value: no tensors, no device; equal when of one kind.

    Points are (..., N, n), leading dimensions are batch. A wide matrix (fewer rows than columns) is on a space when its
    transpose is. Tangent vectors and elements of g^hor have the shape of their point. With `flatten=k` the last k
    dimensions of a tensor count as one: `Stiefel(flatten=3)` is for the kernels (out, in, kh, kw) of a Conv2d, taken
    as out x (in kh kw) matrices; without it, such a tensor is a batch of kh x kw matrices.
    """

    flatten: int = 1

    # Longest velocity ||W||_F of one step; longer ones are shortened to it. Beyond 1e6 a retraction in float64 has lost
    # the digits in which float32 could tell it from its limit.
    max_velocity: ClassVar[float] = 1e6

    def __post_init__(self) -> None:
        if type(self.flatten) is not int or self.flatten < 1:
            raise ValueError(f"flatten counts dimensions, 1 or more, got {self.flatten!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({f'flatten={self.flatten}' if self.flatten > 1 else ''})"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Spaces stand in param_groups: torch.load(weights_only=True) must be able to read them back.
        torch.serialization.add_safe_globals([cls])

    # -- shapes ---------------------------------------------------------------------------------------------------

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ValueError unless tensors of this shape can lie on the space."""
        if len(shape) < 1 + self.flatten:
            hint = "; for unit vectors use ghor.Sphere()" if len(shape) == 1 else ""
            raise ValueError(f"{self} needs {1 + self.flatten} or more dimensions, got shape {tuple(shape)}{hint}")
        if 0 in shape:
            raise ValueError(f"{self} has no points of the empty shape {tuple(shape)}")
        if self.size(shape)[0] < 2:
            hint = (
                f"; {type(self).__name__}(flatten={len(shape) - 1}) takes a kernel as one matrix"
                if len(shape) > 2
                else ""
            )
            raise ValueError(f"{self} of 1 x 1 matrices does not move, got shape {tuple(shape)}{hint}")

    def size(self, shape: Sequence[int]) -> tuple[int, int]:
        """(N, n) of the tall matrices in a tensor of this shape."""
        rows, columns = shape[-1 - self.flatten], math.prod(shape[-self.flatten :])
        return max(rows, columns), min(rows, columns)

    def matrix(self, Y: Tensor) -> Tensor:
        """Y as tall matrices (..., N, n), N >= n; a view."""
        M = Y.flatten(-self.flatten) if self.flatten > 1 else Y
        return M.mT if M.shape[-2] < M.shape[-1] else M

    def unmatrix(self, M: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of `matrix`: tall matrices in the layout of `shape` (of which the matrix part counts); a view."""
        M = M.mT if shape[-1 - self.flatten] < math.prod(shape[-self.flatten :]) else M
        return M.unflatten(-1, tuple(shape[-self.flatten :])) if self.flatten > 1 else M

    # -- the algebra ------------------------------------------------------------------------------------------------

    def star(self, X: Tensor) -> Tensor:
        """The adjoint X*: (..., a, b) -> (..., b, a)."""
        return X.mT

    def skew(self, X: Tensor) -> Tensor:
        """2 x the projection of n x n matrices to what the block A may be: X - X*, *exactly* skew.

        A rounding error left on the diagonal would be divided by itself in Adam and come out of order one.
        """
        return X - self.star(X)

    def E(self, shape: Sequence[int], dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """The distinct element E = [I; 0] in the layout of `shape`."""
        self.check_shape(shape)
        M = torch.zeros(tuple(shape), dtype=dtype, device=device)
        self.matrix(M).diagonal(dim1=-2, dim2=-1).fill_(1)
        return M

    # -- points -----------------------------------------------------------------------------------------------------

    @full_precision()
    def distance(self, Y: Tensor) -> Tensor:
        """Distance from the space, ||Y* Y - I||_F: (..., N, n) -> (...)."""
        M = self.matrix(Y)
        return frobenius(self.star(M) @ M - eye_like(M))

    @abstractmethod
    def random(
        self,
        *shape: int,
        generator: Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """A random point of the given shape."""

    @abstractmethod
    def project(self, X: Tensor) -> Tensor:
        """A point near X: the nearest one on orthogonal spaces. Raises ValueError where X does not determine it."""

    def section(self, Y: Tensor) -> Tensor:
        """lambda(Y) = Lambda = [Y, Q] in G, with Lambda E = Y: (..., N, n) -> (..., N, N). Draws no random numbers."""
        return self.section_matrix(self.matrix(Y))

    @abstractmethod
    def section_matrix(self, Y: Tensor, R: Tensor | None = None) -> Tensor:
        """The section of tall Y; R is the anchor of an implicit one, where the space has such a section."""

    def polish(self, X: Tensor, n: int, share: Tensor | float = 1.0) -> Tensor:
        """One Newton-Schulz step towards X* X = I, in place: X + X (I - X* X)/2, which squares the distance.

        X is a tall point, O(N n^2), or Lambda = [Y, Q] with Y its first n columns, O(N^3). `share` is 0 for members of
        a batch that are to keep every bit.
        """
        return X.add_(X @ ((eye_like(X) - self.inverse(X, n) @ X) * (share / 2)))

    def restore(self, Lambda: Tensor, n: int) -> Tensor:
        """Back to the group from further away, after a step of any length."""
        return self.polish(self.polish(Lambda, n), n)  # Lambda is the caller's own

    # -- tangent vectors --------------------------------------------------------------------------------------------

    @abstractmethod
    def metric(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """The Riemannian metric g_Y(U, V): (...)."""

    def inner(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """g_Y(U, V), the metric under the name that other libraries use."""
        return self.metric(Y, U, V)

    def norm(self, Y: Tensor, V: Tensor) -> Tensor:
        """sqrt(g_Y(V, V)); its derivative at V = 0 is 0, as in torch.linalg.vector_norm."""
        square = self.metric(Y, V, V)
        positive = square > 0
        return torch.where(positive, torch.where(positive, square, 1).sqrt(), 0)

    @abstractmethod
    def rgrad(self, Y: Tensor, G: Tensor) -> Tensor:
        """The Riemannian gradient of a loss with Euclidean gradient G: g_Y(rgrad, V) = <G, V> for every tangent V."""

    def tangent(self, Y: Tensor, X: Tensor) -> Tensor:
        """X brought to T_Y: X - Y (S + S*)/2, S = Y* X, which is the orthogonal projection on orthogonal spaces."""
        M, XM = self.matrix(Y), self.matrix(X)
        S = self.star(M) @ XM
        return self.unmatrix(XM - M @ (S - self.skew(S) / 2), Y.shape)

    def is_tangent(self, Y: Tensor, V: Tensor, tol: float | None = None) -> bool:
        """Whether V lies in T_Y: ||V - tangent(Y, V)|| <= tol (1 + ||V||), by default 100 eps."""
        tol = 100 * torch.finfo(V.dtype).eps if tol is None else tol
        off = frobenius(self.matrix(V - self.tangent(Y, V)))
        return bool((off <= tol * (1 + frobenius(self.matrix(V)))).all())

    def Omega(self, Y: Tensor, Delta: Tensor) -> Tensor:
        """Omega(Delta) = P Y* - Y P*, P = Delta - Y Y* Delta/2: T_Y -> g^(hor,Y), Omega Y = Delta. (..., N, N)."""
        return self._omega(self.matrix(Y), self.matrix(Delta))

    def _omega(self, Y: Tensor, Delta: Tensor) -> Tensor:
        P = Delta - Y @ (self.star(Y) @ Delta) / 2
        return P @ self.star(Y) - Y @ self.star(P)

    # -- g^hor: Algorithm 3 -----------------------------------------------------------------------------------------

    def inverse(self, Lambda: Tensor, n: int) -> Tensor:
        """Lambda^-1 = [Y*; Q*], Y the first n columns; of Y alone, Y*."""
        if Lambda.shape[-1] == n:
            return self.star(Lambda)
        return torch.cat([self.star(Lambda[..., :n]), self.star(Lambda[..., n:])], -2)

    def global_rep(self, Lambda: Tensor, Delta: Tensor) -> Tensor:
        """Lambda^-1 Omega(Delta) Lambda as W E = Lambda^-1 Delta: T_Y -> g^hor, with A exactly skew."""
        D = self.matrix(Delta)
        n = D.shape[-1]
        H = self.inverse(Lambda, n) @ D
        return self.unmatrix(torch.cat([self.skew(H[..., :n, :]) / 2, H[..., n:, :]], -2), Delta.shape)

    def global_grad(self, Lambda: Tensor, G: Tensor) -> Tensor:
        """global_rep(Lambda, rgrad(Y, G)) at once: A = Y^T G - (Y^T G)*, B = Q^T G.

        It is the derivative of L(Lambda R(W) E) at W = 0 in the inner product <W, W'> = <A, A'>/2 + <B, B'>, hence a
        descent direction for every rule that keeps the signs of the coordinates.
        """
        M = self.matrix(G)
        n = M.shape[-1]
        H = Lambda.mT @ M
        H[..., :n, :] = self.skew(H[..., :n, :])
        return self.unmatrix(H, G.shape)

    def apply_section(self, Lambda: Tensor, E: Tensor) -> Tensor:
        """Y = Lambda E: the first columns of Lambda, in the layout of E."""
        return self.unmatrix(Lambda[..., : self.matrix(E).shape[-1]], E.shape)

    def update_section(self, Lambda: Tensor, W: Tensor, retraction: str | Retraction = "cayley") -> Tensor:
        """Lambda R(W): (..., N, N), W in g^hor in the layout of the point."""
        return self.move_section(Lambda, self.matrix(W), by_name(retraction), Lambda.clone())

    def move_section(self, Lambda: Tensor, W: Tensor, retraction: Retraction, out: Tensor) -> Tensor:
        """Lambda R(W) into `out`, which holds Lambda (and may be it); W = [A; B] tall. No N^3 unless N < 2n.

        Two products with N^2 n terms, Lambda [F, T] and the update of Q. They are written for a Lambda that lies in
        memory column by column, where Y is one piece, as sections keep it; it is right for any.
        """
        N, n = W.shape[-2:]
        if N < 2 * n:
            return out.add_(Lambda @ retraction.dense(self.algebra(W)))
        B, Y = W[..., n:, :], Lambda[..., :n]
        Bs = self.star(B)
        F1, F2, T1, T2 = retraction.thin(W[..., :n, :], Bs @ B)
        if T1 is None or T2 is None:
            D = (torch.cat([F1, B @ F2], -2).mT @ Lambda.mT).mT
            T = torch.add(Y, D, alpha=0.5)
        else:
            both = torch.cat([torch.cat([F1, T1], -1), B @ torch.cat([F2, T2], -1)], -2).mT @ Lambda.mT
            D, T = both[..., :n, :].mT, both[..., n:, :].mT
        V = torch.cat(
            [torch.zeros_like(F1), Bs.mT], -2
        )  # all columns at once: in memory they are one piece, Q's are not
        add_product(out.mT, V, T.mT, -1)
        out[..., :n].add_(D)
        return out

    def algebra(self, W: Tensor) -> Tensor:
        """The full matrix [[A, -B*], [B, 0]] of W = [A; B]: (..., N, n) -> (..., N, N)."""
        N, n = W.shape[-2:]
        right = torch.cat([-self.star(W[..., n:, :]), W.new_zeros(*W.shape[:-2], N - n, N - n)], -2)
        return torch.cat([W, right], -1)

    # -- moving on points --------------------------------------------------------------------------------------------

    def retract(self, Y: Tensor, Delta: Tensor, retraction: str | Retraction = "cayley") -> Tensor:
        """R(Omega(Delta)) Y, without a section, in O(N n^2)."""
        M, D = self.matrix(Y), self.matrix(Delta)
        return self.unmatrix(M + self._act(M, D, M, by_name(retraction)), Y.shape)

    def exp(self, Y: Tensor, Delta: Tensor) -> Tensor:
        """The geodesic gamma(1) = exp(Omega(Delta)) Y from Y in the direction Delta."""
        return self.retract(Y, Delta, "geodesic")

    def transport(self, Y: Tensor, Delta: Tensor, V: Tensor) -> Tensor:
        """Parallel transport of V along the geodesic of Delta: exp(Omega(Delta)) V.

        Along the canonical connection of the second kind (appendix "Parallel Transport"), under which coordinates in
        g^hor stay constant.
        """
        M, D, VM = self.matrix(Y), self.matrix(Delta), self.matrix(V)
        return self.unmatrix(VM + self._act(M, D, VM, by_name("geodesic")), Y.shape)

    def _act(self, Y: Tensor, Delta: Tensor, X: Tensor, retraction: Retraction) -> Tensor:
        """(R(Omega(Delta)) - I) X for X (..., N, k): with K = Delta - Y Y* Delta in place of Q B, C = K* K."""
        N, n = Y.shape[-2:]
        if N < 2 * n:
            return retraction.dense(self._omega(Y, Delta)) @ X
        Ys = self.star(Y)
        A = self.skew(Ys @ Delta) / 2
        K = Delta - Y @ A
        K = K - Y @ (Ys @ K)  # again: what is left along Y after the first pass is rounding of the size of Delta
        F1, F2, T1, T2 = retraction.thin(A, self.star(K) @ K)
        x, z = Ys @ X, self.star(K) @ X
        if T1 is None or T2 is None:
            T1, T2 = eye_like(F1) + F1 / 2, F2 / 2
        return Y @ (F1 @ x - T1 @ z) + K @ (F2 @ x - T2 @ z)

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """The shortest Delta with exp(Y, Delta) = Z."""
        raise NotImplementedError(f"{self} has no logarithm here: its geodesics do not join every two points")

    def dist(self, Y: Tensor, Z: Tensor) -> Tensor:
        """Length of the shortest geodesic from Y to Z."""
        return self.norm(Y, self.log(Y, Z))


def compute(X: Tensor) -> Tensor:
    """X in the dtype that linear algebra runs in: float32 for half precision."""
    return X.to(COMPUTE_DTYPE.get(X.dtype, X.dtype))
