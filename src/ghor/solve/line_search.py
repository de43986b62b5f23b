"""A line search for the strong Wolfe conditions, as torch.optim.LBFGS has it (after minFunc).

f(t) <= f(0) + c1 t f'(0)   and   |f'(t)| <= c2 |f'(0)|
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Trial:
    """A step t, the value and slope there, and whatever else the caller wants to keep with it."""

    t: float
    f: float
    slope: float
    at: Any = None


def strong_wolfe(
    phi: Callable[[float], Trial],
    start: Trial,
    t: float,
    *,
    c1: float = 1e-4,
    c2: float = 0.9,
    size: float = 1.0,
    tolerance: float = 1e-9,
    iterations: int = 25,
    longest: float = math.inf,
    slack: float = 0.0,
) -> Trial:
    """Find a step that satisfies both conditions, trying t first and never going beyond `longest`.

    If there is none, returns the best step seen. Ends when the bracket times `size` is below `tolerance`.
    Values that differ by less than `slack` count as equal: within rounding of the value the slope alone
    decides. A value that is not finite means that the step was too long.
    """

    def look(t: float) -> Trial:
        a = phi(t)
        # Neither is -inf a minimum, nor a value whose slope is not finite.
        return a if math.isfinite(a.f) and math.isfinite(a.slope) else replace(a, f=math.inf)

    def too_high(a: Trial) -> bool:
        return not a.f <= start.f + c1 * a.t * start.slope + slack

    def order(a: Trial, b: Trial) -> tuple[int, int]:
        """Indices of the better and the worse one; of equal values the smaller slope is better."""
        better = abs(a.slope) <= abs(b.slope) if abs(a.f - b.f) < slack else a.f <= b.f
        return (0, 1) if better else (1, 0)

    def gentle(a: Trial) -> bool:
        return abs(a.slope) <= -c2 * start.slope

    last, now, count = start, look(min(t, longest)), 0
    while not math.isfinite(now.f) and count < iterations:
        now, count = look(now.t / 10), count + 1
    bracket: list[Trial] = []
    while count < iterations and not bracket:
        if too_high(now) or (count > 1 and now.f >= last.f + slack):
            bracket = [last, now]
        elif gentle(now) or (now.t >= longest and now.slope < 0):
            return now
        elif now.slope >= 0:
            bracket = [last, now]
        else:
            t = _cubic(last, now, now.t + 0.01 * (now.t - last.t), now.t * 10, slack)
            last, now, count = now, look(min(t, longest)), count + 1
    bracket = bracket or [start, now]
    stuck = False
    low, high = order(bracket[0], bracket[1])
    while count < iterations:
        left, right = sorted(a.t for a in bracket)
        if (right - left) * size < tolerance:
            break
        t = _cubic(bracket[0], bracket[1], left, right, slack)
        edge = 0.1 * (right - left)
        # Close to an end twice in a row, or on it: move a tenth away, or the bracket would hardly shrink.
        near = min(right - t, t - left) < edge
        if near and (stuck or t >= right or t <= left):
            t = right - edge if abs(t - right) < abs(t - left) else left + edge
            near = False
        stuck = near
        now, count = look(t), count + 1
        if too_high(now) or now.f >= bracket[low].f + slack:
            bracket[high] = now
            low, high = order(bracket[0], bracket[1])
            continue
        if gentle(now):
            return now
        if now.slope * (bracket[high].t - bracket[low].t) >= 0:
            bracket[high] = bracket[low]
        bracket[low] = now
    best = bracket[low]
    # Not downhill, within the slack, and hardly less steep: not progress, and it would go on for ever.
    creeps = slack > 0 and best.f >= start.f and abs(best.slope) > -0.9 * start.slope
    return start if creeps else best


def _cubic(a: Trial, b: Trial, lower: float, upper: float, slack: float) -> float:
    """The minimum, within bounds, of the cubic through the values and slopes of two trials.

    Where the values count as equal, the zero of the slope by the secant; the middle of the bounds if there is
    no minimum.
    """
    a, b = (a, b) if a.t <= b.t else (b, a)
    d1 = a.slope + b.slope - 3 * (a.f - b.f) / (a.t - b.t) if a.t != b.t else math.nan
    square = d1 * d1 - a.slope * b.slope
    if not square >= 0 or math.isinf(square):
        return (lower + upper) / 2
    d2 = math.sqrt(square)
    below = b.slope - a.slope + 2 * d2
    t = b.t - (b.t - a.t) * ((b.slope + d2 - d1) / below) if below != 0 else math.nan
    if abs(a.f - b.f) < slack and b.slope != a.slope:
        t = b.t - b.slope * (b.t - a.t) / (b.slope - a.slope)
    return min(max(t, lower), upper) if math.isfinite(t) else (lower + upper) / 2
