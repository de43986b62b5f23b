"""The interface of a space: the lines of Algorithm 3, how to find points, and the mean of points.

    section(Y) -> Lambda                  a frame above Y
    apply_section(Lambda, E) -> Y         the point Lambda E
    global_grad(Lambda, G) -> B           rgrad and global_rep in one
    update_section(Lambda, W, R)          Lambda R(W)
    polish(Lambda, E)                     rounding repaired
    residual, tolerance, project, random, check_shape, E

Points may have leading batch dimensions. B and W have the shape of the point: coordinates that do not exist
are structural zeros, which elementwise odd rules keep. Lambda is any tensor with the same batch dimensions.

Matrix spaces share `matrix.py`, spaces with cheap frames `framed.py`. Geometry on points (`metric, rgrad,
exp, log, dist, transport, ...`) is optional; `space.has("log")` tells whether it is there.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, ClassVar, Self

import torch
from torch import Generator, Tensor

from ghor._torch.precision import COMPUTE_DTYPE, full_precision
from ghor.linalg import wide
from ghor.retraction import Retraction

# The method that each piece of geometry defined here needs: a space has the first if it has the second.
NEEDS = {
    "dist": "log",
    "exp": "retract",
    "inner": "metric",
    "is_tangent": "tangent",
    "mean": "log",
    "norm": "metric",
}


# Methods with products, which autocast would round to bfloat16.
FULL_PRECISION = {"Omega", "angle", "global_rep", "metric", "project", "residual", "rgrad", "section"}
FULL_PRECISION |= {"dist", "levi_civita", "log", "log_euclidean", "random", "retract", "tangent", "transport"}

# Our names for what geoopt and pymanopt call otherwise.
ELSEWHERE = {
    "egrad2rgrad": "rgrad",
    "euclidean_to_riemannian_gradient": "rgrad",
    "expmap": "exp",
    "inner_product": "inner",
    "logmap": "log",
    "pair_mean": "mean",
    "projection": "tangent",
    "proju": "tangent",
    "projx": "project",
    "random_point": "random",
    "random_tangent_vector": "tangent, of a random tensor",
    "retr": "retract",
    "retraction": "retract",
    "to_tangent_space": "tangent",
    "transp": "transport",
}


class Absent(AttributeError, NotImplementedError):
    """Raised for geometry that a space does not have: `hasattr` is False, and a call is not implemented."""


class _Signature:
    """`inspect.signature` of a space: that of its __init__, where __new__ would show `*given, **options`."""

    def __get__(self, space: object, cls: type) -> inspect.Signature:
        init = inspect.signature(cls.__init__)  # type: ignore[misc]
        return init.replace(
            parameters=list(init.parameters.values())[1:], return_annotation=inspect.Signature.empty
        )


@dataclass(frozen=True, repr=False)
class Space(ABC):
    """A homogeneous space G/H as a value: it holds no tensor and no device, and equal options are equal."""

    __signature__: ClassVar[_Signature] = _Signature()

    # The longest velocity ||W||_F of one step; longer ones are clipped to it. Long steps are computed in
    # float64, where squaring leaves a geodesic about 1e-18 ||W||^2 off the group: 1e-6 here, which `restore`
    # repairs, and more than 1 from 1e9 on, where no digit is left to repair.
    max_velocity: ClassVar[float] = 1e6

    # Whether points are bounded: then any matrix of full rank has a nearest point, and no step leads far off.
    compact: ClassVar[bool] = True

    # The least sectional curvature where it is negative: geodesics spread, and `mean` takes shorter steps.
    curvature: ClassVar[float] = 0.0

    # Whether there is a section in closed form (`spaces/sections.py`), with its `implicit_...` methods.
    implicit: ClassVar[bool] = False

    # Whether `implicit_update` also carries second moments along, because the frame turns fast.
    spreads: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in FULL_PRECISION & cls.__dict__.keys():
            setattr(cls, name, full_precision()(cls.__dict__[name]))
        if "random" in cls.__dict__:
            cls.random = _takes_sizes(cls.__dict__["random"])  # type: ignore[method-assign]

    def __new__(cls, *given: Any, **options: Any) -> Self:
        # Known keywords alone, as in `one`, are not checked: `bind` takes 50 us.
        if given or not options.keys() <= cls.__dataclass_fields__.keys():
            try:
                cls.__signature__.bind(*given, **options)
            except TypeError as error:
                raise TypeError(_advice(cls, given, str(error))) from None
        return super().__new__(cls)

    def __repr__(self) -> str:
        given = (
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default
        )
        return f"{type(self).__name__}({', '.join(given)})"

    def has(self, name: str) -> bool:
        """Whether the space has this piece of geometry: "log", "metric", "transport", ..."""
        return hasattr(type(self), NEEDS.get(name, name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in ELSEWHERE:
            raise Absent(f"{self} has no {name}: here it is called {ELSEWHERE[name]}")
        what = "logarithm" if name == "log" else name
        raise Absent(f"{self} has no {what} here; space.has({name!r}) tells which spaces have one")

    # -- shapes ----------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def dims(self) -> int:
        """How many trailing dimensions of a tensor are one point."""

    @property
    def one(self) -> Space:
        """The space of a single point in a weight: without `blocks`, and without rows that are left alone."""
        return self

    def by_rows(self, X: Tensor) -> Tensor:
        """X with its blocks one below the other: X, or X^T if they lie side by side. Its own inverse."""
        return X

    def split(self, X: Tensor) -> Tensor:
        """View a weight as a batch of points, (..., *point), in the layout of `one`."""
        return X

    def read(self, weights: Tensor, gradient: bool = False) -> Tensor:
        """Weights (..., *shape), with E in place of rows that are left alone; 0 in gradients."""
        return weights

    def write(self, weights: list[Tensor], points: list[Tensor]) -> None:
        """Copy batches of points, in the layout of `split`, into weights; skip rows that are left alone."""
        torch._foreach_copy_(weights, points)

    def narrow(self, M: int, point: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
        """Whether M points are faster computed with their coordinates as contiguous vectors of length M."""
        return False

    @abstractmethod
    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ValueError unless tensors of this shape can lie on the space."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise TypeError unless tensors of this dtype can lie on the space."""
        if not dtype.is_floating_point:
            raise TypeError(
                f"weights on {self} are real floating point tensors, not {dtype}; convert with .float()"
            )

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raise unless tensors of this shape and dtype can lie on the space, and can move on it."""
        self.check_dtype(dtype)
        self.check_shape(shape)

    @abstractmethod
    def E(self, shape: Sequence[int], dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """The distinct element E of the paper, in the layout of `shape`."""

    def reach(self, shape: Sequence[int]) -> float:
        """||W||_F of a step that turns every column by about one radian, which counts as a long step."""
        return 1.0

    def step_length(self, W: Tensor) -> Tensor:
        """The length of W that `reach` and `max_velocity` limit, (..., *point) -> (...): by default ||W||_F.

        It is 0 only for W = 0, and not finite where W is not.
        """
        return torch.linalg.vector_norm(W, dim=tuple(range(-self.dims, 0)))

    def angle(self, W: Tensor) -> Tensor:
        """The largest angle by which the step W turns a vector, at most: (..., *point) -> (...).

        Where a step is not a rotation, its length. It is what `max_angle` of an optimizer limits.
        """
        return self.step_length(W)

    def polish_period(self, shape: Sequence[int]) -> int:
        """Steps between two polishings of a whole section; in between only the point is polished."""
        return 100

    # -- points ----------------------------------------------------------------------------------------------

    @abstractmethod
    def residual(self, Y: Tensor) -> Tensor:
        """How far each point is off the space: (..., *point) -> (...). (`dist` is between two points.)"""

    def distance(self, Y: Tensor) -> Tensor:
        """Deprecated name of `residual`, too easily taken for `dist`, the distance of two points."""
        warnings.warn("space.distance is called space.residual now", DeprecationWarning, stacklevel=2)
        return self.residual(Y)

    def tolerance(self, Y: Tensor) -> Tensor:
        """The residual up to which a point counts as on the space: (..., *point) -> (...)."""
        points = self.split(Y)
        return torch.full(points.shape[: points.dim() - self.dims], self.room(Y), device=Y.device)

    def room(self, Y: Tensor) -> float:
        """The tolerance of a point of size one."""
        # A smaller factor for half precision, where 100 eps would be of order one.
        return torch.finfo(Y.dtype).eps * self.reach(Y.shape) * (4 if Y.dtype in COMPUTE_DTYPE else 100)

    def hint(self, Y: Tensor) -> str:
        """Why points Y are off the space, and a remedy, if there is more to say than how far; else ""."""
        return ""

    @abstractmethod
    def random(
        self,
        *shape: int,
        generator: Generator | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> Tensor:
        """A random point of the given shape."""

    @abstractmethod
    def project(self, X: Tensor) -> Tensor:
        """A point near X, the nearest one on compact spaces; ValueError where X does not determine it."""

    # -- Algorithm 3 -----------------------------------------------------------------------------------------

    @abstractmethod
    def section(self, Y: Tensor) -> Tensor:
        """lambda(Y) = Lambda in G, with Lambda E = Y. Draws no random numbers."""

    def section_near(self, Lambda: Tensor, Y: Tensor) -> Tensor:
        """A frame above Y near the frame Lambda, if its point is near Y; otherwise `section(Y)`.

        Coordinates in the one frame mean nearly the same in the other.
        """
        return self.section(Y)

    @abstractmethod
    def apply_section(self, Lambda: Tensor, E: Tensor) -> Tensor:
        """Y = Lambda E in the layout of E. Only the shape of E is used: it may be on the meta device."""

    @abstractmethod
    def global_grad(self, Lambda: Tensor, G: Tensor, out: Tensor | None = None) -> Tensor:
        """global_rep(Lambda, rgrad(Y, G)) in one: the derivative of L(Lambda R(W) E) at W = 0.

        A descent direction for every rule that keeps the signs of the coordinates.
        """

    @abstractmethod
    def update_section(
        self, Lambda: Tensor, W: Tensor, retraction: str | Retraction = "cayley", out: Tensor | None = None
    ) -> Tensor:
        """Lambda R(W), into `out` where that is given (it may be Lambda). Where W = 0 no bit changes."""

    @abstractmethod
    def polish(
        self, Lambda: Tensor, E: Tensor, share: Tensor | float = 1.0, point_only: bool = False
    ) -> Tensor:
        """Repair rounding in place: Lambda towards the group, or its point alone towards the space.

        `share`, a number or one for each point, (...), is 0 where no bit may change.
        """

    def restore(self, Lambda: Tensor, E: Tensor) -> Tensor:
        """Bring Lambda back to the group from further away, after a step of any length; may overwrite it."""
        return self.polish(self.polish(Lambda, E), E)

    def within_digits(self, before: Tensor, after: Tensor) -> Tensor:
        """`after`, or `before` for the points that the dtype could not hold after the step.

        Reads no value. On compact spaces every point can be held.
        """
        return after

    def checked_section(self, Lambda: Tensor, E: Tensor) -> Tensor:
        """A section read from a file, its rounding repaired; ValueError if it is not in the group."""
        return Lambda

    def section_kind(self, asked: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> str:
        """ "transported" or "implicit" for points of this shape and dtype, where a group has section=`asked`.

        A dtype of None stands for a real one.
        """
        if asked == "implicit" and not self.implicit:
            raise ValueError(f"{self} has no implicit section; use section='transported'")
        return "implicit" if asked == "implicit" else "transported"

    def bounded(self, Lambda: Tensor, W: Tensor) -> Tensor:
        """W, shortened where Lambda R(W) would outgrow its dtype; reads no value. On compact spaces, W."""
        return W

    def outgrown(self, Lambda: Tensor) -> Tensor:
        """Which points are so large that `bounded` is about to stop their growth: (...)."""
        return torch.zeros(Lambda.shape[:1], dtype=torch.bool, device=Lambda.device)

    def hor(self, W: Tensor) -> Tensor:
        """The projection of W to g^hor: W itself, bit for bit, if it lies there."""
        return W

    def ghor_blocks(self, W: Tensor) -> list[Tensor]:
        """The matrices (..., a, b) that make up W, as views; matrix rules such as Muon act on each."""
        return [W.unsqueeze(-1) if self.dims == 1 else W]

    def ghor_factors(self, count: int, shape: Sequence[int]) -> tuple[float, ...]:
        """By what the blocks have to be multiplied for `from_ghor_blocks`, which saves it a pass."""
        return (1.0,) * count

    def from_ghor_blocks(self, blocks: Sequence[Tensor], like: Tensor, out: Tensor | None = None) -> Tensor:
        """The element of g^hor with these blocks, up to projection; the inverse of `ghor_blocks`."""
        W = torch.zeros_like(like)
        for view, X in zip(self.ghor_blocks(W), blocks, strict=True):
            view.copy_(X)
        W = self.hor(W)
        return W if out is None else out.copy_(W)

    def representative(self, Y: Tensor, Y0: Tensor) -> Tensor:
        """The tensor that stands for the point Y0 in |Y - Y0|^2: Y0, unless several tensors are one point."""
        return Y0

    def away_from(self, Lambda: Tensor, Y: Tensor, Y0: Tensor) -> Tensor:
        """The vector of g^hor from Y0 to Y = Lambda E, which weight decay shortens: grad |Y - Y0|^2/2.

        Spaces whose points can grow without bound override it, so that the rate of decay does not depend on
        the size of the points.
        """
        return self.global_grad(Lambda, Y - self.representative(Y, Y0))

    def ghor_inner(self, W: Tensor, V: Tensor) -> Tensor:
        """<W, V> in g^hor, (..., *point) -> (...), a weighted sum over coordinates.

        <global_grad, W> is the derivative along W.
        """
        return (W * V.conj()).real.sum(tuple(range(-self.dims, 0)))

    # -- geometry that follows from what a space defines -----------------------------------------------------

    def is_tangent(self, Y: Tensor, V: Tensor, tol: float | Tensor | None = None) -> bool:
        """Whether V lies in T_Y: ||V - tangent(Y, V)|| <= tol ||V||, by default tol = 100 eps."""
        tol = 100 * torch.finfo(V.dtype).eps if tol is None else tol
        space, Y, (V, _) = self.one, self.split(Y), self._scaled(V)
        off, size = (space._ambient(X) for X in (V - space.tangent(Y, V), V))
        return bool((off <= tol * size).all())

    def exp(self, Y: Tensor, Delta: Tensor) -> Tensor:
        """gamma(1) on the geodesic gamma from Y with velocity Delta.

        On an accelerator, where values are not read, the exponential of a rotation has a fixed number of
        squarings, enough for Delta up to about 1000 radians; a longer one gives a wrong point there.
        """
        return self.retract(Y, Delta, "geodesic")

    def inner(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """g_Y(U, V): the metric, under the name that other libraries use."""
        return self.metric(Y, U, V)

    def norm(self, Y: Tensor, V: Tensor) -> Tensor:
        """sqrt(g_Y(V, V)); its derivative at V = 0 is 0, as in torch.linalg.vector_norm."""
        V, size = self._scaled(V)
        square = self.one.metric(self.split(Y), V, V)
        zero = square <= 0  # not ~(square > 0), which would hide a NaN
        return torch.where(zero, 0, torch.where(zero, 1, square).sqrt() * size)

    def dist(self, Y: Tensor, Z: Tensor) -> Tensor:
        """Length of the shortest geodesic from Y to Z; its derivative where Y = Z is 0, as `log` is there."""
        return self.norm(Y, self.log(Y, Z))

    def mean(self, points: Tensor, weights: Tensor | None = None) -> Tensor:
        """The Frechet mean of points (K, ..., *point), see `ghor.spaces.base.mean`."""
        return mean(self, points, weights)

    def _scaled(self, V: Tensor) -> tuple[Tensor, Tensor]:
        """V as a batch of points, each divided by its largest entry, and that entry, (...).

        Because the square of a length may overflow, or vanish, where the length does not.
        """
        V, of_point = self.split(V), tuple(range(-self.dims, 0))
        size = V.detach().abs().amax(of_point, keepdim=True) if V.numel() else V.new_ones((1,) * V.dim()).real
        size = torch.where((size > 0) & torch.isfinite(size), size, 1)
        return V / size, size.reshape(size.shape[: V.dim() - self.dims] if self.dims else ())

    def _ambient(self, X: Tensor) -> Tensor:
        """||X||_F of each point: (..., *point) -> (...)."""
        X = self.split(X)
        batch = X.shape[: X.dim() - self.dims]
        return torch.linalg.vector_norm(X.reshape(*batch, math.prod(X.shape[len(batch) :])), dim=-1)


def _advice(cls: type[Space], given: tuple[Any, ...], error: str) -> str:
    """The message for arguments that the constructor of a space does not take."""
    name, parameters = cls.__name__, cls.__signature__.parameters
    options = f"its options are: {', '.join(parameters) or 'none'}"
    by_position = any(p.kind is not p.KEYWORD_ONLY for p in parameters.values())
    if len(given) == 1 and isinstance(given[0], (tuple, list)) and not by_position:
        given = tuple(given[0])
    if by_position or not given or not all(isinstance(k, int) for k in given):
        wrong = re.search("keyword argument '(.*)'", error)
        near = difflib.get_close_matches(wrong[1], parameters, 1) if wrong else []
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return f"{name}(): {error}{hint}; {options}"
    space, example = cls(), ""
    for shape in (given, 2 * given, (given[0], given[0] + 1)):  # one size: the side of a square, or of a pose
        try:
            space.check_shape(shape)
        except ValueError:
            continue
        example = f", as in {name}().random({', '.join(map(str, shape))})"
        break
    return f"{name}() takes no sizes, got {given}: they come from the weight{example}; {options}"


def _takes_sizes(random: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`random`, with a hint for those who give it a shape, as torch.randn takes it."""

    @wraps(random)
    def checked(self: Space, *shape: Any, **options: Any) -> Tensor:
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            sizes = ", ".join(map(str, shape[0]))
            raise TypeError(f"{self}.random takes sizes, not a shape: write {self}.random({sizes})")
        return random(self, *shape, **options)

    return checked


