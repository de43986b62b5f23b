"""Records packed for keeping: those of a folder in one file, epochs as columns, as JSON, compressed by xz,
with a SHA-256 inside.

Long runs, or many of them, shrink to about a seventh of their size, and no digit is lost: `unpacked`
returns exactly the same lines. Packed records are for `ghor report`, `ghor check` and `ghor numbers`; a run
resumes only from the record it wrote itself.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .files import below, store
from .record import Damaged, Run, assemble, encode, lines, ours, read

SUFFIX = ".run.xz"
NAME = f"records{SUFFIX}"
FORMAT = 2  # 1: a single run, without its name

Lines = list[dict[str, Any]]


def is_packed(path: Path) -> bool:
    """Whether the name is that of packed records."""
    return path.name.endswith(SUFFIX)


def load(path: Path) -> list[Run]:
    """The runs of a file, packed or not; none if it has no complete line yet."""
    if not is_packed(path):
        run = read(path)
        return [] if run is None else [run]
    found = [assemble(path / name, each, 0) for name, each in unpacked(path).items()]
    return [run for run in found if run is not None]


def pack(records: dict[str, Lines], packed: Path) -> None:
    """Write the lines of runs, by the names of their records, completely or not at all."""
    runs = {}
    for name, found in sorted(records.items()):
        runs[name] = {
            "lines": len(found),
            "others": [[i, line] for i, line in enumerate(found) if line["kind"] != "epoch"],
            "epochs": columns([line for line in found if line["kind"] == "epoch"]),
        }
    text = json.dumps({"packed": FORMAT, "runs": runs}, allow_nan=False, separators=(",", ":"))
    store(lzma.compress(text.encode(), check=lzma.CHECK_SHA256, preset=9 | lzma.PRESET_EXTREME), packed)
    written = unpacked(packed)
    if {n: list(map(encode, each)) for n, each in written.items()} != {
        n: list(map(encode, each)) for n, each in records.items()
    }:
        raise Damaged(f"{packed} is not what was written")


def unpacked(path: Path) -> dict[str, Lines]:
    """The values of the lines of each record, by its name; `Damaged` if the file is not what was written."""
    try:
        content = json.loads(lzma.decompress(path.read_bytes(), lzma.FORMAT_XZ))
        if content["packed"] not in (1, FORMAT):
            raise ValueError(f"it has the format {content['packed']!r}, not {FORMAT}")
        alone = {f"{path.name.removesuffix(SUFFIX)}.jsonl": content}
        found = {}
        for name, run in (alone if content["packed"] == 1 else content["runs"]).items():
            epochs, others = iter(rows(run["epochs"])), {int(i): line for i, line in run["others"]}
            found[name] = [others[i] if i in others else next(epochs) for i in range(run["lines"])]
        return found
    except (lzma.LZMAError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
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
    """Pack the records of each folder into one file, beside them or into `out`; returns the packed files.

    What a packed file has already stays in it; a run that went on since takes the place of its shorter self.
    """
    made: dict[Path, dict[str, Lines]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
        found = [path for path in below(folder, ".jsonl") if ours(path)]
        packed = below(folder, SUFFIX)
        if not found and not packed:
            raise ValueError(f"{folder} has no records (*.jsonl); `ghor run` makes them")
        for path in [*packed, *found]:
            target = (path.parent if out is None else out / path.parent.relative_to(folder)) / NAME
            if target not in made:
                made[target] = unpacked(target) if target.exists() else {}
            for name, each in (unpacked(path) if is_packed(path) else {path.name: whole(path)}).items():
                _add(made[target], name, each, target)
    for target, records in made.items():
        pack(records, target)
    return list(made)


def whole(record: Path) -> Lines:
    """The complete lines of a record; a half-written last line is left out."""
    found, _ = lines(record)
    if assemble(record, found, 0) is None:
        raise ValueError(f"{record} has no whole line yet")
    return found


def _add(records: dict[str, Lines], name: str, new: Lines, target: Path) -> None:
    old = records.get(name, new)
    if encode(old[0]) != encode(new[0]):
        raise ValueError(
            f"two records would be packed as {target / name}: begun at {old[0].get('started')} and at "
            f"{new[0].get('started')}. With --out one of them can go to another folder"
        )
    records[name] = max(new, old, key=len)
