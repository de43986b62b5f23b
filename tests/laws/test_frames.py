"""Laws on what an optimizer asks of a space: values and options, points, and frames with every retraction.

A new space is in the table as soon as its file is there.
"""

import dataclasses
import inspect

import pytest
import torch
from helpers.table import (
    CASES,
    COMPLEX_CASES,
    MANIFOLD_CASES,
    RETRACTIONS,
    SPACES,
    can_be_left,
    close,
    covering,
    eps,
    frame,
    has_one_radius,
    horizontal,
    law,
    name,
    point,
    points,
    randn,
    sections,
    spoiled,
    tolerance,
    weight,
)

import ghor
from ghor._torch.precision import COMPUTE_DTYPE
from ghor.linalg import size
from ghor.spaces import frames
from ghor.spaces.retraction import by_name, geodesic

F64 = [torch.float64]
HALVES = [torch.bfloat16, torch.float16]


# Tolerances: rounding of sums of at most 49 x 7 products, hence a few hundred eps, times the condition of the
# point where the group is not compact (||Y|| <= 4 in the table).
def tol(Y):
    return 500 * eps(Y)


# -- values --------------------------------------------------------------------------------------------------


def test_the_table_has_every_space_of_the_package():
    exported = {getattr(ghor, n)() for n in ghor.__all__ if n[0].isupper() and n != "Space"}
    assert exported == set(SPACES)
    assert {s for s, _ in CASES} >= set(SPACES)


@pytest.mark.parametrize("space", SPACES, ids=name)
def test_a_space_is_a_value_and_shows_its_options(space):
    """By name, in help() and editors; sizes and other options are refused."""
    cls = type(space)
    assert space == cls()
    assert hash(space) == hash(cls())
    assert repr(space) == f"{cls.__name__}()"
    with pytest.raises(AttributeError):
        space.flatten = 2
    shown = inspect.signature(cls).parameters
    assert set(shown) == {f.name for f in dataclasses.fields(cls)}
    assert all(shown[f.name].default == f.default for f in dataclasses.fields(cls))
    options = f"its options are: {', '.join(shown) or 'none'}"
    with pytest.raises(TypeError, match=rf"{cls.__name__}\(\): .* 'no_option'; {options}"):
        cls(no_option=3)
    with pytest.raises(TypeError, match=rf"{cls.__name__}\(\).*{options}"):
        cls(2, 4, 4)


@pytest.mark.parametrize(
    ("space", "sizes", "words"),
    [
        (ghor.Stiefel(), (5, 3), r"as in Stiefel\(\)\.random\(5, 3\); its options are: flatten, blocks"),
        (ghor.SpecialOrthogonal(), (3,), r"as in SpecialOrthogonal\(\)\.random\(3, 3\)"),
        (ghor.SpecialEuclidean(), (3,), r"as in SpecialEuclidean\(\)\.random\(3, 4\)"),
        (ghor.SPD(), (3,), r"as in SPD\(\)\.random\(3, 3\)"),
        (ghor.Hyperbolic(), (3,), r"takes no sizes, got \(3,\): .* as in Hyperbolic\(\)\.random\(3\)"),
        (ghor.Flag(), (2, 1), r"Flag\(\): too many positional arguments; its options are: sizes"),
    ],
    ids=name,
)
def test_sizes_come_from_the_weight(space, sizes, words):
    with pytest.raises(TypeError, match=words):
        type(space)(*sizes)


# -- points --------------------------------------------------------------------------------------------------


@law()
def test_random_and_project_give_points(space, shape, dtype, gen):
    Y = space.random(*shape, generator=gen, dtype=dtype)
    assert (Y.shape, Y.dtype, Y.is_contiguous()) == (shape, dtype, True)
    assert space.residual(Y).max() <= tol(Y)
    Y = point(space, shape, gen, dtype)
    close(space.project(Y), Y, tol(Y))
    Z = space.project(Y + 0.05 * randn(shape, gen, dtype))
    assert space.residual(Z).max() <= tol(Y)
    assert (Z - Y).abs().max() < 0.5
    assert space.residual(space.E(shape, dtype=dtype)).max() == 0


@law(where=can_be_left)
def test_the_residual_is_one_number_for_each_member_of_a_batch(space, shape, dtype, gen):
    Y = point(space, shape, gen, dtype)
    X = Y.clone()
    batch = len(shape) - space.dims
    last = points(space, X)[(-1,) * batch]
    last.copy_(spoiled(space, points(space, X), 0.5)[(-1,) * batch])
    on, off = space.residual(Y), space.residual(X)
    assert on.shape == off.shape == points(space, Y).shape[:batch]
    assert off.flatten()[-1] > 0.1
    assert torch.equal(off.flatten()[:-1], on.flatten()[:-1])


