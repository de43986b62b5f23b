"""What an iteration dispatches, counted exactly: on small problems the number of operations is the time."""

from itertools import pairwise

import pytest
import torch
from helpers.table import name, randn
from torch.utils._python_dispatch import TorchDispatchMode

import ghor

# These allocate or rename, and start nothing on a device.
FREE = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view")


class Count(TorchDispatchMode):
    """Counts kernels, which are operations that are no views, and numbers that the host reads."""

    def __init__(self):
        super().__init__()
        self.kernels = self.reads = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        operation = function.overloadpacket.__name__
        view = any(r.alias_info and not r.alias_info.is_write for r in function._schema.returns)
        read = operation == "_local_scalar_dense"
        self.reads += read
        self.kernels += not (read or view or operation in FREE)
        return function(*args, **(kwargs or {}))


MOST = [  # kernels and reads of an iteration with one evaluation, apart from those of f
    ("cg", ghor.Stiefel(), (9, 3), 46, 11),
    ("cg", ghor.Grassmann(), (9, 3), 40, 11),
    ("cg", ghor.SpecialOrthogonal(), (4, 4), 42, 10),
    ("cg", ghor.Sphere(), (9,), 39, 11),
    ("cg", ghor.Sphere(), (5, 9), 40, 11),
    ("cg", ghor.Euclidean(), (9,), 19, 12),
    ("lbfgs", ghor.Stiefel(), (9, 3), 49, 10),
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
        seen.append((record["evaluations"], count.kernels, count.reads))

    with Count() as count:
        ghor.minimize(f, start, space, method, max_iterations=9, callback=look)
    steps = [(k - j, r - q) for (a, j, q), (b, k, r) in pairwise(seen) if b == a + 1]
    assert min(k for k, _ in steps) - alone.kernels <= kernels
    assert min(r for _, r in steps) <= reads
