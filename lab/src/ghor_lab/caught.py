"""How often Adam's first steps catch a run in the constant prediction, by start, frame and warm-up.

A run is caught if the loss of the last step of its first epoch is still above 1.32. A constant prediction has
sqrt(1.8) = 1.34, and a uniform one, where training begins, 0.95.

    ghor run mnist -o geometric-adam --epochs 1 --seeds 0-29 --start uniform,authors \
        --frame closed-form,random
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from .pools import NAMES, Pool
from .record import Run
from .tables import EMPTY, Table, between, listed

ABOVE = 1.32
Z = 1.959963984540054  # 95 % of a normal distribution are within this many deviations


def caught(run: Run) -> bool | None:
    """Whether the run's only seed was caught; None if the record does not say."""
    losses = run.epochs[0].get("last_loss") if run.epochs else None
    return losses and (losses[0] is None or losses[0] > ABOVE)


def wilson(k: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval for k of n: all p with |k / n - p| <= z sqrt(p (1 - p) / n)."""
    middle, half = (k + Z**2 / 2) / (n + Z**2), Z / (n + Z**2) * math.sqrt(k * (n - k) / n + Z**2 / 4)
    return (middle - half if k else 0.0), (middle + half if k < n else 1.0)


def table(pools: Sequence[Pool]) -> Table | None:
    """Count by configuration, and over all starts and frames of an optimizer."""
    cells: dict[str, tuple[Pool, dict[int, bool]]] = {}
    for p in sorted(pools, key=lambda p: p.epochs):
        _, seeds = cells.setdefault(json.dumps(p.config, sort_keys=True), (p, {}))
        for run in p.runs:
            if (found := caught(run)) is not None:
                seeds[run.header["config"]["seeds"][0]] = found
    rows, sums = [], dict[str, list[tuple[Pool, dict[int, bool]]]]()
    for p, seeds in cells.values():
        if seeds:
            which = [seed for seed, found in seeds.items() if found]
            rows.append(row(p, p.title(), len(seeds), len(which), listed(which) or EMPTY))
            rest = {k: v for k, v in p.config.items() if k not in ("start", "frame")}
            sums.setdefault(json.dumps(rest, sort_keys=True), []).append((p, seeds))
    for same in sums.values():
        if len(same) > 1:
            p = min((p for p, _ in same), key=lambda p: len(p.unusual()))
            outcomes = [found for _, seeds in same for found in seeds.values()]
            title = f"{p.title()}, all starts and frames"
            rows.append(row(p, title, len(outcomes), sum(outcomes), EMPTY))
    headings = ["configuration", "experiment", "runs", "caught", "%", "95 % interval (%)", "seeds caught"]
    caption = f"Caught: a loss above {ABOVE} at the end of the first epoch"
    return Table(caption, headings, rows, ("experiment", "seeds caught")) if rows else None


def row(p: Pool, title: str, n: int, k: int, seeds: str) -> list[str]:
    """The cells of k of n runs."""
    low, high = wilson(k, n)
    numbers = [str(n), str(k), f"{100 * k / n:.0f}", between(100 * low, 100 * high, ".0f")]
    return [title, NAMES.get(p.experiment, p.experiment), *numbers, seeds]
