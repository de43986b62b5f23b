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

import difflib
import functools
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .declare import check_parameter, declared_space
from .declare import spaces as declared_spaces
from .probe import bare_step, parity, reason_not_to_lift
from .retraction import RETRACTIONS
from .section import SECTIONS, Implicit, choose
from .spaces import Euclidean, Space
from .stack import Stack, check_on_space, dense

GROUP_KEYS = ("space", "retraction", "section", "error_if_nonfinite")


def lift(Base: type[Optimizer]) -> type[Lifted]:
    """The optimizer class Base, on homogeneous spaces: a subclass of it that takes weights of any space.

    >>> opt = lift(torch.optim.Adam)(model, lr=1e-3)

    Refuses with ValueError an optimizer whose update does not make sense in g^hor; see `ghor.probe`.
    """
    if not (isinstance(Base, type) and issubclass(Base, Optimizer)):
        raise TypeError(f"lift takes a class of torch optimizers, got {Base!r}")
    if issubclass(Base, Lifted):
        return Base
    if Base in NAMED:
        return NAMED[Base]
    if Base in _lifted:
        return _lifted[Base]
    required = [
        p.name
        for p in list(inspect.signature(Base.__init__).parameters.values())[2:]
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if not required:
        _refuse_unless_it_lifts(Base, (), {})
    doc = f"{Base.__name__} on homogeneous spaces: `ghor.lift({Base.__name__})`.\n\n{inspect.getdoc(Base) or ''}"
    _lifted[Base] = type(Base.__name__, (Lifted, Base), {"Base": Base, "__doc__": doc, "__module__": Base.__module__})
    return _lifted[Base]


# Lifted classes with a name of their own (ghor.optim); they are known to lift and need no probe.
NAMED: dict[type[Optimizer], type[Lifted]] = {}
_lifted: dict[type[Optimizer], type[Lifted]] = {}
_probed: dict[str, str | None] = {}


def _refuse_unless_it_lifts(Base: type[Optimizer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    key = f"{Base.__module__}.{Base.__qualname__} {args} {sorted(kwargs.items())}"
    if key not in _probed:
        _probed[key] = reason_not_to_lift(Base, args, kwargs)
    if _probed[key] is not None:
        raise ValueError(f"{Base.__name__} cannot be lifted to manifolds: {_probed[key]}")


class Lifted(Optimizer):
    """What all lifted optimizers share. `Base` is the optimizer class that works in g^hor."""

    Base: ClassVar[type[Optimizer]]

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
        if self.Base not in NAMED:
            _refuse_unless_it_lifts(self.Base, args, kwargs)
        self._ours: dict[str, Any] = {
            "space": space,
            "retraction": retraction,
            "section": section,
            "error_if_nonfinite": error_if_nonfinite,
        }
        self._stacks: list[Stack] | None = None
        self._seen: list[Any] = []
        self._warned: set[str] = set()
        if isinstance(params, nn.Module):
            params = [(name, p) for name, p, _ in declared_spaces(params)]
        super().__init__(params, *args, **kwargs)
        everything = [s for g in self.param_groups for s in _spaces(g)]
        if kwargs.get("weight_decay") and not any(isinstance(s, Euclidean) for s in everything):
            self._warn_decay(kwargs["weight_decay"], "any weight here: all of them are on manifolds")
        if space is None and all(isinstance(s, Euclidean) for s in everything):
            warnings.warn(
                f"{type(self).__name__}: no parameter is on a manifold, so this is torch's {self.Base.__name__}. "
                "Declare weights with ghor.constrain(module, name, space) and pass the model, or give the groups a "
                "'space' (space=ghor.Euclidean() if that is meant)",
                stacklevel=2,
            )

    # -- the step: Algorithm 3 ------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; a closure is called once, with gradients enabled, and its value returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stacks = self._stacks_with_gradients()
        for s in stacks:
            s.H.grad = s.global_grad()
        with self._shadows_for_weights(stacks):
            bare_step(self.Base)(self)
        for s in stacks:
            if s.update_section(self._warn):
                s.apply_section()
        return loss

    def _stacks_with_gradients(self) -> list[Stack]:
        """The stacks that move in this step. Nothing has moved yet: what is wrong with weights or gradients raises."""
        if self._stacks is None or not self._unchanged():
            self._restack()
        assert self._stacks is not None
        moving = []
        for s in list(self._stacks):
            has = [p.grad is not None for p in s.params]
            if all(has):
                moving.append(s)
            elif any(has):  # from here on their step counts differ
                self._stacks.remove(s)
                parts = [s.part([i for i, h in enumerate(has) if h is flag]) for flag in (True, False)]
                self._stacks += parts
                moving.append(parts[0])
        for s in moving:
            s.notice_changes(self._warn)
        for gi, group in enumerate(self.param_groups):
            if group["error_if_nonfinite"]:
                for i, p in enumerate(group["params"]):
                    if p.grad is not None and not bool(torch.isfinite(dense(p.grad)).all()):
                        raise RuntimeError(
                            f"the gradient of {_name(group, gi, i)} is not finite; nothing was moved "
                            "(error_if_nonfinite=True)"
                        )
        return moving

    @contextmanager
    def _shadows_for_weights(self, stacks: list[Stack]) -> Iterator[None]:
        """Base sees Euclidean weights and the shadows of the stacks, with the stacks' state."""
        weights = [group["params"] for group in self.param_groups]
        for gi, group in enumerate(self.param_groups):
            group["params"] = self._euclidean[gi] + [s.H for s in stacks if s.gi == gi]
        for s in stacks:
            self.state[s.H] = s.state
        try:
            yield
        except BaseException:
            for s in stacks:
                s.H.zero_()
            raise
        finally:
            for group, params in zip(self.param_groups, weights, strict=True):
                group["params"] = params
            for s in stacks:
                s.state, s.H.grad = self.state.pop(s.H), None
                s.publish(self.state)

    # -- groups and state -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; a group can name its `space`, `retraction`, `section` and `error_if_nonfinite`."""
        decay = param_group.get("weight_decay", 0) if isinstance(param_group, dict) else 0
        super().add_param_group(param_group)
        group, gi = self.param_groups[-1], len(self.param_groups) - 1
        try:
            for key, default in self._ours.items():
                group.setdefault(key, default)
            self._check_group(group, gi)
        except BaseException:
            self.param_groups.pop()
            raise
        if decay and all(not isinstance(s, Euclidean) for s in _spaces(group)):
            self._warn_decay(decay, f"group {gi}: its weights are on {group['space']}")
        self._stacks = None

    def _warn_decay(self, decay: float, where: str) -> None:
        self._warn(
            "decay", f"weight_decay={decay} has no effect on {where}, and there is no decay there (paper, section 4.1)"
        )

    def _check_group(self, group: dict[str, Any], gi: int) -> None:
        for key in group:
            close = difflib.get_close_matches(key, GROUP_KEYS, 1, 0.8)
            if close and key not in GROUP_KEYS and key not in self.defaults:
                raise ValueError(f"unknown key {key!r} in parameter group {gi}; did you mean {close[0]!r}?")
        if group["retraction"] not in RETRACTIONS:
            raise ValueError(
                f"unknown retraction {group['retraction']!r} in group {gi}; there are {sorted(RETRACTIONS)}"
            )
        if group["section"] not in SECTIONS:
            raise ValueError(f"unknown section {group['section']!r} in group {gi}; there are {SECTIONS}")
        if not isinstance(group["error_if_nonfinite"], bool):
            raise TypeError(f"error_if_nonfinite is True or False, got {group['error_if_nonfinite']!r} in group {gi}")
        params, given = group["params"], group["space"]
        spaces = list(given) if isinstance(given, (list, tuple)) else [given] * len(params)
        if len(spaces) != len(params):
            raise ValueError(
                f"group {gi} has {len(params)} parameters and {len(spaces)} spaces; give one each, or one for all"
            )
        for i, p in enumerate(params):
            name, declared = _name(group, gi, i), declared_space(p)
            if spaces[i] is None:
                spaces[i] = declared or Euclidean()
            elif not isinstance(spaces[i], Space):
                raise TypeError(f"the space of {name} must be a ghor space such as ghor.Stiefel(), got {spaces[i]!r}")
            elif declared is not None and declared != spaces[i]:
                raise ValueError(
                    f"{name} was declared on {declared} by ghor.constrain, and its group says {spaces[i]}; "
                    "leave 'space' out of the group, or constrain the weight anew"
                )
            check_parameter(p, spaces[i], name)
            if not isinstance(spaces[i], Euclidean):
                try:
                    if choose(group["section"], spaces[i], *spaces[i].size(p.shape)) is Implicit:
                        parity(self.Base, group)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
            if not isinstance(spaces[i], Euclidean) and not p.requires_grad:
                raise ValueError(
                    f"{name} of shape {tuple(p.shape)} is on {spaces[i]} and does not require gradients; call "
                    "requires_grad_() on it or leave it out (ghor.param_groups(model) leaves frozen weights out)"
                )
        manifold = [i for i, s in enumerate(spaces) if not isinstance(s, Euclidean)]
        if len({id(params[i]) for i in manifold}) < len(manifold):
            twice = next(i for i in manifold if any(params[i] is params[j] for j in manifold if j < i))
            raise ValueError(
                f"{_name(group, gi, twice)} of shape {tuple(params[twice].shape)} is in the group twice; give it once"
            )
        if manifold and group.get("differentiable"):
            raise ValueError(f"differentiable=True does not go through the step of a weight on a manifold (group {gi})")
        for alike in _kinds(params, spaces, manifold).values():
            check_on_space([params[i] for i in alike], spaces[alike[0]], [_name(group, gi, i) for i in alike])
        group["space"] = spaces[0] if len(set(spaces)) == 1 else tuple(spaces)

    def _unchanged(self) -> bool:
        """Whether groups and state are those the stacks were made from (all of them can be written to from outside)."""
        assert self._stacks is not None
        seen = self._seen
        return (
            len(seen) == len(self.param_groups)
            and all(
                space is group["space"]
                and section == group["section"]
                and len(params) == len(group["params"])
                and all(a is b for a, b in zip(params, group["params"], strict=True))
                for (space, section, params), group in zip(seen, self.param_groups, strict=True)
            )
            and all(self.state.get(p) is d for s in self._stacks for p, d in zip(s.params, s.published, strict=True))
        )

    def _restack(self) -> None:
        """Stacks from groups and state: weights of one group, space, shape, dtype, device and step count are one."""
        self._euclidean: list[list[Tensor]] = []
        kinds: dict[Any, list[tuple[Tensor, str]]] = defaultdict(list)
        for gi, group in enumerate(self.param_groups):
            if self._stacks is not None and (gi >= len(self._seen) or self._seen[gi][0] is not group["space"]):
                self._check_group(group, gi)
            euclidean = []
            for i, (p, space) in enumerate(zip(group["params"], _spaces(group), strict=True)):
                if isinstance(space, Euclidean):
                    euclidean.append(p)
                else:
                    scalars = _scalars(self.state.get(p, {}))
                    kinds[gi, space, p.shape, p.dtype, p.device, scalars].append((p, _name(group, gi, i)))
            self._euclidean.append(euclidean)
        self._stacks = [
            Stack(
                self.param_groups[gi],
                gi,
                space,
                [p for p, _ in members],
                [name for _, name in members],
                [dict(self.state.get(p, {})) for p, _ in members],
                functools.partial(self._vectors, gi),
            )
            for (gi, space, *_), members in kinds.items()
        ]
        for s in self._stacks:
            if s.state:
                s.publish(self.state)
            else:
                s.published = [self.state.get(p) for p in s.params]  # nothing to show before the first step
        self._seen = [(g["space"], g["section"], list(g["params"])) for g in self.param_groups]

    def _vectors(self, gi: int) -> set[str]:
        """The keys of state tensors that turn with the frame."""
        return {key for key, kind in parity(self.Base, self.param_groups[gi]).items() if kind == "vector"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; sections and moments of weights on manifolds keep the dtype they were saved in.

        A state dict of the plain optimizer loads for the Euclidean weights; weights on manifolds then start anew, for
        moments in R^(N x n) mean nothing in g^hor.
        """
        for gi, (group, loaded) in enumerate(zip(self.param_groups, state_dict["param_groups"], strict=False)):
            if loaded.get("space") is not None and len(group["params"]) == len(loaded["params"]):
                for i, (a, b) in enumerate(zip(_spaces(group), _spaces(loaded), strict=True)):
                    if a != b:
                        raise ValueError(f"{_name(group, gi, i)} is on {a}, the loaded state has it on {b}")
        super().load_state_dict(state_dict)
        fresh = []
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, space, key in zip(group["params"], _spaces(group), loaded["params"], strict=True):
                values = state_dict["state"].get(key)
                if isinstance(space, Euclidean) or not values:
                    continue
                if "moves" in values:
                    self.state[p] = {
                        k: v.to(p.device) if torch.is_tensor(v) and v.dim() > 0 else v for k, v in values.items()
                    }
                else:
                    del self.state[p]
                    fresh.append(p)
        if fresh:
            self._warn(
                "fresh",
                f"the loaded state has no section for {len(fresh)} weights on manifolds: their moments start anew",
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After load_state_dict, deepcopy and unpickling.

        Loaded groups may lack our keys, and without `space` a weight would leave its manifold in silence.
        """
        old = self.__dict__.get("param_groups", [])
        super().__setstate__(state)
        for i, group in enumerate(self.param_groups):
            ours = (
                old[i]
                if i < len(old)
                else {"space": Euclidean(), "retraction": "cayley", "section": "auto", "error_if_nonfinite": False}
            )
            for key in GROUP_KEYS:
                group.setdefault(key, ours[key])
        self.__dict__.setdefault(
            "_ours", {k: v for k, v in self.param_groups[0].items() if k in GROUP_KEYS} | {"space": None}
        )
        self.__dict__.setdefault("_warned", set())
        self._stacks = None
        self._seen = []

    def __reduce__(self) -> Any:
        if type(self) is _lifted.get(self.Base):
            return _unpickle, (self.Base,), self.__getstate__()
        return super().__reduce_ex__(2)

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, stacklevel=4)


def _spaces(group: dict[str, Any]) -> list[Space]:
    space = group["space"]
    return list(space) if isinstance(space, (list, tuple)) else [space] * len(group["params"])


def _kinds(params: list[Tensor], spaces: list[Space], index: list[int]) -> dict[Any, list[int]]:
    kinds: dict[Any, list[int]] = defaultdict(list)
    for i in index:
        kinds[spaces[i], params[i].shape, params[i].dtype, params[i].device].append(i)
    return kinds


def _name(group: dict[str, Any], gi: int, i: int) -> str:
    names = group.get("param_names")
    return str(names[i]) if names else f"parameter {i} of group {gi}"


def _scalars(state: dict[str, Any]) -> tuple[Any, ...]:
    """What the members of a stack must agree in: their keys, and every number among the values."""
    values = ((k, v) for k, v in state.items() if not torch.is_tensor(v) or v.dim() == 0)
    return tuple(sorted(state)), tuple(sorted((k, v.item() if torch.is_tensor(v) else repr(v)) for k, v in values))


def _unpickle(Base: type[Optimizer]) -> Lifted:
    cls = lift(Base)
    return cls.__new__(cls)
