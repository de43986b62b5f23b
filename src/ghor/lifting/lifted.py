"""Algorithm 3 of the paper: any optimizer on homogeneous spaces.

    t      <- t + 1
    Delta  <- rgrad(grad L)                        Riemannian gradient
    B      <- global_rep(Lambda, Delta)            in g^hor, one vector space for the whole run
    cache  <- update(cache, B)                     \\  an ordinary optimizer: g^hor is an ordinary
    W      <- velocity(cache)                      /  vector space, so torch.optim does this as it is
    Lambda <- update_section(Lambda, W)            Lambda R(W), R a retraction
    Y      <- apply_section(Lambda, E)

`lift(Base)` is a subclass of Base that does this. Every weight on a manifold has a *shadow* H = 0 of its
shape: Base sees H in place of Y with B as its gradient, and what it leaves in H is W. Weights of equal kind
are one *stack*: one shadow, one section, one state, with a leading dimension. Euclidean weights go to Base as
they are, hence bit for bit.

From outside it is a normal optimizer: `param_groups` hold the weights themselves, `state[p]` holds Base's
tensors in p's shape (views of the stack) and p's section. A step goes through the files in one direction:

    optimizer -> stacking, upkeep (before) -> stack -> section -> spaces -> retraction, linalg -> upkeep (after)
"""

from __future__ import annotations

import inspect
import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from ghor._torch.bare_step import bare_step
from ghor._torch.precision import full_precision
from ghor._torch.warn import Warnings
from ghor.constraints.declare import declared_spaces
from ghor.lifting import guards as upkeep
from ghor.lifting import views
from ghor.lifting.contract import NAMED, Contract
from ghor.lifting.param_groups import spaces_of
from ghor.lifting.partition import Stacking
from ghor.lifting.probe import given_options, refuse_unless_it_lifts
from ghor.lifting.stack import Stack
from ghor.spaces import Euclidean, Space

_state = operator.attrgetter("state")

_lifted: dict[tuple[type[Optimizer], bool, bool], type[Lifted]] = {}


def lift(Base: type[Optimizer], *, stack: bool = True, blocks: bool = False) -> type[Lifted]:
    """The optimizer class Base, on homogeneous spaces: a subclass of it that takes weights of any space.

    >>> opt = lift(torch.optim.Adam)(model, lr=1e-3)

    Refuses with ValueError an optimizer whose update does not make sense in g^hor; see `ghor.probe`. With
    `stack=False` weights are computed one by one: slower, and right for rules that take one norm or mean of
    each weight. With `blocks=True` the rule sees the blocks A and B of each weight as matrices: right for
    rules that turn with their matrix, as Muon does.
    """
    if not (isinstance(Base, type) and issubclass(Base, Optimizer)) or Base in (Optimizer, Lifted):
        raise TypeError(f"lift takes a class of torch optimizers, such as torch.optim.Adam, got {Base!r}")
    if issubclass(Base, Lifted):
        return Base
    if Base in NAMED and ((stack and not blocks) or Base is torch.optim.Muon):
        return NAMED[Base]
    made_by = Base, stack and not blocks, blocks
    if made_by not in _lifted:
        parameters = list(inspect.signature(Base.__init__).parameters.values())[2:]
        optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if all(p.default is not p.empty or p.kind in optional for p in parameters):
            refuse_unless_it_lifts(Base, {}, *made_by[1:])
        doc = f"{Base.__name__} on homogeneous spaces: `ghor.lift({Base.__name__})`.\n\n{inspect.getdoc(Base) or ''}"
        content = {"Base": Base, "stack": made_by[1], "_lifted_by": made_by, "__doc__": doc}
        from ghor.lifting.matrix_rules import InBlocks

        of = InBlocks if blocks else Lifted
        _lifted[made_by] = type(Base.__name__, (of, Base), {**content, "__module__": Base.__module__})
    return _lifted[made_by]


@dataclass(frozen=True)
class Flight:
    """What a step under way has replaced, and has to put back."""

    weights: list[list[Tensor]]  # by group
    state: defaultdict[Any, Any]
    stacks: list[Stack]
    fresh: set[Tensor]  # weights and shadows that had no state


