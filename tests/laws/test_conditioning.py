"""Laws of conditioning: geometry against references of 50 digits, up to the condition that a space names.

The inputs are exact for both, so only what the library loses is measured.
"""

import math

import mpmath as mp
import pytest
import torch
from table import name

import ghor

SPD = ghor.SPD()
N = 3
# up to the limit that SPD's docstring names, 1/(n eps): 2.8e6 and 1.5e15
LIMITS = [
    (torch.float32, 1e2),
    (torch.float32, 1e5),
    (torch.float32, 1e6),
    (torch.float64, 1e6),
    (torch.float64, 1e10),
    (torch.float64, 5e14),
]
each_condition = pytest.mark.parametrize(("dtype", "condition"), LIMITS, ids=name)


@pytest.fixture(autouse=True)
def digits():
    with mp.workdps(50):
        yield


def matrix(gen, condition, dtype):
    """A positive definite matrix with eigenvalues from 1 to 1/condition in random directions, as rounded."""
    Q = torch.linalg.qr(torch.randn(N, N, generator=gen, dtype=torch.float64))[0]
    P = (Q * condition ** -torch.linspace(0, 1, N, dtype=torch.float64)) @ Q.mT
    return ((P + P.mT) / 2).to(dtype)


def exact(X):
    return mp.matrix(X.double().tolist())


def function(S, f):
    """f(S) of a symmetric matrix."""
    w, V = mp.eigsy((S + S.T) / 2)
    return V * mp.diag([f(x) for x in w]) * V.T


def whitened(A, X):
    """A^-1/2 X A^-1/2."""
    R = function(A, lambda x: 1 / mp.sqrt(x))
    return R * X * R


def dist(A, B):
    return mp.norm(function(whitened(A, B), mp.log))


@each_condition
def test_distances(dtype, condition, gen):
    """The smallest eigenvalue of a Cholesky factor's matrix is off by n eps cond(P) at most, relatively."""
    for _ in range(4):
        Y, Z = matrix(gen, condition, dtype), matrix(gen, condition, dtype)
        error = abs(float(SPD.dist(Y, Z)) - dist(exact(Y), exact(Z)))
        assert error <= N * torch.finfo(dtype).eps * condition


@each_condition
def test_distances_of_near_points(dtype, condition, gen):
    """Relative to the distance itself: Z - Y is exact, and its coordinates lose n eps cond(P)."""
    Y = matrix(gen, condition, dtype)
    Z = Y * (1 + 64 * torch.finfo(dtype).eps)
    true = dist(exact(Y), exact(Z))
    assert abs(float(SPD.dist(Y, Z)) - true) <= N * torch.finfo(dtype).eps * condition * true


@each_condition
def test_logarithms(dtype, condition, gen):
    """Relative to ||Y||: the coordinates are as exact as distances are."""
    for _ in range(3):
        Y, Z = matrix(gen, condition, dtype), matrix(gen, condition, dtype)
        A, B = exact(Y), exact(Z)
        R = function(A, mp.sqrt)
        true = R * function(whitened(A, B), mp.log) * R
        assert mp.norm(exact(SPD.log(Y, Z)) - true) <= N * torch.finfo(dtype).eps * condition * mp.norm(A)


@each_condition
@pytest.mark.parametrize("shrink", [0.0, -23.0], ids=["size one", "size 1e-10"])
def test_exponentials(dtype, condition, shrink, gen):
    """From well-conditioned points to matrices of this condition, of any size: 16 n eps of the result's norm,
    for ||W|| <= 33, and no more than n eps cond in the metric, in which small eigenvalues count."""
    Y, Q = matrix(gen, 3.0, dtype), torch.linalg.qr(torch.randn(N, N, generator=gen, dtype=torch.float64))[0]
    S = (Q * (shrink - torch.linspace(0, math.log(condition), N, dtype=torch.float64))) @ Q.mT
    L = torch.linalg.cholesky(Y.double())
    Delta = (L @ (S + S.mT) @ L.mT / 2).to(dtype)
    Delta, A = (Delta + Delta.mT) / 2, exact(Y)
    R = function(A, mp.sqrt)
    true, P = R * function(whitened(A, exact(Delta)), mp.exp) * R, exact(SPD.exp(Y, Delta))
    assert mp.norm(P - true) <= 16 * N * torch.finfo(dtype).eps * mp.norm(true)
    assert dist(true, P) <= N * torch.finfo(dtype).eps * condition
