"""The table of quantities: what is measured of a run, how it is written, and what the paper reports of it.

Tables, figures, the first screen of a report and the numbers in the documentation are made from it.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import paper
from .config import IMAGES
from .pools import NAMES, Array, Pool
from .protocol import JUDGED
from .tables import EMPTY, Table, between, number, spread

FEW = 4  # up to so many seeds are usually shown one by one
Of = Callable[[Any], Any]


@dataclass(frozen=True)
class Quantity:
    """A column: `value` has a number for every seed, or one for all; `spec` is how they are written.

    The paper's number is found by the key: mean and standard deviation, or with `ends` the smallest and the
    largest. `keys` lead to it in the lines of a record, if it can be drawn by epoch.
    """

    key: str
    words: str
    spec: str
    value: Of
    keys: tuple[str, ...] = ()
    drawn: str = ""  # its name on an axis, if that is another
    ends: bool = False
    log: bool = False
    few: int = FEW

    def of(self, row: Any) -> Array | None:
        """Its numbers; None if they were not recorded."""
        value = self.value(row)
        return None if value is None else np.atleast_1d(np.asarray(value, dtype=np.float64))

    def show(self, values: Array | None) -> str:
        """The numbers of seeds: one by one if they are few, otherwise mean and deviation, or the ends."""
        if values is None or not len(values):
            return EMPTY
        if self.ends:
            return between(float(values.min()), float(values.max()), self.spec)
        if len(values) <= self.few:
            return ", ".join(number(float(value), self.spec) for value in values)
        return spread(*mean(values), self.spec)

    def paper(self, experiment: str, optimizer: str) -> str:
        """The paper's, in its digits."""
        if (pair := paper.reported(experiment, optimizer, self.key)) is None:
            return EMPTY
        return between(*pair, self.spec) if self.ends else spread(pair[0], pair[1] or None, self.spec)

    def off(self, p: Any) -> float | None:
        """Distance from the paper's mean in its standard deviations; only for its number of epochs."""
        pair, values = paper.reported(p.experiment, p.optimizer, self.key), self.of(p)
        if (
            pair is None
            or values is None
            or self.ends
            or not pair[1]
            or p.epochs != paper.EPOCHS[p.experiment]
        ):
            return None
        distance = float((values.mean() - pair[0]) / pair[1])
        return distance if np.isfinite(distance) else None

    @property
    def deviation(self) -> str:
        """What the paper's pair of numbers is."""
        return "smallest and largest" if self.ends else "mean and standard deviation"

    def bar(self, experiment: str, optimizer: str) -> tuple[float, float, float] | None:
        """The paper's middle, lower and upper end, to be drawn."""
        if (pair := paper.reported(experiment, optimizer, self.key)) is None:
            return None
        a, b = pair
        return ((a * b) ** 0.5, a, b) if self.ends else (a, a - b, a + b)


def mean(values: Array) -> tuple[float, float | None]:
    """Mean and sample standard deviation; the latter is None for a single value."""
    if not np.isfinite(values).all():
        return float("nan"), None
    return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else None


# -- of the paper's experiments ------------------------------------------------------------------------------


def lowest(p: Pool) -> Any:
    """The smallest finite loss of each seed over the epochs."""
    if (losses := p.series("loss")) is None:
        return None
    smallest = np.where(np.isfinite(losses), losses, np.inf).min(0)
    return np.where(np.isfinite(smallest), smallest, np.nan)


def last(*keys: str) -> Of:
    """A series at its end."""
    return lambda p: None if (x := p.series(*keys)) is None else x[-1]


def worst(*keys: str) -> Of:
    """The largest value of each seed over the epochs."""
    return lambda p: None if (x := p.series(*keys)) is None else x.max(0)


def timed(*parts: str) -> Of:
    """The median over epochs of a part of a step, in ms; records of before split the optimizer's in two."""

    def of(p: Pool) -> Any:
        found = [values for part in parts if len(values := p.numbers("ms", part))]
        same = found and all(len(values) == len(found[0]) for values in found)
        return np.median(np.sum(found, 0)) if same else None

    return of


AD, STEP, OTHER = timed("ad"), timed("step", "direction", "retraction"), timed("other")


def share(p: Pool) -> Any:
    """The part of the optimizer in AD + optimizer, in percent."""
    ad, step = AD(p), STEP(p)
    return None if ad is None or step is None else 100 * step / (ad + step)


def minutes(p: Pool) -> Any:
    """Minutes for a seed and the paper's epochs: the share of a run that trains several at once."""
    seconds = p.numbers("seconds")
    scale = paper.EPOCHS.get(p.experiment, p.epochs) / p.epochs / len(p.seeds) / 60
    return np.full(len(p.seeds), seconds.sum() * scale) if len(seconds) else None


def state(key: str) -> Of:
    """An entry of the header's count of the optimizer's state."""
    return lambda p: p.runs[0].header.get("state", {}).get(key)


def over_epochs(key: str, scale: float = 1.0, of: Any = np.median) -> Of:
    """A number that is recorded once an epoch, over all of them."""
    return lambda p: of(x) * scale if len(x := p.numbers(key)) else None


