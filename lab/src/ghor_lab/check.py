"""`ghor check`: are the files of runs as they were written, and the weights on their spaces?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import checkpoint
from .config import Config
from .files import below
from .pack import SUFFIX, is_packed, load
from .record import Damaged, Run, ours, read
from .tasks import TASKS, drift, off_spaces


@dataclass
class Found:
    """A run described in words, and what is wrong with it."""

    epochs: str = "-"
    record: str = "-"
    checkpoint: str = "-"
    off: str = "-"  # how far the weights are off their spaces
    wrong: list[str] = field(default_factory=list)


def runs_in(paths: Sequence[Path]) -> list[Path]:
    """The records of runs: given directly, by their checkpoints, or as folders that contain them."""
    found: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
        if path.is_file() and not is_packed(path) and path.suffix not in (".jsonl", ".ckpt"):
            raise ValueError(f"{path} is neither a record (.jsonl, {SUFFIX}) nor a checkpoint (.ckpt)")
        files = [path] if path.is_file() else below(path, ".jsonl", ".ckpt", SUFFIX)
        files = [p for p in files if p == path or p.suffix != ".jsonl" or not foreign(p)]
        found |= {p if is_packed(p) else p.with_suffix(".jsonl") for p in files}
    if not found:
        raise ValueError(f"no records in {', '.join(map(str, paths))}; ghor run makes them")
    return sorted(found)


def foreign(path: Path) -> bool:
    """Whether a file of lines is of another program; of one that cannot be read `look` says why."""
    try:
        return not ours(path)
    except OSError:
        return False


def shown(path: Path, given: Sequence[Path]) -> str:
    """A record's path inside the folder that was given; the whole path if several were given."""
    folder = given[0] if given[0].is_dir() else given[0].parent
    return str(path.relative_to(folder) if len(given) == 1 else path).removesuffix(".jsonl")


def look_at(path: Path) -> dict[Path, Found]:
    """What is found of each run of a file."""
    if not is_packed(path):
        return {path: look(path)}
    try:
        runs = load(path)
    except (Damaged, OSError) as error:
        return {path: Found(record="damaged", wrong=[str(error)])}
    found = {}
    for run in runs:
        found[run.path] = Found(record="ok")
        describe(run, found[run.path])
        belongs(run.path, run.header["name"], found[run.path])
    return found


def look(path: Path) -> Found:
    """Look at a checkpoint, then at its record: in this order the record of a running run is never behind."""
    found, saved = Found(), path.with_suffix(".ckpt")
    run: Run | None = None
    values: dict[str, Any] | None = None
    try:
        values = checkpoint.load(saved) if there(saved) else None
        found.checkpoint = f"ok, epoch {values['epoch']}" if values else "-"
    except (Damaged, OSError) as error:
        found.checkpoint, found.wrong = "damaged", [str(error)]
    try:
        size = path.stat().st_size if there(path) else None
        run = read(path) if there(path) else None
        found.record = "missing" if size is None else "no whole line yet"
    except (Damaged, OSError) as error:
        found.record, found.wrong = "damaged", [*found.wrong, str(error)]
    if run is not None:
        found.record = "ok, last line half written" if size and run.size < size else "ok"
        describe(run, found)
    elif values is not None and found.record != "damaged":
        found.wrong.append(f"{saved} has no record beside it, {path.name}: {found.record}")
    belongs(path, run.header["name"] if run else None, found)
    belongs(saved, values["name"] if values else None, found)
    if run is not None and values is not None and not found.wrong:
        look_at_both(run, values, found)
    return found


def there(path: Path) -> bool:
    """Whether there is a file, or a link, which may lead nowhere."""
    return path.exists() or path.is_symlink()


def describe(run: Run, found: Found) -> None:
    """How many epochs a record has, and how far the weights are off their spaces at its end."""
    found.epochs = f"{len(run.epochs)} of {run.epochs_asked}"
    drifts = [x for line in run.epochs[-1:] for x in line.get("drift") or ()]
    found.off = "not finite" if None in drifts else f"{max(drifts):.1e}" if drifts else "-"


def belongs(file: Path, owner: str | None, found: Found) -> None:
    """Whether a file has the name of its run."""
    if owner is not None and owner != file.stem:
        found.wrong.append(f"{file} belongs to the run {owner}")


def look_at_both(run: Run, values: dict[str, Any], found: Found) -> None:
    """Whether the record continues the checkpoint, and how far the weights are off their spaces."""
    saved, lines, epoch = run.path.with_suffix(".ckpt"), len(run.epochs), values["epoch"]
    under_way = lines > epoch and checkpoint.load(saved)["epoch"] > epoch
    if lines not in (epoch - 1, epoch) and not under_way:
        found.wrong.append(f"{run.path} has {lines} epochs, its checkpoint is of epoch {epoch}")
    try:
        config = replace(Config.from_dict(run.header["config"]), device="cpu", compile=False)
        model = TASKS[config.experiment].network(config)
        model.load_state_dict(values["model"])
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        found.wrong.append(f"{saved}: {reason}; it was written by another version of ghor")
        return
    distances = drift(model, 1)
    found.off = f"{distances[0]:.1e}" if distances else "-"
    found.wrong += [f"{saved}: {line}" for line in off_spaces(model)]
