"""Which optimizers lift: a rule is tried where it is to run before it is trusted with a manifold.

Asked is, for each kind of weight in a group, with the group's options: is the rule on the shadow what it is
on the full matrix of g^hor, weight by weight? `laws` has the question in numbers. Sides above 128 are tried
in a smaller copy that is tall or wide as before; what grows with more entries than 2^16 is left to the look
that a step takes at its velocities (`left_ghor`). The learning rate is one of ours, and without an anchor
weight decay has no effect: a rule that it turns into another is refused.

With `stack=False` a weight has a shadow of its own shape, and a norm or mean over it is that of the N x n
tensor [A; B], in which A, skew, has every entry twice and B once.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from ghor._torch.precision import COMPUTE_DTYPE, full_precision
from ghor.lifting.param_groups import GROUP_KEYS
from ghor.lifting.probe.laws import ANOTHER, LAWS, NORMS, STATES, STILL
from ghor.lifting.probe.trial import SIDE, Case, NotBuilt, another_rate, our_rate
from ghor.spaces import Euclidean, Space, Sphere, Stiefel
from ghor.spaces.matrix import MatrixSpace

# torch's own that do not lift, and why. The laws would find all but ASGD.
REFUSED = {
    "ASGD": "it averages weights, in g^hor it would average velocities; use ghor.optim.SGD and torch.optim.swa_utils",
    "LBFGS": "its line search and curvature pairs compare gradients at different points; use ghor.optim.LBFGS",
    "SparseAdam": "its sparse gradients have no sparse representation in g^hor; use ghor.optim.Adam",
    "Adafactor": "it keeps row and column sums, which are not coordinates of g^hor; use ghor.optim.Adam",
}
TWO_MODES = (
    "it has a train and an eval mode: it steps on one sequence of weights and shows the mean of another, and in g^hor "
    "the weight is 0; use ghor.optim.AdamW with a schedule, or average with torch.optim.swa_utils and ghor.project"
)
NOT_BUILT = "it cannot be built from a list of parameters and these options"
STACKED = (NORMS, ANOTHER, STATES)  # laws that a weight with a shadow of its own may keep
NEEDS_MORE = {
    ("closure",): "a closure that it calls itself",
    ("create_graph", "hessian", "does not require grad", "grad_fn"): "second derivatives",
    ("first_step",): "two gradients, the second of them elsewhere",
}

_verdicts: WeakKeyDictionary[type[Optimizer], dict[Any, str | None]] = WeakKeyDictionary()


def given_options(Base: type[Optimizer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a constructor call gives beyond the parameters, by name."""
    try:
        bound = inspect.signature(Base.__init__).bind_partial(None, None, *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{Base.__name__}.__init__(): {error}") from None
    given = dict(list(bound.arguments.items())[2:])
    for p in bound.signature.parameters.values():
        if p.kind is p.VAR_KEYWORD:
            given |= given.pop(p.name, {})
    return given


def options_of(Base: type[Optimizer], given: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """The options that hold for a group: those given to the constructor, and the group's where it has its
    own."""
    known = set(list(inspect.signature(Base.__init__).parameters)[2:]) | set(given)
    return {**given, **{k: v for k, v in group.items() if k in known}}


def verify(
    Base: type[Optimizer],
    given: dict[str, Any],
    group: dict[str, Any],
    spaces: Sequence[Space],
    stack: bool = True,
    blocks: bool = False,
) -> None:
    """Raise ValueError, with the reason, where Base with what was `given` cannot be lifted on a weight of the
    group."""
    options = our_rate(Base, options_of(Base, given, group))
    own = {k: v for k, v in group.items() if k not in (*options, *GROUP_KEYS, "params", "param_names", "lr")}
    kinds: dict[Any, int] = {}
    for p, space in zip(group["params"], spaces, strict=True):
        if not isinstance(space, Euclidean):
            if not isinstance(
                space, MatrixSpace
            ):  # the laws are those of matrices: one of the same shape stands for it
                space = Sphere() if space.dims == 1 else Stiefel()
            shape = tuple(space.split(torch.empty(p.shape, device="meta")).shape)
            device = torch.device("cpu") if p.is_meta else p.device
            kind = space.one, shape, COMPUTE_DTYPE.get(p.dtype, p.dtype), device
            kinds[kind] = kinds.get(kind, 0) + 1
    for (space, shape, dtype, device), count in kinds.items():
        _refuse(
            Case(Base, options, space, shape, count, dtype, device, stack, blocks, own),
            f" (tried for weights of shape {shape} on {space})",
        )


def refuse_unless_it_lifts(
    Base: type[Optimizer], options: dict[str, Any], stack: bool = True, blocks: bool = False
) -> None:
    """`verify` before there are weights: on two of 6 x 4, orthonormal. What needs more to be built is tried
    then."""
    case = Case(
        Base,
        our_rate(Base, options),
        Stiefel(),
        (6, 4),
        dtype=torch.get_default_dtype(),
        stack=stack,
        blocks=blocks,
    )
    if not (_verdict(case) or "").startswith(NOT_BUILT):
        _refuse(case)


def _refuse(case: Case, where: str = "") -> None:
    reason = _verdict(case)
    if reason is not None:
        raise ValueError(f"{case.Base.__name__} cannot be lifted to manifolds: {reason}{where}")


def _verdict(case: Case) -> str | None:
    """Remembered by the class itself: another of its name, as the next cell of a notebook has it, is tried
    again."""
    known, key = _verdicts.setdefault(case.Base, {}), _key(case)
    if key not in known:
        known[key] = _reason_not_to_lift(case)
    return known[key]


def _key(case: Case) -> Any:
    small = case.within(4096, 2**16)
    return (
        small.space,
        small.shape,
        small.count,
        small.dtype,
        small.device,
        small.stack,
        small.blocks,
        frozen(case.options),
        frozen(case.own),
    )


def frozen(options: dict[str, Any]) -> tuple[Any, ...]:
    """Options as a key. Rates are ours by now, so a scheduler makes no new rule; objects are kept, not
    addresses."""
    return tuple((k, type(v), _hashable(v)) for k, v in sorted(options.items()) if k != "lr")


def _hashable(value: Any) -> Any:
    if torch.is_tensor(value):
        return repr(value.tolist()) if value.numel() <= 16 else repr(value.shape)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


@full_precision()
def _reason_not_to_lift(case: Case) -> str | None:
    """The first law that is broken, in words; None: it lifts."""
    Base = case.Base
    if Base.__module__.startswith("torch.optim") and Base.__name__ in REFUSED:
        return REFUSED[Base.__name__]
    if callable(getattr(Base, "train", None)) and callable(getattr(Base, "eval", None)):
        return TWO_MODES
    devices = [case.device] if case.device.type == "cuda" else []
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.enable_grad(), eager:
        if case.blocks:
            shape = case.space.size(case.shape)
            return _first_broken(replace(case, space=Stiefel(), shape=shape), "equivariant")
        reason = _first_broken(case, "elementwise" if case.stack else "one by one")
        if reason in STACKED and _first_broken(replace(case, stack=False), "one by one") is None:
            return f"{reason}; lift(..., stack=False) computes them one by one, if that is meant"
    return reason


def _first_broken(case: Case, kind: str) -> str | None:
    for law in LAWS[kind]:
        try:
            reason = law(case)
            if reason == STILL and (other := another_rate(case)) is not None:
                case = other
                reason = law(case)
        except Exception as error:
            return _could_not_be_tried(case, error)
        if reason is not None:
            return reason
    return None


def _could_not_be_tried(case: Case, error: Exception) -> str:
    if isinstance(error, NotBuilt):
        return f"{NOT_BUILT} ({error})"
    text = f"{type(error).__name__}: {error}"
    for words, what in NEEDS_MORE.items():
        if any(word in text.lower() for word in words):
            return f"its step needs {what}, and the lift gives it one gradient a step ({text}); use ghor.optim.Adam or SGD"
    small = case.within(SIDE, 4096)
    lead = (small.count,) if case.stack else ()
    alone = "" if not case.stack else "; lift(..., stack=False) gives it tensors of the shape of a weight"
    return f"it could not be tried on a tensor of shape {(*lead, *small.shape)} ({text}){alone}"


def left_ghor(Base: type[Optimizer], name: str, space: Space, W: Tensor, projected: Tensor) -> ValueError:
    """What to raise for the velocity W of a weight that is `not_in_ghor`: the law, and by how much."""
    off, size = float((W - projected).abs().max()), float(W.abs().max())
    return ValueError(
        f"the velocity that {Base.__name__} has for {name} is {off:.1e} off g^hor of {space}, and {size:.1e} in size: "
        "its block A must be skew, A + A* = 0 (0 on Grassmann), to machine precision. The rule is not elementwise on a "
        f"tensor of shape {tuple(W.shape)}; nothing was moved. Use a rule that is, such as ghor.optim.Adam"
    )
