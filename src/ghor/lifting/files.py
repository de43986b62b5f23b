"""State dicts of lifted optimizers: plain data when saved, checked and restored when loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ghor._torch.precision import COMPUTE_DTYPE
from ghor._torch.sharding import is_sharded
from ghor.constraints.validation import Warn
from ghor.lifting.groups import GROUP_KEYS, each, names_of
from ghor.spaces import Euclidean, Space

DAMAGED = 0.005  # how far off the group a loaded section may be: repairs square it


def plain(groups: Sequence[dict[str, Any]], out: dict[str, Any]) -> dict[str, Any]:
    """torch's state dict as plain data: spaces as their repr, a step count a weight, tensors contiguous.

    Contiguous, because a broadcast between processes copies memory and ignores strides.
    """
    state = out["state"]
    for key, entries in state.items():
        if isinstance(entries, dict) and "moves" in entries:
            state[key] = {k: _owned(v) for k, v in entries.items()}
    if any("moves" in entries for entries in state.values() if isinstance(entries, dict)):
        # Distributed checkpoints want a state for every weight, or for none.
        for saved in out["param_groups"]:
            for key in saved["params"]:
                state.setdefault(key, {})
    for group, saved in zip(groups, out["param_groups"], strict=True):
        saved["anchor"] = _anchors(group, [state.get(key, ()) for key in saved["params"]])
        saved["space"] = _named(group["space"])
    return out


def _anchors(group: dict[str, Any], states: Sequence[Any]) -> Any:
    """The anchors of a group: once a weight has moved, its state holds the point."""
    anchors = [
        "start" if "decay_target" in held and a is not None else a.clone() if torch.is_tensor(a) else a
        for a, held in zip(each(group, "anchor"), states, strict=True)
    ]
    same = not any(map(torch.is_tensor, anchors)) and len(set(anchors)) == 1
    return anchors[0] if same else anchors or None


def _named(space: Any) -> Any:
    return list(map(repr, space)) if isinstance(space, (list, tuple)) else space and repr(space)


def _owned(value: Any) -> Any:
    """A value of state[p] for a file: members of a batch share numbers, and views lie as the batch does."""
    if not torch.is_tensor(value):
        return value
    return value.clone() if value.dim() == 0 else value.contiguous()


# -- before anything is loaded -------------------------------------------------------------------------------


def check_loaded(groups: Sequence[dict[str, Any]], loaded: dict[str, Any], warn: Warn) -> None:
    """Raise for a state dict of other spaces, and for damaged sections."""
    sections: dict[Any, list[tuple[str, Tensor, Tensor]]] = defaultdict(list)
    for gi, (group, saved) in enumerate(zip(groups, loaded["param_groups"], strict=False)):
        if len(group["params"]) != len(saved["params"]):
            continue  # torch raises for these
        names = names_of(group, gi)
        _check_group(group, saved, gi, names, warn)
        columns = group["params"], each(group, "space"), each(group, "anchor"), saved["params"]
        for name, p, space, anchor, key in zip(names, *columns, strict=True):
            entries = loaded["state"].get(key)
            if isinstance(space, Euclidean) or not isinstance(entries, dict) or "moves" not in entries:
                continue
            _check_anchor(name, anchor, entries.get("decay_target"), space, warn)
            for kind in ("section", "frame_anchor"):
                value = entries.get(kind)
                if torch.is_tensor(value) and not p.is_meta and not is_sharded(value) and not is_sharded(p):
                    sections[kind, space, p.shape, p.dtype, value.shape].append((name, p, value))
    for (kind, space, *_), alike in sections.items():
        _check_sections(kind, space, alike)


def _check_group(group: dict[str, Any], saved: dict[str, Any], gi: int, names: list[str], warn: Warn) -> None:
    """Raise for other spaces; say which options of ours the file brings."""
    if saved.get("space") is not None:
        for name, a, b in zip(names, each(group, "space"), each(saved, "space"), strict=True):
            if str(a) != str(b):
                raise ValueError(f"{name} is on {a}, the loaded state has it on {b}")
    for key in ("section", "retraction"):
        if key in saved and saved[key] != group[key]:
            warn(
                f"loaded {key}",
                f"the loaded state has {key}={saved[key]!r} for group {gi}, which was {group[key]!r}: it is "
                "taken over, as the learning rate is",
            )


def _check_anchor(name: str, given: Any, saved: Any, space: Space, warn: Warn) -> None:
    """Warn where the anchor of a state, on the unit sphere as its points are, is not the optimizer's."""
    if not (torch.is_tensor(given) and torch.is_tensor(saved)) or is_sharded(given) or is_sharded(saved):
        return
    eps, apart = max(torch.finfo(X.dtype).eps for X in (given, saved)), torch.tensor(torch.inf)
    if given.shape == saved.shape:
        X = space.layout.points(given.to(saved.device, saved.dtype))
        apart = space.layout.padded(X / space.scale(X) - space.layout.points(saved), given.shape, 0.0).abs()
    if not apart.max() <= 16 * eps * saved.abs().max():
        warn(
            f"loaded anchor {name}",
            f"{name} decayed towards another anchor when this state was saved; the optimizer's own is kept",
        )


