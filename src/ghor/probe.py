"""Which optimizers lift: a rule is tried on numbers before it is trusted with a manifold.

g^hor is stored by its first columns [A; B], A = -A*: entries that are copies of one another up to sign, on a weight
that is 0 before every step. A rule keeps that space and means on it what it means on the full matrix when it is

    odd             velocity(-g) = -velocity(g)
    elementwise     up to a permutation of the entries
    shift-free      the same from 0, put back to 0 after every step, as from any other weight that goes on

The probe takes eight steps with random gradients; eight, so that rules which act every k steps (look-ahead, warm-up)
show themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

STEPS = 8

# What torch's own optimizers need no probe for, and why those that do not lift do not.
REFUSED = {
    "ASGD": "it averages weights, in g^hor it would average velocities; use ghor.optim.SGD and torch.optim.swa_utils",
    "LBFGS": "its line search and curvature pairs compare gradients at different points; use ghor.optim.Adam or SGD",
    "SparseAdam": "its sparse gradients have no sparse representation in g^hor; use ghor.optim.Adam",
    "Adafactor": "it keeps row and column sums, which are not coordinates of g^hor; use ghor.optim.Adam",
    "Muon": "it orthogonalises the update as a matrix, which leaves g^hor; use ghor.optim.Adam or SGD",
}


def bare_step(Base: type[Optimizer]) -> Callable[..., Any]:
    """Base.step without the hooks that torch puts around it: they fire around the lifted step, and only there."""
    step = Base.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def reason_not_to_lift(Base: type[Optimizer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why Base(params, *args, **kwargs) cannot be lifted; None where it can."""
    if Base.__module__.startswith("torch.optim") and Base.__name__ in REFUSED:
        return REFUSED[Base.__name__]
    if "weight_decay" in inspect.signature(Base.__init__).parameters:  # decay multiplies H = 0: it does not count
        kwargs = {**kwargs, "weight_decay": 0.0}
    generator = torch.Generator().manual_seed(0)
    shape = (6, 5)
    g = torch.randn(STEPS, *shape, generator=generator, dtype=torch.float64)
    start = torch.randn(shape, generator=generator, dtype=torch.float64)
    # Gradients orthogonal to the weight, row by row: some rules (AdamP) look at the weight only then.
    g = g - (g * start).sum(-1, keepdim=True) / (start * start).sum(-1, keepdim=True) * start
    signs = torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0).double().flatten()
    perm = torch.randperm(30, generator=generator)

    def mix(x: Tensor) -> Tensor:
        return (x.flatten()[perm] * signs).view(shape)

    try:
        with torch.random.fork_rng(devices=[]):
            plain = _velocities(Base, args, kwargs, g, torch.zeros(shape), reset=True)
            mixed = _velocities(Base, args, kwargs, torch.stack([mix(x) for x in g]), torch.zeros(shape), reset=True)
            shifted = _velocities(Base, args, kwargs, g, start, reset=False)
    except Exception as error:
        return f"it could not be tried on a 6 x 5 tensor ({type(error).__name__}: {error})"
    if not bool(torch.isfinite(plain).all()):
        return "its velocity from the weight 0 is not finite"
    if not _close(torch.stack([mix(x) for x in plain]), mixed):
        return "its update is not odd and elementwise in the gradient, so it does not keep g^hor"
    if not _close(plain, shifted):
        return (
            "its update depends on the value of the weight, or keeps a copy of it, and in g^hor that value is always 0"
        )
    return None


def parity(Base: type[Optimizer], options: dict[str, Any]) -> dict[str, str]:
    """Which state tensors of Base are vectors of g^hor and which are squares: {"exp_avg": "vector", ...}.

    A frame that turns takes vectors along and leaves squares; tried with gradients of both signs. Raises ValueError for
    state that is neither, and for rules that subtract a vector's square from a square (RMSprop's centered form), which
    go NaN when only one of the two turns.
    """
    key = f"{Base.__module__}.{Base.__qualname__} {sorted(options.items())}"
    if key not in _parities:
        _parities[key] = _parity(Base, options)
    return _parities[key]


_parities: dict[str, dict[str, str]] = {}


def _parity(Base: type[Optimizer], options: dict[str, Any]) -> dict[str, str]:
    known = inspect.signature(Base.__init__).parameters
    kwargs = {k: v for k, v in options.items() if k in known and k != "params"}
    generator = torch.Generator().manual_seed(1)
    g = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    step, states, finite = bare_step(Base), [], True
    for sign in (1.0, -1.0):
        p = torch.nn.Parameter(torch.zeros(6, 5, dtype=torch.float64))
        with torch.random.fork_rng(devices=[]):
            optimizer = Base([p], **kwargs)
            for k in range(STEPS):
                p.grad = sign * g * (1 + 0.01 * k)
                step(optimizer)
                p.data.zero_()
        states.append(
            {k: v.clone() for k, v in optimizer.state[p].items() if torch.is_tensor(v) and v.shape == p.shape}
        )
    kinds = {}
    for k, a in states[0].items():
        b = states[1][k]
        kinds[k] = "vector" if _close(a, -b) else "square" if _close(a, b) else "neither"
        if kinds[k] == "neither":
            raise ValueError(
                f"{Base.__name__}: its state {k!r} is neither odd nor even in the gradient, so it cannot be taken "
                "to another frame; use section='transported'"
            )
    Q = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    for k, kind in kinds.items():
        if kind == "vector":
            optimizer.state[p][k].copy_(Q @ optimizer.state[p][k])
    p.grad = -g
    step(optimizer)
    finite = bool(torch.isfinite(p).all())
    if not finite:
        raise ValueError(
            f"{Base.__name__} subtracts the square of a first moment from a second one, which goes wrong where only "
            "one of them turns with the frame; use section='transported'"
        )
    return kinds


def _velocities(
    Base: type[Optimizer], args: tuple[Any, ...], kwargs: dict[str, Any], g: Tensor, start: Tensor, reset: bool
) -> Tensor:
    p = torch.nn.Parameter(start.double().clone())
    optimizer = Base([p], *args, **kwargs)
    step, out = bare_step(Base), []
    for grad in g:
        before, p.grad = p.detach().clone(), grad.clone()
        step(optimizer)
        out.append(p.detach() - before)
        if reset:
            p.data.zero_()
    return torch.stack(out)


def _close(a: Tensor, b: Tensor) -> bool:
    scale = float(a.abs().max()) or 1.0
    return bool((a - b).abs().max() <= 1e-6 * scale)
