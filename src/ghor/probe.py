"""Which optimizers lift: a rule is tried on numbers before it is trusted with a manifold.

g^hor is stored by its first columns [A; B], A = -A*: entries that are copies of one another up to sign, on a weight
that is 0 before every step, several weights in one tensor. A rule keeps that space and means there what it means
elsewhere when its velocity is

    odd             velocity(-g) = -velocity(g)
    elementwise     up to a permutation of the entries of a weight
    shift-free      the same from 0, put back to 0 after every step, as from any other weight that goes on
    stackable       of two weights in one tensor what it is of each alone

The gradients keep their signs and are orthogonal to the weight, row by row: step-size estimates show themselves in the
former case after some dozen steps, and some rules look at the weight only in the latter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _use_grad_for_differentiable

STEPS = 40

# torch's own that do not lift, and why. The probe would find all but ASGD.
REFUSED = {
    "ASGD": "it averages weights, in g^hor it would average velocities; use ghor.optim.SGD and torch.optim.swa_utils",
    "LBFGS": "its line search and curvature pairs compare gradients at different points; use ghor.optim.Adam or SGD",
    "SparseAdam": "its sparse gradients have no sparse representation in g^hor; use ghor.optim.Adam",
    "Adafactor": "it keeps row and column sums, which are not coordinates of g^hor; use ghor.optim.Adam",
    "Muon": "it orthogonalises the update as a matrix, which leaves g^hor; use ghor.optim.Adam or SGD",
}

_reasons: dict[str, str | None] = {}
_parities: dict[str, dict[str, str]] = {}


def bare_step(Base: type[Optimizer], differentiable: bool = True) -> Callable[..., Any]:
    """Base.step without the hooks that torch puts around it: they fire around the lifted step, and only there.

    Where the step is not `differentiable`, also without the wrapper by which torch's own steps turn gradients off: it
    breaks a compiled graph in two, on purpose, and the lifted step has turned them off already.
    """
    step: Any = Base.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return step.__wrapped__ if not differentiable and getattr(step, "__code__", None) is _NO_GRAD else step


_NO_GRAD = _use_grad_for_differentiable(lambda: None).__code__


def given_options(Base: type[Optimizer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a constructor call gives beyond the parameters, by name."""
    bound = inspect.signature(Base.__init__).bind_partial(None, None, *args, **kwargs)
    given = dict(list(bound.arguments.items())[2:])
    for p in bound.signature.parameters.values():
        if p.kind is p.VAR_KEYWORD:
            given |= given.pop(p.name, {})
    return given


