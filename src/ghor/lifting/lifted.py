"""One path: a step of the redesign as code, under the whole contract of torch.optim, on every space. Read from here:

    lifted.py       the optimizer: groups, files, the inner optimizer, which weights move
    batch.py        weights of one kind as points (M, N, n): layout, radius, state[p], the copies in and out
    frames.py       Lambda above a point, one formula of a step for each way to keep it; vectors.py: for n = 1
    spaces/         what an author of a space writes; one file a family
    law.py          what a rule is, asked of the rule: does it read its weight, may weights share a tensor, what turns
    retraction.py, layout.py, linalg.py     R(X), how points lie in a weight, products

A lifted optimizer is not of the class Base; it holds an ordinary object of it, `inner`, built by Base's own constructor
and kept for life, with all that the rule keeps on itself (`opt.inner.calls`). For a step it is lent groups and state
(`_lend`), with a velocity H in place of every batch of weights on a manifold, and what the rule has changed there is
copied out (`_take_back`). For all else, as new groups, files and copies, it has the user's own groups and state
(`_bring_home`), and Base's own methods do the work. Nothing is ever put back, because `param_groups` and `state` of the
outer optimizer are never anything but the user's. Five ideas do the rest:

    a batch is derived   all that a batch knows can be made again from the weights and state[p], to the bit.
                         Whoever touches a weight, its state or its group between two steps dissolves its
                         batch; weights with a gradient that are in no batch form new ones. Loading, copying,
                         late groups, missing gradients, writes and interrupts all come down to `_ready`
    one kind, one batch  the weights of a batch agree in all that the rule keeps of them other than numbers
                         per coordinate, as its step count: so counts cannot differ within a batch
    one flag             a batch is `in_motion` from the rule to the end of the step. Whoever finds it so
                         drops its frame, which may be off the group; the next step makes one above the weight
    nothing is read      in nine steps of ten, but on the CPU, where a comparison finds writes through .data: the
                         longest velocity is a running maximum, looked at when rounding is repaired, too
    any rule             g^hor is a vector space, so a rule steps there as in R^(N x n), and its W is projected to it.
                         A rule that does not read its weight finds H = 0. For one that does H is the weight,
                         developed: H_0 = Lambda^-1 Y = E, H_t = H_(t-1) + W_t, kept in state[p]["developed"]. Where
                         weights may not share a tensor, each has its own, of its own shape. State that does not
                         turn with a frame, a developed weight among it, has a stored one

Methods of Base that move weights, train and eval of schedule-free rules, move H, so they step the frame by the difference
(`handed_on`). Decay is off where there is no anchor, whether a rule decays before its step or after.

Where a point lives. Spheres and hyperbolic space read theirs from the weight in every step (`Frame.reads`): a write
through .data, which torch does not count, is simply where they go on. All other frames compare theirs with the weight,
one number read a step on the CPU; elsewhere a difference is a flag, read at the next look, and the write is lost.

What was measured (torch 2.13.0, CPU, one thread; tests/ has the commands). test_contract.py, test_more.py and test_any_rule.py: 2347 passed,
46 skipped (no complex numbers of half precision, no fused or scaled complex gradients in torch): Stiefel, flags, spheres,
hyperbolic space, SPD, SE(3), positions with orientations, symplectic and complex Stiefel. Among them resume to the bit of
11 rules, interrupts at every line (every fifth of some spaces), writes through .data equal to counted ones to 1e-12, one
graph and no recompilation.

test_any_rule.py: Prodigy at lr = 1, schedule-free AdamW, SOAP, Shampoo, CAME,
LAMB, MADGRAD, LARS, Adan, ASGD, Adafactor, Muon on 14 layouts and spaces: finite, on the space, resume (of five spaces in
three dtypes) and copies to the bit. Of the 148 classes of torch.optim and pytorch_optimizer (any_rule.py; asking takes 2.4 s
in all) 121 run as they are, and 97 come within 1e-2 of the optimum of a Procrustes problem in 300 steps at one of five
rates; the other 27 want a model, a closure, an option or a base optimizer, or are wrappers. Five Muons that want `use_muon`
in their groups run with it, and four reach 1e-2. On five spaces, 400 steps to a point or an eigenspace, the average of
schedule-free AdamW is on the space and nearer than the iterate (2e-6 -> 1e-8 on Stiefel, 6e-7 -> 5e-7 on SE(3)); Prodigy
at lr = 1 ends where Adam does at the best of three rates, but on SPD it is still 6e-2 away.

Beside ghor ba79b46, 25 steps, both retractions, float64 (check_head.py): 3e-15, but Adam on flags and on two rows of
spheres in closed form, where a reference differs and squares are not spread, and Adam on symplectic Stiefel where gradients
are 0 to rounding (1e-9). Reads (reads.py): none in a step but what a CPU reads for nothing (`perhaps`, and one number where points are compared); one in a look. On a
device that is not there (dry.py): 39 of 39 cases. Calls and switches of file of a step of 336 St(7,49) (calls.py): 50 and
31 (ghor 66 and 20), without counting comprehensions. torch's Muon and ASGD compile to one graph.

CPU time of a step of Adam beside ghor's, interleaved, one thread (bench.py): 336 St(7,49) 1.07, stacked 336 x 49 x 7 0.99,
3072 x 768 1.07, heads 108 x 768 x 64 1.30, rows 10000 x 64 1.08, 100000 x 3 1.06, hyperbolic 50000 x 11 1.01, radius 2 1.12,
SPD 500 x 8 x 8 1.14, SE(3) 5000 1.13; following .data is 1 to 9 % of it (radius 2: 16), the projection of W 1 to 4 %.

Not here: shards, frames for solvers (`push`, `along`), max_angle, error_if_nonfinite, matrix rules without a frame, rules
that call their closure themselves, wrappers whose `state` is a property. A developed weight takes the whole W where a
space shortens a step further (`room` of hyperbolic and symplectic frames). Rules are asked with sides of at most 64.
"""