def compute(X: Tensor) -> Tensor:
    """Convert X to the dtype that linear algebra runs in: float32 for half precision."""
    return X.to(COMPUTE_DTYPE.get(X.dtype, X.dtype))


STEPS = 1000  # most iterations of `mean`, which converges linearly: slowly for points that are far apart


@torch.no_grad()
@full_precision()
def mean(space: Space, points: Tensor, weights: Tensor | None = None) -> Tensor:
    """The point Y that minimises sum_k w_k dist(Y, points[k])^2.

    Iterates Y <- exp(Y, t sum_k w_k log(Y, points[k])) from the point of the largest weight until it no
    longer moves. t is 1, and less where the curvature -k is negative: the second derivative of half the sum
    is between 1 and the mean of x coth(x) <= sqrt(1 + x^2), x = sqrt(k) dist, hence
    t = 2/(1 + sqrt(1 + k sum_k w_k dist^2)).

    Points (K, ..., *point) are stacked along dimension 0; weights, (K) or (K, ...), are nonnegative and are
    divided by their sum. Runs in double precision and has no derivative. Raises ValueError for points that
    are too far apart for `log`, or for a mean to be unique.
    """
    if not isinstance(points, Tensor):
        raise TypeError(
            f"{space}.mean takes points stacked along dimension 0, got a {type(points).__name__}; write "
            "torch.stack(points)"
        )
    batch = points.shape[: points.dim() - space.dims]
    if len(batch) == 0 or batch[0] == 0:
        raise ValueError(
            f"{space}.mean takes points stacked along dimension 0, got shape {tuple(points.shape)}"
        )
    if not bool(torch.isfinite(points).all()):
        raise ValueError(f"{space}.mean: there are NaN or infinite entries among the points")
    if 0 in batch:
        return points[0].clone()
    X = wide(points)
    if X.dtype != points.dtype:  # rounded points are off the space by more than `log` allows in float64
        X = space.project(X)
    w = torch.ones(len(X), device=X.device) if weights is None else weights.detach()
    if tuple(w.shape) != tuple(batch[: w.dim()]) or w.dim() == 0:
        raise ValueError(
            f"{space}.mean: {batch[0]} points take weights ({batch[0]}), got shape {tuple(w.shape)}"
        )
    w = w.to(X.device, torch.float64).reshape(*w.shape, *[1] * (len(batch) - w.dim())).expand(batch)
    total = w.sum(0)
    if not bool(((w >= 0) & torch.isfinite(w)).all() and (total > 0).all()):
        raise ValueError(f"{space}.mean takes nonnegative weights with a positive sum")
    w = (w / total).reshape(*batch, *[1] * space.dims)
    Y = X.gather(0, w.argmax(0, keepdim=True).expand(1, *X.shape[1:]))[0]
    X = torch.where(w > 0, X, Y)  # points without weight may be too far away for `log`
    rounding = 16 * torch.finfo(X.dtype).eps
    last = torch.full((), torch.inf, dtype=torch.float64, device=X.device)
    done = torch.zeros((), dtype=torch.bool, device=X.device)
    for _ in range(STEPS):
        U = space.log(Y.expand_as(X), X)
        spread = space.norm(Y.expand_as(X), w * U).sum(0)  # sum_k w_k dist(Y, points[k])
        step = V = (w * U).sum(0)
        if space.curvature:
            square = space.metric(Y.expand_as(X), w * U, U).sum(0)
            t = 2 / (1 + (1 - space.curvature * square).sqrt())
            step = V * t.view(*t.shape, *[1] * space.dims)
        moved = space.exp(Y, step)
        # Done when the step is at rounding level, measured in the space's own norm and relative to the
        # spread, so that neither the size of the points nor their distance from E counts. Rounding in the
        # logarithms may keep the step longer than that: then done when it no longer shrinks and is a small
        # part of the spread, or changes only the last digits of Y (points close together).
        length = space.norm(Y, V)
        still = space._ambient(moved - Y) <= 1e3 * rounding * space._ambient(Y)
        small = still | (length <= rounding**0.5 * spread)
        done = done | (length <= rounding * spread) | ((length >= last) & small)
        if bool(done.all()):
            return space.project(moved).to(points.dtype)
        Y, last = moved, length
    raise ValueError(f"{space}.mean: no mean was found in {STEPS} iterations; are the points too far apart?")
