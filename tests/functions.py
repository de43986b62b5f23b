"""Every function of points and frames that a space may have, with the arguments that laws call it with.

A function that a space adds has to be put here (`laws/test_points.py` looks): the laws of NaN and of threads
then run it.
"""

from typing import Any

import torch
from table import has

from ghor.spaces.base import Space

# Y, Z: points; K: both, one after the other; U, V: tangent vectors at Y; u: a point of the ball
ON_POINTS = {
    "residual": "Y",
    "tolerance": "Y",
    "project": "Y",
    "dist": "YZ",
    "log": "YZ",
    "log_euclidean": "YZ",
    "mean": "K",
    "norm": "YV",
    "exp": "YV",
    "retract": "YV",
    "tangent": "YV",
    "is_tangent": "YV",
    "rgrad": "YV",
    "Omega": "YV",
    "metric": "YUV",
    "inner": "YUV",
    "transport": "YVU",
    "levi_civita": "YUV",
    "to_ball": "Y",
    "from_ball": "u",
}
# L: a frame above Y; W, X: elements of g^hor
ON_FRAMES = {
    "section": "Y",
    "frame": "Y",
    "apply_section": "LY",
    "global_grad": "LV",
    "pullback": "LV",
    "global_rep": "LV",
    "push": "LW",
    "update_section": "LW",
    "polish": "LY",
    "restore": "LY",
    "away_from": "LYZ",
    "representative": "YZ",
    "hor": "W",
    "step_length": "W",
    "angle": "W",
    "ghor_inner": "WX",
    "bounded": "LW",
}
# Others of points and frames: of their layout, or parts of those above (beside check_... and implicit_...).
REST = {"distance", "hint", "hold", "inverse", "keep_padding", "limit", "matrix", "moved", "outgrown", "room"}
REST |= {
    "lengths",
    "scale",
    "section_matrix",
    "section_near",
    "vector",
}  # a frame that is not finite is near none
FUNCTIONS = ON_POINTS | ON_FRAMES


def arguments(space: Space, Y: torch.Tensor, U: torch.Tensor, V: torch.Tensor) -> dict[str, Any]:
    """The arguments by their letters."""
    Z = space.exp(Y, V).contiguous()
    L = space.section(Y)
    given = {"Y": Y, "Z": Z, "K": torch.stack([Y, Z]), "U": U, "V": V, "L": L}
    given |= {"W": space.global_rep(L, V), "X": space.global_rep(L, U)}
    if has(space, "from_ball"):
        given["u"] = space.to_ball(Y)
    return given


def called(space: Space, what: str, values: dict[str, Any]) -> torch.Tensor:
    """The function's value; what is changed in place is a copy."""
    taken = [values[key] for key in FUNCTIONS[what]]
    if what in ("polish", "restore"):
        taken[0] = 1.0001 * taken[0]
    if what in ("residual", "project"):
        taken[0] = taken[0] + 1e-3 * values["U"]
    out = getattr(space, what)(*taken)
    return out if isinstance(out, torch.Tensor) else torch.tensor(out)
