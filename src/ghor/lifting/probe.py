"""Which optimizers lift: a rule is tried where it is to run before it is trusted with a manifold.

The lift gives a rule the shadows of weights, 0 before every step, weights of one shape as one tensor. One law
says whether it is the same rule there:

    what it does to a weight of the stack is, up to a signed permutation of all entries, what it does to the
    weight alone, started at a generic point and left to go on.

A rule that keeps it is odd and elementwise, so it keeps g^hor (whose full matrix [[A, -B*], [B, 0]] repeats the
entries of [A; B] up to sign and conjugation), it does not look at the value of the weight, and it does not mix
weights. Where the law is broken, the three changes (entries permuted, a generic point, alone) are tried one at
a time, to say which of them the rule sees. Besides, velocities of vectors in g^hor must be in g^hor to the last
digits, and the state of a stack must come apart by weights.

Rules of matrices (`lift(..., blocks=True)`) keep another law: velocity(O X P) = O velocity(X) P for rotations.

Sides above 128 are tried in a smaller copy, tall or wide as before; effects of more than 2^16 entries are left
to the check that a step makes of its velocities (`left_ghor`). The learning rate is one of ours. With
`stack=False` a weight has a shadow of its own shape: a norm or mean over it is that of the N x n tensor [A; B],
in which the skew A has every entry twice and B once.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ghor._torch.bare_step import bare_step
from ghor._torch.precision import COMPUTE_DTYPE, full_precision
from ghor.lifting.param_groups import DECAYS, GROUP_KEYS
from ghor.spaces import Euclidean, Space, Stiefel

STEPS = 40  # step-size estimates and averages of norms need some dozens to show
TOL = 2e-5  # of the largest velocity: rules that compute in float32 keep a law to 1e-6, broken laws show in 1e-3
RATE = 0.1  # ours: the user's may be 0, and beside a weight of order one a velocity of 1e-3 has few digits
SIDE, SMALL, ENTRIES = 128, 2**12, 2**16  # largest side, and entries of the two stacks that are tried
CPU = torch.device("cpu")
SIZES = (1.0, 4.0, 0.25, 2.0, 0.5, 8.0, 1.0)  # of gradients over time, for rules that clip or average norms

NOT_ELEMENTWISE = "its update is not odd and elementwise in the gradient, so it does not keep g^hor"
DEPENDS = "its update depends on the value of the weight, or keeps a copy of it, and in g^hor the weight is 0"
NOT_FINITE = "its velocity from the weight 0 is not finite"
STILL = "it does not move a weight that is 0, as weights are in g^hor before every step"
OWN_LIST = "it moves tensors of a list of its own, not those in its param_groups, where the lift puts g^hor"
NORMS = "its update takes a norm or mean over the whole tensor, and weights of one shape are computed as one tensor"
ANOTHER = (
    "on weights of one shape, computed as one tensor with one dimension more, it is another rule than on each of "
    "them"
)
STATES = (
    "it keeps state that cannot be told apart by weights, and weights of one shape are computed as one tensor"
)
GROUPED = "its update of a weight depends on the other weights, beside which it may not be in g^hor"
DECAYED = "its weight decay changes the velocity, not the weight alone; give these weights a group with weight_decay=0"
NOT_TURNING = (
    "its update does not turn with the gradient, velocity(O B) = O velocity(B), so it depends on the section"
)
TWO_MODES = (
    "it has a train and an eval mode: it steps on one sequence of weights and shows the mean of another, and in "
    "g^hor the weight is 0; use ghor.optim.AdamW with a schedule, or average with torch.optim.swa_utils and "
    "ghor.project"
)
NOT_BUILT = "it cannot be built from a list of parameters and these options"
STACKED = (NORMS, ANOTHER, STATES)  # reasons that may not hold for a weight with a shadow of its own
NEEDS_MORE = {
    ("closure",): "a closure that it calls itself",
    ("create_graph", "hessian", "does not require grad", "grad_fn"): "second derivatives",
    ("first_step",): "two gradients, the second of them elsewhere",
}

# torch's own that do not lift, and what to use instead. The law would find all but ASGD.
REFUSED = {
    "ASGD": "it averages weights, and in g^hor it would average velocities; use ghor.optim.SGD and "
    "torch.optim.swa_utils with ghor.project",
    "LBFGS": "its line search and curvature pairs compare gradients at different points; use ghor.optim.LBFGS",
    "SparseAdam": "a sparse gradient is not sparse in g^hor; use ghor.optim.Adam, which takes sparse gradients of "
    "weights on manifolds",
    "Adafactor": "it keeps row and column sums, which are not coordinates of g^hor; use ghor.optim.Adam, or "
    "Adafactor for the Euclidean weights alone",
}

_verdicts: WeakKeyDictionary[type[Optimizer], dict[Any, str | None]] = WeakKeyDictionary()
_parities: WeakKeyDictionary[type[Optimizer], dict[Any, dict[str, str]]] = WeakKeyDictionary()


# -- verdicts --------------------------------------------------------------------------------------------------


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
    """Raise ValueError, with the reason, if Base with the `given` options cannot be lifted on a weight of the
    group."""
    options = _to_be_tried(Base, options_of(Base, given, group))
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
    """`verify` before there are weights, on two of 6 x 4, orthonormal. A rule that needs more to be built is
    tried once it has it."""
    dtype = torch.get_default_dtype()
    case = Case(Base, _to_be_tried(Base, options), Stiefel(), (6, 4), dtype=dtype, stack=stack, blocks=blocks)
    if not (_verdict(case) or "").startswith(NOT_BUILT):
        _refuse(case)


def _refuse(case: Case, where: str = "") -> None:
    reason = _verdict(case)
    if reason is not None:
        raise ValueError(f"{case.Base.__name__} cannot be lifted to manifolds: {reason}{where}")


def _verdict(case: Case) -> str | None:
    """Why the case does not lift, or None. Remembered by the class object, not its name: the next cell of a
    notebook may define another class of that name."""
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
        if reason == STILL and (other := _another_rate(case)) is not None:
            reason = law(other)
    except NotBuilt as error:
        return f"{NOT_BUILT} ({error})"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        for words, what in NEEDS_MORE.items():
            if any(word in text.lower() for word in words):
                return (
                    f"its step needs {what}, and the lift gives it one gradient a step ({text}); use "
                    "ghor.optim.Adam or SGD"
                )
        small = case.within(SIDE, SMALL)
        shape = (small.count, *small.shape) if case.stack else small.shape
        hint = "; lift(..., stack=False) gives it tensors of the shape of a weight" if case.stack else ""
        return f"it could not be tried on a tensor of shape {shape} ({text}){hint}"
    return reason


def not_in_ghor(W: Tensor, projected: Tensor) -> Tensor:
    """Which velocities (..., N, n) differ from their projection to g^hor: max |W - projected| > 16 eps max |W|.

    (...), without reading a value. Velocities that are not finite count as in g^hor: they are handled
    elsewhere.
    """
    dims = tuple(range(-min(2, W.dim()), 0))
    off, size = (W - projected).abs().amax(dims), W.abs().amax(dims)
    return off > 16 * torch.finfo(W.dtype).eps * size


def left_ghor(Base: type[Optimizer], name: str, space: Space, W: Tensor, projected: Tensor) -> ValueError:
    """The error for the velocity W of a weight that is `not_in_ghor`: the law, and by how much."""
    off, size = float((W - projected).abs().max()), float(W.abs().max())
    return ValueError(
        f"the velocity that {Base.__name__} has for {name} is {off:.1e} off g^hor of {space}, and {size:.1e} in "
        "size: its block A must be skew, A + A* = 0 (0 on Grassmann), to machine precision. The rule is not "
        f"elementwise on a tensor of shape {tuple(W.shape)}; nothing was moved. Use a rule that is, such as "
        "ghor.optim.Adam"
    )


# -- the law of elementwise rules ------------------------------------------------------------------------------


def _elementwise(case: Case) -> str | None:
    """Why the law of this module is broken, or None: over many steps, then at the size it runs at."""
    small, large = case.within(SIDE, SMALL), case.within(ENTRIES, ENTRIES)
    reason, size = _keeps_ghor(small)
    for part, steps in [(small, STEPS), (large, 12)][: 1 if large == small else 2]:
        reason = reason or _one_law(part, size, steps)
    return reason


def _keeps_ghor(case: Case) -> tuple[str | None, float]:
    """Why vectors of g^hor do not stay there, or None; and the largest entry of a velocity."""
    (run,), size = _as_it_runs(case), 0.0
    for p in run.weights:  # in the lift the weights have gradients, too
        p.grad = torch.ones_like(p)
    for G in gradients(case, (case.count,), 12):
        G = case.space.hor(G)
        V = run.all_velocities(G)
        V = torch.where(
            (G == 0) & torch.isnan(V), 0, V
        )  # 0/0 in structural zeros, as of Adam with eps=0, is 0
        if not bool(torch.isfinite(V).all()):
            return NOT_FINITE, size
        if any(bool(p.any()) for p in run.weights):
            return OWN_LIST, size
        if bool(not_in_ghor(V, case.space.hor(V)).any()):
            return NOT_ELEMENTWISE, size
        size = max(size, float(V.abs().max()))
    return None if size else STILL, size


def _one_law(case: Case, size: float, steps: int) -> str | None:
    mixed = [Mix(case, 1), Mix(case, 2)]
    # a velocity that is lost in the digits of the weight would say nothing
    points = [_point(case, seed) * min(1.0, 100 * size) for seed in (1, 2)]
    faint = _faint_decay(case)

    def from_points() -> list[Run]:
        return [Run(case, [Y], options=faint) for Y in points]

    def from_zero(options: dict[str, Any] | None = None) -> list[Run]:
        return [Run(case, [_shadow(case)], [_shadow(case)], options) for _ in points]

    ours, alone = _as_it_runs(case), from_points()
    if _same(case, ours, alone, mixed, steps):
        if case.stack:
            return None if same_state(ours[0], alone[0]) else STATES
        return None if same_numbers(ours[0].learned(), alone[0].learned()) else GROUPED
    if not _same(case, _as_it_runs(case), _as_it_runs(case), mixed, steps):
        return NOT_ELEMENTWISE
    if not _same(case, from_zero(), from_points(), None, steps):
        decayed = faint != case.options and _same(case, from_zero(faint), from_points(), None, steps)
        return DECAYED if decayed else DEPENDS
    if not case.stack:
        return GROUPED
    return NORMS if _same(case, from_zero(), from_zero(), mixed, steps) else ANOTHER


def _as_it_runs(case: Case) -> list[Run]:
    """One run of the whole stack, or of two weights of a group, each with its own shadow."""
    shadows = [_shadow(case, case.count)] if case.stack else [_shadow(case)] * case.count
    return [Run(case, [_shadow(case)] * case.count, shadows)]


def _same(case: Case, ours: list[Run], others: list[Run], mixed: list[Mix] | None, steps: int) -> bool:
    """Whether the first and the last weight move alike in both, up to `mixed`; also much later.

    A side is one run of all weights, or one run for each of the two. Gradients are nearly orthogonal to the
    weights of the other side, row by row: some rules look at the weight only then.
    """
    scale = torch.zeros(2, 1, dtype=torch.float64, device=case.device)
    largest = torch.zeros_like(scale)

    def alike(G: Tensor) -> bool:
        G[-1] *= 10
        M = G.clone()
        for k, i in enumerate((0, -1)):
            M[i] = mixed[k](G[i]) if mixed else G[i]
            if len(others) == 2:
                M[i] = _nearly_orthogonal(M[i], others[k].params[0].detach())
                G[i] = mixed[k].undo(M[i]) if mixed else M[i]
        V, U = _first_and_last(ours, G), _first_and_last(others, M)
        V = torch.stack([mix(X) for mix, X in zip(mixed, V, strict=True)]) if mixed else V
        V, U = V.flatten(1), U.flatten(1)
        scale.copy_(scale.maximum(V.abs().amax(1, True)).maximum(U.abs().amax(1, True)))
        if len(others) == 2:
            sizes = torch.stack([run.params[0].detach().abs().max() for run in others])
            largest.copy_(largest.maximum(sizes[:, None]))
        noise = 8 * torch.finfo(torch.float32).eps * largest
        return bool(((V - U).abs() <= TOL * scale + noise).all())

    if not all(map(alike, gradients(case, (case.count,), steps))):
        return False
    try:
        for run in (*ours, *others):
            run.jump()
        return all(map(alike, gradients(case, (case.count,), 3)))
    except Exception:  # a rule whose count cannot be set is not tried late
        return True


def _first_and_last(side: list[Run], G: Tensor) -> Tensor:
    """The velocities of the first and the last weight, (2, *shape)."""
    if len(side) == 2:
        return torch.stack([run.step(g)[0] for run, g in zip(side, (G[0], G[-1]), strict=True)])
    V = side[0].all_velocities(G)
    return torch.stack([V[0], V[-1]])


class Mix:
    """A permutation of the entries of a weight with signs; of complex entries half are conjugated."""

    def __init__(self, case: Case, seed: int) -> None:
        generator, n = torch.Generator().manual_seed(seed), math.prod(case.shape)
        coins = torch.rand(2, n, generator=generator) < 0.5
        self.order = torch.randperm(n, generator=generator).to(case.device)
        self.back = self.order.argsort()
        self.signs = (1 - 2 * coins[0].to(case.dtype)).to(case.device)
        self.conjugated = coins[1].to(case.device)

    def __call__(self, X: Tensor) -> Tensor:
        return self._flip(X.flatten()[self.order]).view(X.shape)

    def undo(self, X: Tensor) -> Tensor:
        return self._flip(X.flatten())[self.back].view(X.shape)

    def _flip(self, x: Tensor) -> Tensor:
        x = x * self.signs
        return torch.where(self.conjugated, x.conj(), x) if x.is_complex() else x


def _nearly_orthogonal(g: Tensor, Y: Tensor) -> Tensor:
    """g at almost 90 degrees to Y, row by row; where rows have one entry, column by column."""
    dim = -2 if g.dim() > 1 and g.shape[-1] == 1 else -1
    rows = Y / torch.linalg.vector_norm(Y, dim=dim, keepdim=True).clamp_min(1e-30)
    g = g - (g * rows.conj()).sum(dim, keepdim=True) * rows
    return g + 0.02 / g.shape[dim] ** 0.5 * torch.linalg.vector_norm(g, dim=dim, keepdim=True) * rows


# -- the law of matrix rules -----------------------------------------------------------------------------------


def _turns(case: Case) -> str | None:
    """Why velocity(O X P) = O velocity(X) P is broken for a block X of the case, O and P rotations; or None."""
    point = case.within(SIDE, SMALL).shape[len(case.shape) - case.space.dims :]
    blocks = case.space.ghor_blocks(torch.empty((1, *point), dtype=case.dtype, device="meta"))
    for shape in sorted({(X.shape[-2], X.shape[-1]) for X in blocks}):
        block = replace(case, shape=shape, count=2)
        for seed in (3, 4, 5):  # a 2 x 1 block has rotations that are nearly signed permutations
            reason = _turns_with(block, seed)
            if reason is not None:
                return reason
        at_zero = [Run(block, [_shadow(block)], [_shadow(block)]) for _ in range(2)]
        elsewhere = [Run(block, [_point(block, seed)], options=_faint_decay(block)) for seed in (1, 2)]
        if not _same(block, at_zero, elsewhere, None, 12):
            return DEPENDS
    return None


def _turns_with(case: Case, seed: int) -> str | None:
    """The law for random rotations, in norm and to a fifth.

    Such rules orthogonalise in bfloat16: torch's Muon is up to 0.11 off. Rules that do not turn are off by 0.4
    and more. Gradients have singular values near 1, for small ones come out as noise.
    """
    rows, columns = case.shape
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if case.dtype.is_complex else torch.float64

    def draw(a: int, b: int) -> Tensor:
        return torch.randn(a, b, generator=generator, dtype=wide)

    def rotation(k: int) -> Tensor:
        return torch.linalg.qr(draw(k, k))[0].to(case.device, case.dtype)

    O, P, steady = rotation(rows), rotation(columns), rotation(max(rows, columns))[:rows, :columns]
    plain, turned = (Run(case, [_shadow(case)], [_shadow(case)]) for _ in range(2))
    size = 0.0
    for t in range(12):
        noise = draw(rows, columns).to(steady) / (5 * (math.sqrt(rows) + math.sqrt(columns)))
        X = SIZES[t % len(SIZES)] * (steady + noise)
        (V,), (W,) = plain.step(X), turned.step(O @ X @ P)
        size = max(size, float(torch.linalg.vector_norm(V)))
        if not bool(torch.isfinite(V).all()):
            return NOT_FINITE
        if bool(plain.weights[0].any()):
            return OWN_LIST
        if not float(torch.linalg.vector_norm(O @ V @ P - W)) <= 0.2 * size:
            return NOT_TURNING
    return None if size else STILL


# -- cases and runs --------------------------------------------------------------------------------------------


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
    own: dict[str, Any] = field(
        default_factory=dict, hash=False
    )  # group keys that the constructor does not know

    def within(self, side: int, entries: int) -> Case:
        """The same with sides of at most `side`, tall or wide as before, and about `entries` in all.

        Of a stack two weights or more, their number a power of 2; otherwise two.
        """
        shape = _shrunk(self.space, self.shape, side)
        while math.prod(shape) > entries and side > 8:
            side //= 2
            shape = _shrunk(self.space, self.shape, side)
        most = max(2, entries // math.prod(shape))
        count = min(1 << (max(2, self.count) - 1).bit_length(), 1 << (most.bit_length() - 1))
        return replace(self, shape=shape, count=count if self.stack else 2)

    def key(self) -> Any:
        """Cases with one key have one verdict."""
        c = self.within(ENTRIES, ENTRIES)
        kind = (c.space, c.shape, c.count, c.dtype, c.device, c.stack, c.blocks)
        return kind, _frozen(self.options), _frozen(self.own)


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


def _shadow(case: Case, *lead: int) -> Tensor:
    return torch.zeros((*lead, *case.shape), dtype=case.dtype, device=case.device)


def _point(case: Case, seed: int) -> Tensor:
    """A weight whose entries have the size that they have on an orthogonal space."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(case.shape, generator=generator, dtype=torch.float64)
    return (X / math.sqrt(max(case.shape))).to(case.device, case.dtype)


