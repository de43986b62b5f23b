"""`ghor check`: are the files of runs as they were written, and the weights on their spaces?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import checkpoint
from .config import Config
from .files import below
from .record import SUFFIX, Damaged, Run, load, ours, read
from .tables import Table, plain
from .tasks import task_of
from .tasks.task import on_spaces


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
    try:
        runs = load(path)
    except (Damaged, OSError) as error:
        return {path: Found(record="damaged", wrong=[str(error)])}
    found = {}
    for run in runs:
        found[run.path] = describe(run, Found(record="ok"))
        belongs(run.path, run.header["name"], found[run.path])
    return found


def look(path: Path) -> Found:
    """Look at a checkpoint, then at its record: in this order the record of a running run is never behind."""
    found, saved = Found(), path.with_suffix(".ckpt")
    run: Run | None = None
    values: dict[str, Any] | None = None
    try:
        if saved.exists() or saved.is_symlink():
            values = checkpoint.load(saved)
            found.checkpoint = f"ok, epoch {values['epoch']}"
    except (Damaged, OSError) as error:
        found.checkpoint, found.wrong = "damaged", [str(error)]
    try:
        found.record = "missing"
        if path.exists() or path.is_symlink():
            size, run = path.stat().st_size, read(path)
            found.record = "ok" if run else "no whole line yet"
            if run and run.size < size:
                found.record = "ok, last line half written"
    except (Damaged, OSError) as error:
        found.record, found.wrong = "damaged", [*found.wrong, str(error)]
    if run is not None:
        describe(run, found)
        belongs(path, run.header["name"], found)
    elif values is not None and found.record != "damaged":
        found.wrong.append(f"{saved} has no record beside it, {path.name}: {found.record}")
    if values is not None:
        belongs(saved, values["name"], found)
    if run is not None and values is not None and not found.wrong:
        look_at_both(run, values, found)
    return found


def describe(run: Run, found: Found) -> Found:
    """How many epochs a record has, and how far the weights are off their spaces at its end."""
    found.epochs = f"{len(run.epochs)} of {run.asked}"
    drifts = [x for line in run.epochs[-1:] for x in line.get("drift") or ()]
    found.off = "not finite" if None in drifts else f"{max(drifts):.1e}" if drifts else "-"
    return found


def belongs(file: Path, owner: str, found: Found) -> None:
    """Whether a file has the name of its run."""
    if owner != file.stem:
        found.wrong.append(f"{file} belongs to the run {owner}")


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
    headings = ("run", "epochs", "record", "checkpoint", "off the space")
    rows = [[plain(p.stem), f.epochs, f.record, f.checkpoint, f.off] for p, f in found.items()]
    return Table("", headings, rows, headings)
