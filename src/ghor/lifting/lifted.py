"""Algorithm 3 of the paper: any optimizer on homogeneous spaces.

    t      <- t + 1
    Delta  <- rgrad(grad L)                        Riemannian gradient
    B      <- global_rep(Lambda, Delta)            in g^hor, one vector space for the whole run
    cache  <- update(cache, B)                     \\  an ordinary optimizer: g^hor is an ordinary
    W      <- velocity(cache)                      /  vector space, so torch.optim does this as it is
    Lambda <- update_section(Lambda, W)            Lambda R(W), R a retraction
    Y      <- apply_section(Lambda, E)

A lifted optimizer holds an ordinary one, `inner` (holder.py). For a step `inner` is lent groups and state,
with a velocity H in place of every batch of weights on a manifold and B as its gradient; whatever it adds to
H is W. Euclidean weights go there as they are, so their steps are torch's, bit for bit. What the rule has
changed in its groups and its state is copied out. Nothing is ever put back, because `param_groups` and
`state` of the outer optimizer are never anything but the user's. A step goes through the files in one
direction:

    lifted      which weights move; what `inner` is lent        roster: which weights are on which spaces
    batch       gradients in, a step, weights and state out     left: whether others have touched them
    members     weights as points (M, N, n), and back           standing: the first points and frames
    spaces/     frames, the formulas of a space, retractions    state, looks: what users see of a batch

A batch is derived: all that it knows can be made again from its weights and state[p], to the bit. Whoever
touches a weight, its state or its group between two steps dissolves its batch, and weights with a gradient
that are in no batch form new ones. Loading, copying, late groups, missing gradients, writes and interrupts
all come down to `_ready`. A batch is `in_motion` during a step. Whoever finds it so afterwards drops its
frame, which may be off the group; the next step makes one above the weight, which is whole.
"""

from __future__ import annotations

import inspect
import operator
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from ghor._torch.precision import full_precision
from ghor._torch.sharding import placement
from ghor.lifting.batch import Batch, OwnRule
from ghor.lifting.groups import GROUP_KEYS, Weight, is_on, refuse_nonfinite, switched_on
from ghor.lifting.holder import Holder, explain
from ghor.lifting.law import DECAYS, Traits, traits
from ghor.lifting.state import OUR_KEYS, is_per_coordinate, shared_values

FUSED = (torch.optim.Adam, torch.optim.AdamW)  # their fused kernels are the default on velocities
UNCHANGED = ((), None)  # how Euclidean weights are lent

_grad = operator.attrgetter("grad")


