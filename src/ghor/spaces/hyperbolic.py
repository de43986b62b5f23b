"""H^n = SO+(1, n)/SO(n): hyperbolic space in the Lorentz model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ghor._torch.transforms import differentiated, transformed
from ghor._torch.values import may_read
from ghor.linalg import MANY, everywhere, is_by_coordinates, largest, norms, row_dots, row_sums
from ghor.retraction import Retraction, geodesic
from ghor.spaces.base import compute
from ghor.spaces.framed import Framed, orthonormalised
from ghor.spaces.rank_one import FAST, Padded, Step, inner, one, pieces, pull, scalar, sinhc

SLOW = FAST / 5  # far out the frame turns by up to the length of the step
LONG = 0.5  # length of a step after which coordinates are others, and second moments equal


@dataclass(frozen=True, repr=False)
class Hyperbolic(Padded, Framed):
    """Vectors (..., n+1) with -x_0^2 + x_1^2 + ... + x_n^2 = -1, x_0 > 0.

    g^hor: boosts b in R^n, stored as (0, b). The section is the boost at x, a function of x alone, so the
    implicit section stores nothing and is the default. A transported frame is that boost times a rotation:
    Lambda = [x; 0, o_1; ...; 0, o_n], o_j in R^n.

    At distance r from e_0 neighbouring floating point points are eps e^r/2 apart: in float32 5e-4 at r = 9
    and 0.2 at r = 15, in float64 1e-6 at r = 23. Where the digits run out, at eps x_0 = 1/4 (r = 15.2 in
    float32, 35.4 in float64, 4.2 in bfloat16), a weight is held, with a warning. The rounded coordinates of a
    tangent vector there say its direction only to eps e^r. So the end of a geodesic of length t is known to
    2 arsinh(eps e^r sinh(t)), and one that is to come back through the origin from r = 14 in float32 may end
    anywhere at that distance from it: use shorter vectors, or float64.

    The row `padding_idx` of a matrix, if given, is not a point, and optimizers leave it alone: it is the
    padding row of an nn.Embedding.
    """

    sides: ClassVar[int] = 1
    holds: ClassVar[str] = "vectors (..., n+1) with n >= 1"
    implicit: ClassVar[bool] = True
    spreads: ClassVar[bool] = True
    curvature: ClassVar[float] = -1.0
    max_velocity: ClassVar[float] = 1.0  # Cayley needs |b| < 2

    # -- points ----------------------------------------------------------------------------------------------

    def check_shape(self, shape: Sequence[int]) -> None:
        self.refuse_shape(shape, len(shape) >= 1 and shape[-1] >= 2)
        self.check_padding(shape)

    def E(self, shape: Sequence[int], dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """e_0."""
        self.check_shape(shape)
        E = torch.zeros(tuple(shape), dtype=dtype, device=device)
        E[..., 0] = 1
        return E

    def residual(self, Y: Tensor) -> Tensor:
        """|<x, x> + 1|, and 0 for the padding row; infinite where 1 is less than the rounding of x_0."""
        x = compute(self.read(Y))  # 256 squared overflows float16
        x0, xs = x[..., 0], x[..., 1:]
        off = (1 + (xs * xs).sum(-1) - x0 * x0.abs()).abs()
        return torch.where(x0 * torch.finfo(Y.dtype).eps >= 1, math.inf, off).to(Y.dtype)

    def tolerance(self, Y: Tensor) -> Tensor:
        """Rounding of <x, x> grows with x_0^2."""
        return self.room(Y) + 4 * torch.finfo(Y.dtype).eps * compute(self.read(Y))[..., 0] ** 2

    def from_normal(self, X: Tensor) -> Tensor:
        """The point in a uniform direction from e_0, at a uniform distance between 0 and 1."""
        r = torch.special.ndtr(X[..., :1])
        return _lifted(torch.sinh(r) * torch.nn.functional.normalize(X[..., 1:], dim=-1))

    def project(self, X: Tensor) -> Tensor:
        """The point with X's spatial part: x_0 = sqrt(1 + |x_s|^2). The padding row stays as it is."""
        self.check_project(X)
        Y = _lifted(compute(self.read(X))[..., 1:])
        far = largest(Y.detach()[..., 0])
        if not far * torch.finfo(X.dtype).eps < 1:
            wider = "" if X.dtype == torch.float64 else ", or use float64"
            raise ValueError(
                f"the point is at distance {math.log(2 * far):.0f} from the origin of {self}, where "
                f"{X.dtype} has no digits left; scale it down{wider}"
            )
        return self.keep_padding(Y.to(X.dtype), X)

    def to_ball(self, Y: Tensor) -> Tensor:
        """The point of the Poincare ball: x_s/(1 + x_0), (..., n+1) -> (..., n)."""
        return Y[..., 1:] / (1 + Y[..., :1])

    def from_ball(self, u: Tensor) -> Tensor:
        """The inverse of `to_ball`: (1 + |u|^2, 2 u)/(1 - |u|^2), for |u| < 1."""
        square = scalar(u, u)
        if not everywhere(~(square.detach() >= 1)):
            raise ValueError(
                f"{self}.from_ball takes points of the open unit ball, got one of norm "
                f"{largest(square.detach()) ** 0.5:.6g}"
            )
        return _lifted(2 * u / (1 - square))

    # -- Algorithm 3 -----------------------------------------------------------------------------------------

    def frame(self, Y: Tensor) -> Tensor:
        return Y.unsqueeze(-2)

    def section(self, Y: Tensor) -> Tensor:
        n = Y.shape[-1] - 1
        I = torch.eye(n, n + 1, dtype=Y.dtype, device=Y.device).roll(1, -1)
        return torch.cat([Y.unsqueeze(-2), I.expand(*Y.shape[:-1], n, n + 1)], -2)

    def apply_section(self, Lambda: Tensor, E: Tensor) -> Tensor:
        return Lambda[..., 0, :]

    def pullback(self, Lambda: Tensor, G: Tensor) -> Tensor:
        """(0, Q^T G), Q the columns of the frame beyond the first."""
        x = Lambda[..., 0, :]
        return _turned(Lambda, pull(-1, x, G, 1 / (1 + x[..., :1])))

    def global_rep(self, Lambda: Tensor, Delta: Tensor) -> Tensor:
        return _turned(Lambda, _coordinates(Lambda[..., 0, :], Delta))

    def away_from(self, Lambda: Tensor, Y: Tensor, Y0: Tensor) -> Tensor:
        """-log(Y, Y0) in g^hor, so that the rate of decay does not depend on how far out Y is."""
        return -self.global_rep(Lambda, self.log(Y, Y0))

    def push(self, Lambda: Tensor, W: Tensor) -> Tensor:
        return _push(Lambda[..., 0, :], _boost(Lambda, W))

    def hor(self, W: Tensor) -> Tensor:
        """W without its component along e_0."""
        return torch.cat([torch.zeros_like(W[..., :1]), W[..., 1:]], -1)

    def moved(self, Lambda: Tensor, W: Tensor, R: Retraction) -> Tensor:
        """Move x by the boost, and turn O by Wigner's rotation."""
        x, O = Lambda[..., 0, :], Lambda[..., 1:, 1:]
        b = _boost(Lambda, self.hold(Lambda, W, R, Lambda.dtype))
        x_new = _lifted(Step(-1, x, b, R, long=True).point())
        if not differentiated(W):  # the derivative at 0 is not that of a constant
            x_new = torch.where((b != 0).any(-1, keepdim=True), x_new, x)
        x_new = x_new.unsqueeze(-2)
        if Lambda.shape[-2] > 1:
            turned = Step(-1, x.unsqueeze(-2), b.unsqueeze(-2), R, long=True).turned(O)
            x_new = torch.cat([x_new, torch.cat([Lambda[..., 1:, :1], turned], -1)], -2)
        return x_new

    def hold(
        self, Lambda: Tensor, W: Tensor, R: Retraction, dtype: torch.dtype, longest: float | None = None
    ) -> Tensor:
        """W, shortened where the step would go beyond eps x_0 = 1/4, where the digits of `dtype` end.

        Along a geodesic with the outward speed o = <x_s, b>/|b|, x_0 cosh(t) + o sinh(t) = far at
        t = log((far + sqrt(far^2 - x_0^2 + o^2))/(x_0 + o)). Other retractions go at most 4/3 as far. The
        factor is a constant for autograd. Reads values only where that is free. `longest` is the greatest
        |W|, if it is known.
        """
        far = 0.25 / torch.finfo(dtype).eps
        if longest is not None and float(Lambda[..., 0, 0].max()) * math.exp(longest * 4 / 3) <= far:
            return W
        free = may_read(W) and not (differentiated(W) or torch.compiler.is_compiling())
        with torch.no_grad():
            x0, xs = Lambda[..., 0, :1], Lambda[..., 0, 1:]
            length = torch.linalg.vector_norm(W, dim=-1, keepdim=True)
            t = length if R.name == "geodesic" else length * (4 / 3)
            # A path of length t leads no further out than x_0 e^t.
            if free and (W.numel() == 0 or not float((x0 * t.exp()).max()) > far):
                return W
            tiny = torch.finfo(W.dtype).tiny
            out = scalar(xs, _boost(Lambda, W)) / length.clamp_min(tiny)
            limit = x0.clamp_min(far)  # so that a point beyond it can still move inwards
            # x_0 + o, computed without cancellation where o < 0
            inward = (1 + (scalar(xs, xs) - out * out).clamp_min(0)) / (x0 - out)
            sum_ = torch.where(out > 0, x0 + out, inward)
            root = ((limit - x0) * (limit + x0) + out * out).clamp_min(0).sqrt()
            longest = ((limit + root) / sum_).log().clamp_min(0)
            share = (longest / t.clamp_min(tiny)).clamp_max(1)
            if free:
                where = f"to distance {math.log(2 * far):.1f} from the origin"
                self.warn_of_digits(share < 1, where, torch.empty(0, dtype=dtype))
        return W * share

    def polish(
        self, Lambda: Tensor, E: Tensor, share: Tensor | float = 1.0, point_only: bool = False
    ) -> Tensor:
        """Recompute x_0 from the spatial part, and repair O by one Newton-Schulz step."""
        self.implicit_polish(Lambda[..., 0, :], None, share)
        if not point_only:
            orthonormalised(Lambda[..., 1:, 1:], share)
        return Lambda

    # -- the implicit section: the boost alone, with an empty anchor -----------------------------------------

    def section_kind(self, asked: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> str:
        return "transported" if asked == "transported" else "implicit"

    def implicit_start(self, Y: Tensor) -> Tensor:
        """An empty anchor, (..., 0)."""
        return Y.new_empty(*Y.shape[:-1], 0)

    def implicit_near(self, R: Tensor, Y: Tensor) -> Tensor:
        """The anchor is empty, and stays."""
        return R

    def checked_anchor(self, R: Tensor) -> Tensor:
        """The anchor is empty, so there is nothing to check."""
        return R

    def implicit_inverse(self, Y: Tensor, R: Tensor) -> Tensor:
        """p = 1/(1 + x_0)."""
        return torch.reciprocal(1 + Y[..., :1])

    def implicit_frame(self, Y: Tensor, R: Tensor) -> Tensor:
        """The boost, with O = I."""
        return self.section(Y)

    def implicit_turn(self, Y: Tensor, R: Tensor, Lambda: Tensor, vectors: Sequence[Tensor]) -> None:
        """Turn vectors from the frame Lambda to the boost alone, in place."""
        for X in vectors:
            X[..., 1:] = _boost(Lambda, X)

    def implicit_polish(self, Y: Tensor, R: Tensor | None, share: Tensor | float) -> None:
        """Recompute x_0 from the spatial part, in place."""
        Y[..., 0] += (_lifted(Y[..., 1:])[..., 0] - Y[..., 0]) * share

    def implicit_restore(self, Y: Tensor, R: Tensor) -> Tensor:
        """The point with x_0 recomputed from the spatial part."""
        return _lifted(Y[..., 1:])

    def step_length(self, W: Tensor) -> Tensor:
        """|b|."""
        return norms(W)

    def implicit_grad(self, Y: Tensor, R: Tensor, P: Tensor, G: Tensor, out: Tensor) -> Tensor:
        """`global_grad` in the boost frame."""
        G, scratch = (out.copy_(G), None) if is_by_coordinates(out) else (G, out)
        along = torch.addcmul(G[..., :1], P, row_dots(Y, G, first=0, out=scratch))
        torch.addcmul(G, Y, along, out=out)
        out[..., 0] = 0
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
        """Move Y, turn the `vectors` with the boost frame and spread squares, in place; returns the new p.

        This frame turns by up to about the length of the step. If squares did not spread, momentum would turn
        into coordinates whose second moment is next to nothing, and Adam would take steps of many learning
        rates.

        Spreading is right on average. But momentum is a single vector, so in all but short steps the
        squares are kept large enough beside it that no ratio m^2/s exceeds the largest one before the step.
        In long steps all become the largest. Far out gradients point outwards and grow with the point, and
        momentum that turned across them would be divided by squares from nearer in: the step would go
        sideways, which is outwards again, and the point would never come back.
        """
        moved = moved.unsqueeze(-1)
        if span is not None and span[1] <= SLOW and len(Y) > MANY:
            return self._by_rows(Y, P, W, retraction, vectors, moved, squares, span[0] > 0, scratch)
        b = W[..., 1:]
        step = Step(-1, Y, b, retraction, p=P, length=None if span is None else moved)
        pairs = [(m[..., 1:], s[..., 1:]) for m in vectors for s in squares]
        if span is not None:
            pairs = pairs if span[1] > SLOW else []
        elif not torch.compiler.is_compiling() and may_read(b) and not bool((step.bb > SLOW**2).any()):
            pairs = []
        largest = [_ratio(m, s).amax(-1, keepdim=True) for m, s in pairs]
        step.turn_(vectors)
        step.spread_(squares)
        for (m, s), most in zip(pairs, largest, strict=True):
            kept = torch.maximum(s, _ratio(m, most))
            kept = torch.where(step.bb > LONG**2, kept.amax(-1, keepdim=True), kept)
            s.copy_(torch.where(step.bb > SLOW**2, kept, s))
        if span is None or span[0] == 0:
            xs = step.point()
            x0 = torch.where(moved > 0, (1 + scalar(xs, xs)).sqrt(), Y[..., :1])
            Y[..., :1], Y[..., 1:] = x0, xs
            return torch.reciprocal(1 + Y[..., :1])
        xs = Y[..., 1:]
        xs.addcmul_(step.g, xs).addcmul_(step.F2, b)
        x0 = torch.linalg.vector_norm(xs, dim=-1, keepdim=True)
        torch.hypot(x0, one(x0.dtype, x0.device), out=Y[..., :1])
        return torch.reciprocal(1 + Y[..., :1])  # of Y, not step.p: a resumed run starts from Y

    def _by_rows(
        self,
        Y: Tensor,
        P: Tensor,
        W: Tensor,
        retraction: Retraction,
        vectors: Sequence[Tensor],
        length: Tensor,
        squares: Sequence[Tensor],
        all_move: bool,
        scratch: Tensor | None,
    ) -> Tensor:
        """`implicit_update` in short steps of many points: more operations on fewer numbers.

        They are on whole rows, as the first coordinates 0 of W, m and s allow, and those of large tensors on
        pieces that stay in the cache.
        """
        new = torch.empty_like(P)
        for i in pieces(Y, 0):
            y, w, some, part = Y[i], W[i], [m[i] for m in vectors], None if scratch is None else scratch[i]
            yb, *products = inner((y, w), *((X, m) for m in some for X in (y, w)), out=part)
            step = Step(-1, y, w[..., 1:], retraction, p=P[i], length=length[i], yb=yb)
            for m, ym, bm in zip(some, products[::2], products[1::2], strict=True):
                along_y, along_b = step.turn(ym, bm)
                m.addcmul_(y, along_y, value=-1).addcmul_(w, along_b, value=-1)
                m[..., 0] = 0
            step.spread_rows_(y, w, [s[i] for s in squares])
            before = None if all_move else y[..., :1].clone()
            y.addcmul_(y, step.g).addcmul_(w, step.F2)
            x0 = row_dots(y, y, first=0, out=part).add_(1).sqrt_()
            x0 = x0 if before is None else torch.where(length[i] > 0, x0, before)
            y[..., :1] = x0
            torch.reciprocal(1 + x0, out=new[i])  # of Y, not step.p: a resumed run starts from Y
        return new

    # -- geometry --------------------------------------------------------------------------------------------

    def tangent(self, Y: Tensor, X: Tensor) -> Tensor:
        """X + x <x, X>."""
        return X + Y * (scalar(Y[..., 1:], X[..., 1:]) - Y[..., :1] * X[..., :1])

    def is_tangent(self, Y: Tensor, V: Tensor, tol: float | Tensor | None = None) -> bool:
        """||V - tangent(Y, V)|| <= tol ||V||, by default tol = (100 + 10 |x|^2) eps, as x <x, V> rounds."""
        square = compute(Y).square().sum(-1)
        tol = (100 + 10 * square) * torch.finfo(V.dtype).eps if tol is None else tol
        return super().is_tangent(Y, V, tol)

    def transport(self, Y: Tensor, Delta: Tensor, V: Tensor) -> Tensor:
        """Transport V along the geodesic of Delta."""
        frame = self.frame(Y)
        W = self.hold(frame, self.global_rep(frame, Delta), geodesic, Y.dtype)
        step = Step(-1, Y, W[..., 1:], geodesic)
        return _push(_lifted(step.point()), step.turned(_coordinates(Y, V)))

    def log(self, Y: Tensor, Z: Tensor) -> Tensor:
        """The tangent vector at Y of the geodesic to Z, which is unique."""
        a, w, e = _split(Y, Z)
        v = torch.addcmul(w, a / (1 + Y[..., :1]) + e, Y)  # sinh(d) times the direction, in the boost frame
        return _push(Y, v[..., 1:] / sinhc(_squared_distance(Y, e)))

    def dist(self, Y: Tensor, Z: Tensor) -> Tensor:
        """arcosh(-<Y, Z>), accurate to rounding for near points, too; its derivative where Y = Z is 0."""
        if torch.compiler.is_compiling():
            square = _squared_distance(Y, _split(Y, Z)[2]).squeeze(-1)
            zero = square == 0
            return torch.where(zero, 0, torch.where(zero, 1, square).sqrt())
        Y, Z = (Y, Z) if Y.shape == Z.shape else torch.broadcast_tensors(Y, Z)
        d: Tensor = _Distance.apply(Y, Z)[0]  # type: ignore[no-untyped-call]
        return d


# -- vectors of Minkowski space ------------------------------------------------------------------------------


def _ratio(m: Tensor, s: Tensor) -> Tensor:
    """m^2/s, and 0 where s is 0."""
    return (m.square() / s).nan_to_num(0, 0, 0)


def _lifted(xs: Tensor) -> Tensor:
    """The point with this spatial part: x_0 = sqrt(1 + |x_s|^2)."""
    return torch.cat([(1 + scalar(xs, xs)).sqrt(), xs], -1)


def _push(x: Tensor, b: Tensor) -> Tensor:
    """Q b, Q the columns of the boost beyond the first."""
    xs = x[..., 1:]
    a = scalar(xs, b)
    return torch.cat([a, b + xs * (a / (1 + x[..., :1]))], -1)


def _coordinates(x: Tensor, Delta: Tensor) -> Tensor:
    """The inverse of `_push` on tangent vectors at x."""
    return Delta[..., 1:] - x[..., 1:] * (Delta[..., :1] / (1 + x[..., :1]))


class _Distance(torch.autograd.Function):
    """d(x, z), with its derivative in closed form as a function of the spatial parts x_s and z_s.

    Returns `_split`(x, z) as well, to be used again in the derivative. The second derivative is that of the
    formulas below.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        a, w, e = _split(x, z)
        return _asinh((e * x[..., :1] * -0.5).sqrt_()).mul_(2).squeeze(-1), a, w, e

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output)
        ctx.save_for_forward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        x, z, d, *parts = ctx.saved_tensors
        if grad is None:
            return None, None
        return _slopes(x, z, d, parts, grad, *ctx.needs_input_grad)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dz: Tensor | None) -> Any:
        x, z, d, *parts = ctx.saved_tensors
        slopes = _slopes(x, z, d, parts, torch.ones_like(d), dx is not None, dz is not None)
        pairs = zip(slopes, (dx, dz), strict=True)
        along = [(g * v).sum(-1) for g, v in pairs if g is not None and v is not None]
        return sum(along), *map(torch.zeros_like, parts)


def _split(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The chord z_s - x_s as a x_s + w, a = <x_s, z_s - x_s>/x_0^2, and e = x_0 (1 + a) - z_0.

    -2 x_0 e = 4 sinh^2(d/2). For near points e is a difference of large numbers, which is avoided by
    (x_0 (1 + a) - z_0)(x_0 (1 + a) + z_0) = -a^2 - |w|^2. (w has an entry in place of x_0 that nobody uses:
    whole rows take less time than parts of them.)
    """
    x0, z0, D = x[..., :1], z[..., :1], z - x
    a = row_sums(x * D, 0) / x0.square()
    w = torch.addcmul(D, a, x, value=-1)
    ahead, ax = a > -1, torch.addcmul(x0, a, x0)
    e = (a.square() + row_sums(w * w, 0)) / -torch.where(ahead, ax + z0, 1)
    return a, w, torch.where(ahead, e, ax - z0)


def _slopes(
    x: Tensor, z: Tensor, d: Tensor, parts: Sequence[Tensor], grad: Tensor, of_x: bool, of_z: bool
) -> tuple[Tensor | None, Tensor | None]:
    """grad times the derivatives of d(x, z), as rows (0, g); 0 where x = z."""
    # If they are differentiated again, everything has to be a function of x and z.
    again = torch.is_grad_enabled() or transformed(x) or transformed(z)
    a, w, e = _split(x, z) if again else parts
    zero = d == 0
    factor = torch.where(zero, 0, -grad / torch.where(zero, 1, d).sinh()).unsqueeze(-1)
    Gx = _towards(x, a, w, e, factor) if of_x else None
    if not of_z:
        return Gx, None
    x0, z0, D = x[..., :1], z[..., :1], x - z
    a = row_sums(z * D, 0) / z0.square()
    return Gx, _towards(z, a, torch.addcmul(D, a, z, value=-1), e * x0 / z0, factor)


def _towards(x: Tensor, a: Tensor, w: Tensor, e: Tensor, factor: Tensor) -> Tensor:
    """(0, g), of which `global_grad` makes `factor` sinh(d) times the unit vector from x to z.

    a, w and e are those of `_split`(x, z).
    """
    x0 = x[..., :1]
    # In the boost frame first, and scaled, so that what cancels next is of order one.
    v = torch.addcmul(w, a / (1 + x0) + e, x) * factor
    G = torch.addcmul(v, row_sums(x * v, 0) / (x0 * (1 + x0)), x, value=-1)
    G[..., 0] = 0
    return G


def _asinh(t: Tensor) -> Tensor:
    """asinh(t) for t >= 0; several times as fast as torch.asinh, which is not vectorised."""
    return torch.log1p(torch.addcmul(t, t, t / (1 + torch.hypot(t, t.new_ones(())))))


def _squared_distance(x: Tensor, e: Tensor) -> Tensor:
    """d^2 from 4 sinh^2(d/2) = q = -2 x_0 e, with the e of `_split`; smooth where d = 0."""
    q = e * x[..., :1] * -2
    small = q < 1e-3
    d = 2 * _asinh(torch.where(small, 1, q).sqrt() / 2)
    return torch.where(small, q * (1 - q / 12 * (1 - q * 2 / 15 * (1 - q * 9 / 56))), d * d)


def _turned(Lambda: Tensor, w: Tensor) -> Tensor:
    """Coordinates w in the boost frame, converted to the frame Lambda and stored as (0, O^T w)."""
    w = (Lambda[..., 1:, 1:] @ w.unsqueeze(-1)).squeeze(-1) if Lambda.shape[-2] > 1 else w
    return torch.nn.functional.pad(w, (1, 0))


def _boost(Lambda: Tensor, W: Tensor) -> Tensor:
    """The inverse of `_turned`: O b of W = (0, b)."""
    return (W[..., None, 1:] @ Lambda[..., 1:, 1:]).squeeze(-2) if Lambda.shape[-2] > 1 else W[..., 1:]
