"""How points lie in a weight: there and back, views, one number for each point."""

import math

import pytest
import torch
from helpers.table import name
from hypothesis import given, settings
from hypothesis import strategies as st

import ghor
from ghor.layout import Layout

# A layout, the shape of a weight, that of its points (M, N, n), and of a tensor with a number for each.
CASES = [
    (Layout(), (9, 4), (1, 9, 4), ()),
    (Layout(), (4, 9), (1, 9, 4), ()),
    (Layout(tall=False), (3, 4), (1, 3, 4), ()),
    (Layout(), (2, 3, 9, 4), (6, 9, 4), (2, 3)),
    (Layout(blocks=3), (27, 4), (3, 9, 4), (3,)),
    (Layout(blocks=3), (5, 12, 9), (15, 9, 4), (5, 3)),
    (Layout(blocks=3, columns=True), (4, 27), (3, 9, 4), (3,)),
    (Layout(flatten=3), (12, 2, 3, 3), (1, 18, 12), ()),
    (Layout(flatten=2, blocks=2), (12, 3, 3), (2, 9, 6), (2,)),
    (Layout(dims=1), (7,), (1, 7, 1), ()),
    (Layout(dims=1), (5, 7), (5, 7, 1), (5,)),
    (Layout(dims=1, columns=True), (2, 7, 5), (10, 7, 1), (2, 5)),
    (Layout(dims=1, flatten=2), (5, 7, 2), (5, 14, 1), (5,)),
    (Layout(dims=1, blocks=2), (5, 14), (10, 7, 1), (5, 2)),
    (Layout(dims=1, padding=0), (5, 7), (5, 7, 1), (5,)),
    (Layout(dims=0), (3, 4), (12, 1, 1), (3, 4)),
]
each_case = pytest.mark.parametrize(("layout", "shape", "points", "batch"), CASES, ids=name)


@each_case
def test_there_and_back(layout, shape, points, batch):
    X = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    P = layout.points(X)
    assert tuple(P.shape) == points
    assert torch.equal(layout.weight(P, shape), X)
    assert torch.equal(layout.weight(P.contiguous(), shape), X)
    assert layout.batch(shape) == batch
    assert layout.size(shape) == points[1:]
    assert math.prod(batch) == points[0]


@each_case
def test_a_stack_of_weights_is_a_batch(layout, shape, points, batch):
    X = torch.randn(3, *shape)
    assert torch.equal(layout.points(X), torch.cat([layout.points(x) for x in X]))
    assert layout.batch(X.shape) == (3, *batch)


@pytest.mark.parametrize(
    "case", [case for case in CASES if not case[0].columns], ids=lambda case: name(case[1])
)
def test_points_in_rows_are_a_view(case):
    """So that a step writes weights where they are."""
    layout, shape, *_ = case
    X = torch.zeros(shape)
    layout.points(X).fill_(1)
    assert X.all()


@pytest.mark.parametrize("row", [0, 2, -1])
@pytest.mark.parametrize("blocks", [1, 2])
def test_the_row_of_a_padding_index(row, blocks):
    layout = Layout(dims=1, blocks=blocks, padding=row)
    X = torch.randn(2, 5, 6)
    P = layout.points(X)
    out = layout.weight(layout.padded(P, X.shape, 7.0), X.shape)
    X[:, row] = 7
    assert torch.equal(out, X)
    assert Layout(dims=1).padded(P, X.shape, 7.0) is P


@settings(max_examples=60)
@given(
    batch=st.lists(st.integers(1, 3), max_size=2),
    rows=st.integers(1, 4),
    columns=st.integers(1, 5),
    blocks=st.integers(1, 3),
    kernel=st.lists(st.integers(1, 3), max_size=2),
    across=st.booleans(),
)
def test_any_weight_comes_back(batch, rows, columns, blocks, kernel, across):
    across = across and not kernel
    block = (columns, rows * blocks) if across else (rows * blocks, columns, *kernel)
    layout, shape = Layout(blocks=blocks, columns=across, flatten=1 + len(kernel)), (*batch, *block)
    X = torch.randn(shape)
    P = layout.points(X)
    assert tuple(P.shape[1:]) == layout.size(shape)
    assert P.shape[0] == math.prod(layout.batch(shape))
    assert torch.equal(layout.weight(P, shape), X)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ghor.Stiefel(flatten=0), "flatten counts dimensions, 1 or more, got 0"),
        (lambda: ghor.Stiefel(blocks=(3, 0)), r"blocks counts matrices, 3 or \(3, heads\), got \(3, 0\)"),
        (lambda: ghor.Stiefel(along="side"), "along='rows' or along='columns', got 'side'"),
        (lambda: ghor.Stiefel(along="columns"), r"Stiefel\(along='columns'\) has no blocks of that kind"),
        (lambda: ghor.Stiefel(blocks=2).check_shape((5, 3)), "cannot split 5 rows into 2 equal blocks"),
        (lambda: ghor.Stiefel(blocks=3).check_shape((4, 9)), "its 9 columns can be: along='columns'"),
        (lambda: ghor.Stiefel().check_shape((5,)), "2 or more dimensions, got shape .*ghor.Sphere"),
        (lambda: ghor.Stiefel().check_shape((5, 0)), r"no points of the empty shape \(5, 0\)"),
        (
            lambda: ghor.Grassmann().random(3, 3),
            r"single point \(ghor.Stiefel\(\) is not\), got shape \(3, 3\)",
        ),
        (
            lambda: ghor.Stiefel().random(3, 1, 1),
            r"does not move, got shape .*Stiefel\(flatten=2\) takes a kernel",
        ),
        (lambda: ghor.SpecialOrthogonal().project(torch.ones(3, 2)), "holds square matrices"),
        (lambda: ghor.SymplecticStiefel().random(5, 2), "holds matrices with even sides 2N x 2n, got shape"),
        (lambda: ghor.Stiefel().residual(torch.ones(3)), "needs 2 or more dimensions"),
    ],
)
def test_what_is_no_layout_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
