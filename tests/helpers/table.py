"""The law table: every space of the package, those that `ghor.spaces` exports, with shapes to try it on.

Tests ask what a space can do (`space.has`, `space.compact`, `is_flat`, ...) and never compare its name: a new
space then runs through every law that it has the geometry for. Laws are tried on covering cases: every shape
and every option of a law meets every space, but not every shape every option.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch

import ghor
import ghor.spaces
from ghor.linalg import size
from ghor.spaces.base import Space
from ghor.spaces.frames import Frame
from ghor.spaces.group import GroupSpace
from ghor.spaces.matrix import Matrices
from ghor.spaces.stiefel import Orthogonal

# Every shape is tried on every space that accepts it: n = 1, n = N, N = n + 1, N = 2n, wide, batch dimensions
# 0, 1, 2.
SHAPES = [(7,), (3, 5), (49, 7), (8, 4), (6, 4), (9, 8), (5, 5), (7, 1), (2, 10), (4, 6)]
SHAPES += [(3, 12, 4), (2, 3, 6, 2), (2, 4, 4)]
# For spaces that are not matrices with a form: three of these that they accept.
OTHER_SHAPES = [(7,), (2, 3), (3, 3), (3, 4), (4, 4), (4, 2, 3), (4, 3, 3), (4, 3, 4), (2, 4, 4)]
# One of each kind, for tests that go through them in a loop.
KINDS = [(7,), (7, 1), (5, 5), (9, 8), (6, 4), (2, 10), (2, 3, 6, 2), (4, 4)]
DTYPES = [torch.float64, torch.float32]
# For complex tensors two of these that a space accepts are enough: a batch, and a square or a wide one.
COMPLEX_SHAPES = [(2, 3, 6, 2), (5, 5), (2, 10), (6, 4)]
# Single numbers: real ones do not move, complex ones move on the circle U(1).
CIRCLES = [(3, 1, 1), (7, 1)]
COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}
RETRACTIONS = ["cayley", "geodesic"]


# -- what a space can do -------------------------------------------------------------------------------------


def is_flat(space: Space) -> bool:
    """Whether it is the vector space, whose weights the base optimizer updates itself."""
    return isinstance(space, ghor.Euclidean)


def has_frame(space: Space) -> bool:
    """Whether points are matrices, Lambda = [Y, Q] is in the group, and W in g^hor is W E = [A; B]."""
    return isinstance(space, Matrices) and has_one_radius(space)


def has_one_radius(space: Space) -> bool:
    """Whether it is not a sphere of another radius."""
    return space.radius == 1


def keeps_any_radius(space: Space) -> bool:
    """Whether it is all spheres around 0, of which a point stays on its own."""
    return space.radius == "start"


def can_be_left(space: Space) -> bool:
    """Whether there are tensors near a point that are not points."""
    return not is_flat(space) and not keeps_any_radius(space)


def has_complex(space: Space) -> bool:
    """Whether weights on the space can be complex."""
    try:
        space.check_dtype(torch.complex128)
    except TypeError:
        return False
    return not is_flat(space)


def is_graph(space: Space) -> bool:
    """Whether every tensor has a point near it, 0 as well: all but one coordinate are free."""
    return isinstance(space, ghor.Hyperbolic)


def is_cone(space: Space) -> bool:
    """Whether multiples of points are points."""
    return bool((space.residual(2 * space.E(shapes(space)[0])) == 0).all())


def has_distances(space: Space) -> bool:
    """Whether `dist` is the length of shortest geodesics, and not of those of a group."""
    return not isinstance(space, ghor.SpecialEuclidean)


def has_canonical_metric(space: Space) -> bool:
    """Whether the metric is the inner product of g^hor, so that `pull` represents rgrad."""
    return isinstance(space, Orthogonal) or (isinstance(space, GroupSpace) and space.metric_scale == 1)


def spoiled(space: Space, Y: torch.Tensor, by: float) -> torch.Tensor:
    """Points off the space by this part of their size: too long, or on a cone, not symmetric."""
    if keeps_any_radius(space) or not is_cone(space):
        return (1 + by) * Y
    X = Y.clone()
    X[..., 0, -1] += 2 * by * torch.linalg.matrix_norm(Y.double()).to(Y)
    return X


def tolerance(space: Space, Y: torch.Tensor) -> float:
    """The residual below which weights of Y's shape and dtype count as on the space."""
    return float(space.tolerance(Y).max())


