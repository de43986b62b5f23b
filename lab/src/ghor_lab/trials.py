"""Runs of the language model that can be compared, what they say about each method, and their table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from .language import METHODS
from .pools import Array, usuals
from .quantities import Quantity
from .record import Run
from .tables import Table

AROUND = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the best rate
# What runs that are compared have in common. Threads change rounding: with others a seed would count twice.
SAME = ("epochs", "batch_size", "betas", "eps", "network", "rest_lr", "dtype", "label", "device", "threads")
OF_SPACES = ("retraction", "section")  # and these, where weights are on a space


class Trial:
    """A finished run: what was chosen, and what came out."""

    def __init__(self, run: Run) -> None:
        config = {**usuals("text"), **run.header["config"]}
        self.run, self.config, self.name = run, config, str(config["optimizer"])
        self.rate, self.warmup, self.seed = float(config["lr"]), int(config["warmup"]), config["seeds"][0]
        self.decay = float(config["weight_decay"]) if METHODS[self.name].decays else 0.0
        every, losses = int(config["every"]), [line["held_out"][0] for line in run.epochs]
        # steps, and the held-out loss there; not a number if it was not finite
        self.curve = [(every * i, math.nan if x is None else float(x)) for i, x in enumerate(losses, 1)]
        self.steps, end = self.curve[-1]
        self.final = end if math.isfinite(end) else math.inf
        times = [line["step_cpu_ms"] for line in run.epochs if "step_cpu_ms" in line]
        self.ms = min(times, default=None)  # CPU time of a step, the least that was seen
        drifts = [x for line in run.epochs for x in line["drift"] or () if x is not None]
        self.off = max(drifts, default=None)  # the largest distance from what the method keeps


def lowest(trials: Sequence[Trial]) -> Trial:
    """The one that ends lowest."""
    return min(trials, key=lambda t: (t.final, t.rate))


@dataclass(frozen=True)
class Book:
    """Trials on one text, of one length, batch and network; shorter ones are those of equal time."""

    trials: Sequence[Trial]

    @property
    def facts(self) -> dict[str, Any]:
        """What the text is."""
        found: dict[str, Any] = self.trials[0].run.header["data"]
        return found

    @property
    def steps(self) -> int:
        """The length of the runs that are not of equal time."""
        return max(trial.steps for trial in self.trials)

    @cached_property
    def rows(self) -> dict[str, Row]:
        """A row for every method that has a run of full length, in the order of the table."""
        there = {trial.name for trial in self.trials if trial.steps == self.steps}
        return {name: Row(self, name) for name in METHODS if name in there}


@dataclass(frozen=True, eq=False)
class Row:
    """A method in a book; its rate and decay are those with which its best run ended."""

    book: Book
    optimizer: str
    experiment: ClassVar[str] = "text"

    def title(self) -> str:
        """The method's name in tables."""
        return METHODS[self.optimizer].title

    @property
    def epochs(self) -> int:
        """The steps, of which the table of quantities has a column."""
        return self.book.steps

    asked = epochs

    @property
    def seeds(self) -> list[int]:
        """Those of the best run."""
        return [t.seed for t in self.repeated]

    def those(self, **wanted: Any) -> list[Trial]:
        """The method's trials with these properties."""
        mine = (t for t in self.book.trials if t.name == self.optimizer)
        return [t for t in mine if all(getattr(t, k) == v for k, v in wanted.items())]

    @cached_property
    def first(self) -> list[Trial]:
        """Those among which the best is chosen: of the first seed, with the warm-up that was tried most."""
        same = self.those(steps=self.book.steps)
        warmups = [t.warmup for t in same if t.warmup] or [0]
        same = [t for t in same if t.warmup == max(warmups, key=lambda x: (warmups.count(x), x))]
        return [t for t in same if t.seed == min(t.seed for t in same)]

    @cached_property
    def best(self) -> Trial:
        """The one that ends lowest."""
        return lowest(self.first)

    def like_best(self, **other: Any) -> list[Trial]:
        """Trials at the best rate and decay, with these properties besides."""
        return self.those(rate=self.best.rate, decay=self.best.decay, **other)

    @cached_property
    def repeated(self) -> list[Trial]:
        """The best run with all its seeds."""
        same = self.like_best(steps=self.book.steps, warmup=self.best.warmup)
        return sorted(same, key=lambda t: t.seed)

    @property
    def mean(self) -> float:
        """The held-out loss at the best rate, the mean over seeds."""
        return float(np.mean([t.final for t in self.repeated]))

    @property
    def off(self) -> float | None:
        """The largest distance from what the method keeps, of all seeds."""
        return max((t.off for t in self.repeated if t.off is not None), default=None)

    @cached_property
    def around(self) -> list[Trial]:
        """The five rates around the best that there are, with the decay that was tried at most rates."""
        decays = [t.decay for t in self.first]
        same = [t for t in self.first if t.decay == max(decays, key=decays.count)]
        middle = lowest(same).rate
        near = [t for t in same if any(math.isclose(t.rate, middle * x) for x in AROUND)]
        return sorted(near, key=lambda t: t.rate)

    @property
    def over_rates(self) -> float | None:
        """How much the loss grows, at worst, over the rates around the best."""
        finals = [t.final for t in self.around]
        return max(finals) - min(finals) if len(finals) > 1 else None

    @property
    def equal_time(self) -> Trial | None:
        """The run that is as long as AdamW's in CPU time, not in steps."""
        adamw = self.book.rows.get("adamw")
        if adamw is None or adamw.best.ms is None or self.best.ms is None:
            return None
        steps = round(self.book.steps * min(1.0, adamw.best.ms / self.best.ms))
        if steps > 0.98 * self.book.steps:
            return self.best
        shorter = [t for t in self.like_best(seed=self.best.seed) if t.steps < self.book.steps]
        return min(shorter, key=lambda t: abs(t.steps - steps), default=None)

    @cached_property
    def course(self) -> tuple[Array, Array]:
        """Steps, and the mean held-out loss of the best runs there."""
        curves = np.array([t.curve for t in self.repeated])
        return curves[0, :, 0], curves[..., 1].mean(0)


