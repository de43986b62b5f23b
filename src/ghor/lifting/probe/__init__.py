"""Which optimizers lift: each rule is tried on test tensors before it is trusted with a manifold.

A *rule* is the update of an optimizer, from gradients to velocities. The lift gives it the shadows of
weights, which are 0 before every step, and weights of one shape as one tensor. One law decides whether it is
still the same rule there:

    the rule moves a weight in the stack, up to a signed permutation of all entries, as it moves that weight
    alone, started at a generic point and never reset.

A rule that obeys it is odd and elementwise, so it keeps g^hor (whose full matrix [[A, -B*], [B, 0]] repeats
the entries of [A; B] up to sign and conjugation); it does not depend on the value of the weight; and it does
not mix weights. If the law is broken, the three changes (entries permuted, a generic point, alone) are tried
one at a time, to tell which of them makes the difference. In addition, vectors in g^hor must have velocities
in g^hor to the last digits, and the state of a stack must split into states of single weights.

Matrix rules (`lift(..., blocks=True)`) obey another law: velocity(O X P) = O velocity(X) P for rotations O
and P.

Large weights are tried as smaller ones, tall or wide as before; effects that need more than 2^16 entries are
left to the check of velocities during steps (`left_ghor`). The learning rate is our own. With `stack=False`
a weight has a shadow of its own shape: a norm or mean over it is that of the N x n tensor [A; B], in which
the skew A has every entry twice and B once.
"""

from __future__ import annotations

import inspect
import math
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
from ghor.lifting.param_groups import DECAYS, GROUP_KEYS
from ghor.lifting.probe.runs import (
    CPU,
    ENTRIES,
    RATE,
    STEPS,
    TOL,
    Case,
    NotBuilt,
    Run,
    faint_decay,
    gradients,
    is_option,
    orthogonal,
    point,
    same_numbers,
    same_state,
    shadow,
    to_be_tried,
)
from ghor.lifting.probe.turning import parity, vectors
from ghor.spaces import Euclidean, Space, Stiefel

__all__ = [
    "REFUSED",
    "given_options",
    "left_ghor",
    "not_in_ghor",
    "options_of",
    "parity",
    "refuse_unless_it_lifts",
    "vectors",
    "verify",
]

SIDE, SMALL = 128, 2**12  # the most rows or columns, and entries, of the stack tried over many steps

NOT_ELEMENTWISE = "its update is not odd and elementwise in the gradient, so it does not keep g^hor"
DEPENDS = "its update depends on the value of the weight, or keeps a copy of it, and in g^hor the weight is 0"
NOT_FINITE = "its velocity from the weight 0 is not finite"
STILL = "it does not move a weight that is 0, as weights are in g^hor before every step"
OWN_LIST = "it moves tensors of a list of its own, not those in its param_groups, where the lift puts g^hor"
AS_ONE = "weights of one shape are computed as one tensor"
NORMS = f"its update takes a norm or mean over the whole tensor, and {AS_ONE}"
ANOTHER = f"{AS_ONE} with one dimension more, on which it is another rule than on each of them"
STATES = f"it keeps state that cannot be told apart by weights, and {AS_ONE}"
GROUPED = "its update of a weight depends on the other weights, beside which it may not be in g^hor"
DECAYED = (
    "its weight decay changes the velocity, not the weight alone; give these weights a group with "
    "weight_decay=0"
)
NOT_TURNING = (
    "its update does not turn with the gradient, velocity(O B) = O velocity(B), so it depends on the section"
)
TWO_MODES = (
    "it has a train and an eval mode: it steps on one sequence of weights and shows the mean of another, and "
    "in g^hor the weight is 0; use ghor.optim.AdamW with a schedule, or average with torch.optim.swa_utils "
    "and ghor.project"
)
NOT_BUILT = "it cannot be built from a list of parameters and these options"
STACKED = (NORMS, ANOTHER, STATES)  # reasons that may not hold for a weight with a shadow of its own
NEEDS_MORE = {
    ("closure",): "a closure that it calls itself",
    ("create_graph", "hessian", "does not require grad", "grad_fn"): "second derivatives",
    ("first_step",): "two gradients, the second of them elsewhere",
}

# torch's own optimizers that do not lift, and what to use instead. The law would find all but ASGD.
REFUSED = {
    "ASGD": "it averages weights, and in g^hor it would average velocities; use ghor.optim.SGD and "
    "torch.optim.swa_utils with ghor.project",
    "LBFGS": "its line search and curvature pairs compare gradients at different points; use "
    "ghor.optim.LBFGS",
    "SparseAdam": "a sparse gradient is not sparse in g^hor; use ghor.optim.Adam, which takes sparse "
    "gradients of weights on manifolds",
    "Adafactor": "it keeps row and column sums, which are not coordinates of g^hor; use ghor.optim.Adam, or "
    "Adafactor for the Euclidean weights alone",
}

