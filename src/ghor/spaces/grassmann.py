"""Gr(n, N) = SO(N)/S(O(n) x O(N-n)): n-dimensional subspaces, held by an orthonormal basis Y."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ghor.linalg import everywhere, gram_function, solve
from ghor.spaces.matrix import MatrixSpace
from ghor.spaces.orthogonal import Orthogonal


def _atan_ratio(t: Tensor) -> tuple[Tensor, Tensor]:
    """f(t) = atan(sqrt t)/sqrt t and f'(t); near 0, where sqrt has no derivative, by their series."""
    t = t.clamp_min(0)
    small = t < 1e-4
    safe = torch.where(small, 1.0, t)
    root = safe.sqrt()
    f = torch.where(small, 1 - t / 3 + t * t / 5 - t**3 / 7, root.atan() / root)
    df = torch.where(
        small, -1 / 3 + 2 * t / 5 - 3 * t * t / 7, (1 / (1 + safe) - root.atan() / root) / (2 * safe)
    )
    return f, df


class Subspaces(MatrixSpace):
    """Subspaces, each held by one of its orthonormal or symplectic bases. g^hor: A = 0."""

    def check_shape(self, shape: Sequence[int]) -> None:
        super().check_shape(shape)
        if len(set(self.size(shape))) == 1:
            other = type(self).__name__.replace("Grassmann", "Stiefel")
            raise ValueError(
                f"{self} of square matrices is a single point, got shape {tuple(shape)}; use ghor.{other}()"
            )

    def skew(self, X: Tensor) -> Tensor:
        """A = 0: it would turn the basis within its subspace, which does not move the point."""
        return torch.zeros_like(X)

    def representative(self, Y: Tensor, Y0: Tensor) -> Tensor:
        """Y0 Y0* Y, the projection of Y to the subspace, the same for every basis Y0."""
        M = self.matrix(Y0)
        return self.unmatrix(M @ (self.star(M) @ self.matrix(Y)), Y.shape)

    def ghor_blocks(self, W: Tensor) -> list[Tensor]:
        """B alone."""
        return super().ghor_blocks(W)[-1:]


class Grassmann(Subspaces, Orthogonal):
    """The Grassmann manifold of subspaces span(Y), Y^H Y = I, held by (..., N, n) matrices, N > n.

    Y and Y R, R a rotation, are the same point: `dist`, and the steps of an optimizer that is invariant under
    rotations, do not depend on R. Metric: Re tr(U^H V), where Y^H U = 0; rgrad is G - Y Y^H G. g^hor: A = 0,
    B arbitrary ((N-n) x n).

    >>> Y = Grassmann().random(9, 2)
    >>> bool(Grassmann().dist(Y, Y.flip(-1)) < 1e-3)
    True
    """

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """L f(L^H L), L = (D - Y Y^H D)(Y^H Z)^-1, D = Z - Y, f(t) = atan(sqrt t)/sqrt t, in O(N n^2).

        The singular values of L are the tangents of the principal angles; f makes them angles. Near pi/2 it
        is exact to eps/(pi/2 - angle), as far as the points determine it.
        """
        M, ZM = self.matrix(Y), self.matrix(Z)
        YZ = M.mH @ ZM
        with torch.no_grad():
            if not everywhere(torch.linalg.svdvals(YZ)[..., -1] > 1e-6):
                raise ValueError(
                    f"{self}.log: a principal angle is pi/2, the shortest geodesic is not unique"
                )
        D = ZM - M
        L = solve(YZ, D - M @ (M.mH @ D), left=False)
        Delta = L @ gram_function(L.mH, _atan_ratio)
        return self.unmatrix(Delta, Y.shape)