from __future__ import annotations

import inspect
import operator
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from ghor._torch.bare_step import bare_step
from ghor._torch.precision import full_precision
from ghor._torch.warn import Warnings
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
from torch.utils.weak import WeakIdKeyDictionary

from ghor.lifting.batch import FRAME_KEYS, LOOK_EVERY, Batch, OwnRule, Weight, _grad, is_per_coordinate, same_objects, shared_values
from ghor.lifting.law import DECAYS, Traits, traits
from ghor.spaces.retraction import RETRACTIONS
from ghor.spaces.base import Space

GROUP_KEYS = ("space", "section", "retraction", "anchor")
SECTIONS = ("auto", "transported", "implicit")
FUSED = (torch.optim.Adam, torch.optim.AdamW)  # their fused kernels are the default on velocities

SCALER = ("_step_supports_amp_scaling", "grad_scale", "found_inf")  # what GradScaler reads, sets and deletes
HANDED_ON = ("train", "eval")  # methods of schedule-free rules, which training loops look for


# -- Algorithm 3 ---------------------------------------------------------------------------------------------


def _algorithm_3(rule: Callable[..., Any], inner: Optimizer, moving: list[Batch], grads: list[Tensor]) -> None:
    """What torch.compile makes one graph of; a function without tensors as arguments it passes by."""
    starts = [b.pull(G) for b, G in zip(moving, grads, strict=True)]  # B: rgrad, then global_rep
    rule(inner)  # W
    for b, start in zip(moving, starts, strict=True):
        b.move(inner.state[b.H], start)  # Lambda, and Y = Lambda E


def on_inner(name: str) -> property:
    """An attribute that the inner optimizer has, or has not."""
    return property(
        lambda self: getattr(self.inner, name),
        lambda self, value: setattr(self.inner, name, value),
        lambda self: delattr(self.inner, name),
    )