@law(where=can_be_left, dtypes=[torch.float64, torch.float32, *HALVES])
def test_rounding_is_within_the_tolerance_and_a_hundredth_is_not(space, shape, dtype, gen):
    """`random` and `project` give points of the space; 1 % longer (10 % in half precision) is off it."""
    wide = COMPUTE_DTYPE.get(dtype, dtype)
    Y = space.random(*shape, generator=gen, dtype=dtype)
    assert space.residual(Y.to(wide)).max() <= tolerance(space, Y)
    Y = space.project(Y + 0.05 * randn(shape, gen, dtype))
    assert space.residual(Y.to(wide)).max() <= tolerance(space, Y)
    by = 0.1 if dtype in HALVES else 0.01
    assert space.residual(spoiled(space, Y, by).to(wide)).min() > tolerance(space, Y)


ORTHONORMAL = [ghor.Stiefel(), ghor.Grassmann()]


@pytest.mark.parametrize("space", ORTHONORMAL, ids=name)
def test_projections_are_on_the_space_to_rounding_whatever_their_size(space, gen):
    """2 eps sqrt(n): the SVD of single precision alone leaves five times as much."""
    X = randn((60, 40), gen, torch.float32)
    Y = space.project(X)
    assert space.residual(Y.double()) <= 2 * eps(Y) * 40**0.5
    for unit in (1e-30, 1e30):
        assert (space.project((unit * X).requires_grad_()) - Y).abs().max() <= 1e-5


# -- frames --------------------------------------------------------------------------------------------------

DTYPES = {False: [torch.float64, torch.float32], True: [torch.complex128]}
ROWS = [(k, r, d) for k in ("transported", "implicit") for r in RETRACTIONS for d in DTYPES[False]]
FRAMES = [c for c in covering(MANIFOLD_CASES, ROWS) if c[2] in sections(c[0])]
FRAMES += [
    c
    for c in covering(COMPLEX_CASES, [(k, r, torch.complex128) for k, r, d in ROWS if d in F64])
    if c[2] in sections(c[0])
]
each_frame = pytest.mark.parametrize(("space", "shape", "section", "retraction", "dtype"), FRAMES, ids=name)


def moved(L, w, R, odd=()):
    """The frame Lambda R(w), and what becomes of moments; all in memory of their own."""
    L, w, odd = L.copy(), w.clone(memory_format=torch.preserve_format), [m.clone() for m in odd]
    length = L.length(w)
    L.step(w, length, by_name(R), odd, [])
    return L, odd


def product(a, b):
    return (a.conj() * b).real.sum((-2, -1))


@each_frame
def test_pull_is_the_derivative_of_a_step(space, shape, section, retraction, dtype, gen):
    """d/dt <G, Lambda R(t W) E> = <pull(G), W>, to h^2 ||G|| ||Y||/6 and eps/h, and so is `push`."""
    L, h = frame(space, point(space, shape, gen, torch.promote_types(dtype, torch.float64)), section), 1e-4
    w, B = horizontal(L, gen), L.zeros()
    G = randn(tuple(L.point().shape), gen, B.dtype)
    L.pull(G, B)
    ahead, behind = (moved(L, t * w, retraction)[0].point() for t in (h, -h))
    close(product(G, ahead - behind) / (2 * h), L.inner(B, w), 1e-6)
    close(L.push(w), (ahead - behind) / (2 * h), 1e-6)
    A = B.clone()
    L.hor_(A)
    close(A, B, 0)  # exactly in g^hor


@each_frame
def test_a_step_is_the_retraction(space, shape, section, retraction, dtype, gen):
    """It leads where `retract` does, stays on the space, and carries moments along as `transport` does."""
    Y = point(space, shape, gen, dtype)
    L, geometry = frame(space, Y, section), space.geometry
    y, w, m = L.point().clone(), horizontal(L, gen, 0.5), horizontal(L, gen)
    V, U = L.push(w), L.push(m)
    new, (turned,) = moved(L, w, retraction, [m])
    slack = 20 * tol(Y)
    close(new.point(), geometry.retract(y, V, retraction), slack)
    assert geometry.residual(new.point()).max() <= slack
    assert (new.point() - y).abs().max() > 1e-2
    close(new.inner(turned, turned), L.inner(m, m), slack)
    if retraction == "geodesic":
        close(new.push(turned), geometry.transport(y, V, U), slack)
        (other, _), w2 = moved(L, 0.3 * w, geodesic, []), moved(L, 0.3 * w, geodesic, [w])[1][0]
        close(moved(other, 0.7 * w2, geodesic)[0].point(), new.point(), slack)  # a one-parameter group