def books(runs: Sequence[Run]) -> list[Book]:
    """Finished runs of the language model, in groups that can be compared; the largest first.

    Methods without a space are in the groups of every retraction and section.
    """
    groups: dict[str, dict[str | None, list[Trial]]] = {}
    for run in runs:
        if run.header["config"]["experiment"] == "text" and run.finished:
            trial = Trial(run)
            same = json.dumps([run.header["data"]["digest"], [trial.config.get(key) for key in SAME]])
            more = json.dumps([trial.config[key] for key in OF_SPACES]) if METHODS[trial.name].space else None
            groups.setdefault(same, {}).setdefault(more, []).append(trial)
    found = []
    for group in groups.values():
        free = group.pop(None, [])
        found += [[*free, *trials] for trials in group.values()] or [free]
    made = [Book(sorted(trials, key=lambda t: str(t.run.header["name"]))) for trials in found]
    return sorted(made, key=lambda book: -len(book.trials))


QUANTITIES = (
    Quantity("rate", "best rate", ".3g", lambda r: r.best.rate),
    Quantity("decay", "decay", "g", lambda r: r.best.decay if METHODS[r.optimizer].decays else None),
    Quantity("held_out", "held-out loss", ".3f", lambda r: [t.final for t in r.repeated], few=1),
    Quantity("equal_time", "at equal time", ".3f", lambda r: (t := r.equal_time) and t.final),
    Quantity("over_rates", "over rates", "+.2f", lambda r: r.over_rates),
    Quantity("rates", "rates", ".0f", lambda r: len(r.around)),
    Quantity("cpu_ms", "CPU ms a step", ".0f", lambda r: r.best.ms),
    Quantity("off", "off", ".1e", lambda r: r.off),
)


def table(book: Book) -> Table:
    """A row for each method."""
    config, (train, held_out) = book.trials[0].config, book.facts["bytes"]
    network = config["network"]
    caption = (
        f"Language model: {book.steps} steps, batch {config['batch_size']} x {network['context']}, "
        f"{network['layers']} layers of width {network['width']}, {train / 1e6:.1f} MB of text, "
        f"{held_out / 1e6:.1f} MB held out, digest {book.facts['digest']}"
    )
    rows = [[row.title(), *(q.show(q.of(row)) for q in QUANTITIES)] for row in book.rows.values()]
    return Table(caption, ["method", *(q.words for q in QUANTITIES)], rows)
