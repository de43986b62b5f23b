"""`check`: which weights of a model live on which space, how far off they are, how far they were moved."""

from __future__ import annotations

import math
from typing import NamedTuple, Self

from torch import nn

from ghor._torch.precision import wide
from ghor._torch.sharding import full_tensor
from ghor.constraints.declare import declarations_of
from ghor.constraints.registry import no_longer_parameters
from ghor.constraints.selection import check_module
from ghor.constraints.validation import residual, worst_residual
from ghor.spaces import Euclidean, Space


class Weight(NamedTuple):
    """A constrained weight; `distance` is that of its worst point.

    It is NaN where there is nothing to compare with, on the meta device.
    """

    space: Space
    shape: tuple[int, ...]
    distance: float
    on_space: bool
    moved: float | None  # by `constrain`: ||Y - X||_F
    norm: float  # ||Y||_F


class Check(str):
    """The table of `check`, a string, with its numbers: assert on these."""

    weights: dict[str, Weight]  # the constrained ones, by name
    ordinary: int  # how many other parameters there are
    lost: dict[str, Space]  # declared weights that are no longer parameters

    def __new__(cls, weights: dict[str, Weight], ordinary: int, lost: dict[str, Space]) -> Self:
        out = super().__new__(cls, _table(weights, ordinary, lost))
        out.weights, out.ordinary, out.lost = weights, ordinary, lost
        return out

    def __getnewargs__(self) -> tuple[dict[str, Weight], int, dict[str, Space]]:  # type: ignore[override]
        return self.weights, self.ordinary, self.lost

    @property
    def worst(self) -> float:
        """The largest distance of a weight from its space; 0 if there is none."""
        return max((w.distance for w in self.weights.values() if not math.isnan(w.distance)), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether every declared weight is still a parameter and on its space, up to rounding."""
        return not self.lost and all(w.on_space for w in self.weights.values())

    def __repr__(self) -> str:
        state = "ok" if self.ok else "not ok"
        return f"<{len(self.weights)} constrained weights, at most {self.worst:.1e} off: {state}>"


def check(model: nn.Module) -> Check:
    """Print a table of the model's constrained weights: name, shape, space, distance from it; and return it.

    The last column says how far `constrain` has moved each, and what part of its norm now that is. Weights
    off their spaces are marked, and so are declared weights that are no longer parameters. The table is a
    string with numbers: `.ok`, `.worst`, `.weights[name].distance`, `.ordinary`, `.lost`.

    >>> assert ghor.check(model).ok
    """
    check_module(model, "check")
    weights, ordinary = {}, 0
    for name, p, (space, moved, _, radii) in declarations_of(model):
        if isinstance(space, Euclidean):
            ordinary += 1
            continue
        distance, norm, good = math.nan, math.nan, True
        if not p.is_meta:
            Y = full_tensor(p)
            distance, norm = float(residual(space, Y, radii).max()), float(wide(Y).norm())
            off, allowed = worst_residual(space, Y[None])
            # The space alone does not know the radii.
            good = bool(off <= allowed) and (radii is None or distance <= float(allowed))
            if math.isnan(distance):  # an entry is not a number
                distance = math.inf
        weights[name] = Weight(space, tuple(p.shape), distance, good, moved, norm)
    found = Check(weights, ordinary, no_longer_parameters(model))
    print(found)
    return found


def _table(weights: dict[str, Weight], ordinary: int, lost: dict[str, Space]) -> str:
    rows = [("parameter", "shape", "space", "distance", "moved")]
    for name, w in weights.items():
        distance = "" if math.isnan(w.distance) else f"{w.distance:.1e}"
        moved = "" if w.moved is None else f"{w.moved:.1e}"
        share = (
            f" ({100 * w.moved / w.norm:.0f} % of its norm now)" if w.moved is not None and w.norm > 0 else ""
        )
        off = "" if w.on_space else "  off: moved by another optimizer? ghor.project(model)"
        rows.append((name, "x".join(map(str, w.shape)), repr(w.space), distance, moved + share + off))
    for name, space in lost.items():
        rows.append((name, "", repr(space), "", "not a parameter any more: nothing keeps it there"))
    s = "" if ordinary == 1 else "s"
    if len(rows) == 1:
        return f"no weight is constrained; {ordinary} ordinary parameter{s}"
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    end = [f"and {ordinary} ordinary parameter{s}"] if ordinary else []
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *end])