class Lifted(Optimizer):
    """Holds an ordinary optimizer, `inner`, which works on Euclidean weights and on velocities."""

    Base: type[Optimizer]
    frameless: ClassVar[bool] = False  # displacements do not depend on the frame, so that there need be none
    _step_supports_amp_scaling, grad_scale, found_inf = map(on_inner, SCALER)

    def __init__(
        self,
        params: Any,
        *args: Any,
        space: Space | None = None,
        section: str = "auto",
        retraction: str = "cayley",
        anchor: Any = None,
        **kwargs: Any,
    ) -> None:
        params = list(params.named_parameters()) if isinstance(params, nn.Module) else params
        self.inner = self.Base(params, *args, **kwargs)  # checks weights, groups and options
        ours = {"space": space, "section": section, "retraction": retraction, "anchor": anchor}
        super().__setstate__({"defaults": {**self.inner.defaults, **ours}})  # not __init__, which would check the groups again
        self._adopt()
        self._first = list[dict[str, Any]]()  # the groups as they were placed
        self._warn = Warnings()
        for group in self.param_groups:
            self._place(group)

    @torch.no_grad()
    @partial(_disable_dynamo, recursive=False)
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with full_precision():
            rule, moving, grads = self._before()
            _algorithm_3(rule, self.inner, moving, grads)
            self._after(moving)
        return loss

    @_disable_dynamo
    def _before(self) -> tuple[Callable[..., Any], list[Batch], list[Tensor]]:
        moving, new = self._ready()
        self._lend(moving)
        if new and self.Base.__module__.startswith("torch."):
            self._make_state()
            self._take_back(moving)
            self._lend(moving)  # once more, in the order of later steps
        grads = [b.gather() for b in moving]
        for b in moving:
            b.in_motion = True
        return bare_step(self.Base, self.defaults.get("differentiable", False)), moving, grads

    @_disable_dynamo
    def _after(self, moving: list[Batch]) -> None:
        for b in moving:
            b.scatter()
        self._take_back(moving)
        if moving:
            torch._foreach_add_([b.moves for b in moving], 1)
        for b in moving:
            b.age += 1
            if b.age % LOOK_EVERY == 0:
                b.look(self._warn)
            b.leave()
            b.in_motion = False
        if self._warn.pending:
            self._warn.flush()

    # -- what a class of ours may say of its rule

    def own_rule(self, b: Batch) -> OwnRule | None:
        """Our own rule for weights on manifolds, in place of Base's."""
        return None

    def multiple(self, group: dict[str, Any]) -> Any:
        """The number a in W = a m, where Base's rule with the one moment m is so simple."""
        return None

    # -- which weights move

    def _ready(self, mover: Callable[[Tensor], Any] = _grad) -> tuple[list[Batch], bool]:
        """The batches that move, and whether some are new.

        Weights move that have a gradient, or another `mover` that is not None. A batch dissolves if someone has touched
        it, or if only some of its weights move; those in no batch form new ones, from the weights and state[p].
        """
        self._settle()
        if not self._groups_hold():
            self._regroup()
        kept, moving, new = [], [], []
        for b in self._batches:
            there = sum(g is not None for g in map(mover, b.params))
            if b.as_left(self.state) and there in (0, len(b.params)):
                kept.append(b)
                moving += [b] if there else []
            else:
                b.forgive(self.state)
                self._loose += map(id, b.params)
        if self._loose:
            loose = set(self._loose)
            free = [w for w in self._weights if id(w.p) in loose and mover(w.p) is not None]
            new = self._formed(free)
            self._loose = list(loose.difference(id(w.p) for w in free))
        self._batches = kept + new
        for b in self._batches:
            b.group = self.param_groups[b.gi]
            b.decays = b.anchor is not None and any(b.group.get(key) for key in DECAYS)
            b.own, b.multiple = self.own_rule(b), self.multiple(b.group)
            if b.own is not None and not b.state:
                b.state = b.own.state(b)
        return moving + new, bool(new)

    def _groups_hold(self) -> bool:
        """Whether the groups have the weights, the keys of ours and the switches that we know them with."""
        groups = self.param_groups
        return len(groups) == len(self._seen) and all(
            all(seen[key] is group[key] for key in GROUP_KEYS)
            and same_objects(seen["params"], group["params"])
            and seen["switches"].items() <= switches(group).items()
            for seen, group in zip(self._seen, groups, strict=True)
        )

    def _regroup(self) -> None:
        """Start again from the groups: which weights are curved, and where."""
        self._batches, self._weights = [], list[Weight]()
        for gi, group in enumerate(self.param_groups):
            count = len(group["params"])
            names = group.get("param_names") or [f"parameter {i} of group {gi}" for i in range(count)]
            columns = each(group, "space"), each(group, "anchor"), group["params"], names
            for space, anchor, p, name in zip(*columns, strict=True):
                if space is not None:
                    how = group["section"], group["retraction"], anchor
                    self._weights.append(Weight(gi, space, *how, p, p.shape, name))
        self._loose = [id(w.p) for w in self._weights]
        self._curved = frozenset(self._loose)
        self._seen = [{**g, "params": list(g["params"]), "switches": switches(g)} for g in self.param_groups]

    def _formed(self, free: list[Weight]) -> list[Batch]:
        """New batches of weights that are in none."""
        kinds, known = defaultdict(list), dict[tuple[Any, ...], Traits]()
        for w in free:
            if w.shape != w.p.shape:
                raise ValueError(f"{w.name} had the shape {tuple(w.shape)}, for which its state is; build a new optimizer")
            if self.param_groups[w.gi].get("differentiable"):
                raise RuntimeError(f"{w.name} is on {w.space}: differentiable=True does not go through its step")
            asked = w.gi, w.space, w.anchor is None, w.shape, w.p.is_complex()
            how = known[asked] = known.get(asked) or self._traits(w)
            anchor = "given" if torch.is_tensor(w.anchor) else w.anchor
            alike = shared_values(self.state.get(w.p), w.p.shape) if how.stacks else id(w.p)
            kinds[w.gi, w.space, anchor, w.p.shape, w.p.dtype, w.p.device, how, alike].append(w)
        new = [Batch(weights, [self.state.get(w.p) or {} for w in weights], kind[-2]) for kind, weights in kinds.items()]
        for b in new:  # a state without the rule's part is more than some rules can load
            b.publish(self.state) if self.state.get(b.params[0]) else b.note(self.state)
        return new

    def _traits(self, w: Weight) -> Traits:
        """How to run the rule on a weight."""
        how = self._asked(w)
        if w.section == "implicit" and not how.turns:
            raise ValueError(
                f"{self.Base.__name__} keeps state that cannot be taken to another frame: leave out section='implicit'"
            )
        if w.anchor is not None and how.reads:
            raise ValueError(f"{self.Base.__name__} reads its weight, which is developed from where it starts: leave out anchor")
        return how

    def _asked(self, w: Weight) -> Traits:
        """What the rule is, on a weight like this."""
        how = traits(self.inner, self._options(w.gi), w.shape, w.p.is_complex())
        return how._replace(free=self.frameless)

    def _options(self, gi: int) -> dict[str, Any]:
        """The options of a group as they are now, and as it was placed what the rule may have counted there since."""
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
                b.straighten()
                b.in_motion, b.versions = False, ()  # so that it is not as it was left
                self._warn("interrupted", "a step was interrupted: its sections are made again, moments are kept")

    # -- the inner optimizer

    def _lend(self, moving: list[Batch]) -> None:
        """Copy in: groups and state, with velocities in place of the weights that move."""
        inner, self._parts = self.inner, []
        for gi, group in enumerate(self.param_groups):
            lent = defaultdict[tuple[Any, ...], list[Tensor]](list)
            lent[()] += [p for p in group["params"] if id(p) not in self._curved]
            for b in moving:
                if b.gi == gi and b.own is None:
                    lent[self._changes(group, b)].append(b.H)
            for changes, params in lent.items():
                if params or len(lent) == 1:
                    self._parts.append((group, {**group, **dict(changes), "params": params}, dict(changes)))
        outside = {k: v for k, v in self.state.items() if id(k) not in self._curved}
        inner.state = defaultdict(dict, outside | {b.H: b.state for b in moving if b.state or b.own})
        inner.param_groups = [part for _, part, _ in self._parts]

    def _changes(self, group: dict[str, Any], b: Batch) -> tuple[tuple[str, Any], ...]:
        """Options that a velocity is lent with: no decay, unless there is something to decay to; fused kernels."""
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
        self._batches, self._seen = list[Batch](), list[dict[str, Any]]()

    def _make_state(self) -> None:
        """Let torch's rules make their state before the first step: a trace takes what it finds for all."""
        init = getattr(self.Base, "_init_group", None)
        lists = len(inspect.signature(init).parameters) - 2 if init else 0
        for part in self.inner.param_groups if init else ():
            init(self.inner, part, *([] for _ in range(lists)))

    # -- groups and files

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As Base does."""
        self._bring_home()
        self.inner.add_param_group(param_group)
        try:
            self._place(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise

    def _place(self, group: dict[str, Any]) -> None:
        """Put a group's weights on spaces: `space` becomes one, or None, or a tuple with one for each."""
        for key in GROUP_KEYS:
            group.setdefault(key, self.defaults[key])
        given = zip(group["params"], each(group, "space"), strict=True)
        spaces = [DECLARED.get(p) if space is None else space for p, space in given]
        for p, space in zip(group["params"], spaces, strict=True):
            if space is not None:
                space.check(p.shape, p.dtype)
        if group["section"] not in SECTIONS or group["retraction"] not in RETRACTIONS:
            raise ValueError(
                f"section {group['section']!r} is one of {SECTIONS}, retraction {group['retraction']!r} of {(*RETRACTIONS,)}"
            )
        group["space"] = spaces[0] if len(set(spaces)) == 1 else tuple(spaces)
        self._first.append({k: v for k, v in group.items() if k not in ("params", "param_names")})

    def state_dict(self) -> dict[str, Any]:
        """As Base does, and plain data."""
        self._settle()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._bring_home()
        out = plain(self.inner.state_dict())
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, out)
            out = out if changed is None else changed
        return out

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As Base does; weights on manifolds keep their space, and their state the dtype it was saved in."""
        saved, groups = state_dict.copy(), self.param_groups
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, saved)
            saved = saved if changed is None else changed
        for group, theirs in zip(groups, saved["param_groups"], strict=False):
            space, there = group["space"], theirs.get("space")
            if there is not None and there != plain_space(space):
                raise ValueError(f"weights on {space} cannot take a loaded state of {there}")
        self._bring_home()
        self.inner.load_state_dict(saved)  # casts all state to the weights' dtype
        self._adopt()
        for group, old, theirs in zip(self.param_groups, groups, saved["param_groups"], strict=True):
            group.update({**old, **group, "space": old["space"], "anchor": old["anchor"]})
            for p, space, key in zip(group["params"], each(group, "space"), theirs["params"], strict=True):
                if space is not None and not self._restore(p, saved["state"].get(key) or {}):
                    text = "the loaded state has no section for weights on manifolds: they start afresh"
                    self._warn("fresh", text)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)
        self._warn.flush()

    def _restore(self, p: Tensor, saved: dict[str, Any]) -> bool:
        """Take a weight's tensors as they were saved; whether its moments mean something in g^hor."""
        if "moves" in saved:
            self.state[p].update((k, copied(v)) for k, v in saved.items() if k != "step")
            return True
        lost = any(is_per_coordinate(v, p.shape) and bool(v.any()) for v in saved.values())
        if lost:
            del self.state[p]
        return not lost

    def __getstate__(self) -> dict[str, Any]:
        """torch's three entries, and the inner optimizer with all that the rule keeps on itself."""
        self._settle()
        self._bring_home()
        ours = {"inner": self.inner, "kept": vars(self.inner), "_warn": self._warn, "_first": self._first}
        return {**super().__getstate__(), **ours}  # torch drops what is in `kept`

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = state.pop("kept")
        super().__setstate__(state)
        vars(self.inner).update(kept)
        self._adopt()


