"""The first screen of a report: the results in a few sentences, and three figures with the paper's bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas

from . import paper
from .config import READINGS
from .figures import (
    ACCURACY,
    DRIFT,
    ERROR,
    GREY,
    INK,
    LOSS,
    OTHER,
    STYLES,
    Figure,
    Quantity,
    Reported,
    figure,
    reported,
)
from .pool import EXPERIMENTS, OPTIMIZERS, Array, Pool, best, listed, name, off, place
from .table import short

USUAL = {"retraction": "cayley", "section": "auto", "norm": "canonical", "dtype": "float32"}
UNUSUAL = ("start", "frame", "loss", "warmup", "manifold_lr")
WITHIN = 2  # so many of the paper's standard deviations count as agreement


@dataclass(frozen=True)
class Measure:
    """The subject of a figure: a number for each seed, (seeds,), and the paper's (mid, low, high)."""

    key: str
    words: str
    of: Callable[[Pool], Array | None]
    reported: Reported
    log: bool = False


def _last(quantity: Quantity) -> Callable[[Pool], Array | None]:
    return lambda p: None if (x := p.series(*quantity.keys)) is None else x[-1]


def _best(p: Pool) -> Array | None:
    errors = p.series("loss")
    return None if errors is None else best(errors)


def _minutes(p: Pool) -> Array | None:
    """Minutes for one seed and 1000 epochs, as in the paper.

    The share of a run that trains several seeds at once, however few epochs it has.
    """
    seconds = p.numbers("seconds")
    scale = paper.EPOCHS["pendulum"] / p.epochs / len(p.seeds) / 60
    return np.full(len(p.seeds), seconds.sum() * scale) if len(seconds) else None


TRANSFORMER = (
    Measure("loss", "final training loss", _last(LOSS), LOSS.reported),
    Measure("accuracy", "test accuracy (%)", _last(ACCURACY), ACCURACY.reported),
    Measure("drift", DRIFT.words, _last(DRIFT), DRIFT.reported, log=True),
)
PENDULUM = (
    Measure("error", "final reconstruction error", _last(ERROR), ERROR.reported),
    Measure("best", "best reconstruction error", _best, reported("best")),
    Measure("minutes", "minutes for a seed and 1000 epochs", _minutes, reported("minutes"), log=True),
)


def plain(pools: Sequence[Pool]) -> list[Pool]:
    """The pools of one experiment with the paper's configurations: usual settings, no label or the first
    reading.

    Every run is in one of them, at its full length.
    """

    def rank(p: Pool) -> tuple[tuple[int, str], int]:
        unusual = [key for key in UNUSUAL if key in p.config] + [
            k for k, v in USUAL.items() if p.config.get(k, v) != v
        ]
        return place(READINGS, p.label), len(unusual)

    pools = [p for p in pools if p.epochs > 1] or list(
        pools
    )  # runs of one epoch belong to the count of caught runs
    first = min(map(rank, pools))
    found: dict[tuple[str, ...], Pool] = {}
    for p in sorted(pools, key=lambda p: (-p.epochs, len(p.seeds))):
        if rank(p) == first:
            runs = tuple(run for run in p.runs if not any(str(run.path) in key for key in found))
            if runs:
                found[tuple(str(run.path) for run in runs)] = Pool(p.config, runs, p.epochs, p.asked)
    return sorted(found.values(), key=lambda p: (place(OPTIMIZERS, p.optimizer), -p.epochs))


# -- words ---------------------------------------------------------------------------------------------------


def verdict(pools: Sequence[Pool]) -> list[str]:
    """The results: first everything in one sentence, then a sentence or two for each experiment."""
    usual = {
        e: plain([p for p in pools if p.experiment == e]) for e in dict.fromkeys(p.experiment for p in pools)
    }
    if not usual:
        return ["There is no whole epoch yet."]
    distances = {e: list(_distances(e, same)) for e, same in usual.items()}
    found = [d for each in distances.values() for _, _, d in each]
    lines = [" ".join(_about(e, same, distances[e])) for e, same in usual.items()]
    drifts = [float(x.max()) for p in pools if (x := p.series("drift")) is not None and np.isfinite(x).all()]
    theirs = [o.drift[1] for e in usual for o in paper.OUTCOMES.get(e, {}).values() if o.drift]
    on = f"no weight was ever further than {short(f'{max(drifts):.1e}')} from its manifold" if drifts else ""
    on += f" (in the paper up to {short(f'{max(theirs):.1e}')})" if drifts and theirs else ""
    if not found:
        return [*lines, *([f"{on[0].upper()}{on[1:]}."] if on else [])]
    near, which = (
        sum(abs(d) <= WITHIN for d in found),
        [name(EXPERIMENTS, e) for e, d in distances.items() if d],
    )
    count = (
        f"{near} of {len(found)} results are" if len(found) > 1 else f"the result is{'' if near else ' not'}"
    )
    count = f"all {near} results are" if near == len(found) > 1 else count
    first = (
        f"At the paper's number of epochs ({listed(which)}) {count} within {WITHIN} of its standard "
        "deviations"
    )
    return [f"{first}; {on}." if on else f"{first}.", *lines]


