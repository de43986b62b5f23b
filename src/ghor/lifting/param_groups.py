"""Parameter groups: the keys that are ours, checked once, when a group is added or changed."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ghor._torch.sharding import placement
from ghor.constraints.declare import Anchor
from ghor.constraints.registry import anchors_by_id, spaces_by_id
from ghor.constraints.validation import Warn, check_anchor, check_parameters, kind
from ghor.retraction import RETRACTIONS, RetractionName
from ghor.spaces import Euclidean, Space
from ghor.spaces.sections import SECTIONS, SectionName

Params: TypeAlias = nn.Module | ParamsT


class Options(TypedDict, total=False):
    """What every lifted optimizer takes beside Base's own options; each is a group key, too."""

    space: Space | Sequence[Space | None] | None
    retraction: RetractionName
    section: SectionName
    max_angle: float | None
    error_if_nonfinite: bool
    anchor: Anchor | Sequence[Anchor]


GROUP_KEYS = tuple(Options.__annotations__)
DECAYS = ("weight_decay", "lambd", "adamw_wd", "weight_decay_1d", "wd")  # names that weight decay goes by


def spaces_of(group: dict[str, Any]) -> list[Space]:
    """The space of every parameter of a checked group."""
    space = group["space"]
    return list(space) if isinstance(space, (list, tuple)) else [space] * len(group["params"])


def anchors_of(group: dict[str, Any]) -> list[Any]:
    """The anchor, towards which weight decay draws it, of every parameter: None, "start" or a point."""
    anchor = group["anchor"]
    return list(anchor) if isinstance(anchor, (list, tuple)) else [anchor] * len(group["params"])


