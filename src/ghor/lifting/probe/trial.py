"""An optimizer tried on tensors of ours, as it is and as the lift runs it."""

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

STEPS = 40
# of the largest velocity: rules that compute in float32 inside keep a law to 1e-6, broken laws show in 1e-3
TOL = 2e-5
RATE = 0.1  # ours: the user's may be 0, and beside a weight of order one a velocity of 1e-3 has few digits
SIDE, ENTRIES = 128, 2**16  # of full matrices, and of a stack: larger ones are tried in a smaller copy
CPU = torch.device("cpu")
SIZES = (1.0, 4.0, 0.25, 2.0, 0.5, 8.0, 1.0)  # over time: rules that clip or average norms


@dataclass(frozen=True)
class Case:
    """What is to be lifted, and where it is to run: `count` weights of one shape, on one space."""

    Base: type[Optimizer]
    options: dict[str, Any] = field(hash=False)
    space: Space
    shape: tuple[int, ...]
    count: int = 2
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    stack: bool = True
    blocks: bool = False
    own: dict[str, Any] = field(
        default_factory=dict, hash=False
    )  # keys of the group that the constructor does not know

    def within(self, side: int, entries: int) -> Case:
        """The same with sides of at most `side`, tall or wide as before, and about `entries` in all.

        Two weights or more in a stack, their number a power of 2.
        """
        shape = _shrunk(self.space, self.shape, side)
        while math.prod(shape) > entries and side > 8:
            side //= 2
            shape = _shrunk(self.space, self.shape, side)
        most = max(2, entries // math.prod(shape))
        count = min(1 << (max(2, self.count) - 1).bit_length(), 1 << (most.bit_length() - 1))
        return replace(self, shape=shape, count=count)


def _shrunk(space: Space, shape: tuple[int, ...], side: int) -> tuple[int, ...]:
    """Rows and columns of at most `side`; what was the longer stays the longer."""
    k = space.flatten
    out = [min(b, 3) for b in shape[: -1 - k]] + list(shape[-1 - k :])
    if len(shape) <= k:  # vectors
        out = list(shape)
    rows, columns = (out[-1 - k] if len(out) > k else 1), math.prod(out[-k:])
    if rows != columns:
        short = side - max(2, side // 16)
        most = (short, side) if rows < columns else (side, short)
    else:
        most = (side, side)
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


# -- trials ------------------------------------------------------------------------------------------------


class Trial:
    """Base on weights of ours, or, as the lift has it, on `shadows` put in their place; `step` gives
    velocities."""

    def __init__(
        self,
        case: Case,
        weights: list[Tensor],
        shadows: list[Tensor] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        Base, options = case.Base, dict(case.options if options is None else options)
        self.weights = [nn.Parameter(w.clone()) for w in weights]
        try:
            self.optimizer = Base(
                [{"params": list(self.weights), **case.own}] if case.own else self.weights, **options
            )
        except Exception as error:
            raise NotBuilt(f"{type(error).__name__}: {error}") from error
        self.born = self._numbers()
        for group in self.optimizer.param_groups:
            if "lr" not in options and "lr" in group:
                group["lr"] = _rate_like(group["lr"])
        self.params: list[Tensor] = list(self.weights)
        self.rule, self.reset = bare_step(Base), shadows is not None
        if shadows is not None:
            self._put(shadows)

    def _put(self, shadows: list[Tensor]) -> None:
        self.params = [H.clone().requires_grad_() for H in shadows]
        state, per = self.optimizer.state, len(self.weights) // len(shadows)
        for i, H in enumerate(self.params):
            own = [state.pop(p, {}) for p in self.weights[i * per : (i + 1) * per]]
            if own[0]:  # made by the constructor, as Adagrad's
                alike = H.dim() > self.weights[0].dim()
                state[H] = {k: torch.stack([s[k] for s in own]) if alike and _is_like(v, self.weights[0]) else v
                            for k, v in own[0].items()}  # fmt: skip
        self.optimizer.param_groups[0]["params"] = list(self.params)

    def step(self, *grads: Tensor) -> list[Tensor]:
        """One step of the rule; shadows are 0 again after it."""
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

    def jump(self) -> None:
        """Step counts to a round number: for what a rule does late, or every so many steps."""
        (group,) = self.optimizer.param_groups
        for place in (group, *(self.optimizer.state[p] for p in self.params)):
            for key in ("step", "steps", "k"):
                value: Any = place.get(key)
                if torch.is_tensor(value):
                    value.fill_(9999)
                elif type(value) in (int, float):
                    place[key] = type(value)(9999)

    def _numbers(self) -> dict[str, float]:
        """What is kept beside the states of the weights: in the group, in the optimizer."""
        kept = {**vars(self.optimizer), **self.optimizer.param_groups[0]}
        loose: dict[Any, Any] = self.optimizer.state  # state of no weight
        for key, value in loose.items():
            if isinstance(key, str):
                kept |= (
                    {f"{key} {k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
                )
        return {k: float(v) for k, v in kept.items() if _is_number(v)}

    def learned(self) -> dict[str, float]:
        """Of those, the ones that have changed and are no counts."""
        return {k: v for k, v in self._numbers().items() if self.born.get(k) != v and not v.is_integer()}


def _is_number(value: Any) -> bool:
    if torch.is_tensor(value):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float))


def same_numbers(a: dict[str, float], b: dict[str, float]) -> bool:
    """Equal, to TOL."""
    return set(a) == set(b) and all(math.isclose(v, b[k], rel_tol=TOL, abs_tol=1e-30) for k, v in a.items())


def same_state(stack: Trial, single: Trial) -> bool:
    """Whether the state of a stack is, for its first weight, what that has alone, and numbers that all
    share."""
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


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, (list, tuple, set)):
        return any(map(_has_tensors, value))
    return torch.is_tensor(value) and value.dim() > 0


def _is_like(value: Any, weight: Tensor) -> bool:
    return torch.is_tensor(value) and value.dim() == weight.dim() > 0


def shadow(case: Case, *lead: int) -> Tensor:
    """The shadow of weights: 0, of their shape after `lead`."""
    return torch.zeros((*lead, *case.shape), dtype=case.dtype, device=case.device)


def point(case: Case) -> Tensor:
    """A weight: entries of the size they have on an orthogonal space."""
    generator = torch.Generator().manual_seed(2)
    X = torch.randn(case.shape, generator=generator, dtype=torch.float64)
    return (X / math.sqrt(max(case.space.size(case.shape)))).to(case.device, case.dtype)


def gradients(case: Case, lead: tuple[int, ...], steps: int = STEPS) -> Iterator[Tensor]:
    """Gradients (*lead, *shape): a part that stays, large and small entries, and noise; of many sizes over
    time."""
    generator = torch.Generator().manual_seed(0)
    shape = (*lead, *case.shape)
    steady = torch.randn(shape, generator=generator, dtype=torch.float64)
    for t in range(steps):
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        yield (SIZES[t % len(SIZES)] * (steady + 0.3 * noise)).to(case.device, case.dtype)


class NotBuilt(Exception):
    """Base(params, **options) raises."""


class Differs(Exception):
    """Two velocities that should be equal are not."""


def compare(a: Tensor, b: Tensor, scale: float, noise: float = 0.0, tol: float = TOL) -> float:
    """Raise Differs unless a = b to `tol` of the largest entry so far, and `noise`; returns that entry."""
    scale = max(scale, float(a.abs().max()), float(b.abs().max()))
    if not bool(((a - b).abs() <= tol * scale + noise).all()):
        raise Differs
    return scale


# -- options -----------------------------------------------------------------------------------------------


def _rate_like(value: Any) -> Any:
    """Our rate in the form of the user's; what is no number stays."""
    if torch.is_tensor(value):
        return torch.full_like(value, RATE)
    return RATE if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def our_rate(Base: type[Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    """The options with a learning rate of our own, where there is one by that name."""
    p = inspect.signature(Base.__init__).parameters.get("lr")
    if "lr" not in options and (p is None or p.default is p.empty):
        return options
    usual: Any = p.default if p is not None and p.default is not p.empty else None
    rate = _rate_like(options.get("lr", usual))
    if rate == RATE and _is_number(usual) and usual > RATE:  # step-size estimates are made for a rate of 1
        rate = rate * (usual / RATE)
    return {**options, "lr": rate}


def faint_decay(Base: type[Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    """The options with any weight decay so small that it is none: still a decay for rules that ask whether
    there is."""
    known, out = inspect.signature(Base.__init__).parameters, dict(options)
    for name in DECAYS:
        value = options.get(name, known[name].default if name in known else 0)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value != 0:
            out[name] = 1e-12
    return out


def another_rate(case: Case) -> Case | None:
    """The case with an option that is 0 set to our rate, where that makes the rule move: a rate by another
    name."""
    for name, value in case.options.items():
        if (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and value == 0
            and name not in DECAYS
        ):
            other = replace(case, options={**case.options, name: RATE})
            trial = Trial(other, [shadow(case)], [shadow(case)])
            if any(bool(trial.step(g)[0].any()) for g in gradients(other, (), 3)):
                return other
    return None
