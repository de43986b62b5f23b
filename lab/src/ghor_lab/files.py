"""Files that are complete or not there, and the folder for what can be made again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


def cache_folder() -> Path:
    """Where downloads are kept: GHOR_CACHE, or `ghor` in the user's folder for caches."""
    if given := os.environ.get("GHOR_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    return Path(base) / "ghor"


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the file name to errors of the system: those of a write or a sync lack it."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename, error.filename2 = str(path), None
        raise


def store(raw: bytes, path: Path) -> None:
    """Write a file completely or not at all: under a temporary name, synced to disk, then renamed.

    A link stays one, and the file that it leads to is written.
    """
    with named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path = path.resolve()
        unfinished = path.with_name(f".{path.name}.{uuid4().hex}.part")
        try:
            with unfinished.open("xb") as stream:
                stream.write(raw)
                stream.flush()
                os.fsync(stream.fileno())
            unfinished.replace(path)
            sync_folder(path.parent)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


def clean(path: Path) -> None:
    """Remove what a killed `store` of this file left behind; only for the one process that writes it."""
    path = path.resolve()
    for unfinished in path.parent.glob(f".{path.name}.*.part"):
        unfinished.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, if the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def below(folder: Path, *endings: str) -> list[Path]:
    """The files with these endings in a folder and in those below it, links included; no folder twice."""
    found: list[Path] = []
    seen: set[Path] = set()
    for here, folders, names in os.walk(folder, followlinks=True):
        if (real := Path(here).resolve()) in seen:
            folders.clear()
            continue
        seen.add(real)
        found += [Path(here, name) for name in names if name.endswith(endings)]
    return sorted(found)
