"""State dicts of lifted optimizers: plain data when saved, checked and brought up to date when loaded."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from ghor._torch.precision import COMPUTE_DTYPE
from ghor._torch.sharding import is_sharded
from ghor.constraints.validation import Warn
from ghor.lifting.param_groups import GROUP_KEYS, anchors_of, name_of, spaces_of
from ghor.spaces import Euclidean

RENAMED = {"anchor": "frame_anchor", "drawn_to": "decay_target"}  # keys of state[p] in version 0.1.0


def plain(groups: list[dict[str, Any]], out: dict[str, Any]) -> dict[str, Any]:
    """torch's state dict as plain data: spaces as their repr, sections contiguous.

    Contiguous, because a broadcast between processes copies memory and ignores strides.
    """
    for key, entries in out["state"].items():
        if isinstance(entries, dict) and "section" in entries:  # Base may keep anything
            out["state"][key] = {**entries, "section": entries["section"].contiguous()}
    if any("moves" in entries for entries in out["state"].values() if isinstance(entries, dict)):
        # Distributed checkpoints want a state for every weight, or for none.
        for saved in out["param_groups"]:
            for key in saved["params"]:
                out["state"].setdefault(key, {})
    for group, saved in zip(groups, out["param_groups"], strict=True):
        space = group["space"]
        # Once a weight has moved, its state holds the point.
        held = ["decay_target" in out["state"].get(key, ()) for key in saved["params"]]
        anchors = [
            "start" if there and a is not None else a.clone() if torch.is_tensor(a) else a
            for a, there in zip(anchors_of(group), held, strict=True)
        ]
        same = not any(map(torch.is_tensor, anchors)) and len(set(anchors)) == 1
        saved["anchor"] = anchors[0] if same else anchors or None
        saved["space"] = list(map(repr, space)) if isinstance(space, (list, tuple)) else space and repr(space)
    return out


def up_to_date(entries: dict[str, Any]) -> dict[str, Any]:
    """A weight's state under today's keys; only states that the lift has made ("moves") are renamed."""
    return {RENAMED.get(k, k): v for k, v in entries.items()} if "moves" in entries else entries


def check_loaded(groups: list[dict[str, Any]], loaded: dict[str, Any], warn: Warn) -> None:
    """Raise for a state dict of other spaces, and for damaged sections, before anything is loaded."""
    sections: dict[Any, list[tuple[str, Tensor]]] = defaultdict(list)
    for gi, (group, saved) in enumerate(zip(groups, loaded["param_groups"], strict=False)):
        if len(group["params"]) != len(saved["params"]):
            continue  # torch raises for these
        if saved.get("space") is not None:
            for i, (a, b) in enumerate(zip(spaces_of(group), spaces_of(saved), strict=True)):
                if str(a) != str(b):
                    raise ValueError(f"{name_of(group, gi, i)} is on {a}, the loaded state has it on {b}")
        for key in ("section", "retraction"):
            if key in saved and saved[key] != group[key]:
                warn(
                    f"loaded {key}",
                    f"the loaded state has {key}={saved[key]!r} for group {gi}, which was {group[key]!r}: "
                    "it is taken over, as the learning rate is",
                )
        members = zip(group["params"], spaces_of(group), anchors_of(group), saved["params"], strict=True)
        for i, (p, space, anchor, key) in enumerate(members):
            entries = loaded["state"].get(key)
            if isinstance(space, Euclidean) or not isinstance(entries, dict) or "moves" not in entries:
                continue
            entries, name = up_to_date(entries), name_of(group, gi, i)
            target = entries.get("decay_target")
            if torch.is_tensor(anchor) and torch.is_tensor(target) and not _same(anchor, target):
                warn(
                    f"loaded anchor {name}",
                    f"{name} decayed towards another anchor when this state was saved; the optimizer's own "
                    "is kept",
                )
            for kind in ("section", "frame_anchor"):
                value = entries.get(kind)
                if torch.is_tensor(value) and not p.is_meta and not is_sharded(value):
                    sections[kind, space, p.shape, value.shape, value.dtype].append((name, value))
    for (kind, space, shape, *_), alike in sections.items():
        _check_sections(kind, space, shape, alike)


def _same(a: Any, b: Any) -> bool:
    """Whether two points are equal, up to the rounding of the coarser one's dtype."""
    if is_sharded(a) or is_sharded(b) or a.shape != b.shape:
        return True  # not compared
    eps = max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
    return bool((a.to(b.device, b.dtype) - b).abs().max() <= 16 * eps * b.abs().max())


def _check_sections(kind: str, space: Any, shape: Any, members: list[tuple[str, Tensor]]) -> None:
    """Raise unless loaded sections of one kind lie in the group; all at once, then singly for the name."""
    split = space.split(torch.empty(shape, device="meta")).shape
    E = torch.empty(split[len(split) - space.dims :], device="meta")
    batch = len(split) - space.dims

    def look(values: list[Tensor]) -> None:
        X = torch.stack(values).flatten(0, batch)
        X = X.to(COMPUTE_DTYPE.get(X.dtype, X.dtype))
        if kind == "section":
            space.one.checked_section(X.clone(), E)
        else:
            space.one.checked_anchor(X)

    try:
        look([value for _, value in members])
    except ValueError:
        for name, value in members:
            try:
                look([value])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        raise


def keep_our_keys(groups: list[dict[str, Any]], old: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
    """Give loaded groups our keys back: without `space` a weight would silently leave its manifold.

    The space stays the optimizer's own, because a loaded group has only its repr. The anchor stays, too,
    unless the optimizer has none: then the loaded one holds.
    """
    for i, group in enumerate(groups):
        ours = old[i] if i < len(old) else defaults
        for key in GROUP_KEYS:
            group.setdefault(key, ours.get(key))  # max_angle is in no file of version 0.1.0
        if i < len(old):
            group["space"] = old[i]["space"]
            given, saved = old[i]["anchor"], group["anchor"]
            saved = tuple(saved) if isinstance(saved, list) else saved and "start"
            group["anchor"] = given if given is not None else saved


def restore(groups: list[dict[str, Any]], state: Any, loaded: dict[str, Any], warn: Warn) -> None:
    """Undo torch's cast of loaded state to the weights' dtype, for weights on manifolds.

    Their state is taken from the file as it was saved. If a plain optimizer saved it, there is no section,
    and its moments in R^(N x n) mean nothing in g^hor, so these weights start afresh.
    """
    fresh = 0
    for group, saved in zip(groups, loaded["param_groups"], strict=True):
        for p, space, key in zip(group["params"], spaces_of(group), saved["params"], strict=True):
            values = loaded["state"].get(key)
            if isinstance(space, Euclidean) or not values:
                continue
            if "moves" in values:
                # Numbers stay as torch has converted them: a step count is a tensor now.
                for k, v in up_to_date(values).items():
                    theirs = state[p][k]
                    state[p][k] = v.to(theirs.device) if torch.is_tensor(v) else theirs
            elif any(torch.is_tensor(v) and v.dim() > 0 and bool(v.any()) for v in values.values()):
                del state[p]
                fresh += 1
    if fresh:
        warn(
            "fresh",
            f"the loaded state has no section for {fresh} weights on manifolds: their moments start afresh",
        )