class Lifted(Holder):
    """The part that all lifted optimizers share; an optimizer of the class `Base` works in g^hor."""

    frameless: ClassVar[bool] = False  # displacements do not depend on the frame, so that there need be none

    _batches: list[Batch]
    _loose: set[int]  # ids of the weights on manifolds that are in no batch

    # -- the step ------------------------------------------------------------------------------------------

    @torch.no_grad()
    @partial(_disable_dynamo, recursive=False)
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; a closure is called once, with gradients enabled, and its value returned.

        torch.compile makes graphs of `Batch.pull` and `Batch.push`; torch's rule, copies and looks stay out.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with full_precision():
            moving, grads = self._before()
            starts = [b.pull(G) for b, G in zip(moving, grads, strict=True)]  # B
            self._rule(moving, starts)  # W
            for b in moving:
                b.push(b.H, self.inner.state[b.H])  # Lambda, Y
            self._after(moving)
        return loss

    @_disable_dynamo
    def _before(self) -> tuple[list[Batch], list[Tensor]]:
        """The batches that move, and their gradients; the inner optimizer is lent groups and state."""
        if any([g["error_if_nonfinite"] for g in self.param_groups]):  # noqa: C419 (a generator costs calls)
            refuse_nonfinite(self)
        moving = self._ready()
        self._lend(moving)
        grads = [b.gather() for b in moving]
        for b in moving:
            b.in_motion, b.group = True, self.param_groups[b.gi]
            b.multiple = self.multiple(b.group) if b.free else None
        return moving, grads

    @_disable_dynamo
    def _rule(self, moving: list[Batch], starts: list[Tensor | None]) -> None:
        try:
            self._bare(self.inner)
        except Exception as error:
            explain(self.Base, error)
            raise
        for b, start in zip(moving, starts, strict=True):
            b.limit(start)

    @_disable_dynamo
    def _after(self, moving: list[Batch]) -> None:
        self._take_back(moving)
        for b in moving:
            b.end(self.state)
        if self._warn.pending:
            self._warn.flush()

    # -- what a class of ours may say of its rule ----------------------------------------------------------

    def own_rule(self, b: Batch) -> OwnRule | None:
        """Our own rule for weights on manifolds, in place of Base's."""
        return None

    def multiple(self, group: dict[str, Any]) -> Any:
        """The number a in W = a m, where Base's rule with the one moment m is so simple."""
        return None

    # -- which weights move --------------------------------------------------------------------------------

    def _adopt(self) -> None:
        super()._adopt()
        self._batches, self._loose = [], set()

    def _start(self) -> None:
        """Adagrad has state from the start, and that includes ours."""
        if self.state and not any(
            group.get("differentiable") or any(p.is_meta for p in group["params"])
            for group in self.param_groups
        ):
            with torch.no_grad(), full_precision():
                self._ready(lambda p: self.state.get(p) or None)

    def _ready(self, mover: Callable[[Tensor], Any] = _grad) -> list[Batch]:
        """The batches that move.

        Weights move that have a gradient, or another `mover` that is not None. A batch dissolves if someone
        has touched it, or if only some of its weights move; those in no batch form new ones, from weights and
        state[p].
        """
        self._follow_groups()
        moving, stale = list[Batch](), list[Batch]()
        for b in self._batches:
            there = sum([mover(p) is not None for p in b.params])
            if there not in (0, len(b.params)) or b.in_motion or not b.left.holds(self.state):
                stale.append(b)
            elif there:
                moving.append(b)
        if stale:
            self._release(stale)
        if self._loose:
            free = [w for w in self._roster.curved if id(w.p) in self._loose and mover(w.p) is not None]
            moving += self._formed(free)
            self._loose.difference_update([id(w.p) for w in free])
        return moving

    def _follow_groups(self) -> None:
        """Start again from the groups if others have changed them."""
        if not self._roster.holds(self.param_groups):
            self._roster.renew(self.param_groups, self.state)
            self._release(self._batches)
            self._loose = set(self._roster.ids)

    def _release(self, batches: list[Batch]) -> None:
        """Dissolve batches; others will be formed of their weights."""
        for b in batches:
            b.dissolve(self.state)
            self._loose.update(map(id, b.params))
        self._batches = [b for b in self._batches if b not in batches]

    def _formed(self, free: list[Weight]) -> list[Batch]:
        """New batches of weights that are in none."""
        kinds, known = defaultdict(list), dict[tuple[Any, ...], Traits]()
        for w in free:
            check_movable(w, self.param_groups[w.gi])
            asked = w.gi, w.space, w.anchor is None, w.shape, w.p.is_complex()
            how = known[asked] = known.get(asked) or self._traits(w)
            how = self._with_idle(w, how)
            kinds[(*kind_of(w, self.state, how.stacks), how)].append(w)
        new = list[Batch]()
        for (gi, *_, how), weights in kinds.items():
            states = [self.state.get(w.p) or {} for w in weights]
            b = Batch(weights, self.param_groups[gi], states, how, self._warn)
            b.own, b.lent = self.own_rule(b), changes(self.Base, b)
            b.state = b.state if b.state or b.own is None else b.own.state(b)
            new.append(b)
        for b in new:  # a state without the rule's part is more than some rules can load
            b.publish(self.state) if self.state.get(b.params[0]) else b.left.remember_state(self.state)
        self._batches += new
        return new

    def _with_idle(self, w: Weight, how: Traits) -> Traits:
        """Momentum in the state turns with the frame, too, if a group has switched it off for a while."""
        there = {k for k, v in self.state.get(w.p, {}).items() if is_per_coordinate(v, w.p.shape)}
        idle = there - how.odd - how.even - set(OUR_KEYS)
        if not (idle and how.turns):
            return how
        on = {k: switched_on(v) for k, v in self._options(w.gi).items()}
        return how._replace(odd=how.odd | (traits(self.inner, on, w.shape, w.p.is_complex()).odd & idle))

    def _asked(self, w: Weight) -> Traits:
        """What the rule is, on a weight like this."""
        how = traits(self.inner, self._options(w.gi), w.shape, w.p.is_complex())
        return how._replace(free=self.frameless)

    def _options(self, gi: int) -> dict[str, Any]:
        """The options of a group as they are now; as it was placed, what the rule may have counted there."""
        group, given = self.param_groups[gi], inspect.signature(self.Base.__init__).parameters
        first = self._first[gi] if gi < len(self._first) else group
        theirs = {k: v for k, v in first.items() if k not in (*GROUP_KEYS, "params", "param_names")}
        return {k: group.get(k, v) if k in given else v for k, v in theirs.items()}

    def _for_saving(self) -> None:
        """Release what a file would bring into another batch, or without its frame.

        So a run that was saved goes on as the one that loads does, to the bit.
        """
        kinds = defaultdict[Any, list[Batch]](list)
        for b in self._batches:
            alone = b.in_motion or not (b.stacks and b.left.holds(self.state))
            kinds[id(b) if alone else kind_of(b.weights[0], self.state)].append(b)
        self._release([b for alike in kinds.values() for b in alike if len(alike) > 1 or b.in_motion])

    # -- the inner optimizer -------------------------------------------------------------------------------

    def _lend(self, moving: list[Batch]) -> None:
        """Copy in: groups and state, with velocities in place of the weights that move."""
        inner, curved = self.inner, self._roster.ids
        self._parts = list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]()
        for gi, group in enumerate(self.param_groups):
            flat = list(self._roster.flat[gi])
            velocities = [b for b in moving if b.gi == gi and b.own is None]
            lent: dict[Any, list[Tensor]] = {UNCHANGED: flat} if flat or not velocities else {}
            for b in velocities:
                lent.setdefault(b.lent, []).append(b.H)
            for (changes, _), params in lent.items():
                self._parts.append((group, {**group, **dict(changes), "params": params}, dict(changes)))
        outside = {k: v for k, v in self.state.items() if id(k) not in curved}
        inner.state = defaultdict(dict, outside | {b.H: b.state for b in moving if b.state or b.own})
        inner.param_groups = [part for _, part, _ in self._parts]

    def _take_back(self, moving: list[Batch]) -> None:
        """Copy out: what the rule has changed in its groups and in its state."""
        inner, Hs = self.inner, {id(b.H) for b in moving}
        for group, part, changes in self._parts:
            group.update([(k, v) for k, v in part.items() if k != "params" and k not in changes])
        self.state.update([(k, v) for k, v in inner.state.items() if id(k) not in Hs])
        for b in moving:
            b.state = inner.state[b.H]


