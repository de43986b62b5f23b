"""An optimizer that holds an ordinary one, `inner`: how groups, files and copies reach it.

`inner` is built by the constructor of its class, called Base throughout, and kept for life. Outside of steps
it has the user's own groups and state, and Base's own methods do the work: torch's, and what a rule adds.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from ghor._torch.bare_step import bare_step
from ghor._torch.sharding import reshard
from ghor._torch.warn import Warnings
from ghor.constraints.declare import declared_spaces
from ghor.constraints.registry import lost_beside, lost_message
from ghor.lifting import files
from ghor.lifting.groups import (
    GROUP_KEYS,
    Weight,
    listed,
    named_duplicate,
    warn_of_decay,
    with_names,
)
from ghor.lifting.law import DECAYS, Traits
from ghor.lifting.roster import Roster
from ghor.spaces import Space

SCALER = ("_step_supports_amp_scaling", "grad_scale", "found_inf")  # what GradScaler reads, sets and deletes
DERIVED = ("_batches", "_loose", "_roster", "_parts", "_bare")  # rebuilt, and not pickled


def on_inner(name: str) -> property:
    """An attribute that the inner optimizer has, or has not."""
    return property(
        lambda self: getattr(self.inner, name),
        lambda self, value: setattr(self.inner, name, value),
        lambda self: delattr(self.inner, name),
    )


class _Signature:
    """`inspect.signature` of a lifted class: parameters of Base, or of its own constructor, and then ours."""

    def __get__(self, optimizer: object, cls: type[Holder]) -> inspect.Signature:
        init = cls.Base.__init__ if cls.__init__ is Holder.__init__ else cls.__init__
        theirs = [p for p in list(inspect.signature(init).parameters.values())[1:] if p.name != "ours"]
        ours, names = inspect.signature(Holder.__init__).parameters.values(), {p.name for p in theirs}
        added = [p for p in ours if p.kind is p.KEYWORD_ONLY and p.name not in names]
        # Stable: our keywords come after theirs, and before their **kwargs.
        return inspect.Signature(sorted([*theirs, *added], key=lambda p: p.kind))


class Holder(Optimizer):
    """Groups, state, files and copies are the user's, and those of `inner`."""

    __signature__: ClassVar[_Signature] = _Signature()

    Base: ClassVar[type[Optimizer]]

    inner: Optimizer
    _roster: Roster
    _warn: Warnings
    _named: bool  # whether the groups have the names of a module
    _explicit: bool  # whether a group names its space
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
            self.inner = self.Base(self.sorted(params), *args, **kwargs)
        except Exception as error:
            explain(self.Base, error)
            raise named_duplicate(params, error) from error.__cause__
        # Not Optimizer.__init__, which would take the groups once more.
        super().__setstate__(
            {"defaults": {**self.inner.defaults, **dict(zip(GROUP_KEYS, ours, strict=True))}}
        )
        self._adopt()
        self._first = list[dict[str, Any]]()  # the groups as they were placed
        for group in self.param_groups:
            self._place(group)
        self._warn_of_surprises()
        self._start()
        self._warn.flush()

    def _adopt(self) -> None:
        """Start again from the groups and state that the inner optimizer has."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self._bare = bare_step(self.Base, self.defaults.get("differentiable", False))
        self._roster = Roster(self.defaults, self._warn)

    def _bring_home(self) -> None:
        """Outside of steps, let the inner optimizer have our groups and state themselves."""
        self.inner.param_groups, self.inner.state = self.param_groups, self.state

    # -- what a class says of its groups -------------------------------------------------------------------

    def sorted(self, params: Any) -> Any:
        """Parameters or groups as Base is given them."""
        return params

    def _start(self) -> None:
        """All groups are placed."""

    def _asked(self, w: Weight) -> Traits:
        """How the rule is run on a weight like this."""
        raise NotImplementedError

    def _for_saving(self) -> None:
        """State is about to be saved, or copied."""

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
            raise named_duplicate([*self.param_groups, param_group], error) from error.__cause__
        try:
            self._place(self.param_groups[-1])
        except BaseException:
            self._drop_groups(len(self.param_groups) - 1)
            raise
        self._warn.flush()

    def _drop_groups(self, count: int) -> None:
        """Leave out all groups but so many."""
        del self.param_groups[count:], self._first[count:]
        self._roster.drop(count)

    def _place(self, group: dict[str, Any]) -> None:
        """Put a group's weights on their spaces."""
        gi = len(self._first)
        for key in GROUP_KEYS:
            group.setdefault(key, self.defaults[key])
        self._explicit |= group["space"] is not None
        weights = self._roster.add(group)
        self._first.append({k: v for k, v in group.items() if k not in ("params", "param_names")})
        self._check_kinds(group, weights)
        decay = [group[k] for k in DECAYS if group.get(k) and group[k] != self.inner.defaults.get(k)]
        if decay:
            warn_of_decay(decay[0], f"the weights of group {gi}, on {group['space']}", weights, self._warn)

    def _check_kinds(self, group: dict[str, Any], weights: list[Weight]) -> None:
        """Raise if a weight cannot have the section, or the anchor, that its group asks for."""
        for w in weights:
            if w.curved and group["section"] == "implicit" and not w.space.implicit:
                raise ValueError(f"{w.name}: {w.space} has no implicit section; use section='transported'")
            if w.curved and (group["section"] == "implicit" or w.anchor is not None):
                self._traits(w)

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

    def _warn_of_surprises(self) -> None:
        """Warn about decay without effect, no weight on a manifold, and weights that are none any more."""
        weights, decay = self._roster.weights, self.defaults.get("weight_decay")
        given = inspect.signature(self.Base).parameters.get("weight_decay")
        if given is not None and decay and decay != given.default:
            warn_of_decay(decay, "these weights: all of them are on manifolds", weights, self._warn)
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
        placed = self._roster.placed
        self.inner.load_state_dict(saved)  # casts all state to the weights' dtype
        self._adopt()
        files.keep_our_keys(self.param_groups, groups)
        self._restore(saved)
        self._roster.placed = placed
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


def explain(Base: type[Optimizer], error: Exception) -> None:
    """Let errors of rules that want more than a lift gives say so, beside what they are."""
    if not Base.__module__.startswith(("torch.", "ghor.")):
        error.add_note(
            f"(ghor.lift({Base.__name__}) builds {Base.__name__}(params, ...) from parameter groups, and "
            "calls its step() with gradients in place: it has no model, no other optimizer, no closure and "
            "no second gradient to give)"
        )
