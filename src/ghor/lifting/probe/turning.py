"""Which state tensors of a rule turn with a frame, found by trying the rule."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from ghor.lifting.param_groups import DECAYS
from ghor.lifting.probe.runs import CPU, Case, Run, frozen, shadow, to_be_tried
from ghor.spaces import Stiefel

_parities: WeakKeyDictionary[type[Optimizer], dict[Any, dict[str, str]]] = WeakKeyDictionary()


def parity(Base: type[Optimizer], options: dict[str, Any], only_vectors: bool = False) -> dict[str, str]:
    """Which state tensors of Base are vectors of g^hor and which are squares: {"exp_avg": "vector", ...}.

    A turning frame takes vectors along and leaves squares as they are. The rule is tried with gradients of
    both signs: vectors are odd, squares even. Raises ValueError for state that is neither, and for rules that
    subtract a vector's square from a square (RMSprop with centered=True), which give NaN when only one of the
    two turns; with `only_vectors` also for squares and for tensors of other shapes.
    """
    known, options = _parities.setdefault(Base, {}), to_be_tried(Base, options)
    key = frozen(options), only_vectors
    if key not in known:
        known[key] = _parity(Base, options, only_vectors)
    return known[key]


def vectors(Base: type[Optimizer], options: dict[str, Any], only_vectors: bool = False) -> set[str]:
    """The state tensors of Base that turn with a frame, among them those that it may get later.

    A momentum can be switched on between two steps, and a state may come from a run that had one: the rule is
    also tried with each of its numbers that is 0, weight decay apart, set to 1/2.
    """
    kinds = parity(Base, options, only_vectors)
    for key, value in options.items():
        several = isinstance(value, (tuple, list))
        numbers = value if several else (value,)
        if key == "lr" or key in DECAYS or not any(map(_is_zero, numbers)):
            continue
        new = [
            (torch.full_like(x, 0.5) if torch.is_tensor(x) else 0.5) if _is_zero(x) else x for x in numbers
        ]
        with suppress(Exception):  # not every rule can be built so
            kinds = parity(Base, {**options, key: tuple(new) if several else new[0]}, only_vectors) | kinds
    return {key for key, kind in kinds.items() if kind == "vector"}


def _parity(Base: type[Optimizer], options: dict[str, Any], only_vectors: bool) -> dict[str, str]:
    """Compare the state after gradients g with that after -g, then turn its vectors."""

    def refuse(why: str) -> ValueError:
        return ValueError(f"{Base.__name__} {why}; use section='transported'")

    generator = torch.Generator().manual_seed(1)
    g, Q = (torch.randn(6, n, generator=generator, dtype=torch.float64, device=CPU) for n in (5, 6))
    case = Case(Base, options, Stiefel(), (6, 5), dtype=torch.float64)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        run, other = (Run(case, [shadow(case)], [shadow(case)]) for _ in range(2))
        for t in range(8):
            run.step(g * (1 + 0.01 * t))
            other.step(-g * (1 + 0.01 * t))
        (p,), (q,) = run.params, other.params
        state = {k: v for k, v in run.optimizer.state[p].items() if torch.is_tensor(v) and v.dim()}
        kinds = {}
        for key, value in state.items():
            if value.shape == p.shape:
                twin = other.optimizer.state[q][key]
                kinds[key] = "vector" if _close(value, -twin) else "square" if _close(value, twin) else ""
                if not kinds[key]:
                    raise refuse(
                        f"has a state {key!r} that is neither odd nor even in the gradient, so it cannot be "
                        "taken to another frame"
                    )
            if only_vectors and kinds.get(key) != "vector":
                raise refuse(
                    f"keeps {key!r}, which is not a vector of g^hor and cannot be taken to another frame"
                )
        vectors = [state[key] for key, kind in kinds.items() if kind == "vector"]
        for v in vectors:
            v.neg_()
        # With its vectors negated, the state must be as good as that after -g.
        if not _close(run.step(-g)[0], other.step(-g)[0]):
            raise refuse(
                "keeps vectors that are not state tensors of the weight's shape, so they cannot be taken to "
                "another frame"
            )
        for key, kind in kinds.items():
            if kind == "vector":
                v = run.optimizer.state[p][key]
                v.copy_(torch.linalg.qr(Q)[0].to(v.dtype) @ v)
        if not bool(torch.isfinite(run.step(-g)[0]).all()):
            raise refuse(
                "with these options subtracts the square of a first moment from a second one, which goes "
                "wrong where only one of them turns with the frame"
            )
    return kinds


def _is_zero(value: Any) -> bool:
    """Whether an option is the number 0, or a tensor that holds it, as rules may read one."""
    if torch.is_tensor(value):
        return value.numel() == 1 and value.is_floating_point() and bool(value == 0)
    return type(value) in (int, float) and value == 0


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-6 * (float(a.abs().max()) or 1.0))