def _distances(experiment: str, pools: Sequence[Pool]) -> Iterator[tuple[Pool, str, float]]:
    """For pools at the paper's length: "loss" or "accuracy", and the distance in the paper's deviations."""
    for p in pools:
        theirs = paper.OUTCOMES.get(experiment, {}).get(p.optimizer)
        if theirs is None or p.epochs != paper.EPOCHS[experiment]:
            continue
        for key, pair in (("loss", theirs.final), ("test_accuracy", theirs.accuracy)):
            values = p.series(key)
            distance = None if values is None else off(float(values[-1].mean()), pair)
            if distance is not None and np.isfinite(distance):
                yield p, key, distance


def _about(experiment: str, pools: Sequence[Pool], found: Sequence[tuple[Pool, str, float]]) -> Iterator[str]:
    asked, title = paper.EPOCHS.get(experiment), name(EXPERIMENTS, experiment)
    what = "reconstruction error" if experiment == "pendulum" else "training loss"
    full = [p for p in pools if p.epochs == asked]
    if found:
        cells: dict[str, list[str]] = {}
        for p, key, d in found:
            values = p.series(key)
            assert values is not None
            mean = f"{values[-1].mean():.3f}" if key == "loss" else f"{values[-1].mean():.1f} %"
            cells.setdefault(name(OPTIMIZERS, p.optimizer), []).append(f"{mean} ({d:+.1f})")
        both = what + (" and test accuracy" if any(key != "loss" for _, key, _ in found) else "")
        yield (
            f"{title}, {both} after {asked} epochs{_seeds(full)}, in brackets the distance from the paper "
            "in its standard deviations: "
            f"{', '.join(f'{title} {listed(parts)}' for title, parts in cells.items())}."
        )
    done = {p.optimizer for p in full}
    longest = {p.optimizer: p for p in reversed(pools) if p.optimizer not in done}.values()
    ends = [(float(x[-1].mean()), p) for p in longest if (x := p.series("loss")) is not None]
    for epochs in sorted({p.epochs for _, p in ends}, reverse=True):
        same = sorted(((end, p) for end, p in ends if p.epochs == epochs), key=lambda each: each[0])
        rates: set[Any] = {p.config.get("lr") for _, p in same}
        equal = (
            f", all at the learning rate {max(rates):g}"
            if len(rates) == 1 and experiment == "pendulum"
            else ""
        )
        yield (
            f"{title}, {what} after {epochs} of the paper's {asked} "
            f"epochs{_seeds([p for _, p in same])}{equal}: "
            f"{', '.join(f'{name(OPTIMIZERS, p.optimizer)} {end:.3f}' for end, p in same)}."
        )
        adams = [end for end, p in same if p.optimizer in ("geometric-adam", "scalar-moment-adam")]
        others = [end for end, p in same if p.optimizer in ("momentum", "gradient")]
        if equal and len(adams) == 2 and others:
            ratio = sum(others) / len(others) / (sum(adams) / 2)
            yield f"Without a second moment the error is {ratio:.1f} times as large."
    if experiment == "pendulum" and {"geometric-adam", "scalar-moment-adam"} <= {p.optimizer for p in pools}:
        yield "On St(1, 2) the two Adams are one algorithm: what they differ by, at equal rates, is chance."
    for optimizer in dict.fromkeys(p.optimizer for p in pools) if experiment != "pendulum" else ():
        excluded = [why for p in pools if p.optimizer == optimizer for why in p.verdicts]
        if k := sum(why is not None for why in excluded):
            runs = f"{k} of {len(excluded)} runs of {name(OPTIMIZERS, optimizer)}"
            yield f"{runs} would not pass the authors' gate."


def _seeds(pools: Sequence[Pool]) -> str:
    counts = {len(p.seeds) for p in pools}
    if len(counts) > 1:
        return f" (means of {min(counts)} to {max(counts)} runs)"
    n = counts.pop()
    return (
        " (one run each)"
        if n == 1 and len(pools) > 1
        else " (one run)"
        if n == 1
        else f" (means of {n} seeds)"
    )


# -- figures -------------------------------------------------------------------------------------------------


KEY = (
    "A dot is a run, filled if it has the paper's number of epochs; grey bars are the paper's mean and "
    "standard deviation ({} epochs, 10 seeds){}."
)


def key(pools: Sequence[Pool]) -> str:
    """What dots and bars mean."""
    if not pools:
        return ""
    experiment = pools[0].experiment
    return KEY.format(
        paper.EPOCHS.get(experiment), "" if experiment == "pendulum" else ", of the drift its range"
    )