LOSS = Quantity("loss", "final loss", ".3f", last("loss"), ("loss",), "training loss")
NAME = "relative reconstruction error"
ERROR = Quantity("error", "final error", ".3f", last("loss"), ("loss",), NAME, log=True)
BEST = Quantity("best", "best loss", ".3f", lowest)
ACCURACY = Quantity("accuracy", "test accuracy (%)", ".2f", last("test_accuracy"), ("test_accuracy",))
DRIFT = Quantity("drift", "drift ‖YᵀY - I‖", ".1e", last("drift"), ("drift",), ends=True, log=True)
ENCODER = Quantity("encoder", "encoder ‖M J Mᵀ - J‖", ".1e", worst("symplecticity", "encoder"), ends=True)
DECODER = Quantity("decoder", "decoder ‖Mᵀ J M - J‖", ".1e", worst("symplecticity", "decoder"), ends=True)
MINUTES = Quantity("minutes", "minutes a seed", ".2f", minutes, log=True)

OUTCOMES: defaultdict[str, tuple[Quantity, ...]] = defaultdict(
    lambda: (LOSS, BEST, DRIFT), dict.fromkeys(IMAGES, (LOSS, BEST, ACCURACY, DRIFT))
)
OUTCOMES["pendulum"] = (ERROR, BEST, DRIFT, ENCODER, DECODER, MINUTES)
COSTS = (
    Quantity("ad_ms", "AD (ms)", ".1f", AD),
    Quantity("step_ms", "optimizer (ms)", ".2f", STEP),
    Quantity("other_ms", "other (ms)", ".1f", OTHER),
    Quantity("share_percent", "geometric share (%)", ".1f", share),
    Quantity("seconds", "s / epoch", ".2f", over_epochs("seconds")),
    Quantity("peak_gib", "peak memory (GiB)", ".2f", over_epochs("peak_mib", 1 / 1024, np.max)),
    Quantity("state_per_weight", "state a weight", ",.0f", state("entries_per_manifold_weight")),
    Quantity("state_total", "state in total", ",.0f", state("total_entries")),
    Quantity("state_mib", "state (MiB)", ".2f", state("mib")),
)
# what a sentence or a figure at the top of a report is about
FIRST: defaultdict[str, tuple[Quantity, ...]] = defaultdict(
    lambda: (LOSS, DRIFT), dict.fromkeys(IMAGES, (LOSS, ACCURACY, DRIFT))
)
FIRST["pendulum"] = (ERROR, BEST)


def table(caption: str, pools: Sequence[Pool], quantities: Sequence[Quantity], gate: bool = False) -> Table:
    """A row for every pool, after the paper's of its optimizer; "off by" where the paper's length allows."""
    compared = [any(q.off(p) is not None for p in pools) for q in quantities]

    def row(head: list[str], cells: list[tuple[str, str]], end: str) -> list[str]:
        each = zip(cells, compared, strict=True)
        return [*head, *(x for (cell, off), both in each for x in ([cell, off] if both else [cell])), end]

    rows: list[list[str]] = []
    theirs, seen = set(), set()
    for p in pools:
        cells = [(q.paper(p.experiment, p.optimizer), EMPTY) for q in quantities]
        if p.optimizer not in seen and any(cell != EMPTY for cell, _ in cells):
            theirs.add(len(rows))
            head = [NAMES[p.optimizer], "paper", str(paper.EPOCHS[p.experiment]), str(paper.SEEDS)]
            rows.append(row(head, cells, EMPTY))
        seen.add(p.optimizer)
        length = f"{p.epochs}" + (f" of {p.asked}" if p.epochs < p.asked else "")
        cells = [(q.show(q.of(p)), number(q.off(p), "+z.1f")) for q in quantities]
        passed = f"{sum(why is None for why in p.verdicts)} of {len(p.seeds)}"
        judged = gate and p.epochs >= JUDGED
        rows.append(row([p.title(), "ghor", length, str(len(p.seeds))], cells, passed if judged else EMPTY))
    words = [(q.words, "off by (s.d.)") for q in quantities]
    headings = row(["configuration", "source", "epochs", "seeds"], words, "pass the authors' gate")
    return Table(caption, headings, rows, ("source",), frozenset(theirs)).filled()


def as_csv(rows: Iterable[tuple[Any, Sequence[Quantity]]]) -> str:
    """Every quantity of every row, a line each, with all digits, and what the paper reports."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = "experiment configuration epochs asked seeds quantity mean sd min max paper paper_sd off"
    writer.writerow(columns.split())
    for row, quantities in rows:
        head = row.experiment, row.title(), row.epochs, row.asked, len(row.seeds)
        for q in quantities:
            if (x := q.of(row)) is not None:
                pair = paper.reported(row.experiment, row.optimizer, q.key) or (None, None)
                writer.writerow((*head, q.key, *mean(x), x.min(), x.max(), *pair, q.off(row)))
    return out.getvalue()