def options_of(Base: type[Optimizer], given: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """The options that hold for a group: those given to the constructor, and the group's where it has its own."""
    known = set(list(inspect.signature(Base.__init__).parameters)[2:]) | set(given)
    return {**given, **{k: v for k, v in group.items() if k in known}}


def refuse_unless_it_lifts(Base: type[Optimizer], options: dict[str, Any], stack: bool = True) -> None:
    """Raise ValueError, with the reason, where Base(params, **options) cannot be lifted."""
    key = f"{_identity(Base, options)} {stack}"
    if key not in _reasons:
        _reasons[key] = _reason_not_to_lift(Base, options, stack)
    if _reasons[key] is not None:
        raise ValueError(f"{Base.__name__} cannot be lifted to manifolds: {_reasons[key]}")


def _identity(Base: type[Optimizer], options: dict[str, Any]) -> str:
    """A key for what was tried: a learning rate that a scheduler changes makes no new rule."""
    return f"{Base.__module__}.{Base.__qualname__} {sorted((k, v) for k, v in options.items() if k != 'lr')}"


def _reason_not_to_lift(Base: type[Optimizer], options: dict[str, Any], stack: bool) -> str | None:
    if Base.__module__.startswith("torch.optim") and Base.__name__ in REFUSED:
        return REFUSED[Base.__name__]
    for name in ("weight_decay", "lambd"):  # decay multiplies H = 0: it does not count
        if name in inspect.signature(Base.__init__).parameters:
            options = {**options, name: 0.0}
    generator = torch.Generator().manual_seed(0)
    shape = (1, 6, 5)
    start = torch.randn(shape, generator=generator, dtype=torch.float64)
    g = 1 + 0.3 * torch.randn(STEPS, *shape, generator=generator, dtype=torch.float64)
    g = g - (g * start).sum(-1, keepdim=True) / (start * start).sum(-1, keepdim=True) * start
    sizes = torch.tensor([1.0, 4.0, 0.25, 2.0, 0.5, 8.0, 1.0], dtype=torch.float64)  # rules that clip or average norms
    sizes = sizes.repeat(STEPS)[:STEPS].view(-1, 1, 1, 1)
    g, h = sizes * g, 10 * sizes.flip(0) * g.flip(0)
    signs = torch.where(torch.rand(30, generator=generator) < 0.5, -1.0, 1.0).double()
    perm = torch.randperm(30, generator=generator)

    def mix(x: Tensor) -> Tensor:
        return (x.flatten(1)[:, perm] * signs.to(x.dtype)).view(x.shape)

    tol, failure = 1e-6, ""
    for dtype in (torch.float64, torch.float32):
        g, h, start = g.to(dtype), h.to(dtype), start.to(dtype)
        try:
            with torch.random.fork_rng(devices=[]):
                plain = _velocities(Base, options, g, 0 * start, reset=True)
                mixed = _velocities(Base, options, mix(g), 0 * start, reset=True)
                shifted = _velocities(Base, options, g, start, reset=False)
                other = _velocities(Base, options, h, 0 * start, reset=True)
                both = _velocities(Base, options, torch.cat([g, h], 1), torch.cat([0 * start, 0 * start]), reset=True)
            break
        except Exception as error:
            tol, failure = 1e-4, f"it could not be tried on a 6 x 5 weight ({type(error).__name__}: {error})"
    else:
        return failure
    if not bool(torch.isfinite(plain).all()):
        return "its velocity from the weight 0 is not finite"
    if not bool(plain.any()):
        return "it does not move a weight that is 0, as weights are in g^hor before every step"
    if not _close(mix(plain), mixed, tol):
        return "its update is not odd and elementwise in the gradient, so it does not keep g^hor"
    if not _close(plain, shifted, tol):
        return "its update depends on the value of the weight, or keeps a copy of it, and in g^hor the weight is 0"
    if stack and not _close(torch.cat([plain, other], 1), both, tol):
        return (
            "its update takes a norm or mean over the whole tensor, and weights of one shape are computed as one "
            "tensor; if that number is meant for each weight, lift(..., stack=False) computes them one by one"
        )
    return None


def _velocities(Base: type[Optimizer], options: dict[str, Any], g: Tensor, start: Tensor, reset: bool) -> Tensor:
    p = torch.nn.Parameter(start.clone())
    optimizer = Base([p], **options)
    step, out = bare_step(Base), []
    for grad in g:
        before, p.grad = p.detach().clone(), grad.clone()
        step(optimizer)
        out.append(p.detach() - before)
        if reset:
            p.data.zero_()
    return torch.stack(out)


def _close(a: Tensor, b: Tensor, tol: float = 1e-6) -> bool:
    scale = float(a.abs().max()) or 1.0
    return bool((a - b).abs().max() <= tol * scale)


def parity(Base: type[Optimizer], options: dict[str, Any]) -> dict[str, str]:
    """Which state tensors of Base are vectors of g^hor and which are squares: {"exp_avg": "vector", ...}.

    A frame that turns takes vectors along and leaves squares. Tried with gradients of both signs. Raises ValueError for
    state that is neither, and for rules that subtract a vector's square from a square (RMSprop's centered form), which
    go NaN when only one of the two turns.
    """
    key = _identity(Base, options)
    if key not in _parities:
        _parities[key] = _parity(Base, options)
    return _parities[key]


def _parity(Base: type[Optimizer], options: dict[str, Any]) -> dict[str, str]:
    generator = torch.Generator().manual_seed(1)
    g = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    step, states = bare_step(Base), []
    for sign in (1.0, -1.0):
        p = torch.nn.Parameter(torch.zeros(6, 5, dtype=torch.float64))
        with torch.random.fork_rng(devices=[]):
            optimizer = Base([p], **options)
            for k in range(8):
                p.grad = sign * g * (1 + 0.01 * k)
                step(optimizer)
                p.data.zero_()
        state = optimizer.state[p]
        states.append({k: v.clone() for k, v in state.items() if torch.is_tensor(v) and v.shape == p.shape})
    kinds = {}
    for k, a in states[0].items():
        b = states[1][k]
        kinds[k] = "vector" if _close(a, -b) else "square" if _close(a, b) else "neither"
        if kinds[k] == "neither":
            raise ValueError(
                f"{Base.__name__} has a state {k!r} that is neither odd nor even in the gradient, so it cannot be "
                "taken to another frame; use section='transported'"
            )
    Q = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    for k, kind in kinds.items():
        if kind == "vector":
            state[k].copy_(Q @ state[k])
    p.grad = -g
    step(optimizer)
    if not bool(torch.isfinite(p).all()):
        raise ValueError(
            f"{Base.__name__} with these options subtracts the square of a first moment from a second one, which goes "
            "wrong where only one of them turns with the frame; use section='transported'"
        )
    return kinds
