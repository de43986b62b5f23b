"""Progress of the runs: bars in a terminal, lines elsewhere; loss and time left, per run and in total."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from .config import Config
from .runs import Show
from .tables import counted

EVERY = 10.0  # seconds between two lines of progress where there is no terminal


class Pace:
    """How far all runs are, and how long the rest will take at the pace since each was first seen."""

    def __init__(self, configs: list[Config]) -> None:
        self.began = 0.0
        self.first: dict[str, int] = {}  # epochs when a run was first seen: they began before that
        self.last: dict[str, int] = {}
        self.total = sum(config.epochs for config in configs)

    def see(self, config: Config, epoch: int) -> bool:
        """Note the epoch; returns whether it is new."""
        new = self.last.get(config.name) != epoch
        self.began = self.began or time.monotonic()
        self.first.setdefault(config.name, epoch)
        self.last[config.name] = epoch
        return new

    @property
    def done(self) -> int:
        return sum(self.last.values())

    def left(self) -> str:
        fresh, rest = self.done - sum(self.first.values()), self.total - self.done
        return clock((time.monotonic() - self.began) / fresh * rest) if fresh and rest else ""


def clock(seconds: float) -> str:
    """Remaining time as "0:00:59 left"."""
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02} left"


def found(line: dict[str, Any]) -> str:
    """Loss and accuracy, or held-out loss, of an epoch; one that is not finite is null in a record."""
    losses = {key: line[key] for key in ("loss", "held_out") if key in line}
    means = {k: sum(math.nan if x is None else x for x in v) / len(v) for k, v in losses.items()}
    accuracy = f", {line['test_accuracy'][0]:.2f} %" if "test_accuracy" in line else ""
    held_out = f", held out {means['held_out']:.4f}" if "held_out" in means else ""
    return f"loss {means['loss']:.4f}{accuracy}{held_out}"


@contextmanager
def progress(console: Console, configs: list[Config]) -> Iterator[Show]:
    """A bar for every active run and one for all of them; occasional lines if there is no terminal."""
    shown = bars if console.is_terminal else lines
    yield from shown(console, configs, Pace(configs))


def bars(console: Console, configs: list[Config], pace: Pace) -> Iterator[Show]:
    """For a terminal. A finished run becomes a line above the bars."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(14),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    several = len({config.label for config in configs}) > 1
    with Progress(*columns, console=console) as shown:
        everything = shown.add_task(counted(len(configs), "run"), total=pace.total, note="")
        tasks: dict[str, Any] = {}

        def show(config: Config, epoch: int, line: dict[str, Any]) -> None:
            if not pace.see(config, epoch):
                return
            first, last = config.seeds[0], config.seeds[-1]
            name = f"{config.optimizer} {first if first == last else f'{first}-{last}'}"
            name += f", {config.label}" if several else ""
            if epoch >= config.epochs:
                text = f"{name}: {counted(epoch, 'epoch')}, {found(line)}"
                shown.console.print(text, markup=False, highlight=False, soft_wrap=True)
                if config.name in tasks:
                    shown.remove_task(tasks.pop(config.name))
            else:
                if config.name not in tasks:
                    tasks[config.name] = shown.add_task(name, total=config.epochs, note="")
                left = clock(line["seconds"] * (config.epochs - epoch))
                shown.update(tasks[config.name], completed=epoch, note=f"{found(line)}, {left}")
            shown.update(everything, completed=pace.done, note=pace.left())

        yield show


def lines(console: Console, configs: list[Config], pace: Pace) -> Iterator[Show]:
    """For a file or a pipe: a line for every finished run, and one now and then."""
    written = time.monotonic()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(config: Config, epoch: int, line: dict[str, Any]) -> None:
        nonlocal written
        if pace.see(config, epoch) and (time.monotonic() - written > EVERY or epoch >= config.epochs):
            written = time.monotonic()
            everything = ", ".join(
                filter(None, [f"{pace.done} of {counted(pace.total, 'epoch')}", pace.left()])
            )
            say(f"{config.name}: epoch {epoch} of {config.epochs}, {found(line)}; all: {everything}")

    say(f"{counted(len(configs), 'run')}, {counted(pace.total, 'epoch')}")
    yield show
