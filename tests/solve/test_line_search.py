"""The line search where values differ by rounding alone: slopes decide, and nothing creeps uphill."""

import math

from ghor.solve.line_search import Trial, strong_wolfe

START = Trial(0.0, 1.0, -1.0)
OPTIONS = {"c2": 0.3, "slack": 1e-10}


def test_of_equal_values_the_smaller_slope_is_better():
    """The value has risen by less than rounding; the slope, half of what it was, says that it has fallen."""
    found = strong_wolfe(lambda t: Trial(t, 1 + 5e-11, 0.5), START, 1e-8, tolerance=1.0, **OPTIONS)
    assert found.t == 1e-8


def test_uphill_within_rounding_and_as_steep_is_no_progress():
    """It would go on for ever."""
    assert strong_wolfe(lambda t: Trial(t, 1 + 1e-12, 0.95), START, 1e-8, **OPTIONS).t == 0


def test_a_minimum_far_away_is_bracketed():
    """From a first step that is too short by a factor of a million, both conditions are met."""
    for far in (1.0, 1e3, 1e6):
        found = strong_wolfe(
            lambda t, r=far: Trial(t, (t / r - 1) ** 2 * r, 2 * (t / r - 1)),
            Trial(0.0, far, -2.0),
            1.0,
            c2=0.1,
        )
        assert found.f <= far - 1e-4 * 2 * found.t
        assert abs(found.slope) <= 0.2


def test_the_same_value_and_as_steep_is_no_progress():
    """As where a step is lost in the rounding of the point."""
    found = strong_wolfe(lambda t: Trial(t, 1.0 if t < 1e-6 else math.nan, -1 + 1e-16), START, 1.0, **OPTIONS)
    assert found.t == 0
