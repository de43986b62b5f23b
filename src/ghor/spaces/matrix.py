"""Spaces of matrices whose group keeps a form: the common part of the orthogonal and symplectic spaces.

Everything is written with the adjoint X* of the form: X^H on the orthogonal spaces, J^T X^T J on the
symplectic ones. Y* Y = I on the space, Lambda^-1 = Lambda* in the group. Lambda = [Y, Q] always has Y as its
first columns, so Lambda E = Y with E = [I; 0], and an element of g^hor

    W = [[A, -B*], [B, 0]],   A = -A*

is stored as its first columns W E = [A; B], a tensor of Y's shape. Spaces differ in `star`, in the blocks A
that they allow (`skew`), in their metric, and in how points are found.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ghor.linalg import LONG, defect, eye_like, frobenius, product
from ghor.retraction import Retraction, by_name
from ghor.spaces.base import Space


@dataclass(frozen=True, repr=False, kw_only=True)
class MatrixSpace(Space):
    """Matrices (..., N, n); leading dimensions are batch dimensions.

    A wide matrix (fewer rows than columns) is on a space when its transpose is. With `flatten=k` the last k
    dimensions of a tensor count as one: `Stiefel(flatten=3)` is for the kernels (out, in, kh, kw) of a
    Conv2d, taken as out x (in kh kw) matrices; without it, such a tensor is a batch of kh x kw matrices.

    With `blocks=k` a tensor is k matrices stacked along the rows, each of them on the space:
    `Stiefel(blocks=3)` for the weights of queries, keys and values in one tensor, `Stiefel(blocks=(3,
    heads))` for those of every head. Blocks are a batch: (k R, C) is taken as (k, R, C), and `residual`,
    `metric`, ... return a number for each. `along="columns"` is for a weight that holds the transpose: its
    blocks lie side by side, as in the layers of GPT-2 (Hugging Face's Conv1D, in x out).
    """

    flatten: int = 1
    blocks: int | tuple[int, ...] | None = None
    along: Literal["rows", "columns"] = "rows"

    # -- shapes: wide matrices, kernels, several matrices in one tensor --------------------------------------

    def __post_init__(self) -> None:
        if type(self.flatten) is not int or self.flatten < 1:
            raise ValueError(f"flatten counts dimensions, 1 or more, got {self.flatten!r}")
        counts = (
            self.blocks if isinstance(self.blocks, tuple) else (1 if self.blocks is None else self.blocks,)
        )
        if not counts or not all(type(k) is int and k > 0 for k in counts):
            raise ValueError(f"blocks counts matrices, 3 or (3, heads), got {self.blocks!r}")
        if self.along not in ("rows", "columns"):
            raise ValueError(f"blocks lie along='rows' or along='columns', got {self.along!r}")
        self.check_along()

    def check_along(self) -> None:
        """Raise ValueError if along="columns" has no meaning beside the other options."""
        if self.along == "columns" and (self.blocks is None or self.dims != 2):
            raise ValueError(
                f"along='columns' says where the blocks of a matrix lie; {self} has no blocks of that kind"
            )

    @property
    def plain(self) -> bool:
        """Whether a weight is a batch of points as it is: no blocks, and no columns that are points."""
        return self.blocks is None and self.along == "rows"

    @property
    def one(self) -> Space:
        return self if self.plain else replace(self, blocks=None, along="rows")

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return math.prod(self.blocks) if isinstance(self.blocks, tuple) else self.blocks or 1

    @property
    def dims(self) -> int:
        return 1 + self.flatten

    def by_rows(self, X: Tensor) -> Tensor:
        return X.mT if self.along == "columns" else X

    def split(self, X: Tensor) -> Tensor:
        X = self.by_rows(X)
        if self.blocks is None or self.count == 1:
            return X
        return X.unflatten(-self.dims, (self.count, X.shape[-self.dims] // self.count))

    def join(self, X: Tensor) -> Tensor:
        """The inverse of `split`."""
        return self.by_rows(X if self.count == 1 else X.flatten(-self.dims - 1, -self.dims))

    def write(self, weights: list[Tensor], points: list[Tensor]) -> None:
        super().write(weights if self.plain else list(map(self.split, weights)), points)

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) < 1 + self.flatten:
            hint = "; for unit vectors use ghor.Sphere()" if len(shape) == 1 else ""
            raise ValueError(
                f"{self} needs {1 + self.flatten} or more dimensions, got shape {tuple(shape)}{hint}"
            )
        if 0 in shape:
            raise ValueError(f"{self} has no points of the empty shape {tuple(shape)}")
        self.check_blocks(shape)

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Real 1 x 1 matrices are refused: +-1 does not move. A complex one moves on the circle U(1)."""
        super().check(shape, dtype)
        if self.size(shape)[0] < 2 and not dtype.is_complex:
            name, more = type(self).__name__, len(shape) - 1
            hint = f"; {name}(flatten={more}) takes a kernel as one matrix" if more > 1 else ""
            raise ValueError(f"{self} of real 1 x 1 matrices does not move, got shape {tuple(shape)}{hint}")

    def check_blocks(self, shape: Sequence[int]) -> None:
        """Raise ValueError unless the rows, or columns, split into equal blocks."""
        side = shape[-1 if self.along == "columns" else -self.dims]
        if side % self.count:
            across = self.dims == 2 and self.along == "rows" and shape[-1] % self.count == 0
            hint = f"; its {shape[-1]} columns can be: along='columns'" if across else ""
            raise ValueError(
                f"{self} cannot split {side} {self.along} into {self.count} equal blocks, got shape "
                f"{tuple(shape)}{hint}"
            )

    def block(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of one block, as `split` has it, in a tensor of this shape."""
        if self.along == "columns":
            return shape[-1] // self.count, shape[-2]
        return shape[-1 - self.flatten] // self.count, math.prod(shape[-self.flatten :])

    def size(self, shape: Sequence[int]) -> tuple[int, int]:
        """(N, n) of the tall matrices in a tensor of this shape."""
        rows, columns = self.block(shape)
        return max(rows, columns), min(rows, columns)

    def matrix(self, Y: Tensor) -> Tensor:
        """Y as tall matrices (..., N, n), N >= n; a view."""
        M = Y if self.blocks is None else self.split(Y)
        M = M.flatten(-self.flatten) if self.flatten > 1 else M
        return M.mT if M.shape[-2] < M.shape[-1] else M

    def unmatrix(self, M: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of `matrix`: tall matrices in the layout of `shape`, whose batch part is not used.

        A view, unless there are blocks.
        """
        rows, columns = self.block(shape)
        M = M.mT if rows < columns else M
        M = M.unflatten(-1, tuple(shape[-self.flatten :])) if self.flatten > 1 else M
        return M if self.blocks is None else self.join(M)

    def E(self, shape: Sequence[int], dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """E = [I; 0]."""
        self.check_shape(shape)
        M = torch.zeros(tuple(shape), dtype=dtype, device=device)
        self.matrix(M).diagonal(dim1=-2, dim2=-1).fill_(1)
        return M

    def reach(self, shape: Sequence[int]) -> float:
        """sqrt(n): n columns that turn by one radian each."""
        return math.sqrt(self.size(shape)[1])

    def polish_period(self, shape: Sequence[int]) -> int:
        """max(100, 17 N/n), so that polishing takes at most 4 % of the time.

        Polishing takes two products with N^3 terms, a step three with N^2 n. In between only Y is polished,
        O(N n^2): steps near one ulp round the same way every time, and each would take Y off the space by
        a few 1e-8.
        """
        N, n = self.size(shape)
        return max(100, 17 * N // n)

    # -- the Lie algebra -------------------------------------------------------------------------------------

    def star(self, X: Tensor) -> Tensor:
        """The adjoint X*: (..., a, b) -> (..., b, a)."""
        return X.mH

    def pair(self, X: Tensor, Z: Tensor) -> Tensor:
        """X* Z, accurate even if the sums are long."""
        return product(self.star(X), Z)

    def skew(self, X: Tensor) -> Tensor:
        """Twice the projection of n x n matrices to the blocks A of g^hor: X - X*, *exactly* skew.

        Adam would divide a rounding error left on the diagonal by itself, and so make it of order 1.
        """
        return X - self.star(X)

    def hor(self, W: Tensor) -> Tensor:
        M = self.matrix(W)
        n = M.shape[-1]
        return self.unmatrix(torch.cat([self.skew(M[..., :n, :]) / 2, M[..., n:, :]], -2), W.shape)

    def ghor_blocks(self, W: Tensor) -> list[Tensor]:
        """A and B, unless empty or zero: real A is 0 for n = 1, and there is no B for N = n."""
        M = self.matrix(W)
        N, n = M.shape[-2:]
        return [M[..., :n, :]] * (n > 1 or W.is_complex()) + [M[..., n:, :]] * (N > n)

    def ghor_factors(self, count: int, shape: Sequence[int]) -> tuple[float, ...]:
        """A/2 and B, of which g^hor has [skew(A/2); B]; others as they are."""
        N, n = self.size(shape)
        return (0.5, 1.0)[:count] if count == 1 + (N > n) else (1.0,) * count

    def from_ghor_blocks(self, blocks: Sequence[Tensor], like: Tensor, out: Tensor | None = None) -> Tensor:
        """[skew(A/2); B] from A/2 and B, without the copies of the general way."""
        N, n = self.size(like.shape)
        if len(blocks) != 1 + (N > n):
            return super().from_ghor_blocks(blocks, like, out)
        parts = [self.skew(blocks[0]), *blocks[1:]]
        if out is not None and not torch.compiler.is_compiling():
            torch.cat(parts, -2, out=self.matrix(out))
            return out
        W = self.unmatrix(torch.cat(parts, -2) if N > n else parts[0], like.shape)
        return W if out is None else out.copy_(W)

    def ghor_inner(self, W: Tensor, V: Tensor) -> Tensor:
        """<A, A'>/2 + <B, B'>, which is tr(W^H V)/2 of the full matrices."""
        P = (self.matrix(W) * self.matrix(V).conj()).real
        n = P.shape[-1]
        return P[..., :n, :].sum((-2, -1)) / 2 + P[..., n:, :].sum((-2, -1))

    def algebra(self, W: Tensor) -> Tensor:
        """The full matrix [[A, -B*], [B, 0]] of tall W = [A; B]: (..., N, n) -> (..., N, N)."""
        N, n = W.shape[-2:]
        right = torch.cat([-self.star(W[..., n:, :]), W.new_zeros(*W.shape[:-2], N - n, N - n)], -2)
        return torch.cat([W, right], -1)

    def inverse(self, Lambda: Tensor, n: int) -> Tensor:
        """Lambda^-1 = [Y*; Q*], where Y is the first n columns; Y* if Lambda is Y alone."""
        if Lambda.shape[-1] == n:
            return self.star(Lambda)
        return torch.cat([self.star(Lambda[..., :n]), self.star(Lambda[..., n:])], -2)

    # -- Algorithm 3 -----------------------------------------------------------------------------------------

    def residual(self, Y: Tensor) -> Tensor:
        """||Y* Y - I||_F: (..., N, n) -> (...)."""
        M = self.matrix(Y)
        return frobenius(self.pair(M, M) - eye_like(M))

    def section(self, Y: Tensor) -> Tensor:
        """lambda(Y) = Lambda = [Y, Q]: (..., N, n) -> (..., N, N)."""
        return _stored(self.section_matrix(self.matrix(Y)), self.size(Y.shape)[1])

    def section_near(self, Lambda: Tensor, Y: Tensor) -> Tensor:
        """[Y, Q - Y Y* Q], and its last columns polished, where that is near the group."""
        M, n = self.matrix(Y), self.size(Y.shape)[1]
        Q = Lambda[..., n:]
        L = torch.cat([M, Q - M @ (self.star(M) @ Q)], -1)
        near = frobenius(self.inverse(L, n) @ L - eye_like(L)) <= 0.1
        for _ in range(4):  # each squares the residual: 0.1^16
            self.polish(L, Y)
        L[..., :n] = M
        return torch.where(near[..., None, None], L, self.section(Y))

    @abstractmethod
    def section_matrix(self, Y: Tensor) -> Tensor:
        """The section of tall Y."""

    def apply_section(self, Lambda: Tensor, E: Tensor) -> Tensor:
        """Y = Lambda E: the first columns of Lambda, a view."""
        return self.unmatrix(Lambda[..., : self.size(E.shape)[1]], E.shape)

    def global_grad(self, Lambda: Tensor, G: Tensor, out: Tensor | None = None) -> Tensor:
        """[skew(Y^H G); Q^H G], in the inner product <W, W'> = <A, A'>/2 + <B, B'>.

        The product is G^H Lambda: wide times square is several times faster than square times tall.
        """
        out = torch.empty_like(G, memory_format=torch.contiguous_format) if out is None else out
        H, M = self.matrix(G).mH @ Lambda, self.matrix(out)
        n = M.shape[-1]
        M[..., :n, :] = self.skew(H[..., :n].mH)
        M[..., n:, :] = H[..., n:].mH
        return out

    def update_section(
        self, Lambda: Tensor, W: Tensor, retraction: str | Retraction = "cayley", out: Tensor | None = None
    ) -> Tensor:
        """Lambda R(W), by two products with N^2 n terms: Lambda F, and Q <- Q - (Lambda T) B*.

        F and T are those of `ghor.retraction`.
        """
        out = Lambda.clone() if out is None else out
        R = retraction if isinstance(retraction, Retraction) else by_name(retraction)
        N, n = self.size(W.shape)
        if N == n:
            return out.add_(R.right(Lambda, self.matrix(W)))
        if N < 2 * n and N <= R.dense_up_to:  # the thin form would not be smaller, see `ghor.retraction`
            return out.add_(R.right(Lambda, self.algebra(self.matrix(W))))
        # A copy, since A is overwritten below; by columns, as Lambda is, so that products need no other copy.
        W = self.matrix(W).mT.clone(memory_format=torch.contiguous_format).mT
        A, B, Yt = W[..., :n, :], W[..., n:, :], Lambda[..., :n].mT
        Bs = self.star(B)
        C = Bs @ B if N <= LONG else product(Bs, B)
        if R.factors is not None:
            M, F2 = R.factors(A, C, not W.requires_grad)
            if W.requires_grad:  # W becomes [M; B], so that F = W F2
                A.copy_(M)
            Vt = W.mT @ Lambda.mT
            Dt = F2.mT @ Vt
            # Into Vt, because new memory costs several times what is computed here.
            room = None if torch.compiler.is_compiling() or Dt.requires_grad else Vt
            Tt = torch.add(Yt, Dt, alpha=0.5, out=room)
        else:
            F1, F2, T1, T2 = R.thin(A, C)
            F, T = torch.cat([F1, T1], -1), torch.cat([F2, T2], -1)
            Dt, Tt = (torch.cat([F.mT, T.mT @ B.mT], -1) @ Lambda.mT).split(n, -2)
        Qt, Bt = out.mT[..., n:, :], Bs.mT
        # In a batch the columns of Q are not contiguous. Then all of Lambda is updated, with 0 in place of A.
        if not Qt.is_contiguous():
            A.zero_()
            if W.is_complex() or type(self).star is not MatrixSpace.star:  # else Bt is B
                B.copy_(Bt)
            Qt, Bt = out.mT, W
        if Qt.dim() == 3:
            Qt.baddbmm_(Bt, Tt, alpha=-1)
        else:
            Qt.sub_(Bt @ Tt)
        out[..., :n].mT.add_(Dt)
        return out

    def polish(
        self, Lambda: Tensor, E: Tensor, share: Tensor | float = 1.0, point_only: bool = False
    ) -> Tensor:
        """One Newton-Schulz step towards X* X = I: X + X (I - X* X)/2, which squares the residual.

        X is Lambda, O(N^3), or its first columns Y, O(N n^2).
        """
        n = self.size(E.shape)[1]
        X = Lambda[..., :n] if point_only else Lambda
        share = share[..., None, None] if isinstance(share, Tensor) else share
        X.add_(X @ (defect(self.inverse(X, n), X) * (share / 2)))
        return Lambda

    def checked_section(self, Lambda: Tensor, E: Tensor) -> Tensor:
        N, n = self.size(E.shape)
        if Lambda.shape[-2:] != (N, N):
            raise ValueError(
                f"a loaded section of shape {tuple(Lambda.shape[-2:])} is not that of {N} x {n} weights; "
                "load another state, or delete the key 'section' from it"
            )
        I, Lambda = eye_like(Lambda), _stored(Lambda, n)
        for _ in range(3):  # each polishing squares the residual: 0.005^8 is below the rounding of float64
            off = frobenius(self.inverse(Lambda, n) @ Lambda - I)
            size = frobenius(Lambda) ** 2 / N
            if not bool((off <= 0.005 * math.sqrt(N) * size).all()):
                raise ValueError(
                    f"a loaded section is {float(off.max()):.1e} off the group of {self}; load another "
                    "state, or delete the key 'section' from it: the section is then built from the weight"
                )
            if bool((off <= 100 * torch.finfo(Lambda.dtype).eps * math.sqrt(N) * size).all()):
                break
            self.polish(Lambda, E)
        return Lambda

    # -- geometry on points ----------------------------------------------------------------------------------

    def tangent(self, Y: Tensor, X: Tensor) -> Tensor:
        """X - Y (S + S*)/2, S = Y* X: the projection to T_Y, orthogonal on the orthogonal spaces."""
        M, XM = self.matrix(Y), self.matrix(X)
        S = self.star(M) @ XM
        return self.unmatrix(XM - M @ (S - self.skew(S) / 2), Y.shape)

    def Omega(self, Y: Tensor, Delta: Tensor) -> Tensor:
        """Omega(Delta) = P Y* - Y P*, P = Delta - Y Y* Delta/2: T_Y -> g^(hor,Y), (..., N, N).

        Omega(Delta) Y = Delta.
        """
        return self._omega(self.matrix(Y), self.matrix(Delta))

    def _omega(self, Y: Tensor, Delta: Tensor) -> Tensor:
        P = Delta - Y @ (self.star(Y) @ Delta) / 2
        return P @ self.star(Y) - Y @ self.star(P)

    def global_rep(self, Lambda: Tensor, Delta: Tensor) -> Tensor:
        """Lambda^-1 Omega(Delta) Lambda as W E = Lambda^-1 Delta: T_Y -> g^hor, with A exactly skew."""
        D = self.matrix(Delta)
        n = D.shape[-1]
        H = self.inverse(Lambda, n) @ D
        return self.unmatrix(torch.cat([self.skew(H[..., :n, :]) / 2, H[..., n:, :]], -2), Delta.shape)

    def retract(self, Y: Tensor, Delta: Tensor, retraction: str | Retraction = "cayley") -> Tensor:
        """R(Omega(Delta)) Y, without a section, in O(N n^2)."""
        M, D = self.matrix(Y), self.matrix(Delta)
        return self.unmatrix(M + self._act(M, D, M, by_name(retraction)), Y.shape)

    def transport(self, Y: Tensor, Delta: Tensor, V: Tensor) -> Tensor:
        """Parallel transport of V along the geodesic of Delta: exp(Omega(Delta)) V.

        It belongs to the canonical connection of the second kind (appendix "Parallel Transport"), under which
        coordinates in g^hor stay constant: an optimizer's state in g^hor needs no transport.
        """
        M, D, VM = self.matrix(Y), self.matrix(Delta), self.matrix(V)
        return self.unmatrix(VM + self._act(M, D, VM, by_name("geodesic")), Y.shape)

    def _act(self, Y: Tensor, Delta: Tensor, X: Tensor, retraction: Retraction) -> Tensor:
        """(R(Omega(Delta)) - I) X for X (..., N, k), without a section.

        The thin form of the retraction with K = Delta - Y Y* Delta in place of Q B, hence C = K* K.
        """
        N, n = Y.shape[-2:]
        if N < 2 * n:
            return retraction.dense(self._omega(Y, Delta)) @ X
        Ys = self.star(Y)
        A = self.skew(Ys @ Delta) / 2
        K = Delta - Y @ A
        K = K - Y @ (Ys @ K)  # a second pass: the first leaves rounding of the size of Delta along Y
        F1, F2, T1, T2 = retraction.thin(A, self.star(K) @ K)
        x, z = Ys @ X, self.star(K) @ X
        return Y @ (F1 @ x - T1 @ z) + K @ (F2 @ x - T2 @ z)


def _stored(Lambda: Tensor, n: int) -> Tensor:
    """Lambda = [Y, Q] by columns, so that Y is contiguous; by rows, as weights are, if Y is all of it."""
    return Lambda.contiguous() if Lambda.shape[-1] == n else Lambda.mT.contiguous().mT
