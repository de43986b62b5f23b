"""Algorithm 3 of the paper: any optimizer on homogeneous spaces.

    t      <- t + 1
    Delta  <- rgrad(grad L)                        Riemannian gradient
    B      <- global_rep(Lambda, Delta)            in g^hor, one vector space for the whole run
    cache  <- update(cache, B)                     \\  an ordinary optimizer: g^hor is an ordinary
    W      <- velocity(cache)                      /  vector space, so torch.optim does this as it is
    Lambda <- update_section(Lambda, W)            Lambda R(W), R a retraction
    Y      <- apply_section(Lambda, E)

A lifted optimizer holds an ordinary one, `inner`, built by the constructor of its class, called Base
throughout, and kept for life. For a step `inner` is lent groups and state, with a velocity H in place of
every batch of weights on a manifold and B as its gradient; whatever it adds to H is W. Euclidean weights go
there as they are, so their steps are torch's, bit for bit. What the rule has changed in its groups and its
state is copied out. For all else, as new groups, files and copies, `inner` has the user's own groups and
state, and Base's own methods do the work. Nothing is ever put back, because `param_groups` and `state` of the
outer optimizer are never anything but the user's. A step goes through the files in one direction:

    lifted -> batch -> layout, spaces/frames -> spaces -> retraction, linalg

A batch is derived: all that it knows can be made again from its weights and state[p], to the bit. Whoever
touches a weight, its state or its group between two steps dissolves its batch, and weights with a gradient
that are in no batch form new ones. Loading, copying, late groups, missing gradients, writes and interrupts
all come down to `_ready`. A batch is `in_motion` from the rule to the end of a step. Whoever finds it so
drops its frame, which may be off the group; the next step makes one above the weight, which is whole.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from ghor._torch.bare_step import bare_step
from ghor._torch.precision import full_precision
from ghor._torch.sharding import full_tensor, placement, reshard
from ghor._torch.warn import Warnings
from ghor.constraints.declare import declared_spaces
from ghor.constraints.registry import Record, lost_beside, lost_message
from ghor.lifting import files
from ghor.lifting.batch import (
    FRAME_KEYS,
    OUR_KEYS,
    Batch,
    OwnRule,
    _grad,
    is_per_coordinate,
    same_objects,
    shared_values,
)
from ghor.lifting.groups import (
    GROUP_KEYS,
    Weight,
    admitted,
    check_memory,
    check_options,
    listed,
    named_duplicate,
    names_of,
    refuse_late_declarations,
    refuse_shared_memory,
    with_names,
)
from ghor.lifting.law import DECAYS, Traits, traits
from ghor.spaces import Space

FUSED = (torch.optim.Adam, torch.optim.AdamW)  # their fused kernels are the default on velocities
SCALER = ("_step_supports_amp_scaling", "grad_scale", "found_inf")  # what GradScaler reads, sets and deletes
DERIVED = (
    "_batches",
    "_loose",
    "_curved",
    "_seen",
    "_parts",
    "_weights",
    "_placed",
)  # rebuilt, and not pickled


# -- Algorithm 3 ---------------------------------------------------------------------------------------------


def pull(b: Batch, G: Tensor) -> Tensor | None:
    """B: rgrad, then global_rep. torch.compile makes a graph of it for each kind of batch."""
    return b.pull(G)


def push(b: Batch, W: Tensor, state: dict[str, Any], start: Tensor | None) -> None:
    """Lambda <- Lambda R(W), and Y = Lambda E: another graph. (What is given no tensor is not compiled.)"""
    b.move(state, start)


def on_inner(name: str) -> property:
    """An attribute that the inner optimizer has, or has not."""
    return property(
        lambda self: getattr(self.inner, name),
        lambda self, value: setattr(self.inner, name, value),
        lambda self: delattr(self.inner, name),
    )


class _Signature:
    """`inspect.signature` of a lifted class: parameters of Base, or of its own constructor, and then ours."""

    def __get__(self, optimizer: object, cls: type[Lifted]) -> inspect.Signature:
        init = cls.Base.__init__ if cls.__init__ is Lifted.__init__ else cls.__init__
        theirs = [p for p in list(inspect.signature(init).parameters.values())[1:] if p.name != "ours"]
        ours, names = inspect.signature(Lifted.__init__).parameters.values(), {p.name for p in theirs}
        added = [p for p in ours if p.kind is p.KEYWORD_ONLY and p.name not in names]
        # Stable: our keywords come after theirs, and before their **kwargs.
        return inspect.Signature(sorted([*theirs, *added], key=lambda p: p.kind))


class Lifted(Optimizer):
    """The part that all lifted optimizers share; an optimizer of the class `Base` works in g^hor."""

    __signature__: ClassVar[_Signature] = _Signature()

    Base: ClassVar[type[Optimizer]]
    frameless: ClassVar[bool] = False  # displacements do not depend on the frame, so that there need be none

    inner: Optimizer
    _batches: list[Batch]
    _weights: list[Weight]  # those on manifolds
    _loose: list[int]  # ids of those in no batch
    _seen: list[dict[str, Any]]  # the groups as they were
    _placed: list[list[Weight]]  # the weights of each group
    _declared: int  # `Record.changes` of the time
    _step_supports_amp_scaling, grad_scale, found_inf = map(on_inner, SCALER)

    def __init__(
        self,
        params: Any,
        *args: Any,
        space: Space | Sequence[Space | None] | None = None,
        retraction: str = "cayley",
        section: str = "auto",
        max_angle: float | None = None,
        error_if_nonfinite: bool = False,
        anchor: Any = None,
        **kwargs: Any,
    ) -> None:
        ours = (space, retraction, section, max_angle, error_if_nonfinite, anchor)
        self._warn, self._named, self._explicit = Warnings(), isinstance(params, nn.Module), space is not None
        if isinstance(params, nn.Module):
            reshard(params)
            params = [(name, p) for name, p, _ in declared_spaces(params)]
        params = listed(params)
        try:
            with explained(self.Base):
                self.inner = self.Base(self.sorted(params), *args, **kwargs)
        except ValueError as error:
            raise named_duplicate(params, error) from None
        # Not Optimizer.__init__, which would take the groups once more.
        super().__setstate__(
            {"defaults": {**self.inner.defaults, **dict(zip(GROUP_KEYS, ours, strict=True))}}
        )
        self._adopt()
        self._first = list[dict[str, Any]]()  # the groups as they were placed
        for group in self.param_groups:
            self._place(group)
        self._warn_of_surprises()
        if self.state and not any(
            group.get("differentiable") or any(p.is_meta for p in group["params"])
            for group in self.param_groups
        ):  # Adagrad has state from the start, and that includes ours
            with torch.no_grad(), full_precision():
                self._ready(lambda p: self.state.get(p) or None)
        self._warn.flush()

    # -- the step ------------------------------------------------------------------------------------------

    @torch.no_grad()
    @partial(_disable_dynamo, recursive=False)
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; a closure is called once, with gradients enabled, and its value returned.

        torch.compile makes graphs of `pull` and `push`; torch's rule, copies and looks stay out.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with full_precision():
            moving, grads = self._before()
            starts = [pull(b, G) for b, G in zip(moving, grads, strict=True)]  # B
            self._rule()  # W
            for b, start in zip(moving, starts, strict=True):
                push(b, b.H, self.inner.state[b.H], start)  # Lambda, Y
            self._after(moving)
        return loss

    @_disable_dynamo
    def _before(self) -> tuple[list[Batch], list[Tensor]]:
        """The batches that move, and their gradients; the inner optimizer is lent groups and state."""
        if any([group["error_if_nonfinite"] for group in self.param_groups]):  # noqa: C419 (a generator costs calls)
            self._refuse_nonfinite()
        moving = self._ready()
        self._lend(moving)
        grads = [b.gather() for b in moving]
        for b in moving:
            b.in_motion = True
        return moving, grads

    @_disable_dynamo
    def _rule(self) -> None:
        with explained(self.Base):
            bare_step(self.Base, self.defaults.get("differentiable", False))(self.inner)

    @_disable_dynamo
    def _after(self, moving: list[Batch]) -> None:
        for b in moving:
            b.scatter()
        self._take_back(moving)
        for b in moving:
            b.end()
            b.leave()
            b.in_motion = False
        if self._warn.pending:
            self._warn.flush()

    def _refuse_nonfinite(self) -> None:
        """Raise for gradients that are not finite, in the groups that ask for it.

        A gradient scaler skips such steps itself, and sets `found_inf` to do so.
        """
        if getattr(self, "found_inf", None) is not None:
            return
        for gi, group in enumerate(self.param_groups):
            for p, name in (
                zip(group["params"], names_of(group, gi), strict=True) if group["error_if_nonfinite"] else ()
            ):
                grad = p.grad if p.grad is None or not p.grad.is_sparse else p.grad.to_dense()
                if grad is not None and int(full_tensor(torch.isfinite(grad).logical_not_().sum())):
                    raise RuntimeError(
                        f"the gradient of {name} is not finite; nothing was moved (error_if_nonfinite=True)"
                    )

    # -- what a class of ours may say of its rule ----------------------------------------------------------

    def sorted(self, params: Any) -> Any:
        """Parameters or groups as Base is given them."""
        return params

    def own_rule(self, b: Batch) -> OwnRule | None:
        """Our own rule for weights on manifolds, in place of Base's."""
        return None

    def multiple(self, group: dict[str, Any]) -> Any:
        """The number a in W = a m, where Base's rule with the one moment m is so simple."""
        return None

    # -- which weights move --------------------------------------------------------------------------------

    def _ready(self, mover: Callable[[Tensor], Any] = _grad) -> list[Batch]:
        """The batches that move.

        Weights move that have a gradient, or another `mover` that is not None. A batch dissolves if someone
        has touched it, or if only some of its weights move; those in no batch form new ones, from weights and
        state[p].
        """
        self._settle()
        if not self._groups_hold():
            self._regroup()
        kept, moving = list[Batch](), list[Batch]()
        for b in self._batches:
            b.say_shared()
            there = sum(g is not None for g in map(mover, b.params))
            if b.as_left(self.state) and there in (0, len(b.params)):
                kept.append(b)
                moving += [b] if there else []
            else:
                b.dissolve(self.state)
                self._loose += map(id, b.params)
        if self._loose:
            loose = set(self._loose)
            free = [w for w in self._weights if id(w.p) in loose and mover(w.p) is not None]
            new = self._formed(free)
            moving, kept = moving + new, kept + new
            self._loose = list(loose.difference(id(w.p) for w in free))
        self._batches = kept
        for b in kept:
            b.group = self.param_groups[b.gi]
            b.decays = b.anchor is not None and any(b.group.get(key) for key in DECAYS)
            b.own, b.multiple = self.own_rule(b), self.multiple(b.group)
            if b.own is not None and not b.state:
                b.state = b.own.state(b)
        return moving

    def _groups_hold(self) -> bool:
        """Whether the groups have the weights, the keys of ours and the switches that we know them with."""
        groups = self.param_groups
        return (
            Record.changes == self._declared
            and len(groups) == len(self._seen)
            and all(
                all(seen[key] is group[key] for key in GROUP_KEYS)
                and same_objects(seen["params"], group["params"])
                and (
                    all(group.get(key) is value for key, value in seen["fixed"])
                    if seen["fixed"]
                    else seen["switches"].items() <= switches(group).items()
                )
                for seen, group in zip(self._seen, groups, strict=True)
            )
        )

    def _regroup(self) -> None:
        """Start again from the groups: which weights are on manifolds, and where."""
        if self._declared != Record.changes:
            refuse_late_declarations(self.param_groups, [w for ws in self._placed for w in ws])
        before = {id(w.p): w for weights in self._placed for w in weights}
        for gi, group in enumerate(self.param_groups):
            check_options(group, gi)
            if not self._is_placed(gi):
                self._placed[gi : gi + 1] = [admitted(group, gi, self.defaults, self._warn)]
        del self._placed[len(self.param_groups) :]
        every = [w for weights in self._placed for w in weights]
        refuse_shared_memory(every)
        for w in every:
            if w.curved:
                check_memory(w)
            then = before.get(id(w.p), w)
            if then.space != w.space and self.state.get(w.p):
                raise ValueError(
                    f"{w.name} went from {then.space} to {w.space} after steps were taken; its state means "
                    "nothing there, so build a new optimizer"
                )
        for b in self._batches:
            b.dissolve(self.state)
        self._batches, self._weights = [], [w for w in every if w.curved]
        self._loose = [id(w.p) for w in self._weights]
        self._curved = frozenset(self._loose)
        self._seen = [
            {**g, "params": list(g["params"]), "switches": switches(g), "fixed": fixed(g)}
            for g in self.param_groups
        ]
        self._declared = Record.changes

    def _is_placed(self, gi: int) -> bool:
        """Whether a group's weights are those that were admitted, on the spaces of the time."""
        if gi >= min(len(self._placed), len(self._seen)):
            return False
        seen, group = self._seen[gi], self.param_groups[gi]
        same = same_objects(seen["params"], group["params"])
        return same and all(seen[key] is group[key] for key in ("space", "anchor"))

    def _formed(self, free: list[Weight]) -> list[Batch]:
        """New batches of weights that are in none."""
        kinds, known = defaultdict(list), dict[tuple[Any, ...], Traits]()
        for w in free:
            self._check_movable(w)
            asked = w.gi, w.space, w.anchor is None, w.shape, w.p.is_complex()
            how = known[asked] = known.get(asked) or self._traits(w)
            how = self._with_idle(w, how)
            kinds[(*self._kind(w, how.stacks), how)].append(w)
        new = [
            Batch(
                weights,
                self.param_groups[weights[0].gi],
                [self.state.get(w.p) or {} for w in weights],
                how,
                self._warn,
            )
            for (*_, how), weights in kinds.items()
        ]
        for b in new:  # a state without the rule's part is more than some rules can load
            b.publish(self.state) if self.state.get(b.params[0]) else b.note(self.state)
        return new

    def _kind(self, w: Weight, stacks: bool = True) -> tuple[Any, ...]:
        """What the weights of a batch have in common."""
        anchor = "given" if torch.is_tensor(w.anchor) else w.anchor
        alike = shared_values(self.state.get(w.p), w.p.shape) if stacks else id(w.p)
        return w.gi, w.space, anchor, w.p.shape, w.p.dtype, w.p.device, placement(w.p), alike

    def _check_movable(self, w: Weight) -> None:
        if w.shape != w.p.shape:
            raise ValueError(
                f"{w.name} had shape {tuple(w.shape)} and has {tuple(w.p.shape)} now, for which the "
                "optimizer's state of it means nothing; build a new optimizer"
            )
        if self.param_groups[w.gi].get("differentiable"):
            raise RuntimeError(
                f"{w.name} is on {w.space}: differentiable=True does not go through the step of such a "
                "weight; set it to False in its group"
            )

    def _traits(self, w: Weight) -> Traits:
        """How to run the rule on a weight."""
        how, name = self._asked(w), self.Base.__name__
        if self.param_groups[w.gi]["section"] == "implicit" and not how.turns:
            raise ValueError(
                f"{w.name}: {name} keeps state, such as a moment beside the square of another, that cannot "
                "be taken to another frame, as section='implicit' would; use section='transported'"
            )
        if w.anchor is not None and how.reads:
            raise ValueError(
                f"{w.name}: {name} reads its weight, which is developed from where it starts, so decay "
                "cannot draw it to an anchor; leave out anchor"
            )
        return how

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

    def _settle(self) -> None:
        """Drop frames that an interrupted step may have left off the group; moments are kept."""
        for b in self._batches:
            if b.in_motion:
                for p, key in ((p, key) for p in b.params for key in (*FRAME_KEYS, "master")):
                    self.state.get(p, {}).pop(key, None)
                b.in_motion, b.versions = False, ()  # so that it is not as it was left
                self._warn(
                    "interrupted", "the last step was interrupted; sections will be rebuilt, moments kept"
                )

    # -- the inner optimizer -------------------------------------------------------------------------------

    def _lend(self, moving: list[Batch]) -> None:
        """Copy in: groups and state, with velocities in place of the weights that move."""
        inner, self._parts = self.inner, list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]()
        for gi, group in enumerate(self.param_groups):
            lent = defaultdict[tuple[Any, ...], list[Tensor]](list)
            lent[None, ()] += [p for p in group["params"] if id(p) not in self._curved]
            for b in moving:
                if b.gi == gi and b.own is None:
                    # A rule may take all of a group in one call, which wants one dtype, one kind of tensor.
                    apart = b.dtype if b.half or b.shards is not None else None
                    lent[apart, self._changes(group, b)].append(b.H)
            for (_, changes), params in lent.items():
                if params or len(lent) == 1:
                    self._parts.append((group, {**group, **dict(changes), "params": params}, dict(changes)))
        outside = {k: v for k, v in self.state.items() if id(k) not in self._curved}
        inner.state = defaultdict(dict, outside | {b.H: b.state for b in moving if b.state or b.own})
        inner.param_groups = [part for _, part, _ in self._parts]

    def _changes(self, group: dict[str, Any], b: Batch) -> tuple[tuple[str, Any], ...]:
        """Options that a velocity is lent with: fused kernels; no decay if there is nothing to decay to."""
        off = () if b.anchor is not None else tuple((k, 0.0) for k in DECAYS if group.get(k))
        quick = self.Base in FUSED and may_fuse(group) and can_fuse(b.H)
        return (*off, ("fused", True)) if quick else off

    def _take_back(self, moving: list[Batch]) -> None:
        """Copy out: what the rule has changed in its groups and in its state."""
        inner, Hs = self.inner, {id(b.H) for b in moving}
        for group, part, changes in self._parts:
            group.update((k, v) for k, v in part.items() if k != "params" and k not in changes)
        self.state.update((k, v) for k, v in inner.state.items() if id(k) not in Hs)
        for b in moving:
            b.state = inner.state[b.H]
            b.publish(self.state)

    def _bring_home(self) -> None:
        """Outside of steps, let the inner optimizer have our groups and state themselves."""
        self.inner.param_groups, self.inner.state = self.param_groups, self.state

    def _adopt(self) -> None:
        """Start again from the groups and state that the inner optimizer has."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self._batches, self._weights, self._loose = [], [], []
        self._seen, self._placed, self._declared = [], [], -1

    # -- groups --------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; a group may set the options that are ours: `space`, `retraction`, `section`, ..."""
        self._bring_home()
        (param_group,) = listed([param_group])
        if self._named:  # the other groups have the names of the module
            param_group = with_names(param_group, len(self.param_groups))
        try:
            self.inner.add_param_group(param_group)
        except ValueError as error:
            raise named_duplicate([*self.param_groups, param_group], error) from None
        try:
            self._place(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise
        self._warn.flush()

    def _place(self, group: dict[str, Any]) -> None:
        """Put a group's weights on their spaces."""
        gi = len(self._first)
        for key in GROUP_KEYS:
            group.setdefault(key, self.defaults[key])
        self._explicit |= group["space"] is not None
        weights = admitted(group, gi, self.defaults, self._warn)
        refuse_shared_memory([w for placed in self._placed[:gi] for w in placed] + weights)
        self._placed[gi:] = [weights]
        self._first.append({k: v for k, v in group.items() if k not in ("params", "param_names")})
        try:
            self._check_kinds(group, weights)
        except BaseException:
            del self._first[gi:], self._placed[gi:]
            raise
        self._seen[gi:], self._declared = [{**group, "params": list(group["params"])}], -1
        decay = next(
            (group[k] for k in DECAYS if group.get(k) and group[k] != self.inner.defaults.get(k)), None
        )
        self._warn_of_decay(decay, f"the weights of group {gi}, on {group['space']}", weights)

    def _check_kinds(self, group: dict[str, Any], weights: list[Weight]) -> None:
        """Raise if a weight cannot have the section, or the anchor, that its group asks for."""
        for w in weights:
            if w.curved and group["section"] == "implicit" and not w.space.implicit:
                raise ValueError(f"{w.name}: {w.space} has no implicit section; use section='transported'")
            if w.curved and (group["section"] == "implicit" or w.anchor is not None):
                self._traits(w)

    def _warn_of_decay(self, decay: Any, where: str, weights: list[Weight]) -> None:
        if decay and weights and all(w.curved and w.anchor is None for w in weights):
            self._warn(
                "decay",
                f"weight_decay={decay} has no effect on {where}: they do not decay without an anchor "
                "(paper, section 4.1)",
            )

    def _warn_of_surprises(self) -> None:
        """Warn about decay without effect, no weight on a manifold, and weights that are none any more."""
        weights = [w for placed in self._placed for w in placed]
        decay, given = (
            self.defaults.get("weight_decay"),
            inspect.signature(self.Base).parameters.get("weight_decay"),
        )
        if given is not None and decay != given.default:
            self._warn_of_decay(decay, "these weights: all of them are on manifolds", weights)
        if not (self._explicit or self._named):  # for a module and its groups it has been said already
            lost = lost_beside({id(w.p) for w in weights})
            if lost:
                self._warn("lost", lost_message(lost))
        if not self._explicit and not any(w.curved for w in weights):
            self._warn(
                "flat",
                f"{type(self).__name__}: no parameter is on a manifold, so this is torch's "
                f"{self.Base.__name__}. Declare weights with ghor.constrain(module, name, space) and pass "
                "the model, or give the groups a 'space' (space=ghor.Euclidean() if that is meant)",
            )

    # -- saving, loading, copying --------------------------------------------------------------------------

    def _for_saving(self) -> None:
        """Make one batch, from the next step on, of weights that a file would bring into one.

        So a run that was saved goes on as the one that loads does, to the bit.
        """
        self._settle()
        kinds = defaultdict[Any, list[Batch]](list)
        for b in self._batches:
            if b.stacks and b.as_left(self.state):
                kinds[self._kind(b.weights[0])].append(b)
        for alike in kinds.values():
            for b in alike if len(alike) > 1 else ():
                b.versions = ()

    @_disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """As in torch, and plain data: spaces are saved as their repr."""
        self._for_saving()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._bring_home()
        out = files.plain(self.param_groups, self.inner.state_dict())
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, out)
            out = out if changed is None else changed
        return out

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; sections and moments of weights on manifolds keep the dtype they were saved in.

        From a state dict of the plain optimizer the Euclidean weights load their state, and weights on
        manifolds start afresh. A section that is damaged, or belongs to another space, raises an error, and
        nothing is loaded.
        """
        saved, groups = state_dict.copy(), self.param_groups
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, saved)
            saved = saved if changed is None else changed
        self._check_loaded(saved)
        self._bring_home()
        placed = self._placed
        self.inner.load_state_dict(saved)  # casts all state to the weights' dtype
        self._adopt()
        files.keep_our_keys(self.param_groups, groups)
        self._restore(saved)
        self._placed = placed
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)
        self._warn.flush()

    def _check_loaded(self, saved: dict[str, Any]) -> None:
        """Raise for a state dict, as the user's hooks have left it, that means nothing here."""
        files.check_loaded(self.param_groups, saved, self._warn)

    def _restore(self, saved: dict[str, Any]) -> None:
        """Undo the cast of state to the weights' dtype."""
        files.restore(self.param_groups, self.state, saved, self._warn)

    def __getstate__(self) -> dict[str, Any]:
        """torch's three entries, the inner optimizer with what the rule keeps on it, the user's attributes.

        Hooks, derived attributes and methods overridden on the instance (schedulers wrap `step`) are left
        out: they are bound to this optimizer.
        """
        self._for_saving()
        self._bring_home()
        rest = {
            k: v
            for k, v in vars(self).items()
            if k not in DERIVED
            and not k.startswith("_optimizer_")
            and not callable(getattr(type(self), k, None))
        }
        return {**rest, **super().__getstate__(), "kept": vars(self.inner)}  # torch drops what is in `kept`

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = state.pop("kept")
        super().__setstate__(state)
        vars(self.inner).update(kept)
        self._adopt()