def gradients(case: Case, lead: tuple[int, ...], steps: int = STEPS) -> Iterator[Tensor]:
    """Gradients (*lead, *shape): a part that stays, so that signs do, and noise; of many sizes over time."""
    generator = torch.Generator().manual_seed(0)
    shape = (*lead, *case.shape)
    wide = torch.complex128 if case.dtype.is_complex else torch.float64
    steady = torch.randn(shape, generator=generator, dtype=wide)
    for t in range(steps):
        noise = torch.randn(shape, generator=generator, dtype=wide)
        yield (SIZES[t % len(SIZES)] * (steady + 0.3 * noise)).to(case.device, case.dtype)


class NotBuilt(Exception):
    """Base(params, **options) raises."""


class Run:
    """A rule on test tensors: on `weights`, or, as the lift has it, on `shadows` put in their place."""

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
        """Shadows in place of the weights, with the state that the constructor has made, as Adagrad's does."""
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

    def all_velocities(self, G: Tensor) -> Tensor:
        """Gradients (count, *shape) to velocities."""
        return self.step(G)[0] if len(self.params) == 1 else torch.stack(self.step(*G))

    def jump(self) -> None:
        """Set step counts to 9999: for what a rule does late, or every so many steps."""
        (group,) = self.optimizer.param_groups
        for place in (group, *(self.optimizer.state[p] for p in self.params)):
            for key in ("step", "steps", "k"):
                value: Any = place.get(key)
                if torch.is_tensor(value):
                    value.fill_(9999)
                elif type(value) in (int, float):
                    place[key] = type(value)(9999)

    def _numbers(self) -> dict[str, float]:
        """The numbers that are kept beside the states of weights: in the group, in the optimizer, under names."""
        kept = {**vars(self.optimizer), **self.optimizer.param_groups[0]}
        named: dict[Any, Any] = {k: v for k, v in self.optimizer.state.items() if isinstance(k, str)}
        for key, value in named.items():
            kept |= {f"{key} {k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
        return {k: float(v) for k, v in kept.items() if _is_number(v)}

    def learned(self) -> dict[str, float]:
        """Those of the numbers that have changed and are not counts."""
        return {k: v for k, v in self._numbers().items() if self.at_first.get(k) != v and not v.is_integer()}


def same_numbers(a: dict[str, float], b: dict[str, float]) -> bool:
    """Equal, to TOL."""
    return set(a) == set(b) and all(math.isclose(v, b[k], rel_tol=TOL, abs_tol=1e-30) for k, v in a.items())


def same_state(stack: Run, single: Run) -> bool:
    """Whether the state of a stack is that of single weights with one dimension more, and shared numbers."""
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


# -- options ---------------------------------------------------------------------------------------------------


def _to_be_tried(Base: type[Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    """The options with a learning rate of our own, if there is one by that name, and not differentiable.

    A differentiable step is the same rule, but cannot be taken here: the step says that the lift has none.
    """
    if options.get("differentiable"):
        options = {**options, "differentiable": False}
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
    return RATE if _is_option(value) else value


def _is_option(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _faint_decay(case: Case) -> dict[str, Any]:
    """The options with any weight decay so small that nothing decays; not 0, which some rules treat apart."""
    known, out = inspect.signature(case.Base.__init__).parameters, dict(case.options)
    for name in DECAYS:
        value = out.get(name, known[name].default if name in known else 0)
        if _is_option(value) and value != 0:
            out[name] = 1e-12
    return out


def _another_rate(case: Case) -> Case | None:
    """The case with an option that is 0 set to our rate, if that makes the rule move: a rate by another
    name."""
    for name, value in case.options.items():
        if _is_option(value) and value == 0 and name not in DECAYS:
            other = replace(case, options={**case.options, name: RATE}, stack=False, blocks=False)
            if _keeps_ghor(other.within(SIDE, SMALL))[1]:
                return replace(case, options=other.options)
    return None


def _frozen(options: dict[str, Any]) -> tuple[Any, ...]:
    """Options as a key, without the rate, which is ours: a scheduler makes no new rule."""
    return tuple((k, type(v), _hashable(v)) for k, v in sorted(options.items()) if k != "lr")


def _hashable(value: Any) -> Any:
    if torch.is_tensor(value):
        return repr(value.tolist()) if value.numel() <= 16 else repr(value.shape)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value  # the object, not its address, which another may have later


# -- how state turns with a frame ------------------------------------------------------------------------------


def parity(Base: type[Optimizer], options: dict[str, Any], only_vectors: bool = False) -> dict[str, str]:
    """Which state tensors of Base are vectors of g^hor and which are squares: {"exp_avg": "vector", ...}.

    A frame that turns takes vectors along and leaves squares. Tried with gradients of both signs. Raises
    ValueError for state that is neither, and for rules that subtract a vector's square from a square
    (RMSprop's centered form), which go NaN when only one of the two turns. With `only_vectors` also for squares
    and for tensors of other shapes.
    """
    known, options = _parities.setdefault(Base, {}), _to_be_tried(Base, options)
    key = _frozen(options), only_vectors
    if key not in known:
        known[key] = _parity(Base, options, only_vectors)
    return known[key]


def _parity(Base: type[Optimizer], options: dict[str, Any], only_vectors: bool) -> dict[str, str]:
    """The state after gradients g is compared with that after -g, and then turned."""

    def refuse(why: str) -> ValueError:
        return ValueError(f"{Base.__name__} {why}; use section='transported'")

    generator = torch.Generator().manual_seed(1)
    g, Q = (torch.randn(6, n, generator=generator, dtype=torch.float64) for n in (5, 6))
    case = Case(Base, options, Stiefel(), (6, 5), dtype=torch.float64)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        run, other = (Run(case, [_shadow(case)], [_shadow(case)]) for _ in range(2))
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
                        f"has a state {key!r} that is neither odd nor even in the gradient, so it cannot be taken "
                        "to another frame"
                    )
            if only_vectors and kinds.get(key) != "vector":
                raise refuse(
                    f"keeps {key!r}, which is not a vector of g^hor and cannot be taken to another frame"
                )
        vectors = [state[key] for key, kind in kinds.items() if kind == "vector"]
        for v in vectors:
            v.neg_()
        if not _close(
            run.step(-g)[0], other.step(-g)[0]
        ):  # vectors turned over: as good as the state after -g
            raise refuse(
                "keeps vectors that are not state tensors of the weight's shape, so they cannot be taken to another "
                "frame"
            )
        for key, kind in kinds.items():
            if kind == "vector":
                v = run.optimizer.state[p][key]
                v.copy_(torch.linalg.qr(Q)[0].to(v.dtype) @ v)
        if not bool(torch.isfinite(run.step(-g)[0]).all()):
            raise refuse(
                "with these options subtracts the square of a first moment from a second one, which goes wrong where "
                "only one of them turns with the frame"
            )
    return kinds


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-6 * (float(a.abs().max()) or 1.0))
