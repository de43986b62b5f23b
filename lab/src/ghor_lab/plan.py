"""From the options of the command line to configurations: one for each combination of their values."""

from __future__ import annotations

from collections.abc import Sequence
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
    seeds = given.pop("seeds", list(usual("seeds", experiment)))
    groups: list[tuple[int, ...]] = (
        [tuple(seeds)] if experiment == "pendulum" else [(seed,) for seed in seeds]
    )
    for name in given:
        if not any(Config.takes(name, experiment, o) for o in optimizers):
            who = ", ".join(optimizers)
            raise ValueError(f"--{name.replace('_', '-')} changes nothing for {experiment} with {who}")
    if readings and (experiment != "pendulum" or "lr" in given):
        raise ValueError(
            "--reading names learning rates of the pendulum: not with --lr or another experiment"
        )
    found = {}
    for optimizer in optimizers:
        own = {name: values for name, values in given.items() if Config.takes(name, experiment, optimizer)}
        for seed_group, *values in product(groups, *own.values()):
            chosen = dict(zip(own, values, strict=True))
            for more in rates(experiment, optimizer, chosen, readings):
                start = {"experiment": experiment, "optimizer": optimizer, "seeds": seed_group}
                config = Config(
                    **start, **defaults(experiment, chosen), **{**more, **chosen}, network=network or {}
                )
                found[config.name] = config  # readings of one label overlap
    if not found:
        raise ValueError(f"no reading of {', '.join(readings)} has {', '.join(optimizers)}")
    return sorted(found.values(), key=lambda config: groups.index(config.seeds))


def rates(
    experiment: str, optimizer: str, chosen: dict[str, Any], readings: Sequence[str]
) -> list[dict[str, Any]]:
    """The learning rates of a run for which none was chosen, and the labels that say which they are."""
    if "lr" in chosen:
        return [{}]
    if experiment == "text":
        return [{"lr": METHODS[optimizer].rate}]
    if experiment != "pendulum":
        return [{}]
    usually = [name for name in READINGS if optimizer in READINGS[name]][:1]
    names = readings or usually
    return [{"lr": READINGS[n][optimizer], "label": n} for n in names if optimizer in READINGS[n]] or (
        [{}] if not readings else []
    )


def defaults(experiment: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """The usual values of the fields that were not chosen, where they are not those of a `Config`."""
    names = [name for name in ("epochs", "batch_size", "betas", "every") if name not in chosen]
    found = {name: usual(name, experiment) for name in names}
    if experiment == "text" and "warmup" not in chosen:
        steps = {**found, **chosen}["epochs"] * {**found, **chosen}["every"]
        found["warmup"] = max(steps // 10, min(1, steps - 1))
    return found


# -- reading options -----------------------------------------------------------------------------------------


def values(name: str, text: str) -> list[Any]:
    """The values that a text gives a field: 1e-3,3e-3 -> [0.001, 0.003]; ValueError in words."""
    kind = str(Config.__dataclass_fields__[name].type)
    if name == "seeds":
        return seeds(text)
    if kind.startswith("tuple"):
        return [tuple(number(name, part, float) for part in text.split(","))]
    if name in ("label", "device"):
        return [text]
    as_number = int if "int" in kind else float if "float" in kind else None
    return [number(name, part, as_number) if as_number else part for part in text.split(",")]


def number(name: str, text: str, kind: type) -> Any:
    """A number, or an error that names the option."""
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"--{name.replace('_', '-')} takes {what}, got {text!r}") from None


def seeds(text: str) -> list[int]:
    """0-9 or 0,3,5, or both."""
    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            some = range(int(first), int(last if dash else first) + 1)
            if not 0 < len(some) <= 10_000:
                raise ValueError
            found += some
        if len(set(found)) < len(found):
            raise ValueError
    except ValueError:
        raise ValueError(f"--seeds takes 0-9 or 0,3,5, each number once, got {text!r}") from None
    return found


def assigned(text: str) -> tuple[str, Any]:
    """blocks=4 -> ("blocks", 4)."""
    name, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"--set takes NAME=VALUE, got {text!r}")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            pass
    return name, value