def handed_on(name: str) -> Callable[..., Any]:
    """A method of Base that moves weights: of Euclidean ones as there, of others by a step to where it takes H."""

    @torch.no_grad()
    def method(self: Lifted, *args: Any, **kwargs: Any) -> Any:
        with full_precision():
            moving, _ = self._ready(lambda p: self.state.get(p, {}).get("developed"))
            self._lend(moving)
            for b in moving:
                b.follow()
                b.in_motion = True
                b.unroll()
            out = getattr(self.inner, name)(*args, **kwargs)
            for b in moving:
                b.push(self.inner.state[b.H], b.developed)
                b.scatter()
            self._take_back(moving)
            for b in moving:
                b.leave()
                b.in_motion = False
        return out

    return method


def switches(group: dict[str, Any]) -> dict[str, Any]:
    """What may change how a rule is run: flags, names, and whether other numbers are 0."""
    of_kind = {k: v for k, v in group.items() if k != "lr" and isinstance(v, (int, float, str, type(None)))}
    return {k: v if isinstance(v, str) else bool(v) for k, v in of_kind.items()}


def may_fuse(group: dict[str, Any]) -> bool:
    """Whether a group leaves the choice of kernels to us."""
    free = group["fused"] is group["foreach"] is None and not group["differentiable"]
    return free and not torch.is_tensor(group["lr"])


