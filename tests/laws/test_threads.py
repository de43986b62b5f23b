"""Threads: every function of points gives with four threads what it gives with one, to rounding.

torch runs a batch of matrices in parallel, and LAPACK may use several threads for one large matrix; neither
may show. Sides up to 96 and above go different ways (`ghor.linalg._each`).
"""

import pytest
import torch
from functions import FUNCTIONS, arguments, called
from table import SPACES, accepts, eps, has, name, randn
from threads import threads

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
    for k in ((1, 3) if tried is SMALL else (1, 2))
]


@pytest.mark.parametrize(("space", "shape"), CASES)
def test_four_threads_give_what_one_gives(space, shape, gen):
    """Every function, both retractions, and random points. Sections, too: no frame depends on how many."""
    with threads(1):
        Y = space.random(*shape, generator=gen, dtype=torch.float64)
        V, U = (space.tangent(Y, randn(shape, gen)) for _ in range(2))
        V = 0.1 * V / torch.linalg.vector_norm(V)  # short: the logarithm of Stiefel needs few iterations
        given = arguments(space, Y, U, V)
    # a mean takes many logarithms and exponentials, which are here themselves
    known = [f for f in FUNCTIONS if has(space, f) and (f != "mean" or shape[-1] < 100)]
    found = []
    for count in (1, 4):
        with threads(count):
            results = {what: called(space, what, given) for what in known}
            for what in ("retract", "update_section"):
                start, by = (given[key] for key in FUNCTIONS[what])
                results[f"{what} geodesic"] = getattr(space, what)(start, by, "geodesic")
            same = torch.Generator().manual_seed(0)
            results["random"] = space.random(*shape, generator=same, dtype=Y.dtype)
            found.append(results)
    one, four = found
    for what, value in one.items():
        off = (four[what].double() - value.double()).abs().max() / value.double().abs().max().clamp_min(1)
        assert off <= 100 * shape[-1] * eps(Y), what
