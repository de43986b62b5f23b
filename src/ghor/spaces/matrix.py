"""Spaces of matrices whose group keeps a form: Y* Y = I, and Lambda^-1 = Lambda* in the group.

X* is the adjoint of the form: X^H on the orthogonal spaces, J^T X^T J on the symplectic ones. Lambda = [Y, Q]
has Y as its first columns, so that Lambda E = Y with E = [I; 0], and an element of g^hor

    W = [[A, -B*], [B, 0]],   A = -A*

is kept as its first columns W E = [A; B]. Spaces differ in `star`, in the blocks A that they allow (`skew`),
in their metric, and in how points are found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ghor._torch.precision import wide
from ghor.layout import Layout
from ghor.linalg import LONG, defect, size
from ghor.spaces.base import Space
from ghor.spaces.frames import Frame, Stored
from ghor.spaces.points import on_points
from ghor.spaces.retraction import Retraction, by_name


@dataclass(frozen=True, repr=False)
class Matrices(Space):
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

    k: ClassVar[int] = 1  # the sign of the curvature, where frames of vectors ask

    flatten: int = field(default=1, kw_only=True)
    blocks: int | tuple[int, ...] | None = field(default=None, kw_only=True)
    along: Literal["rows", "columns"] = field(default="rows", kw_only=True)

    # -- shapes ----------------------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        if type(self.flatten) is not int or self.flatten < 1:
            raise ValueError(f"flatten counts dimensions, 1 or more, got {self.flatten!r}")
        blocks = 1 if self.blocks is None else self.blocks
        counts = blocks if isinstance(blocks, tuple) else (blocks,)
        if not counts or not all(type(k) is int and k > 0 for k in counts):
            raise ValueError(f"blocks counts matrices, 3 or (3, heads), got {self.blocks!r}")
        if self.along not in ("rows", "columns"):
            raise ValueError(f"blocks lie along='rows' or along='columns', got {self.along!r}")
        self.check_along()

    def check_along(self) -> None:
        """Raise ValueError if along="columns" has no meaning beside the other options."""
        if self.along == "columns" and (self.blocks is None or self.flatten > 1):
            raise ValueError(
                f"along='columns' says where the blocks of a matrix lie; {self} has no blocks of that kind"
            )

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return math.prod(self.blocks) if isinstance(self.blocks, tuple) else self.blocks or 1

    @cached_property
    def layout(self) -> Layout:
        return Layout(blocks=self.count, columns=self.along == "columns", flatten=self.flatten)

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) == 1 < self.dims:
            raise ValueError(
                f"{self} needs {self.dims} or more dimensions, got shape {tuple(shape)}; for unit vectors "
                "use ghor.Sphere()"
            )
        side = shape[-1 if self.along == "columns" else -self.dims] if len(shape) >= self.dims else 0
        if side % self.count:
            across = self.dims == 2 and self.along == "rows" and shape[-1] % self.count == 0
            hint = f"; its {shape[-1]} columns can be: along='columns'" if across else ""
            raise ValueError(
                f"{self} cannot split {side} {self.along} into {self.count} equal blocks, got shape "
                f"{tuple(shape)}{hint}"
            )
        super().check_shape(shape)

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Real 1 x 1 matrices are refused: +-1 does not move. A complex one moves on the circle U(1)."""
        super().check(shape, dtype)
        if self.layout.size(shape)[0] < 2 and not dtype.is_complex:
            name, more = type(self).__name__, len(shape) - 1
            hint = f"; {name}(flatten={more}) takes a kernel as one matrix" if more > 1 else ""
            raise ValueError(f"{self} of real 1 x 1 matrices does not move, got shape {tuple(shape)}{hint}")

    # -- the Lie algebra -------------------------------------------------------------------------------------

    def star(self, X: Tensor) -> Tensor:
        """The adjoint X*: (..., a, b) -> (..., b, a)."""
        return X.mH

    def skew(self, X: Tensor) -> Tensor:
        """Twice the projection of n x n matrices to the blocks A of g^hor: X - X*, *exactly* skew.

        Adam would divide a rounding error left on the diagonal by itself, and so make it of order 1.
        """
        return X - self.star(X)

    def hor_(self, w: Tensor, factor: float = 0.5) -> None:
        A = w[..., : w.shape[-1], :]
        self.skew_(A, A, factor)

    def skew_(self, A: Tensor, X: Tensor, factor: float = 1) -> None:
        """A <- factor `skew`(X)."""
        S = self.skew(X)
        A.copy_(S if factor == 1 else S.mul_(factor))

    def hor_blocks(self, w: Tensor) -> list[Tensor]:
        """A and B, unless empty or zero: A of one real column is 0."""
        N, n = w.shape[-2:]
        return [w[..., :n, :]] * (n > 1 or w.is_complex()) + [w[..., n:, :]] * (N > n)

    def hor_inner(self, w: Tensor, v: Tensor) -> Tensor:
        """<A, A'>/2 + <B, B'>, which is tr(W^H V)/2."""
        P, n = (w * v.conj()).real, w.shape[-1]
        return P[..., :n, :].sum((-2, -1)) / 2 + P[..., n:, :].sum((-2, -1))

    def algebra(self, w: Tensor) -> Tensor:
        """W = [[A, -B*], [B, 0]] of w = [A; B]: (M, N, n) -> (M, N, N)."""
        (N, n), B = w.shape[-2:], w[..., w.shape[-1] :, :]
        if N == n:
            return w
        return torch.cat([w, torch.cat([-self.star(B), w.new_zeros(*w.shape[:-2], N - n, N - n)], -2)], -1)

    # -- frames ----------------------------------------------------------------------------------------------

    def frame(self, y: Tensor, section: str, held: dict[str, Tensor], eps: float) -> Frame:
        return Stored(self, y, held, eps)

    def complement(self, y: Tensor) -> Tensor:
        """Q of Lambda = [y, Q]."""
        raise NotImplementedError

    @on_points("p>x")
    def section(self, Y: Tensor) -> Tensor:
        """lambda(Y) = Lambda = [Y, Q]: (..., N, n) -> (..., N, N)."""
        return torch.cat([Y, self.complement(Y)], -1)

    @on_points("xv>v")
    def global_rep(self, Lambda: Tensor, Delta: Tensor) -> Tensor:
        """Lambda^-1 Omega(Delta) Lambda as W E = Lambda^-1 Delta: T_Y -> g^hor, with A exactly skew."""
        n, star = Delta.shape[-1], self.star
        A = self.skew(star(Lambda[..., :n]) @ Delta) / 2
        return torch.cat([A, star(Lambda[..., n:]) @ Delta], -2)

    # -- geometry on points ----------------------------------------------------------------------------------

    @on_points("p>n")
    def residual(self, Y: Tensor) -> Tensor:
        """||Y* Y - I||_F: (..., N, n) -> (...)."""
        Y = wide(Y) if Y.shape[-2] > LONG and Y.device.type != "mps" else Y
        return size(defect(Y, None if self.compact else self.star))[..., 0, 0]

    @on_points("pv>v")
    def tangent(self, Y: Tensor, X: Tensor) -> Tensor:
        """X - Y (S + S*)/2, S = Y* X: the projection to T_Y, orthogonal on the orthogonal spaces."""
        S = self.star(Y) @ X
        return X - Y @ (S - self.skew(S) / 2)

    @on_points("pv>x")
    def Omega(self, Y: Tensor, Delta: Tensor) -> Tensor:
        """Omega(Delta) = P Y* - Y P*, P = Delta - Y Y* Delta/2: T_Y -> g^(hor,Y), (..., N, N).

        Omega(Delta) Y = Delta.
        """
        P = Delta - Y @ (self.star(Y) @ Delta) / 2
        return P @ self.star(Y) - Y @ self.star(P)

    @on_points("pv>p")
    def retract(self, Y: Tensor, Delta: Tensor, retraction: str | Retraction = "cayley") -> Tensor:
        """R(Omega(Delta)) Y, without a section, in O(N n^2)."""
        return Y + self.displacement(Y, Delta, Y, by_name(retraction))

    @on_points("pvv>v")
    def transport(self, Y: Tensor, Delta: Tensor, V: Tensor) -> Tensor:
        """Parallel transport of V along the geodesic of Delta: exp(Omega(Delta)) V.

        It belongs to the canonical connection of the second kind (appendix "Parallel Transport"), under which
        coordinates in g^hor stay constant: an optimizer's state in g^hor needs no transport.
        """
        return V + self.displacement(Y, Delta, V, by_name("geodesic"))

    def displacement(self, y: Tensor, delta: Tensor, x: Tensor, R: Retraction) -> Tensor:
        """(R(Omega(delta)) - I) x, by the thin form of R with K = delta - y y* delta in place of Q B."""
        N, n = y.shape[-2:]
        star = self.star
        if N < 2 * n:
            Omega = self.Omega(y, delta)
            return Omega @ (R.ratio(Omega, math.inf) @ x)
        A = self.skew(star(y) @ delta) / 2
        K = delta - y @ A
        K = K - y @ (star(y) @ K)  # a second pass: the first leaves rounding of the size of delta along y
        D, J, _ = R.act(y, lambda M: K if M is None else K + y @ M, A, star(K) @ K, math.inf)
        return D @ (star(y) @ x) - (y + (D / 2 if J is None else J)) @ (star(K) @ x)


class Subspaces(Matrices):
    """Subspaces, each held by one of its orthonormal or symplectic bases. g^hor: A = 0."""

    def check_size(self, N: int, n: int) -> None:
        super().check_size(N, n)
        if N == n:
            other = type(self).__name__.replace("Grassmann", "Stiefel")
            raise ValueError(f"of square matrices is a single point (ghor.{other}() is not)")

    def skew(self, X: Tensor) -> Tensor:
        """A = 0: it would turn the basis within its subspace, which does not move the point."""
        return torch.zeros_like(X)

    def skew_(self, A: Tensor, X: Tensor, factor: float = 1) -> None:
        A.zero_()

    def hor_blocks(self, w: Tensor) -> list[Tensor]:
        """B alone."""
        return [w[..., w.shape[-1] :, :]]

    def representative(self, y: Tensor, y0: Tensor) -> Tensor:
        """y0 y0* y, the projection of y to the subspace, the same for every basis y0."""
        return y0 @ (self.star(y0) @ y)
