"""The record of a run: JSON lines, appended one by one, readable while they grow; packed, for keeping.

Every line ends with the CRC-32 of the rest of it, so that a changed digit is noticed. The last line may be
half written (a kill, a full disk): readers ignore it, and a run that resumes cuts it off.

`pack` keeps the records of a folder in one file: their lines one after another, compressed by xz, which takes
a sixth of the space. `xz -dc` shows them.
"""

from __future__ import annotations

import json
import lzma
import math
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from .files import below, named, store

FORMAT = 1
SUFFIX = ".jsonl.xz"
SUM = b',"crc":"'
Lines = list[dict[str, Any]]


class Damaged(ValueError):
    """A file is not what was written; the message says which file, where, and what to do."""


@dataclass
class Run:
    """The content of a record; `raw` are its complete lines as they are in the file."""

    path: Path
    header: dict[str, Any]
    raw: bytearray = field(default_factory=bytearray)
    epochs: Lines = field(default_factory=list)
    others: Lines = field(default_factory=list)  # "sample", "resumed", "end"

    @property
    def asked(self) -> int:
        """How many epochs the run is to have; a later command may have asked for more than the first."""
        resumed = [line["epochs"] for line in self.others if line["kind"] == "resumed"]
        return int(max([self.header["config"]["epochs"], *resumed]))

    @property
    def finished(self) -> bool:
        """Whether all requested epochs are there."""
        end = self.last("end")
        return end is not None and end["epochs"] >= self.asked

    def last(self, kind: str) -> dict[str, Any] | None:
        """The last line of a kind."""
        return next((line for line in reversed(self.others) if line["kind"] == kind), None)


# -- lines ---------------------------------------------------------------------------------------------------


def encode(values: dict[str, Any]) -> bytes:
    """One line. Values that are not finite become null, because JSON has no word for them."""
    digits = 17 if values["kind"] == "run" else 9  # a configuration comes back as it was; float32 needs 9

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        if isinstance(value, float):
            return float(f"{value:.{digits}g}") if math.isfinite(value) else None
        return value

    text = json.dumps(plain(values), allow_nan=False, separators=(",", ":"))
    return f'{text[:-1]},"crc":"{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def decode(line: bytes) -> dict[str, Any]:
    """The values of one line; ValueError if `encode` did not make it."""
    body, mark, crc = line.rpartition(SUM)
    if not mark or crc[8:] not in (b'"}', b'"}\n') or f"{zlib.crc32(body + b'}'):08x}".encode() != crc[:8]:
        raise ValueError("its checksum is wrong")
    values: dict[str, Any] = json.loads(body + b"}")
    return values


def append(path: Path, values: dict[str, Any], size: int) -> int:
    """Add a line after the first `size` bytes, overwriting a half-written one, and return the new size.

    The line is on disk when this returns; if it could not be written, the file is as it was.
    """
    line = encode(values)
    with named(path), path.open("r+b" if path.exists() else "w+b", buffering=0) as stream:
        if stream.seek(0, os.SEEK_END) < size:
            raise Damaged(f"{path} became shorter than the {size} bytes that were written: put back a copy")
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


# -- reading -------------------------------------------------------------------------------------------------


def load(path: Path) -> list[Run]:
    """The runs of a file, packed or not, none if it has no complete line yet; `Damaged` names a bad line."""
    raw = path.read_bytes()
    packed = path.name.endswith(SUFFIX)
    if packed:
        try:
            raw = lzma.decompress(raw, lzma.FORMAT_XZ)
        except lzma.LZMAError as error:
            raise Damaged(f"{path} is damaged or cut short ({error}); put back a copy of it") from None
    runs: list[Run] = []
    for number, line in enumerate(raw.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break  # half written
        try:
            values = decode(line)
        except ValueError as error:
            raise Damaged(
                f"{path}, line {number}: {error}; the file was changed after it was written. Put back a copy "
                "of it, or remove record and checkpoint to start from scratch, as ghor run --restart does"
            ) from None
        if values["kind"] == "run" and values.get("format") == FORMAT and (packed or not runs):
            runs.append(Run(path / f"{values['name']}.jsonl" if packed else path, values))
        elif values["kind"] == "run" or not runs:
            raise Damaged(f"{path}, line {number} is not the header of a run of format {FORMAT}")
        elif values["kind"] != "epoch":
            runs[-1].others.append(values)
        elif values["epoch"] == len(runs[-1].epochs) + 1:
            runs[-1].epochs.append(values)
        else:
            last = len(runs[-1].epochs)
            raise Damaged(f"{path}, line {number}: epoch {values['epoch']} after epoch {last}")
        runs[-1].raw += line
    return runs


def read(path: Path) -> Run | None:
    """The record of one run, or None if it has no complete line yet."""
    return next(iter(load(path)), None)


def ours(path: Path) -> bool:
    """Whether a file of lines is ours: other programs write such files too; ours may have a flipped bit."""
    with path.open("rb") as stream:
        line = stream.readline()
    return b'{"kind":"run"'.startswith(line[:13]) or SUM in line


def each_once(runs: Iterable[Run]) -> list[Run]:
    """Runs without their shorter copies: a record and what it was when it was packed are one run."""
    longest: dict[bytes, Run] = {}
    for run in runs:
        key = encode(run.header)  # later commands add lines, and leave the first one as it is
        if key not in longest or len(run.raw) > len(longest[key].raw):
            longest[key] = run
    return list(longest.values())


def read_all(folder: Path) -> tuple[list[Run], list[str]]:
    """The runs of a folder and of those below it, each once, and in words the files that were left out."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; `ghor run` makes one and says which")
    runs, left = [], []
    for path in below(folder, ".jsonl", SUFFIX):
        try:
            if path.name.endswith(SUFFIX) or ours(path):
                found = load(path)
                runs += found
                left += [] if found else [f"{path} has no whole line yet and is left out"]
        except OSError as error:
            left.append(f"{path} cannot be read and is left out: {error.strerror}")
    if not runs:
        raise ValueError(f"{folder} has no records (*.jsonl, *{SUFFIX}); `ghor run` makes some")
    return each_once(runs), left


def pack(folder: Path, out: Path | None = None) -> Path:
    """Pack the records of a folder into one file, there or in `out`; what that file has already stays in it.

    A run that went on since takes the place of its shorter self.
    """
    target = (folder if out is None else out) / f"records{SUFFIX}"
    fresh = [path for path in sorted(folder.glob("*.jsonl")) if ours(path)]
    if not fresh:
        raise ValueError(f"{folder} has no records (*.jsonl); `ghor run` makes them")
    files = [target, *fresh] if target.exists() else fresh
    runs = sorted(each_once(run for path in files for run in load(path)), key=lambda run: run.path.name)
    for a, b in pairwise(runs):
        if a.path.name == b.path.name:
            raise ValueError(
                f"two records would be packed as {target / a.path.name}: begun at {a.header.get('started')} "
                f"and at {b.header.get('started')}. With --out one of them can go to another folder"
            )
    raw = b"".join(run.raw for run in runs)
    store(lzma.compress(raw, check=lzma.CHECK_SHA256, preset=9 | lzma.PRESET_EXTREME), target)
    return target
