"""Small matrix functions where LAPACK or a plain sum is wrong: batches on several threads, long sums."""

import re
from pathlib import Path

import pytest
import torch
from helpers.table import randn
from helpers.threads import threads

import ghor
from ghor.linalg import add_, defect, det, gram, inverse, plus, polar, solve, spectral_bound, times


@pytest.mark.parametrize("batch", [(), (1,), (5,)])
@pytest.mark.parametrize("n", [3, 96, 200])
def test_lu_of_a_batch_on_two_threads(batch, n, gen):
    """LU of a batch of 200 x 200 is wrong on two threads with oneMKL."""
    with threads(2):
        A = torch.eye(n) + 0.1 * randn((*batch, n, n), gen, torch.float32) / n**0.5
        B = randn((*batch, n, 4), gen, torch.float32)
        P, X, d = inverse(A), solve(A, B), det(A)
        by_columns = inverse(A.mT.contiguous().mT)
    for inverted in (P, by_columns):
        assert (A.double() @ inverted.double() - torch.eye(n)).abs().max() < 1e-5
    assert (A.double() @ X.double() - B).abs().max() < 1e-5
    assert (d.double() / torch.linalg.det(A.double()) - 1).abs().max() < 1e-4


def test_solve_without_right_hand_sides(gen):
    """The complement of a square matrix is empty: a section of three 160 x 160 points solves for nothing."""
    Y = ghor.Stiefel().random(3, 160, 160, generator=gen)
    assert torch.equal(ghor.Stiefel().section(Y), Y)
    assert solve(Y, Y[..., :0]).shape == (3, 160, 0)


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(("N", "n"), [(7, 1), (7, 3), (3, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_products_by_rows_and_by_columns(N, n, by_columns, dtype, gen):
    """Of slices, too, which lie in the memory of larger matrices; rows beside them stay as they are."""
    whole = randn((4, n, N + 2) if by_columns else (4, N + 2, n), gen, dtype)
    whole = whole.mT if by_columns else whole
    X, before = whole[..., 2:, :], whole.clone()
    A, S = randn((4, N, n), gen, dtype), randn((4, n, n), gen, dtype)
    expected = X + 2 * A @ S
    assert (gram(X, A) - X.mH @ A).abs().max() < 1e-13
    assert (times(X, S) - X @ S).abs().max() < 1e-13
    assert (plus(X, A, S, 2) - expected).abs().max() < 1e-13
    assert add_(X, A, S, 2).data_ptr() == X.data_ptr()
    assert (X - expected).abs().max() < 1e-13
    assert torch.equal(whole[..., :2, :], before[..., :2, :])


def test_long_sums_of_small_numbers_after_a_large_one():
    """1e5 terms of 1e-17 after a 1: added one by one they are all lost, which is 1e-12 in float64."""
    column = torch.full((1, 100_001, 1), 1e-17**0.5, dtype=torch.float64)
    column[:, 0] = 1
    assert abs(float(defect(column)) + 1e-12) < 2e-14


@pytest.mark.parametrize("n", [20, 128, 512])
def test_the_defect_of_large_matrices_has_its_digits(n, gen):
    """In float32 alone it is 5e-6 for n = 512, of which repairs would never rid a frame."""
    Q = torch.linalg.qr(randn((1, n, n), gen))[0].float()
    exact = torch.eye(n, dtype=torch.float64) - Q.double().mT @ Q.double()
    assert torch.linalg.matrix_norm(defect(Q).double() - exact) <= 1e-6


def test_polar_factors_of_a_batch_with_nan(gen):
    X = randn((3, 5, 2), gen)
    X[1, 0, 0] = torch.nan
    Y = polar(X)
    assert torch.isnan(Y[1]).all()
    for x, y in ((X[0], Y[0]), (X[2], Y[2])):
        P = y.mT @ x
        assert (y @ P - x).abs().max() < 1e-13
        assert torch.linalg.eigvalsh(P).min() > 0
        assert (P - P.mT).abs().max() < 1e-13


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_the_spectral_bound(rank, gen):
    """At least the norm, at most n^(1/16) times it; exact for one, or for one pair of a skew matrix."""
    X = randn((4, 7, rank), gen) @ randn((4, rank, 5), gen)
    norm = torch.linalg.matrix_norm(X, 2)
    bound = spectral_bound(X)
    assert (bound >= norm * (1 - 1e-12)).all()
    assert (bound <= norm * rank ** (1 / 16) * (1 + 1e-12)).all()
    A = X[..., :2, :2] - X[..., :2, :2].mT
    assert (spectral_bound(A, 2) - torch.linalg.matrix_norm(A, 2)).abs().max() < 1e-12
    assert torch.equal(spectral_bound(0 * X), torch.zeros(4, dtype=torch.float64))


def test_lu_is_called_in_linalg_alone():
    """oneMKL's LU of batches is not safe with threads: `linalg.py` has the one way around that."""
    calls = re.compile(
        r"linalg\.(inv|inv_ex|solve|solve_ex|det|slogdet|lu\w*)\(|torch\.(det|logdet|slogdet|inverse|lu)\("
    )
    source = Path(ghor.__file__).parent
    assert [
        str(p) for p in source.rglob("*.py") if p.name != "linalg.py" and calls.search(p.read_text())
    ] == []


@pytest.mark.parametrize("left", [True, False])
def test_one_right_hand_side_for_a_batch(left, gen):
    """Also where it has as many rows as the batch has members: torch alone would take it for vectors."""
    A, B = randn((3, 3, 3), gen), randn((3, 3), gen)
    assert torch.equal(solve(A, B, left), solve(A, B.expand(3, 3, 3), left))
    P = ghor.SPD().random(3, 3, 3, generator=gen, dtype=torch.float64)
    V = B + B.mT
    assert torch.equal(ghor.SPD().exp(P, V), torch.stack([ghor.SPD().exp(p, V) for p in P]))
