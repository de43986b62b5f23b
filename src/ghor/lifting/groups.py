"""Parameter groups: the keys that are ours, and the one pass in which a group's weights are admitted."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, get_args

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from ghor._torch.sharding import full_tensor, is_sharded
from ghor.constraints.declare import Anchor
from ghor.constraints.registry import Declaration, declarations_by_id
from ghor.constraints.validation import Warn, check_anchor, check_fit, check_on_space, kind
from ghor.lifting.law import DECAYS
from ghor.spaces import Euclidean, Space
from ghor.spaces.retraction import RETRACTIONS, RetractionName

Params: TypeAlias = nn.Module | ParamsT
SectionName = Literal["auto", "transported", "implicit"]
SECTIONS: tuple[str, ...] = get_args(SectionName)


class Options(TypedDict, total=False):
    """What every lifted optimizer takes beside Base's own options; each is a group key, too."""

    space: Space | Sequence[Space | None] | None
    retraction: RetractionName
    section: SectionName
    max_angle: float | None
    error_if_nonfinite: bool
    anchor: Anchor | Sequence[Anchor]


GROUP_KEYS = tuple(Options.__annotations__)


class Weight(NamedTuple):
    """A weight as its group has it."""

    gi: int
    space: Space
    anchor: Any  # where weight decay draws it: None, "start" or a point
    p: Tensor
    shape: torch.Size
    name: str

    @property
    def curved(self) -> bool:
        """Whether it is on a manifold."""
        return not isinstance(self.space, Euclidean)


def admitted(group: dict[str, Any], gi: int, defaults: dict[str, Any], warn: Warn) -> list[Weight]:
    """Find the space and the anchor of every weight of a group, and check everything about them.

    Leaves `group["space"]` as one space, or a tuple with a space for each weight; `group["anchor"]` likewise.
    """
    _check_keys(group, gi, defaults)
    check_options(group, gi)
    params, names = group["params"], names_of(group, gi)
    declared = declarations_by_id()
    anchors = _anchors(group, gi, declared)
    spaces = [
        _space(declared.get(id(p)), given, p, name, warn)
        for p, given, name in zip(params, _each(group, "space", gi), names, strict=True)
    ]
    _check_points(params, spaces, names, warn)
    _check_twice(group, gi, spaces, names)
    points = [_anchor(a, p, s, n) for a, p, s, n in zip(anchors, params, spaces, names, strict=True)]
    kinds = {a if a is None or isinstance(a, str) else "given" for a in points}
    group["anchor"] = tuple(points) if len(kinds) > 1 or "given" in kinds else kinds.pop() if kinds else None
    if params:  # the groups of ZeroRedundancyOptimizer may be empty
        group["space"] = spaces[0] if len(set(spaces)) == 1 else tuple(spaces)
    rows = zip(spaces, points, params, names, strict=True)
    weights = [Weight(gi, space, anchor, p, p.shape, name) for space, anchor, p, name in rows]
    _warn_of_unused_anchors(group, weights, warn)
    return weights


def check_options(group: dict[str, Any], gi: int) -> None:
    """Raise for bad values of the options that may be changed between steps."""
    for key, known in (("retraction", sorted(RETRACTIONS)), ("section", list(SECTIONS))):
        if not isinstance(group[key], str) or group[key] not in known:
            raise ValueError(f"unknown {key} {group[key]!r} in group {gi}; there are {known}")
    limit = group["max_angle"]
    if limit is not None and (
        isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0
    ):
        raise ValueError(f"max_angle is a positive number of radians or None, got {limit!r} in group {gi}")
    if not isinstance(group["error_if_nonfinite"], bool):
        raise TypeError(
            f"error_if_nonfinite is True or False, got {group['error_if_nonfinite']!r} in group {gi}"
        )


def names_of(group: dict[str, Any], gi: int) -> list[str]:
    """The names of a group's parameters in messages."""
    count = len(group["params"])
    return list(group.get("param_names") or [f"parameter {i} of group {gi}" for i in range(count)])


def each(group: dict[str, Any], key: str) -> list[Any]:
    """An entry of ours for every weight of a group."""
    value = group[key]
    return list(value) if isinstance(value, (list, tuple)) else [value] * len(group["params"])