_verdicts: WeakKeyDictionary[type[Optimizer], dict[Any, str | None]] = WeakKeyDictionary()


# -- verdicts ------------------------------------------------------------------------------------------------


def given_options(Base: type[Optimizer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor call after the parameters, by name."""
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
    """The options that hold for a group: the constructor's, overridden by the group's own."""
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
    """Raise ValueError, with the reason, if Base with these options does not lift for the group's weights."""
    options = to_be_tried(Base, options_of(Base, given, group))
    own = {k: v for k, v in group.items() if k not in (*options, *GROUP_KEYS, "params", "param_names", "lr")}
    kinds: dict[Any, int] = {}
    for p, space in zip(group["params"], spaces, strict=True):
        if not isinstance(space, Euclidean):
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
    """`verify` before there are weights, for two on Stiefel of shape 6 x 4.

    A rule that cannot be built from these options passes: it is tried once it has its own.
    """
    dtype = torch.get_default_dtype()
    case = Case(Base, to_be_tried(Base, options), Stiefel(), (6, 4), dtype=dtype, stack=stack, blocks=blocks)
    if not (_verdict(case) or "").startswith(NOT_BUILT):
        _refuse(case)


def _refuse(case: Case, where: str = "") -> None:
    reason = _verdict(case)
    if reason is not None:
        raise ValueError(f"{case.Base.__name__} cannot be lifted to manifolds: {reason}{where}")


def _verdict(case: Case) -> str | None:
    """Why the case does not lift, or None.

    Verdicts are remembered by class object, not by name: a notebook may define the class once more.
    """
    known, key = _verdicts.setdefault(case.Base, {}), case.key()
    if key not in known:
        known[key] = _reason_not_to_lift(case)
    return known[key]


@full_precision()
def _reason_not_to_lift(case: Case) -> str | None:
    Base = case.Base
    if Base.__module__.startswith("torch.optim") and Base.__name__ in REFUSED:
        return REFUSED[Base.__name__]
    if callable(getattr(Base, "train", None)) and callable(getattr(Base, "eval", None)):
        return TWO_MODES
    devices = [case.device] if case.device.type == "cuda" else []
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.enable_grad(), eager:
        reason = _tried(case)
        if reason in STACKED and _tried(replace(case, stack=False)) is None:
            return f"{reason}; lift(..., stack=False) computes them one by one, if that is meant"
    return reason


def _tried(case: Case) -> str | None:
    law = _turns if case.blocks else _elementwise
    try:
        reason = law(case)
        for name, value in case.options.items() if reason == STILL else ():
            if is_option(value) and value == 0 and name not in DECAYS:  # perhaps a rate by another name
                reason = law(replace(case, options={**case.options, name: RATE}))
                if reason != STILL:
                    break
    except NotBuilt as error:
        return f"{NOT_BUILT} ({error})"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        for words, what in NEEDS_MORE.items():
            if any(word in text.lower() for word in words):
                return (
                    f"its step needs {what}, and the lift gives it one gradient a step ({text}); "
                    "use ghor.optim.Adam or SGD"
                )
        small = case.within(SIDE, SMALL)
        shape = (small.count, *small.shape) if case.stack else small.shape
        hint = "; lift(..., stack=False) gives it tensors of the shape of a weight" if case.stack else ""
        return f"it could not be tried on a tensor of shape {shape} ({text}){hint}"
    return reason


def not_in_ghor(W: Tensor, projected: Tensor, dims: int) -> Tensor:
    """Which velocities (..., *point) are off their projection to g^hor: max |W - projected| > 16 eps max |W|.

    Returns (...), reading no value. Velocities that are not finite are not reported: NaN > x is false, and
    `guards.after` deals with them.
    """
    of_point = tuple(range(-dims, 0))
    off, size = (W - projected).abs().amax(of_point), W.abs().amax(of_point)
    return off > 16 * torch.finfo(W.dtype).eps * size


def left_ghor(Base: type[Optimizer], name: str, space: Space, W: Tensor, projected: Tensor) -> ValueError:
    """The error for a velocity W that is `not_in_ghor`: the law, and by how much W breaks it."""
    off, size = float((W - projected).abs().max()), float(W.abs().max())
    return ValueError(
        f"the velocity that {Base.__name__} has for {name} is {off:.1e} off g^hor of {space}, and {size:.1e} "
        "in size: its block A must be skew, A + A* = 0 (0 on Grassmann), to machine precision. The rule is "
        f"not elementwise on a tensor of shape {tuple(W.shape)}; weights on manifolds were not moved, "
        "Euclidean ones and moments were. Use a rule that is elementwise, such as ghor.optim.Adam"
    )


# -- laws: each returns the reason why it is broken, or None -------------------------------------------------


def _elementwise(case: Case) -> str | None:
    """The law of the module's docstring: over many steps, then at the full size of the weights."""
    small, large = case.within(SIDE, SMALL), case.within(ENTRIES, ENTRIES)
    reason, size = _keeps_ghor(case.within(16, 512))  # cheap, and finds most rules that do not lift
    for part, steps in [(small, STEPS), (large, 12)][: 1 if large == small else 2]:
        reason = reason or _one_law(part, size, steps)
    return reason


def _turns(case: Case) -> str | None:
    """velocity(O X P) = O velocity(X) P for blocks X and rotations O and P, whatever the weight.

    The tolerance is 0.2: matrix rules orthogonalise in bfloat16, and torch's Muon is off by up to 0.11 in
    norm, while rules that do not turn are off by 0.4 or more for at least one of four rotations.
    """
    tensor = torch.empty(case.within(SIDE, SMALL).shape, dtype=case.dtype, device="meta")
    blocks = case.space.ghor_blocks(tensor.view(-1, *tensor.shape[tensor.dim() - case.space.dims :]))
    for rows, columns in sorted({X.shape[-2:] for X in blocks}):
        one = replace(case, space=Euclidean(), shape=(rows, columns), count=2, stack=False, blocks=True)
        reason, size = _keeps_ghor(one)
        if reason is not None:
            return reason
        for seed in (1, 3):
            turned = [Turn(one, seed), Turn(one, seed + 1)]
            if not _same(one, _from_zero(one), _from_zero(one), turned, 12, tol=0.2):
                return NOT_TURNING
        if not _same(one, _from_zero(one), _from_points(one, size), None, 12):
            return DEPENDS
    return None


def _keeps_ghor(case: Case) -> tuple[str | None, float]:
    """Vectors of g^hor have velocities in g^hor, to the last digits; also returns their largest entry."""
    (run,), size = _as_it_runs(case), 0.0
    # As in the lift, the weights have gradients, too: a rule that keeps a list of its own would move them.
    for p in run.weights:
        p.grad = torch.ones_like(p)
    for G in gradients(case, 12):
        G = case.space.hor(G)
        V = run.velocities(G)
        V = torch.where((G == 0) & torch.isnan(V), 0, V)  # 0/0 of structural zeros: Adam with eps=0
        if not bool(torch.isfinite(V).all()):
            return NOT_FINITE, size
        if any(bool(p.any()) for p in run.weights):
            return OWN_LIST, size
        if bool(not_in_ghor(V, case.space.hor(V), case.space.dims).any()):
            return NOT_ELEMENTWISE, size
        size = max(size, float(V.abs().max()))
    return None if size else STILL, size


def _one_law(case: Case, size: float, steps: int) -> str | None:
    mixed, faint = [Mix(case, 1), Mix(case, 2)], faint_decay(case)
    ours, alone = _as_it_runs(case), _from_points(case, size)
    if _same(case, ours, alone, mixed, steps):
        if case.stack:
            return None if same_state(ours[0], alone[0]) else STATES
        return None if same_numbers(ours[0].learned(), alone[0].learned()) else GROUPED
    # The law is broken: which of the three changes makes the difference?
    if not _same(case, _as_it_runs(case), _as_it_runs(case), mixed, steps):
        return NOT_ELEMENTWISE
    if not _same(case, _from_zero(case), _from_points(case, size), None, steps):
        decay = faint != case.options
        decay = decay and _same(case, _from_zero(case, faint), _from_points(case, size), None, steps)
        return DECAYED if decay else DEPENDS
    if not case.stack:
        return GROUPED
    return NORMS if _same(case, _from_zero(case), _from_zero(case), mixed, steps) else ANOTHER


def _as_it_runs(case: Case) -> list[Run]:
    """One run, as the lift has it: of the whole stack, or of single weights each with its own shadow."""
    zeros = [shadow(case)] * case.count
    return [Run(case, zeros, [shadow(case, case.count)] if case.stack else zeros)]


def _from_zero(case: Case, options: dict[str, Any] | None = None) -> list[Run]:
    """The first and the last weight, each alone, on its shadow."""
    return [Run(case, [shadow(case)], [shadow(case)], options) for _ in range(2)]


def _from_points(case: Case, size: float) -> list[Run]:
    """The first and the last weight, each alone, from points small enough that velocities keep digits."""
    return [Run(case, [point(case, k) * min(1.0, 100 * size)], None, faint_decay(case)) for k in (1, 2)]


def _same(
    case: Case, ours: list[Run], others: list[Run], changed: list[Any] | None, steps: int, tol: float = TOL
) -> bool:
    """Whether the first and the last weight move alike on both sides, up to `changed`, also after a `jump`.

    A side is one run of all weights, or one run for each of the two. Velocities are compared entry by entry,
    with a `tol` other than TOL in norm. If the weights of the other side run alone, gradients are made nearly
    orthogonal to them, row by row, because some rules look at the weight only then.
    """
    alone, weight = len(others) == 2 and not others[0].reset, 0.0
    scale = torch.zeros(2, 1, device=case.device)

    def size(X: Tensor) -> Tensor:
        X = X.flatten(1)
        return X.abs() if tol == TOL else torch.linalg.vector_norm(X, dim=1, keepdim=True)

    def alike(G: Tensor) -> bool:
        nonlocal scale, weight
        G[-1] *= 10
        M = G.clone()
        for k, i in enumerate((0, -1)):
            M[i] = changed[k](G[i]) if changed else G[i]
            if alone:
                Y = others[k].params[0].detach()
                M[i] = _nearly_orthogonal(M[i], Y)
                G[i] = changed[k].undo(M[i]) if changed else M[i]
                weight = max(weight, float(Y.abs().max()))
        V, U = _first_and_last(ours, G), _first_and_last(others, M)
        V = torch.stack([change(X) for change, X in zip(changed, V, strict=True)]) if changed else V
        scale = torch.maximum(size(V), size(U)).amax(1, True).maximum(scale)
        # a rule may compute in float32, and round the weight to it
        return bool((size(V - U) <= tol * scale + 8 * torch.finfo(torch.float32).eps * weight).all())

    if not all(map(alike, gradients(case, steps))):
        return False
    try:
        for run in (*ours, *others):
            run.jump()
        return all(map(alike, gradients(case, 3)))
    except Exception:  # a rule whose step count cannot be set is not tried at late steps
        return True


def _first_and_last(side: list[Run], G: Tensor) -> Tensor:
    """The velocities of the first and the last weight, (2, *shape)."""
    if len(side) == 2:
        return torch.stack([run.step(g)[0] for run, g in zip(side, (G[0], G[-1]), strict=True)])
    return side[0].velocities(G)[[0, -1]]


def _nearly_orthogonal(g: Tensor, Y: Tensor) -> Tensor:
    """g at almost 90 degrees to Y, row by row; where rows have one entry, column by column."""
    dim = -2 if g.dim() > 1 and g.shape[-1] == 1 else -1
    rows = Y / torch.linalg.vector_norm(Y, dim=dim, keepdim=True).clamp_min(1e-30)
    g = g - (g * rows.conj()).sum(dim, keepdim=True) * rows
    return g + 0.02 / g.shape[dim] ** 0.5 * torch.linalg.vector_norm(g, dim=dim, keepdim=True) * rows


class Mix:
    """A random signed permutation of a weight's entries; about half of complex entries are conjugated."""

    def __init__(self, case: Case, seed: int) -> None:
        generator, n = torch.Generator().manual_seed(seed), math.prod(case.shape)
        self.order = torch.randperm(n, generator=generator, device=CPU).to(case.device)
        signs, self.conjugated = (torch.rand(2, n, generator=generator, device=CPU) < 0.5).to(case.device)
        self.signs = 1 - 2 * signs.to(case.dtype)

    def __call__(self, X: Tensor) -> Tensor:
        return self._flip(X.flatten()[self.order]).view(X.shape)

    def undo(self, X: Tensor) -> Tensor:
        """The inverse."""
        return self._flip(X.flatten())[self.order.argsort()].view(X.shape)

    def _flip(self, x: Tensor) -> Tensor:
        x = x * self.signs
        return torch.where(self.conjugated, x.conj(), x) if x.is_complex() else x


class Turn:
    """X -> O X P, with rotations O and P."""

    def __init__(self, case: Case, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.O, self.P = (orthogonal(case, (k, k), generator).to(case.device, case.dtype) for k in case.shape)

    def __call__(self, X: Tensor) -> Tensor:
        return self.O @ X @ self.P
