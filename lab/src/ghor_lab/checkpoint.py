"""Checkpoints with a checksum: torch would load a file with a flipped bit without complaint."""

from __future__ import annotations

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import torch

from .files import store
from .record import Damaged

MAGIC = b"ghor checkpoint 1\n"
AGAIN = (
    "The run can start again from its seed if record and checkpoint are removed, as ghor run --restart does"
)


def save(values: dict[str, Any], path: Path) -> None:
    """Write the checksum and what torch.save makes of the values, completely or not at all."""
    stream = io.BytesIO()
    torch.save(values, stream)
    content = stream.getvalue()
    store(head(content) + content, path)


def load(path: Path, device: str = "cpu") -> dict[str, Any]:
    """The values; raises `Damaged` if the file is not what was saved, or holds more than numbers."""
    raw = path.read_bytes()
    content = raw[len(head(b"")) :]
    if not raw.startswith(head(content)):
        raise Damaged(f"{path} is damaged ({len(raw)} bytes; its checksum is wrong). {AGAIN}")
    try:
        values: dict[str, Any] = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError):
        raise Damaged(
            f"{path} was not written by ghor: its checksum is right, but it holds more than numbers and "
            f"names. It was refused, and nothing in it was run. {AGAIN}"
        ) from None
    return values


def head(content: bytes) -> bytes:
    """What a checkpoint with this content begins with."""
    return MAGIC + hashlib.sha256(content).hexdigest().encode() + b"\n"
