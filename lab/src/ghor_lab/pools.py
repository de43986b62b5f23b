"""Runs of one configuration, pooled over their seeds: a row of a table, a line of a figure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import NETWORKS, OPTIMIZERS, PAPER, READINGS, Config, usual
from .protocol import verdicts
from .record import Run
from .tables import counted

Array = NDArray[np.float64]

# the paper's names in the paper's order, then ours; other optimizers and experiments keep their own names
NAMES = {
    "geometric-adam": "Geometric Adam",
    "scalar-moment-adam": "Scalar-moment Adam",
    "momentum": "Riemannian momentum",
    "gradient": "Riemannian gradient",
    "standard-adam": "Standard Adam",
    "muon": "Muon",
    "adamw-anchor": "AdamW with an anchor",
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "pendulum": "Pendulum",
    "text": "Language model",
}
# settings that are named wherever they are not the usual ones
SPECIAL = {
    "start": "{}' start",
    "frame": "{} frame",
    "warmup": "{} steps of warm-up",
    "loss": "loss {} the step",
}
# what changes rounding only, is in a column of its own, or has had one value only
LEFT_OUT = {"seeds", "epochs", "network", "threads", "device", "compile", "flush_subnormals"}
LEFT_OUT |= {"full_dim", "reduced_dim", "encoder_blocks", "decoder_blocks"}


@dataclass(frozen=True)
class Pool:
    """Runs that differ only in their seeds and got equally far; `config` has the network's options, too."""

    config: dict[str, Any]
    runs: tuple[Run, ...]
    epochs: int
    asked: int
    experiment: str
    optimizer: str
    label: str | None  # the reading of the learning rates, or whatever the runs were labelled with
    variant: str = ""  # tells the pool from others of the same name

    @property
    def seeds(self) -> list[int]:
        """All seeds, in the order of the columns of `series`."""
        return [seed for run in self.runs for seed in run.header["config"]["seeds"]]

    @property
    def verdicts(self) -> list[str | None]:
        """For each seed, why the authors' gate would exclude its run; None if it would not."""
        return [why for run in self.runs for why in verdicts(run)]

    def unusual(self) -> list[str]:
        """The settings that are not those of the paper's runs."""
        rate = READINGS["as run"].get(self.optimizer) if self.experiment == "pendulum" else 1e-3
        known = {**usuals(self.experiment), "lr": rate, "label": self.label, "experiment": self.experiment}
        found = [key for key, value in self.config.items() if key != "optimizer" and known.get(key) != value]
        return found + (["label"] if self.label not in (None, "as run") else [])

    def title(self) -> str:
        """The optimizer's name in the paper, the label, and whatever else is special."""
        known = usuals(self.experiment)
        special = [w.format(self.config[k]) for k, w in SPECIAL.items() if self.config[k] != known[k]]
        name = NAMES.get(self.optimizer, self.optimizer)
        return ", ".join(filter(None, [name, self.label, *special, self.variant]))

    def series(self, *keys: str) -> Array | None:
        """A quantity recorded per seed, (epochs, seeds); nan if it was not finite; None if not recorded."""
        columns = []
        for run in self.runs:
            rows = [at(line, keys) for line in run.epochs]
            if any(row is None for row in rows):
                return None
            columns.append(np.array(rows, dtype=np.float64))
        return np.concatenate(columns, 1)

    def numbers(self, *keys: str) -> Array:
        """A quantity recorded once per epoch, over all epochs of all runs that have it, (count,)."""
        values = [at(line, keys) for run in self.runs for line in run.epochs]
        return np.array([value for value in values if value is not None], dtype=np.float64)


def at(values: Any, keys: Sequence[str]) -> Any:
    """values[first][second]...; None where there is none."""
    for key in keys:
        values = None if values is None else values.get(key)
    return values


