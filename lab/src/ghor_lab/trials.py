"""Runs of the language model that can be compared, what they say about each method, and their table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .language import METHODS
from .pools import Array, usuals
from .quantities import Quantity, mean
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
        self.run, self.config, self.method = run, config, METHODS[config["optimizer"]]
        self.name, self.title = str(config["optimizer"]), self.method.title
        self.rate, self.warmup, self.seed = (
            float(config["lr"]),
            int(config["warmup"]),
            int(config["seeds"][0]),
        )
        self.decay = float(config["weight_decay"]) if self.method.decays else 0.0
        every, losses = int(config["every"]), [line["held_out"][0] for line in run.epochs]
        # steps, and the held-out loss there; not a number if it was not finite
        self.curve = [(every * i, math.nan if x is None else float(x)) for i, x in enumerate(losses, 1)]
        self.steps, end = self.curve[-1]
        self.final = end if math.isfinite(end) else math.inf
        times = [line["step_cpu_ms"] for line in run.epochs if "step_cpu_ms" in line]
        self.ms = min(times, default=None)  # CPU time of a step, the least that was seen
        drifts = [x for line in run.epochs for x in line["drift"] or () if x is not None]
        self.off = max(drifts, default=None)  # the largest distance from what the method keeps


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

    @property
    def methods(self) -> list[str]:
        """Those that have a run of full length, in the order of the table."""
        there = {trial.name for trial in self.those(steps=self.steps)}
        return [name for name in METHODS if name in there]

    def those(self, **wanted: Any) -> list[Trial]:
        """Trials with these properties."""
        return [t for t in self.trials if all(getattr(t, k) == v for k, v in wanted.items())]

    def first(self, method: str) -> list[Trial]:
        """Those among which the best is chosen: of the first seed, with the warm-up that was tried most."""
        same = self.those(steps=self.steps, name=method)
        warmups = [t.warmup for t in same if t.warmup] or [0]
        same = [t for t in same if t.warmup == max(warmups, key=lambda x: (warmups.count(x), x))]
        return [t for t in same if t.seed == min(t.seed for t in same)]

    def best(self, method: str) -> Trial:
        """The one that ends lowest: its rate and decay are the best."""
        return min(self.first(method), key=lambda t: (t.final, t.rate))

    def like_best(self, method: str, **other: Any) -> list[Trial]:
        """Trials at the best rate and decay, with these properties besides."""
        best = self.best(method)
        return self.those(name=method, rate=best.rate, decay=best.decay, **other)

    def repeated(self, method: str) -> list[Trial]:
        """The best run with all its seeds."""
        same = self.like_best(method, steps=self.steps, warmup=self.best(method).warmup)
        return sorted(same, key=lambda t: t.seed)

    def mean(self, method: str) -> float:
        """The held-out loss at the best rate, the mean over seeds."""
        return float(np.mean([t.final for t in self.repeated(method)]))

    def around(self, method: str) -> list[Trial]:
        """The five rates around the best that there are, with the decay that was tried at most rates."""
        first = self.first(method)
        decays = [t.decay for t in first]
        same = [t for t in first if t.decay == max(decays, key=decays.count)]
        middle = min(same, key=lambda t: (t.final, t.rate)).rate
        near = [t for t in same if any(math.isclose(t.rate, middle * x) for x in AROUND)]
        return sorted(near, key=lambda t: t.rate)

    def cold(self, method: str) -> Trial | None:
        """The best run without its warm-up."""
        best = self.best(method)
        same = self.like_best(method, steps=self.steps, seed=best.seed, warmup=0)
        return same[0] if same and best.warmup else None

    def equal_time(self, method: str) -> Trial | None:
        """The run that is as long as AdamW's in CPU time, not in steps."""
        best, adamw = self.best(method), self.best("adamw") if "adamw" in self.methods else None
        if adamw is None or adamw.ms is None or best.ms is None:
            return None
        steps = round(self.steps * min(1.0, adamw.ms / best.ms))
        if steps > 0.98 * self.steps:
            return best
        shorter = [t for t in self.like_best(method, seed=best.seed) if t.steps < self.steps]
        return min(shorter, key=lambda t: abs(t.steps - steps), default=None)

    def course(self, method: str) -> tuple[Array, Array]:
        """Steps, and the mean held-out loss of the best runs there."""
        curves = np.array([t.curve for t in self.repeated(method)])
        return curves[0, :, 0], curves[..., 1].mean(0)

    def reached(self, method: str, loss: float) -> float | None:
        """The step at which the mean curve of the best runs reaches a loss, linear between two looks."""
        steps, losses = self.course(method)
        for i, (step, value) in enumerate(zip(steps, losses, strict=True)):
            if value <= loss:
                part = (losses[i - 1] - loss) / (losses[i - 1] - value) if i else 1.0
                return float(steps[i - 1] + part * (step - steps[i - 1])) if i else float(step)
        return None


