"""Where a batch stands: the points of its weights, and the frame above them, from weights and state[p]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ghor.lifting.law import Traits
from ghor.lifting.members import Members
from ghor.lifting.state import BESIDE, FRAME_KEYS
from ghor.spaces.frames import Frame
from ghor.spaces.tangent import Tangent

ROWS, ROOM = 64, 1 << 22  # of a stored frame that nobody asked for: N <= 64 n, or so many numbers in all


def stand(
    at: Members, known: dict[str, Tensor], state: dict[str, Any], section: str, traits: Traits
) -> tuple[Tensor, Frame, Frame | None]:
    """The points, the frame above them, and that of moments, if the group wants another kind than they have.

    `known` is what the states hold of points and frames, `state` that of the first member.
    """
    weights = at.read()
    at.scale = at.radii(weights, known.get("radius"))
    y = checked(at, at.unit(weights), known)
    kept, point = {k: known[k] for k in FRAME_KEYS if k in known}, known.get("master", y)
    if section == "auto" and not kept and not (traits.turns and (at.targets is not None or traits.stacks)):
        section = "transported"
        check_room(at.names[0], y)
    frame = above(at, point, section, kept, state, traits.free)
    if "moves" in state and section != "auto" and traits.stacks and not isinstance(frame, Tangent):
        asked = at.space.geometry.frame(point, section, {}, at.eps)
        if asked.tensors().keys() != frame.tensors().keys():
            return y, asked, frame
    return y, frame, None


def above(
    at: Members, y: Tensor, section: str, kept: dict[str, Tensor], state: dict[str, Any], free: bool
) -> Frame:
    """The frame above y that a state has kept, or began with; a run without a frame goes on so."""
    geometry = at.space.geometry
    if not free:
        return geometry.frame(y, section, kept, at.eps)
    by_rows = at.viewable(y.new_empty(y.shape)).is_contiguous() if at.layout.blocks > 1 else None
    without = any(k.endswith(BESIDE) for k in state) or len(geometry.hor_blocks(y)) == 1
    began = "auto" if "moves" in state and not kept and without else section
    return geometry.free_frame(y, began, kept, at.eps, by_rows)


def checked(at: Members, y: Tensor, known: dict[str, Tensor]) -> Tensor:
    """The points of the weights, which are on their space; nothing was moved if one is not.

    Weights that were on it to the digits of a narrower dtype are projected, or go on from the point that
    their state holds.
    """
    off = at.off(y)
    if not bool(off.any()):
        return at.nearest(y)
    there = known.get("master", known["section"][..., : y.shape[-1]] if "section" in known else y)
    near = not at.half and there.shape == y.shape and near_in_half(y, there)
    if near and not bool(at.off(there).any()):
        name = at.names[0]
        at.warn("dtype", f"{name} was half precision: it goes on from the point that its state holds")
        at.write(at.in_units(there))
        return there
    at.refuse(off)
    return at.nearest(at.unit(at.read()))


def check_room(name: str, y: Tensor) -> None:
    """Raise where a frame that the rule wants stored would be large."""
    M, N, n = y.shape
    if N > ROWS * n and M * N * N > ROOM:
        raise ValueError(
            f"the rule of {name} keeps state that cannot be taken to another frame, and a "
            f"frame that stays has {N} x {N} numbers for each of {M} points: take Adam, SGD or Muon, or "
            "section='transported' all the same"
        )


def near_in_half(X: Tensor, Y: Tensor) -> bool:
    """Whether two tensors are equal to the digits of bfloat16."""
    return bool(((X - Y).abs() <= torch.finfo(torch.bfloat16).eps * Y.abs().clamp_min(1e-2)).all())
