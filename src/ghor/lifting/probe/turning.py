"""How the state of a rule turns with a frame: found by trying."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from ghor._torch.bare_step import bare_step
from ghor.lifting.probe.trial import our_rate
from ghor.lifting.probe.verdict import frozen

_parities: WeakKeyDictionary[type[Optimizer], dict[Any, dict[str, str]]] = WeakKeyDictionary()


def parity(Base: type[Optimizer], options: dict[str, Any], only_vectors: bool = False) -> dict[str, str]:
    """Which state tensors of Base are vectors of g^hor and which are squares: {"exp_avg": "vector", ...}.

    A frame that turns takes vectors along and leaves squares. Tried with gradients of both signs. Raises
    ValueError for state that is neither, and for rules that subtract a vector's square from a square
    (RMSprop's centered form), which go NaN when only one of the two turns. With `only_vectors` also for
    squares and for tensors of other shapes.
    """
    known, options = _parities.setdefault(Base, {}), our_rate(Base, options)
    key = frozen(options), only_vectors
    if key not in known:
        known[key] = _parity(Base, options, only_vectors)
    return known[key]


def _parity(Base: type[Optimizer], options: dict[str, Any], only_vectors: bool) -> dict[str, str]:
    """The state after gradients g, and after -g; then whether what turns is all that has to."""
    generator = torch.Generator().manual_seed(1)
    g = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        runs = [_run(Base, options, sign * g) for sign in (1.0, -1.0)]
        kinds = {}
        for k, a in _tensors(*runs[0]).items():
            b = _tensors(*runs[1])[k]
            kinds[k] = "vector" if _close(a, -b) else "square" if _close(a, b) else "neither"
            if kinds[k] == "neither":
                raise ValueError(
                    f"{Base.__name__} has a state {k!r} that is neither odd nor even in the gradient, so it cannot be "
                    "taken to another frame; use section='transported'"
                )
        optimizer, p = runs[0]
        held = [
            k
            for k, v in optimizer.state[p].items()
            if torch.is_tensor(v) and v.dim() and kinds.get(k) != "vector"
        ]
        if only_vectors and held:
            raise ValueError(
                f"{Base.__name__} keeps {held[0]!r}, which is no vector of g^hor and cannot be taken to another frame; "
                "use section='transported'"
            )
        _turn_all(Base, runs, kinds, g)
        _turn_some(Base, runs[0], kinds, g, generator)
    return kinds


def _run(Base: type[Optimizer], options: dict[str, Any], g: Tensor) -> tuple[Optimizer, Tensor]:
    p = torch.nn.Parameter(torch.zeros_like(g))
    optimizer = Base([p], **options)
    for k in range(8):
        _step(optimizer, p, g * (1 + 0.01 * k))
    return optimizer, p


def _step(optimizer: Optimizer, p: Tensor, g: Tensor) -> Tensor:
    p.grad = g.clone()
    bare_step(type(optimizer))(optimizer)
    V = p.detach().clone()
    p.data.zero_()
    return V


def _tensors(optimizer: Optimizer, p: Tensor) -> dict[str, Tensor]:
    return {k: v for k, v in optimizer.state[p].items() if torch.is_tensor(v) and v.shape == p.shape}


def _turn_all(
    Base: type[Optimizer], runs: list[tuple[Optimizer, Tensor]], kinds: dict[str, str], g: Tensor
) -> None:
    """With vectors turned over, the state after g must be as good as that after -g: else a vector is kept
    elsewhere."""
    (optimizer, p), (other, q) = runs
    for k, v in _tensors(optimizer, p).items():
        v.mul_(-1 if kinds[k] == "vector" else 1)
    if not _close(_step(optimizer, p, -g), _step(other, q, -g)):
        raise ValueError(
            f"{Base.__name__} keeps vectors that are not state tensors of the weight's shape, so they cannot be "
            "taken to another frame; use section='transported'"
        )


def _turn_some(
    Base: type[Optimizer],
    run: tuple[Optimizer, Tensor],
    kinds: dict[str, str],
    g: Tensor,
    generator: torch.Generator,
) -> None:
    """With vectors turned and squares as they are, the next step is finite."""
    optimizer, p = run
    Q = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    for k, v in _tensors(optimizer, p).items():
        if kinds[k] == "vector":
            v.copy_(Q.to(v.dtype) @ v)
    if not bool(torch.isfinite(_step(optimizer, p, -g)).all()):
        raise ValueError(
            f"{Base.__name__} with these options subtracts the square of a first moment from a second one, which goes "
            "wrong where only one of them turns with the frame; use section='transported'"
        )


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-6 * (float(a.abs().max()) or 1.0))
