"""NaN: a point, a frame or a vector with a NaN entry gives NaN or an error, never a number."""

import pytest
import torch
from functions import FUNCTIONS, ON_FRAMES, arguments, called
from table import COMPLEX_CASES, KINDS, SPACES, has, name, point, shapes, tangent

# one batch dimension at most: a NaN in one member says nothing of the others
CASES = [(s, shapes(s, [k for k in KINDS if len(k) <= 2])[-1], torch.float64) for s in SPACES]
CASES += [(s, shape, torch.complex128) for s, shape in COMPLEX_CASES if len(shape) == 2]
CASES = [(*case, what) for case in CASES for what in FUNCTIONS if has(case[0], what)]

# These may not depend on every number: translations do not change the metric of poses.
LOCAL = ("norm", "tangent", "rgrad", "Omega", "metric", "inner", "transport", "tolerance", "levi_civita")
LOCAL += (*ON_FRAMES, "is_tangent", "to_ball")


def changed(X, i, by):
    """X with `by` added to its i-th entry."""
    X = X.clone(memory_format=torch.contiguous_format)
    X.view(-1)[i] += by
    return X


def is_finite_number(space, what, values):
    """Whether all of the result is; of a bool, whether it is true."""
    try:
        out = called(space, what, values)
    except (ValueError, RuntimeError):
        return False
    return bool(out.all() if out.dtype == torch.bool else torch.isfinite(out).all())


def is_indifferent(space, what, values, near):
    """Whether the result is the same, but for rounding."""
    one, other = (called(space, what, v) for v in (values, near))
    return torch.allclose(one, other, rtol=0, atol=1e-14) if one.dtype != torch.bool else bool(one == other)


@pytest.mark.filterwarnings("ignore:a weight on .* has come to")
@pytest.mark.parametrize(("space", "shape", "dtype", "what"), CASES, ids=name)
def test_nan_is_never_a_number(space, shape, dtype, what, gen):
    Y = point(space, shape, gen, dtype).contiguous()
    U, V = (tangent(space, Y, gen, 0.3).contiguous() for _ in range(2))
    values = arguments(space, Y, U, V)
    assert is_finite_number(space, what, values)
    wrong = []
    for key in FUNCTIONS[what]:
        # every corner: some functions read one triangle, or all but one coordinate
        X, row = values[key], values[key].shape[-1]
        corners = {0, row - 1, X.numel() - row, X.numel() - 1}
        for i in sorted(corners):
            near, spoiled = (values | {key: changed(X, i, by)} for by in (0.01, torch.nan))
            if what in LOCAL and is_indifferent(space, what, values, near):
                continue
            if is_finite_number(space, what, spoiled):
                wrong.append((key, i))
    assert wrong == []
