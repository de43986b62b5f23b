"""Algorithm 3 of the paper: any optimizer on homogeneous spaces.

    t      <- t + 1
    Delta  <- rgrad(grad L)                        Riemannian gradient
    B      <- global_rep(Lambda, Delta)            in g^hor, one vector space for the whole run
    cache  <- update(cache, B)                     \\  an ordinary optimizer: g^hor is an ordinary
    W      <- velocity(cache)                      /  vector space, so torch.optim does this as it is
    Lambda <- update_section(Lambda, W)            Lambda R(W), R a retraction
    Y      <- apply_section(Lambda, E)

`lift(Base)` is a subclass of Base that does this. Every weight on a manifold has a *shadow* H = 0 of its shape: Base
sees H in place of Y with B as its gradient, and what it leaves in H is W. Weights of equal kind are one *stack*: one
shadow, one section, one state, with a leading dimension. Euclidean weights go to Base as they are, hence bit for bit.

From outside it is a normal optimizer: `param_groups` hold the weights themselves, `state[p]` holds Base's tensors in
p's shape (views of the stack) and p's section.
"""

from __future__ import annotations

import copyreg
import inspect
import operator
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from .declare import spaces as declared_spaces
from .distributed import gathered, placing
from .groups import GROUP_KEYS, check_group, check_options, name_of, scalars_of, spaces_of
from .linalg import full_precision
from .probe import bare_step, given_options, options_of, parity, refuse_unless_it_lifts
from .section import Implicit, Transported, choose
from .spaces import Euclidean, Space
from .stack import Stack, check_on_space, dense


def lift(Base: type[Optimizer], *, stack: bool = True) -> type[Lifted]:
    """The optimizer class Base, on homogeneous spaces: a subclass of it that takes weights of any space.

    >>> opt = lift(torch.optim.Adam)(model, lr=1e-3)

    Refuses with ValueError an optimizer whose update does not make sense in g^hor; see `ghor.probe`. With `stack=False`
    weights are computed one by one: slower, and right for rules that take one norm or mean of each weight.
    """
    if not (isinstance(Base, type) and issubclass(Base, Optimizer)) or Base in (Optimizer, Lifted):
        raise TypeError(f"lift takes a class of torch optimizers, such as torch.optim.Adam, got {Base!r}")
    if issubclass(Base, Lifted):
        return Base
    if Base in NAMED and stack:
        return NAMED[Base]
    if (Base, stack) not in _lifted:
        parameters = list(inspect.signature(Base.__init__).parameters.values())[2:]
        optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if all(p.default is not p.empty or p.kind in optional for p in parameters):
            refuse_unless_it_lifts(Base, {}, stack)
        doc = f"{Base.__name__} on homogeneous spaces: `ghor.lift({Base.__name__})`.\n\n{inspect.getdoc(Base) or ''}"
        content = {"Base": Base, "stack": stack, "__doc__": doc, "__module__": Base.__module__}
        _lifted[Base, stack] = type(Base.__name__, (Lifted, Base), content)
    return _lifted[Base, stack]


# Lifted classes with a name of their own (ghor.optim); they are known to lift and need no probe.
NAMED: dict[type[Optimizer], type[Lifted]] = {}
_lifted: dict[tuple[type[Optimizer], bool], type[Lifted]] = {}


