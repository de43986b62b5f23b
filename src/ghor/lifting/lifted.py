"""Algorithm 3 of the paper: any optimizer on homogeneous spaces.

    t      <- t + 1
    Delta  <- rgrad(grad L)                        Riemannian gradient
    B      <- global_rep(Lambda, Delta)            in g^hor, one vector space for the whole run
    cache  <- update(cache, B)                     \\  an ordinary optimizer: g^hor is an ordinary
    W      <- velocity(cache)                      /  vector space, so torch.optim does this as it is
    Lambda <- update_section(Lambda, W)            Lambda R(W), R a retraction
    Y      <- apply_section(Lambda, E)

A lifted class derives from `Lifted` and from its base optimizer, called Base throughout. Every weight Y on a
manifold has a *shadow* H = 0 of the same shape: Base sees H in place of Y, with B as its gradient, and
whatever it leaves in H is W. Weights of one kind form a *stack*: one shadow, one section and one state, with
a leading dimension. Euclidean weights go to Base as they are, so their steps are torch's, bit for bit.

From outside it is a normal optimizer: `param_groups` hold the weights themselves; `state[p]` holds Base's
tensors in p's shape (views of the stack) and p's section. A step goes through the files in one direction:

    lifted -> partition -> stack -> sections -> spaces -> retraction, linalg -> guards
"""

from __future__ import annotations

import copyreg
import inspect
import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from ghor._torch.bare_step import bare_step
from ghor._torch.precision import full_precision
from ghor._torch.sharding import full_tensor, reshard
from ghor._torch.warn import Warnings
from ghor.constraints.declare import declared_spaces, lost_message
from ghor.constraints.registry import lost_beside
from ghor.lifting import guards
from ghor.lifting.param_groups import check_group, name_of, named_duplicate, spaces_of, with_names
from ghor.lifting.partition import Partition, copied
from ghor.lifting.probe import given_options, options_of, vectors, verify
from ghor.lifting.stack import Stack
from ghor.lifting.state_dict import check_loaded, keep_our_keys, plain, restore, up_to_date
from ghor.spaces import Euclidean, Space

_state = operator.attrgetter("state")

# The lifted classes of `ghor.optim`, by their base; `ghor.optim` fills this. They are known to lift, and are
# not probed.
NAMED: dict[type[Optimizer], type[Lifted]] = {}

# These use torch's fused kernel on shadows by default: for large weights the temporaries of the other kernels
# would cost more time than the geometry. (Fused SGD refuses weights of which some have momentum.)
FUSED = (torch.optim.Adam, torch.optim.AdamW)

# Attributes that are rebuilt whenever groups or state come from outside; they are not pickled.
DERIVED = ("_partition", "_swapped", "_rule", "_ruled", "_stateless", "_checked", "phase_hook")


@dataclass(frozen=True)
class Swapped:
    """The weights and state that a running step has swapped out and has to put back."""

    groups: list[dict[str, Any]]
    weights: list[list[Tensor]]  # by group
    state: defaultdict[Any, Any]
    stacks: list[Stack]
    fresh: set[Tensor]  # weights and shadows that had no state before the step


class _Signature:
    """`inspect.signature` of a lifted class: Base's parameters, as installed, and then ours."""

    def __get__(self, optimizer: object, cls: type[Lifted]) -> inspect.Signature:
        base = inspect.signature(cls.Base)
        ours = inspect.signature(Lifted.__init__).parameters.values()
        added = [p for p in ours if p.kind is p.KEYWORD_ONLY and p.name not in base.parameters]
        # Stable: our keywords come after Base's, and before its **kwargs.
        return base.replace(parameters=sorted([*base.parameters.values(), *added], key=lambda p: p.kind))