class Lifted(Contract):
    """What all lifted optimizers share. `Base` is the optimizer class that works in g^hor."""

    _stacking: Stacking | None
    _flight: Flight | None

    # Called in a step with "direction" (gradients to velocities), "retraction" (velocities to weights) and
    # "done".
    phase_hook: Callable[[str], None] | None = None

    def __init__(
        self,
        params: Any,
        *args: Any,
        space: Space | None = None,
        retraction: str = "cayley",
        section: str = "auto",
        error_if_nonfinite: bool = False,
        anchor: Any = None,
        **kwargs: Any,
    ) -> None:
        self._ours = {
            "space": space,
            "retraction": retraction,
            "section": section,
            "error_if_nonfinite": error_if_nonfinite,
            "anchor": anchor,
        }
        self._options = given_options(self.Base, args, kwargs)
        self._explicit, self._built, self._warn = space is not None, False, Warnings()
        self._reset()
        self._named = isinstance(params, nn.Module)
        if isinstance(params, nn.Module):
            params = [(name, p) for name, p, _ in declared_spaces(params)]
        super().__init__(params, *args, **kwargs)
        manifold = [not isinstance(s, Euclidean) for g in self.param_groups for s in spaces_of(g)]
        decay = None if any(g["anchor"] for g in self.param_groups) else self._options.get("weight_decay")
        if decay and all(manifold):
            self._warn_decay(decay, "these weights: all of them are on manifolds")
        if not self._explicit and not any(manifold):
            self._warn(
                "flat",
                f"{type(self).__name__}: no parameter is on a manifold, so this is torch's {self.Base.__name__}. "
                "Declare weights with ghor.constrain(module, name, space) and pass the model, or give the groups a "
                "'space' (space=ghor.Euclidean() if that is meant)",
            )
        self._built = True
        if self.state and not any(p.is_meta for group in self.param_groups for p in group["params"]):
            with torch.no_grad(), full_precision():  # Adagrad has state from the start: sections belong to it
                self._stacking = Stacking(self)
        self._warn.flush()

    def _reset(self) -> None:
        self._stacking = self._flight = None
        self._ruled, self._stateless = True, False
        self._rule: tuple[Any, Callable[..., Any]] | None = None

    # -- the step: Algorithm 3 ------------------------------------------------------------------------------------

    @torch.no_grad()
    @partial(_disable_dynamo, recursive=False)
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; a closure is called once, with gradients enabled, and its value returned.

        torch.compile makes one graph of `_algorithm_3`; what comes before and after it reads values, in
        Python.
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
    def _step(self) -> None:
        lengths = None
        try:
            rule, stacks, grads = self._before()
            lengths = self._algorithm_3(rule, stacks, grads)
        finally:
            self._after(lengths)

    def _algorithm_3(
        self, rule: Callable[..., Any], stacks: list[Stack], grads: list[Tensor]
    ) -> list[Tensor]:
        """All that moves; returns the lengths of the velocities."""
        hook = self.phase_hook
        if hook is not None:
            hook("direction")
        held = [
            s.global_grad(B) for s, B in zip(stacks, grads, strict=True)
        ]  # B: rgrad and global_rep in one
        self._velocities(rule, stacks)  # W
        if hook is not None:
            hook("retraction")
        moved = [s.update_section(Y) for s, Y in zip(stacks, held, strict=True)]  # Lambda
        for s, (Y, length) in zip(stacks, moved, strict=True):
            s.apply_section(Y, length)  # Y
        return [length for _, length in moved]

    def _velocities(self, rule: Callable[..., Any], stacks: list[Stack]) -> None:
        """cache <- update(cache, B), W <- velocity(cache), by Base's step, which finds shadows in place of
        weights."""
        drawn = [None if s.anchor is None else s.from_anchor() for s in stacks]
        rule(self)
        for s, H in zip(stacks, drawn, strict=True):
            if H is not None:
                s.W.sub_(H)
        if torch.compiler.is_compiling():  # which writes no attributes of optimizers, see `_after`
            return
        self._ruled = True
        if self._lifted_by is not None:
            for s in stacks:
                upkeep.check_velocity(s, self.Base)

    @_disable_dynamo
    def _before(self) -> tuple[Callable[..., Any], list[Stack], list[Tensor]]:
        """Base's rule, the stacks that move, room for their gradients.

        From here on `param_groups` and `state` are what Base is to see: Euclidean weights and the shadows of
        stacks.
        """
        if torch.is_inference_mode_enabled():  # what is made here has to serve later steps, too
            with torch.inference_mode(False), torch.no_grad():
                return self._before()
        if self._flight is not None:  # the end of the last step was interrupted
            self._land()
            self._stacking = None
        if self._stacking is None:
            self._stacking = Stacking(self)
        self._stacking, stacks = self._stacking.ready(self)
        if True in [group["error_if_nonfinite"] for group in self.param_groups]:
            self._refuse_nonfinite()
        inside: defaultdict[Any, Any] = defaultdict(dict, ((s.H, s.state) for s in stacks))
        for p in chain(*self._stacking.euclidean, self._stacking.loose):
            if p in self.state:
                inside[p] = self.state[p]
        grads = [torch.empty_like(s.H) for s in stacks]
        weights = [group["params"] for group in self.param_groups]
        fresh = {s.H for s in stacks if not s.state} | {
            p for p in chain(*self._stacking.euclidean) if p not in inside
        }
        self._flight, self._ruled = Flight(weights, self.state, stacks, fresh), False
        self.state = inside
        for s, B in zip(stacks, grads, strict=True):
            s.H.grad = B
        for gi, group in enumerate(self.param_groups):
            group["params"] = self._stacking.euclidean[gi] + [s.H for s in stacks if s.gi == gi]
        self._stateless = self.Base.__module__.startswith("torch.") and not all(map(_state, stacks))
        if self._rule is None or self._rule[0] is not self.Base.step:
            self._rule = self.Base.step, bare_step(self.Base, self.defaults.get("differentiable", False))
        return self._rule[1], stacks, grads

    def _put_back(self) -> None:
        """Weights and state in their places again, wherever a step was interrupted."""
        flight, inside = self._flight, self.state
        if flight is None:
            return
        for group, params in zip(self.param_groups, flight.weights, strict=True):
            group["params"] = params
        if inside is not flight.state:
            for key in (
                () if self._ruled else flight.fresh
            ):  # the rule was interrupted: what it has begun is no state
                inside[key] = {}
            for s in flight.stacks:
                s.state, s.H.grad = inside[s.H], None
            shadows = {s.H for s in flight.stacks}
            flight.state.update(
                (k, v) for k, v in inside.items() if k not in shadows and (v or k in flight.state)
            )
            if self._stacking is not None:
                self._stacking.loose = [key for key in inside if not isinstance(key, Tensor)]
            self.state = flight.state

    def _land(self) -> None:
        """The end of a step, also of one that was interrupted anywhere."""
        if self._flight is None:
            return
        self._put_back()
        for s in self._flight.stacks:
            s.H.zero_()
            views.publish(s, self.state)
            if s.in_motion:  # it may be off the group
                s.drop_section()
                self._stacking = None
                self._warn(
                    "interrupted", "the last step was interrupted; sections will be rebuilt, moments kept"
                )
        self._flight = None

    @_disable_dynamo
    def _after(self, lengths: list[Tensor] | None) -> None:
        """Restore params and state, then run numerical upkeep; None means the step raised."""
        self._ruled |= lengths is not None  # a compiled step does not write attributes of optimizers
        self._put_back()
        try:
            for s, length in zip(
                self._flight.stacks if self._flight else (), lengths or (), strict=bool(lengths)
            ):
                upkeep.after(s, length, self._warn)
        finally:
            self._land()
        if self.phase_hook is not None:
            self.phase_hook("done")
        if self._warn.pending and lengths is not None:
            self._warn.flush()

    def _init_group(self, group: dict[str, Any], *lists: Any, **named: Any) -> Any:
        """What torch's optimizers make and list the state of a group with.

        torch.compile calls it while it traces, and takes the state that it finds after the first call for all
        there will be: so the first call makes that of every group.
        """
        if self._stateless:
            self._stateless = False
            for other in self.param_groups:
                super()._init_group(other, *([] for _ in lists))  # type: ignore[misc]
        return super()._init_group(group, *lists, **named)  # type: ignore[misc]
