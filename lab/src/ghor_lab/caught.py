"""How often Adam's first steps catch a run in the constant prediction, by start, frame and warm-up.

A run is caught if the loss of the last step of its first epoch is still above 1.32. A constant prediction has
sqrt(1.8) = 1.34, and a uniform one, where training begins, 0.95.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from .config import Config
from .pool import EXPERIMENTS, Pool, name
from .protocol import FRAMES, STARTS
from .record import Run
from .table import Column, Row, Table
from .tables import numbers

ABOVE = 1.32
Z = 1.959963984540054  # 95 % of a normal distribution are within this many deviations


def configurations(
    experiments: Iterable[str],
    optimizer: str,
    seeds: Iterable[int],
    warmup: int,
    lr: float = 1e-3,
    **common: Any,
) -> list[Config]:
    """The first epoch of every seed, with every start and frame, and with a warm-up if `warmup` > 0.

    Only optimizers that work by coordinates depend on the frame; the others get one frame. The order is seed
    by seed: if the count is stopped, all cells have the same seeds, except perhaps for the last one.
    """
    frames = FRAMES if optimizer in ("geometric-adam", "adamw-anchor") else FRAMES[:1]
    manifold = optimizer != "standard-adam"
    cells: list[dict[str, Any]] = (
        [{"start": s, "frame": f} for s, f in product(STARTS, frames)] if manifold else [{}]
    )
    cells += [{"warmup": warmup}] if warmup else []
    return [
        Config(experiment, optimizer, (seed,), 1, lr, **cell, **common)
        for experiment, seed, cell in product(experiments, seeds, cells)
    ]


def caught(run: Run) -> bool | None:
    """Whether the run's only seed was caught; None if the record does not say."""
    losses = run.epochs[0].get("last_loss") if run.epochs else None
    return losses and (losses[0] is None or losses[0] > ABOVE)


def wilson(k: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval for k of n: all p with |k / n - p| <= z sqrt(p (1 - p) / n)."""
    middle, half = (k + Z**2 / 2) / (n + Z**2), Z / (n + Z**2) * math.sqrt(k * (n - k) / n + Z**2 / 4)
    return (middle - half if k else 0.0), (middle + half if k < n else 1.0)


def table(file: str, pools: Sequence[Pool]) -> Table | None:
    """Count by configuration, and over all starts and frames of an optimizer."""
    cells: dict[str, tuple[Pool, dict[int, bool]]] = {}
    for p in sorted(pools, key=lambda p: p.epochs):
        _, seeds = cells.setdefault(json.dumps(p.config, sort_keys=True), (p, {}))
        seeds.update(
            {run.header["config"]["seeds"][0]: found for run in p.runs if (found := caught(run)) is not None}
        )
    rows: list[Row] = []
    sums: dict[str, list[tuple[Pool, dict[int, bool]]]] = {}
    for p, seeds in cells.values():
        if seeds:
            rows.append(_row(p, "", len(seeds), sorted(seed for seed, found in seeds.items() if found)))
            rest = {k: v for k, v in p.config.items() if k not in ("start", "frame")}
            sums.setdefault(json.dumps(rest, sort_keys=True), []).append((p, seeds))
    for same in sums.values():
        if len(same) > 1:
            p = min((p for p, _ in same), key=lambda p: len(p.config))
            outcomes = [found for _, seeds in same for found in seeds.values()]
            rows.append(_row(p, ", all starts and frames", len(outcomes), sum(outcomes)))
    columns = (
        *(Column("configuration", "configuration"), Column("experiment", "experiment")),
        *(Column("runs", "runs", "number", "d"), Column("caught", "caught", "number", "d")),
        Column("percent", "%", "number", ".0f"),
        Column("interval", "95 % interval (%)", "range", ".0f"),
        Column("seeds", "seeds caught"),
    )
    caption = f"Caught: a loss above {ABOVE} at the end of the first epoch"
    return Table(file, caption, columns, rows) if rows else None


def _row(p: Pool, which: str, n: int, seeds: list[int] | int) -> Row:
    title = p.title(epochs=False) + which
    k = seeds if isinstance(seeds, int) else len(seeds)
    low, high = wilson(k, n)
    listed = None if isinstance(seeds, int) or not seeds else numbers(seeds)
    return Row((title, name(EXPERIMENTS, p.experiment), n, k, 100 * k / n, (100 * low, 100 * high), listed))