def can_fuse(H: Tensor) -> bool:
    """Whether torch has fused kernels for it."""
    return H.is_floating_point() and H.device.type in _get_fused_kernels_supported_devices()


# -- plain data ----------------------------------------------------------------------------------------------

DECLARED = WeakIdKeyDictionary()  # spaces of weights


def declare(p: nn.Parameter, space: Space) -> nn.Parameter:
    """Put a weight on a space, for every optimizer that takes it."""
    DECLARED[p] = space
    return p


def each(group: dict[str, Any], key: str) -> list[Any]:
    """An entry of ours for every weight of a group."""
    value = group[key]
    return list(value) if isinstance(value, (list, tuple)) else [value] * len(group["params"])


def copied(value: Any) -> Any:
    """A copy of the tensors in a value."""
    if torch.is_tensor(value):
        return value.clone()
    if isinstance(value, dict):
        return type(value)((k, copied(v)) for k, v in value.items())
    return type(value)(map(copied, value)) if type(value) in (list, tuple) else value


def plain_space(space: Any) -> Any:
    """The repr of a space, or of each of several."""
    return list(map(plain_space, space)) if isinstance(space, tuple) else space and repr(space)


def owned(value: Tensor) -> Tensor:
    """A tensor of state[p] for a file: members of a batch share numbers, and views lie as the batch does."""
    return value.clone() if value.dim() == 0 else value.contiguous()


