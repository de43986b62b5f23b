"""A loss on points of several spaces: its value, gradient and Hessian in g^hor; and the log of a run."""

from __future__ import annotations

import importlib
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Number
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ghor._torch.gradient import gradients
from ghor.constraints.validation import check_on_space
from ghor.retraction import by_name
from ghor.solve.curves import Ray
from ghor.solve.points import VISIBLE, Points
from ghor.spaces import Euclidean, Space
from ghor.spaces.base import compute

PATIENCE = 100  # iterations without a change beyond rounding, after which a run ends

Loss = Callable[[Any], Tensor]
X = TypeVar("X", bound="Given")
Given = Tensor | Mapping[str, Tensor] | Sequence[Tensor]
Spaces = Space | Mapping[str, Space] | Sequence[Space] | None
Record = dict[str, float]
Callback = Callable[[Record], object] | Callable[[Record, Any], object]


@dataclass(repr=False)
class Result(Generic[X]):
    """The point x that a solver found, in the form of its start, and how it got there.

    `history` has the record of each iteration, a dict of numbers; the first is that of the start.
    """

    x: X
    value: float
    gradient_norm: float
    iterations: int
    evaluations: int
    hessian_products: int
    seconds: float
    success: bool
    status: str
    history: list[Record]

    def __repr__(self) -> str:
        shown = (f.name for f in fields(self) if f.name not in ("x", "history", "success", "status"))
        rows = [f"  {name:<17}{getattr(self, name):.8g}" for name in shown]
        return "\n".join([f"Result({'success' if self.success else 'NO success'}: {self.status})", *rows])

    def draw(self, axes: Any = None) -> Any:
        """Draw the gradient norm by evaluations with matplotlib; returns the axes."""
        axes = importlib.import_module("matplotlib.pyplot").gca() if axes is None else axes
        axes.semilogy(*([h[key] for h in self.history] for key in ("evaluations", "gradient_norm")))
        axes.set(xlabel="evaluations", ylabel="gradient norm")
        return axes


@dataclass(frozen=True)
class Place:
    """Points, with the value and flat gradient there; `graph` is x and its gradients, for Hessians."""

    points: Points
    value: float
    gradient: Tensor
    graph: tuple[list[Tensor], Sequence[Tensor | None]] = ([], ())

    @cached_property
    def norm(self) -> float:
        """The gradient norm."""
        return float(torch.linalg.vector_norm(self.gradient))

    @cached_property
    def extent(self) -> float:
        """The size of the points."""
        return self.points.extent()


def _numbers(x: object) -> bool:
    """Whether x is a number, or a list of numbers or of such lists: a tensor that was written down."""
    if isinstance(x, Sequence):
        return len(x) > 0 and all(map(_numbers, x))
    return isinstance(x, Number)