class Lifted(Optimizer):
    """What all lifted optimizers share. `Base` is the optimizer class that works in g^hor."""

    Base: ClassVar[type[Optimizer]]
    stack: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        *args: Any,
        space: Space | None = None,
        retraction: str = "cayley",
        section: str = "auto",
        error_if_nonfinite: bool = False,
        **kwargs: Any,
    ) -> None:
        self._ours: dict[str, Any] = {
            "space": space,
            "retraction": retraction,
            "section": section,
            "error_if_nonfinite": error_if_nonfinite,
        }
        self._options = given_options(self.Base, args, kwargs)
        self._explicit, self._built = space is not None, False
        self._prepare()
        if isinstance(params, nn.Module):
            params = [(name, p) for name, p, _ in declared_spaces(params)]
        super().__init__(params, *args, **kwargs)
        manifold = [not isinstance(s, Euclidean) for g in self.param_groups for s in spaces_of(g)]
        if kwargs.get("weight_decay") and all(manifold):
            self._warn_decay(kwargs["weight_decay"], "these weights: all of them are on manifolds")
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
                self._restack()
        self._flush()

    def _prepare(self) -> None:
        """What is made anew whenever groups or state come from outside."""
        self._stacks: list[Stack] | None = None
        self._seen: list[dict[str, Any]] = []
        self._stateless = False
        self._loose: list[Any] = []
        self._warned: set[str] = getattr(self, "_warned", set())
        self._pending: list[str] = getattr(self, "_pending", [])

    # -- the step: Algorithm 3 ------------------------------------------------------------------------------------

    @torch.no_grad()
    @partial(_disable_dynamo, recursive=False)
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; a closure is called once, with gradients enabled, and its value returned.

        torch.compile makes one graph of `_algorithm_3`; what comes before and after it looks at numbers, in Python.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lengths = None
        try:
            rule, stacks, grads = self._before()
            lengths = self._algorithm_3(rule, stacks, grads)
        finally:
            self._after(lengths)
        return loss

    def _algorithm_3(self, rule: Callable[..., Any], stacks: list[Stack], grads: list[Tensor]) -> list[Tensor]:
        """All that moves; returns the lengths of the velocities."""
        points = [s.point() for s in stacks]  # Y
        for s, Y, B in zip(stacks, points, grads, strict=True):
            s.global_grad(Y, B)  # rgrad and global_rep in one
        self._velocities(rule, stacks)
        lengths = [s.update_section(Y) for s, Y in zip(stacks, points, strict=True)]
        for s, Y, length in zip(stacks, points, lengths, strict=True):
            s.apply_section(Y, length)
        return lengths

    def _velocities(self, rule: Callable[..., Any], stacks: list[Stack]) -> None:
        """cache <- update(cache, B), W <- velocity(cache), by Base's step, which finds shadows in place of weights."""
        rule(self)

    @full_precision()
    def _stacks_with_gradients(self) -> list[Stack]:
        """The stacks that move in this step. Nothing has moved yet: what is wrong with weights or gradients raises."""
        for gi, group in enumerate(self.param_groups):
            check_options(group, gi)
        if self._stacks is None or not self._unchanged():
            self._restack()
        assert self._stacks is not None
        moving = []
        for s in self._stacks:
            s.group = self.param_groups[s.gi]  # they can be other dicts than when the stack was made
            has = [p.grad is not None for p in s.owners]
            if all(has):
                moving.append(s)
            elif any(has):  # from here on their step counts differ
                parts = [s.part([i for i, h in enumerate(has) if h is flag]) for flag in (True, False)]
                self._stacks = [t for t in self._stacks if t is not s] + parts
                moving.append(parts[0])
        for s in moving:
            if s.group.get("differentiable"):
                raise RuntimeError(
                    f"{s.names[0]} is on {s.space}: differentiable=True does not go through the step of such a weight; "
                    "set it to False in its group"
                )
            s.notice_changes(self._warn)
        if getattr(self, "found_inf", None) is None:  # else the scaler's step, which skips what is not finite itself
            for gi, group in enumerate(self.param_groups):
                for i, p in enumerate(group["params"] if group["error_if_nonfinite"] else ()):
                    if p.grad is not None and not bool(gathered(torch.isfinite(dense(p.grad)).all())):
                        raise RuntimeError(
                            f"the gradient of {name_of(group, gi, i)} is not finite; nothing was moved "
                            "(error_if_nonfinite=True)"
                        )
        return moving

    @_disable_dynamo
    def _before(self) -> tuple[Callable[..., Any], list[Stack], list[Tensor]]:
        """Base's rule, the stacks that move, room for their gradients.

        From here on `param_groups` and `state` are what Base is to see: Euclidean weights and the shadows of stacks.
        """
        if torch.is_inference_mode_enabled():  # what is made here has to serve later steps, too
            with torch.inference_mode(False), torch.no_grad():
                return self._before()
        self._put_back()
        stacks = self._stacks_with_gradients()
        rule = bare_step(self.Base, self.defaults.get("differentiable", False))
        inside: defaultdict[Any, Any] = defaultdict(dict, ((s.H, s.state) for s in stacks))
        for p in chain(*self._euclidean, self._loose):
            if p in self.state:
                inside[p] = self.state[p]
        grads = [torch.empty_like(s.H) for s in stacks]
        self._outside = [group["params"] for group in self.param_groups], self.state, stacks
        self.state = inside
        for s, B in zip(stacks, grads, strict=True):
            s.H.grad, s.begun = B, s.version()
        for gi, group in enumerate(self.param_groups):
            group["params"] = self._euclidean[gi] + [s.H for s in stacks if s.gi == gi]
        self._stateless = self.Base.__module__.startswith("torch.") and not all(s.state for s in stacks)
        return rule, stacks, grads

    def _put_back(self) -> list[Stack]:
        """Weights and state in their places again, wherever we were interrupted; returns the stacks of the step."""
        if "_outside" not in self.__dict__:
            return []
        weights, state, stacks = self._outside
        inside = self.state
        if inside is not state:
            for group, params in zip(self.param_groups, weights, strict=True):
                group["params"] = params
            state.update(inside)
            for s in stacks:
                s.state, s.H.grad = inside[s.H], None
                state.pop(s.H, None)
            self._loose = [key for key in inside if not isinstance(key, Tensor)]
            self.state = state
        del self._outside
        return stacks

    @_disable_dynamo
    def _after(self, lengths: list[Tensor] | None) -> None:
        """Weights in their places again; then what is left to do for the numbers' sake. No lengths: the step failed."""
        stacks, done = self._put_back(), False
        try:
            for s, length in zip(stacks, lengths or (), strict=lengths is not None):
                s.look_after(length, self._warn)
            done = lengths is not None
        finally:
            for s in stacks:
                s.H.zero_()
                s.publish(self.state)
                if not done and s.begun != s.version():  # it may be off the group
                    s.drop_section()
                    self._stacks = None
                    self._warn("broken off", "a step was broken off: sections begin anew, moments are kept")
        if done:
            self._flush()

    def _init_group(self, group: dict[str, Any], *lists: Any, **named: Any) -> Any:
        """What torch's optimizers make and list the state of a group with.

        torch.compile calls it while it traces, and takes the state that it finds after the first call for all there
        will be: so the first call makes that of every group.
        """
        if self._stateless:
            self._stateless = False
            for other in self.param_groups:
                super()._init_group(other, *([] for _ in lists))  # type: ignore[misc]
        return super()._init_group(group, *lists, **named)  # type: ignore[misc]

    # -- groups -----------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; a group can name its `space`, `retraction`, `section` and `error_if_nonfinite`."""
        decay = param_group.get("weight_decay", 0) if isinstance(param_group, dict) else 0
        try:
            super().add_param_group(param_group)
        except ValueError as error:
            raise self._name_the_twice_given(param_group, error) from None
        group, gi = self.param_groups[-1], len(self.param_groups) - 1
        try:
            self._explicit |= group.get("space") is not None
            for key, default in self._ours.items():
                group.setdefault(key, default)
            check_group(group, gi, self.defaults)
            if self.Base not in NAMED or not self.stack:
                refuse_unless_it_lifts(self.Base, options_of(self.Base, self._options, group), self.stack)
            for i, (p, s) in enumerate(zip(group["params"], spaces_of(group), strict=True)):
                if not isinstance(s, Euclidean):
                    self._section_kind(group, gi, s, p, name_of(group, gi, i))
        except BaseException:
            self.param_groups.pop()
            raise
        if decay and not any(isinstance(s, Euclidean) for s in spaces_of(group)):
            self._warn_decay(decay, f"the weights of group {gi}, on {group['space']}")
        self._stacks = None
        if self._built:
            self._flush()

    def _name_the_twice_given(self, group: dict[str, Any], error: ValueError) -> ValueError:
        """torch's message, and which parameter it is about."""
        known = {id(p): name_of(g, gi, i) for gi, g in enumerate(self.param_groups) for i, p in enumerate(g["params"])}
        for i, p in enumerate(group["params"] if "more than one parameter group" in str(error) else ()):
            if id(p) in known:
                name = name_of(group, len(self.param_groups), i)
                return ValueError(f"{error}: {name} of shape {tuple(p.shape)} is {known[id(p)]} too; give it once")
        return error

    def _section_kind(
        self, group: dict[str, Any], gi: int, space: Space, p: Tensor, name: str
    ) -> type[Transported] | type[Implicit]:
        """What the group's `section` comes to. "auto" is transported for state that a turning frame would spoil."""
        try:
            kind = choose(group["section"], space, *space.size(p.shape))
            if kind is Implicit:
                self._vectors(gi, group)
        except ValueError as error:
            if group["section"] == "auto":
                return Transported
            raise ValueError(f"{name}: {error}") from None
        return kind

    def _vectors(self, gi: int, group: dict[str, Any] | None = None) -> set[str]:
        """The keys of state tensors that turn with the frame."""
        options = options_of(self.Base, self._options, group or self.param_groups[gi])
        return {key for key, kind in parity(self.Base, options).items() if kind == "vector"}

    def _unchanged(self) -> bool:
        """Whether groups and state are those the stacks were made from (all of them can be written to from outside)."""
        return (
            len(self._seen) == len(self.param_groups)
            and all(
                seen["space"] is group["space"]
                and seen["section"] == group["section"]
                and len(seen["params"]) == len(group["params"])
                and all(map(operator.is_, seen["params"], group["params"]))
                for seen, group in zip(self._seen, self.param_groups, strict=True)
            )
            and all(s.is_published(self.state) for s in self._stacks or ())
        )

    def _restack(self) -> None:
        """Stacks from groups and state: weights of one group, space, shape, dtype, device and step count are one."""
        before = {id(p): s for seen in self._seen for p, s in zip(seen["params"], spaces_of(seen), strict=True)}
        self._euclidean: list[list[Tensor]] = []
        self._loose = [key for key in self.state if not isinstance(key, Tensor)]  # state of no weight: Base's own
        kinds: dict[Any, list[tuple[Tensor, str]]] = defaultdict(list)
        for gi, group in enumerate(self.param_groups):
            if gi >= len(self._seen) or self._seen[gi]["space"] is not group["space"]:
                check_group(group, gi, self.defaults, new=False)
            euclidean = []
            for i, (p, space) in enumerate(zip(group["params"], spaces_of(group), strict=True)):
                name = name_of(group, gi, i)
                if before.get(id(p), space) != space and self.state.get(p):
                    raise ValueError(
                        f"{name} went from {before[id(p)]} to {space} after steps were taken; its state means nothing "
                        "there, so build a new optimizer"
                    )
                if isinstance(space, Euclidean):
                    euclidean.append(p)
                elif p.is_meta:
                    raise ValueError(
                        f"{name} is on the meta device and has no values to move; materialise the module, then build "
                        "the optimizer"
                    )
                else:
                    scalars = scalars_of(p, self.state.get(p, {})) if self.stack else id(p)
                    kinds[gi, space, p.shape, p.dtype, p.device, placing(p), scalars].append((p, name))
            self._euclidean.append(euclidean)
        stacks = []
        for (gi, space, *_), members in kinds.items():
            params, names = [p for p, _ in members], [name for _, name in members]
            check_on_space(params, space, names)
            group = self.param_groups[gi]
            kind = self._section_kind(group, gi, space, params[0], names[0])
            vectors = self._vectors(gi) if kind is Implicit else set()
            states = [dict(self.state.get(p, {})) for p in params]
            stacks.append(Stack(group, gi, space, kind, params, names, states, vectors))
        self._stacks = stacks
        for s in self._stacks:
            s.publish(self.state, only_if_any=True)
        self._seen = [{**{k: g[k] for k in GROUP_KEYS}, "params": list(g["params"])} for g in self.param_groups]

    # -- saving and loading -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's, of plain data: spaces in words, sections row by row (broadcasts look at memory, not strides)."""
        out = super().state_dict()
        for key, entries in out["state"].items():
            if isinstance(entries, dict) and "section" in entries:  # a hook may have added what it likes
                out["state"][key] = {**entries, "section": entries["section"].contiguous()}
        for group, saved in zip(self.param_groups, out["param_groups"], strict=True):
            space = group["space"]
            saved["space"] = list(map(repr, space)) if isinstance(space, (list, tuple)) else space and repr(space)
        return out

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; sections and moments of weights on manifolds keep the dtype they were saved in.

        A state dict of the plain optimizer loads for the Euclidean weights; weights on manifolds then start anew, for
        moments in R^(N x n) mean nothing in g^hor.
        """
        for gi, (group, loaded) in enumerate(zip(self.param_groups, state_dict["param_groups"], strict=False)):
            if loaded.get("space") is not None and len(group["params"]) == len(loaded["params"]):
                for i, (a, b) in enumerate(zip(spaces_of(group), spaces_of(loaded), strict=True)):
                    if str(a) != str(b):
                        raise ValueError(f"{name_of(group, gi, i)} is on {a}, the loaded state has it on {b}")

        def remember(_: Optimizer, final: dict[str, Any]) -> None:
            self._loading = final  # what the hooks before this one made of it

        handle = self.register_load_state_dict_pre_hook(remember)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self.__dict__.pop("_loading", None)
        self._flush()

    def __getstate__(self) -> dict[str, Any]:
        """torch's three entries and what the base keeps on itself beside them.

        Not hooks, not what is made anew, and not methods that were put in place of the class's, as schedulers do with
        `step`: those are bound to this optimizer.
        """
        made = ("_stacks", "_seen", "_pending", "_euclidean", "_loose", "_stateless")
        rest = {
            k: v
            for k, v in self.__dict__.items()
            if k not in made and not k.startswith("_optimizer_") and not callable(getattr(type(self), k, None))
        }
        return {**rest, **super().__getstate__()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After load_state_dict, deepcopy and unpickling.

        Loaded groups may lack our keys, and without `space` a weight would leave its manifold in silence. The space
        stays what it was: a loaded group has it in words, and is refused if they say otherwise.
        """
        old = self.__dict__.get("param_groups", [])
        super().__setstate__(state)
        for i, group in enumerate(self.param_groups):
            ours = old[i] if i < len(old) else self._ours
            for key in GROUP_KEYS:
                group.setdefault(key, ours[key])
            if i < len(old):
                group["space"] = old[i]["space"]
        self._explicit = self._built = True
        self._prepare()
        if "_loading" in self.__dict__:
            self._restore(self._loading)

    def _restore(self, loaded: dict[str, Any]) -> None:
        """torch casts loaded state to the dtype of the weight; for weights on manifolds take it as it was saved."""
        fresh = 0
        for group, saved in zip(self.param_groups, loaded["param_groups"], strict=True):
            for p, space, key in zip(group["params"], spaces_of(group), saved["params"], strict=True):
                values = loaded["state"].get(key)
                if isinstance(space, Euclidean) or not values:
                    continue
                if "moves" in values:
                    for k, v in values.items():  # numbers as torch made them: a step count is a tensor now
                        theirs = self.state[p][k]
                        self.state[p][k] = v.to(theirs.device) if torch.is_tensor(v) else theirs
                elif any(torch.is_tensor(v) and v.dim() > 0 and bool(v.any()) for v in values.values()):
                    del self.state[p]
                    fresh += 1
        if fresh:
            self._warn(
                "fresh", f"the loaded state has no section for {fresh} weights on manifolds: their moments start anew"
            )

    def __reduce__(self) -> Any:
        if type(self) is _lifted.get((self.Base, self.stack)):
            return _unpickle, (self.Base, self.stack), self.__getstate__()
        return copyreg.__newobj__, (type(self),), self.__getstate__()  # type: ignore[attr-defined]

    # -- warnings: at the end of a call, when everything is in order --------------------------------------------------

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._pending.append(message)

    def _warn_decay(self, decay: float, where: str) -> None:
        self._warn("decay", f"weight_decay={decay} has no effect on {where}: they do not decay (paper, section 4.1)")

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending:  # said of the first caller outside torch and this package
            level, frame = 1, sys._getframe()
            while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "ghor"):
                level, frame = level + 1, frame.f_back
            for message in pending:
                warnings.warn(message, stacklevel=level)


def _unpickle(Base: type[Optimizer], stack: bool) -> Lifted:
    cls = lift(Base, stack=stack)
    return cls.__new__(cls)