def same_anchor(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two groups have the same anchor."""
    x, y = a["anchor"], b["anchor"]
    return x is y or (isinstance(x, str) and isinstance(y, str) and x == y)


def name_of(group: dict[str, Any], gi: int, i: int) -> str:
    """The name of a parameter in messages."""
    names = group.get("param_names")
    return str(names[i]) if names else f"parameter {i} of group {gi}"


def with_names(group: Any, gi: int) -> Any:
    """The group with names made up for unnamed parameters: torch wants all groups named, or none."""
    given = group.get("params") if isinstance(group, dict) else None
    if given is None:
        return group
    params = [given] if isinstance(given, Tensor) else list(given)
    if all(isinstance(p, Tensor) for p in params):
        params = [(f"parameter {i} of group {gi}", p) for i, p in enumerate(params)]
    return {**group, "params": params}


def named_duplicate(groups: list[dict[str, Any]], group: dict[str, Any], error: ValueError) -> ValueError:
    """torch's error for a parameter that is in two groups, with both of its names added."""
    known = {id(p): name_of(g, gi, i) for gi, g in enumerate(groups) for i, p in enumerate(g["params"])}
    for i, p in enumerate(group["params"] if "more than one parameter group" in str(error) else ()):
        if id(p) in known:
            name = name_of(group, len(groups), i)
            return ValueError(
                f"{error}: {name} of shape {tuple(p.shape)} is {known[id(p)]}, too; pass it once"
            )
    return error


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


def check_group(group: dict[str, Any], gi: int, defaults: dict[str, Any], warn: Warn) -> None:
    """Find the spaces of a group's parameters, and check everything about them.

    Leaves `group["space"]` as one space, or a tuple with a space for each parameter; `group["anchor"]`
    likewise.
    """
    for key in group:
        close = difflib.get_close_matches(key, GROUP_KEYS, 1, 0.8)
        if close and key not in GROUP_KEYS and key not in defaults:
            raise ValueError(f"unknown key {key!r} in parameter group {gi}; did you mean {close[0]!r}?")
    check_options(group, gi)
    params, given = group["params"], group["space"]
    spaces = list(given) if isinstance(given, (list, tuple)) else [given] * len(params)
    if len(spaces) != len(params):
        raise ValueError(
            f"group {gi} has {len(params)} parameters and {len(spaces)} spaces; give one each, or one for all"
        )
    group["anchor"] = anchors = _anchors(group, gi, len(params))
    alike: dict[Any, list[int]] = defaultdict(list)
    seen: set[int] = set()
    places: dict[int, str] = {}
    declared, declared_anchors = spaces_by_id(), anchors_by_id()
    decays = any(key in group for key in DECAYS)
    for i, p in enumerate(params):
        name = name_of(group, gi, i)
        if spaces[i] is None and id(p) not in declared and type(p).__name__ == "ManifoldParameter":
            manifold = type(getattr(p, "manifold", None)).__name__
            warn(
                f"foreign {name}",
                f"{name} is a geoopt.ManifoldParameter on {manifold}, which ghor does not read: it is "
                "trained as an ordinary weight. Declare it: ghor.constrain(module, name, ghor.Stiefel()) "
                "or the like",
            )
        space = spaces[i] = _space(declared.get(id(p)), spaces[i], name)
        if not isinstance(space, Euclidean):
            alike[space, kind(p)].append(i)
    for (space, _), index in alike.items():
        check_parameters([params[i] for i in index], space, [name_of(group, gi, i) for i in index], warn)
    for i, p in enumerate(params):
        name, space = name_of(group, gi, i), spaces[i]
        declared_anchor = declared_anchors.get(id(p))
        if declared_anchor is not None and not decays:
            warn(
                f"anchor {name}",
                f"{name} has an anchor, but this optimizer has no weight_decay that would draw it there: the "
                "anchor is not used",
            )
        anchors[i] = _anchor(declared_anchor if anchors[i] is None else anchors[i], p, space, name)
        if isinstance(space, Euclidean):
            continue
        if id(p) in seen:
            raise ValueError(f"{name} of shape {tuple(p.shape)} is in group {gi} twice; pass it once")
        seen.add(id(p))
        if p.is_inference():
            raise ValueError(
                f"{name} of shape {tuple(p.shape)} was made in torch.inference_mode, where changes are not "
                f"counted, so it cannot be trained on {space}; clone() it outside"
            )
        place = 0 if p.is_meta or placement(p) is not None else p.data_ptr()
        if place in places:
            raise ValueError(
                f"{name} and {places[place]} are two parameters that share memory; use one parameter for "
                "both, as torch ties weights"
            )
        places |= {place: name} if place else {}
    kinds = {a if a is None or isinstance(a, str) else "given" for a in anchors}
    group["anchor"] = tuple(anchors) if len(kinds) > 1 or "given" in kinds else kinds.pop() if kinds else None
    if params:  # the groups of ZeroRedundancyOptimizer may be empty
        group["space"] = spaces[0] if len(set(spaces)) == 1 else tuple(spaces)


def refuse_late_declarations(groups: list[dict[str, Any]]) -> None:
    """Raise if a weight has been constrained to another space since the optimizer took it."""
    declared = spaces_by_id()
    for gi, group in enumerate(groups):
        for i, (p, space) in enumerate(zip(group["params"], spaces_of(group), strict=True)):
            if declared.get(id(p), space) != space:
                raise ValueError(
                    f"{name_of(group, gi, i)} was constrained to {declared[id(p)]} after this optimizer "
                    f"took it on {space}, and would leave it; constrain first, then build the optimizer"
                )


def refuse_late_anchors(group: dict[str, Any], gi: int) -> None:
    """Raise if a weight that decays has got an anchor since the optimizer took it without one."""
    declared = anchors_by_id() if any(group.get(key) for key in DECAYS) else {}
    members = zip(group["params"], spaces_of(group), anchors_of(group), strict=True) if declared else ()
    for i, (p, space, anchor) in enumerate(members):
        if anchor is None and id(p) in declared and not isinstance(space, Euclidean):
            raise ValueError(
                f"{name_of(group, gi, i)} is declared with an anchor, and this optimizer has none for it; "
                "constrain first, then build the optimizer"
            )


def _anchors(group: dict[str, Any], gi: int, count: int) -> list[Any]:
    given = group["anchor"]
    if given is None:
        return [None] * count
    if not any(key in group for key in DECAYS):
        raise ValueError(f"group {gi} has an anchor, but no weight_decay to draw its weights there")
    anchors = list(given) if isinstance(given, (list, tuple)) else [given] * count
    if len(anchors) != count:
        raise ValueError(f"group {gi} has {count} parameters and {len(anchors)} anchors; give one each")
    return anchors


def _anchor(given: Any, p: Tensor, space: Space, name: str) -> Any:
    """None, "start" or a copy of a point of the space."""
    if given is None or isinstance(space, Euclidean):
        if torch.is_tensor(given) and bool(given.any()):
            raise ValueError(f"{name} is Euclidean and decays towards 0, as in torch; its anchor is None")
        return None
    if isinstance(given, str) and given == "start":
        return given
    check_anchor(given, p, space, name)
    return given.detach().clone()


def _space(declared: Space | None, given: object, name: str) -> Space:
    """The space that the group names, or else the one that `constrain` declared."""
    if given is None:
        return declared or Euclidean()
    if not isinstance(given, Space):
        raise TypeError(f"the space of {name} must be a ghor space such as ghor.Stiefel(), got {given!r}")
    if declared is not None and declared != given:
        raise ValueError(
            f"{name} was declared on {declared} by ghor.constrain, and its group says {given}; leave 'space' "
            "out of the group, or constrain the weight again"
        )
    return given
