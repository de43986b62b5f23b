"""Progress of the runs: bars in a terminal, lines elsewhere; loss and time left, per run and in total."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .config import Config
from .runs import Show
from .tables import counted

EVERY = 10.0  # seconds between two lines of progress where there is no terminal
DAY = 24 * 3600.0  # the pace is that of all epochs so far, however long one takes


def found(line: dict[str, Any]) -> str:
    """Loss and accuracy, or held-out loss, of an epoch; one that is not finite is null in a record."""
    losses = {key: line[key] for key in ("loss", "held_out") if key in line}
    means = {k: sum(math.nan if x is None else x for x in v) / len(v) for k, v in losses.items()}
    accuracy = f", {line['test_accuracy'][0]:.2f} %" if "test_accuracy" in line else ""
    held_out = f", held out {means['held_out']:.4f}" if "held_out" in means else ""
    return f"loss {means['loss']:.4f}{accuracy}{held_out}"


@contextmanager
def progress(console: Console, configs: list[Config]) -> Iterator[Show]:
    """A bar for every run under way and one for all epochs of this command, and a line for each finished run.

    Where there is no terminal, a line now and then stands for the bars.
    """
    columns = (TextColumn("{task.description}"), BarColumn(14), MofNCompleteColumn(), TimeRemainingColumn())
    note = TextColumn("{task.fields[note]}")
    terminal, several = console.is_terminal, len({config.label for config in configs}) > 1
    bars = Progress(*columns, note, console=console, speed_estimate_period=DAY, disable=not terminal)
    total = sum(config.epochs for config in configs)
    everything = bars.add_task(counted(len(configs), "run"), total=total, note="")
    last, tasks = dict[str, int](), dict[str, TaskID]()
    written = console.get_time()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(config: Config, epoch: int, line: dict[str, Any]) -> None:
        nonlocal written
        seeds = f"{config.seeds[0]}-{config.seeds[-1]}" if len(config.seeds) > 1 else f"{config.seeds[0]}"
        name = f"{config.optimizer} {seeds}" + (f", {config.label}" if several else "")
        if config.name not in last:  # what is there from before is not this command's
            last[config.name] = epoch - 1
            bars.update(everything, total=(bars.tasks[0].total or 0) - (epoch - 1))
            tasks[config.name] = bars.add_task(name, total=config.epochs, note="")
        if last[config.name] == epoch:
            return
        bars.advance(everything, epoch - last[config.name])
        bars.update(tasks[config.name], completed=epoch, note=found(line))
        last[config.name] = epoch
        if epoch >= config.epochs:
            bars.update(tasks[config.name], visible=False)
            say(f"{name}: {counted(epoch, 'epoch')}, {found(line)}")
        elif not terminal and console.get_time() - written > EVERY:
            written, whole = console.get_time(), bars.tasks[0]
            left = f", {clock(whole.time_remaining)} left" if whole.time_remaining else ""
            all_of_them = f"{whole.completed:g} of {counted(round(whole.total or 0), 'epoch')}{left}"
            say(f"{name}: epoch {epoch} of {config.epochs}, {found(line)}; all: {all_of_them}")

    if not terminal:
        say(f"{counted(len(configs), 'run')}, {counted(total, 'epoch')}")
    with bars:
        yield show


def clock(seconds: float) -> str:
    """59 -> "0:00:59"."""
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"
