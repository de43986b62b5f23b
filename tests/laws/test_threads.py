"""Threads: every function of points gives with four threads what it gives with one, to rounding.

torch runs a batch of matrices in parallel, and LAPACK may use several threads for one large matrix; neither
may show. Sides up to 96 and above go different ways (`ghor.linalg._each`).
"""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from table import SPACES, accepts, eps, has, name, randn

# Shapes of single points; each space takes the first that it accepts.
SMALL = [(3,), (3, 3), (4, 2), (6, 4), (3, 4), (2, 3)]
LARGE = [(170,), (170, 160), (160, 160), (160, 161), (170, 4)]

CASES = [
    pytest.param(
        s,
        (k, *shape),
        marks=[pytest.mark.slow] if (tried, k) == (LARGE, 1) else [],
        id=f"{name(s)}-{k}x{name(shape)}",
    )
    for s in SPACES
    for tried in (SMALL, LARGE)
    for shape in [x for x in tried if accepts(s, x)][:1]
    for k in (1, 3)
]


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def results(space, shape, Y, V, U, Z, Lambda, W):
    """Every function of points that the space has; of sections those that take one: `section` is a choice."""
    gen = torch.Generator().manual_seed(0)
    calls = {
        "random": lambda: space.random(*shape, generator=gen, dtype=Y.dtype),
        "project": lambda: space.project(Y + 1e-3 * U),
        "residual": lambda: space.residual(Y + 1e-3 * U),
        "hint": lambda: torch.tensor(len(space.hint(Y))),
        "global_grad": lambda: space.global_grad(Lambda, U),
        "update_section": lambda: space.update_section(Lambda, W, "cayley"),
        "geodesic": lambda: space.update_section(Lambda, W, "geodesic"),
        "polish": lambda: space.polish(1.0001 * Lambda, Y),
        "restore": lambda: space.restore(1.0001 * Lambda, Y),
    }
    arguments = {
        "metric": (Y, U, V),
        "norm": (Y, V),
        "rgrad": (Y, U),
        "tangent": (Y, U),
        "Omega": (Y, V),
        "retract": (Y, V),
        "exp": (Y, V),
        "transport": (Y, V, U),
        "log": (Y, Z),
        "dist": (Y, Z),
        "levi_civita": (Y, V, U),
    }
    calls |= {k: partial(getattr(space, k), *given) for k, given in arguments.items() if has(space, k)}
    return {what: call() for what, call in calls.items()}


@pytest.mark.parametrize(("space", "shape"), CASES)
def test_four_threads_give_what_one_gives(space, shape, gen):
    with threads(1):
        Y = space.random(*shape, generator=gen, dtype=torch.float64)
        V, U = (space.tangent(Y, randn(shape, gen)) for _ in range(2))
        V = 0.1 * V / torch.linalg.vector_norm(V)  # short: the logarithm of Stiefel needs few iterations
        Lambda = space.section(Y)
        given = (Y, V, U, space.exp(Y, V), Lambda, space.global_rep(Lambda, V))
        expected = results(space, shape, *given)
    with threads(4):
        found = results(space, shape, *given)
    for what, value in expected.items():
        off = (found[what] - value).abs().max() / value.abs().max().clamp_min(1)
        assert off <= 100 * shape[-1] * eps(Y), what