def listed(params: Any) -> Any:
    """Parameters or groups as they were given, with lists in place of iterators, which can be read once."""
    if isinstance(params, Iterator):
        params = list(params)
    if not isinstance(params, (list, tuple)):
        return params
    return [
        {**g, "params": list(g["params"])}
        if isinstance(g, dict) and isinstance(g.get("params"), Iterator)
        else g
        for g in params
    ]


def with_names(group: Any, gi: int) -> Any:
    """The group with names made up for unnamed parameters: torch wants all groups named, or none."""
    given = group.get("params") if isinstance(group, dict) else None
    if given is None or "param_names" in group:
        return group
    params = [given] if isinstance(given, Tensor) else list(given)
    if all(isinstance(p, Tensor) for p in params):
        params = [(f"parameter {i} of group {gi}", p) for i, p in enumerate(params)]
    return {**group, "params": params}


# -- of several groups ---------------------------------------------------------------------------------------


def named_duplicate(groups: Sequence[Any], error: Exception) -> Exception:
    """torch's error for a parameter that is in two groups, with both of its names added."""
    if "more than one parameter group" not in str(error):
        return error
    known: dict[int, tuple[int, str]] = {}
    for gi, group in enumerate(groups):
        params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        for entry, name in zip(params, names_of({**group, "params": params}, gi), strict=True):
            name, p = entry if isinstance(entry, tuple) else (name, entry)
            first, other = known.setdefault(id(p), (gi, name))
            if first != gi:
                return ValueError(f"{error}: {name} of shape {tuple(p.shape)} is {other}, too; pass it once")
    return error


def refuse_shared_memory(weights: Sequence[Weight]) -> None:
    """Raise for two parameters with one memory: what a step writes to one, the other's would overwrite."""
    places: dict[int, Weight] = {}
    for w in weights:
        place = 0 if w.p.is_meta or is_sharded(w.p) or not w.p.numel() else w.p.data_ptr()
        other = places.setdefault(place, w)
        if place and other.p is not w.p and (other.curved or w.curved):
            raise ValueError(
                f"{w.name} and {other.name} are two parameters that share memory; use one parameter for "
                "both, as torch ties weights"
            )


def check_memory(w: Weight) -> None:
    """Raise for a weight that has no values to move."""
    if w.p.is_meta:
        raise ValueError(
            f"{w.name} is on the meta device and has no values to move; materialise the module, then "
            "build the optimizer"
        )
    if not is_sharded(w.p) and w.p.numel() and not w.p.untyped_storage().size():
        raise ValueError(
            f"{w.name} has no memory any more: it was a whole weight, gathered by FSDP for a forward "
            "pass. Build the optimizer from the model itself, or call its reshard() first"
        )


def refuse_late_declarations(groups: Sequence[dict[str, Any]], weights: Sequence[Weight]) -> None:
    """Raise if a weight has been constrained to another space, or got an anchor, since it was admitted."""
    declared = declarations_by_id()
    for w in weights:
        now = declared.get(id(w.p))
        if now is not None and now.space != w.space:
            raise ValueError(
                f"{w.name} was constrained to {now.space} after this optimizer took it on "
                f"{w.space}, and would leave it; constrain first, then build the optimizer"
            )
        decays = any(groups[w.gi].get(key) for key in DECAYS)
        if decays and w.curved and w.anchor is None and now is not None and now.anchor is not None:
            raise ValueError(
                f"{w.name} is declared with an anchor, and this optimizer has none for it; constrain first, "
                "then build the optimizer"
            )


def warn_of_decay(decay: Any, where: str, weights: Sequence[Weight], warn: Warn) -> None:
    """Say that weights decay nowhere."""
    if weights and all(w.curved and w.anchor is None for w in weights):
        warn(
            "decay",
            f"weight_decay={decay} has no effect on {where}: they do not decay without an anchor (paper, "
            "section 4.1)",
        )


def refuse_nonfinite(optimizer: Optimizer) -> None:
    """Raise for gradients that are not finite, in the groups that ask for it.

    A gradient scaler skips such steps itself, and sets `found_inf` to do so.
    """
    if getattr(optimizer, "found_inf", None) is not None:
        return
    for gi, group in enumerate(optimizer.param_groups):
        members = (
            zip(group["params"], names_of(group, gi), strict=True) if group["error_if_nonfinite"] else ()
        )
        for p, name in members:
            grad = p.grad if p.grad is None or not p.grad.is_sparse else p.grad.to_dense()
            if grad is not None and int(full_tensor(torch.isfinite(grad).logical_not_().sum())):
                raise RuntimeError(
                    f"the gradient of {name} is not finite; nothing was moved (error_if_nonfinite=True)"
                )