class explained:
    """Errors of rules that want more than a lift gives say so, beside what they are."""

    def __init__(self, Base: type[Optimizer]) -> None:
        self.Base = Base

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        Base = self.Base
        if isinstance(error, Exception) and not Base.__module__.startswith(("torch.", "ghor.")):
            error.add_note(
                f"(ghor.lift({Base.__name__}) builds {Base.__name__}(params, ...) from parameter groups, "
                "and calls its step() with gradients in place: it has no model, no other optimizer, no "
                "closure and no second gradient to give)"
            )


def switches(group: dict[str, Any]) -> dict[str, Any]:
    """What may change how a rule is run: flags, names, and whether other numbers are 0."""
    return {k: is_on(v) for k, v in group.items() if k not in ("lr", "params", "param_names", *GROUP_KEYS)}


def fixed(group: dict[str, Any]) -> list[tuple[str, Any]]:
    """The options that `switches` looks at, if each of them is a value that does not change: else none."""
    options = [(k, v) for k, v in group.items() if k not in ("lr", "params", "param_names", *GROUP_KEYS)]
    values = [x for _, v in options for x in (v if type(v) is tuple else [v])]
    return options if all(x is None or type(x) in (int, float, bool, str) for x in values) else []


def is_on(value: Any) -> Any:
    """A name, or whether a number is not 0; numbers on other devices are not read."""
    if isinstance(value, (tuple, list)):
        return tuple(map(is_on, value))
    if torch.is_tensor(value):
        return value.dim() > 0 or value.device.type != "cpu" or bool(value)
    return bool(value) if isinstance(value, (int, float)) else value


def switched_on(value: Any) -> Any:
    """The same kind of value with numbers that are not 0."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(switched_on, value))
    if torch.is_tensor(value):
        return value if is_on(value) else torch.full_like(value, 0.5)
    return 0.5 if type(value) in (int, float) and value == 0 else value


def may_fuse(group: dict[str, Any]) -> bool:
    """Whether a group leaves the choice of kernels to us."""
    return group["fused"] is group["foreach"] is None and not group["differentiable"]


def can_fuse(H: Tensor) -> bool:
    """Whether torch has fused kernels for it."""
    return H.is_floating_point() and H.device.type in _get_fused_kernels_supported_devices()
