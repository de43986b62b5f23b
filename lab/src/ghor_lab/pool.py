"""Runs of one configuration, pooled over their seeds: a row of a table, a line of a figure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import READINGS
from .protocol import verdicts
from .record import Run

Array = NDArray[np.float64]
Spread = tuple[float, float | None]
FEW = 4  # up to so many runs are shown one by one

# the paper's names in the paper's order, then ours; other optimizers and experiments keep their own names
OPTIMIZERS = {
    "geometric-adam": "Geometric Adam",
    "scalar-moment-adam": "Scalar-moment Adam",
    "momentum": "Riemannian momentum",
    "gradient": "Riemannian gradient",
    "standard-adam": "Standard Adam",
    "muon": "Muon",
    "adamw-anchor": "AdamW with an anchor",
}
# settings that are unusual whenever a configuration names them
SPECIAL = {
    "start": "{}' start",
    "frame": "{} frame",
    "warmup": "{} steps of warm-up",
    "loss": "loss {} the step",
}
EXPERIMENTS = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "pendulum": "Pendulum",
    "text": "Language model",
}


@dataclass(frozen=True)
class Pool:
    """Runs that differ only in their seeds and got equally far.

    `variant` tells the pool from others of the same name.
    """

    config: dict[str, Any]
    runs: tuple[Run, ...]
    epochs: int
    asked: int
    variant: str = field(default="", compare=False)

    @property
    def experiment(self) -> str:
        """Its name in the records."""
        return str(self.config["experiment"])

    @property
    def optimizer(self) -> str:
        """Its name in the records."""
        return str(self.config["optimizer"])

    @property
    def label(self) -> str | None:
        """The reading of the learning rates, or whatever the runs were labelled with."""
        return None if self.config.get("label") is None else str(self.config["label"])

    @property
    def seeds(self) -> list[int]:
        """All seeds, in the order of the columns of `series`."""
        return [seed for run in self.runs for seed in run.header["config"]["seeds"]]

    @property
    def finished(self) -> bool:
        """Whether the runs have all the epochs they were asked for."""
        return self.epochs >= self.asked

    def last(self, kind: str) -> dict[str, Any] | None:
        """The last line of a kind, from the first run that has one."""
        return next((line for run in self.runs if (line := run.last(kind)) is not None), None)

    @property
    def verdicts(self) -> list[str | None]:
        """For each seed, why the authors' gate would exclude its run; None if it would not."""
        return [why for run in self.runs for why in verdicts(run)]

    def title(self, label: bool = True, epochs: bool = True) -> str:
        """The optimizer's name in the paper, the label, and whatever else is special."""
        special = [words.format(self.config[key]) for key, words in SPECIAL.items() if key in self.config]
        parts = [name(OPTIMIZERS, self.optimizer), self.label if label else None, *special, self.variant]
        title = ", ".join(part for part in parts if part)
        return title if epochs else title.removesuffix(f", {counted(self.epochs, 'epoch')}")

    def series(self, *keys: str) -> Array | None:
        """A quantity recorded per seed, (epochs, seeds); nan if it was not finite; None if it is not
        recorded.
        """
        columns = []
        for run in self.runs:
            rows = [_at(epoch, keys) for epoch in run.epochs]
            if not rows or any(row is None for row in rows):
                return None
            columns.append(np.array(rows, dtype=np.float64))
        return np.concatenate(columns, 1)

    def numbers(self, *keys: str) -> Array:
        """A quantity recorded once per epoch, over all epochs of all runs that have it, (count,)."""
        values = [_at(epoch, keys) for run in self.runs for epoch in run.epochs]
        return np.array([value for value in values if value is not None], dtype=np.float64)


