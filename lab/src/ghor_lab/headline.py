"""The first screen of a report: the results in a few sentences, and three figures with the paper's bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas

from . import paper
from .config import NETWORKS, READINGS
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
from .pool import EXPERIMENTS, OPTIMIZERS, Array, Pool, best, name, off, place, spread
from .table import Column, Row, Table, short

USUAL = {"retraction": "cayley", "section": "auto", "norm": "canonical", "dtype": "float32"}
UNUSUAL = ("start", "frame", "loss", "warmup", "manifold_lr")
ADAM = {"betas": [0.9, 0.99], "eps": 1e-8, "momentum": 0.5}  # and the momentum of the method of this name
WHAT = {"pendulum": "reconstruction error"}
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
    reading. Of an optimizer with several rates, networks or other settings those nearest to the paper's.

    Every run of these is in one of them, at its full length.
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
    pools = [p for p in pools if rank(p) == first]
    chosen: dict[str, dict[str, Any]] = {}
    for p in sorted(pools, key=lambda p: len(_changed(p))):
        chosen.setdefault(p.optimizer, _settings(p))
    found: dict[tuple[str, ...], Pool] = {}
    for p in sorted(pools, key=lambda p: (-p.epochs, len(p.seeds))):
        if _settings(p) == chosen[p.optimizer]:
            runs = tuple(run for run in p.runs if not any(str(run.path) in key for key in found))
            if runs:
                found[tuple(str(run.path) for run in runs)] = Pool(p.config, runs, p.epochs, p.asked)
    return sorted(found.values(), key=lambda p: (place(OPTIMIZERS, p.optimizer), -p.epochs))


def _settings(p: Pool) -> dict[str, Any]:
    """What decides the numbers; threads and compiled layers change rounding only."""
    return {key: value for key, value in p.config.items() if key not in ("threads", "device", "compile")}


def _changed(p: Pool) -> list[str]:
    """The settings that are not those of the paper's runs."""
    pendulum = p.experiment == "pendulum"
    usual = {**USUAL, **ADAM, **NETWORKS.get(p.experiment, {}), "batch_size": 256 if pendulum else 2048}
    usual["lr"] = READINGS["as run"].get(p.optimizer) if pendulum else 1e-3
    return [key for key, value in usual.items() if p.config.get(key, value) != value]


# -- words ---------------------------------------------------------------------------------------------------


def verdict(pools: Sequence[Pool]) -> list[str]:
    """The results in words: first one claim, then what else is to be said; the numbers are in `summary`."""
    usual = _usual(pools)
    if not usual:
        return ["There is no whole epoch yet."]
    found = [d for e, same in usual.items() for _, _, d in _distances(e, same)]
    drifts = [float(x.max()) for p in pools if (x := p.series("drift")) is not None]
    drifts = drifts if np.isfinite(drifts).all() else []  # the tables say whose is not
    theirs = [o.drift[1] for e in usual for o in paper.OUTCOMES.get(e, {}).values() if o.drift]
    on = f"No weight was ever further than {short(f'{max(drifts):.1e}')} from its manifold" if drifts else ""
    on += f" (in the paper up to {short(f'{max(theirs):.1e}')})" if drifts and theirs else ""
    near = sum(abs(d) <= WITHIN for d in found)
    count = f"{'All' if near == len(found) else f'{near} of'} {len(found)} results"
    count, verb = (count, "are") if len(found) > 1 else ("The result", "is" if near else "is not")
    claim = f"{count} at the paper's number of epochs {verb} within {WITHIN} of its standard deviations."
    first = claim if found else _smallest(usual)
    notes = [" ".join(said) for e, same in usual.items() if (said := list(_notes(e, same)))]
    return [first, *([f"{on}."] if on else []), *notes]


def _usual(pools: Sequence[Pool]) -> dict[str, list[Pool]]:
    experiments = dict.fromkeys(p.experiment for p in pools)
    return {e: plain([p for p in pools if p.experiment == e]) for e in experiments}


def _ends(pools: Sequence[Pool]) -> list[tuple[float, Pool]]:
    """The last mean loss of each optimizer's longest runs, the smallest first."""
    longest = {p.optimizer: p for p in sorted(pools, key=lambda p: p.epochs)}.values()
    found = [(float(x[-1].mean()), p) for p in longest if (x := p.series("loss")) is not None]
    return sorted(found, key=lambda each: each[0])


