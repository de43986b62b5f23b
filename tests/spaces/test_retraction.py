"""Retractions against dense N x N references, written here and in 40 digits where float64 is not enough."""

import math

import mpmath
import pytest
import torch
from helpers.table import frame, name, randn
from hypothesis import given, settings
from hypothesis import strategies as st

import ghor
from ghor.spaces.retraction import RETRACTIONS, by_name, cayley, geodesic

EPS = torch.finfo(torch.float64).eps
ST = ghor.Stiefel()
SHAPES = [(8, 3), (8, 1), (8, 7), (9, 8), (6, 6), (3, 8), (20, 3)]
retractions = pytest.mark.parametrize("retraction", list(RETRACTIONS))


def dense_reference(W: torch.Tensor, retraction: str) -> torch.Tensor:
    """exp(W) or (I - W/2)^-1 (I + W/2) of one N x N matrix in 40 digits."""
    with mpmath.workdps(40):
        M, I = mpmath.matrix(W.tolist()), mpmath.eye(W.shape[0])
        R = mpmath.expm(M, method="taylor") if retraction == "geodesic" else (I - M / 2) ** -1 * (I + M / 2)
        return torch.tensor([[float(x) for x in row] for row in R.tolist()], dtype=torch.float64)


def skew_from_columns(H: torch.Tensor) -> torch.Tensor:
    """[[A, -B^T], [B, 0]] of H = [A; B], entry by entry."""
    N, n = H.shape
    W = torch.zeros(N, N, dtype=H.dtype)
    for i in range(N):
        for j in range(n):
            W[i, j] = H[i, j]
            if i >= n:
                W[j, i] = -H[i, j]
    return W


def coordinates(shape: tuple[int, ...], size: float, seed: int = 0) -> torch.Tensor:
    """Random [A; B] tall, with ||B||_2 = size (||A||_2 = size where B is empty)."""
    g = torch.Generator().manual_seed(seed)
    N, n = max(shape[-2:]), min(shape[-2:])
    H = torch.randn(N, n, generator=g, dtype=torch.float64)
    H[:n] = (H[:n] - H[:n].mT) / 2
    return H * (size / torch.linalg.matrix_norm(H[n:] if N > n else H, 2))


@pytest.mark.parametrize("shape", SHAPES, ids=name)
@retractions
@pytest.mark.parametrize("size", [1e-8, 1e-3, 1.0, 30.0, 1e3])
def test_points_are_those_of_the_dense_references(shape, retraction, size):
    """To 10 eps max(1, ||W||), for every kind of shape, and vectors of any length."""
    h = coordinates(shape, size)
    wide = shape[0] < shape[1]
    W = skew_from_columns(h)
    R, norm = dense_reference(W, retraction), max(1.0, float(torch.linalg.matrix_norm(W, 2)))
    E = torch.eye(*h.shape, dtype=torch.float64)
    moved = ST.retract(E.mT, h.mT, retraction).mT if wide else ST.retract(E, h, retraction)
    assert (moved - R[:, : h.shape[1]]).abs().max() <= 10 * EPS * norm


@pytest.mark.parametrize("shape", SHAPES, ids=name)
@pytest.mark.parametrize("section", ["transported", "implicit"])
@retractions
@pytest.mark.parametrize("size", [1e-8, 1e-3, 1.0, 3.0])
def test_frames_are_those_of_the_dense_references(shape, section, retraction, size):
    """Lambda R(W) from Lambda = I, all its columns, as far as steps are long."""
    h = coordinates(shape, size)
    N, n = h.shape
    L = frame(ST, torch.eye(N, n, dtype=torch.float64), section)
    W = h[None].clone()
    L.step(W, L.length(W), by_name(retraction), [], [])
    R = dense_reference(skew_from_columns(h), retraction)
    assert (L.point()[0] - R[:, :n]).abs().max() <= 10 * EPS * max(1, size)
    if "section" in L.tensors():
        assert (L.tensors()["section"][0] - R).abs().max() <= 10 * EPS * max(1, size)


@settings(max_examples=60)
@given(
    N=st.integers(2, 9),
    n=st.integers(1, 9),
    log_size=st.floats(-6, 2),
    seed=st.integers(0, 2**16),
    retraction=st.sampled_from(sorted(RETRACTIONS)),
)
def test_any_shape_and_size_stays_on_the_manifold(N, n, log_size, seed, retraction):
    N, n = max(N, n), min(N, n)
    h = coordinates((N, n), 10**log_size, seed)
    Y = ST.random(N, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    Lambda = ST.section(Y)
    moved = ST.retract(Y, Lambda @ h, retraction)
    bound = 100 * EPS * max(1.0, float(torch.linalg.matrix_norm(skew_from_columns(h), 2))) * N
    assert (moved.mT @ moved - torch.eye(n, dtype=torch.float64)).abs().max() <= bound


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 100.0])
def test_the_ratio_of_the_geodesic_is_the_series(size):
    """exp(X) = I + X ratio(X) for matrices of any kind, and ratio(0) = I exactly."""
    X = size * torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 5
    with mpmath.workdps(60):
        M = mpmath.matrix(X.tolist())
        term = total = mpmath.eye(5)
        for k in range(2, 400):
            term = term * M / k
            total = total + term
        reference = torch.tensor([[float(x) for x in row] for row in total.tolist()], dtype=torch.float64)
    found = geodesic.ratio(X[None], math.inf)[0]
    assert (found - reference).abs().max() <= 100 * EPS * max(1.0, size) * reference.abs().max()
    if size == 0:
        assert torch.equal(found, torch.eye(5, dtype=torch.float64))


@pytest.mark.parametrize("size", [0.1, 4.0, 1000.0])
def test_as_many_doublings_as_the_longest_step_needs(size):
    """A bound that is larger than the step changes no bit: every member has its own number of doublings."""
    X = torch.randn(5, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    X = size * (X - X.mT) / torch.linalg.matrix_norm(X - X.mT, keepdim=True)
    assert torch.equal(geodesic.ratio(X, size), geodesic.ratio(X, math.inf))
    assert torch.equal(geodesic.ratio(X, 10 * size), geodesic.ratio(X, math.inf))


@retractions
@pytest.mark.parametrize("k", [1, -1])
def test_the_form_for_vectors_is_that_for_matrices(k, retraction, gen):
    """R(W) e_1 = (1 - k |b|^2 h, f b) for W = [[0, -k b^T], [b, 0]]."""
    R = by_name(retraction)
    for size in (1e-9, 1e-3, 0.5, 1.5):
        b = randn((4,), gen)
        b = b * (size / b.norm())
        W = torch.zeros(5, 5, dtype=torch.float64)
        W[1:, 0], W[0, 1:] = b, -k * b
        dense = dense_reference(W, retraction)[:, 0]
        bb = b.square().sum()
        if k == 1:  # Cayley's, with a step that is stretched
            stretch = R.stretch(b.norm())
            stretch = 1 if stretch is None else stretch
            f = stretch / (1 + bb * stretch**2 / 4)
            h = f * stretch / 2
        else:
            f, h = R.arc(bb)
        found = torch.cat([(1 - k * bb * h).view(1), f * b])
        assert (found - dense).abs().max() <= 10 * EPS * float(dense.abs().max())


def test_names(gen):
    assert by_name("cayley") is cayley is RETRACTIONS["cayley"]
    assert by_name(geodesic) is geodesic
    with pytest.raises(ValueError, match=r"unknown retraction 'qr'; there are \['cayley', 'geodesic'\]"):
        ST.retract(torch.eye(3, 2), torch.zeros(3, 2), "qr")
