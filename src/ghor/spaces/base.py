"""A space is what the optimizer and the declaration call: the lines of Algorithm 3, and how points are found.

    section(Y) -> Lambda                  a frame above Y
    apply_section(Lambda, E) -> Y         the point Lambda E
    global_grad(Lambda, G) -> B           rgrad and global_rep in one
    update_section(Lambda, W, R)          Lambda R(W)
    polish(Lambda, E)                     rounding repaired
    residual, tolerance, project, random, check_shape, E

Points may have leading batch dimensions. B and W have the shape of the point: coordinates that do not exist
are structural zeros, which elementwise odd rules keep. Lambda is any tensor with the same batch dimensions.

What the matrix spaces share is in `form.py`. Geometry on points (`metric, rgrad, exp, log, dist, transport,
...`) is there where a space has it: `space.has("log")` tells.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from ghor._torch.precision import COMPUTE_DTYPE, full_precision
from ghor.linalg import wide
from ghor.retraction import Retraction

# What optional geometry rests on.
NEEDS = {"dist": "log", "inner": "metric", "mean": "log", "norm": "metric"}


class Absent(AttributeError, NotImplementedError):
    """Geometry that a space does not have."""


@dataclass(frozen=True, repr=False)
class Space(ABC):
    """A homogeneous space G/H as a value: no tensors, no device; equal when of one kind."""

    # Longest velocity ||W||_F of one step; longer ones are clipped to it. Beyond 1e6 a retraction in float64
    # has lost the digits in which float32 could tell it from its limit.
    max_velocity: ClassVar[float] = 1e6

    # Whether the weights are bounded: any matrix of full rank has a nearest point, and no step leads far
    # away.
    compact: ClassVar[bool] = True

    # Whether there is a section in closed form, see `ghor.section`: then the `implicit_...` methods are
    # there, too.
    implicit: ClassVar[bool] = False

    # Whether `implicit_update` takes squares of coordinates along, where the frame turns fast.
    spreads: ClassVar[bool] = False

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
        what = "logarithm" if name == "log" else name
        raise Absent(f"{self} has no {what} here; space.has({name!r}) tells which spaces have one")

    # -- shapes ---------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def dims(self) -> int:
        """How many trailing dimensions of a tensor are one point."""

    @property
    def one(self) -> Space:
        """The space of the single points in a weight: without `blocks`, and without rows that are left
        alone."""
        return self

    def split(self, X: Tensor) -> Tensor:
        """A weight as a batch of points, (..., *point) in the layout of `one`; a view."""
        return X

    def read(self, weights: Tensor, gradient: bool = False) -> Tensor:
        """Weights (..., *shape), with E in place of rows that are left alone; 0 if these are gradients."""
        return weights

    def write(self, weights: list[Tensor], points: list[Tensor]) -> None:
        """Batches of points into weights, in the layout of `split`; what is left alone is left alone."""
        torch._foreach_copy_(weights, points)

    @abstractmethod
    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ValueError unless tensors of this shape can lie on the space."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise TypeError unless tensors of this dtype can lie on the space."""
        if not dtype.is_floating_point:
            raise TypeError(
                f"weights on {self} are real floating point tensors, not {dtype}; convert with .float()"
            )

    @abstractmethod
    def E(self, shape: Sequence[int], dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """The distinct element, in the layout of `shape`."""

    def reach(self, shape: Sequence[int]) -> float:
        """||W||_F of a step that turns everything by about one radian: what counts as a long step."""
        return 1.0

    def polish_period(self, shape: Sequence[int]) -> int:
        """Steps between two polishings of a whole section; in between the point alone is polished."""
        return 100

    # -- points -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def residual(self, Y: Tensor) -> Tensor:
        """How far each point is off the space: (..., *point) -> (...). (`dist` is the distance of two
        points.)"""

    def distance(self, Y: Tensor) -> Tensor:
        """Deprecated: it is called `residual`, for `dist` is the geodesic distance of two points."""
        warnings.warn("space.distance is called space.residual now", DeprecationWarning, stacklevel=2)
        return self.residual(Y)

    def tolerance(self, Y: Tensor) -> Tensor:
        """How far off counts as on: what rounding does to each point, (..., *point) -> (...), with some
        room."""
        points = self.split(Y)
        return torch.full(points.shape[: points.dim() - self.dims], self.room(Y), device=Y.device)

    def room(self, Y: Tensor) -> float:
        """The tolerance of a point of size one."""
        # half precision has few digits to lose
        return torch.finfo(Y.dtype).eps * self.reach(Y.shape) * (4 if Y.dtype in COMPUTE_DTYPE else 100)

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
        """A point near X: the nearest one on compact spaces. Raises ValueError where X does not determine
        it."""

    # -- Algorithm 3 ------------------------------------------------------------------------------------------------

    @abstractmethod
    def section(self, Y: Tensor) -> Tensor:
        """lambda(Y) = Lambda in G, with Lambda E = Y. Draws no random numbers."""

    @abstractmethod
    def apply_section(self, Lambda: Tensor, E: Tensor) -> Tensor:
        """Y = Lambda E in the layout of E, which is all that is asked of E (it may be on the meta device)."""

    @abstractmethod
    def global_grad(self, Lambda: Tensor, G: Tensor, out: Tensor | None = None) -> Tensor:
        """global_rep(Lambda, rgrad(Y, G)) at once: the derivative of L(Lambda R(W) E) at W = 0.

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
        """Rounding repaired, in place: Lambda back towards the group, or its point alone back towards the
        space.

        `share`, a number or one for each point, (...), is 0 where no bit may change.
        """

    def restore(self, Lambda: Tensor, E: Tensor) -> Tensor:
        """Back to the group from further away, after a step of any length; Lambda is the caller's own."""
        return self.polish(self.polish(Lambda, E), E)

    def within_digits(self, before: Tensor, after: Tensor) -> Tensor:
        """What of a step from Lambda = `before` to `after` is taken: nothing where the dtype could not hold
        the point.

        Reads no value. On compact spaces every point can be held.
        """
        return after

    def checked_section(self, Lambda: Tensor, E: Tensor) -> Tensor:
        """A section that comes from a file: rounding repaired, ValueError if it is none."""
        return Lambda

    def section_kind(self, asked: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> str:
        """ "transported" or "implicit", for points of this shape and dtype (real if None) and what a group's
        `section` asks for."""
        if asked == "implicit" and not self.implicit:
            raise ValueError(f"{self} has no implicit section; use section='transported'")
        return "implicit" if asked == "implicit" else "transported"

    def bounded(self, Lambda: Tensor, W: Tensor) -> Tensor:
        """W, shortened where Lambda R(W) would outgrow its dtype; reads no value. On compact spaces W
        itself."""
        return W

    def outgrown(self, Lambda: Tensor) -> Tensor:
        """Which of the points are near the size at which `bounded` holds them: (...)."""
        return torch.zeros(Lambda.shape[:1], dtype=torch.bool, device=Lambda.device)

    def hor(self, W: Tensor) -> Tensor:
        """W projected to g^hor: W itself where it lies in it, exactly."""
        return W

    def ghor_blocks(self, W: Tensor) -> list[Tensor]:
        """The matrices (..., a, b) that W is made of, views: rules of matrices such as Muon act on each by
        itself."""
        return [W.unsqueeze(-1) if self.dims == 1 else W]

    def representative(self, Y: Tensor, Y0: Tensor) -> Tensor:
        """What stands for the point Y0 in |Y - Y0|^2, seen from Y: Y0 itself, unless several tensors are one
        point."""
        return Y0

    def ghor_inner(self, W: Tensor, V: Tensor) -> Tensor:
        """<W, V> in g^hor, (..., *point) -> (...), a weighted sum over coordinates.

        <global_grad, W> is the derivative along W.
        """
        return (W * V.conj()).real.sum(tuple(range(-self.dims, 0)))

    # -- geometry that follows from what a space has ------------------------------------------------------------------

    def inner(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """g_Y(U, V), the metric under the name that other libraries use."""
        return self.metric(Y, U, V)

    def norm(self, Y: Tensor, V: Tensor) -> Tensor:
        """sqrt(g_Y(V, V)); its derivative at V = 0 is 0, as in torch.linalg.vector_norm."""
        square = self.metric(Y, V, V)
        positive = square > 0
        return torch.where(positive, torch.where(positive, square, 1).sqrt(), 0)

    def dist(self, Y: Tensor, Z: Tensor) -> Tensor:
        """Length of the shortest geodesic from Y to Z."""
        return self.norm(Y, self.log(Y, Z))

    def mean(self, points: Tensor, weights: Tensor | None = None) -> Tensor:
        """The Frechet mean of points (K, ..., *point), see `ghor.spaces.mean`."""
        return mean(self, points, weights)


def compute(X: Tensor) -> Tensor:
    """X in the dtype that linear algebra runs in: float32 for half precision."""
    return X.to(COMPUTE_DTYPE.get(X.dtype, X.dtype))


STEPS = 1000


@torch.no_grad()
@full_precision()
def mean(space: Space, points: Tensor, weights: Tensor | None = None) -> Tensor:
    """The point that minimises sum_k w_k dist(Y, points[k])^2: Y <- exp(Y, sum_k w_k log(Y, points[k])) until
    it stays.

    Points (K, ..., *point), stacked along dimension 0; weights (K) or (K, ...), nonnegative, which are
    divided by their sum. In double precision, and without a derivative. It starts at the point of the largest
    weight; points that are too far apart for `log`, or for a mean to be unique, raise ValueError.
    """
    batch = points.shape[: points.dim() - space.dims]
    if len(batch) == 0 or batch[0] == 0:
        raise ValueError(
            f"{space}.mean takes points stacked along dimension 0, got shape {tuple(points.shape)}"
        )
    X = wide(points)
    X = (
        X if X.dtype == points.dtype else space.project(X)
    )  # what has been rounded is off by more than `log` allows
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
    rounding, last = 16 * torch.finfo(X.dtype).eps, torch.inf
    for _ in range(STEPS):
        V = (w * space.log(Y.expand_as(X), X)).sum(0)
        length = float(torch.linalg.vector_norm(V) / (1 + torch.linalg.vector_norm(Y)))
        if length <= rounding or (
            length >= last and length <= 1e3 * rounding
        ):  # rounding is all that is left
            return space.project(space.exp(Y, V)).to(points.dtype)
        Y, last = space.exp(Y, V), length
    raise ValueError(f"{space}.mean: no mean was found in {STEPS} iterations; are the points too far apart?")
