"""The paper's vision transformer on MNIST."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import ghor

from .. import data
from ..networks import VisionTransformer
from ..protocol import authors_start
from .task import Task, drift, generator, on_spaces

CLASSES = 10
PIECE = 256  # images that are computed at a time: their activations stay in a processor's cache


class Mnist(Task):
    """The loss is ||prediction - onehot||_F / ||onehot||_F over the batch."""

    dataset = data.MNIST

    def network(self) -> VisionTransformer:
        config = self.config
        scale = config.network["scale"]
        model = VisionTransformer(
            **{**config.network, "scale": None if scale == "none" else scale},
            space=None if config.optimizer == "standard-adam" else ghor.Stiefel(),
            generator=generator(config.seeds[0]),
            **self.factory,
        )
        if config.start == "authors":
            authors_start([p for _, p, _ in on_spaces(model)])
        return model

    def read(self) -> None:
        self.images = data.load(self.dataset, self.folder)
        self.steps = self.whole_batches(len(self.images.train_labels), "images")

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled again in every epoch; an incomplete last batch is dropped."""
        images, labels = self.images.train_images, self.images.train_labels
        order = torch.randperm(len(labels), generator=generator(self.config.seeds[0], epoch))
        for rows in order.split(self.config.batch_size)[: self.steps]:
            yield self.pixels(images[rows]), labels[rows].to(self.device)

    def pixels(self, images: Tensor) -> Tensor:
        """What the network sees."""
        return images.to(self.device, self.dtype) / 255

    def losses(self, batch: tuple[Tensor, Tensor], backward: bool = True) -> list[float]:
        """Piece by piece, since the square of the norm is a sum over the images."""
        images, labels = batch
        onehot = nn.functional.one_hot(labels, CLASSES).to(self.dtype)
        total = torch.zeros((), **self.factory)
        with torch.set_grad_enabled(backward):
            for x, y in zip(images.split(PIECE), onehot.split(PIECE), strict=True):
                square = (self.model(x) - y).square().sum()
                total += square.detach()
                if backward:
                    square.backward()
        norm = math.sqrt(len(labels))  # of onehot
        if backward:  # d sqrt(total) = d total / (2 sqrt(total))
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad /= 2 * norm * total.sqrt()
        self.last_loss = [float(total.sqrt() / norm)]
        return self.last_loss

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """The loss of the last step, the accuracy in percent on the test images, and the drift."""
        images, labels = self.images.test_images, self.images.test_labels.to(self.device)
        guesses = torch.cat([self.model(self.pixels(x)).argmax(-1) for x in images.split(PIECE)])
        right = int((guesses == labels).sum())
        return {
            "last_loss": self.last_loss,
            "test_accuracy": [100 * right / len(labels)],
            "drift": drift(self.model),
        }