@cache
def usuals(experiment: str) -> dict[str, Any]:
    """The usual value of every field and network option, as a record has it."""
    found = {name: usual(name, experiment) for name in Config.__dataclass_fields__ if name not in LEFT_OUT}
    plain: dict[str, Any] = json.loads(json.dumps({**found, **NETWORKS[experiment]}, default=lambda x: None))
    return plain


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record that decide its numbers; records of before leave out some that are usual."""
    given = {**config, **config.get("network", {})}
    every = {**usuals(config["experiment"]), **given}
    return {key: value for key, value in every.items() if key not in LEFT_OUT}


def pool(runs: Iterable[Run]) -> tuple[list[Pool], list[str]]:
    """Pools in the paper's order, and in words what had to be left out.

    If a seed ran twice, the newer run counts.
    """
    kinds: dict[tuple[str, int, int], list[Run]] = defaultdict(list)
    left = []
    for run in sorted(runs, key=lambda run: str(run.header.get("started")), reverse=True):
        seeds = run.header["config"]["seeds"]
        if not run.epochs:
            left.append(f"{run.path} has no whole epoch yet: left out of tables and figures")
            continue
        same = kinds[json.dumps(flat(run.header["config"]), sort_keys=True), len(run.epochs), run.asked]
        twice = [other for other in same if set(seeds) & set(other.header["config"]["seeds"])]
        if twice:
            left.append(f"{run.path} is left out: {twice[0].path} has the same configuration and seeds")
        else:
            same.append(run)
    pools = []
    for (key, epochs, asked), same in kinds.items():
        same.sort(key=lambda run: list(run.header["config"]["seeds"]))
        config = json.loads(key)
        names = {k: config[k] for k in ("experiment", "optimizer", "label")}
        pools.append(Pool(config, tuple(same), epochs, asked, **names))
    pools = sorted((told_apart(p, pools) for p in pools), key=order)
    for p in pools:
        last = [loss for run in p.runs for loss in run.epochs[-1]["loss"]]
        if bad := [str(seed) for seed, loss in zip(p.seeds, last, strict=True) if loss is None]:
            title = f"{NAMES.get(p.experiment, p.experiment)}, {p.title()}"
            left.append(f"{title}: the final loss is not finite with seed {', '.join(bad)}")
    return pools, sorted(left)


def told_apart(p: Pool, pools: Sequence[Pool]) -> Pool:
    """Name the settings, beside optimizer and label, in which a pool differs from others of its name."""
    name = p.experiment, p.optimizer, p.label
    others = [q for q in pools if (q.experiment, q.optimizer, q.label) == name]
    keys = [k for k in p.config if k not in SPECIAL and any(q.config.get(k) != p.config[k] for q in others)]
    parts = [f"{key} {p.config[key]}" for key in keys]
    if any(q.config == p.config and q is not p and p.epochs > 1 < q.epochs for q in others):
        parts.append(counted(p.epochs, "epoch"))
    return replace(p, variant=", ".join(parts))


def order(p: Pool) -> tuple[Any, ...]:
    """The paper's order of experiments and optimizers, then readings, special settings, and length."""
    known = usuals(p.experiment)
    special = [p.config[key] != known[key] for key in ("warmup", "start", "frame", "loss")]
    names = place(NAMES, p.experiment), place(OPTIMIZERS, p.optimizer), place(READINGS, p.label)
    return *names, special, json.dumps(p.config), -p.epochs, -p.asked


def place(known: Iterable[str], key: str | None) -> tuple[int, str]:
    """A sorting key: None first, then the known in their order, then the rest alphabetically."""
    found = list(known)
    if key is None:
        return -1, ""
    return (found.index(key), "") if key in found else (len(found), key)


def plain(pools: Sequence[Pool]) -> list[Pool]:
    """Of one experiment's pools those with the paper's optimizers, of each those nearest to its settings.

    Runs of one epoch belong to the count of caught runs.
    """
    pools = [p for p in pools if p.epochs > 1] or list(pools)
    pools = [p for p in pools if p.optimizer in PAPER] or pools
    settings = [(p.optimizer, len(p.unusual())) for p in pools]
    return [
        p
        for p, mine in zip(pools, settings, strict=True)
        if all(mine <= x for x in settings if x[0] == mine[0])
    ]
