"""A loss on points of several spaces: its value, its gradient and its Hessian in g^hor; and what has been
done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ghor.constraints.validation import check_on_space
from ghor.retraction import by_name
from ghor.solve.points import Frames
from ghor.spaces import Euclidean, Space

PATIENCE = 100  # iterations without a change beyond rounding

Loss = Callable[[Any], Tensor]
Points = Tensor | Mapping[str, Tensor] | Sequence[Tensor]
Spaces = Space | Mapping[str, Space] | Sequence[Space] | None


@dataclass
class Result:
    """What a solver found: the point, and how it got there. `history` has one record an iteration."""

    x: Any = field(repr=False)
    value: float
    gradient_norm: float
    iterations: int
    evaluations: int
    hessian_products: int
    seconds: float
    success: bool
    status: str
    history: list[dict[str, float]] = field(repr=False)


@dataclass(frozen=True)
class Place:
    """Frames, with the value and the flat gradient there; and points and gradients that can be differentiated
    again."""

    frames: Frames
    value: float
    gradient: Tensor
    graph: tuple[list[Tensor], Sequence[Tensor | None]]


class Problem:
    """f on points x: a tensor, a dict or a list of tensors, each on its space."""

    def __init__(self, f: Loss, x: Points, space: Spaces) -> None:
        self.f, self.evaluations, self.products = f, 0, 0
        self.pack: Callable[[list[Tensor]], Any] = lambda points: points
        if isinstance(x, Tensor):
            names, points, self.pack = ["x"], [x], lambda points: points[0]
        elif isinstance(x, Mapping):
            names, points, self.pack = (
                list(x),
                list(x.values()),
                lambda points: dict(zip(x, points, strict=True)),
            )
        else:
            names, points = [f"x[{i}]" for i in range(len(x))], list(x)
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
                    f"{name} is a {type(p).__name__} on {s!r}; points are tensors, on spaces such as Stiefel()"
                )
            if not (p.is_floating_point() or p.is_complex()):
                raise TypeError(
                    f"{name} is {p.dtype}; points are floating point tensors, convert with .double()"
                )
            s.check(p.shape, p.dtype)
            if not isinstance(s, Euclidean):
                check_on_space([p], s, [name])
        self.start = [p.detach().clone() for p in points]

    def frames(self, retraction: str = "cayley", section: str = "auto") -> Frames:
        """Frames above the starting points."""
        return Frames(self.start, self.spaces, by_name(retraction), section)

    def _loss(self, points: list[Tensor]) -> Tensor:
        self.evaluations += 1
        value = self.f(self.pack(points))
        if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
            raise ValueError(f"f must return one real number as a tensor, got {value!r:.80}")
        return value.reshape(())

    def value(self, frames: Frames) -> float:
        """f alone."""
        with torch.no_grad():
            return float(self._loss(frames.points()))

    def place(self, frames: Frames, twice: bool = False) -> Place:
        """f and its gradient, as a function of x if it is to be differentiated twice."""
        points = [p.detach().requires_grad_() for p in frames.points()]
        with torch.enable_grad():
            value = self._loss(points)
            if not value.requires_grad:
                raise ValueError(
                    "f does not depend on x, or was computed without gradients; use x in torch operations"
                )
            grads = torch.autograd.grad(value, points, allow_unused=True, create_graph=twice)
        return Place(frames, float(value.detach()), frames.gradient(grads), (points, grads))

    def hessian(self, place: Place) -> Callable[[Tensor], Tensor]:
        """v -> Hess v in g^hor, of the pulled-back loss u -> f(Y(u)), Y(u) = Lambda R(u) E, at 0.

        The gradient of <v, grad f>: f'' Y'(0) v brought to g^hor, and <grad f, Y''(0) v>.
        """
        points, grads = place.graph
        expansion = place.frames.expansion(grads, place.gradient)
        which = [
            i for i, G in enumerate(grads) if G is not None and G.requires_grad
        ]  # the others are constant

        def product(v: Tensor) -> Tensor:
            self.products += 1
            moves, bend = expansion(v)
            if not which:
                return bend
            outputs, along = [grads[i] for i in which], [moves[i] for i in which]
            H = torch.autograd.grad(outputs, points, along, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
            return place.frames.gradient(H).add_(bend)

        return product


@dataclass
class Log:
    """Records of a run, and when it is over."""

    problem: Problem
    tol: float
    rtol: float
    max_iterations: int
    max_evaluations: int | None
    max_seconds: float | None
    callback: Callable[[dict[str, float]], object] | None
    progress: bool
    history: list[dict[str, float]] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    status: str = ""
    success: bool = False
    since: int = 0  # the last iteration in which something changed beyond rounding

    def target(self) -> float:
        """The gradient norm that is asked for."""
        return max(self.tol, self.rtol * self.history[0]["gradient_norm"])

    def late(self) -> bool:
        """Whether the time is over."""
        return self.max_seconds is not None and time.perf_counter() - self.began >= self.max_seconds

    def stalls(self, eps: float) -> bool:
        """Whether value and gradient norm have been the same but for rounding for `PATIENCE` iterations."""
        then, now = self.history[self.since], self.history[-1]
        size = max(abs(now["value"]), eps * abs(self.history[0]["value"]))
        if (
            abs(now["value"] - then["value"]) > 10 * eps * size
            or now["gradient_norm"] < 0.9 * then["gradient_norm"]
        ):
            self.since = len(self.history) - 1
        return len(self.history) - 1 - self.since >= PATIENCE

    def over(self, place: Place) -> bool:
        """Take a record of this place; whether to stop here."""
        norm, problem = float(place.gradient.norm()), self.problem
        record = {
            "iteration": len(self.history),
            "value": place.value,
            "gradient_norm": norm,
            "evaluations": problem.evaluations,
            "hessian_products": problem.products,
            "seconds": time.perf_counter() - self.began,
        }
        self.history.append(record)
        if self.progress:
            print("  ".join(f"{k} {v:.6g}" for k, v in record.items()), flush=True)
        target = self.target()
        if norm <= target:
            self.status, self.success = f"the gradient norm {norm:.1e} is below {target:.1e}", True
        elif not norm < float("inf"):
            self.status = f"the value {place.value} or its gradient is not finite"
        elif self.callback is not None and self.callback(record) is True:
            self.status = "the callback asked to stop"
        elif record["iteration"] >= self.max_iterations:
            self.status = f"{self.max_iterations} iterations, max_iterations, gradient norm {norm:.1e}"
        elif self.max_evaluations is not None and problem.evaluations >= self.max_evaluations:
            self.status = f"{problem.evaluations} evaluations, max_evaluations, gradient norm {norm:.1e}"
        elif self.late():
            self.status = f"{record['seconds']:.1f} seconds, max_seconds, gradient norm {norm:.1e}"
        elif self.stalls(place.frames.eps):
            self.status = (
                f"nothing has changed beyond rounding for {PATIENCE} iterations, gradient norm {norm:.1e}; "
                "a wider dtype has more digits"
            )
        return bool(self.status)
