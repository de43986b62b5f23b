"""Runs of the language model that can be compared, and what they say about each method."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ghor_lab.record import Run
from ghor_lab.text.methods import METHODS

AROUND = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the best rate
# What runs that are compared have in common. Threads change rounding: with others a seed would count twice.
SAME = (
    *("epochs", "batch_size", "betas", "eps", "network", "rest_lr", "dtype"),
    *("label", "device", "threads"),
)
OF_SPACES = ("retraction", "section")  # and these, where weights are on a space


@dataclass(frozen=True)
class Trial:
    """A finished run."""

    run: Run

    @property
    def config(self) -> dict[str, Any]:
        """As recorded."""
        found: dict[str, Any] = self.run.header["config"]
        return found

    @property
    def method(self) -> str:
        """Its name in the records."""
        return str(self.config["optimizer"])

    @property
    def title(self) -> str:
        """Its name for people."""
        return METHODS[self.method].title

    @property
    def rate(self) -> float:
        """The learning rate of the matrices."""
        return float(self.config["lr"])

    @property
    def decay(self) -> float:
        """Weight decay of the matrices; 0 for methods that have none."""
        return float(self.config.get("weight_decay", 0.1)) if METHODS[self.method].decays else 0.0

    @property
    def warmup(self) -> int:
        """The steps in which the learning rate grows."""
        return int(self.config.get("warmup", 0))

    @property
    def seed(self) -> int:
        """A run has one."""
        return int(self.config["seeds"][0])

    @property
    def steps(self) -> int:
        """How many it was trained."""
        return int(self.config["every"]) * len(self.run.epochs)

    @cached_property
    def curve(self) -> list[tuple[int, float]]:
        """Steps, and the held-out loss there; not a number if it was not finite."""
        losses = [line["held_out"][0] for line in self.run.epochs]
        every = int(self.config["every"])
        return [(every * i, math.nan if x is None else float(x)) for i, x in enumerate(losses, 1)]

    @property
    def final(self) -> float:
        """The held-out loss at the end; infinite if it was not finite."""
        last = self.curve[-1][1]
        return last if math.isfinite(last) else math.inf

    @property
    def ms(self) -> float | None:
        """CPU time of a step in milliseconds, the least that was seen; None if it was not recorded."""
        found = [line["step_cpu_ms"] for line in self.run.epochs if "step_cpu_ms" in line]
        return min(found) if found else None

    @property
    def off(self) -> float | None:
        """The largest distance from the space, over the whole run; None for unconstrained weights."""
        found = [x for line in self.run.epochs for x in line["drift"] or () if x is not None]
        return max(found) if found else None


@dataclass(frozen=True)
class Book:
    """Trials on one text, of one length, batch and network; shorter ones are those of equal time."""

    trials: Sequence[Trial]

    @property
    def facts(self) -> dict[str, Any]:
        """What the text is."""
        found: dict[str, Any] = self.trials[0].run.header["data"]
        return found

    @cached_property
    def steps(self) -> int:
        """The length of the runs that are not of equal time."""
        return max(trial.steps for trial in self.trials)

    @property
    def methods(self) -> list[str]:
        """Those that have a run of full length, in the order of the table."""
        there = {trial.method for trial in self.full()}
        return [name for name in METHODS if name in there]

    def full(self, **wanted: Any) -> list[Trial]:
        """Runs of full length with these properties."""
        return self.those(steps=self.steps, **wanted)

    def those(self, **wanted: Any) -> list[Trial]:
        """Runs with these properties."""
        return [t for t in self.trials if all(getattr(t, k) == v for k, v in wanted.items())]

    def first(self, method: str) -> list[Trial]:
        """The runs among which the best is chosen: of the first seed, with a warm-up if any have one.

        Of several warm-ups, with the one that was tried most.
        """
        same = self.full(method=method)
        warmups = [t.warmup for t in same if t.warmup] or [0]
        same = [t for t in same if t.warmup == max(warmups, key=lambda x: (warmups.count(x), x))]
        return [t for t in same if t.seed == min(t.seed for t in same)]

    def best(self, method: str) -> Trial:
        """The one that ends lowest: its rate and decay are the best."""
        return min(self.first(method), key=lambda t: (t.final, t.rate))

    def repeated(self, method: str) -> list[Trial]:
        """The best run with all its seeds."""
        best = self.best(method)
        same = self.full(method=method, rate=best.rate, decay=best.decay, warmup=best.warmup)
        return sorted(same, key=lambda t: t.seed)

    def mean(self, method: str) -> float:
        """The held-out loss at the best rate, the mean over seeds."""
        return float(np.mean([t.final for t in self.repeated(method)]))

    def over_rates(self, method: str) -> list[Trial]:
        """The first seed at every rate, with the decay that was tried at most rates."""
        first = self.first(method)
        decays = [t.decay for t in first]
        return sorted((t for t in first if t.decay == max(decays, key=decays.count)), key=lambda t: t.rate)

    def around(self, method: str) -> list[Trial]:
        """The five rates around the best that there are."""
        trials = self.over_rates(method)
        middle = min(trials, key=lambda t: (t.final, t.rate)).rate
        return [t for t in trials if any(math.isclose(t.rate, middle * x) for x in AROUND)]

    def cold(self, method: str) -> Trial | None:
        """The best run without its warm-up."""
        best = self.best(method)
        same = self.full(method=method, rate=best.rate, decay=best.decay, seed=best.seed)
        return next((t for t in same if not t.warmup and best.warmup), None)

    def equal_steps(self, method: str) -> int | None:
        """How many steps the method has in the time of AdamW's run, by the CPU time of a step."""
        times = [self.best(name).ms for name in ("adamw", method) if name in self.methods]
        if len(times) < 2 or times[0] is None or times[1] is None:
            return None
        return round(self.steps * min(1.0, times[0] / times[1]))

    def equal_time(self, method: str) -> Trial | None:
        """The run that is as long as AdamW's in time, not in steps."""
        best, steps = self.best(method), self.equal_steps(method)
        if steps is None or steps > 0.98 * self.steps:
            return None if steps is None else best
        same = self.those(method=method, rate=best.rate, decay=best.decay, seed=best.seed)
        shorter = [t for t in same if t.steps < self.steps]
        return min(shorter, key=lambda t: abs(t.steps - steps), default=None)

    def reached(self, method: str, loss: float) -> float | None:
        """The step at which the mean curve of the best runs reaches a loss, linear between two looks."""
        curves = np.array([[x for _, x in t.curve] for t in self.repeated(method)]).mean(0)
        steps = [step for step, _ in self.best(method).curve]
        for i, (step, value) in enumerate(zip(steps, curves, strict=True)):
            if value <= loss:
                if i == 0:
                    return float(step)
                part = (curves[i - 1] - loss) / (curves[i - 1] - value)
                return float(steps[i - 1] + part * (step - steps[i - 1]))
        return None


def settings(config: dict[str, Any]) -> tuple[str, str | None]:
    """What runs that are compared have in common, and those with weights on a space besides."""
    same, more = ([config.get(key) for key in keys] for keys in (SAME, OF_SPACES))
    return json.dumps(same, sort_keys=True), json.dumps(more) if METHODS[config["optimizer"]].space else None


def books(runs: Sequence[Run]) -> list[Book]:
    """Finished runs of the language model, in groups that can be compared; the largest first.

    Methods without a space are in the groups of every retraction and section.
    """
    groups: dict[tuple[str, str], dict[str | None, list[Trial]]] = {}
    for run in runs:
        config = run.header["config"]
        if config["experiment"] == "text" and run.finished:
            same, more = settings(config)
            group = groups.setdefault((run.header["data"]["digest"], same), {})
            group.setdefault(more, []).append(Trial(run))
    found = []
    for group in groups.values():
        free = group.pop(None, [])
        found += [[*free, *trials] for trials in group.values()] or [free]
    return sorted(
        (Book(sorted(trials, key=lambda t: t.run.header["name"])) for trials in found),
        key=lambda book: -len(book.trials),
    )