@pytest.mark.parametrize(
    ("space", "shape", "section", "retraction", "dtype"), [c for c in FRAMES if c[2] == "implicit"], ids=name
)
def test_parts_of_a_stack_step_as_the_whole(space, shape, section, retraction, dtype, gen, monkeypatch):
    """As large stacks do on a CPU: one by one, two, or all but one at a time."""
    Y = torch.stack([point(space, shape, gen, dtype) for _ in range(5)])
    L = frame(space, Y, section)
    w, m, G = horizontal(L, gen, 0.5), horizontal(L, gen), randn(tuple(L.point().shape), gen, dtype)

    def seen():
        L.pull(G, B := L.zeros())
        new, (turned,) = moved(L, w, retraction, [m])
        return B, L.push(w), new.point(), turned

    whole = seen()
    for room in (1, L.point()[:2].numel(), L.point()[:-1].numel()):
        monkeypatch.setattr(frames, "CACHED", room)
        for x, y in zip(seen(), whole, strict=True):
            close(x, y, 100 * eps(Y) * (1 + float(y.abs().max())))


@each_frame
def test_no_step_changes_no_bit(space, shape, section, retraction, dtype, gen):
    """Neither where W = 0 nor where only others move; a copy is the same to the bit."""
    Y = point(space, shape, gen, dtype)
    L = frame(space, Y, section)
    m = horizontal(L, gen)
    new, (same,) = moved(L, 0 * m, retraction, [m])
    new.repair(True, new.length(0 * m) > 0)
    for a, b in zip([*new.parts(), same], [*L.parts(), m], strict=True):
        assert torch.equal(a, b)
    if L.exact and has_one_radius(space):
        assert torch.equal(weight(space, new.point(), Y), Y)
    for a, b in zip(L.copy().parts(), L.parts(), strict=True):
        assert torch.equal(a, b)


@each_frame
def test_the_longest_step_stays_on_the_space(space, shape, section, retraction, dtype, gen):
    Y = point(space, shape, gen, dtype)
    L = frame(space, Y, section)
    for _ in range(3):
        w = horizontal(L, gen)
        L, _ = moved(L, w * (L.longest / L.length(w)), retraction)
        L.repair(True, L.length(w) > 0)
    off = space.geometry.residual(L.point()) / (1 + size(L.point())[..., 0, 0] ** 2)
    assert off.max() <= tol(Y)


@each_frame
def test_second_derivatives_of_a_frame(space, shape, section, retraction, dtype, gen):
    """<u, H v> = <v, H u>, and <v, H v> is that of <G, Y> along a geodesic; differences at h = 1e-3."""
    L, h = frame(space, point(space, shape, gen, torch.promote_types(dtype, torch.float64)), section), 1e-3
    B, u, v = L.zeros(), horizontal(L, gen), horizontal(L, gen)
    G = randn(tuple(L.point().shape), gen, B.dtype)
    L.pull(G, B)
    H = L.bend(G, B)
    close(L.inner(u, H(v)), L.inner(v, H(u)), 1e-10 * (1 + float(size(G).max())))
    ahead, behind = (moved(L, t * v, geodesic)[0].point() for t in (h, -h))
    differences = product(G, ahead - 2 * L.point() + behind) / h**2
    close(differences, L.inner(v, H(v)), 1e-4 * (1 + float(size(G).max())))


BOUNDED = [c for c in FRAMES if can_be_left(c[0]) and c[0].compact]  # others are functions of other numbers


@pytest.mark.parametrize(("space", "shape", "section", "retraction", "dtype"), BOUNDED, ids=name)
def test_repair_squares_the_distance(space, shape, section, retraction, dtype, gen):
    """X + X (I - X* X)/2 takes a residual d to 3 d^2/4 and a little."""
    Y = point(space, shape, gen, dtype)
    L = frame(space, Y, section)
    L.parts()[0].mul_(1 + 1e-4)
    d = space.geometry.residual(L.point())
    for _ in range(2):
        L.repair(True, L.length(L.zeros()) == 0)
    assert (space.geometry.residual(L.point()) <= d**2 + tol(Y)).all()
