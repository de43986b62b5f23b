"""A loss on points of several spaces: its value, gradient and Hessian in g^hor, and scales of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Number
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.linalg import vector_norm as norm

from ghor._torch.gradient import gradients
from ghor._torch.precision import COMPUTE_DTYPE
from ghor.constraints.validation import check_on_space
from ghor.solve.coordinates import Coordinates
from ghor.solve.iterate import Iterate, Sample
from ghor.spaces import Euclidean, Space
from ghor.spaces.retraction import Retraction, geodesic

# The length of a step when no curvature is known, as a part of a radian or of the size of the positions.
FIRST = 0.1
VISIBLE = 1000  # a change of f by this many eps |f| can be told from rounding

Loss = Callable[[Any], Tensor]
X = TypeVar("X", bound="Given")
Given = Tensor | Mapping[str, Tensor] | Sequence[Tensor]
Spaces = Space | Mapping[str, Space] | Sequence[Space] | None


class Problem:
    """f on points x: a tensor, a dict or a list of tensors, each on its space."""

    def __init__(
        self, f: Loss, x: Given, space: Spaces, R: Retraction = geodesic, section: str = "auto"
    ) -> None:
        if not callable(f):
            raise TypeError(
                f"first comes the function of the points, then points, then spaces; got {f!r:.80}"
            )
        self.f, self.evaluations, self.products = f, 0, 0
        self.unit = 1.0  # f is divided by it, see `start`
        names, points, self.pack = _packed(x)
        spaces = _one_each(space, names, x)
        for p, s, name in zip(points, spaces, names, strict=True):
            _check(p, s, name)
        self.space = Coordinates([p.detach().clone() for p in points], spaces, R, section)

    def value(self, points: Sequence[Tensor]) -> float:
        """f alone."""
        with torch.no_grad():
            return float(self._loss(self.space.weights(points)))

    def _loss(self, x: list[Tensor]) -> Tensor:
        self.evaluations += 1
        value = self.f(self.pack(x))
        if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
            raise ValueError(f"f must return one real number as a tensor, got {value!r:.80}")
        value = value if value.dim() == 0 else value.reshape(())
        return value if self.unit == 1 else value / self.unit

    def sample(self, points: Sequence[Tensor], twice: bool = False) -> Sample:
        """f and its gradient; if f is differentiated `twice`, the gradient as a function of x."""
        x = [X.detach().requires_grad_() for X in self.space.weights(points)]
        with torch.enable_grad():
            value = self._loss(x)
            grads = gradients(value, x, twice) if value.requires_grad else ()
        if all(G is None for G in grads):
            raise ValueError(
                "f does not depend on x, or was computed without gradients; use x in torch operations"
            )
        G = self.space.gradients([None if g is None else g.detach() for g in grads])
        return Sample(points, value.item(), G, (x, grads) if twice else ((), ()))

    def start(self, twice: bool = False) -> Iterate:
        """The first iterate.

        If its gradient is so large or small that squares leave the range of its dtype, f is divided by a
        power of two, which changes no bit of a run.
        """
        frames = self.space.frames
        sample = self.sample([frame.point() for frame in frames], twice)
        self.unit = unit = _unit(self.space.pull(frames, sample.G))
        if unit != 1:
            x, grads = sample.graph
            with torch.enable_grad():
                grads = [None if g is None else g / unit for g in grads]
            sample = Sample(sample.points, sample.value / unit, [g / unit for g in sample.G], (x, grads))
        return Iterate(frames, sample, self.space.pull(frames, sample.G))

    def again(self, it: Iterate) -> Iterate:
        """The same iterate with a gradient that can be differentiated, whatever f may return there now."""
        graph = self.sample(it.sample.points, twice=True).graph
        return replace(it, sample=it.sample._replace(graph=graph))

    def hessian(self, it: Iterate) -> Callable[[Tensor], Tensor]:
        """v -> Hess v in g^hor, for the pulled-back loss u -> f(Y(u)), Y(u) = Lambda R(u) E, at u = 0.

        The gradient of <v, grad f>: f'' Y'(0) v brought to g^hor, plus <grad f, Y''(0) v>.
        """
        space, (x, grads) = self.space, it.sample.graph
        own = space.elements(it.gradient)
        bends = [frame.bend(G, B) for frame, G, B in zip(it.frames, it.sample.G, own, strict=True)]
        which = [
            i for i, G in enumerate(grads) if G is not None and G.requires_grad
        ]  # all others are constant

        def product(v: Tensor) -> Tensor:
            self.products += 1
            w = space.elements(v)
            bent = space.flat(lambda k, out: out.copy_(bends[k](w[k])))
            if not which:
                return bent
            moves = space.weights([frame.push(u) for frame, u in zip(it.frames, w, strict=True)])
            outputs, along = [grads[i] for i in which], [moves[i] for i in which]
            H = torch.autograd.grad(outputs, x, along, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
            return space.pull(it.frames, space.gradients(H)).add_(bent)

        return product

    # -- scales: of steps and of rounding

    def lengths(self, it: Iterate) -> list[float]:
        """The length of the positions of each part; 0 where there are none."""
        found = (part.positions(y) for part, y in zip(self.space.parts, it.sample.points, strict=True))
        return [0.0 if x is None else float(norm(x)) for x in found]

    def extent(self, it: Iterate) -> float:
        """The size of the points: one radian for all turns, and the length of all positions."""
        space = self.space
        return space.radian if space.widest < math.inf else math.hypot(space.radian, *self.lengths(it))

    def first_step(self, it: Iterate) -> float:
        """t for a step -t g where no curvature is known: `FIRST` of the extent of every part, or less.

        Positions have no natural length. Theirs is taken from their own entries, unless these are so close to
        0 that f could not show the change, with t at most |f|/|g|^2, at which the value would fall to zero
        along the tangent (Hager and Zhang, 2006). So -t g depends neither on the scale of f nor on the unit
        of length, unless both x and f are zero.
        """
        space, steps = self.space, list[tuple[float, float]]()
        for part, frame, length in zip(space.parts, it.frames, self.lengths(it), strict=True):
            g = part.view(it.gradient)
            if part.limit < math.inf:
                steps.append((FIRST * part.radian * math.sqrt(part.count), float(norm(frame.length(g)))))
            along = part.positions(g)
            slope = 0.0 if along is None else float(norm(along))
            if FIRST * length * slope >= VISIBLE * space.eps * abs(it.value):
                steps.append((FIRST * length, slope))
        if space.widest == math.inf:
            steps.append((abs(it.value) / it.norm, it.norm))
        return min((a / b for a, b in steps if a > 0 and b > 0 and a / b > 0), default=1 / it.norm)

    def sized(self, it: Iterate, u: Tensor) -> Tensor:
        """A flat vector, with the entries of positions multiplied by their length, if that is not 0."""
        u = u.clone()
        for part, length in zip(self.space.parts, self.lengths(it), strict=True):
            positions = part.positions(part.view(u))
            if positions is not None:
                positions.mul_(length or 1.0)
        return u


def _packed(x: Given) -> tuple[list[str], list[Tensor], Callable[[list[Tensor]], Any]]:
    """Names of the points, the points, and how f gets them: in a new container, to which it may write."""
    if isinstance(x, Tensor):
        return ["x"], [x], lambda points: points[0]
    if isinstance(x, Mapping):
        return list(x), list(x.values()), lambda points: dict(zip(x, points, strict=True))
    if not isinstance(x, Sequence) or _numbers(x):
        raise TypeError(
            f"x0 is a {type(x).__name__}; points are tensors: write torch.as_tensor(x0), and let f "
            "compute with torch, which differentiates it"
        )
    pack = getattr(type(x), "_make", tuple) if isinstance(x, tuple) else list  # a namedtuple has names
    return [f"x[{i}]" for i in range(len(x))], list(x), pack


def _numbers(x: object) -> bool:
    """Whether x is a number, or a list of numbers or of such lists: a tensor that was written down."""
    if isinstance(x, Sequence):
        return len(x) > 0 and all(map(_numbers, x))
    return isinstance(x, Number)


def _one_each(space: Spaces, names: list[str], x: Given) -> list[Space]:
    """A space for each point."""
    if isinstance(space, str):
        raise TypeError(f"space is the string {space!r}, not a space; write ghor.Stiefel(), for example")
    if isinstance(space, type):
        raise TypeError(f"space is the class {space.__name__}, not a space: write {space.__name__}()")
    if isinstance(space, Mapping):
        if not isinstance(x, Mapping) or set(space) - set(x):
            raise ValueError(f"spaces are given for {sorted(space)}, points are {names}; use the same names")
        space = [space.get(k, Euclidean()) for k in names]
    spaces = [space or Euclidean()] * len(names) if isinstance(space, Space | None) else list(space)
    if len(spaces) != len(names) or not names:
        raise ValueError(
            f"{len(names)} points and {len(spaces)} spaces; give one space for each, or one for all"
        )
    return spaces


def _check(p: Tensor, space: Space, name: str) -> None:
    """Raise unless p is a point of the space."""
    if not (isinstance(p, Tensor) and isinstance(space, Space)):
        raise TypeError(
            f"{name} is a {type(p).__name__} on {space!r}; points are tensors (torch.as_tensor({name}) "
            "makes one) on spaces like Stiefel()"
        )
    if not (p.is_floating_point() or p.is_complex()):
        raise TypeError(f"{name} is {p.dtype}; points are floating point tensors, convert with .double()")
    if isinstance(space, Euclidean):
        if not bool(torch.isfinite(p).all()):
            raise ValueError(f"{name} of shape {tuple(p.shape)} has entries that are not finite")
        return
    space.check(p.shape, p.dtype)
    # The short way first. (Far out on other spaces what is allowed may overflow.)
    y, geometry = space.layout.points(p.detach().to(COMPUTE_DTYPE.get(p.dtype, p.dtype))), space.geometry
    y = y / space.scale(y)
    near = geometry.residual(y) <= geometry.tolerance(y, eps=torch.finfo(p.dtype).eps)
    if not (space.compact and bool(near.all())):
        check_on_space([p], space, [name])


def _unit(g: Tensor) -> float:
    """1, or the power of two next to the largest entry of g if that is beyond a quarter of all exponents."""
    largest, most = float(g.abs().max()) if len(g) else 0.0, math.frexp(torch.finfo(g.dtype).max)[1]
    exponent = math.frexp(largest)[1] if 0 < largest < math.inf else 0
    return math.ldexp(1.0, max(3 - most, min(exponent, most - 3))) if abs(exponent) > most / 4 else 1.0
