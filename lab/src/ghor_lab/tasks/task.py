"""What all experiments have in common, and the optimizers of the paper."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

import ghor
from ghor.baselines import ScalarMomentAdam

from ..config import Config
from ..protocol import random_frames


def generator(seed: int, epoch: int = 0) -> Generator:
    """Random numbers that depend only on seed and epoch: a run that resumes needs no saved random state."""
    return Generator().manual_seed(seed * 1_000_003 + epoch)


def on_spaces(model: nn.Module) -> list[tuple[str, Tensor, ghor.Space]]:
    """Name, weight and space of the weights that are on a manifold."""
    return [
        (name, p, group["space"])
        for group in ghor.param_groups(model)
        if group["space"] != ghor.Euclidean()
        for name, p in group["params"]
    ]


def drift(model: nn.Module, copies: int = 1) -> list[float] | None:
    """The largest distance of a weight from its space, for each copy; None if all weights are Euclidean."""
    found = [
        space.residual(p.detach().double()).reshape(copies, -1).amax(-1) for _, p, space in on_spaces(model)
    ]
    return brief(torch.stack(found).amax(0).tolist()) if found else None


def brief(values: list[float]) -> list[float]:
    """Three digits: enough for an error, and half the size of the record."""
    return [float(f"{value:.3g}") for value in values]


class Task(ABC):
    """One configuration, ready to be trained: everything is decided by the seeds alone."""

    model: nn.Module
    steps: int  # of an epoch
    facts: ClassVar[dict[str, Any]] = {}  # about data that may differ between machines

    def __init__(self, config: Config, folder: Path | None = None) -> None:
        self.config, self.folder = config, folder
        self.dtype, self.device = getattr(torch, config.dtype), torch.device(config.device)
        self.factory = {"dtype": self.dtype, "device": self.device}
        self.model = self.network()

    def whole_batches(self, count: int, what: str) -> int:
        """The steps of an epoch over so many samples: an incomplete last batch is dropped."""
        if count < self.config.batch_size:
            raise ValueError(f"batch_size {self.config.batch_size} is more than the {count} {what}")
        return count // self.config.batch_size

    @abstractmethod
    def network(self) -> nn.Module:
        """The network before the first step."""

    @abstractmethod
    def read(self) -> None:
        """Find the data, or make it: what is not needed to look at a network."""

    @abstractmethod
    def batches(self, epoch: int) -> Iterator[Any]:
        """The batches of an epoch, in an order of its own."""

    @abstractmethod
    def losses(self, batch: Any, backward: bool = True) -> list[float]:
        """The loss of every seed, and with `backward` the gradients."""

    @abstractmethod
    def evaluate(self) -> dict[str, Any]:
        """What is measured after an epoch, for the record."""

    def sample(self) -> dict[str, Any] | None:
        """What is drawn at the end of a run; None: nothing."""
        return None

    def optimizer(self) -> Optimizer:
        """The optimizer of the configuration, before its first step."""
        c = self.config
        adam: dict[str, Any] = {"lr": c.lr, "betas": c.betas, "eps": c.eps}
        section = "transported" if c.frame == "random" else c.section
        space: dict[str, Any] = {"retraction": c.retraction, "section": section}
        params: Any = self.model
        if c.manifold_lr is not None:
            params = ghor.param_groups(self.model)
            for group in params:
                group["lr"] = c.lr if group["space"] == ghor.Euclidean() else c.manifold_lr
        opt: Optimizer
        match c.optimizer:
            case "geometric-adam":
                opt = ghor.optim.Adam(params, **adam, **space, fused=True)
            case "scalar-moment-adam":
                opt = ScalarMomentAdam(params, **adam, **space, norm=c.norm)
            case "momentum":
                opt = ghor.optim.SGD(params, lr=c.lr, momentum=c.momentum, **space, fused=True)
            case "gradient":
                opt = ghor.optim.SGD(params, lr=c.lr, **space, fused=True)
            case "muon":  # lr, or manifold_lr, is the angle of a step; Adam trains what is not a matrix
                own = {**adam, "weight_decay": 0.0}
                opt = ghor.optim.Muon(params, lr=c.lr, weight_decay=0.0, adamw=own, **space)
            case "adamw-anchor":
                decay: dict[str, Any] = {"weight_decay": c.weight_decay, "anchor": "start"}
                opt = ghor.optim.AdamW(params, **adam, **space, **decay, fused=True)
            case _:
                opt = torch.optim.Adam(self.model.parameters(), **adam, fused=True)
        if c.frame == "random":
            random_frames(opt, [p for _, p, _ in on_spaces(self.model)], generator(c.seeds[0]))
        return opt
