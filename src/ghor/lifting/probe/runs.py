"""A rule on test tensors, as it is and as the lift runs it: the probe's experiments."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ghor._torch.bare_step import bare_step
from ghor.lifting.param_groups import DECAYS
from ghor.spaces import Space

STEPS = 40  # step-size estimates and running averages of norms need some dozens of steps to show
TOL = 2e-5  # of the largest velocity: rules in float32 obey a law to 1e-6, those that break it miss by 1e-3
RATE = 0.1  # not the user's, which may be 0: beside a weight of order 1 a velocity of 1e-3 has few digits
ENTRIES = 2**16  # of the largest stack that is tried
CPU = torch.device("cpu")
SIZES = (1.0, 4.0, 0.25, 2.0, 0.5, 8.0, 1.0)  # of gradients over time, for rules that clip or average norms


# -- cases and runs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A rule, its options, and where it is to run: `count` weights of one shape, on one space."""

    Base: type[Optimizer]
    options: dict[str, Any] = field(hash=False)
    space: Space
    shape: tuple[int, ...]
    count: int = 2
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    stack: bool = True
    blocks: bool = False
    # group keys that the constructor does not know
    own: dict[str, Any] = field(default_factory=dict, hash=False)

    def within(self, side: int, entries: int) -> Case:
        """The same case with sides of at most `side`, tall or wide as before, and about `entries` in all.

        A stack has two weights or more, their number a power of 2; without a stack there are two.
        """
        shape = _shrunk(self.space, self.shape, side)
        while math.prod(shape) > entries and side > 8:
            side //= 2
            shape = _shrunk(self.space, self.shape, side)
        most = max(2, entries // math.prod(shape))
        count = min(1 << (max(2, self.count) - 1).bit_length(), 1 << (most.bit_length() - 1))
        return replace(self, shape=shape, count=count if self.stack else 2)

    def key(self) -> Any:
        """Cases with equal keys have equal verdicts."""
        c = self.within(ENTRIES, ENTRIES)
        kind = (c.space, c.shape, c.count, c.dtype, c.device, c.stack, c.blocks)
        return kind, frozen(self.options), frozen(self.own)


def _shrunk(space: Space, shape: tuple[int, ...], side: int) -> tuple[int, ...]:
    """Rows and columns of at most `side`; the longer of the two stays the longer."""
    k = getattr(space, "flatten", 1)  # the last k dimensions are the columns
    out = list(shape) if len(shape) <= k else [min(b, 3) for b in shape[: -1 - k]] + list(shape[-1 - k :])
    rows, columns = (out[-1 - k] if len(out) > k else 1), math.prod(out[-k:])
    short = side - max(2, side // 16)
    most = (side, side) if rows == columns else (short, side) if rows < columns else (side, short)
    if len(out) > k:
        out[-1 - k] = min(rows, most[0])
    for i in range(len(out) - k, len(out)):
        rest = math.prod(out[-k:]) // out[i]
        out[i] = min(out[i], max(1, most[1] // rest))
    try:
        space.check_shape(out)
    except ValueError:
        return shape
    return tuple(out)


def shadow(case: Case, *lead: int) -> Tensor:
    """The shadow of a weight, or of a stack: 0."""
    return torch.zeros((*lead, *case.shape), dtype=case.dtype, device=case.device)


def point(case: Case, seed: int) -> Tensor:
    """A weight whose entries have the size that they have on an orthogonal space."""
    X = _randn(case, case.shape, torch.Generator().manual_seed(seed))
    return (X / math.sqrt(max(case.shape))).to(case.device, case.dtype)


def gradients(case: Case, steps: int = STEPS) -> Iterator[Tensor]:
    """Gradients (count, *shape) of varying size: a constant part, so that signs persist, and noise.

    Gradients of blocks have singular values near 1, because matrix rules turn small ones into noise.
    """
    generator, shape, share = torch.Generator().manual_seed(0), (case.count, *case.shape), 0.3
    if case.blocks:
        steady = torch.stack([orthogonal(case, case.shape, generator) for _ in range(case.count)])
        share = 0.2 / sum(map(math.sqrt, case.shape))
    else:
        steady = _randn(case, shape, generator)
    for t in range(steps):
        noise = share * _randn(case, shape, generator)
        yield (SIZES[t % len(SIZES)] * (steady + noise)).to(case.device, case.dtype)


def orthogonal(case: Case, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A random matrix with orthonormal columns (rows if it is wide), in double precision."""
    side = max(shape)
    return torch.linalg.qr(_randn(case, (side, side), generator))[0][: shape[0], : shape[1]]


def _randn(case: Case, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    wide = torch.complex128 if case.dtype.is_complex else torch.float64
    return torch.randn(shape, generator=generator, dtype=wide, device=CPU)  # the same for all devices


class NotBuilt(Exception):
    """Raised where Base(params, **options) raises."""


class Run:
    """A rule on test tensors: on `weights`, or, as in the lift, on `shadows` put in their place."""

    def __init__(
        self,
        case: Case,
        weights: list[Tensor],
        shadows: list[Tensor] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        options = dict(case.options if options is None else options)
        self.weights = [nn.Parameter(w.clone()) for w in weights]
        given: Any = [{"params": list(self.weights), **case.own}] if case.own else self.weights
        try:
            self.optimizer = case.Base(given, **options)
        except Exception as error:
            raise NotBuilt(f"{type(error).__name__}: {error}") from error
        self.at_first = self._numbers()
        for group in self.optimizer.param_groups:
            if "lr" not in options and "lr" in group:
                group["lr"] = _rate_like(group["lr"])
        self.params: list[Tensor] = list(self.weights)
        self.rule, self.reset = bare_step(case.Base), shadows is not None
        if shadows is not None:
            self._put(shadows)

    def _put(self, shadows: list[Tensor]) -> None:
        """Put shadows in place of the weights, with the state that a constructor may have made (Adagrad)."""
        self.params = [H.clone().requires_grad_() for H in shadows]
        state, per = self.optimizer.state, len(self.weights) // len(shadows)
        dim = self.weights[0].dim()
        for i, H in enumerate(self.params):
            held = [state.pop(p, {}) for p in self.weights[i * per : (i + 1) * per]]
            if held[0]:
                state[H] = {
                    k: torch.stack([h[k] for h in held])
                    if H.dim() > dim > 0 and torch.is_tensor(v) and v.dim() == dim
                    else v
                    for k, v in held[0].items()
                }
        self.optimizer.param_groups[0]["params"] = list(self.params)

    def step(self, *grads: Tensor) -> list[Tensor]:
        """The velocities of one step; shadows are 0 again after it."""
        before = [p.detach().clone() for p in self.params]
        for p, g in zip(self.params, grads, strict=True):
            p.grad = g.clone()
        with torch.no_grad():
            self.rule(self.optimizer)
        out = [p.detach() - b for p, b in zip(self.params, before, strict=True)]
        if self.reset:
            for p in self.params:
                p.data.zero_()
        return out

    def velocities(self, G: Tensor) -> Tensor:
        """One step with gradients (count, *shape); velocities likewise."""
        return self.step(G)[0] if len(self.params) == 1 else torch.stack(self.step(*G))

    def jump(self) -> None:
        """Set step counts to 9999, to see what a rule does late in a run, or only every so many steps."""
        (group,) = self.optimizer.param_groups
        for place in (group, *(self.optimizer.state[p] for p in self.params)):
            for key in ("step", "steps", "k"):
                value: Any = place.get(key)
                if torch.is_tensor(value):
                    value.fill_(9999)
                elif type(value) in (int, float):
                    place[key] = type(value)(9999)

    def _numbers(self) -> dict[str, float]:
        """The numbers kept outside the weights' states: in the group, on the optimizer, under string keys."""
        kept, state = {**vars(self.optimizer), **self.optimizer.param_groups[0]}, self.optimizer.state
        named: dict[Any, Any] = {k: v for k, v in state.items() if not isinstance(k, Tensor)}
        for key, value in named.items():
            kept |= {f"{key} {k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
        return {k: float(v) for k, v in kept.items() if _is_number(v)}

    def learned(self) -> dict[str, float]:
        """The numbers that have changed since the start and are not counts."""
        return {k: v for k, v in self._numbers().items() if self.at_first.get(k) != v and not v.is_integer()}


def same_numbers(a: dict[str, float], b: dict[str, float]) -> bool:
    """Whether they are equal to TOL."""
    return set(a) == set(b) and all(math.isclose(v, b[k], rel_tol=TOL, abs_tol=1e-30) for k, v in a.items())


def same_state(stack: Run, single: Run) -> bool:
    """Whether a stack's state is that of a single weight with one more dimension, numbers being shared."""
    ours, alone = stack.optimizer.state[stack.params[0]], single.optimizer.state[single.params[0]]
    if set(ours) != set(alone):
        return False
    for key, value in alone.items():
        other = ours[key]
        if _is_number(value):
            if not (_is_number(other) and same_numbers({"": float(value)}, {"": float(other)})):
                return False
        elif torch.is_tensor(value):
            if not torch.is_tensor(other) or other.shape != (len(stack.weights), *value.shape):
                return False
        elif _has_tensors(value):
            return False
    return same_numbers(stack.learned(), single.learned())


def _is_number(value: Any) -> bool:
    if torch.is_tensor(value):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float))


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, (list, tuple, set)):
        return any(map(_has_tensors, value))
    return torch.is_tensor(value) and value.dim() > 0


# -- options -------------------------------------------------------------------------------------------------


def to_be_tried(Base: type[Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    """The options with our learning rate in place of the user's `lr`, in the plainest implementation.

    A differentiable step is the same rule, but cannot be taken here; the lift's own step refuses it. So is a
    capturable one, which torch takes on accelerators alone, with `foreach` for rates that are tensors.
    """
    plain = ["differentiable"] + (["capturable", "foreach"] if options.get("capturable") else [])
    options = {k: False if v and k in plain else v for k, v in options.items()}
    p = inspect.signature(Base.__init__).parameters.get("lr")
    usual: Any = None if p is None or p.default is p.empty else p.default
    if "lr" not in options and usual is None:
        return options
    rate = _rate_like(options.get("lr", usual))
    if rate == RATE and _is_number(usual) and usual > RATE:  # step-size estimates are made for a rate of 1
        rate = rate * (usual / RATE)
    return {**options, "lr": rate}


def _rate_like(value: Any) -> Any:
    """Our rate in the form of the user's, a number or a tensor."""
    if torch.is_tensor(value):
        return torch.full_like(value, RATE)
    return RATE if is_option(value) else value


def is_option(value: Any) -> bool:
    """Whether the value is a plain number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def faint_decay(case: Case) -> dict[str, Any]:
    """The options with weight decay too small to have an effect; not 0, which some rules treat apart."""
    known, out = inspect.signature(case.Base.__init__).parameters, dict(case.options)
    for name in DECAYS:
        value = out.get(name, known[name].default if name in known else 0)
        if is_option(value) and value != 0:
            out[name] = 1e-12
    return out


def frozen(options: dict[str, Any]) -> tuple[Any, ...]:
    """Options as a key, without the learning rate: a schedule does not make a new rule."""
    return tuple((k, type(v), _hashable(v)) for k, v in sorted(options.items()) if k != "lr")


def _hashable(value: Any) -> Any:
    if torch.is_tensor(value):
        return repr(value.tolist()) if value.numel() <= 16 else repr(value.shape)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value  # the object, not its id, which a later object may reuse
