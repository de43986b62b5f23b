"""From the options of the command line to configurations: one for each combination of their values."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from .config import PAPER, READINGS, TEXT, Config, usual
from .language import METHODS


def plan(
    experiment: str,
    given: dict[str, list[Any]],
    readings: Sequence[str] = (),
    network: dict[str, Any] | None = None,
) -> list[Config]:
    """The runs of an experiment; `given` has lists of values of fields, and several mean a run for each.

    A field goes to the optimizers that have a use for it. The pendulum trains all seeds at once.
    """
    given = {name: values for name, values in given.items() if values}
    usually = TEXT if experiment == "text" else PAPER[:4] if experiment == "pendulum" else PAPER
    optimizers = list(dict.fromkeys(given.pop("optimizer", usually)))
    seeds: tuple[int, ...] = tuple(given.pop("seeds", usual("seeds", experiment)))
    groups: list[tuple[int, ...]] = [seeds] if experiment == "pendulum" else [(seed,) for seed in seeds]
    for name in given:
        if not any(Config.takes(name, experiment, o) for o in optimizers):
            who = ", ".join(optimizers)
            raise ValueError(f"--{name.replace('_', '-')} changes nothing for {experiment} with {who}")
    if readings and (experiment != "pendulum" or "lr" in given):
        raise ValueError(
            "--reading names learning rates of the pendulum: not with --lr or another experiment"
        )
    chosen = [
        (optimizer, group, fields)
        for optimizer in optimizers
        for group in groups
        for fields in combinations(experiment, optimizer, given, readings)
    ]
    if not chosen:
        raise ValueError(f"no reading of {', '.join(readings)} has {', '.join(optimizers)}")
    configs = [Config(experiment, o, group, network=network or {}, **fields) for o, group, fields in chosen]
    found = {config.name: config for config in configs}  # readings of one label overlap
    return sorted(found.values(), key=lambda config: groups.index(config.seeds))


def combinations(
    experiment: str, optimizer: str, given: dict[str, list[Any]], readings: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The fields of the runs of an optimizer: those chosen that it has a use for, and the usual ones."""
    own = {name: values for name, values in given.items() if Config.takes(name, experiment, optimizer)}
    usuals = {name: usual(name, experiment) for name in ("epochs", "batch_size", "betas", "every")}
    for values in product(*own.values()):
        chosen = usuals | dict(zip(own, values, strict=True))
        steps = chosen["epochs"] * chosen["every"]
        if experiment == "text":
            chosen.setdefault("warmup", max(steps // 10, min(1, steps - 1)))
        for rate in [{}] if "lr" in own else rates(experiment, optimizer, readings):
            yield {**rate, **chosen}


def rates(experiment: str, optimizer: str, readings: Sequence[str]) -> list[dict[str, Any]]:
    """The learning rates of a run for which none was chosen, and the labels that say which they are."""
    if experiment == "text":
        return [{"lr": METHODS[optimizer].rate}]
    if experiment != "pendulum":
        return [{}]
    known = [name for name in READINGS if optimizer in READINGS[name]]
    chosen = [name for name in readings if name in known] if readings else known[:1]
    return [{"lr": READINGS[n][optimizer], "label": n} for n in chosen] or [{}] * (not readings)


# -- reading options -----------------------------------------------------------------------------------------


def reader(field: dataclasses.Field[Any]) -> Callable[[str], list[Any]]:
    """What turns the text of an option into values of its field: 1e-3,3e-3 -> [0.001, 0.003]."""
    kind = str(field.type)
    number: Any = int if "int" in kind else float if "float" in kind else str

    def values(text: str) -> list[Any]:
        try:
            found = [number(part) for part in text.split(",")]
        except ValueError:
            what = "whole numbers" if number is int else "numbers"
            raise ArgumentTypeError(f"takes {what} such as 3 or 3,10, got {text!r}") from None
        return [tuple(found)] if kind.startswith("tuple") else found

    free = number is str and not field.metadata["choices"]
    return seeds if field.name == "seeds" else (lambda text: [text]) if free else values


def seeds(text: str) -> list[int]:
    """0-9 or 0,3,5, or both."""
    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            some = range(int(first), int(last if dash else first) + 1)
            if not 0 < len(some) <= 10_000 or set(some) & set(found):
                raise ValueError
            found += some
    except ValueError:
        raise ArgumentTypeError(f"takes 0-9 or 0,3,5, each number once, got {text!r}") from None
    return found


def assigned(text: str) -> tuple[str, Any]:
    """blocks=4 -> ("blocks", 4)."""
    name, sign, value = text.partition("=")
    if not sign:
        raise ArgumentTypeError(f"takes NAME=VALUE, got {text!r}")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            pass
    return name, value
