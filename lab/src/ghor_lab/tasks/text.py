"""A small language model on the bytes of Python's own standard library: a text that is on every machine.

Files are split by the hash of their content, so copies of a file are on one side. Another interpreter has
another library; the digest tells them apart, and only runs with equal digests are compared.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..language import METHODS, declare, off, optimizer_of
from ..networks import Decoder
from .task import Task, brief, drift, generator

OTHERS = {"site-packages", "dist-packages", "__pycache__"}  # folders that are not the library's
HELD_OUT = 16  # of 256 files
LOOKS = 128  # windows of held-out text that are looked at


@cache
def load(folder: Path | None = None) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The bytes (count,) for training, those held out, and what goes into the record.

    They are all Python files of a folder, by default of the running interpreter's standard library.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    parts: tuple[list[bytes], list[bytes]] = [], []
    whole, seen = hashlib.sha256(), set()
    for name in sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py")):
        if OTHERS & set(Path(name).parts):
            continue
        content = (folder / name).read_bytes()
        digest = hashlib.sha256(content).digest()
        if content and digest not in seen:
            seen.add(digest)
            whole.update(digest)
            parts[digest[0] < HELD_OUT].append(content)
    counts = [len(part) for part in parts]
    if not all(counts):
        raise ValueError(
            f"{folder} has {counts[0]} Python files for training and {counts[1]} held out, and both are "
            "needed: this interpreter has no readable standard library"
        )
    train, held_out = (torch.from_numpy(np.frombuffer(bytearray(b"".join(part)), np.uint8)) for part in parts)
    facts = {"digest": whole.hexdigest()[:16], "files": counts, "bytes": [len(train), len(held_out)]}
    return train, held_out, facts


def windows(text: Tensor, starts: Tensor, size: int) -> Tensor:
    """(count, size): the bytes from each start on, as indices."""
    return text[starts[:, None] + torch.arange(size)].long()


class Text(Task):
    """The loss is the mean cross entropy of the next byte, in nats; an epoch is `config.every` steps."""

    model: Decoder

    def network(self) -> Decoder:
        model = Decoder(**self.config.network, generator=generator(self.config.seeds[0]), **self.factory)
        return declare(model, METHODS[self.config.optimizer])

    def read(self) -> None:
        self.train, held_out, facts = load(self.folder)
        self.facts, self.steps = facts, self.config.every  # type: ignore[misc]
        self.size = self.config.network["context"] + 1
        if (least := min(facts["bytes"])) < self.size:
            raise ValueError(f"context {self.size - 1} is more than the {least} bytes of text")
        # at equal distances, the same in every run
        starts = torch.linspace(0, len(held_out) - self.size, LOOKS, dtype=torch.float64).long()
        self.held_out = windows(held_out, starts, self.size).to(self.device)
        matrices = self.model.matrices().items()
        self.start = {name: float(m.weight.detach().double().norm()) for name, m in matrices}

    def optimizer(self) -> Optimizer:
        return optimizer_of(self.config, self.model)

    def batches(self, epoch: int) -> Iterator[Tensor]:
        """(batch, context + 1), anywhere in the text, drawn anew."""
        source, shape = generator(self.config.seeds[0], epoch), (self.steps, self.config.batch_size)
        for starts in torch.randint(len(self.train) - self.size, shape, generator=source):
            yield windows(self.train, starts, self.size).to(self.device)

    def losses(self, batch: Tensor, backward: bool = True) -> list[float]:
        with torch.set_grad_enabled(backward):
            logits = self.model(batch[:, :-1])
            value = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            if backward:
                value.backward()
        return [float(value.detach())]

    def evaluate(self) -> dict[str, Any]:
        """The loss on held-out text, and how far the weights are from what the method keeps."""
        losses = [self.losses(part, backward=False)[0] for part in self.held_out.split(32)]
        kept = list(off(self.model, METHODS[self.config.optimizer], self.start))
        distance = brief([max(kept)]) if kept else drift(self.model)
        return {"held_out": [sum(losses) / len(losses)], "drift": distance}
