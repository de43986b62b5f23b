"""The record of a run: JSON lines, appended one by one, readable while they grow.

Every line ends with the CRC-32 of the rest of it, so that a changed digit is noticed. The last line may be
half written (a kill, a full disk): readers ignore it, and a run that resumes cuts it off.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import named

FORMAT = 1
BEGIN, SUM = b'{"kind":"run"', b'"crc":"'


class Damaged(ValueError):
    """A file is not what was written; the message says which file, where, and what to do."""


def encode(values: dict[str, Any]) -> bytes:
    """One line. Values that are not finite become null, because JSON has no word for them."""
    digits = (
        17 if values["kind"] == "run" else 9
    )  # a configuration comes back as it was; float32 needs 9 digits
    text = json.dumps(_plain(values, digits), allow_nan=False, separators=(",", ":"))
    return f'{text[:-1]},"crc":"{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def decode(line: bytes) -> dict[str, Any]:
    """The values of one line; ValueError if `encode` did not make it."""
    body, mark, crc = line.rpartition(b',"crc":"')
    if not mark or crc[8:] not in (b'"}', b'"}\n') or f"{zlib.crc32(body + b'}'):08x}".encode() != crc[:8]:
        raise ValueError("its checksum is wrong")
    values: dict[str, Any] = json.loads(body + b"}")
    return values


def _plain(value: Any, digits: int) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v, digits) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, digits) for v in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


@dataclass
class Run:
    """The content of a record. `size` is the length in bytes of its complete lines."""

    path: Path
    header: dict[str, Any]
    epochs: list[dict[str, Any]] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)  # "sample", "resumed", "end"
    size: int = 0

    @property
    def epochs_asked(self) -> int:
        """How many epochs the run is to have; a later command may have asked for more than the first."""
        asked = [line["epochs"] for line in self.others if line["kind"] == "resumed"]
        return int(max([self.header["config"]["epochs"], *asked]))

    @property
    def finished(self) -> bool:
        """Whether all requested epochs are there."""
        ends = [line["epochs"] for line in self.others if line["kind"] == "end"]
        return bool(ends) and ends[-1] >= self.epochs_asked

    def last(self, kind: str) -> dict[str, Any] | None:
        """The last line of a kind."""
        return next((line for line in reversed(self.others) if line["kind"] == kind), None)


def each_once(runs: Iterable[Run]) -> list[Run]:
    """Runs without their shorter copies: a record and what it was when it was packed are one run."""
    longest: dict[bytes, Run] = {}
    for run in runs:
        key = encode(run.header)  # later commands add lines, and leave the first one as it is
        if key not in longest or len(run.epochs) > len(longest[key].epochs):
            longest[key] = run
    return list(longest.values())


def read(path: Path) -> Run | None:
    """The record, or None if it has no complete line yet; `Damaged` names the line that was changed."""
    found, size = lines(path)
    return assemble(path, found, size)


def lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The values of the complete lines of a file, and their length in bytes."""
    found, size = [], 0
    raw = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(raw, 1):
        if number == len(raw) and not line.endswith(b"\n"):
            break  # half written
        try:
            found.append(decode(line))
        except ValueError as error:
            raise Damaged(
                f"{path}, line {number}: {error}; the file was changed after it was written. Put back a copy "
                "of it, or remove record and checkpoint to start from scratch, as ghor run --restart does"
            ) from None
        size += len(line)
    return found, size


def assemble(path: Path, lines: list[dict[str, Any]], size: int) -> Run | None:
    """The run that these lines describe, None if there are none; `Damaged` if they are out of order."""
    if not lines:
        return None
    header, *rest = lines
    if header.get("kind") != "run" or header.get("format") != FORMAT:
        raise Damaged(f"{path}: the first line is not the header of a run of format {FORMAT}")
    run = Run(path, header, size=size)
    for number, values in enumerate(rest, 2):
        if values["kind"] != "epoch":
            run.others.append(values)
        elif values["epoch"] == len(run.epochs) + 1:
            run.epochs.append(values)
        else:
            raise Damaged(f"{path}, line {number}: epoch {values['epoch']} after epoch {len(run.epochs)}")
    return run


def ours(path: Path) -> bool:
    """Whether a file of lines is ours: other programs write such files too; ours may have a flipped bit."""
    with path.open("rb") as stream:
        line = stream.readline()
    return BEGIN.startswith(line[: len(BEGIN)]) or SUM in line


def append(path: Path, values: dict[str, Any], size: int) -> int:
    """Add a line after the first `size` bytes, overwriting a half-written one, and return the new size.

    The line is on disk when this returns; if it could not be written, the file is as it was.
    """
    line = encode(values)
    with named(path), path.open("r+b" if path.exists() else "w+b", buffering=0) as stream:
        if stream.seek(0, os.SEEK_END) < size:
            raise Damaged(
                f"{path} became shorter than the {size} bytes that were written. Put back a copy of it"
            )
        stream.truncate(size)
        stream.seek(size)
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[stream.write(rest) :]
            os.fsync(stream.fileno())
        except OSError:
            stream.truncate(size)
            raise
    return size + len(line)
