"""Records packed for keeping: epochs as columns, as JSON, compressed by xz, with a SHA-256 inside.

Long runs shrink to about a seventh of their size, and no digit is lost: `unpacked` returns exactly the same
lines. Packed records are for `ghor report` and `ghor check`; a run resumes only from the record it wrote
itself.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .files import store
from .record import Damaged, Run, assemble, encode, lines, ours, read

SUFFIX = ".run.xz"
FORMAT = 1


def is_packed(path: Path) -> bool:
    """Whether the name is that of a packed record."""
    return path.name.endswith(SUFFIX)


def load(path: Path) -> Run | None:
    """A record, packed or not; None if it has no complete line yet."""
    if not is_packed(path):
        return read(path)
    return assemble(path, unpacked(path), path.stat().st_size)


def pack(record: Path, packed: Path) -> None:
    """Write a record packed, completely or not at all; a half-written last line is left out."""
    found, _ = lines(record)
    if assemble(record, found, 0) is None:
        raise ValueError(f"{record} has no whole line yet")
    epochs = [line for line in found if line["kind"] == "epoch"]
    places = [i for i, line in enumerate(found) if line["kind"] != "epoch"]
    content = {
        "packed": FORMAT,
        "lines": len(found),
        "others": [[i, found[i]] for i in places],
        "epochs": columns(epochs),
    }
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    store(lzma.compress(text.encode(), check=lzma.CHECK_SHA256, preset=9 | lzma.PRESET_EXTREME), packed)
    if b"".join(map(encode, unpacked(packed))) != b"".join(map(encode, found)):
        raise Damaged(f"{packed} is not what was written")


def unpacked(path: Path) -> list[dict[str, Any]]:
    """The values of the record's lines; raises `Damaged` if the file is not what was written."""
    try:
        content = json.loads(lzma.decompress(path.read_bytes(), lzma.FORMAT_XZ))
        if content["packed"] != FORMAT:
            raise ValueError(f"it has the format {content['packed']!r}, not {FORMAT}")
        epochs, others = iter(rows(content["epochs"])), {int(i): line for i, line in content["others"]}
        return [others[i] if i in others else next(epochs) for i in range(content["lines"])]
    except (lzma.LZMAError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise Damaged(
            f"{path} is damaged or cut short ({error or type(error).__name__}); put back a copy of it"
        ) from None


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


def pack_all(folders: Iterable[Path], out: Path | None) -> list[Path]:
    """Pack the records in the folders, beside themselves or into `out`; returns the packed files."""
    made: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
        found = [path for path in sorted(folder.rglob("*.jsonl")) if ours(path)]
        if not found:
            raise ValueError(f"{folder} has no records (*.jsonl); `ghor run` makes them")
        for path in found:
            target = (
                path.parent if out is None else out / path.parent.relative_to(folder)
            ) / f"{path.stem}{SUFFIX}"
            if target in made:
                raise ValueError(f"two records would be packed as {target}; pack their folders one by one")
            pack(path, target)
            made.append(target)
    return made
