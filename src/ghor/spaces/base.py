"""A space: what users name, and what the author of one writes.

Formulas of a space are written once, on tall points (M, N, n) with one leading dimension; vectors have n = 1.
How points lie in a weight (wide matrices, blocks, kernels, columns, padding rows) is the `layout`'s, their
unit of length the `radius`'s, and `on_points` brings both together: a method marked with it takes weights,
its formula points. `space.geometry` is the space of points alone, with the same methods.

What an author writes, on points:

    check_size(N, n)                     raise for sizes that no point has
    frame(y, section, held, eps)         Lambda above y, see `frames.py`
    hor_(w)                              w <- its component in g^hor
    hor_inner(w, v)                      the inner product of g^hor
    residual, tolerance                  how far points are off, and how far they may be
    nearest, draw                        points near and random ones
    digits_end(eps), hint(Y)             if there is more to say: where digits end, why points are off

and geometry as far as there is some: metric, rgrad, tangent, retract, log, transport. From these follow
`exp`, `inner`, `norm`, `dist`, `mean` and `is_tangent`; `space.has("log")` tells what there is.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Self, cast

import torch
from torch import Generator, Tensor

from ghor._torch.precision import COMPUTE_DTYPE, full_precision
from ghor.layout import Layout
from ghor.linalg import everywhere, size
from ghor.spaces.frames import Frame
from ghor.spaces.means import center, mean
from ghor.spaces.messages import absent, no_nearest, wrong_arguments
from ghor.spaces.points import Points, on_points

# The method that each piece of geometry defined here needs: a space has the first if it has the second.
NEEDS = {
    "dist": "log",
    "exp": "retract",
    "inner": "metric",
    "is_tangent": "tangent",
    "mean": "log",
    "norm": "metric",
}


class _Signature:
    """`inspect.signature` of a space: that of its __init__, where __new__ would show `*given, **options`."""

    def __get__(self, space: object, cls: type) -> inspect.Signature:
        return inspect.signature(cls.__init__.__get__(cls))  # type: ignore[misc]


@dataclass(frozen=True, repr=False)
class Space:
    """A homogeneous space G/H as a value: it holds no tensor and no device, and equal options are equal."""

    __signature__: ClassVar[_Signature] = _Signature()

    compact: ClassVar[bool] = True  # points are bounded: any matrix of full rank has a nearest one
    complex: ClassVar[bool] = False  # points may be complex
    flat: ClassVar[bool] = False  # points are vectors of R^d, and moved by translations
    implicit: ClassVar[bool] = False  # there is a frame in closed form: section="implicit"
    curvature: ClassVar[float] = 0.0  # the least sectional one, where negative: `mean` takes shorter steps
    of_points: ClassVar[bool] = False  # whether this is the `geometry` of a space

    def __new__(cls, *given: Any, **options: Any) -> Self:
        # Known keywords alone are not checked: `bind` takes 50 us.
        if given or not options.keys() <= cls.__dataclass_fields__.keys():
            try:
                cls.__signature__.bind(*given, **options)
            except TypeError as error:
                raise wrong_arguments(cls, given, str(error)) from None
        return super().__new__(cls)

    def __repr__(self) -> str:
        given = (
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default
        )
        return f"{type(self).__name__}({', '.join(given)})"

    def __getstate__(self) -> dict[str, Any]:
        """The options alone: files of torch.distributed hold spaces, and nothing that they compute."""
        kept = (*self.__dataclass_fields__, "of_points")
        return {name: vars(self)[name] for name in kept if name in vars(self)}

    def has(self, name: str) -> bool:
        """Whether the space has this piece of geometry: "log", "metric", "transport", ..."""
        return hasattr(type(self), NEEDS.get(name, name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise absent(self, name)

    # -- how points lie in a weight --------------------------------------------------------------------------

    @cached_property
    def layout(self) -> Layout:
        """How points lie in a weight."""
        return Layout()

    @property
    def dims(self) -> int:
        """How many trailing dimensions of a weight are one point, or with `blocks` some."""
        return self.layout.taken

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
        geometry = copy(self)
        vars(geometry)["of_points"] = True
        return geometry

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raise unless tensors of this shape and dtype can lie on the space, and can move on it."""
        self.check_dtype(dtype)
        self.check_shape(shape)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise TypeError unless tensors of this dtype can lie on the space."""
        kinds = "real floating point tensors"
        if self.complex:
            kinds = "floating point tensors, real, complex64 or complex128"
        if not (dtype.is_floating_point or (self.complex and dtype in (torch.complex64, torch.complex128))):
            raise TypeError(f"weights on {self} are {kinds}, not {dtype}; convert with .float()")

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ValueError unless tensors of this shape can lie on the space."""
        if len(shape) < self.dims:
            raise ValueError(f"{self} needs {self.dims} or more dimensions, got shape {tuple(shape)}")
        if 0 in shape:
            raise ValueError(f"{self} has no points of the empty shape {tuple(shape)}")
        try:
            self.check_size(*self.layout.size(shape))
        except ValueError as error:
            raise ValueError(f"{self} {error}, got shape {tuple(shape)}") from None

    def E(self, shape: Sequence[int], dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """The distinct element E of the paper, in the layout of `shape`."""
        self.check_shape(shape)
        X = torch.zeros(tuple(shape), dtype=dtype, device=device)
        y = self.layout.points(X)
        scale = 1.0 if self.radius == "start" else cast(float, self.radius)
        return self.layout.weight((self.geometry.distinct(y) * scale).expand_as(y), shape).contiguous()

    # -- what an author of a space writes, on points (M, N, n) -----------------------------------------------

    def check_size(self, N: int, n: int) -> None:
        """Raise ValueError, with what goes on after the space's name, if there are no points of this size."""

    def frame(self, y: Tensor, section: str, held: dict[str, Tensor], eps: float) -> Frame:
        """Lambda above y; from what a state has `held` of a frame, a run goes on as it began."""
        raise NotImplementedError

    def free_frame(
        self, y: Tensor, section: str, held: dict[str, Tensor], eps: float, by_rows: bool | None
    ) -> Frame:
        """The frame of rules that need none; `by_rows` where state[p] can show one order of memory alone."""
        return self.frame(y, section, held, eps)

    def hor_(self, w: Tensor, factor: float = 0.5) -> None:
        """w <- its component in g^hor, exactly: Adam would divide rounding by rounding. No bit of it changes.

        With `factor` 1 a derivative becomes a vector: blocks that count half in the inner product are
        doubled.
        """

    def origin(self, y: Tensor) -> Tensor:
        """Lambda^-1 y, where a weight's development starts: [I; 0], in most spaces."""
        return torch.eye(*y.shape[-2:], dtype=y.dtype, device=y.device)

    def distinct(self, y: Tensor) -> Tensor:
        """E for points like y."""
        return self.origin(y)

    def hor_inner(self, w: Tensor, v: Tensor) -> Tensor:
        """<w, v> in g^hor, (M, N, n) -> (M)."""
        return (w * v.conj()).real.sum((-2, -1))

    def positions(self, x: Tensor) -> Tensor | None:
        """The entries of points, or of elements of g^hor, that have a unit of length: a view."""
        return None

    def hor_blocks(self, w: Tensor) -> list[Tensor]:
        """The matrices (M, a, n) that make up elements of g^hor: views. Muon orthogonalises each."""
        return [w]

    def longest(self, y: Tensor) -> float:
        """Of a step: 4 radians a column; on spaces that are not compact 1, far from Cayley's pole."""
        return 4 * y.shape[-1] ** 0.5 if self.compact else 1.0

    def angle(self, w: Tensor) -> Tensor:
        """A bound of the angle by which the step w turns a vector, (M, N, n) -> (M): `max_angle` limits it.

        Where a step is not a rotation, its length.
        """
        return size(w)[..., 0, 0]

    def representative(self, y: Tensor, y0: Tensor) -> Tensor:
        """The tensor that stands for the point y0 in |y - y0|^2: y0, unless several tensors are one point."""
        return y0

    def away(self, frame: Frame, y0: Tensor, out: Tensor) -> None:
        """out <- the vector of g^hor from y0 to the frame's y, which decay shortens: grad |y - y0|^2/2."""
        y = frame.point()
        frame.pull(y - self.representative(y, y0), out)

    def residual(self, Y: Tensor) -> Tensor:
        """How far each point is off the space: (..., *point) -> (...). (`dist` is between two points.)"""
        raise NotImplementedError

    def nearest(self, x: Tensor) -> Tensor:
        """The nearest points, or near ones; nothing is read, and what has none is NaN."""
        raise NotImplementedError

    def draw(self, normal: Tensor) -> Tensor:
        """Random points from normal numbers."""
        raise NotImplementedError

    def check_near(self, x: Tensor, y: Tensor, shape: Sequence[int]) -> None:
        """Raise ValueError unless finite x determine the points y = nearest(x); weights have this shape."""
        if not everywhere(~torch.isnan(y)):
            raise ValueError(no_nearest(self, shape))

    def check_points(self, what: str, points: Sequence[Tensor], eps: float) -> None:
        """Raise ValueError where tensors, rounded to eps, are no points of which `what` could be computed."""

    def tangent_tolerance(self, y: Tensor, eps: float) -> float | Tensor:
        """The part of a vector at y, rounded to eps, that need not be tangent: a number or (M)."""
        return 100 * eps

    # -- points ----------------------------------------------------------------------------------------------

    @on_points("p>n")
    def tolerance(self, Y: Tensor, *, eps: float = 0.0) -> Tensor:
        """The residual up to which points, rounded to eps, count as on the space: (..., *point) -> (...)."""
        return Y.real.new_full((len(Y),), unit_tolerance(eps) * Y.shape[-1] ** 0.5)

    def random(
        self,
        *shape: int,
        generator: Generator | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> Tensor:
        """A random point of the given shape."""
        given: Any = shape[0] if len(shape) == 1 else ()
        if isinstance(given, (tuple, list)) and given:
            sizes = ", ".join(map(str, given))
            raise TypeError(f"{self}.random takes sizes, not a shape: write {self}.random({sizes})")
        dtype = dtype or torch.get_default_dtype()
        self.check(shape, dtype)
        normal = torch.randn(shape, generator=generator, dtype=COMPUTE_DTYPE.get(dtype, dtype), device=device)
        with full_precision():
            y = self.geometry.draw(self.layout.points(normal))
        if not isinstance(self.radius, str) and self.radius != 1:
            y = y * self.radius
        return self.layout.weight(y, shape).to(dtype).contiguous()

    @full_precision()
    def project(self, X: Tensor) -> Tensor:
        """A point near X, the nearest one on compact spaces; ValueError where X does not determine it.

        A padding row stays as it is.
        """
        self.check(X.shape, X.dtype)
        there = Points(self, "p", [X])
        (x,) = there.points
        if not everywhere(torch.isfinite(x)):
            raise ValueError(f"a tensor with NaN or infinite entries has no nearest point on {self}")
        y = self.geometry.nearest(x)
        self.geometry.check_near(x, y, X.shape)
        out: Tensor = there.back(y, "p")
        return out.contiguous()

    # -- geometry that follows from what a space defines -----------------------------------------------------

    @on_points("pv>b")
    def is_tangent(
        self, Y: Tensor, V: Tensor, tol: float | Tensor | None = None, *, eps: float = 0.0
    ) -> Tensor:
        """Whether V lies in T_Y: ||V - tangent(Y, V)|| <= tol ||V||, by default tol = 100 eps."""
        V = V / unit_of(V)
        off, length = (size(X)[..., 0, 0] for X in (V - self.tangent(Y, V), V))
        tol = self.tangent_tolerance(Y, eps) if tol is None else torch.as_tensor(tol).reshape(-1)
        return off <= tol * length

    @on_points("pv>p")
    def exp(self, Y: Tensor, Delta: Tensor) -> Tensor:
        """gamma(1) on the geodesic gamma from Y with velocity Delta."""
        return cast(Tensor, self.retract(Y, Delta, "geodesic"))

    @on_points("pvv>m")
    def inner(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """g_Y(U, V): the metric, under the name that other libraries use."""
        return cast(Tensor, self.metric(Y, U, V))

    @on_points("pv>d")
    def norm(self, Y: Tensor, V: Tensor) -> Tensor:
        """sqrt(g_Y(V, V)); its derivative at V = 0 is 0, as in torch.linalg.vector_norm."""
        unit = unit_of(V)
        V = V / unit
        square = self.metric(Y, V, V)
        zero = square <= 0  # not ~(square > 0), which would hide a NaN
        return torch.where(zero, 0, torch.where(zero, 1, square).sqrt() * unit[..., 0, 0])

    @on_points("pp>d")
    def dist(self, Y: Tensor, Z: Tensor) -> Tensor:
        """Length of the shortest geodesic from Y to Z; its derivative where Y = Z is 0, as `log` is there."""
        return self.norm(Y, self.log(Y, Z))

    def mean(self, points: Tensor, weights: Tensor | None = None) -> Tensor:
        """The Frechet mean of points (K, ..., *point): Y that minimises sum_k w_k dist(Y, points[k])^2.

        Points are stacked along dimension 0; weights, (K) or (K, ...), are nonnegative and are divided by
        their sum. Iterates Y <- exp(Y, t sum_k w_k log(Y, points[k])) from the point of the largest weight
        until it no longer moves, in double precision; it has no derivative. Raises ValueError for points that
        are too far apart for `log`, or for a mean to be unique.
        """
        return mean(self, points, weights, center)


def unit_of(V: Tensor) -> Tensor:
    """The largest entry of each vector, (M, 1, 1), or 1: squares overflow, or vanish, where V does not."""
    largest = V.detach().abs().amax((-2, -1), keepdim=True)
    return torch.where((largest > 0) & torch.isfinite(largest), largest, 1)


def unit_tolerance(eps: float) -> float:
    """A residual of points of size one; of half precision less, for which 100 eps would be of order one."""
    return eps * (4 if eps > 1e-4 else 100)
