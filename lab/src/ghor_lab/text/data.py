"""The bytes of Python's own standard library: a text that is on every machine.

Files are split by the hash of their content, so copies of a file are on one side. Another interpreter has
another library; the digest tells them apart, and only runs with equal digests are compared.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

OTHERS = {"site-packages", "dist-packages", "__pycache__"}  # folders that are not the library's
HELD_OUT = 16  # of 256 files


@dataclass(frozen=True)
class Text:
    """Bytes (count,) for training, bytes that are held out, and what goes into the record."""

    train: Tensor
    held_out: Tensor
    facts: dict[str, Any]


@cache
def load(folder: Path | None = None) -> Text:
    """All Python files of a folder, by default of the running interpreter's standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    parts: tuple[list[bytes], list[bytes]] = [], []
    whole, seen = hashlib.sha256(), set()
    for name in found:
        if OTHERS & set(Path(name).parts):
            continue
        content = (folder / name).read_bytes()
        digest = hashlib.sha256(content).digest()
        if content and digest not in seen:
            seen.add(digest)
            whole.update(digest)
            parts[is_held_out(digest)].append(content)
    if not all(parts):
        raise ValueError(
            f"{folder} has {len(parts[0])} Python files for training and {len(parts[1])} held out, and both "
            "are needed: this interpreter has no readable standard library"
        )
    train, held_out = (torch.from_numpy(np.frombuffer(bytearray(b"".join(part)), np.uint8)) for part in parts)
    facts = {
        "digest": whole.hexdigest()[:16],
        "files": [len(part) for part in parts],
        "bytes": [len(train), len(held_out)],
    }
    return Text(train, held_out, facts)


def is_held_out(digest: bytes) -> bool:
    """Whether a file with this hash is held out: 16 of 256 are."""
    return digest[0] < HELD_OUT


def windows(text: Tensor, starts: Tensor, size: int) -> Tensor:
    """(count, size): the bytes from each start on, as indices."""
    return text[starts[:, None] + torch.arange(size)].long()


def evenly(text: Tensor, count: int, size: int) -> Tensor:
    """(count, size): windows at equal distances, the same in every run."""
    return windows(text, torch.linspace(0, len(text) - size, count, dtype=torch.float64).long(), size)
