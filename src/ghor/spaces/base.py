"""A space: what users name, and what the author of one writes.

Formulas of a space are written once, on tall points (M, N, n) with one leading dimension: vectors have n = 1. How points lie
in a weight (wide matrices, blocks, kernels, columns, a radius) is the `layout`'s and the `radius`'s, and `on_points` brings
the two together: a method marked with it takes weights, its formula takes points. `space.geometry` is the space of points
alone, with the same methods.

What an author writes, on points:

    check_size(N, n)                     raise for sizes that no point has
    frame(y, section, held, eps)         Lambda above y, see `frames.py`
    hor_(w)                              w <- its component in g^hor
    hor_inner(w, v)                      the inner product of g^hor
    residual, allowed, nearest, draw        how far points are off, how far they may be, points near and random ones

and geometry as far as there is some: metric, rgrad, tangent, retract, exp, log, dist, transport.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from torch import Generator, Tensor

from ghor._torch.precision import COMPUTE_DTYPE, full_precision
from ghor._torch.transforms import differentiated
from ghor.layout import Layout
from ghor.linalg import size
from ghor.spaces.frames import Frame, Group
from ghor.spaces.retraction import Retraction, by_name, geodesic

F = TypeVar("F", bound=Callable[..., Any])


def on_points(kinds: str) -> Callable[[F], F]:
    """Let a formula on points (M, N, n) of one sphere, group, ... take weights in their layout.

    `kinds` says what goes in and comes out, as "pv>p" for `exp`:

        p, v     points, tangent vectors (and gradients): tensors of the weight's shape, in its unit of length
        n        a number for each point;  d a length, m a square of one: in the weight's unit
        b        a bool for all points together
    """
    takes, gives = kinds.split(">")

    def decorate(formula: F) -> F:
        names = list(inspect.signature(formula).parameters)[1 : 1 + len(takes)]
        asks_eps = "eps" in inspect.signature(formula).parameters  # the rounding of the weight's dtype

        @wraps(formula)
        @full_precision()
        def method(self: Space, *args: Any, **options: Any) -> Any:
            if self.of_points:
                return formula(self, *args, **options)
            tensors = [*args[: len(takes)], *(options.pop(name) for name in names[len(args) :])]
            shape = torch.broadcast_shapes(*(X.shape for X in tensors))
            dtype = tensors[0].dtype
            points = [self.layout.points(X.expand(shape).to(COMPUTE_DTYPE.get(X.dtype, X.dtype))) for X in tensors]
            if asks_eps:
                options.setdefault("eps", torch.finfo(dtype).eps)
            scale = self.scale(points[0])
            if self.radius != 1:
                points = [x / scale for x in points]
            out = formula(self.geometry, *points, *args[len(takes) :], **options)
            if gives == "b":
                return bool(out.all())
            if gives in "pv":
                return self.layout.weight(out if self.radius == 1 else out * scale, shape).to(dtype)
            if self.radius != 1 and gives in "dm":
                factor = scale if isinstance(scale, float) else scale[..., 0, 0]
                out = out * (factor if gives == "d" else factor * factor)
            return out.reshape(self.layout.batch(shape)).to(dtype.to_real())

        method.kinds = kinds  # type: ignore[attr-defined]
        return cast(F, method)

    return decorate


@dataclass(frozen=True, repr=False)
class Space:
    """A homogeneous space G/H as a value: it holds no tensor and no device, and equal options are equal."""

    compact: ClassVar[bool] = True  # points are bounded: any matrix of full rank has a nearest one
    complex: ClassVar[bool] = False  # points may be complex
    curvature: ClassVar[float] = 0.0  # the least sectional curvature where it is negative: `mean` takes shorter steps
    of_points: ClassVar[bool] = False  # whether this is the `geometry` of a space

    def __repr__(self) -> str:
        given = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join(given)})"

    # -- how points lie in a weight

    @cached_property
    def layout(self) -> Layout:
        """How points lie in a weight."""
        return Layout()

    @property
    def radius(self) -> float | str:
        """The unit of length of a weight."""
        return 1.0

    def scale(self, y: Tensor) -> float | Tensor:
        """The radius of each of the points y of a weight, a number or (M, 1, 1)."""
        return cast(float, self.radius)

    @cached_property
    def geometry(self) -> Self:
        """The space of points (M, N, n) themselves, of radius one."""
        geometry = object.__new__(type(self))
        vars(geometry).update({f.name: getattr(self, f.name) for f in fields(self)}, of_points=True)
        return geometry

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raise unless tensors of this shape and dtype can lie on the space, and can move on it."""
        self.check_dtype(dtype)
        self.check_shape(shape)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise TypeError unless tensors of this dtype can lie on the space."""
        if not (dtype.is_floating_point or (self.complex and dtype.is_complex)):
            raise TypeError(f"weights on {self} are real floating point tensors, not {dtype}; convert with .float()")

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ValueError unless tensors of this shape can lie on the space."""
        if len(shape) < self.layout.dims or 0 in shape:
            raise ValueError(f"{self} has no points of shape {tuple(shape)}")
        self.check_size(*self.layout.size(shape))

    # -- what an author of a space writes, on points (M, N, n)

    def check_size(self, N: int, n: int) -> None:
        """Raise ValueError if there are no points of this size."""

    def frame(self, y: Tensor, section: str, held: dict[str, Tensor], eps: float) -> Frame:
        """Lambda above y; from what a state has `held` of a frame, a run goes on as it began."""
        raise NotImplementedError

    def free_frame(self, y: Tensor, section: str, held: dict[str, Tensor], eps: float, by_rows: bool) -> Frame:
        """The frame of rules that need none; `by_rows` if state[p] could not show it by columns."""
        return self.frame(y, section, held, eps)

    def hor_(self, w: Tensor, factor: float = 0.5) -> None:
        """w <- its component in g^hor, exactly: Adam would divide rounding by rounding; what is there keeps every bit.

        With `factor` 1 a derivative becomes a vector: blocks that count half in the inner product are doubled.
        """

    def origin(self, y: Tensor) -> Tensor:
        """E = Lambda^-1 y, where a weight's development starts: [I; 0], in most spaces."""
        return torch.eye(*y.shape[-2:], dtype=y.dtype, device=y.device)

    def hor_inner(self, w: Tensor, v: Tensor) -> Tensor:
        """<w, v> in g^hor, (M, N, n) -> (M)."""
        return (w * v.conj()).real.sum((-2, -1))

    def positions(self, x: Tensor) -> Tensor | None:
        """The entries of points, or of elements of g^hor, that have a unit of length: a view. All others are turns."""
        return None

    def hor_blocks(self, w: Tensor) -> list[Tensor]:
        """The matrices (M, a, n) that make up elements of g^hor: views. Muon orthogonalises each."""
        return [w]

    def longest(self, y: Tensor) -> float:
        """Of a step: 4 radians a column; on spaces that are not compact 1, where Cayley is far from its pole."""
        return 4 * y.shape[-1] ** 0.5 if self.compact else 1.0

    def residual(self, Y: Tensor) -> Tensor:
        """How far points are off the space, (M)."""
        raise NotImplementedError

    def allowed(self, y: Tensor, eps: float) -> Tensor:
        """The residual (M) of points that count as on the space, rounded to eps."""
        return y.real.new_full((len(y),), room_of(eps) * y.shape[-1])

    def nearest(self, x: Tensor) -> Tensor:
        """The nearest points, or near ones; nothing is read."""
        raise NotImplementedError

    def draw(self, normal: Tensor) -> Tensor:
        """Random points from normal numbers."""
        raise NotImplementedError

    # -- points

    def tolerance(self, Y: Tensor) -> Tensor:
        """The residual up to which a point counts as on the space: (..., *point) -> (...)."""
        y = self.layout.points(Y.to(COMPUTE_DTYPE.get(Y.dtype, Y.dtype)))
        y = y if self.radius == 1 else y / self.scale(y)
        return self.geometry.allowed(y, torch.finfo(Y.dtype).eps).reshape(self.layout.batch(Y.shape))

    def random(
        self, *shape: int, generator: Generator | None = None, dtype: torch.dtype | None = None, device: Any = None
    ) -> Tensor:
        """A random point of the given shape."""
        dtype = dtype or torch.get_default_dtype()
        self.check(shape, dtype)
        normal = torch.randn(shape, generator=generator, dtype=COMPUTE_DTYPE.get(dtype, dtype), device=device)
        y = self.geometry.draw(self.layout.points(normal).contiguous())
        if self.radius not in (1, "start"):
            y = y * cast(float, self.radius)
        return self.layout.weight(y, shape).to(dtype).contiguous()

    def project(self, X: Tensor) -> Tensor:
        """A point near X, the nearest one on compact spaces; ValueError where X does not determine it."""
        x = self.layout.points(X.to(COMPUTE_DTYPE.get(X.dtype, X.dtype)))
        scale = self.scale(x)
        return self.layout.weight(self.geometry.nearest(x / scale) * scale, X.shape).to(X.dtype)