def _check_sections(kind: str, space: Space, members: list[tuple[str, Tensor, Tensor]]) -> None:
    """Raise unless loaded sections of one kind lie in the group; all at once, then singly for the name."""

    def check(some: list[tuple[str, Tensor, Tensor]]) -> None:
        name, p, value = some[0]
        y = space.geometry.nearest(space.layout.points(p.detach().to(COMPUTE_DTYPE.get(p.dtype, p.dtype))))
        eps, section = torch.finfo(p.dtype).eps, "transported" if kind == "section" else "implicit"
        fresh = space.geometry.frame(y, section, {}, eps).tensors().get(kind)
        X = torch.stack([v.to(y) for _, _, v in some])
        if fresh is None or fresh.numel() != value.numel() or fresh.shape[-2:] != value.shape[-2:]:
            N, n = y.shape[-2:]
            raise ValueError(
                f"{name}: a loaded {kind} of shape {tuple(value.shape)} is not that of {N} x {n} weights on "
                f"{space}; load another state, or delete the key {kind!r} from it"
            )
        finite = bool(torch.isfinite(X).all())
        held = {kind: X.reshape(-1, *X.shape[-2:])}
        off = space.geometry.frame(y.repeat(len(some), 1, 1), section, held, eps).off()
        if not (finite and bool((off <= DAMAGED).all())):
            raise ValueError(
                f"{name}: a loaded {kind} is {float(off.max()):.1e} off the group of {space}; load another "
                f"state, or delete the key {kind!r} from it: it is then built from the weight"
            )

    try:
        check(members)
    except ValueError:
        for member in members:
            check([member])
        raise


# -- after torch has loaded ----------------------------------------------------------------------------------


def keep_our_keys(groups: Sequence[dict[str, Any]], old: Sequence[dict[str, Any]]) -> None:
    """Give loaded groups our keys back: without `space` a weight would silently leave its manifold.

    The space stays the optimizer's own, because a loaded group has only its repr. The anchor stays, too,
    unless the optimizer has none: then the loaded one holds.
    """
    for group, ours in zip(groups, old, strict=True):
        for key in GROUP_KEYS:
            group.setdefault(key, ours[key])
        group["space"] = ours["space"]
        given, saved = ours["anchor"], group["anchor"]
        saved = tuple(saved) if isinstance(saved, list) else saved and "start"
        group["anchor"] = given if given is not None else saved


def restore(groups: Sequence[dict[str, Any]], state: Any, loaded: dict[str, Any], warn: Warn) -> None:
    """Undo torch's cast of loaded state to the weights' dtype, for weights on manifolds.

    Their state is taken from the file as it was saved. If a plain optimizer saved it, there is no section,
    and its moments in R^(N x n) mean nothing in g^hor, so these weights start afresh.
    """
    fresh = 0
    for group, saved in zip(groups, loaded["param_groups"], strict=True):
        for p, space, key in zip(group["params"], each(group, "space"), saved["params"], strict=True):
            values = loaded["state"].get(key)
            if isinstance(space, Euclidean) or not isinstance(values, dict) or not values:
                continue
            if "moves" in values:
                # torch has converted step counts: these stay.
                state[p].update((k, copied(v, p)) for k, v in values.items() if k != "step")
            elif any(torch.is_tensor(v) and v.dim() > 0 and bool(v.any()) for v in values.values()):
                del state[p]
                fresh += 1
    if fresh:
        warn(
            "fresh",
            f"the loaded state has no section for {fresh} weights on manifolds: their moments start afresh",
        )


def copied(value: Any, p: Tensor) -> Any:
    """A copy of the tensors in a value, those with dimensions where the weight is."""
    if torch.is_tensor(value):
        return value.clone() if value.dim() == 0 else value.to(p.device, copy=True)
    if isinstance(value, dict):
        return type(value)((k, copied(v, p)) for k, v in value.items())
    return type(value)(copied(v, p) for v in value) if type(value) in (list, tuple) else value
