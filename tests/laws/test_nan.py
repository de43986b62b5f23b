"""NaN: a point or a tangent vector with a NaN entry gives NaN or an error, never a number."""

import itertools

import pytest
import torch
from table import COMPLEX_CASES, KINDS, SPACES, has, name, point, shapes, tangent

# one batch dimension at most: a NaN in one member says nothing of the others
CASES = [(s, shapes(s, [k for k in KINDS if len(k) <= 2])[-1], torch.float64) for s in SPACES]
CASES += [(s, shape, torch.complex128) for s, shape in COMPLEX_CASES if len(shape) == 2]

# function: the arguments it takes, Y and Z points, U and V tangent vectors at Y
ARGUMENTS = {
    "residual": "Y",
    "project": "Y",
    "dist": "YZ",
    "log": "YZ",
    "norm": "YV",
    "exp": "YV",
    "retract": "YV",
    "tangent": "YV",
    "rgrad": "YV",
    "Omega": "YV",
    "metric": "YUV",
    "transport": "YVU",
}
# These may not depend on every number: translations do not change the metric of poses.
LOCAL = ("norm", "tangent", "rgrad", "Omega", "metric", "transport")


def changed(X, i, by):
    """X with `by` added to its i-th entry."""
    X = X.clone()
    X.view(-1)[i] += by
    return X


def is_finite_number(function, arguments):
    try:
        out = function(*arguments)
    except (ValueError, RuntimeError):
        return False
    return bool(torch.isfinite(out).all())


@pytest.mark.parametrize(("space", "shape", "dtype"), CASES, ids=name)
@pytest.mark.parametrize("what", ARGUMENTS)
def test_nan_is_never_a_number(space, shape, dtype, what, gen):
    if not has(space, what):
        pytest.skip(f"{space} has no {what}")
    Y = point(space, shape, gen, dtype).contiguous()
    U, V = (tangent(space, Y, gen, 0.3).contiguous() for _ in range(2))
    values = {"Y": Y, "Z": space.retract(Y, V).contiguous(), "U": U, "V": V}
    taken = [values[key] for key in ARGUMENTS[what]]
    function = getattr(space, what)
    assert is_finite_number(function, taken)
    # every corner: some functions read one triangle, or all but one coordinate
    corners = sorted({0, shape[-1] - 1, Y.numel() - shape[-1], Y.numel() - 1})
    wrong = []
    for k, i in itertools.product(range(len(taken)), corners):
        near, spoiled = ([*taken[:k], changed(taken[k], i, by), *taken[k + 1 :]] for by in (0.01, torch.nan))
        if what in LOCAL and torch.equal(function(*near), function(*taken)):
            continue
        if is_finite_number(function, spoiled):
            wrong.append((ARGUMENTS[what][k], i))
    assert wrong == []