@dataclass(frozen=True, repr=False)
class GroupSpace(Space):
    """A small group that acts: Lambda is an element L, and the lines of Algorithm 3 are formulas of it.

    Geometry on points goes through any L above them; no result depends on which.
    """

    exact: ClassVar[bool] = True  # whether L is the point
    flat: ClassVar[bool] = False  # whether the group is that of translations
    unit: ClassVar[float] = 1.0  # the metric is so many times the inner product of g^hor

    def frame(self, y: Tensor, section: str, held: dict[str, Tensor], eps: float) -> Frame:
        return Group(self, y, held, eps)

    def length(self, w: Tensor) -> Tensor:
        """What limits a step, (M, 1, 1)."""
        return size(w)

    def section(self, y: Tensor) -> Tensor:
        """L above y."""
        return y

    def point(self, L: Tensor) -> Tensor:
        """The point of L."""
        return L

    def coordinates(self, L: Tensor, g: Tensor) -> Tensor:
        """The gradient in g^hor, of the derivative g at the point of L."""
        raise NotImplementedError

    def global_rep(self, L: Tensor, v: Tensor) -> Tensor:
        """The element of g^hor of a tangent vector; others are projected first."""
        raise NotImplementedError

    def velocity(self, L: Tensor, w: Tensor) -> Tensor:
        """The inverse of `global_rep`: the derivative of L R(t w) E at t = 0."""
        raise NotImplementedError

    def moved(self, L: Tensor, w: Tensor, R: Retraction, longest: float, eps: float) -> Tensor:
        """L R(w), or as much of it as points rounded to eps can hold; L to the bit where w is 0."""
        raise NotImplementedError

    def polish_(self, L: Tensor, moved: Tensor) -> None:
        """Rounding, where points have moved."""

    # -- geometry

    @on_points("pvv>m")
    def metric(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """g_Y(U, V): the inner product of the coordinates in g^hor, `unit` times."""
        L = self.section(Y)
        return self.unit * self.hor_inner(self.global_rep(L, U), self.global_rep(L, V))

    @on_points("pv>v")
    def rgrad(self, Y: Tensor, G: Tensor) -> Tensor:
        """The gradient in the metric, of the derivative G."""
        L = self.section(Y)
        return self.velocity(L, self.coordinates(L, G) / self.unit)

    @on_points("pv>v")
    def tangent(self, Y: Tensor, X: Tensor) -> Tensor:
        """The projection of X to T_Y."""
        L = self.section(Y)
        return self.velocity(L, self.global_rep(L, X))

    @on_points("pv>p")
    def retract(
        self, Y: Tensor, Delta: Tensor, retraction: str | Retraction = "cayley", *, eps: float | None = None
    ) -> Tensor:
        """Lambda R(W) E, W the coordinates of Delta; Y to the bit where Delta = 0. `eps` is where digits end."""
        L, R = self.section(Y), by_name(retraction)
        W = self.global_rep(L, Delta)
        Z = self.point(self.moved(L, W, R, math.inf, eps or torch.finfo(Y.dtype).eps))
        if differentiated(W):  # the derivative at 0 is not that of a constant
            return Z
        return torch.where((W != 0).any(-1, True).any(-2, True), Z, Y)

    @on_points("pvv>v")
    def transport(self, Y: Tensor, Delta: Tensor, V: Tensor, *, eps: float | None = None) -> Tensor:
        """Transport V along the geodesic of Delta: its coordinates in the moving frame stay the same."""
        L = self.section(Y)
        moved = self.moved(L, self.global_rep(L, Delta), geodesic, math.inf, eps or torch.finfo(Y.dtype).eps)
        return self.velocity(moved, self.global_rep(L, V))


def room_of(eps: float) -> float:
    """A residual of points of size one; of half precision less, for which 100 eps would be of order one."""
    return eps * (4 if eps > 1e-4 else 100)
