"""From the options of the command line to configurations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .config import OPTIMIZERS, READINGS, Config, one_of
from .text.methods import METHODS

STEPS, EVERY = (
    1500,
    50,
)  # of the language model: steps, and how many from one look at held-out text to the next
BETAS = (0.9, 0.95)  # of the language model


def paper(
    experiment: str,
    *,
    optimizer: Sequence[str] | None,
    seeds: str | None,
    epochs: int | None,
    reading: Sequence[str] | None,
    lr: float | None,
    manifold_lr: float | None,
    weight_decay: float | None,
    label: str | None,
    protocol: str,
    start: str | None,
    frame: str | None,
    loss: str | None,
    norm: str | None,
    batch_size: int | None,
    **common: Any,
) -> list[Config]:
    """The runs of the paper's experiments. None is an option that was not given."""
    pendulum = experiment == "pendulum"
    for name in ("steps", "rest_lr", "sweep"):
        value = common.pop(name)
        if value is not None and value is not False:  # --steps 0 was given, too
            raise ValueError(f"--{name.replace('_', '-')} is for text")
    if reading and (not pendulum or lr is not None):
        raise ValueError(
            "--reading names learning rates of the pendulum: not with --lr or another experiment"
        )
    authors = protocol == "authors"
    if authors and pendulum:
        raise ValueError("--protocol authors is for mnist and fashion-mnist")
    names = list(dict.fromkeys(map(str, optimizer or (OPTIMIZERS[:4] if pendulum else OPTIMIZERS))))
    chosen = {"start": start, "frame": frame, "manifold_lr": manifold_lr}
    on_manifolds = geometry(common, any(name != "standard-adam" for name in names), **chosen)
    on_manifolds |= {
        "manifold_lr": manifold_lr,
        "start": start or ("authors" if authors else "uniform"),
        "frame": frame or ("random" if authors else "closed-form"),
    }
    common |= {
        "experiment": experiment,
        "epochs": epochs if epochs is not None else 1000 if pendulum else 25,
        "batch_size": batch_size if batch_size is not None else 256 if pendulum else 2048,
        "loss": loss or ("after" if authors else "before"),
        "warmup": common["warmup"] or 0,
        "compile": common.pop("compiled"),
    }
    numbers = parse_seeds(seeds if seeds is not None else "0-9" if pendulum else "0")
    if weight_decay is not None:
        if names != ["adamw-anchor"]:
            raise ValueError(
                "--weight-decay is for -o adamw-anchor: weights on manifolds decay to an anchor only"
            )
        common["weight_decay"] = weight_decay
    if norm is not None and "scalar-moment-adam" not in names:
        raise ValueError(f"--norm is for -o scalar-moment-adam: it changes nothing for {', '.join(names)}")
    own = {"scalar-moment-adam": {"norm": norm}} if norm is not None else {}
    configs: list[Config] = []
    if pendulum and lr is None:
        for name in [str(r).replace("-", " ", 1) for r in reading] if reading else ["as run"]:
            for o in names:
                if o in READINGS[name]:
                    rate = READINGS[name][o]
                    more = {**on_manifolds, **common, **own.get(o, {})}
                    configs.append(Config(optimizer=o, seeds=numbers, lr=rate, label=label or name, **more))
                elif optimizer:
                    raise ValueError(f"the reading {name!r} has no {o}, it is of {', '.join(READINGS[name])}")
        return list({config.name: config for config in configs}.values())  # readings of one label overlap
    rate = lr if lr is not None else 1e-3
    for some in [numbers] if pendulum else [(seed,) for seed in numbers]:
        for o in names:
            more = {**(on_manifolds if o != "standard-adam" else {}), **common, **own.get(o, {})}
            configs.append(Config(optimizer=o, seeds=some, lr=rate, label=label, **more))
    return configs


def text(
    *,
    optimizer: Sequence[str] | None,
    seeds: str | None,
    steps: int | None,
    lr: float | None,
    rest_lr: float | None,
    weight_decay: float | None,
    warmup: int | None,
    batch_size: int | None,
    sweep: bool,
    label: str | None,
    **common: Any,
) -> list[Config]:
    """The runs of the language model; for a sweep those that it begins with."""
    for name in ("epochs", "reading", "manifold_lr", "start", "frame", "loss", "norm", "data"):
        if common.pop(name, None) is not None:
            instead = ": --steps N" if name == "epochs" else ""
            raise ValueError(f"--{name.replace('_', '-')} is not for text{instead}")
    if common.pop("protocol") == "authors" or not common.pop("compiled"):
        raise ValueError("--protocol and --no-compile are for the paper's experiments, not for text")
    names = list(dict.fromkeys(map(str, optimizer or METHODS)))
    for name in names:
        one_of("optimizer", name, tuple(METHODS))
    on_manifolds = geometry(common, any(METHODS[name].space for name in names))
    asked = {"--seeds": seeds, "--lr": lr, "--weight-decay": weight_decay, "--warmup": warmup}
    if sweep and any(value is not None for value in asked.values()):
        raise ValueError(f"--sweep chooses these itself: not with {', '.join(asked)}")
    if weight_decay is not None:
        if not all(METHODS[name].decays for name in names):
            those = [name for name in METHODS if METHODS[name].decays]
            raise ValueError(f"--weight-decay is for {', '.join(those)}: the other methods have none")
        common["weight_decay"] = weight_decay
    if rest_lr is not None:
        common["rest_lr"] = rest_lr
    steps = STEPS if steps is None else steps
    epochs = max(1, round(steps / EVERY))
    if steps < 1 or steps % epochs:
        raise ValueError(f"--steps must be a multiple of {EVERY}, or fewer, got {steps}")
    common |= {
        "epochs": epochs,
        "every": steps // epochs,
        "batch_size": 8 if batch_size is None else batch_size,
        "warmup": max(steps // 10, min(1, steps - 1)) if warmup is None else warmup,
        "betas": BETAS,
        "label": label,
    }
    rates = {name: METHODS[name].rate if lr is None else lr for name in names}
    own = {name: on_manifolds if METHODS[name].space else {} for name in names}
    return [
        Config("text", name, (seed,), lr=rates[name], **common, **own[name])
        for seed in parse_seeds("0" if seeds is None else seeds)
        for name in names
    ]


def geometry(common: dict[str, Any], manifolds: bool, **more: Any) -> dict[str, Any]:
    """The options that are for weights on manifolds, taken out; ValueError if there are no such weights."""
    found = {name: common.pop(name) for name in ("retraction", "section")}
    given = {name: value for name, value in more.items() if value is not None}
    given |= {name: value for name, value in found.items() if value != getattr(Config, name)}
    if given and not manifolds:
        name = next(iter(given)).replace("_", "-")
        raise ValueError(f"--{name} is for weights on manifolds: these optimizers have none")
    return found


def threads(experiment: str, asked: int | None, jobs: int) -> int:
    """Those asked for, else one for the small networks of the pendulum, else the cores that a run has."""
    cores = (os.cpu_count() or 1) // (jobs * int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return asked if asked is not None else 1 if experiment == "pendulum" else max(1, cores)


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


def parse_seeds(text: str) -> tuple[int, ...]:
    """0-9 or 0,3,5, or both."""
    seeds: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            some = range(int(first), int(last if dash else first) + 1)
            if not 0 < len(some) <= 10_000:
                raise ValueError
            seeds += some
        if len(set(seeds)) < len(seeds):
            raise ValueError
    except ValueError:
        raise ValueError(f"--seeds takes 0-9 or 0,3,5, each number once, got {text!r}") from None
    return tuple(seeds)