def books(runs: Sequence[Run]) -> list[Book]:
    """Finished runs of the language model, in groups that can be compared; the largest first.

    Methods without a space are in the groups of every retraction and section.
    """
    groups: dict[str, dict[str | None, list[Trial]]] = {}
    for run in runs:
        if run.header["config"]["experiment"] == "text" and run.finished:
            trial = Trial(run)
            same = json.dumps([run.header["data"]["digest"], [trial.config.get(key) for key in SAME]])
            more = json.dumps([trial.config[key] for key in OF_SPACES]) if trial.method.space else None
            groups.setdefault(same, {}).setdefault(more, []).append(trial)
    found = []
    for group in groups.values():
        free = group.pop(None, [])
        found += [[*free, *trials] for trials in group.values()] or [free]
    made = [Book(sorted(trials, key=lambda t: str(t.run.header["name"]))) for trials in found]
    return sorted(made, key=lambda book: -len(book.trials))


# -- the table -----------------------------------------------------------------------------------------------

Row = tuple[Book, str]  # a method of a book


def one(value: Callable[[Book, str], float | None]) -> Callable[[Row], Array | None]:
    """A number of a method as the only one of its row."""
    return lambda row: None if (x := value(*row)) is None else np.array([x], dtype=np.float64)


def target(book: Book) -> float | None:
    """What AdamW ends with."""
    return book.mean("adamw") if "adamw" in book.methods else None


def ends(book: Book, method: str) -> float | None:
    """How much the loss grows, at worst, over the rates around the best."""
    finals = [t.final for t in book.around(method)]
    return max(finals) - min(finals) if len(finals) > 1 else None


QUANTITIES = (
    Quantity("rate", "best rate", ".3g", one(lambda b, m: b.best(m).rate)),
    Quantity("decay", "decay", "g", one(lambda b, m: b.best(m).decay if METHODS[m].decays else None)),
    Quantity("held_out", "held-out loss", ".3f", one(lambda b, m: b.mean(m))),
    Quantity("sd", "s.d.", ".3f", one(lambda b, m: mean(np.array([t.final for t in b.repeated(m)]))[1])),
    Quantity("seeds", "seeds", ".0f", one(lambda b, m: len(b.repeated(m)))),
    Quantity(
        "equal_time", "at equal time", ".3f", one(lambda b, m: t.final if (t := b.equal_time(m)) else None)
    ),
    Quantity(
        "steps_then", "steps then", ".0f", one(lambda b, m: t.steps if (t := b.equal_time(m)) else None)
    ),
    Quantity(
        "to_adamw",
        "steps to AdamW's loss",
        ".0f",
        one(lambda b, m: None if (x := target(b)) is None else b.reached(m, x)),
    ),
    Quantity("over_rates", "over rates", "+.2f", one(ends)),
    Quantity("rates", "rates", ".0f", one(lambda b, m: len(b.around(m)))),
    Quantity("cold", "without warm-up", ".3f", one(lambda b, m: t.final if (t := b.cold(m)) else None)),
    Quantity("cpu_ms", "CPU ms a step", ".0f", one(lambda b, m: b.best(m).ms)),
    Quantity(
        "off",
        "off",
        ".1e",
        one(lambda b, m: max((t.off for t in b.repeated(m) if t.off is not None), default=None)),
    ),
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
    rows = [[METHODS[m].title, *(q.show(q.of((book, m))) for q in QUANTITIES)] for m in book.methods]
    return Table(caption, ["method", *(q.words for q in QUANTITIES)], rows)


def lines(found: Sequence[Book]) -> Iterator[Sequence[Any]]:
    """The same for the table of quantities, with all digits."""
    for book in found:
        for m in book.methods:
            for q in QUANTITIES:
                if (values := q.of((book, m))) is not None:
                    head = ("text", METHODS[m].title, book.steps, book.steps, len(book.repeated(m)), q.key)
                    yield (*head, *mean(values), values.min(), values.max(), None, None, None)
