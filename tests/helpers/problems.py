"""Problems with known answers, for the tests of solvers."""

import pytest
import torch

import ghor
from ghor.solve.minimize import METHODS

STIEFEL = ghor.Stiefel()
each_method = pytest.mark.parametrize("method", METHODS)


def gen(seed):
    return torch.Generator().manual_seed(seed)


def brockett(N, n, seed=0):
    """sum_i i y_i^T S y_i on St(n, N): f, a start, the smallest value."""
    g = gen(seed)
    X = torch.randn(N, N, generator=g, dtype=torch.float64)
    S, weights = (X + X.mT) / 2, torch.arange(1, n + 1, dtype=torch.float64)
    best = float((torch.linalg.eigvalsh(S)[:n] * weights.flip(0)).sum())
    start = STIEFEL.random(N, n, generator=g, dtype=torch.float64)
    return (lambda Y: (Y * (S @ Y) * weights).sum()), start, best


def svd(seed):
    """The authors' problem, ||A - w1 w2^T A|| on two St(3, 20), A 20 x 5: f, a start, the smallest value."""
    A = torch.randn(20, 5, generator=gen(0), dtype=torch.float64)
    g = gen(100 + seed)
    start = [STIEFEL.random(20, 3, generator=g, dtype=torch.float64) for _ in range(2)]
    best = float(torch.linalg.svdvals(A)[3:].norm())
    return (lambda w: torch.linalg.matrix_norm(A - w[0] @ (w[1].mT @ A))), start, best


def closure(opt, f):
    """What LBFGS calls: the value of f, with gradients computed anew."""

    def evaluated():
        opt.zero_grad()
        loss = f()
        loss.backward()
        return loss

    return evaluated


def smooth(shape):
    """A loss with no symmetry."""
    C = torch.randn(shape, generator=gen(3), dtype=torch.float64)
    return lambda Y: torch.sin(Y + C).sum() + (Y * Y * C).sum()


def with_gradient(f, gradient):
    """f, and another function in place of its gradient."""

    class Another(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return f(x)

        @staticmethod
        def backward(ctx, g):
            return g * gradient(ctx.saved_tensors[0])

    return Another.apply


def values_of(result):
    """The value at each iteration."""
    return torch.tensor([record["value"] for record in result.history], dtype=torch.float64)
