"""The sweep: which runs of the language model to do next, given those that are done.

What is asked first is what helps most if the sweep is stopped: one rate for every method, then the rates
beside the best, weight decay, the other seeds, no warm-up, rates further away, and equal time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ghor_lab.config import Config
from ghor_lab.record import Run
from ghor_lab.text.methods import METHODS
from ghor_lab.text.trials import Book, books, settings

DECAYS = (0.0, 0.1, 1.0)
SEEDS = (0, 1, 2)
FURTHEST = 16.1  # times the rate at which the sweep of a method begins, or 1/16

Wanted = Iterator[Config]


def stages(first: Sequence[Config], book: Book | None) -> Iterator[tuple[str, list[Config]]]:
    """The runs of each stage in words and as configurations, done or not. `first` has a run of each method.

    Later stages follow from the trials of earlier ones.
    """
    yield "one rate for every method", list(first)
    if book is None:
        return
    trained = [config for config in first if config.optimizer in book.methods]

    def each(want: Callable[[Config, Book], Wanted]) -> list[Config]:
        return [config for base in trained for config in want(base, book)]

    yield "rates half and twice the best", each(lambda base, book: beside(base, book, (0.5, 2.0)))
    yield "weight decay at the best rate", each(decays)
    yield "other seeds at the best rate", each(seeds)
    yield "no warm-up", each(lambda base, book: iter([replace(best(base, book), warmup=0)]))
    yield "rates a quarter and four times the best", each(lambda base, book: beside(base, book, (0.25, 4.0)))
    yield "equal time", each(equal_time)


def best(base: Config, book: Book) -> Config:
    """The configuration of the method's best run."""
    found = book.best(base.optimizer)
    decay = found.decay if METHODS[base.optimizer].decays else base.weight_decay
    return replace(base, lr=found.rate, weight_decay=decay)


def beside(base: Config, book: Book, factors: tuple[float, ...]) -> Wanted:
    """Rates around the best, with the decay at which the method began."""
    middle = min(book.over_rates(base.optimizer), key=lambda t: (t.final, t.rate)).rate
    for factor in factors:
        rate = float(f"{middle * factor:.6g}")
        if 1 / FURTHEST < rate / base.lr < FURTHEST:
            yield replace(base, lr=rate)


def decays(base: Config, book: Book) -> Wanted:
    """Weights that decay less and more, at the best rate."""
    if METHODS[base.optimizer].decays:
        for decay in DECAYS:
            yield replace(best(base, book), weight_decay=decay)


def seeds(base: Config, book: Book) -> Wanted:
    """The best configuration with other seeds."""
    for seed in SEEDS[1:]:
        yield replace(best(base, book), seeds=(seed,))


def equal_time(base: Config, book: Book) -> Wanted:
    """The best configuration with as many steps as fit into the time of AdamW's."""
    if book.equal_time(base.optimizer) is None and (steps := book.equal_steps(base.optimizer)):
        every = max(1, math.floor(steps / base.epochs + 0.5))
        warmup = min(round(base.warmup * every / base.every), base.epochs * every - 1)
        yield replace(best(base, book), every=every, warmup=warmup)


def todo(first: Sequence[Config], runs: Sequence[Run]) -> tuple[str, list[Config]]:
    """The first stage that is not complete, and the runs that it lacks; nothing if all is done."""
    done = {run.header["name"] for run in runs if run.finished}
    names = {config.name for config in first}

    def shared(book: Book) -> int:
        return len(names & {trial.run.header["name"] for trial in book.trials})

    book = max(filter(shared, books(runs)), key=shared, default=None)
    for words, wanted in stages(first, book):
        missing = {config.name: config for config in wanted if config.name not in done}
        if missing:
            return words, list(missing.values())
    return "", []


def counted_in(first: Sequence[Config], runs: Sequence[Run]) -> list[Run]:
    """The runs that a sweep of these methods takes into account, finished or not, of the seeds it chooses."""
    asked = {config.optimizer: config for config in first}

    def belongs(config: dict[str, Any]) -> bool:
        base = asked.get(config["optimizer"])
        return (
            base is not None
            and config["experiment"] == "text"
            and settings(config) == settings(base.to_dict())
            and config["every"] <= base.every
            and config["seeds"][0] in SEEDS
        )

    return [run for run in runs if belongs(run.header["config"])]
