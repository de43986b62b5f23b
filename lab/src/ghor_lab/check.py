"""`ghor check`: are the files of runs as they were written, and the weights on their spaces?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from . import checkpoint
from .config import Config
from .files import below
from .record import SUFFIX, Damaged, Run, load, ours, read
from .tables import Table, plain
from .tasks import task_of
from .tasks.task import on_spaces

T = TypeVar("T")
HEADINGS = ("run", "epochs", "record", "checkpoint", "off the space")


@dataclass
class Found:
    """A run described in words, and what is wrong with it."""

    epochs: str = "-"
    record: str = "ok"
    checkpoint: str = "-"
    off: str = "-"  # how far the weights are off their spaces
    wrong: list[str] = field(default_factory=list)

    def describe(self, run: Run) -> Found:
        """How many epochs a record has, and how far the weights are off their spaces at its end."""
        self.epochs = f"{len(run.epochs)} of {run.asked}"
        drifts = [x for line in run.epochs[-1:] for x in line.get("drift") or ()]
        self.off = "not finite" if None in drifts else f"{max(drifts):.1e}" if drifts else "-"
        return self

    def opened(self, file: Path, reader: Callable[[Path], T]) -> tuple[T | None, str]:
        """What a file has, and a word for its state; what is wrong with it is written down."""
        if not file.exists() and not file.is_symlink():
            return None, "missing"
        try:
            return reader(file), "ok"
        except (Damaged, OSError) as error:
            self.wrong.append(str(error))
            return None, "damaged"


def runs_in(paths: Sequence[Path]) -> list[Path]:
    """The records of runs: given directly, by their checkpoints, or as folders that contain them."""
    found: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
        if path.is_file() and not path.name.endswith((SUFFIX, ".jsonl", ".ckpt")):
            raise ValueError(f"{path} is neither a record (.jsonl, {SUFFIX}) nor a checkpoint (.ckpt)")
        files = [path] if path.is_file() else below(path, ".jsonl", ".ckpt", SUFFIX)
        files = [p for p in files if p == path or p.suffix != ".jsonl" or not p.is_file() or ours(p)]
        found |= {p if p.name.endswith(SUFFIX) else p.with_suffix(".jsonl") for p in files}
    if not found:
        raise ValueError(f"no records in {', '.join(map(str, paths))}; ghor run makes them")
    return sorted(found)


def look_at(path: Path) -> dict[Path, Found]:
    """What is found of each run of a file."""
    if not path.name.endswith(SUFFIX):
        return {path: look(path)}
    whole = Found()
    runs, whole.record = whole.opened(path, load)
    return {path: whole} if runs is None else {run.path: Found().describe(run) for run in runs}


def look(path: Path) -> Found:
    """What is found of a record and the checkpoint beside it."""
    found, saved = Found(), path.with_suffix(".ckpt")
    values, state = found.opened(saved, checkpoint.load)
    found.checkpoint = f"ok, epoch {values['epoch']}" if values else "-" if state == "missing" else state
    size = path.stat().st_size if path.is_file() else 0  # it may grow while it is read
    run, found.record = found.opened(path, read)
    for file, owner in ((path, run and run.header["name"]), (saved, values and values["name"])):
        if owner and owner != file.stem:
            found.wrong.append(f"{file} belongs to the run {owner}")
    if run is not None:
        found.describe(run)
        if len(run.raw) < size:
            found.record = "ok, last line half written"
        if values and not found.wrong:
            look_at_both(run, values, found)
    elif found.record != "damaged":
        found.record = found.record if found.record == "missing" else "no whole line yet"
        if values:
            found.wrong.append(f"{saved} has no record beside it, {path.name}: {found.record}")
    return found


def look_at_both(run: Run, values: dict[str, Any], found: Found) -> None:
    """Whether the record continues the checkpoint, and the weights are on their spaces."""
    saved, lines, epoch = run.path.with_suffix(".ckpt"), len(run.epochs), values["epoch"]
    under_way = lines > epoch and checkpoint.load(saved)["epoch"] > epoch
    if lines not in (epoch - 1, epoch) and not under_way:
        found.wrong.append(f"{run.path} has {lines} epochs, its checkpoint is of epoch {epoch}")
    try:
        task = task_of(replace(Config.from_dict(run.header["config"]), device="cpu"))
        task.model.load_state_dict(values["model"])
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        found.wrong.append(f"{saved}: {reason}; it was written by another version of ghor")
        return
    for name, p, space in on_spaces(task.model):
        distance = float(space.residual(p.detach().double()).max())
        if not distance <= float(space.tolerance(p.detach()).max()):
            found.wrong.append(f"{saved}: {name} is {distance:.1e} off {space}")


def table(found: dict[Path, Found]) -> Table:
    """A row for each run."""
    rows = [[plain(p.stem), f.epochs, f.record, f.checkpoint, f.off] for p, f in found.items()]
    return Table("", HEADINGS, rows, HEADINGS)