# -- the table -----------------------------------------------------------------------------------------------


# Options that change the formulas of a space run through the laws as spaces of their own.
OPTIONS = [ghor.Sphere(radius=2.5), ghor.Sphere(radius="start"), ghor.Sphere(along="columns")]


def accepts(space: Space, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> bool:
    try:
        space.check(shape, dtype)
    except (TypeError, ValueError):
        return False
    return True


def shapes(space: Space, tried: Sequence[tuple[int, ...]] = SHAPES) -> list[tuple[int, ...]]:
    """The shapes among `tried`, or for spaces without a form among OTHER_SHAPES, that the space accepts."""
    if has_frame(space) or is_flat(space):
        return [x for x in tried if accepts(space, x)]
    other = [x for x in OTHER_SHAPES if accepts(space, x)]
    return other[:2] + other[2:][-1:]


def kinds(space: Space) -> list[tuple[int, ...]]:
    """n = 1, N = n, N = n + 1, N < 2n, wide, a batch, as far as the space has them."""
    return shapes(space, KINDS)


def sections(space: Space) -> list[str]:
    return ["transported", "implicit"] if space.implicit else ["transported"]


def name(value: object) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value).removeprefix("torch.").removesuffix("()")


SPACES = sorted(
    [getattr(ghor, n)() for n in ghor.spaces.__all__ if n not in ("GroupSpace", "Space")], key=name
)
MANIFOLDS = [s for s in SPACES if not is_flat(s)] + OPTIONS
CASES = [(s, shape) for s in SPACES + OPTIONS for shape in shapes(s)]
MANIFOLD_CASES = [(s, shape) for s, shape in CASES if not is_flat(s)]
COMPLEX_CASES = [(s, shape) for s in SPACES if has_complex(s) for shape in shapes(s, COMPLEX_SHAPES)[:2]]
CIRCLE_CASES = [
    (s, c) for s in SPACES for c in CIRCLES if accepts(s, c, torch.complex128) and not accepts(s, c)
]
COMPLEX_CASES += CIRCLE_CASES

SECTIONS = [(s, k) for s in MANIFOLDS for k in sections(s)]
FIRST = [(s, shapes(s)[0]) for s in MANIFOLDS]
each_space = pytest.mark.parametrize("space", MANIFOLDS, ids=name)
each_section = pytest.mark.parametrize(("space", "section"), SECTIONS, ids=name)
each_shape = pytest.mark.parametrize(("space", "shape"), FIRST, ids=name)
each_shape_and_section = pytest.mark.parametrize(
    ("space", "shape", "section"), [(s, shape, k) for s, shape in FIRST for k in sections(s)], ids=name
)

LAWS: dict[str, Callable] = {}


