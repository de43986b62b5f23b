"""The table of quantities: what is measured of a run, how it is written, and what the paper reports of it.

Tables, figures, the first screen of a report and the numbers in the documentation are made from it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import paper
from .pools import NAMES, Array, Pool
from .protocol import JUDGED
from .tables import EMPTY, Table, between, number, spread

Pair = tuple[float, float]
FEW = 4  # up to so many seeds are shown one by one
IMAGES = ("mnist", "fashion-mnist")


@dataclass(frozen=True)
class Quantity:
    """A column: `of` has a number for every seed, or one for all; `spec` is how they are written.

    `reported` is the paper's, by experiment and optimizer: mean and standard deviation, or with `ends` the
    smallest and the largest. `keys` lead to it in the lines of a record, if it can be drawn by epoch.
    """

    key: str
    words: str
    spec: str
    of: Callable[[Any], Array | None]
    reported: Callable[[str, str], Pair | None] = lambda experiment, optimizer: None
    keys: tuple[str, ...] = ()
    drawn: str = ""  # its name on an axis, if that is another
    ends: bool = False
    log: bool = False

    def show(self, values: Array | None) -> str:
        """The numbers of seeds: one by one if they are few, otherwise mean and deviation, or the ends."""
        if values is None or not len(values):
            return EMPTY
        if self.ends:
            return between(float(values.min()), float(values.max()), self.spec)
        if len(values) <= FEW:
            return ", ".join(number(float(value), self.spec) for value in values)
        return spread(*mean(values), self.spec)

    def paper(self, experiment: str, optimizer: str) -> str:
        """The paper's, in its digits."""
        pair = self.reported(experiment, optimizer)
        if pair is None:
            return EMPTY
        return between(*pair, self.spec) if self.ends else spread(pair[0], pair[1] or None, self.spec)

    def off(self, p: Pool) -> float | None:
        """Distance from the paper's mean in its standard deviations; only for its number of epochs."""
        pair, values = self.reported(p.experiment, p.optimizer), self.of(p)
        if (
            pair is None
            or values is None
            or self.ends
            or p.epochs != paper.EPOCHS[p.experiment]
            or not pair[1]
        ):
            return None
        distance = float((values.mean() - pair[0]) / pair[1])
        return distance if np.isfinite(distance) else None

    def bar(self, experiment: str, optimizer: str) -> tuple[float, float, float] | None:
        """The paper's middle, lower and upper end, to be drawn."""
        pair = self.reported(experiment, optimizer)
        if pair is None:
            return None
        return (
            (*((pair[0] * pair[1]) ** 0.5,), *pair) if self.ends else (pair[0], pair[0] - pair[1], sum(pair))
        )


def mean(values: Array) -> tuple[float, float | None]:
    """Mean and sample standard deviation; the latter is None for a single value."""
    if not np.isfinite(values).all():
        return float("nan"), None
    return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else None


def lowest(p: Pool) -> Array | None:
    """The smallest finite loss of each seed over the epochs."""
    losses = p.series("loss")
    if losses is None:
        return None
    smallest = np.where(np.isfinite(losses), losses, np.inf).min(0)
    return np.where(np.isfinite(smallest), smallest, np.nan)


def last(*keys: str) -> Callable[[Pool], Array | None]:
    """A series at its end."""
    return lambda p: None if (x := p.series(*keys)) is None else x[-1]


def worst(*keys: str) -> Callable[[Pool], Array | None]:
    """The largest value of each seed over the epochs."""
    return lambda p: None if (x := p.series(*keys)) is None else x.max(0)


def outcome(key: str) -> Callable[[str, str], Pair | None]:
    """A number of the paper's tables of outcomes."""
    return lambda experiment, optimizer: getattr(paper.OUTCOMES.get(experiment, {}).get(optimizer), key, None)


def timed(*parts: str) -> Callable[[Pool], Array | None]:
    """The median over epochs of a part of a step, in ms; records of before split the optimizer's in two."""

    def of(p: Pool) -> Array | None:
        found = [p.numbers("ms", part) for part in parts]
        found = [values for values in found if len(values)]
        lengths = {len(values) for values in found}
        return np.array([np.median(np.sum(found, 0))]) if len(lengths) == 1 else None

    return of


AD, STEP, OTHER = timed("ad"), timed("step", "direction", "retraction"), timed("other")


def share(p: Pool) -> Array | None:
    """The part of the optimizer in AD + optimizer, in percent."""
    ad, step = AD(p), STEP(p)
    return None if ad is None or step is None else 100 * step / (ad + step)


def minutes(p: Pool) -> Array | None:
    """Minutes for a seed and the paper's epochs: the share of a run that trains several at once."""
    seconds = p.numbers("seconds")
    scale = paper.EPOCHS.get(p.experiment, p.epochs) / p.epochs / len(p.seeds) / 60
    return np.full(len(p.seeds), seconds.sum() * scale) if len(seconds) else None


def state(key: str) -> Callable[[Pool], Array | None]:
    """An entry of the header's count of the optimizer's state."""
    return lambda p: (
        None if (x := p.runs[0].header.get("state", {}).get(key)) is None else np.array([x], dtype=np.float64)
    )


def median(key: str, scale: float = 1.0, of: Any = np.median) -> Callable[[Pool], Array | None]:
    """The median over epochs of a number that is recorded once."""
    return lambda p: np.array([of(x) * scale]) if len(x := p.numbers(key)) else None