class Problem:
    """f on points x: a tensor, a dict or a list of tensors, each on its space."""

    def __init__(self, f: Loss, x: Given, space: Spaces) -> None:
        if not callable(f):
            raise TypeError(
                f"first comes the function of the points, then points, then spaces; got {f!r:.80}"
            )
        self.f, self.evaluations, self.products = f, 0, 0
        self.unit: float | None = None  # f is divided by it, see `place`
        self.pack: Callable[[list[Tensor]], Any] = list  # a new one: f may write to it
        if not isinstance(x, Tensor | Mapping) and (not isinstance(x, Sequence) or _numbers(x)):
            raise TypeError(
                f"x0 is a {type(x).__name__}; points are tensors: write torch.as_tensor(x0), and let f "
                "compute with torch, which differentiates it"
            )
        if isinstance(x, Tensor):
            names, points, self.pack = ["x"], [x], lambda points: points[0]
        elif isinstance(x, Mapping):
            names, points = list(x), list(x.values())
            self.pack = lambda points: dict(zip(x, points, strict=True))
        else:
            names, points = [f"x[{i}]" for i in range(len(x))], list(x)
            if isinstance(x, tuple):
                self.pack = getattr(type(x), "_make", tuple)  # a namedtuple has names
        if isinstance(space, str):
            raise TypeError(f"space is the string {space!r}, not a space; write ghor.Stiefel(), for example")
        if isinstance(space, type):
            raise TypeError(f"space is the class {space.__name__}, not a space: write {space.__name__}()")
        if isinstance(space, Mapping):
            if not isinstance(x, Mapping) or set(space) - set(x):
                raise ValueError(
                    f"spaces are given for {sorted(space)}, points are {names}; use the same names"
                )
            space = [space.get(k, Euclidean()) for k in names]
        self.spaces = [space or Euclidean()] * len(points) if isinstance(space, Space | None) else list(space)
        if len(self.spaces) != len(points) or not points:
            raise ValueError(
                f"{len(points)} points and {len(self.spaces)} spaces; give one space for each, or one for all"
            )
        for p, s, name in zip(points, self.spaces, names, strict=True):
            if not (isinstance(p, Tensor) and isinstance(s, Space)):
                raise TypeError(
                    f"{name} is a {type(p).__name__} on {s!r}; points are tensors (torch.as_tensor({name}) "
                    "makes one) on spaces like Stiefel()"
                )
            if not (p.is_floating_point() or p.is_complex()):
                raise TypeError(
                    f"{name} is {p.dtype}; points are floating point tensors, convert with .double()"
                )
            s.check(p.shape, p.dtype)
            if not isinstance(s, Euclidean):
                # The short way first. (Far out on other spaces the tolerance itself may overflow.)
                on = s.compact and bool((s.residual(compute(p.detach())) <= s.tolerance(p)).all())
                if not on:
                    check_on_space([p], s, [name])
            elif not bool(torch.isfinite(p).all()):
                raise ValueError(f"{name} of shape {tuple(p.shape)} has entries that are not finite")
        self.start = [p.detach().clone() for p in points]

    def points(self, retraction: str = "cayley", section: str = "auto") -> Points:
        """The starting points, with frames above them."""
        return Points(self.start, self.spaces, by_name(retraction), section)

    def _loss(self, points: list[Tensor]) -> Tensor:
        self.evaluations += 1
        value = self.f(self.pack(points))
        if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
            raise ValueError(f"f must return one real number as a tensor, got {value!r:.80}")
        value = value if value.dim() == 0 else value.reshape(())
        return value if self.unit in (None, 1.0) else value / self.unit

    def value(self, points: Points) -> float:
        """f alone."""
        with torch.no_grad():
            return float(self._loss(points.tensors()))

    def place(self, points: Points, twice: bool = False) -> Place:
        """f and its gradient; if f is differentiated `twice`, the gradient as a function of x.

        If the first gradient is so large or small that squares leave the range of its dtype, f is divided by
        a power of two, which changes no bit of a run.
        """
        x = [p.detach().requires_grad_() for p in points.tensors()]
        with torch.enable_grad():
            value = self._loss(x)
            grads = gradients(value, x, twice) if value.requires_grad else ()
            if all(G is None for G in grads):
                raise ValueError(
                    "f does not depend on x, or was computed without gradients; use x in torch operations"
                )
        place = Place(points, value.item(), points.gradient(grads), (x, grads))
        if self.unit is None:
            self.unit = unit = _unit(place.gradient)
            if unit != 1:
                grads = tuple(None if G is None else G / unit for G in grads)
                place = Place(points, place.value / unit, place.gradient / unit, (x, grads))
        return place

    def hessian(self, place: Place) -> Callable[[Tensor], Tensor]:
        """v -> Hess v in g^hor, for the pulled-back loss u -> f(Y(u)), Y(u) = Lambda R(u) E, at u = 0.

        The gradient of <v, grad f>: f'' Y'(0) v brought to g^hor, plus <grad f, Y''(0) v>.
        """
        x, grads = place.graph
        expansion = place.points.expansion(grads, place.gradient)
        # All other gradients are constant.
        which = [i for i, G in enumerate(grads) if G is not None and G.requires_grad]

        def product(v: Tensor) -> Tensor:
            self.products += 1
            moves, bend = expansion(v)
            if not which:
                return bend
            outputs, along = [grads[i] for i in which], [moves[i] for i in which]
            H = torch.autograd.grad(outputs, x, along, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
            return place.points.gradient(H) + bend  # not add_: torch may return zeros without memory

        return product


def _unit(g: Tensor) -> float:
    """1, or the power of two next to the largest entry of g if that is beyond a quarter of all exponents."""
    largest, most = float(g.abs().max()) if len(g) else 0.0, math.frexp(torch.finfo(g.dtype).max)[1]
    exponent = math.frexp(largest)[1] if 0 < largest < math.inf else 0
    return math.ldexp(1.0, max(3 - most, min(exponent, most - 3))) if abs(exponent) > most / 4 else 1.0


@dataclass
class Log:
    """The records of a run, and the decision when it ends.

    If the user gives no tolerance, the gradient norm must fall to eps^(2/3) of the first one, or to its own
    rounding, eps |f|/extent, which depends neither on the scale of f nor on a unit of length. A run that ends
    because rounding allows no progress is then a success as well.
    """

    problem: Problem
    tol: float | None = None
    rtol: float | None = None
    max_iterations: int = 1000
    max_evaluations: int | None = None
    max_seconds: float | None = None
    callback: Callback | None = None
    progress: bool = False
    history: list[Record] = field(default_factory=list)
    first: tuple[float, float] = (
        0.0,
        0.0,
    )  # the value and gradient norm at the start, as the problem has them
    began: float = field(default_factory=time.perf_counter)
    status: str = ""
    success: bool = False
    stuck: bool = False  # no step lowers the value
    since: int = 0  # the last iteration in which something changed beyond rounding

    def __post_init__(self) -> None:
        for name in ("tol", "rtol", "max_iterations", "max_evaluations", "max_seconds"):
            if (limit := getattr(self, name)) is not None and not limit >= 0:
                raise ValueError(f"{name} is a number from 0 on, got {limit}")
        self.by_default = self.tol is None and self.rtol is None
        if self.by_default:
            self.rtol = max(torch.finfo(p.dtype).eps for p in self.problem.start) ** (2 / 3)
        try:  # does it take the point, too?
            self.with_point = self.callback is not None and bool(inspect.signature(self.callback).bind({}, 0))
        except (TypeError, ValueError):
            self.with_point = False

    def target(self) -> float:
        """The gradient norm that is asked for."""
        return max((self.tol or 0.0) / self.unit, (self.rtol or 0.0) * self.first[1])

    @property
    def unit(self) -> float:
        """Values and gradients of the user are this times those of the problem."""
        return self.problem.unit or 1.0

    def late(self) -> bool:
        """Whether the time is up."""
        return self.max_seconds is not None and time.perf_counter() - self.began >= self.max_seconds

    def stalls(self, eps: float) -> bool:
        """Whether value and gradient norm have not changed beyond rounding for `PATIENCE` iterations."""
        then, now = self.history[self.since], self.history[-1]
        size = max(abs(now["value"]), eps * abs(self.history[0]["value"]))
        if (
            abs(now["value"] - then["value"]) > 10 * eps * size
            or now["gradient_norm"] < 0.9 * then["gradient_norm"]
        ):
            self.since = len(self.history) - 1
        return len(self.history) - 1 - self.since >= PATIENCE

    def get_stuck(self, place: Place, newton: float = math.inf) -> None:
        """End here because no step lowers the value; `newton` is the length of Newton's step, if known."""
        self.stuck = True
        value = place.value * self.unit
        self.status = f"no step lowers the value {value}: rounding, or a gradient that is not its own"
        self.blame_rounding(place, newton)

    def blame_rounding(self, place: Place, newton: float = math.inf) -> None:
        """With the default tolerance, count a run that rounding has ended as a success.

        Rounding is the reason if Newton's step is below the rounding of x, or if values could not show a
        decrease, |g| extent <= sqrt(eps) |f|. A wrong gradient of f is far above both.
        """
        norm, eps, extent = place.norm, place.points.eps, place.extent
        size = max(abs(place.value), abs(self.first[0]))
        if not extent < math.inf:  # it ran away
            return
        unseen = 0 < norm * extent <= math.sqrt(eps) * size
        if self.by_default and (newton <= 100 * eps * extent or (unseen and self.tells(place))):
            self.success = True
            value, norm = place.value * self.unit, norm * self.unit
            self.status = f"{value} is the smallest value to rounding, gradient norm {norm:.1e}"

    def tells(self, place: Place) -> bool:
        """Whether the extent of the points is a length over which f varies.

        Positions alone may be small only because the run started near 0, as most do. Theirs counts once the
        gradient has fallen, or if f rises both ways along it, by steps whose predicted change can be seen.
        """
        points, g, value = place.points, place.gradient, place.value
        if points.radian > 0 or place.norm <= 0.1 * self.first[1]:
            return True
        t = VISIBLE * points.eps * abs(value) / place.norm**2
        rise, ray = 10 * points.eps * abs(value), Ray(points, g)
        return all(not self.problem.value(ray.at(s)) - value <= rise for s in (-t, t))

    def over(self, place: Place) -> bool:
        """Record this place; returns whether to stop here."""
        problem, target = self.problem, self.target()
        if not self.history:
            self.first = place.value, place.norm
            target = self.target()
        value, norm = place.value * self.unit, place.norm * self.unit
        record = {
            "iteration": len(self.history),
            "value": value,
            "gradient_norm": norm,
            "evaluations": problem.evaluations,
            "hessian_products": problem.products,
            "seconds": time.perf_counter() - self.began,
        }
        self.history.append(record)
        if self.progress:
            self.show(record)
        rounding = place.points.eps * abs(place.value) / place.extent if place.extent > 0 else 0.0
        if self.by_default and target < place.norm <= rounding and self.tells(place):
            target = rounding
        if self.told_to_stop(record, place):
            self.status = "the callback asked to stop"
        elif not (math.isfinite(place.value) and math.isfinite(place.norm)):
            self.status = f"the value {value} or its gradient is not finite"
        elif place.norm <= target:
            self.status = f"the gradient norm {norm:.1e} is below {target * self.unit:.1e}"
            self.success = True
        elif record["iteration"] >= self.max_iterations:
            self.status = f"{self.max_iterations} iterations, max_iterations, gradient norm {norm:.1e}"
        elif self.max_evaluations is not None and problem.evaluations >= self.max_evaluations:
            self.status = f"{problem.evaluations} evaluations, max_evaluations, gradient norm {norm:.1e}"
        elif self.late():
            self.status = f"{record['seconds']:.1f} seconds, max_seconds, gradient norm {norm:.1e}"
        elif self.stalls(place.points.eps):
            self.status = (
                f"nothing has changed beyond rounding for {PATIENCE} iterations, gradient norm {norm:.1e}; "
                "a wider dtype has more digits"
            )
            self.blame_rounding(place)
        return bool(self.status)

    def told_to_stop(self, record: Record, place: Place) -> bool:
        """Call the callback; returns whether it asked to stop."""
        if self.callback is None:
            return False
        more = (self.problem.pack(place.points.tensors()),) if self.with_point else ()
        answer = self.callback(record, *more)
        # Comparisons of tensors and arrays have a bool of their own.
        truth = str(getattr(answer, "dtype", "")) in ("bool", "torch.bool") and bool(answer)
        return answer is True or truth

    def show(self, record: Record) -> None:
        """Print a line of the table of records, under a heading."""
        if record["iteration"] == 0:
            print("  ".join(f"{name:>{max(13, len(name))}}" for name in record))
        print("  ".join(f"{value:>{max(13, len(name))}.6g}" for name, value in record.items()), flush=True)
