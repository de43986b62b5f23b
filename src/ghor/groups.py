"""Parameter groups: what ours may say, checked once, when a group is added or changed."""

from __future__ import annotations

import difflib
from collections import defaultdict
from typing import Any

from .declare import Warn, check_on_space, check_parameter, declared_spaces
from .retraction import RETRACTIONS
from .section import SECTIONS
from .shards import placing
from .spaces import Euclidean, Space

GROUP_KEYS = ("space", "retraction", "section", "error_if_nonfinite")


def spaces_of(group: dict[str, Any]) -> list[Space]:
    """The space of every parameter of a checked group."""
    space = group["space"]
    return list(space) if isinstance(space, (list, tuple)) else [space] * len(group["params"])


def name_of(group: dict[str, Any], gi: int, i: int) -> str:
    """What to call a parameter in a message."""
    names = group.get("param_names")
    return str(names[i]) if names else f"parameter {i} of group {gi}"


def check_options(group: dict[str, Any], gi: int) -> None:
    """The options that may be changed between steps."""
    for key, known in (("retraction", sorted(RETRACTIONS)), ("section", list(SECTIONS))):
        if not isinstance(group[key], str) or group[key] not in known:
            raise ValueError(f"unknown {key} {group[key]!r} in group {gi}; there are {known}")
    if not isinstance(group["error_if_nonfinite"], bool):
        raise TypeError(f"error_if_nonfinite is True or False, got {group['error_if_nonfinite']!r} in group {gi}")


def check_group(group: dict[str, Any], gi: int, defaults: dict[str, Any], warn: Warn) -> None:
    """Find the spaces of a group's parameters and check everything about them.

    Leaves `group["space"]` as a space, or a tuple with one for each parameter.
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
    alike: dict[Any, list[int]] = defaultdict(list)
    seen: set[int] = set()
    places: dict[int, str] = {}
    declared = declared_spaces()
    for i, p in enumerate(params):
        name = name_of(group, gi, i)
        foreign = getattr(p, "manifold", None) if spaces[i] is None and id(p) not in declared else None
        if foreign is not None and type(p).__name__ == "ManifoldParameter":
            warn(
                f"foreign {name}",
                f"{name} is a geoopt.ManifoldParameter on {type(foreign).__name__}, which ghor does not read: it is "
                f"trained as an ordinary weight. Declare it: ghor.constrain(module, name, ghor.Stiefel()) or the like",
            )
        space = spaces[i] = _space(declared.get(id(p)), spaces[i], name)
        check_parameter(p, space, name)
        if isinstance(space, Euclidean):
            continue
        if id(p) in seen:
            raise ValueError(f"{name} of shape {tuple(p.shape)} is in group {gi} twice; give it once")
        seen.add(id(p))
        place = 0 if p.is_meta or placing(p) is not None else p.data_ptr()
        if place in places:
            raise ValueError(
                f"{name} and {places[place]} are two parameters with one memory; use one parameter for both, as "
                "torch ties weights"
            )
        places |= {place: name} if place else {}
        alike[space, p.shape, p.dtype, p.device, placing(p)].append(i)
    for (space, *_), index in alike.items():
        check_on_space([params[i] for i in index], space, [name_of(group, gi, i) for i in index], warn)
    if params:  # the groups of ZeroRedundancyOptimizer may have none
        group["space"] = spaces[0] if len(set(spaces)) == 1 else tuple(spaces)


def _space(declared: Space | None, given: object, name: str) -> Space:
    """What the group says, or else what `constrain` declared."""
    if given is None:
        return declared or Euclidean()
    if not isinstance(given, Space):
        raise TypeError(f"the space of {name} must be a ghor space such as ghor.Stiefel(), got {given!r}")
    if declared is not None and declared != given:
        raise ValueError(
            f"{name} was declared on {declared} by ghor.constrain, and its group says {given}; leave 'space' out of "
            "the group, or constrain the weight again"
        )
    return given