def plain(out: dict[str, Any]) -> dict[str, Any]:
    """torch's state dict as plain data: contiguous, a step count for each weight, spaces as their repr."""
    for key, entries in out["state"].items():
        if isinstance(entries, dict) and "moves" in entries:
            out["state"][key] = {k: owned(v) if torch.is_tensor(v) else v for k, v in entries.items()}
    for group in out["param_groups"]:
        group["space"] = plain_space(group["space"])
        group["anchor"] = None if group["anchor"] is None else "held"  # once a weight has moved, its state holds the point
        for key in group["params"] if out["state"] else ():
            out["state"].setdefault(key, {})  # distributed checkpoints want a state for every weight, or for none
    return out


# -- lift ----------------------------------------------------------------------------------------------------


def lift(Base: type[Optimizer]) -> type[Lifted]:
    """A class that takes weights on manifolds, and holds an optimizer of the class Base."""

    def __init__(self: Lifted, *args: Any, **kwargs: Any) -> None:
        Lifted.__init__(self, *args, **kwargs)

    theirs, ours = (inspect.signature(cls.__init__).parameters.values() for cls in (Base, Lifted))
    both = [*theirs, *(q for q in ours if q.kind is q.KEYWORD_ONLY)]
    __init__.__signature__ = inspect.Signature(sorted(both, key=operator.attrgetter("kind")))
    names = {name: handed_on(name) for name in HANDED_ON if hasattr(Base, name)}
    return type(Base.__name__, (Lifted,), {"Base": Base, "__module__": __name__, "__init__": __init__, **names})


NAMES = ("Adam", "AdamW", "SGD", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop")
globals().update({name: lift(getattr(torch.optim, name)) for name in NAMES})
