"""The law table: every space of the package with shapes to try it on, found by walking `ghor.spaces`."""

import importlib
import inspect
import pkgutil

import torch

import ghor
import ghor.spaces
from ghor.spaces.base import Space

# Every shape is tried on every space that accepts it: n = 1, n = N, N = n + 1, N = 2n, wide, batch dimensions 0, 1, 2.
SHAPES = [
    (7,),
    (3, 5),
    (49, 7),
    (8, 4),
    (6, 4),
    (9, 8),
    (5, 5),
    (7, 1),
    (2, 10),
    (4, 6),
    (3, 12, 4),
    (2, 3, 6, 2),
    (2, 4, 4),
]
DTYPES = [torch.float64, torch.float32]
RETRACTIONS = ["cayley", "geodesic"]


def all_spaces() -> list[Space]:
    found = {}
    for module in pkgutil.iter_modules(ghor.spaces.__path__):
        for _, cls in inspect.getmembers(importlib.import_module(f"ghor.spaces.{module.name}"), inspect.isclass):
            if issubclass(cls, Space) and not inspect.isabstract(cls) and cls.__module__.endswith(f".{module.name}"):
                found[cls.__name__] = cls()
    return [space for name, space in sorted(found.items()) if name != "Orthogonal"]


def accepts(space: Space, shape: tuple[int, ...]) -> bool:
    try:
        space.check_shape(shape)
    except ValueError:
        return False
    return True


SPACES = all_spaces()
MANIFOLDS = [s for s in SPACES if s != ghor.Euclidean()]
CASES = [(s, shape) for s in SPACES for shape in SHAPES if accepts(s, shape)]
MANIFOLD_CASES = [(s, shape) for s, shape in CASES if s != ghor.Euclidean()]


def name(value: object) -> str:
    return (
        "x".join(map(str, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.").removesuffix("()")
    )


def randn(shape: tuple[int, ...], gen: torch.Generator, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)


def point(
    space: Space, shape: tuple[int, ...], gen: torch.Generator, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """A generic point: a random one, moved a little (random symplectic points are orthogonal too, which is special)."""
    Y = space.random(*shape, generator=gen, dtype=torch.float64)
    Y = space.retract(Y, 0.2 * space.tangent(Y, randn(shape, gen)))
    return space.project(Y).to(dtype)


def tangent(space: Space, Y: torch.Tensor, gen: torch.Generator, size: float = 1.0) -> torch.Tensor:
    """A random tangent vector of Frobenius norm `size` in every matrix of the batch (of the whole, where flat)."""
    V = space.tangent(Y, randn(tuple(Y.shape), gen, Y.dtype))
    if space == ghor.Euclidean():
        return V * (size / V.norm())
    M = space.matrix(V)
    return space.unmatrix(M * (size / M.norm(dim=(-2, -1), keepdim=True)), V.shape)


def eps(x: torch.Tensor) -> float:
    return torch.finfo(x.dtype).eps