def _smallest(usual: dict[str, list[Pool]]) -> str:
    """The claim of runs that are shorter than the paper's."""
    experiment, pools = next(iter(usual.items()))
    ends, what = _ends(pools), WHAT.get(experiment, "training loss")
    adams, ends = _ratio(experiment, ends), [each for each in ends if np.isfinite(each[0])]
    if not ends:
        return f"{name(EXPERIMENTS, experiment)}: no loss is finite yet."
    (end, first), epochs = ends[0], paper.EPOCHS.get(experiment)
    if adams:
        return f"Without a second moment the {what} is {adams:.1f} times as large."
    return (
        f"{name(OPTIMIZERS, first.optimizer)} has the smallest {what}, {end:.3f}, after {first.epochs} of "
        f"the paper's {epochs} epochs."
    )


def _ratio(experiment: str, ends: Sequence[tuple[float, Pool]]) -> float | None:
    """On the pendulum, at one learning rate: momentum and gradient over the two Adams."""
    adams = [end for end, p in ends if p.optimizer in ("geometric-adam", "scalar-moment-adam")]
    others = [end for end, p in ends if p.optimizer in ("momentum", "gradient")]
    same = len({(p.config.get("lr"), p.epochs) for _, p in ends}) == 1
    finite = np.isfinite([end for end, _ in ends]).all()
    if experiment != "pendulum" or not same or not finite or len(adams) < 2 or not others:
        return None
    return sum(others) / len(others) / (sum(adams) / 2)


def _notes(experiment: str, pools: Sequence[Pool]) -> Iterator[str]:
    ends = _ends(pools)
    if _ratio(experiment, ends):
        yield f"All ran at the learning rate {ends[0][1].config.get('lr'):g}."
    if experiment == "pendulum" and {"geometric-adam", "scalar-moment-adam"} <= {p.optimizer for p in pools}:
        yield "On St(1, 2) the two Adams are one algorithm: what they differ by, at equal rates, is chance."
    for optimizer in dict.fromkeys(p.optimizer for p in pools) if experiment != "pendulum" else ():
        excluded = [why for p in pools if p.optimizer == optimizer for why in p.verdicts]
        if k := sum(why is not None for why in excluded):
            runs = f"{k} of {len(excluded)} runs of {name(OPTIMIZERS, optimizer)}"
            yield f"{name(EXPERIMENTS, experiment)}: {runs} would not pass the authors' gate."


def summary(pools: Sequence[Pool]) -> Table | None:
    """A row for each optimizer of each experiment, its longest runs beside the paper's numbers."""
    rows = []
    for experiment, same in _usual(pools).items():
        distances = {(p.optimizer, key): d for p, key, d in _distances(experiment, same)}
        for p in sorted((p for _, p in _ends(same)), key=lambda p: place(OPTIMIZERS, p.optimizer)):
            theirs = paper.OUTCOMES.get(experiment, {}).get(p.optimizer)
            cells: list[Any] = [name(EXPERIMENTS, experiment), name(OPTIMIZERS, p.optimizer)]
            cells += [(p.epochs, paper.EPOCHS.get(experiment)), len(p.seeds)]
            for key, pair in (
                ("loss", theirs and theirs.final),
                ("test_accuracy", theirs and theirs.accuracy),
            ):
                values = p.series(key)
                cells += (
                    [None, None, None]
                    if values is None
                    else [spread(values[-1]), pair, distances.get((p.optimizer, key))]
                )
            rows.append(Row(tuple(cells)))
    columns = (
        *(
            Column("experiment", "experiment"),
            Column("optimizer", "optimizer"),
            Column("epochs", "epochs", "epochs"),
        ),
        Column("runs", "runs", "number", "d"),
        Column("loss", "loss or error", "spread", ".3f"),
        Column("paper_loss", "paper", "spread", ".3f"),
        Column("loss_off", "off by", "number", "+z.1f"),
        Column("accuracy", "test accuracy (%)", "spread", ".1f"),
        Column("paper_accuracy", "paper", "spread", ".1f"),
        Column("accuracy_off", "off by", "number", "+z.1f"),
    )
    caption = "The longest runs beside the paper; off by: in its standard deviations, at its number of epochs"
    return Table("headline", caption, columns, rows) if rows else None


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
            title = name(OPTIMIZERS, optimizer)
            axes.annotate(title, (0, y), (0, 10), **place, color=colour, weight="bold", fontsize=11)
            axes.annotate(_lengths(found), (1, y), (0, 10), **place, ha="right", fontsize=9)
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
    """1 x 500, 2 x 25 epochs: short, because the optimizer's name stands in the same line."""
    if not found:
        return "not on a manifold"
    counts: dict[int, int] = {}
    for p, values in found:
        counts[p.epochs] = counts.get(p.epochs, 0) + len(values)
    if len(counts) > 2:
        return f"{sum(counts.values())} x {min(counts)} to {max(counts)} epochs"
    parts = ", ".join(f"{n} x {epochs}" for epochs, n in counts.items())
    return f"{parts} {'epoch' if list(counts)[-1] == 1 else 'epochs'}"


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
