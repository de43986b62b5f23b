"""The experiments: networks, batches, losses and measurements after an epoch, decided by seeds alone.

A task has `model`, `steps` (per epoch), `batches(epoch)`, `loss(batch)` with one number for every seed,
`evaluate()` with fields for the record, and `facts` about data that may differ between machines.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from ghor.constraints.declare import declared_spaces
from ghor.spaces import Euclidean, Stiefel
from ghor_lab.networks import Decoder, SymplecticAutoencoder, VisionTransformer
from ghor_lab.networks.phase_space import symplecticity

from . import compiled, data, pendulum
from .config import Config
from .protocol import authors_start
from .text import data as text
from .text import methods

CLASSES = 10
LOOKS = 128  # windows of held-out text that are looked at


def generator(seed: int, epoch: int = 0) -> Generator:
    """Random numbers that depend only on seed and epoch: a run that resumes needs no saved random state."""
    return Generator().manual_seed(seed * 1_000_003 + epoch)


def drift(model: nn.Module, copies: int) -> list[float] | None:
    """The largest distance of a weight from its space, for each copy; None if all weights are Euclidean."""
    worst = []
    for _, p, space in declared_spaces(model):
        if not isinstance(space, Euclidean):
            worst.append(space.residual(p.detach().double()).reshape(copies, -1).amax(-1))
    return brief(torch.stack(worst).amax(0).tolist()) if worst else None


def off_spaces(model: nn.Module) -> list[str]:
    """In words, the weights that are off their space by more than rounding."""
    found = []
    for name, p, space in declared_spaces(model):
        if not isinstance(space, Euclidean):
            distance = float(space.residual(p.detach().double()).max())
            if not distance <= float(space.tolerance(p.detach()).max()):
                found.append(f"{name} is {distance:.1e} off {space}")
    return found


def brief(values: list[float]) -> list[float]:
    """Three digits: enough for an error, and half the size of the record."""
    return [float(f"{value:.3g}") for value in values]


class Classification:
    """The vision transformer on MNIST or Fashion-MNIST.

    The loss is ||prediction - onehot||_F / ||onehot||_F over the batch. With several processes, each has its
    share of every batch, and the loss is that of the whole batch.
    """

    facts: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: Config, folder: Path | None = None, rank: int = 0, world: int = 1) -> None:
        self.config, self.rank, self.world = config, rank, world
        self.dtype, self.device = getattr(torch, config.dtype), torch.device(config.device)
        self.images = data.load(config.experiment, folder)
        self.steps = len(self.images.train_labels) // config.batch_size
        if self.steps == 0:
            raise ValueError(
                f"batch_size {config.batch_size} is more than the {len(self.images.train_labels)} images"
            )
        if config.batch_size < world:
            raise ValueError(f"batch_size {config.batch_size} cannot be shared by {world} processes")
        self.model = self.network(config)
        self.predict: nn.Module = self.model  # or a wrapper around it, for several processes

    @staticmethod
    def network(config: Config) -> VisionTransformer:
        """The network before the first step."""
        scale = config.network["scale"]
        model = VisionTransformer(
            **{**config.network, "scale": None if scale == "none" else scale},
            space=None if config.optimizer == "standard-adam" else Stiefel(),
            generator=generator(config.seeds[0]),
            dtype=getattr(torch, config.dtype),
            device=torch.device(config.device),
        )
        if config.start == "authors":
            authors_start(model)
        return compiled.use(model, config.compile)

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled again in every epoch; an incomplete last batch is dropped."""
        size = self.config.batch_size
        order = torch.randperm(
            len(self.images.train_labels), generator=generator(self.config.seeds[0], epoch)
        )
        share = [size * r // self.world for r in (self.rank, self.rank + 1)]
        for i in range(self.steps):
            rows = order[i * size : (i + 1) * size][share[0] : share[1]]
            yield self._pixels(self.images.train_images[rows]), self.images.train_labels[rows].to(self.device)

    def _pixels(self, images: Tensor) -> Tensor:
        return images.to(self.device, self.dtype) / 255

    def loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, list[float]]:
        """What to differentiate, and the loss; the norm is over the whole batch, even if distributed."""
        images, labels = batch
        onehot = nn.functional.one_hot(labels, CLASSES).to(self.dtype)
        square = (self.predict(images) - onehot).square().sum()
        total = square.detach().clone()
        if self.world > 1:
            torch.distributed.all_reduce(total)
        norm = math.sqrt(self.config.batch_size)  # of onehot
        self.last_loss = [float(total.sqrt() / norm)]
        # d sqrt(total) = d square / (2 sqrt(total)); the gradients of several processes are averaged, hence
        # world
        return square * (self.world / (2 * norm * total.sqrt())), self.last_loss

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """The loss of the last step, the accuracy in percent on the test images, and the drift."""
        images, labels = self.images.test_images, self.images.test_labels.to(self.device)
        right = 0
        for i in range(0, len(labels), 2000):
            guess = self.model(self._pixels(images[i : i + 2000])).argmax(-1)
            right += int((guess == labels[i : i + 2000]).sum())
        accuracy = [100 * right / len(labels)]
        return {"last_loss": self.last_loss, "test_accuracy": accuracy, "drift": drift(self.model, 1)}

    def sample(self) -> dict[str, Any] | None:
        """Nothing to draw."""
        return None