def figures(pools: Sequence[Pool]) -> list[Figure]:
    """Three figures of the first experiment: every run a dot, the paper's mean and deviation a bar."""
    if not pools:
        return []
    experiment = pools[0].experiment
    same = plain([p for p in pools if p.experiment == experiment])
    measures = PENDULUM if experiment == "pendulum" else TRANSFORMER
    drawn = [_dots(experiment, measure, same) for measure in measures]
    return [each for each in drawn if each is not None]


def _dots(experiment: str, measure: Measure, pools: Sequence[Pool]) -> Figure | None:
    rows: dict[str, list[tuple[Pool, Array]]] = {p.optimizer: [] for p in pools}
    for p in pools:
        values = measure.of(p)
        if values is not None and np.isfinite(values).any():
            rows[p.optimizer].append((p, values))
    if not any(rows.values()):
        return None

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for y, (optimizer, found) in enumerate(rows.items()):
            colour = STYLES.get(optimizer, OTHER)[0]
            if mark := measure.reported(experiment, optimizer):
                mid, low, high = mark
                axes.plot([low, high], [y, y], color=GREY, alpha=0.55, linewidth=11, solid_capstyle="butt")
                axes.plot(mid, y, marker="|", markersize=11, markeredgewidth=2, color=INK)
            for p, values in found:
                inside = colour if p.epochs == paper.EPOCHS.get(experiment) else "none"
                style: dict[str, Any] = {
                    "linestyle": "",
                    "markerfacecolor": inside,
                    "markeredgewidth": 1.5,
                    "alpha": 0.85,
                }
                axes.plot(values, np.full(len(values), y), "o", color=colour, markersize=7, **style)
            place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            axes.annotate(name(OPTIMIZERS, optimizer), (0, y), (0, 10), **place, color=colour, weight="bold")
            axes.annotate(_lengths(found), (1, y), (0, 10), **place, ha="right", fontsize=10)
        axes.set(ylim=(len(rows) - 0.6, -0.65), yticks=[], xlabel=measure.words)
        axes.set_xscale("log" if measure.log else "linear")
        axes.spines["left"].set_visible(False)
        axes.margins(x=0.06)

    title = f"{name(EXPERIMENTS, experiment)}: {measure.words}"
    parts = [
        (o, ", ".join(f"{v:.3g}" for _, values in found for v in values))
        for o, found in rows.items()
        if found
    ]
    alt = f"{title}: {'; '.join(f'{name(OPTIMIZERS, o)} {numbers}' for o, numbers in parts)}."
    return figure(
        f"headline-{measure.key}", f"{title}.", alt, draw, height=0.75 + 0.52 * len(rows), width=4.1
    )


def _lengths(found: Sequence[tuple[Pool, Array]]) -> str:
    """1 run of 500, 2 of 25 epochs."""
    if not found:
        return "not on a manifold"
    counts: dict[int, int] = {}
    for p, values in found:
        counts[p.epochs] = counts.get(p.epochs, 0) + len(values)
    if len(counts) > 2:
        return f"{sum(counts.values())} runs of {min(counts)} to {max(counts)} epochs"
    runs = "run" if next(iter(counts.values())) == 1 else "runs"
    *first, last = [f"{n} of {epochs}" for epochs, n in counts.items()]
    last += " epoch" if list(counts)[-1] == 1 else " epochs"
    return ", ".join([*first, last]).replace(" of", f" {runs} of", 1)


def in_letters(pools: Sequence[Pool], width: int) -> list[str]:
    """The first figure for a terminal: a line for each optimizer."""
    if not pools:
        return []
    experiment = pools[0].experiment
    measure = (PENDULUM if experiment == "pendulum" else TRANSFORMER)[0]
    rows: dict[str, list[float]] = {}
    for p in plain([p for p in pools if p.experiment == experiment]):
        found = measure.of(p)
        rows.setdefault(p.optimizer, []).extend([] if found is None else found[np.isfinite(found)].tolist())
    bars = {o: mark for o in rows if (mark := measure.reported(experiment, o))}
    values = [x for row in rows.values() for x in row] + [x for mark in bars.values() for x in mark]
    if not values:
        return []
    low, high = min(values), max(values)
    room = max(20, min(width - 24, 72))

    def column(x: float) -> int:
        return round((x - low) / ((high - low) or 1) * (room - 1))

    lines = []
    for optimizer, row in rows.items():
        cells = [" "] * room
        if optimizer in bars:
            _, left, right = bars[optimizer]
            cells[column(left) : column(right) + 1] = "░" * (column(right) + 1 - column(left))
        for x in row:
            cells[column(x)] = "●"
        lines.append(f"{name(OPTIMIZERS, optimizer):22}{''.join(cells)}".rstrip())
    lines.append(f"{'':22}{low:<{room - 5}.2f}{high:5.2f}")
    lines.append(f"{measure.words}: ● a run   ░ the paper after {paper.EPOCHS.get(experiment)} epochs")
    return lines