# -- one weight ----------------------------------------------------------------------------------------------


def _each(group: dict[str, Any], key: str, gi: int) -> list[Any]:
    values = each(group, key)
    if len(values) != len(group["params"]):
        raise ValueError(
            f"group {gi} has {len(group['params'])} parameters and {len(values)} {key}s; give one each, or "
            "one for all"
        )
    return values


def _check_keys(group: dict[str, Any], gi: int, defaults: dict[str, Any]) -> None:
    for key in group:
        close = difflib.get_close_matches(key, GROUP_KEYS, 1, 0.8)
        if close and key not in GROUP_KEYS and key not in defaults:
            raise ValueError(f"unknown key {key!r} in parameter group {gi}; did you mean {close[0]!r}?")


def _check_points(params: list[Tensor], spaces: list[Space], names: list[str], warn: Warn) -> None:
    """Raise for weights that are not on their spaces; all of a kind at once."""
    alike: dict[Any, list[int]] = defaultdict(list)
    for i, (p, space) in enumerate(zip(params, spaces, strict=True)):
        if not isinstance(space, Euclidean):
            alike[space, kind(p)].append(i)
    for (space, _), index in alike.items():
        members, called = [params[i] for i in index], [names[i] for i in index]
        check_fit(members, space, called)
        check_on_space(members, space, called, warn)


def _check_twice(group: dict[str, Any], gi: int, spaces: list[Space], names: list[str]) -> None:
    """Raise for a weight on a manifold that is in a group twice, of which torch only warns."""
    seen = set[int]()
    for p, space, name in zip(group["params"], spaces, names, strict=True):
        if id(p) in seen and not isinstance(space, Euclidean):
            raise ValueError(f"{name} of shape {tuple(p.shape)} is in group {gi} twice; pass it once")
        seen.add(id(p))


def _space(declaration: Declaration | None, given: object, p: Tensor, name: str, warn: Warn) -> Space:
    """The space that the group names, or else the one that `constrain` declared."""
    declared = None if declaration is None else declaration.space
    if given is None:
        if declared is None and type(p).__name__ == "ManifoldParameter":
            manifold = type(getattr(p, "manifold", None)).__name__
            warn(
                f"foreign {name}",
                f"{name} is a geoopt.ManifoldParameter on {manifold}, which ghor does not read: it is "
                "trained as an ordinary weight. Declare it: ghor.constrain(module, name, ghor.Stiefel()) "
                "or the like",
            )
        return declared or Euclidean()
    if not isinstance(given, Space):
        raise TypeError(f"the space of {name} must be a ghor space such as ghor.Stiefel(), got {given!r}")
    if declared is not None and declared != given:
        raise ValueError(
            f"{name} was declared on {declared} by ghor.constrain, and its group says {given}; leave 'space' "
            "out of the group, or constrain the weight again"
        )
    return given


def _anchors(group: dict[str, Any], gi: int, declared: dict[int, Declaration]) -> list[Any]:
    """The anchors that a group names, or else those that `constrain` declared."""
    if group["anchor"] is not None and not any(key in group for key in DECAYS):
        raise ValueError(f"group {gi} has an anchor, but no weight_decay to draw its weights there")
    return [
        declared[id(p)].anchor if given is None and id(p) in declared else given
        for p, given in zip(group["params"], _each(group, "anchor", gi), strict=True)
    ]


def _anchor(given: Any, p: Tensor, space: Space, name: str) -> Any:
    """None, "start" or a copy of a point of the space."""
    if given is None or isinstance(space, Euclidean):
        if torch.is_tensor(given) and bool(given.any()):
            raise ValueError(f"{name} is Euclidean and decays towards 0, as in torch; its anchor is None")
        return None
    check_anchor(given, p, space, name)
    return given if isinstance(given, str) else given.detach().clone()


def _warn_of_unused_anchors(group: dict[str, Any], weights: list[Weight], warn: Warn) -> None:
    for w in () if any(key in group for key in DECAYS) else weights:
        if w.anchor is not None:
            warn(
                f"anchor {w.name}",
                f"{w.name} has an anchor, but this optimizer has no weight_decay that would draw it there: "
                "the anchor is not used",
            )


# -- what may change how a rule is run -----------------------------------------------------------------------


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
