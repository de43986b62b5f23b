"""What spaces say: to other libraries' names, to arguments that they do not take, about points of no use."""

from __future__ import annotations

import difflib
import inspect
import re
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ghor._torch.precision import COMPUTE_DTYPE
from ghor._torch.transforms import transformed
from ghor.linalg import eager

if TYPE_CHECKING:
    from ghor.spaces.base import Space

# Our names for what geoopt and pymanopt call otherwise.
ELSEWHERE = {
    "egrad2rgrad": "rgrad",
    "euclidean_to_riemannian_gradient": "rgrad",
    "expmap": "exp",
    "inner_product": "inner",
    "logmap": "log",
    "pair_mean": "mean",
    "projection": "tangent",
    "proju": "tangent",
    "projx": "project",
    "random_point": "random",
    "random_tangent_vector": "tangent, of a random tensor",
    "retr": "retract",
    "retraction": "retract",
    "to_tangent_space": "tangent",
    "transp": "transport",
}


class Absent(AttributeError, NotImplementedError):
    """Raised for geometry that a space does not have: `hasattr` is False, and a call is not implemented."""


def absent(space: Space, name: str) -> Absent:
    """The error for a method that a space does not have."""
    if name in ELSEWHERE:
        return Absent(f"{space} has no {name}: here it is called {ELSEWHERE[name]}")
    what = "logarithm" if name == "log" else name
    return Absent(f"{space} has no {what} here; space.has({name!r}) tells which spaces have one")


def wrong_arguments(cls: type[Space], given: tuple[Any, ...], error: str) -> TypeError:
    """The error for arguments that the constructor of a space does not take."""
    name, parameters = cls.__name__, inspect.signature(cls).parameters
    options = f"its options are: {', '.join(parameters) or 'none'}"
    by_position = any(p.kind is not p.KEYWORD_ONLY for p in parameters.values())
    if len(given) == 1 and isinstance(given[0], (tuple, list)) and not by_position:
        given = tuple(given[0])
    if by_position or not given or not all(isinstance(k, int) for k in given):
        wrong = re.search("keyword argument '(.*)'", error)
        near = difflib.get_close_matches(wrong[1], parameters, 1) if wrong else []
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return TypeError(f"{name}(): {error}{hint}; {options}")
    space, example = cls(), ""
    for shape in (given, 2 * given, (given[0], given[0] + 1)):  # one size: the side of a square, or of a pose
        try:
            space.check_shape(shape)
        except ValueError:
            continue
        example = f", as in {name}().random({', '.join(map(str, shape))})"
        break
    return TypeError(f"{name}() takes no sizes, got {given}: they come from the weight{example}; {options}")


def no_nearest(space: Space, shape: Any) -> str:
    """The message for a tensor without a nearest point."""
    return (
        f"a tensor that is 0, degenerate or indefinite has no nearest point on {space}; initialise it first, "
        f"for example with {space}.random{tuple(shape)}"
    )


def no_digits(space: Space, eps: float) -> str:
    """The message for weights that are held where the digits of their dtype end."""
    dtype = next(t for t in (torch.float64, *COMPUTE_DTYPE, torch.float32) if torch.finfo(t).eps == eps)
    way_out = "lower the learning rate" if dtype == torch.float64 else "use float64"
    return (
        f"a weight on {space} has come {space.digits_end(eps)}, where {dtype} has no digits left, and "
        f"is held there; {way_out}, or keep it nearer to E by weight decay or a penalty"
    )


def warn_of_digits(space: Space, held: Tensor, eps: float) -> None:
    """Warn that points are held where the digits of their dtype end, if values may be read for nothing."""
    if eager(held) and not transformed(held) and bool(held.any()):
        warnings.warn(no_digits(space, eps), stacklevel=2)