def cost(key: str) -> Callable[[str, str], Pair | None]:
    """A number of the paper's tables of time, cost or optimizer state, without a deviation."""

    def reported(experiment: str, optimizer: str) -> Pair | None:
        found: list[Any] = [
            table.get(experiment, {}).get(optimizer) for table in (paper.OUTCOMES, paper.COSTS)
        ]
        found += [paper.STATES.get(optimizer)] if experiment in IMAGES else []
        values = [getattr(row, key, None) for row in found]
        if (value := next((value for value in values if value is not None), None)) is None:
            return None
        return float(value[0] if isinstance(value, tuple) else value), 0.0

    return reported


LOSS = Quantity("loss", "final loss", ".3f", last("loss"), outcome("final"), ("loss",), "training loss")
ERROR = Quantity(
    "error",
    "final error",
    ".3f",
    last("loss"),
    outcome("final"),
    ("loss",),
    "relative reconstruction error",
    log=True,
)
BEST = Quantity("best", "best loss", ".3f", lowest, outcome("best"))
ACCURACY = Quantity(
    "accuracy",
    "test accuracy (%)",
    ".2f",
    last("test_accuracy"),
    outcome("accuracy"),
    keys=("test_accuracy",),
)
DRIFT = Quantity(
    "drift", "drift ‖YᵀY - I‖", ".1e", last("drift"), outcome("drift"), ("drift",), ends=True, log=True
)
ENCODER = Quantity("encoder", "encoder ‖M J Mᵀ - J‖", ".1e", worst("symplecticity", "encoder"), ends=True)
DECODER = Quantity("decoder", "decoder ‖Mᵀ J M - J‖", ".1e", worst("symplecticity", "decoder"), ends=True)
MINUTES = Quantity("minutes", "minutes a seed", ".2f", minutes, cost("minutes"), log=True)

OUTCOMES = {
    "pendulum": (ERROR, BEST, DRIFT, ENCODER, DECODER, MINUTES),
    **dict.fromkeys(IMAGES, (LOSS, BEST, ACCURACY, DRIFT)),
}
COSTS = (
    Quantity("ad_ms", "AD (ms)", ".1f", AD, cost("ad")),
    Quantity("step_ms", "optimizer (ms)", ".2f", STEP, cost("step")),
    Quantity("other_ms", "other (ms)", ".1f", OTHER, cost("other")),
    Quantity("share_percent", "geometric share (%)", ".1f", share, cost("share")),
    Quantity("seconds", "s / epoch", ".2f", median("seconds"), cost("seconds")),
    Quantity("peak_gib", "peak memory (GiB)", ".2f", median("peak_mib", 1 / 1024, np.max), cost("peak")),
    Quantity(
        "state_per_weight",
        "state a weight",
        ",.0f",
        state("entries_per_manifold_weight"),
        cost("per_weight"),
    ),
    Quantity("state_total", "state in total", ",.0f", state("total_entries"), cost("total")),
    Quantity("state_mib", "state (MiB)", ".2f", state("mib"), cost("mib")),
)
# what a sentence or a figure at the top of a report is about
FIRST = {"pendulum": (ERROR, BEST), **dict.fromkeys(IMAGES, (LOSS, ACCURACY, DRIFT))}


def table(caption: str, pools: Sequence[Pool], quantities: Sequence[Quantity], gate: bool = False) -> Table:
    """A row for every pool, after the paper's of its optimizer; "off by" where the paper's length allows."""
    compared = [q for q in quantities if any(q.off(p) is not None for p in pools)]
    headings = ["configuration", "source", "epochs", "seeds"]
    for q in quantities:
        headings += [q.words, *(["off by (s.d.)"] if q in compared else [])]
    rows: list[list[str]] = []
    theirs, seen = set(), set()
    for p in pools:
        if p.optimizer not in seen and any(q.reported(p.experiment, p.optimizer) for q in quantities):
            theirs.add(len(rows))
            cells = [NAMES[p.optimizer], "paper", str(paper.EPOCHS[p.experiment]), str(paper.SEEDS)]
            for q in quantities:
                cells += [q.paper(p.experiment, p.optimizer), *([EMPTY] if q in compared else [])]
            rows.append([*cells, EMPTY])
        seen.add(p.optimizer)
        length = f"{p.epochs}" + (f" of {p.asked}" if p.epochs < p.asked else "")
        cells = [p.title(), "ghor", length, str(len(p.seeds))]
        for q in quantities:
            cells += [q.show(q.of(p)), *([number(q.off(p), "+z.1f")] if q in compared else [])]
        accepted = sum(why is None for why in p.verdicts)
        rows.append([*cells, f"{accepted} of {len(p.seeds)}" if gate and p.epochs >= JUDGED else EMPTY])
    headings.append("pass the authors' gate")
    return Table(caption, headings, rows, ("source",), frozenset(theirs)).filled()


def as_csv(pools: Sequence[Pool], others: Iterator[Sequence[Any]]) -> str:
    """Every quantity of every pool, a line each, with all digits; `others` are lines of the same form."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = "experiment configuration epochs asked seeds quantity mean sd min max paper paper_sd off"
    writer.writerow(columns.split())
    for p in pools:
        for q in (*OUTCOMES[p.experiment], *COSTS):
            values = q.of(p)
            if values is not None:
                pair, distance = q.reported(p.experiment, p.optimizer) or (None, None), q.off(p)
                head = (p.experiment, p.title(), p.epochs, p.asked, len(p.seeds), q.key)
                writer.writerow((*head, *mean(values), values.min(), values.max(), *pair, distance))
    writer.writerows(others)
    return out.getvalue()
