"""Small matrix functions where LAPACK or a plain sum is wrong: batches on several threads, long sums."""

import math
import re
from pathlib import Path

import pytest
import torch
from table import randn

import ghor
from ghor.linalg import (
    LARGE,
    add_product,
    frobenius,
    inverse,
    inverse_beside_identity,
    inverse_near,
    product,
    solve,
)


@pytest.mark.parametrize("batch", [(), (1,), (5,)])
@pytest.mark.parametrize("n", [3, 96, 200])
def test_inverse_and_solve_of_a_batch_on_two_threads(batch, n, gen):
    """LU of a batch of 200 x 200 is wrong on two threads with oneMKL."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        A = torch.eye(n) + 0.1 * randn((*batch, n, n), gen, torch.float32) / n**0.5
        B = randn((*batch, n, 4), gen, torch.float32)
        P, X = inverse(A), solve(A, B)
        by_columns = inverse(A.mT.contiguous().mT)
    finally:
        torch.set_num_threads(threads)
    for inverted in (P, by_columns):
        assert (A.double() @ inverted.double() - torch.eye(n)).abs().max() < 1e-5
    assert (A.double() @ X.double() - B).abs().max() < 1e-5


def test_solve_without_right_hand_sides(gen):
    """The complement of a square matrix is empty: a section of three 160 x 160 points solves for nothing."""
    Y = ghor.Stiefel().random(3, 160, 160, generator=gen)
    assert torch.equal(ghor.Stiefel().section(Y), Y)
    assert solve(Y, Y[..., :0]).shape == (3, 160, 0)


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("rows", [20, LARGE // 4])
@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3)])
def test_products_are_added_in_place_to_slices(batch, rows, by_columns, gen):
    """One batch dimension or several, rows below others, matrices small and large, stored by rows or columns:
    the rows on top stay as they are."""
    whole = randn((*batch, 4, rows) if by_columns else (*batch, rows, 4), gen)
    whole = whole.mT if by_columns else whole
    before, A, B = whole.clone(), randn((*batch, rows - 5, 2), gen), randn((*batch, 2, 4), gen)
    X = whole[..., 5:, :]
    assert add_product(X, A, B, -2) is X
    assert torch.equal(whole[..., :5, :], before[..., :5, :])
    assert (X - (before[..., 5:, :] - 2 * A @ B)).abs().max() < 1e-14


def test_long_sums_keep_their_digits(gen):
    A, B = randn((2, 3, 500_000), gen, torch.float32), randn((2, 500_000, 3), gen, torch.float32)
    exact = A.double() @ B.double()
    size = A.double().abs() @ B.double().abs()
    assert ((product(A, B) - exact).abs() / size).max() < 1e-7  # 6e-8 is float32's own
    assert torch.equal(product(A[..., :100], B[:, :100]), A[..., :100] @ B[:, :100])


def test_long_sums_of_small_numbers_after_a_large_one():
    """1e5 terms of 1e-17 after a 1: added one by one they are all lost, which is 1e-12 in float64."""
    column = torch.full((100_001, 1), 1e-17**0.5, dtype=torch.float64)
    column[0] = 1
    assert abs(float(product(column.mT, column)) - 1 - 1e-12) < 1e-14  # 512 terms of a part at most


def test_lu_is_called_in_linalg_alone():
    """oneMKL's LU of batches is not safe with threads: `linalg.py` has the one way around that."""
    calls = re.compile(
        r"linalg\.(inv|inv_ex|solve|solve_ex|det|slogdet|lu\w*)\(|torch\.(det|logdet|slogdet|inverse|lu)\("
    )
    source = Path(ghor.__file__).parent
    assert [
        str(p) for p in source.rglob("*.py") if p.name != "linalg.py" and calls.search(p.read_text())
    ] == []


@pytest.mark.parametrize("size", [1e-8, 1e-3, 0.03, 0.3, 3.0, 100.0])
@pytest.mark.parametrize("n", [5, 20, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_inverses_beside_the_identity(dtype, n, size, gen):
    """(I - M/2)^-1, by products or by LU, to the rounding of an inverse of at most norm 1."""
    A, B = (torch.randn(2, n, n, generator=gen, dtype=dtype) * size / n**0.5 for _ in range(2))
    M = (A - A.mH) / 2 - B.mH @ B / 2  # as in a Cayley step
    I = torch.eye(n, dtype=dtype)
    off = frobenius((I - M / 2) @ inverse_beside_identity(M) - I)
    scale = 1 + frobenius(M)
    assert (off <= 20 * n**0.5 * torch.finfo(dtype).eps * scale).all()


@pytest.mark.parametrize("error", [0.0, 1e-5, math.nan])
@pytest.mark.parametrize("distance", [0.0, 1e-3, 0.1, 3.0])
@pytest.mark.parametrize("n", [5, 40, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_an_inverse_from_that_of_a_matrix_nearby(dtype, n, distance, error, gen):
    """As exact as LU, whatever the distance, and also if the inverse that it starts from is not exact."""
    X, D, noise = (torch.randn(3, n, n, generator=gen, dtype=dtype) / n**0.5 for _ in range(3))
    X = X / 4 + torch.eye(n, dtype=dtype)
    Z = X + distance * D
    off = frobenius(Z @ inverse_near(Z, inverse(X) + error * noise) - torch.eye(n, dtype=dtype))
    lu = frobenius(inverse(Z))
    assert (off <= 20 * n**0.5 * torch.finfo(dtype).eps * lu * frobenius(Z) / n**0.5).all()


@pytest.mark.parametrize("left", [True, False])
def test_one_right_hand_side_for_a_batch(left, gen):
    """Also where it has as many rows as the batch has members: torch alone would take it for vectors."""
    A, B = randn((3, 3, 3), gen), randn((3, 3), gen)
    assert torch.equal(solve(A, B, left), solve(A, B.expand(3, 3, 3), left))
    P = ghor.SPD().random(3, 3, 3, generator=gen, dtype=torch.float64)
    V = B + B.mT
    assert torch.equal(ghor.SPD().exp(P, V), torch.stack([ghor.SPD().exp(p, V) for p in P]))
