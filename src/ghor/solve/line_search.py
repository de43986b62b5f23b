"""A line search for the strong Wolfe conditions (Nocedal and Wright, section 3.5).

f(t) <= f(0) + c1 t f'(0)   and   |f'(t)| <= c2 |f'(0)|

Its choices are those of torch.optim.LBFGS (after minFunc).
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
    search = Search(phi, start, c1, c2, slack, iterations)
    best = search.zoom(*search.bracket(t, longest), tolerance / size)
    # Not downhill, within the slack, and hardly less steep: not progress, and it would go on for ever.
    creeps = slack > 0 and best.f >= start.f and abs(best.slope) > -0.9 * start.slope
    return start if creeps else best


@dataclass
class Search:
    """The two conditions, and how many trials there have been."""

    phi: Callable[[float], Trial]
    start: Trial
    c1: float
    c2: float
    slack: float
    most: int  # after the first one
    trials: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether there may be another trial."""
        return self.trials <= self.most

    def look(self, t: float) -> Trial:
        """The trial at t. Neither is -inf a minimum, nor a value whose slope is not finite."""
        self.trials += 1
        a = self.phi(t)
        return a if math.isfinite(a.f) and math.isfinite(a.slope) else replace(a, f=math.inf)

    def too_high(self, a: Trial) -> bool:
        """Whether the first condition fails."""
        return not a.f <= self.start.f + self.c1 * a.t * self.start.slope + self.slack

    def gentle(self, a: Trial) -> bool:
        """Whether the second condition holds."""
        return abs(a.slope) <= -self.c2 * self.start.slope

    def ordered(self, a: Trial, b: Trial) -> tuple[Trial, Trial]:
        """The better one first; of equal values the smaller slope is better."""
        better = abs(a.slope) <= abs(b.slope) if abs(a.f - b.f) < self.slack else a.f <= b.f
        return (a, b) if better else (b, a)

    def bracket(self, t: float, longest: float) -> tuple[Trial, Trial]:
        """Two trials with a good step between them (algorithm 3.5), the better one first; or one twice."""
        last, now = self.start, self.look(min(t, longest))
        while not math.isfinite(now.f) and self.goes_on:
            now = self.look(now.t / 10)
        while self.goes_on:
            if self.too_high(now) or (self.trials > 2 and now.f >= last.f + self.slack):
                return self.ordered(last, now)
            if self.gentle(now) or (now.t >= longest and now.slope < 0):
                return now, now
            if now.slope >= 0:
                return self.ordered(last, now)
            t = _cubic(last, now, now.t + 0.01 * (now.t - last.t), now.t * 10, self.slack)
            last, now = now, self.look(min(t, longest))
        return self.ordered(self.start, now)

    def zoom(self, low: Trial, high: Trial, least: float) -> Trial:
        """A good step between two trials (algorithm 3.6), or the best one once they are `least` apart."""
        near = False  # whether the last one was close to an end
        while self.goes_on and low is not high and abs(high.t - low.t) >= least:
            left, right = sorted((low.t, high.t))
            t, edge = _cubic(low, high, left, right, self.slack), 0.1 * (right - left)
            # Close to an end twice in a row, or on it: move a tenth away, or they would hardly approach.
            closer = min(right - t, t - left) < edge
            if closer and (near or t >= right or t <= left):
                t, closer = right - edge if right - t < t - left else left + edge, False
            near, now = closer, self.look(t)
            if self.too_high(now) or now.f >= low.f + self.slack:
                low, high = self.ordered(low, now)
            elif self.gentle(now):
                return now
            else:
                low, high = now, low if now.slope * (high.t - low.t) >= 0 else high
        return low


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