class Autoencoder:
    """The symplectic autoencoder of the pendulum, one copy per seed; relative reconstruction error."""

    facts: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: Config, folder: Path | None = None, rank: int = 0, world: int = 1) -> None:
        assert world == 1, "refused by the command line"
        self.config = config
        self.dtype, self.device = getattr(torch, config.dtype), torch.device(config.device)
        self.trajectories = pendulum.load(folder)
        self.points = self.trajectories.z.flatten(0, 1).to(self.device, self.dtype)  # (10100, 4)
        self.steps = len(self.points) // config.batch_size
        if self.steps == 0:
            raise ValueError(f"batch_size {config.batch_size} is more than the {len(self.points)} points")
        if config.network["full_dim"] != self.points.shape[-1]:
            raise ValueError(
                f"full_dim must be {self.points.shape[-1]}, the pendulum's, got {config.network['full_dim']}"
            )
        self.model = self.network(config)
        self.predict: nn.Module = self.model

    @staticmethod
    def network(config: Config) -> SymplecticAutoencoder:
        """The network before the first step."""
        model = SymplecticAutoencoder(
            **config.network,
            copies=(len(config.seeds),),
            generator=[generator(seed) for seed in config.seeds],
            dtype=getattr(torch, config.dtype),
            device=torch.device(config.device),
        )
        return compiled.use(model, config.compile)

    def batches(self, epoch: int) -> Iterator[Tensor]:
        """(copies, 4, batch): every seed has its own order; an incomplete last batch is dropped."""
        size, count = self.config.batch_size, len(self.points)
        order = torch.stack([torch.randperm(count, generator=generator(s, epoch)) for s in self.config.seeds])
        shuffled = self.points.mT[:, order.to(self.device)].transpose(0, 1)  # (copies, 4, 10100)
        for i in range(self.steps):
            yield shuffled[..., i * size : (i + 1) * size].contiguous()

    def loss(self, batch: Tensor) -> tuple[Tensor, list[float]]:
        """The sum over the copies, which share nothing, and the error of each."""
        errors = pendulum.reconstruction_error(self.model, batch)
        return errors.sum(), errors.detach().tolist()

    def evaluate(self) -> dict[str, Any]:
        """The drift, and how symplectic encoder and decoder are at five points of the data.

        The weights are those of the training. The Jacobians are computed in float64 ("encoder", "decoder")
        and in the dtype of the training ("encoder_rounded", ...), where rounding is multiplied by the square
        of their norms.
        """
        found = {}
        exact = compiled.use(copy.deepcopy(self.model).double(), False)  # compiled C is for float32
        for suffix, model in (("", exact), ("_rounded", self.model)):
            z = self.points[:: len(self.points) // 4].to(next(model.parameters()).dtype)
            with torch.no_grad():
                latent = model.encoder(z)
            found[f"encoder{suffix}"] = brief(symplecticity(model.encoder, z).tolist())
            found[f"decoder{suffix}"] = brief(symplecticity(model.decoder, latent).tolist())
        return {"drift": drift(self.model, len(self.config.seeds)), "symplecticity": found}

    @torch.no_grad()
    def sample(self) -> dict[str, Any]:
        """Five trajectories with their reconstruction and latent coordinates by the first seed's network."""
        rows = [13, 24, 37, 62, 85]
        z = self.trajectories.z[rows].to(self.device, self.dtype)
        shape = z.shape
        latent = self.model.encoder(z.flatten(0, 1))
        made = self.model.decoder(latent)

        def rounded(x: Tensor, *size: int) -> Any:
            return (x.double() * 1e5).round().div(1e5).reshape(*size).tolist()

        return {
            "seed": self.config.seeds[0],
            "t": rounded(self.trajectories.t, -1),
            "theta": rounded(self.trajectories.theta[rows], *shape[:2]),
            "velocity": rounded(self.trajectories.velocity[rows], *shape[:2]),
            "original": rounded(z, *shape),
            "reconstruction": rounded(made[0], *shape),
            "latent": rounded(latent[0], *shape[:2], -1),
        }


class LanguageModel:
    """The decoder on the bytes of Python's standard library; the loss is the mean cross entropy, in nats.

    An epoch is `config.every` steps, each on windows that are drawn anew.
    """

    def __init__(self, config: Config, folder: Path | None = None, rank: int = 0, world: int = 1) -> None:
        assert world == 1, "refused by the command line"
        self.config, self.steps, self.device = config, config.every, torch.device(config.device)
        self.text = text.load(folder)
        self.facts = self.text.facts
        self.size = config.network["context"] + 1
        if (least := min(self.facts["bytes"])) < self.size:
            raise ValueError(f"context {self.size - 1} is more than the {least} bytes of text")
        self.held_out = text.evenly(self.text.held_out, LOOKS, self.size).to(self.device)
        self.method = methods.METHODS[config.optimizer]
        self.model = self.network(config)
        self.start = {
            name: float(m.weight.detach().double().norm()) for name, m in self.model.matrices().items()
        }
        self.predict: nn.Module = self.model

    @staticmethod
    def network(config: Config) -> Decoder:
        """The network before the first step."""
        dtype, device = getattr(torch, config.dtype), torch.device(config.device)
        model = Decoder(**config.network, generator=generator(config.seeds[0]), dtype=dtype, device=device)
        return methods.declare(model, methods.METHODS[config.optimizer])

    def batches(self, epoch: int) -> Iterator[Tensor]:
        """(batch, context + 1), anywhere in the text."""
        source, shape = generator(self.config.seeds[0], epoch), (self.steps, self.config.batch_size)
        for starts in torch.randint(len(self.text.train) - self.size, shape, generator=source):
            yield text.windows(self.text.train, starts, self.size).to(self.device)

    def _cross_entropy(self, batch: Tensor) -> Tensor:
        logits = self.model(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def loss(self, batch: Tensor) -> tuple[Tensor, list[float]]:
        """What to differentiate, and its value."""
        value = self._cross_entropy(batch)
        return value, [float(value.detach())]

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """The loss on held-out text, and how far the weights are from what the method keeps."""
        losses = [float(self._cross_entropy(part)) for part in self.held_out.split(32)]
        kept = list(methods.off(self.model, self.method, self.start))
        off = brief([max(kept)]) if kept else drift(self.model, 1)
        return {"held_out": [sum(losses) / len(losses)], "drift": off}

    def sample(self) -> dict[str, Any] | None:
        """Nothing to draw."""
        return None


TASKS: dict[str, type[Classification] | type[Autoencoder] | type[LanguageModel]] = {
    "pendulum": Autoencoder,
    "mnist": Classification,
    "fashion-mnist": Classification,
    "text": LanguageModel,
}