class Lifted(Optimizer):
    """The part that all lifted optimizers share; `Base` is the optimizer class that works in g^hor."""

    __signature__: ClassVar[_Signature] = _Signature()

    Base: ClassVar[type[Optimizer]]
    stack: ClassVar[bool] = True  # compute weights of one kind as one
    blocks: ClassVar[bool] = False  # show Base the blocks A and B as matrices, see `matrix_rules`
    made_by_lift: ClassVar[bool] = False  # if so, velocities are checked: the rule is known by trial only

    # Called in a step with "direction" (gradients to velocities), "retraction" (velocities to weights),
    # "done".
    phase_hook: Callable[[str], None] | None = None

    _partition: Partition | None
    _swapped: Swapped | None

    def __init__(
        self,
        params: Any,
        *args: Any,
        space: Space | None = None,
        retraction: str = "cayley",
        section: str = "auto",
        max_angle: float | None = None,
        error_if_nonfinite: bool = False,
        anchor: Any = None,
        **kwargs: Any,
    ) -> None:
        self._ours = {
            "space": space,
            "retraction": retraction,
            "section": section,
            "max_angle": max_angle,
            "error_if_nonfinite": error_if_nonfinite,
            "anchor": anchor,
        }
        self._options = given_options(self.Base, args, kwargs)
        self._explicit, self._built, self._warn = space is not None, False, Warnings()
        self._checked: list[dict[str, Any]] = []
        self._reset()
        self._named = isinstance(params, nn.Module)
        if isinstance(params, nn.Module):
            reshard(params)
            params = [(name, p) for name, p, _ in declared_spaces(params)]
        super().__init__(params, *args, **kwargs)
        self._warn_of_surprises()
        self._built = True
        if self.state and not any(p.is_meta for group in self.param_groups for p in group["params"]):
            # Adagrad has state from the start, and a state includes its section.
            with torch.inference_mode(False), torch.no_grad(), full_precision():
                self._partition = Partition(self, self._checked)
        self._warn.flush()

    def _reset(self) -> None:
        self._partition = self._swapped = None
        self._ruled, self._stateless = True, False
        self._rule: tuple[Any, Callable[..., Any]] | None = None

    @property
    def elementwise(self) -> bool:
        """Whether the rule treats every number alike, so that the shape and order of shadows are free."""
        known = self.stack and not (self.blocks or self.made_by_lift)
        return known and type(self)._velocities is Lifted._velocities

    # -- the step: Algorithm 3 -----------------------------------------------------------------------------

    @torch.no_grad()
    @partial(_disable_dynamo, recursive=False)
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; a closure is called once, with gradients enabled, and its value returned.

        torch.compile makes one graph of `_algorithm_3`; `_before` and `_after`, which read values, stay out.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(map(torch.is_autocast_enabled, full_precision.devices)):
            with full_precision():
                self._step()
        else:
            self._step()
        return loss

    @partial(_disable_dynamo, recursive=False)
    def _step(self, inference: bool = False) -> None:
        if torch.is_inference_mode_enabled():  # tensors made in a step are used in later ones, too
            with torch.inference_mode(False), torch.no_grad():
                return self._step(inference=True)
        lengths = None
        try:
            try:
                rule, stacks, grads = self._before()
                rule = partial(_in_inference_mode, rule) if inference else rule
                lengths = self._algorithm_3(rule, stacks, grads)
            finally:
                self._after(lengths)
        finally:
            if self._swapped is not None:  # `_after` itself raised or was interrupted
                self._put_everything_back()

    def _algorithm_3(
        self, rule: Callable[..., Any], stacks: list[Stack], grads: list[Tensor]
    ) -> list[Tensor]:
        """Move sections and weights; returns the lengths of the velocities."""
        hook = self.phase_hook
        if hook is not None:
            hook("direction")
            self._check_still_in_step()
        held = [s.global_grad(B) for s, B in zip(stacks, grads, strict=True)]  # B: rgrad, then global_rep
        self._velocities(rule, stacks)  # W
        if hook is not None:
            hook("retraction")
            self._check_still_in_step()
        moved = [s.update_section(Y) for s, Y in zip(stacks, held, strict=True)]  # Lambda, and Y = Lambda E
        for s, (Y, length) in zip(stacks, moved, strict=True):
            s.write_weights(Y, length)
        return [length for _, length in moved]

    def _velocities(self, rule: Callable[..., Any], stacks: list[Stack]) -> None:
        """cache <- update(cache, B), W <- velocity(cache): Base's step, on shadows in place of weights."""
        decaying = [s.away_from_target() if s.decays else None for s in stacks]
        if self.Base in FUSED and not torch.compiler.is_compiling():  # compiled rules are fused anyway
            shadows = {id(s.H) for s in stacks if s.may_fuse}
            self.param_groups = [part for group in self.param_groups for part in _fused(group, shadows)]
        rule(self)
        for s, H in zip(stacks, decaying, strict=True):
            if H is not None:
                s.W.sub_(H)  # the shadow started at H, not at 0: W is what Base has added to it
        if torch.compiler.is_compiling():  # compiled code cannot write attributes of optimizers, see `_after`
            return
        self._ruled = True
        if self.made_by_lift:
            for s in stacks:
                guards.check_velocity(s, self.Base)

    def _check_still_in_step(self) -> None:
        """Raise if a phase hook has ended the step: Base would then move the weights themselves."""
        if self._swapped is None:
            raise RuntimeError(
                "the phase_hook has saved, copied or changed its optimizer within a step, and weights on "
                "manifolds were not moved; use step hooks for that, which run before and after it"
            )

    @_disable_dynamo
    def _before(self) -> tuple[Callable[..., Any], list[Stack], list[Tensor]]:
        """Return Base's rule, the stacks that move, and empty tensors for their gradients.

        From here on `param_groups` and `state` are what Base is to see: Euclidean weights and the shadows.
        """
        if self._swapped is not None:  # the end of the last step was interrupted
            self._put_everything_back()
            self._partition = None
        if self._partition is None:
            self._partition = Partition(self, self._checked)
        self._partition, stacks = self._partition.ready(self)
        if True in [group["error_if_nonfinite"] for group in self.param_groups]:
            self._refuse_nonfinite()
        inside: defaultdict[Any, Any] = defaultdict(dict, ((s.H, s.state) for s in stacks))
        euclidean = self._partition.euclidean
        for p in chain(*euclidean, self._partition.loose):
            if p in self.state:
                inside[p] = self.state[p]
        grads = [torch.empty_like(s.H) if s.B is None else s.B for s in stacks]
        weights = [group["params"] for group in self.param_groups]
        fresh = {s.H for s in stacks if not s.state} | {p for p in chain(*euclidean) if p not in inside}
        self._swapped, self._ruled = Swapped(self.param_groups, weights, self.state, stacks, fresh), False
        self.state = inside
        for s, B in zip(stacks, grads, strict=True):
            s.H.grad = B
        for gi, group in enumerate(self.param_groups):
            group["params"] = euclidean[gi] + [s.H for s in stacks if s.gi == gi]
        self._stateless = self.Base.__module__.startswith("torch.") and not all(map(_state, stacks))
        if self._rule is None or self._rule[0] is not self.Base.step:
            self._rule = self.Base.step, bare_step(self.Base, self.defaults.get("differentiable", False))
        return self._rule[1], stacks, grads

    def _put_back(self) -> None:
        """Put weights and state back in their places, wherever the step was interrupted."""
        swapped, inside = self._swapped, self.state
        if swapped is None:
            return
        self.param_groups = swapped.groups
        for group, params in zip(self.param_groups, swapped.weights, strict=True):
            group["params"] = params
        if inside is swapped.state:
            return
        # A rule that was interrupted may have made only part of a new state: such a state is discarded.
        for key in () if self._ruled else swapped.fresh:
            inside[key] = {}
        for s in swapped.stacks:
            s.state, s.H.grad = inside[s.H], None
        shadows = {s.H for s in swapped.stacks}
        swapped.state.update(
            (k, v) for k, v in inside.items() if k not in shadows and (v or k in swapped.state)
        )
        if self._partition is not None:
            self._partition.loose = [key for key in inside if not isinstance(key, Tensor)]
        self.state = swapped.state

    def _put_everything_back(self) -> None:
        """End a step, wherever it was interrupted, and drop the sections that it may have spoilt."""
        if self._swapped is None:
            return
        self._put_back()
        for s in self._swapped.stacks:
            s.H.zero_()
            s.publish(self.state)
            if s.in_motion:  # its section may be off the group
                s.drop_section()
                self._partition = None
                self._warn(
                    "interrupted", "the last step was interrupted; sections will be rebuilt, moments kept"
                )
        self._swapped = None

    @_disable_dynamo
    def _after(self, lengths: list[Tensor] | None) -> None:
        """Restore groups and state, then check the numbers; `lengths` is None if the step raised."""
        self._ruled |= lengths is not None  # a compiled step cannot set it itself
        self._put_back()
        stacks = self._swapped.stacks if self._swapped is not None else []
        for s, length in zip(stacks, lengths or (), strict=bool(lengths)):
            guards.after(s, length, self._warn)
        self._put_everything_back()
        if self.phase_hook is not None:
            self.phase_hook("done")
        if self._warn.pending and lengths is not None:
            self._warn.flush()

    def _init_group(self, group: dict[str, Any], *lists: Any, **named: Any) -> Any:
        """Create and list the state of a group; torch's optimizers call this in their step.

        torch.compile calls it while tracing, and takes the state that it finds after the first call to be
        complete. So the first call creates the state of every group.
        """
        if self._stateless:
            self._stateless = False
            for other in self.param_groups:
                super()._init_group(other, *([] for _ in lists))  # type: ignore[misc]
        return super()._init_group(group, *lists, **named)  # type: ignore[misc]

    def _refuse_nonfinite(self) -> None:
        """Raise for gradients that are not finite, in the groups that ask for it.

        A gradient scaler skips such steps itself, and sets `found_inf` to do so.
        """
        if getattr(self, "found_inf", None) is not None:
            return
        for gi, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"] if group["error_if_nonfinite"] else ()):
                if p.grad is None:
                    continue
                grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
                if int(full_tensor(torch.isfinite(grad).logical_not_().sum())):
                    raise RuntimeError(
                        f"the gradient of {name_of(group, gi, i)} is not finite; nothing was moved "
                        "(error_if_nonfinite=True)"
                    )

    # -- groups --------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; a group may set the options that are ours: `space`, `retraction`, `section`, ..."""
        self._put_everything_back()
        decay = param_group.get("weight_decay", 0) if isinstance(param_group, dict) else 0
        gi = len(self.param_groups)
        if self._named and self._built:  # groups made by the constructor have the names of the module
            param_group = with_names(param_group, gi)
        try:
            super().add_param_group(param_group)
        except ValueError as error:
            raise named_duplicate(self.param_groups, param_group, error) from None
        group = self.param_groups[-1]
        try:
            self._explicit |= group.get("space") is not None
            for key, default in self._ours.items():
                group.setdefault(key, default)
            check_group(group, gi, self.defaults, self._warn)
            if self.Base not in NAMED or self.blocks:
                verify(self.Base, self._options, group, spaces_of(group), self.stack, self.blocks)
            self._check_section_kinds(group, gi)
        except BaseException:
            self.param_groups.pop()
            raise
        if decay and group["anchor"] is None and not any(isinstance(s, Euclidean) for s in spaces_of(group)):
            self._warn_decay(decay, f"the weights of group {gi}, on {group['space']}")
        self._partition = None
        self._checked += copied([group])
        if self._built:
            self._warn.flush()

    def _check_section_kinds(self, group: dict[str, Any], gi: int) -> None:
        """Raise if a weight cannot have the section that its group asks for."""
        known = set()
        for i, (p, space) in enumerate(zip(group["params"], spaces_of(group), strict=True)):
            if not isinstance(space, Euclidean) and (space, p.shape) not in known:
                known.add((space, p.shape))
                self.section_kind(group, space, p, name_of(group, gi, i))

    def section_kind(self, group: dict[str, Any], space: Space, p: Tensor, name: str) -> str:
        """ "transported" or "implicit"; "auto" is transported where a turning frame would spoil the state."""
        try:
            kind = space.section_kind(group["section"], p.shape, p.dtype)
            if kind == "implicit":
                self.turning_keys(group)
        except ValueError as error:
            if group["section"] == "auto":
                return "transported"
            raise ValueError(f"{name}: {error}") from None
        return kind

    def turning_keys(self, group: dict[str, Any]) -> set[str]:
        """The keys of state tensors that turn with the frame of an implicit section."""
        return vectors(self.Base, options_of(self.Base, self._options, group))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch."""
        self._put_everything_back()
        super().zero_grad(set_to_none)

    def _warn_of_surprises(self) -> None:
        """Warn about decay without effect, no weight on a manifold, and weights that are none any more."""
        manifold = [not isinstance(s, Euclidean) for g in self.param_groups for s in spaces_of(g)]
        decay = None if any(g["anchor"] for g in self.param_groups) else self._options.get("weight_decay")
        if decay and all(manifold):
            self._warn_decay(decay, "these weights: all of them are on manifolds")
        if not (self._explicit or self._named):  # for a module and its groups it has been said already
            lost = lost_beside({id(p) for group in self.param_groups for p in group["params"]})
            if lost:
                self._warn("lost", lost_message(lost))
        if not self._explicit and not any(manifold):
            self._warn(
                "flat",
                f"{type(self).__name__}: no parameter is on a manifold, so this is torch's "
                f"{self.Base.__name__}. Declare weights with ghor.constrain(module, name, space) and pass "
                "the model, or give the groups a 'space' (space=ghor.Euclidean() if that is meant)",
            )

    def _warn_decay(self, decay: float, where: str) -> None:
        self._warn(
            "decay",
            f"weight_decay={decay} has no effect on {where}: they do not decay without an anchor (paper, "
            "section 4.1)",
        )

    # -- saving, loading, copying --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in torch, and plain data: spaces are saved as their repr."""
        self._put_everything_back()
        # The first hook, so that the user's hooks see what is saved, and may return anything.
        handle = self.register_state_dict_post_hook(
            lambda _, out: plain(self.param_groups, out), prepend=True
        )
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; sections and moments of weights on manifolds keep the dtype they were saved in.

        From a state dict of the plain optimizer the Euclidean weights load their state, and weights on
        manifolds start afresh. A section that is damaged, or belongs to another space, raises an error, and
        nothing is loaded.
        """
        self._put_everything_back()

        def check(_: Optimizer, final: dict[str, Any]) -> None:
            """The last hook: it gets the state dict as the user's hooks have left it."""
            self._check_loaded(final)
            self._loading = final

        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self.__dict__.pop("_loading", None)
        self._warn.flush()

    def _check_loaded(self, state_dict: dict[str, Any]) -> None:
        """Raise for a state dict that cannot be loaded, before anything is."""
        check_loaded(self.param_groups, state_dict, self._warn)

    def __getstate__(self) -> dict[str, Any]:
        """torch's three entries, and the attributes that Base keeps on itself.

        Hooks, derived attributes and methods overridden on the instance (schedulers wrap `step`) are left
        out: they are bound to this optimizer.
        """
        self._put_everything_back()
        rest = {
            k: v
            for k, v in self.__dict__.items()
            if k not in DERIVED
            and not k.startswith("_optimizer_")
            and not callable(getattr(type(self), k, None))
        }
        return {**rest, **super().__getstate__()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuild what is derived from groups and state: after load_state_dict, deepcopy and unpickling."""
        old = self.__dict__.get("param_groups", [])
        super().__setstate__(state)
        self.__dict__.setdefault("_checked", [])
        keep_our_keys(self.param_groups, old, self._ours)
        for p, entries in self.state.items():
            if isinstance(entries, dict):
                self.state[p] = up_to_date(entries)
        self._explicit = self._built = True
        self._reset()
        if "_loading" in self.__dict__:
            restore(self.param_groups, self.state, self._loading, self._warn)

    def __reduce__(self) -> Any:
        return copyreg.__newobj__, (type(self),), self.__getstate__()  # type: ignore[attr-defined]


def _in_inference_mode(rule: Callable[..., Any], optimizer: Lifted) -> None:
    """Apply Base's rule for a step that is taken in inference mode.

    Weights that were made there can be changed there alone, and their state is like them. That of all others
    is not, so that later steps may be taken anywhere.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    _leave_inference(optimizer.state)  # Base's constructor may have made some of it there
    with torch.inference_mode(any(p.is_inference() for p in params)), torch.no_grad():
        rule(optimizer)
    _leave_inference(optimizer.state)


def _leave_inference(state: dict[Any, Any]) -> None:
    for p, entries in state.items():
        if isinstance(p, Tensor) and not p.is_inference():
            entries.update(
                (k, v.clone()) for k, v in entries.items() if torch.is_tensor(v) and v.is_inference()
            )


def _fused(group: dict[str, Any], shadows: set[int]) -> list[dict[str, Any]]:
    """The group, with its shadows in a part of their own that is fused, unless the group says otherwise."""
    if [group["foreach"], group["fused"], group["differentiable"] or None] != [None] * 3:
        return [group]
    apart = [p for p in group["params"] if id(p) in shadows]
    rest = [p for p in group["params"] if id(p) not in shadows]
    parts = [{**group, "params": apart, "fused": True}] if apart else []
    return [{**group, "params": rest}, *parts] if rest else parts
