"""Files that are complete or not there, and the folder for what can be made again."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """Where downloads and compiled code are kept: GHOR_CACHE, or the platform's folder for caches."""
    given = os.environ.get("GHOR_CACHE")
    if given:
        return Path(given).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ghor"


def store(raw: bytes, path: Path) -> None:
    """Write a file completely or not at all: under a temporary name, synced to disk, then renamed.

    A link stays one, and the file that it leads to is written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with named(path):
        path = path.resolve()
        handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(raw)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(unfinished, 0o666 & ~_umask())  # noqa: PTH101  mkstemp's files are for their owner alone
            os.replace(unfinished, path)  # noqa: PTH105
            sync_folder(path.parent)
        except BaseException:
            Path(unfinished).unlink(missing_ok=True)
            raise


def below(folder: Path, *endings: str) -> list[Path]:
    """The files with these endings in a folder and in those below it, which may be links; no folder twice."""
    found: list[Path] = []
    seen: set[Path] = set()
    links = [folder]
    while links:  # what is in the folder itself comes before what only a link leads to
        for here, folders, names in os.walk(links.pop(0)):
            if (real := Path(here).resolve()) in seen:
                folders.clear()
                continue
            seen.add(real)
            links += sorted(path for name in folders if (path := Path(here, name)).is_symlink())
            found += [Path(here, name) for name in names if name.endswith(endings)]
    return sorted(found)


def clean(path: Path) -> None:
    """Remove what a killed `store` of this file left behind. Only for the one process that writes it."""
    path = path.resolve()
    for unfinished in path.parent.glob(f".{path.name}.*.part"):
        unfinished.unlink(missing_ok=True)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the file name to errors of the system: those of a write or a sync lack it."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)
            error.filename2 = None
        raise


def sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, if the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
