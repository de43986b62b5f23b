"""Every function of points that a space has, with arguments for it: `on_points` says what they take.

The laws of NaN, threads, layout, scale and half precision walk this table: a function that a space adds runs
through them by itself.
"""

from typing import Any

import torch

from ghor.spaces.base import Space
from helpers.table import tangent

UNMARKED = {"project": "p>p", "mean": "p>p"}  # of weights themselves, because they look at values


def functions(space: Space) -> dict[str, str]:
    """The functions of points that the space has, and what they take and give, as `on_points` has it."""
    found = {}
    for what in dir(type(space)):
        kinds = UNMARKED.get(what) or getattr(getattr(type(space), what, None), "kinds", None)
        if kinds and space.has(what):
            found[what] = kinds
    return found


def arguments(
    space: Space, what: str, kinds: str, Y: torch.Tensor, gen: torch.Generator
) -> list[torch.Tensor]:
    """Points Y, another one for every further p, tangent vectors at Y, and frames above it."""
    V, taken = tangent(space, Y, gen, 0.3), kinds.split(">")[0]
    ps = iter([Y, space.exp(Y, V).contiguous()])
    make = {"p": lambda: next(ps), "v": lambda: tangent(space, Y, gen, 0.3), "x": lambda: space.section(Y)}
    given = [make[k]().contiguous() for k in taken]
    return [torch.stack([given[0], space.exp(Y, V)])] if what == "mean" else given


def called(space: Space, what: str, given: list[torch.Tensor], **options: Any) -> torch.Tensor:
    """The function's value, as a tensor."""
    out = getattr(space, what)(*given, **options)
    return out if isinstance(out, torch.Tensor) else torch.tensor(out)
