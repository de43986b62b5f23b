"""What an iteration dispatches, counted exactly: on small problems the number of operations is the time."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from table import name, randn

import ghor

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from kernels import Count

MOST = [  # kernels and reads of an iteration with one evaluation, apart from those of f
    ("cg", ghor.Stiefel(), (9, 3), 49, 11),
    ("cg", ghor.Grassmann(), (9, 3), 44, 11),
    ("cg", ghor.SpecialOrthogonal(), (4, 4), 45, 11),
    ("cg", ghor.Sphere(), (9,), 45, 11),
    ("cg", ghor.Sphere(), (5, 9), 45, 11),
    ("cg", ghor.Euclidean(), (9,), 19, 12),
    ("lbfgs", ghor.Stiefel(), (9, 3), 52, 10),
]


@pytest.mark.parametrize(("method", "space", "shape", "kernels", "reads"), MOST, ids=name)
def test_an_iteration(method, space, shape, kernels, reads, gen):
    S, start = randn((shape[0],) * 2, gen), space.random(*shape, generator=gen, dtype=torch.float64)

    def f(Y):
        return (S @ Y).cosh().sum()

    x = start.clone().requires_grad_()
    with Count() as alone:
        torch.autograd.grad(f(x), [x])
    seen = []

    def look(record):
        seen.append((record["evaluations"], count.kernels.total(), count.reads.total()))

    with Count() as count:
        ghor.minimize(f, start, space, method, max_iterations=9, callback=look)
    steps = [(k - j, r - q) for (a, j, q), (b, k, r) in pairwise(seen) if b == a + 1]
    assert min(k for k, _ in steps) - alone.kernels.total() <= kernels
    assert min(r for _, r in steps) <= reads