def _at(values: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        values = None if values is None else values.get(key)
    return values


def name(names: dict[str, str], key: str) -> str:
    """The name that people read, or the key itself."""
    return names.get(key, key)


def listed(words: Sequence[str]) -> str:
    """ "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), *words[-1:]] if len(words) > 1 else words)


def counted(count: int, what: str) -> str:
    """ "1 run", "2 runs"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def place(order: Iterable[str], key: str | None) -> tuple[int, str]:
    """A sorting key: None first, then the items of `order` in that order, then the rest alphabetically."""
    known = list(order)
    if key is None:
        return -1, ""
    return (known.index(key), "") if key in known else (len(known), key)


def off(ours: float, theirs: tuple[float, float] | None) -> float | None:
    """The distance of a number from a mean, in standard deviations; None if there is no deviation."""
    return (ours - theirs[0]) / theirs[1] if theirs and theirs[1] else None


def spread(values: Array) -> Spread:
    """Mean and sample standard deviation; the latter is None for a single value."""
    if not np.isfinite(values).all():
        return float("nan"), None
    return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else None


def best(losses: Array) -> Array:
    """The smallest finite value of each seed over the epochs: (epochs, seeds) -> (seeds,)."""
    smallest = np.where(np.isfinite(losses), losses, np.inf).min(0)
    return np.where(np.isfinite(smallest), smallest, np.nan)


def pool(runs: Sequence[Run]) -> tuple[list[Pool], list[str]]:
    """Pools in the paper's order, and in words what had to be left out.

    If a seed ran twice, the newer run counts. A run that is longer than others of its configuration counts
    twice: by itself, and together with them as far as they got.
    """
    kinds: dict[tuple[str, int, int], list[Run]] = defaultdict(list)
    warnings = []
    for run in sorted(runs, key=lambda run: str(run.header.get("started")), reverse=True):
        config, epochs = run.header["config"], len(run.epochs)
        if not epochs:
            warnings.append(f"{run.path} has no whole epoch yet: left out of tables and figures")
            continue
        for epoch in run.epochs:
            if len(epoch["loss"]) != len(config["seeds"]):
                counts = f"{len(epoch['loss'])} losses for {len(config['seeds'])} seeds"
                raise ValueError(
                    f"{run.path}: epoch {epoch['epoch']} has {counts}; the file is not a record of ghor run"
                )
        flat = {**config, **config.get("network", {})}
        key = json.dumps({k: v for k, v in flat.items() if k not in ("seeds", "epochs", "network")})
        same = kinds[key, epochs, run.epochs_asked]
        twice = [
            (seed, other)
            for other in same
            for seed in config["seeds"]
            if seed in other.header["config"]["seeds"]
        ]
        if twice:
            seed, other = twice[0]
            warnings.append(
                f"{run.path} is left out: {other.path} has the same configuration and seed {seed}"
            )
        else:
            same.append(run)
    pools = []
    whole = {kind: list(same) for kind, same in kinds.items()}
    for (key, epochs, asked), same in kinds.items():
        seeds = {seed for run in same for seed in run.header["config"]["seeds"]}
        for (config, further, _), longer in whole.items():
            if config == key and further > epochs >= asked:
                fit = [run for run in longer if not seeds & set(run.header["config"]["seeds"])]
                same += [replace(run, epochs=run.epochs[:epochs]) for run in fit]
                seeds |= {seed for run in fit for seed in run.header["config"]["seeds"]}
        same.sort(key=lambda run: list(run.header["config"]["seeds"]))
        pools.append(Pool(json.loads(key), tuple(same), epochs, asked))
    pools = [_told_apart(p, pools) for p in pools]
    for p in pools:
        last = [loss for run in p.runs for loss in run.epochs[-1]["loss"]]
        bad = [seed for seed, loss in zip(p.seeds, last, strict=True) if loss is None]
        if bad:
            which = f"{'seed' if len(bad) == 1 else 'seeds'} {', '.join(map(str, bad))}"
            what = f"the final loss of {which} is not finite"
            warnings.append(f"{name(EXPERIMENTS, p.experiment)}, {p.title()}: {what}")
    return sorted(pools, key=_order), sorted(warnings)


def _told_apart(p: Pool, pools: Sequence[Pool]) -> Pool:
    """Name the settings, beside optimizer and label, in which a pool differs from others of its name.

    The number of threads, which only changes rounding, is named only if the number of epochs does not tell.
    """
    others = [
        q for q in pools if (q.experiment, q.optimizer, q.label) == (p.experiment, p.optimizer, p.label)
    ]

    def differ(q: Pool, key: str) -> bool:
        return q.config.get(key) != p.config[key] and (key != "threads" or q.epochs == p.epochs)

    keys = [key for key in p.config if key not in SPECIAL and any(differ(q, key) for q in others)]
    parts = [f"{key} {p.config[key]}" for key in keys]
    same = [q for q in others if {**q.config, "threads": 0} == {**p.config, "threads": 0}]
    if p.finished and any(q.finished and q.epochs != p.epochs for q in same):
        parts.append(counted(p.epochs, "epoch"))
    return replace(p, variant=", ".join(parts))


def _order(p: Pool) -> tuple[Any, ...]:
    return (
        place(EXPERIMENTS, p.experiment),
        place(OPTIMIZERS, p.optimizer),
        place(READINGS, p.label),
        [str(p.config.get(key, "")) for key in ("warmup", "start", "frame", "loss")],
        json.dumps({**p.config, "threads": 0}),
        -p.epochs,
        -p.asked,
        json.dumps(p.config),
    )
