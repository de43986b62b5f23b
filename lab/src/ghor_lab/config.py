"""A run as one frozen value: everything that decides its numbers, written into its record.

The fields are also the options of `ghor run`: name, default, range and help text stand here once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any

import torch

# The optimizers of the paper, in its order, and Muon and AdamW that pulls weights to where they started.
PAPER = ("geometric-adam", "scalar-moment-adam", "momentum", "gradient", "standard-adam")
FURTHER = ("muon", "adamw-anchor")
# The methods of the language model, see language.py; the first have no weight on a space.
FREE = ("adamw", "torch-muon", "adamh", "muonh", "unit-rows")
ON_SPACES = ("sphere-adam", "sphere-muon", "rows-adam", "rows-muon", "heads-adam", "heads-muon")
TEXT = (*FREE, *ON_SPACES, "stiefel-adam", "stiefel-muon", "stiefel-anchor")
DECAYING = ("adamw-anchor", "adamw", "torch-muon", "stiefel-anchor")
OPTIMIZERS = (*PAPER, *FURTHER, *TEXT)

IMAGES = ("mnist", "fashion-mnist")
EXPERIMENTS = ("pendulum", *IMAGES, "text")
TRANSFORMER = {"patch_size": 7, "blocks": 16, "heads": 7, "scale": "dim"}
NETWORKS: dict[str, dict[str, Any]] = {
    "pendulum": {"encoder_layers": 10, "decoder_layers": 20, "decoder_output_layers": 10, "upscale": 20},
    "mnist": TRANSFORMER,
    "fashion-mnist": TRANSFORMER,
    "text": {"layers": 4, "width": 128, "heads": 4, "context": 128},
}
# The paper's table states 1e-4 for every pendulum run. The numbers beside it agree with the defaults of the
# authors' library: 1e-3 for its own Adam, 1e-2 for the other methods.
READINGS: dict[str, dict[str, float]] = {
    "as run": {"geometric-adam": 1e-3, "scalar-moment-adam": 1e-2, "momentum": 1e-2, "gradient": 1e-2},
    "as stated": dict.fromkeys(PAPER[:4], 1e-4),
    "equal 1e-3": dict.fromkeys(PAPER[:2], 1e-3),
    "equal 1e-2": dict.fromkeys(PAPER[:2], 1e-2),
}
RANGES = {
    "positive": lambda x: 0 < x < math.inf,
    "0 or more": lambda x: 0 <= x < math.inf,
    "at least 1": lambda x: x >= 1,
    "from 0 to below 1": lambda x: 0 <= x < 1,
}


def setting(
    default: Any,
    words: str,
    /,
    choices: Iterable[str] = (),
    span: str = "",
    of: Iterable[str] = EXPERIMENTS,
    by: Iterable[str] = OPTIMIZERS,
    **usual: Any,
) -> Any:
    """A field and its help; it may be chosen `of` these experiments and `by` these optimizers.

    `usual` are the values of experiments that have another than the default.
    """
    about = {"help": words, "choices": tuple(choices), "span": span, "of": tuple(of), "by": tuple(by)}
    return field(default=default, metadata={**about, "usual": usual})


SPACES = [name for name in OPTIMIZERS if name not in (*FREE, "standard-adam")]


@dataclass(frozen=True)
class Config:
    """One configuration, with the seeds that are trained at once."""

    experiment: str = setting(MISSING, "What to train.", EXPERIMENTS)
    optimizer: str = setting(MISSING, "Which optimizer.", OPTIMIZERS)
    seeds: tuple[int, ...] = setting((0,), "Such as 0-9 or 0,3,5.", pendulum=tuple(range(10)))
    epochs: int = setting(
        25, "A larger number makes a finished run longer.", span="at least 1", pendulum=1000, text=30
    )
    lr: float = setting(
        1e-3, "Learning rate; pendulum and text have one for each optimizer.", span="positive"
    )
    batch_size: int = setting(2048, "Samples per step.", span="at least 1", pendulum=256, text=8)
    label: str | None = setting(None, "What is special about these runs, for their names and tables.")
    manifold_lr: float | None = setting(
        None, "Learning rate of the weights on manifolds.", span="positive", of=EXPERIMENTS[:3], by=SPACES
    )
    rest_lr: float = setting(3e-3, "Learning rate of what is not a matrix.", span="positive", of=["text"])
    weight_decay: float = setting(
        0.1, "Of adamw-anchor, towards the start, and of text.", span="0 or more", by=DECAYING
    )
    warmup: int = setting(
        0, "Steps in which the learning rate grows to its value, linearly.", span="0 or more"
    )
    every: int = setting(
        0, "Steps of an epoch, which ends with a look at held-out text.", (), "0 or more", ["text"], text=50
    )
    betas: tuple[float, float] = setting(
        (0.9, 0.99), "Decay of Adam's moments.", span="from 0 to below 1", text=(0.9, 0.95)
    )
    eps: float = setting(1e-8, "Adam's delta, outside the root.", span="positive")
    momentum: float = setting(0.5, "Of momentum.", span="from 0 to below 1", by=["momentum"])
    norm: str = setting(
        "canonical",
        "Norm whose square scalar-moment-adam averages.",
        ("canonical", "frobenius"),
        by=["scalar-moment-adam"],
    )
    start: str = setting(
        "uniform",
        "First weights on manifolds; authors: the Q of LAPACK's QR of a normal matrix.",
        ("uniform", "authors"),
        of=IMAGES,
        by=SPACES,
    )
    frame: str = setting(
        "closed-form",
        "Completes the first frames, by a function of the weight or at random.",
        ("closed-form", "random"),
        of=IMAGES,
        by=SPACES,
    )
    loss: str = setting(
        "before", "Record the loss before or after each step, on its batch.", ("before", "after"), of=IMAGES
    )
    retraction: str = setting("cayley", "How a weight takes its step.", ("cayley", "geodesic"), by=SPACES)
    section: str = setting("auto", "How frames are kept.", ("auto", "transported", "implicit"), by=SPACES)
    dtype: str = setting("float32", "Of weights and data.", ("float32", "float64"))
    device: str = setting("cpu", "Torch device, such as cpu or cuda.")
    threads: int = setting(
        1, "Threads of each run. They affect rounding, so another number is another run.", span="at least 1"
    )
    flush_subnormals: bool = True  # to zero: gradients that vanish through 16 blocks would be 8 times slower
    network: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if "float" in str(f.type) and value is not None:  # 1 and 1.0 are one configuration, with one name
                value = tuple(map(float, value)) if "tuple" in str(f.type) else float(value)
                object.__setattr__(self, f.name, value)
            if f.metadata:
                self.check(f.name, value, f.metadata)
        object.__setattr__(self, "seeds", tuple(self.seeds))
        for wrong, words in self.combinations():
            if wrong:
                raise ValueError(words)
        try:
            torch.device(self.device)
        except RuntimeError:
            known = "torch has cpu, cuda, cuda:1, mps and more"
            raise ValueError(f"unknown device {self.device!r}; {known}") from None
        self.check_network(NETWORKS[self.experiment])
        object.__setattr__(self, "network", {**NETWORKS[self.experiment], **self.network})

    def combinations(self) -> Iterator[tuple[bool, str]]:
        """What fields must not be together, and what to say then."""
        seeds, steps = list(self.seeds), self.epochs * self.every
        yield len(self.betas) != 2, f"betas must be two numbers, got {list(self.betas)}"
        different = len(set(seeds)) == len(seeds) > 0 and all(0 <= s < 2**40 for s in seeds)
        yield not different, f"seeds must be different numbers from 0 to 2^40, got {seeds}"
        one = self.experiment == "pendulum" or len(seeds) == 1
        yield not one, f"{self.experiment} trains one seed a run, got {seeds}"
        known = TEXT if self.experiment == "text" else (*PAPER, *FURTHER)
        unknown = self.optimizer not in known or (self.experiment, self.optimizer) == ("pendulum", PAPER[-1])
        yield unknown, f"{self.experiment} is not trained with {self.optimizer}; there are {', '.join(known)}"
        without = self.frame == "random" and self.section == "implicit"
        yield without, "an implicit section has no frame to choose: not frame random"
        long = self.experiment == "text" and not self.warmup < steps
        yield long, f"warmup must be less than {self.epochs} x {self.every} steps, got {self.warmup}"

    def check_network(self, known: Mapping[str, Any]) -> None:
        """Raise ValueError unless the options of the network are known, and numbers that can be."""
        for name, value in self.network.items():
            one_of("network option", name, known)
            least = 0 if name.endswith("_layers") else 1
            if isinstance(known[name], int) and not (type(value) is int and value >= least):
                kind = f"a whole number from {least} on"
                raise ValueError(f"network option {name} must be {kind}, got {value!r}")

    def check(self, name: str, value: Any, about: Mapping[str, Any]) -> None:
        """Raise ValueError unless the value is one of the choices, in its range, and for this run."""
        if about["choices"]:
            one_of(name, value, about["choices"])
        for number in value if isinstance(value, tuple) else (value,):
            if about["span"] and number is not None and not RANGES[about["span"]](number):
                raise ValueError(f"{name} must be {about['span']}, got {number}")
        takes = name in ("experiment", "optimizer") or self.takes(name, self.experiment, self.optimizer)
        if not takes and value != usual(name, self.experiment):
            who = ", ".join(about["of"] if self.experiment not in about["of"] else about["by"])
            raise ValueError(f"{name} is for {who}: not for {self.experiment} with {self.optimizer}")

    @classmethod
    def takes(cls, name: str, experiment: str, optimizer: str) -> bool:
        """Whether a field may be chosen for this experiment and optimizer."""
        about = cls.__dataclass_fields__[name].metadata
        return not about or (experiment in about["of"] and optimizer in about["by"])

    def rate(self, step: int) -> float:
        """The part of the learning rate at a step, from 1 on: a linear warm-up, then lr.

        For the language model the rate then falls to 0, linearly.
        """
        if step < self.warmup:
            return step / self.warmup
        steps = self.epochs * self.every
        return (steps + 1 - step) / (steps + 1 - self.warmup) if self.every else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**dataclasses.asdict(self), "seeds": list(self.seeds), "betas": list(self.betas)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """The inverse of `to_dict`."""
        for name in values:
            one_of("field", name, cls.__dataclass_fields__)
        return cls(**values)

    @property
    def name(self) -> str:
        """The name of the run's files. It depends on everything but the number of epochs, which may grow.

        It may not where the learning rates depend on it, as for the language model.
        """
        values = {k: v for k, v in self.to_dict().items() if k != "epochs" or self.every}
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]
        seeds = f"seed{self.seeds[0]}" if len(self.seeds) == 1 else f"{len(self.seeds)}seeds"
        label = [self.label.replace(" ", "-")] if self.label else []
        parts = [self.optimizer, *label, f"lr{self.lr:g}", seeds, digest]
        return "-".join("".join(c for c in part if c.isalnum() or c in "-+.") for part in parts)


def usual(name: str, experiment: str) -> Any:
    """The value of a field that is not chosen."""
    field = Config.__dataclass_fields__[name]
    return field.metadata.get("usual", {}).get(experiment, field.default)


def one_of(what: str, value: str, known: Iterable[str]) -> None:
    """Raise ValueError unless the value is known."""
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}; there are {', '.join(known)}")
