"""The record of a run: JSON lines, appended one by one, readable while they grow; packed, for keeping.

Every line ends with the CRC-32 of the rest of it, so that a changed digit is noticed. The last line may be
half written (a kill, a full disk): readers ignore it, and a run that resumes cuts it off.

`pack` keeps the records of a folder in one file, epochs as columns, as JSON, compressed by xz with a SHA-256
inside. That takes a seventh of the space, and `load` gives exactly the same lines.
"""

from __future__ import annotations

import json
import lzma
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import below, named, store

FORMAT, PACKED = 1, 2
SUFFIX = ".run.xz"
SUM = b',"crc":"'
Lines = list[dict[str, Any]]


class Damaged(ValueError):
    """A file is not what was written; the message says which file, where, and what to do."""


@dataclass
class Run:
    """The content of a record. `size` is the length in bytes of its complete lines."""

    path: Path
    header: dict[str, Any]
    epochs: Lines = field(default_factory=list)
    others: Lines = field(default_factory=list)  # "sample", "resumed", "end"
    size: int = 0

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


def lines(path: Path) -> tuple[Lines, int]:
    """The values of the complete lines of a file, and their length in bytes; `Damaged` names a bad line."""
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


def assemble(path: Path, found: Lines, size: int = 0) -> Run | None:
    """The run that these lines describe, None if there are none; `Damaged` if they are out of order."""
    if not found:
        return None
    header, *rest = found
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


def read(path: Path) -> Run | None:
    """The record, or None if it has no complete line yet."""
    return assemble(path, *lines(path))


def load(path: Path) -> list[Run]:
    """The runs of a file, packed or not."""
    packed = path.name.endswith(SUFFIX)
    found = [assemble(path / n, each) for n, each in unpack(path).items()] if packed else [read(path)]
    return [run for run in found if run is not None]


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
        if key not in longest or len(run.epochs) > len(longest[key].epochs):
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


# -- packing -------------------------------------------------------------------------------------------------


def pack(folder: Path, out: Path | None = None) -> Path:
    """Pack the records of a folder into one file, there or in `out`; what that file has already stays in it.

    A run that went on since takes the place of its shorter self.
    """
    target = (folder if out is None else out) / f"records{SUFFIX}"
    records = unpack(target) if target.exists() else {}
    fresh = [path for path in sorted(folder.glob("*.jsonl")) if ours(path)] if folder.is_dir() else []
    if not fresh:
        raise ValueError(f"{folder} has no records (*.jsonl); `ghor run` makes them")
    for path in fresh:
        found, _ = lines(path)
        if assemble(path, found) is None:
            raise ValueError(f"{path} has no whole line yet")
        old = records.get(path.name, found)
        if encode(old[0]) != encode(found[0]):
            begun = old[0].get("started"), found[0].get("started")
            raise ValueError(
                f"two records would be packed as {target / path.name}: begun at {begun[0]} and at "
                f"{begun[1]}. With --out one of them can go to another folder"
            )
        records[path.name] = max(found, old, key=len)
    runs = {
        name: {
            "lines": len(found),
            "others": [[i, line] for i, line in enumerate(found) if line["kind"] != "epoch"],
            "epochs": columns([line for line in found if line["kind"] == "epoch"]),
        }
        for name, found in sorted(records.items())
    }
    text = json.dumps({"packed": PACKED, "runs": runs}, allow_nan=False, separators=(",", ":"))
    store(lzma.compress(text.encode(), check=lzma.CHECK_SHA256, preset=9 | lzma.PRESET_EXTREME), target)
    if unpack(target) != records:
        raise Damaged(f"{target} is not what was written")
    return target


def unpack(path: Path) -> dict[str, Lines]:
    """The values of the lines of each record, by its name; `Damaged` if the file is not what was written."""
    try:
        content = json.loads(lzma.decompress(path.read_bytes(), lzma.FORMAT_XZ))
        if content["packed"] != PACKED:
            raise ValueError(f"it has the format {content['packed']!r}, not {PACKED}")
        found = {}
        for name, run in content["runs"].items():
            epochs, others = iter(rows(run["epochs"])), {int(i): line for i, line in run["others"]}
            found[name] = [others[i] if i in others else next(epochs) for i in range(run["lines"])]
        return found
    except (lzma.LZMAError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        reason = str(error) or type(error).__name__
        raise Damaged(f"{path} is damaged or cut short ({reason}); put back a copy of it") from None


def columns(values: Sequence[Any]) -> dict[str, Any]:
    """Transpose values of one form: {"a": [1, 2]} and {"a": [3, 4]} have the columns [1, 3] and [2, 4]."""
    first = values[0] if values else None
    if isinstance(first, dict) and all(isinstance(v, dict) and list(v) == list(first) for v in values):
        return {"dict": {key: columns([v[key] for v in values]) for key in first}, "count": len(values)}
    if isinstance(first, list) and all(isinstance(v, list) and len(v) == len(first) for v in values):
        return {"list": [columns(column) for column in zip(*values, strict=True)], "count": len(values)}
    return {"rows": list(values)}


def rows(packed: dict[str, Any]) -> list[Any]:
    """The inverse of `columns`."""
    if "rows" in packed:
        return list(packed["rows"])
    if "dict" in packed:
        parts = {key: rows(part) for key, part in packed["dict"].items()}
        return [{key: part[i] for key, part in parts.items()} for i in range(packed["count"])]
    each = [rows(part) for part in packed["list"]]
    return [[part[i] for part in each] for i in range(packed["count"])]