def covering(cases: Sequence[tuple], rows: Sequence[tuple]) -> list[tuple]:
    """Pairs of (space, shape) and options: every case, and for every space every row of options."""
    out = []
    for _, of in itertools.groupby(cases, key=lambda case: case[0]):
        of = list(of)
        count = max(len(of), len(rows))
        out += [(*of[i % len(of)], *rows[(i + i // len(of)) % len(rows)]) for i in range(count)]
    return list(dict.fromkeys(out))


def law(
    *needs: str, where: Callable[[Space], bool] = lambda space: True, dtypes=DTYPES, **more: list[object]
) -> Callable:
    """Make a test a law of (space, shape, dtype, ...): it runs on every space that has what it needs."""

    def holds(space: Space) -> bool:
        return where(space) and all(space.has(n) for n in needs)

    def declare(test: Callable) -> Callable:
        names = ["dtype", *more]
        rows = list(itertools.product(dtypes, *more.values()))
        test.holds = holds
        test.grid = [dict(zip(names, row, strict=True)) for row in rows]
        LAWS[test.__name__] = test
        cases = covering([c for c in CASES if holds(c[0])], rows)
        wide_rows = [(COMPLEX[d], *row) for d, *row in rows if d in COMPLEX]
        cases += covering([c for c in COMPLEX_CASES if holds(c[0])], wide_rows) if wide_rows else []
        return pytest.mark.parametrize(("space", "shape", *names), cases, ids=name)(test)

    return declare


# -- points and vectors --------------------------------------------------------------------------------------


def randn(shape: tuple[int, ...], gen: torch.Generator, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=gen, dtype=wide(dtype)).to(dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """float64, or complex128."""
    return torch.promote_types(dtype, torch.float64)


def one(space: Space, Y: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of one member of a batch: those that `residual` reduces to a number."""
    if space.dims == 1 and space.layout.columns:
        return (Y.dim() - 2,)
    return tuple(range(Y.dim() - space.dims, Y.dim()))


def points(space: Space, X: torch.Tensor) -> torch.Tensor:
    """X with a point in the last dimensions, a view: columns that are points become rows. And back again."""
    return X.mT if space.dims == 1 and space.layout.columns else X


def inner(space: Space, Y: torch.Tensor, U: torch.Tensor, V: torch.Tensor) -> torch.Tensor:
    """Re <U, V> of each member of a batch."""
    product = (U.conj() * V).real
    return product.sum(one(space, Y)) if space.dims else product


def sized(space: Space, Y: torch.Tensor, V: torch.Tensor, size: float) -> torch.Tensor:
    """V with Frobenius norm `size` in every member of the batch (in the whole, where flat)."""
    dims = one(space, Y) or None
    return V * (size / torch.linalg.vector_norm(V, dim=dims, keepdim=True))


def point(
    space: Space, shape: tuple[int, ...], gen: torch.Generator, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """A generic point: a random one, moved a little (random symplectic points are orthogonal as well)."""
    return _point(space, shape, int(torch.randint(2**31, (), generator=gen)), wide(dtype)).to(
        dtype, copy=True
    )


@cache
def _point(space: Space, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    Y = space.random(*shape, generator=gen, dtype=dtype)
    if keeps_any_radius(space):  # points of one batch on different spheres, two batches on the same ones
        rows = Y.view(-1, shape[-1])
        rows.mul_(torch.linspace(0.6, 3, len(rows), dtype=dtype).unsqueeze(-1))
    y = frame(space, Y)
    y.step(w := horizontal(y, gen), size(w), ghor.spaces.retraction.cayley, [], [])
    return space.project(weight(space, y.point(), Y))


def tangent(space: Space, Y: torch.Tensor, gen: torch.Generator, size: float = 1.0) -> torch.Tensor:
    """A random tangent vector of Frobenius norm `size` in every member of the batch."""
    return sized(space, Y, space.tangent(Y, randn(tuple(Y.shape), gen, Y.dtype)), size)


# -- frames, on points (M, N, n) -----------------------------------------------------------------------------


def frame(space: Space, Y: torch.Tensor, section: str = "transported") -> Frame:
    """Lambda above a weight, or above the points of weights, of radius one."""
    y = space.layout.points(Y)
    return space.geometry.frame(y / space.scale(y), section, {}, torch.finfo(Y.dtype).eps)


def weight(space: Space, y: torch.Tensor, Y: torch.Tensor) -> torch.Tensor:
    """Points of radius one as a weight like Y."""
    return space.layout.weight(y * space.scale(space.layout.points(Y)), Y.shape)


def horizontal(frame: Frame, gen: torch.Generator, length: float = 1.0) -> torch.Tensor:
    """Random elements of g^hor of this norm, in the order of the frame's own."""
    w = frame.zeros()
    w.copy_(randn(tuple(w.shape), gen, w.dtype))
    frame.hor_(w)
    return w.mul_(length / size(w))


def eps(x: torch.Tensor) -> float:
    return torch.finfo(x.dtype).eps


def close(a: torch.Tensor, b: torch.Tensor, tol: float) -> None:
    assert (a - b).abs().max() <= tol


def on(space: Space, Y: torch.Tensor) -> bool:
    """Whether Y is finite and on the space, up to the rounding of a few steps, which grows with ||Y||^2."""
    Y = Y.detach()
    rounding = 4 * eps(Y) * (1 + Y.double().norm() ** 2)
    return bool(torch.isfinite(Y).all()) and bool(space.residual(Y.double()).max() <= rounding)