def kind_of(w: Weight, state: Any, stacks: bool = True) -> tuple[Any, ...]:
    """What the weights of a batch have in common."""
    anchor = "given" if torch.is_tensor(w.anchor) else w.anchor
    alike = shared_values(state.get(w.p), w.p.shape) if stacks else id(w.p)
    return w.gi, w.space, anchor, w.p.shape, w.p.dtype, w.p.device, placement(w.p), alike


def check_movable(w: Weight, group: dict[str, Any]) -> None:
    """Raise for a weight whose state means nothing, and for steps that gradients should go through."""
    if w.shape != w.p.shape:
        raise ValueError(
            f"{w.name} had shape {tuple(w.shape)} and has {tuple(w.p.shape)} now, for which the "
            "optimizer's state of it means nothing; build a new optimizer"
        )
    if group.get("differentiable"):
        raise RuntimeError(
            f"{w.name} is on {w.space}: differentiable=True does not go through the step of such a "
            "weight; set it to False in its group"
        )


def changes(Base: type[Optimizer], b: Batch) -> tuple[tuple[tuple[str, Any], ...], Any]:
    """Options that a velocity is lent with: fused kernels; no decay if there is nothing to decay to.

    And what it is lent apart for: a rule may take all of a group in one call, which wants one dtype, one
    kind of tensor.
    """
    off = () if b.anchor is not None else tuple((k, 0.0) for k in DECAYS if is_on(b.group.get(k)))
    quick = Base in FUSED and may_fuse(b.group) and can_fuse(b.H)
    apart = b.at.dtype if b.at.half or b.shards is not None else None
    return (*off, ("fused", True)) if quick else off, apart


def may_fuse(group: dict[str, Any]) -> bool:
    """Whether a group leaves the choice of kernels to us."""
    return group["fused"] is group["foreach"] is None and not group["differentiable"]


def can_fuse(H: Tensor) -> bool:
    """Whether torch has fused kernels for it."""
    return H.is_floating_point() and H.device.type in _get_fused_kernels_supported_devices()
