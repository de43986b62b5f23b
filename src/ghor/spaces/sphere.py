"""S^(N-1) = SO(N)/SO(N-1), or U(N)/U(N-1) for complex tensors: unit vectors along the last dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ghor._torch.values import may_read
from ghor.retraction import Retraction
from ghor.spaces.orthogonal import Orthogonal
from ghor.spaces.rank_one import FAST, Padded, Step, pull, scalar
from ghor.spaces.stiefel import canonical_log


@dataclass(frozen=True, repr=False)
class Sphere(Padded, Orthogonal):
    """The sphere: vectors (..., N) of length one; St(1, N) with vectors in place of one-column matrices.

    A matrix on Sphere() has rows of length one: the oblique manifold. Complex vectors have the canonical
    metric of U(N)/U(N-1), in which the direction i Y counts half. The row `padding_idx` of a matrix, if
    given, is not a point, and optimizers leave it alone: it is the padding row of an nn.Embedding.

    The section of real vectors is a function of Y and a sign, so the implicit section is the default.
    """

    spreads: ClassVar[bool] = True

    @property
    def dims(self) -> int:
        return self.flatten

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) < self.flatten or 0 in shape:
            raise ValueError(f"{self} holds vectors (..., N) with N >= 2, got shape {tuple(shape)}")
        self.check_blocks(shape)
        self.check_padding(shape)

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Real single numbers are refused: +-1 does not move. Complex ones move on the circle U(1)."""
        self.check_dtype(dtype)
        self.check_shape(shape)
        if self.size(shape)[0] < 2 and not dtype.is_complex:
            raise ValueError(
                f"{self} holds vectors (..., N) with N >= 2 (a real number of length one does not move), got "
                f"shape {tuple(shape)}"
            )

    def size(self, shape: Sequence[int]) -> tuple[int, int]:
        return math.prod(shape[-self.flatten :]) // self.count, 1

    def matrix(self, Y: Tensor) -> Tensor:
        return self.vector(Y).unsqueeze(-1)

    def unmatrix(self, M: Tensor, shape: Sequence[int]) -> Tensor:
        first, *others = shape[-self.flatten :]
        return self.join(M.squeeze(-1).unflatten(-1, (first // self.count, *others)))

    def vector(self, Y: Tensor) -> Tensor:
        """Y as vectors (..., N); a view."""
        Y = Y if self.blocks is None else self.split(Y)
        return Y.flatten(-self.flatten) if self.flatten > 1 else Y

    def residual(self, Y: Tensor) -> Tensor:
        """| ||Y||^2 - 1 |; 0 for the padding row."""
        return super().residual(self.read(Y))

    def project(self, X: Tensor) -> Tensor:
        """X/||X||; the padding row stays as it is."""
        return self.keep_padding(super().project(self.read(X)), X)

    # -- the implicit section of real vectors, in closed form: the anchor is the sign r of `rank_one` --------

    def section_kind(self, asked: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> str:
        if dtype is not None and dtype.is_complex:
            return super().section_kind(asked, shape)
        return "transported" if asked == "transported" else "implicit"

    def implicit_grad(self, Y: Tensor, R: Tensor, P: Tensor, G: Tensor, out: Tensor) -> Tensor:
        if Y.is_complex():
            return super().implicit_grad(Y, R, P, G, out)
        B = self.vector(out)
        B[..., 1:] = pull(1, self.vector(Y), self.vector(G), P.squeeze(-1), R.squeeze(-1))
        B[..., 0] = 0
        return out

    def implicit_inverse(self, Y: Tensor, R: Tensor) -> Tensor:
        """p = 1/(r + Y_1)."""
        if Y.is_complex():
            return super().implicit_inverse(Y, R)
        return torch.reciprocal(R.squeeze(-1) + self.vector(Y)[..., :1]).unsqueeze(-1)

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
        """Move Y and turn the `vectors`, in place; returns the new p. The sign changes where |p| > 4.

        Squares of coordinates stay as they are while the frame turns slowly, and spread in steps that turn a
        point by more than FAST. Otherwise Adam would divide momentum by the second moments of other
        coordinates.
        """
        if Y.is_complex():
            return super().implicit_update(Y, R, P, W, retraction, vectors, moved)
        y, b, sign, p = self.vector(Y), self.vector(W)[..., 1:], R.squeeze(-1), P.squeeze(-1)
        step = Step(1, y, b, retraction, sign, p, moved.unsqueeze(-1) > 0)
        step.turn_([self.vector(X) for X in vectors])
        fast = step.bb > FAST**2
        if squares and (torch.compiler.is_compiling() or not may_read(fast) or bool(fast.any())):
            step.spread_([self.vector(X) for X in squares], fast)
        y[..., 1:] = step.point()
        y[..., :1] = step.y1
        assert step.sign is not None
        sign.copy_(step.sign)
        return step.p.unsqueeze(-1)

    def implicit_polish(self, Y: Tensor, share: Tensor | float) -> None:
        """Y + Y (1 - |Y|^2)/2, in place."""
        if Y.is_complex():
            return super().implicit_polish(Y, share)
        y = self.vector(Y)
        share = share.unsqueeze(-1) if isinstance(share, Tensor) else share
        y.addcmul_(y, (1 - scalar(y, y)) * (share / 2))
        return None

    # -- geometry --------------------------------------------------------------------------------------------

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """theta/sin(theta) (Z - cos(theta) Y), with theta from both its sine and its cosine.

        So it is accurate to rounding. Geodesics of complex vectors are not circles: see `canonical_log`.
        """
        if Y.is_complex():
            return canonical_log(self, Y, Z) if Y.numel() else torch.zeros_like(Y)
        y, z = self.vector(Y), self.vector(Z)
        c = scalar(y, z)
        K = z - c * y
        s2 = scalar(K, K)
        if bool((c <= -1 + 4 * torch.finfo(Y.dtype).eps).any()):
            raise ValueError(f"{self}.log: the points are antipodal, the shortest geodesic is not unique")
        # theta/sin(theta) = 1 + s^2/6 + 3 s^4/40 + ...; sqrt has no derivative at 0
        small = (s2 < 1e-6) & (c > 0)
        s = torch.where(small, 1.0, s2).sqrt()
        ratio = torch.where(small, 1 + s2 / 6 + 3 * s2 * s2 / 40, torch.atan2(s, c) / s)
        return self.unmatrix((K * ratio).unsqueeze(-1), Y.shape)

    def dist(self, Y: Tensor, Z: Tensor) -> Tensor:
        """The angle 2 atan(|Z - Y|/|Z + Y|), accurate to rounding at any angle.

        Its derivative is taken as 0 where points coincide and where they are antipodal.
        """
        if Y.is_complex():
            return super().dist(Y, Z) if Y.numel() else self.vector(Y.real).sum(-1)
        y, z = self.vector(Y), self.vector(Z)
        near, far = (_root((v * v).sum(-1)) for v in (z - y, z + y))
        return 2 * torch.atan2(near, far)


def _root(s: Tensor) -> Tensor:
    """sqrt(s), with derivative 0 at 0."""
    zero = s == 0
    return torch.where(zero, 0, torch.where(zero, 1, s).sqrt())
