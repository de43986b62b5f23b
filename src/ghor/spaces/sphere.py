"""S^(N-1) = SO(N)/SO(N-1), or U(N)/U(N-1) for complex tensors: vectors of one length.

A point of a sphere of another radius r is Y = r y, y a unit vector, and everything is in units of length:
tangent vectors, W in g^hor and learning rates, as they would be without a constraint. A velocity W turns Y
by |W|/r radians. The implicit section keeps the radius in its anchor, which is r or -r in place of 1 or -1; a
stored section is [Y, r Q, r e_1], N x (N+1), where the last column only keeps r. Neither changes in a run, so
the radius does not drift, also where it is whatever it was at the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from ghor._torch.values import may_read
from ghor.linalg import everywhere, eye_like, is_by_coordinates, norms
from ghor.retraction import Retraction, by_name
from ghor.spaces.base import compute
from ghor.spaces.orthogonal import Orthogonal
from ghor.spaces.rank_one import FAST, Padded, Step, inner, pieces, scalar, turn_by_cayley
from ghor.spaces.stiefel import canonical_log


@dataclass(frozen=True, repr=False)
class Sphere(Padded, Orthogonal):
    """The sphere: vectors (..., N) of length one; St(1, N) with vectors in place of one-column matrices.

    A matrix on Sphere() has rows of length one, on Sphere(along="columns") columns: the oblique manifold.
    Complex vectors have the canonical metric of U(N)/U(N-1), in which the direction i Y counts half. The row
    `padding_idx` of a matrix, if given, is not a point, and optimizers leave it alone: it is the padding row
    of an nn.Embedding.

    `radius` is the length of real vectors: a number, or "start", with which every vector keeps the length
    that it has when an optimizer takes it, whatever it is. `Sphere(flatten=2, radius="start")` keeps the
    Frobenius norm of a matrix. The learning rate is in units of length, as without a constraint: Adam moves
    entries by about lr, and a vector of N entries turns by about lr sqrt(N)/r radians.

    The section of real vectors is a function of Y and a sign, so the implicit section is the default.
    """

    spreads: ClassVar[bool] = True

    radius: float | str = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        r = self.radius
        if r != "start" and not (isinstance(r, (int, float)) and r is not True and 0 < r < math.inf):
            raise ValueError(f"radius is a positive number or 'start', got {r!r}")

    def check_along(self) -> None:
        if self.along == "columns" and (self.blocks, self.flatten, self.padding_idx) != (None, 1, None):
            raise ValueError(
                f"along='columns' makes the columns of a matrix points; {self} has other options beside it"
            )

    @property
    def dims(self) -> int:
        return self.flatten

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) < self.flatten:
            raise ValueError(f"{self} holds vectors (..., N) with N >= 2, got shape {tuple(shape)}")
        if 0 in shape:
            empty = f"dimension {tuple(shape).index(0)} of shape {tuple(shape)} is empty"
            raise ValueError(f"{self} has no points here: {empty}")
        if self.along == "columns" and len(shape) < 2:
            raise ValueError(
                f"{self} holds the columns of matrices (..., N, K), got shape "
                f"{tuple(shape)}; for single vectors use ghor.Sphere()"
            )
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
        sides = shape[-2:-1] if self.along == "columns" else shape[-self.flatten :]
        return math.prod(sides) // self.count, 1

    def matrix(self, Y: Tensor) -> Tensor:
        return self.vector(Y).unsqueeze(-1)

    def unmatrix(self, M: Tensor, shape: Sequence[int]) -> Tensor:
        if self.along == "columns":
            return M.squeeze(-1).mT
        first, *others = shape[-self.flatten :]
        return self.join(M.squeeze(-1).unflatten(-1, (first // self.count, *others)))

    def vector(self, Y: Tensor) -> Tensor:
        """Y as vectors (..., N); a view."""
        Y = Y if self.plain else self.split(Y)
        return Y.flatten(-self.flatten) if self.flatten > 1 else Y

    # -- the radius ------------------------------------------------------------------------------------------

    def check_dtype(self, dtype: torch.dtype) -> None:
        super().check_dtype(dtype)
        if dtype.is_complex and self.radius != 1:
            raise TypeError(
                f"weights on {self} are real floating point tensors, not {dtype}; complex vectors have "
                "length one: Sphere()"
            )
        limits = torch.finfo(dtype)
        if not isinstance(self.radius, str) and not limits.tiny <= self.radius <= limits.max:
            raise TypeError(
                f"{dtype} holds no vectors of length {self.radius:.3g}, only from {limits.tiny:.0e} to "
                f"{limits.max:.0e}; use another radius, or a wider dtype"
            )

    @property
    def unit(self) -> Sphere:
        """This sphere with radius one."""
        return self if self.radius == 1 else replace(self, radius=1.0)

    def lengths(self, Y: Tensor) -> Tensor:
        """|Y| of each vector: (..., N) -> (...), also where squares are out of range, 1e-25 in float32."""
        y = compute(self.vector(Y))
        largest = y.detach().abs().amax(-1, keepdim=True)
        largest = torch.where(largest == 0, 1, largest)
        return (_square(y / largest).sqrt() * largest.squeeze(-1)).to(Y.real.dtype)

    def each(self, r: Tensor, X: Tensor) -> Tensor:
        """One number for each point, (...), expanded to the shape of points X."""
        return self.unmatrix(r.unsqueeze(-1).expand_as(self.vector(X)).unsqueeze(-1), X.shape)

    def scale(self, Y: Tensor) -> Tensor | float:
        """The radius of the sphere that each point is on, shaped so that it multiplies points."""
        return self.each(self.lengths(Y), Y) if isinstance(self.radius, str) else self.radius

    def radius_of(self, frame: Tensor) -> Tensor:
        """The radius that a section keeps, its anchor (..., 1, 1) or a stored one (..., N, N+1): (...)."""
        return frame[..., 0, -1].abs()

    def step_length(self, W: Tensor) -> Tensor:
        """|W|/r, the angle in radians; |W| where the radius is not known here."""
        W = self.vector(W)
        return norms(W if isinstance(self.radius, str) or self.radius == 1 else W / self.radius)

    def angle(self, W: Tensor) -> Tensor:
        """As `step_length`; of complex vectors as of one-column matrices."""
        return super().angle(W) if W.is_complex() else self.step_length(W)

    def E(self, shape: Sequence[int], dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """(r, 0, ..., 0); length one where the radius is that of the start."""
        E = super().E(shape, dtype, device)
        return E if isinstance(self.radius, str) else E.mul_(self.radius)

    def residual(self, Y: Tensor) -> Tensor:
        """| |Y|^2/r^2 - 1 |; 0 for the padding row.

        With radius="start" every vector is a point, but 0 and vectors that are not finite, which are
        infinitely far off.
        """
        Y = self.read(Y)
        if not isinstance(self.radius, str):
            y = self.vector(Y / self.radius)
            return (_square(y) - 1).abs()
        length = self.lengths(compute(Y))
        return torch.where((length > 0) & torch.isfinite(length), 0.0, math.inf).to(Y.dtype)

    def random(
        self,
        *shape: int,
        generator: Generator | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> Tensor:
        """A uniform point; of length one where the radius is that of the start."""
        Y = super().random(*shape, generator=generator, dtype=dtype, device=device)
        # Once more, because LAPACK's vector of a million float32 entries is 1e-5 off length one.
        return Y.mul_((1 if isinstance(self.radius, str) else self.radius) / self.each(self.lengths(Y), Y))

    def project(self, X: Tensor) -> Tensor:
        """r X/|X|, or X itself with radius="start"; the padding row stays as it is."""
        self.check(X.shape, X.dtype)
        Y = compute(self.read(X))
        y = self.vector(Y)
        if not everywhere(torch.isfinite(y)):
            raise ValueError(f"a vector with NaN or infinite entries has no nearest point on {self}")
        # Scaled by the largest entry, because 1e30 squared overflows float32.
        largest = y.detach().abs().amax(-1, keepdim=True)
        if not everywhere(largest > 0):
            raise ValueError(
                f"a vector of length 0 has no nearest point on {self}; initialise it first, for example with "
                f"{self}.random{tuple(X.shape)}"
            )
        if isinstance(self.radius, str):
            return X.clone()
        y = y / largest
        y = y * (self.radius / _square(y).sqrt().unsqueeze(-1))
        return self.keep_padding(self.unmatrix(y.unsqueeze(-1), X.shape).to(X.dtype).contiguous(), X)

    # -- stored sections: [Y, r Q, r e_1] --------------------------------------------------------------------

    def _rotation(self, Lambda: Tensor) -> tuple[Tensor, Tensor]:
        """r [y, Q], a view, and r (..., 1, 1)."""
        return Lambda[..., :-1], Lambda[..., :1, -1:]

    def _with_radius(self, Q: Tensor, Y: Tensor, r: Tensor) -> Tensor:
        """[Y, r Q, r e_1], stored by columns."""
        column = torch.nn.functional.pad(r, (0, 0, 0, Q.shape[-2] - 1))
        return torch.cat([self.matrix(Y), r * Q[..., 1:], column], -1).mT.contiguous().mT

    def section(self, Y: Tensor) -> Tensor:
        if self.radius == 1:
            return super().section(Y)
        length = self.lengths(Y)
        r = length if isinstance(self.radius, str) else torch.full_like(length, self.radius)
        r = r[..., None, None]
        return self._with_radius(self.section_matrix(self.matrix(Y) / r), Y, r)

    def section_near(self, Lambda: Tensor, Y: Tensor) -> Tensor:
        if self.radius == 1:
            return super().section_near(Lambda, Y)
        (frame, old), r = self._rotation(Lambda), self.implicit_start(Y).abs()
        return self._with_radius(self.unit.section_near(frame / old, Y / self.each(r[..., 0, 0], Y)), Y, r)

    def global_grad(self, Lambda: Tensor, G: Tensor, out: Tensor | None = None) -> Tensor:
        if self.radius == 1:
            return super().global_grad(Lambda, G, out)
        frame, r = self._rotation(Lambda)
        return super().global_grad(frame / r, G, out)

    def global_rep(self, Lambda: Tensor, Delta: Tensor) -> Tensor:
        if self.radius == 1:
            return super().global_rep(Lambda, Delta)
        frame, r = self._rotation(Lambda)
        return super().global_rep(frame, Delta / self.each(r[..., 0, 0], Delta))

    def update_section(
        self, Lambda: Tensor, W: Tensor, retraction: str | Retraction = "cayley", out: Tensor | None = None
    ) -> Tensor:
        if self.radius == 1:
            return super().update_section(Lambda, W, retraction, out)
        out = Lambda.clone() if out is None else out
        frame, r = self._rotation(Lambda)
        super().update_section(frame, W / self.each(r[..., 0, 0], W), retraction, out[..., :-1])
        return out

    def polish(
        self, Lambda: Tensor, E: Tensor, share: Tensor | float = 1.0, point_only: bool = False
    ) -> Tensor:
        """X + X (I - X^T X/r^2)/2, X = Y or the whole frame r [y, Q]."""
        if self.radius == 1:
            return super().polish(Lambda, E, share, point_only)
        frame, r = self._rotation(Lambda)
        X = frame[..., :1] if point_only else frame
        share = share[..., None, None] if isinstance(share, Tensor) else share
        X.add_(X @ ((eye_like(X) - (X / r).mT @ (X / r)) * (share / 2)))
        return Lambda

    def restore(self, Lambda: Tensor, E: Tensor) -> Tensor:
        if self.radius == 1:
            return super().restore(Lambda, E)
        frame, r = self._rotation(Lambda)
        frame.copy_(super().restore(frame / r, E) * r)
        return Lambda

    def checked_section(self, Lambda: Tensor, E: Tensor) -> Tensor:
        if self.radius == 1:
            return super().checked_section(Lambda, E)
        N, Lambda = self.size(E.shape)[0], Lambda.mT.contiguous().mT
        if Lambda.shape[-1] == N + 1:
            self._check_radius(self.radius_of(Lambda), "section")
            frame, r = self._rotation(Lambda)
            good = super().checked_section(frame / r, E)
            off = (
                torch.linalg.matrix_norm(good * r - frame) > 100 * torch.finfo(r.dtype).eps * r[..., 0, 0] * N
            )
            frame.copy_(torch.where(off[..., None, None], good * r, frame))
            return Lambda
        return super().checked_section(Lambda, E)  # raises

    def checked_anchor(self, R: Tensor) -> Tensor:
        if self.radius == 1:
            return super().checked_anchor(R)
        self._check_radius(self.radius_of(R), "frame_anchor")
        return R

    def _check_radius(self, r: Tensor, key: str) -> None:
        """Raise ValueError unless a loaded state has this radius, or with radius="start" any."""
        good = torch.isfinite(r) & (r > 0)
        if not isinstance(self.radius, str):
            good = good & ((r - self.radius).abs() <= 0.005 * self.radius)
        if not bool(good.all()):
            raise ValueError(
                f"a loaded section has radius {float(r[~good][0]):.3g}, not that of {self}; load another "
                f"state, or delete the key {key!r} from it: it is then found from the weight"
            )

    # -- the implicit section of real vectors, in closed form: the anchor is the sign r of `rank_one` --------

    def section_kind(self, asked: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> str:
        if dtype is not None and dtype.is_complex:
            return super().section_kind(asked, shape)
        return "transported" if asked == "transported" else "implicit"

    def implicit_grad(self, Y: Tensor, R: Tensor, P: Tensor, G: Tensor, out: Tensor) -> Tensor:
        """G - y (y.G + G_1)/rho, y = Y/r, with 0 as its first coordinate."""
        if Y.is_complex():
            return super().implicit_grad(Y, R, P, G, out)
        y, g, B, r, rho = self.vector(Y), self.vector(G), self.vector(out), R[..., 0], P[..., 0]
        g, scratch = (B.copy_(g), None) if is_by_coordinates(B) else (g, B)
        for i in pieces(y, 0):
            room = None if scratch is None else scratch[i]
            if self.radius == 1:
                u = y[i]
                (along,) = inner((u, g[i]), out=room)
                along.addcmul_(r[i], g[i][..., :1])
            else:
                u = torch.mul(y[i], r[i].reciprocal(), out=room)
                (along,) = inner((u, g[i]))
                along.add_(g[i][..., :1])
            torch.addcmul(g[i], u, along.div_(rho[i]), value=-1, out=B[i])
        B[..., 0] = 0
        return out

    def implicit_start(self, Y: Tensor) -> Tensor:
        """r or -r, with the sign of Y_1."""
        if Y.is_complex():
            return super().implicit_start(Y)
        y1 = self.vector(Y)[..., :1]
        r = (
            self.lengths(Y).unsqueeze(-1)
            if isinstance(self.radius, str)
            else torch.full_like(y1, self.radius)
        )
        return torch.where(y1 < 0, -r, r).unsqueeze(-1)

    def implicit_near(self, R: Tensor, Y: Tensor) -> Tensor:
        """The radius of Y with the sign of R, or with that of Y_1 where Y is near the other pole."""
        if Y.is_complex():
            return super().implicit_near(R, Y)
        new = self.implicit_start(Y)
        same = torch.copysign(new, R)
        return torch.where(1 + self.vector(Y)[..., :1, None] / same < 0.25, new, same)

    def implicit_inverse(self, Y: Tensor, R: Tensor) -> Tensor:
        """rho = 1 + Y_1/r, see `rank_one.turn_by_cayley`."""
        if Y.is_complex():
            return super().implicit_inverse(Y, R)
        return 1 + self.vector(Y)[..., :1, None] / R

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
        """Move Y and turn the `vectors`, in place; returns the new rho. The sign changes where rho < 1/4.

        Squares of coordinates stay as they are while the frame turns slowly, and spread in steps that turn a
        point by more than FAST. Otherwise Adam would divide momentum by the second moments of other
        coordinates.
        """
        if Y.is_complex():
            return super().implicit_update(Y, R, P, W, retraction, vectors, moved)
        y, w, r, rho = self.vector(Y), self.vector(W), R[..., 0], P[..., 0]
        turning = [self.vector(X) for X in vectors]
        unit, scratch = self.radius == 1, None if scratch is None else self.vector(scratch)
        if span is not None and span[1] <= FAST and retraction.name == "cayley":
            lengths, least = moved.unsqueeze(-1), span[0]
            return turn_by_cayley(y, w, r, rho, lengths, turning, unit, least, scratch).unsqueeze(-1)
        size, sign, u, b = (1, r, y, w) if unit else (r.abs(), r.sign(), y / r.abs(), w / r.abs())
        step = Step(1, u, b[..., 1:], retraction, sign, moved=moved.unsqueeze(-1) > 0)
        step.turn_(turning)
        fast = step.bb > FAST**2
        if squares and (torch.compiler.is_compiling() or not may_read(fast) or bool(fast.any())):
            step.spread_([self.vector(X) for X in squares], fast)
        assert step.sign is not None
        y2 = y[..., 1:]
        y2.addcmul_(step.g, y2, value=-1).addcmul_(step.F2 * size, step.b)
        y[..., :1] = torch.where(step.bb > 0, step.y1 * size, y[..., :1])  # what stays keeps every bit
        r.copy_(step.sign * size)
        return self.implicit_inverse(Y, R)

    def implicit_polish(self, Y: Tensor, R: Tensor | None, share: Tensor | float) -> None:
        """Y + Y (1 - |Y|^2/r^2)/2, in place."""
        if Y.is_complex():
            assert R is not None
            return super().implicit_polish(Y, R, share)
        y = self.vector(Y)
        u = y if self.radius == 1 or R is None else y / R[..., 0]
        square = scalar(u, u)
        share = share.unsqueeze(-1) if isinstance(share, Tensor) else share
        y.addcmul_(y, (1 - square) * (share / 2))
        return None

    def implicit_restore(self, Y: Tensor, R: Tensor) -> Tensor:
        """r Y/|Y|."""
        if Y.is_complex():
            return super().implicit_restore(Y, R)
        return Y * self.each(self.radius_of(R) / self.lengths(Y), Y)

    def implicit_frame(self, Y: Tensor, R: Tensor) -> Tensor:
        if self.radius == 1:
            return super().implicit_frame(Y, R)
        r = R.abs()
        return self._with_radius(self.section_matrix(self.matrix(Y) / r, R / r), Y, r)

    def implicit_turn(self, Y: Tensor, R: Tensor, Lambda: Tensor, vectors: Sequence[Tensor]) -> None:
        if self.radius == 1:
            return super().implicit_turn(Y, R, Lambda, vectors)
        frame, r = self._rotation(Lambda)
        return self.unit.implicit_turn(Y / self.each(r[..., 0, 0], Y), R / R.abs(), frame / r, vectors)

    # -- geometry --------------------------------------------------------------------------------------------

    def tangent(self, Y: Tensor, X: Tensor) -> Tensor:
        return super().tangent(Y if self.radius == 1 else Y / self.scale(Y), X)

    def metric(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """<U, V>; for complex vectors the canonical metric, Re U^H (I - Y Y^H/2) V."""
        return super().metric(Y if self.radius == 1 else Y / self.scale(Y), U, V)

    def rgrad(self, Y: Tensor, G: Tensor) -> Tensor:
        """G - Y Y^H G/r^2 + Y skew(Y^H G)/r^2, the gradient in that metric."""
        return super().rgrad(Y if self.radius == 1 else Y / self.scale(Y), G)

    def Omega(self, Y: Tensor, Delta: Tensor) -> Tensor:
        if self.radius == 1:
            return super().Omega(Y, Delta)
        r = self.scale(Y)
        return super().Omega(Y / r, Delta / r)

    def retract(self, Y: Tensor, Delta: Tensor, retraction: str | Retraction = "cayley") -> Tensor:
        if self.radius == 1:
            return super().retract(Y, Delta, retraction)
        r = self.scale(Y)
        y, d = self.matrix(Y / r), self.matrix(Delta / r)
        return Y + self.unmatrix(self._act(y, d, self.matrix(Y), by_name(retraction)), Y.shape)

    def transport(self, Y: Tensor, Delta: Tensor, V: Tensor) -> Tensor:
        if self.radius == 1:
            return super().transport(Y, Delta, V)
        r = self.scale(Y)
        return super().transport(Y / r, Delta / r, V)

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """theta/sin(theta) (Z - cos(theta) Y), with theta from both its sine and its cosine.

        So it is accurate to rounding, relatively for near points, too, and for points that are nearly
        antipodal. Geodesics of complex vectors are not circles: see `canonical_log`.
        """
        if Y.is_complex():
            return canonical_log(self, Y, Z) if Y.numel() else torch.zeros_like(Y)
        if self.radius != 1:
            self._check_radii(Y, Z)
            r = self.scale(Y)
            return self.unit.log(Y / r, Z / self.scale(Z)) * r
        y, z = self.vector(Y), self.vector(Z)
        c = scalar(y, z)
        D = torch.where(c < 0, z + y, z - y)
        K = D - scalar(y, D) * y  # z - c y, but for near and far points not a difference of large numbers
        s2 = scalar(K, K)
        if not everywhere((c >= 0) | (s2 > (16 * torch.finfo(Y.dtype).eps) ** 2) | torch.isnan(s2)):
            raise ValueError(f"{self}.log: the points are antipodal, the shortest geodesic is not unique")
        # theta/sin(theta) = 1 + s^2/6 + 3 s^4/40 + ...; sqrt has no derivative at 0
        small = (s2 < 1e-6) & (c > 0)
        s = torch.where(small, 1.0, s2).sqrt()
        ratio = torch.where(small, 1 + s2 / 6 + 3 * s2 * s2 / 40, torch.atan2(s, c) / s)
        return self.unmatrix((K * ratio).unsqueeze(-1), Y.shape)

    def _check_radii(self, Y: Tensor, Z: Tensor) -> None:
        """Raise ValueError for points that no one sphere holds."""
        if isinstance(self.radius, str):
            a, b = self.lengths(Y.detach()), self.lengths(Z.detach())
            if not everywhere(~((a - b).abs() > max(1e-3, torch.finfo(Y.dtype).eps) * a)):
                raise ValueError(f"points of different lengths are on different spheres of {self}")

    def mean(self, points: Tensor, weights: Tensor | None = None) -> Tensor:
        if self.along == "rows":
            return super().mean(points, weights)
        return self.join(self.one.mean(self.split(points), weights))

    def dist(self, Y: Tensor, Z: Tensor) -> Tensor:
        """r times the angle 2 atan(|Z - Y|/|Z + Y|), accurate to rounding at any angle.

        Its derivative is taken as 0 where points coincide and where they are antipodal.
        """
        if Y.is_complex():
            return super().dist(Y, Z) if Y.numel() else self.vector(Y.real).sum(-1)
        if self.radius != 1:
            self._check_radii(Y, Z)
            r = self.lengths(Y) if isinstance(self.radius, str) else self.radius
            return self.unit.dist(Y / self.scale(Y), Z / self.scale(Z)) * r
        y, z = self.vector(Y), self.vector(Z)
        near, far = (_root((v * v).sum(-1)) for v in (z - y, z + y))
        return 2 * torch.atan2(near, far)


def _root(s: Tensor) -> Tensor:
    """sqrt(s), with derivative 0 at 0."""
    zero = s == 0
    return torch.where(zero, 0, torch.where(zero, 1, s).sqrt())


def _square(y: Tensor) -> Tensor:
    """|y|^2, (..., N) -> (...).

    By torch's sum, which adds pairwise: its norms and products are 1e-5 off for a million entries in float32.
    """
    return ((y * y.conj()).real if y.is_complex() else y * y).sum(-1)
