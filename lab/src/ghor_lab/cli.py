"""The command line: `ghor run`, `report`, `check`, `pack`, `numbers`, `data`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import warnings
import webbrowser
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ghor import __version__

from . import data, plan, record
from .config import EXPERIMENTS, NETWORKS, PAPER, READINGS, TEXT, Config
from .progress import progress
from .protocol import AUTHORS
from .runs import in_processes, on_ray, one_by_one
from .tables import counted, listed
from .train import Busy, forget

WIDE = 120  # columns of a table that goes to a file or a pipe
PATH: dict[str, Any] = {"type": Path, "metavar": "PATH"}
FOLDER: dict[str, Any] = {"type": Path, "metavar": "FOLDER"}
READING = {name.replace(" ", "-"): name for name in READINGS}


def parser() -> ArgumentParser:
    """The commands; what their functions say of themselves is what their help says."""
    top = ArgumentParser("ghor", description="The paper's experiments, from one command to one page.")
    top.add_argument("--version", action="version", version=f"ghor {__version__}, torch {torch.__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    made = {}
    for function in (run, report, check, pack, numbers, find):
        first, _, more = str(function.__doc__).partition("\n\n")
        made[function] = commands.add_parser(
            "data" if function is find else function.__name__,
            help=first,
            description=first,
            epilog=more.replace("\n    ", "\n").strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made[function].set_defaults(function=function)
    options_of_run(made[run])

    add = made[report].add_argument
    add("folders", nargs="+", help="Folders with records; those below them count, too.", **FOLDER)
    add("--out", help="Where to write it; default: report/ in the first folder.", **FOLDER)
    add("--brief", action="store_true", help="Show the verdict only; the tables are on the page.")
    add("--open", action="store_true", help="Open the page in a browser.")
    add("--tables-only", action="store_true", help="Write the tables of quantities and runs, nothing else.")

    made[check].add_argument("paths", nargs="+", help="Folders, records or checkpoints.", **PATH)

    made[pack].add_argument("folders", nargs="+", help="Folders with records.", **FOLDER)
    made[pack].add_argument("--out", help="Where to write the file; default: beside the records.", **FOLDER)

    add, where = made[numbers].add_argument, Path("lab/results")
    add("files", nargs="+", help="Texts, such as README.md docs/*.md.", **PATH)
    add("--results", default=where, help=f"The records and templates; default: {where}.", **FOLDER)
    add("--check", action="store_true", help="Change nothing; exit code 1 if something would.")

    add = made[find].add_argument
    add("names", nargs="*", metavar="NAME", help="mnist, fashion-mnist; default: both.")
    add("--data", help="A folder that is searched first and receives downloads.", **FOLDER)
    return top


def options_of_run(p: ArgumentParser) -> None:
    """The fields of `Config`, and where and how to run."""
    p.usage = "ghor run EXPERIMENT [options]"
    p.add_argument("experiment", choices=EXPERIMENTS, metavar="EXPERIMENT", help=f"{', '.join(EXPERIMENTS)}.")
    words = "what to train: options with several values, such as 1e-3,1e-2, mean a run for each combination"
    add = p.add_argument_group(words).add_argument
    for field in dataclasses.fields(Config)[1:]:
        if field.metadata:
            names = [f"--{field.name.replace('_', '-')}", *(["-o"] if field.name == "optimizer" else [])]
            add(*names, action="extend", type=plan.reader(field), metavar="X", help=described(field))
    networks = [f"{name}: {assigned(NETWORKS[name])}" for name in EXPERIMENTS if name != "fashion-mnist"]
    several: dict[str, Any] = {"action": "append", "default": []}
    add(
        "--set",
        type=plan.assigned,
        metavar="NAME=VALUE",
        help=f"The network. {'; '.join(networks)}.",
        **several,
    )
    words = "Learning rates of the pendulum, by default as-run: those with which the paper's numbers agree."
    add("--reading", choices=READING, help=words, **several)
    add("--protocol", choices=["ours", "authors"], default="ours", help=f"authors: {assigned(AUTHORS)}.")
    add = p.add_argument_group("where, and how many at a time").add_argument
    add("--data", help="Searched first for images; default: GHOR_DATA, then a cache.", **FOLDER)
    add("--out", help="For records and checkpoints; default: runs/EXPERIMENT.", **FOLDER)
    add("--restart", action="store_true", help="Remove what these runs have, and start anew.")
    add("-j", "--jobs", type=int, metavar="N", help="Runs at a time; default: as there are cores for.")
    add("--executor", choices=["local", "ray"], default="local", help="ray: on a Ray cluster.")
    add("--address", metavar="HOST:PORT", help="A running Ray cluster; default: start one here.")


def described(field: dataclasses.Field[Any]) -> str:
    """What the help says of a field."""
    about = field.metadata

    def shown(value: Any) -> str:
        if field.name == "seeds":
            return listed(value)
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    words = [about["help"]]
    if field.name == "optimizer":
        others = [name for name in about["choices"] if name not in (*PAPER, *TEXT)]
        words += [f"Of the paper: {', '.join(PAPER)}; beside them: {', '.join(others)}."]
        words += [f"Of text: {', '.join(TEXT)}. Default: all of the paper, or of text."]
    elif about["choices"]:
        words += [f"One of {', '.join(about['choices'])}."]
    if len(about["of"]) < len(EXPERIMENTS):
        words += [f"For {', '.join(about['of'])}."]
    if field.default not in (None, dataclasses.MISSING):
        own = [f"{experiment} {shown(value)}" for experiment, value in about["usual"].items()]
        words += [f"Default: {'; '.join([shown(field.default), *own])}."]
    return " ".join(words).replace("%", "%%")


def assigned(options: dict[str, Any]) -> str:
    """start=authors, frame=random."""
    return ", ".join(f"{name}={value}" for name, value in options.items())


# -- the commands --------------------------------------------------------------------------------------------


def run(args: Namespace) -> int:
    """Train every optimizer with every seed, with one record per run.

    examples:
      ghor run pendulum                              the paper's table: 4 optimizers, 10 seeds
      ghor run pendulum --epochs 60 -j 2             a first look, two runs at a time
      ghor run mnist --seeds 0-9 --epochs 500 --protocol authors      as the authors
      ghor run mnist -o geometric-adam --lr 3e-4,1e-3,3e-3            a run for each rate
      ghor run mnist -o geometric-adam --epochs 1 --seeds 0-29 --start uniform,authors    how many are caught?
      ghor run text -o adamw -o heads-adam           a language model

    The same command resumes where it stopped; Ctrl-C, a kill or a full disk costs only the current epoch.
    """
    console = Console(stderr=True)
    given = {
        f.name: values for f in dataclasses.fields(Config)[1:] if (values := getattr(args, f.name, None))
    }
    if args.protocol == "authors":
        given = {name: [value] for name, value in AUTHORS.items()} | given
    configs = plan.plan(args.experiment, given, [READING[x] for x in args.reading], dict(args.set))
    cores = os.cpu_count() or 1
    jobs = min(len(configs), max(1, cores // configs[0].threads)) if args.jobs is None else args.jobs
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {jobs}")
    if args.address is not None and args.executor == "local":
        raise ValueError("--address is for --executor ray")
    folder = args.out if args.out is not None else Path("runs") / args.experiment
    for config in configs if args.restart else ():
        forget(folder / f"{config.name}.jsonl")
    try:
        with progress(console, configs) as show:
            if args.executor == "ray":
                left = on_ray(configs, folder, args.data, show, jobs, args.address)
            elif jobs > 1:
                left = in_processes(configs, folder, args.data, show, jobs)
            else:
                left = one_by_one(configs, folder, args.data, show)
    except KeyboardInterrupt:
        say(console, "stopped. The same command resumes from the last finished epoch.")
        return 130
    except OSError as error:
        fail(console, error)
        say(console, "Finished epochs are safe: once this is fixed, the same command resumes there.")
        return 1
    for line in left:
        say(console, f"left: {line}")
    say(console, f"records: {folder}   next: ghor report {folder}")
    return 1 if left else 0


def report(args: Namespace) -> int:
    """Make tables, figures and one page from records, beside the paper's numbers.

    example:
      ghor report runs/pendulum runs/mnist --open
    """
    from .report import report, tables_only

    if args.tables_only:
        print(*tables_only(args.folders, args.out), sep="\n")
        return 0
    page = report(args.folders, args.out, output(), args.brief)
    if args.open and not webbrowser.open(page.resolve().as_uri()):
        print("no browser was found to open the page with", file=sys.stderr)
    return 0


def check(args: Namespace) -> int:
    """Are records and checkpoints as they were written, and the weights on their spaces?

    The exit code is 1 if one is not.
    """
    from .check import look_at, runs_in, table

    found = {name: each for path in runs_in(args.paths) for name, each in look_at(path).items()}
    screen, console = output(), Console(stderr=True)
    screen.print(table(found).rich(screen.width))
    for line in (line for each in found.values() for line in each.wrong):
        fail(console, line)
    wrong = sum(bool(each.wrong) for each in found.values())
    print(f"{counted(len(found), 'run')}, {f'{wrong} with errors' if wrong else 'as written'}")
    return 1 if wrong else 0


def pack(args: Namespace) -> int:
    """Pack the records of each folder into one file, a sixth of the size.

    `ghor report` and `ghor check` read it like the records. A run resumes only from its own record.
    """
    print(*(record.pack(folder, args.out) for folder in args.folders), sep="\n")
    return 0


def numbers(args: Namespace) -> int:
    """Write the numbers in texts from records, by the templates in lab/results/numbers.

    A number in a text stands between <!-- numbers: NAME --> and <!-- /numbers -->, and NAME.jinja says how it
    follows from the records.
    """
    from .numbers import write

    changed, blocks = write(args.files, args.results, args.check)
    for line in changed:
        print(f"{line}: the records say otherwise" if args.check else f"{line}: written")
    if not changed:
        print(f"{counted(blocks, 'block')} {'agrees' if blocks == 1 else 'agree'} with the records")
    return 1 if changed and args.check else 0


def find(args: Namespace) -> int:
    """Find or download MNIST and Fashion-MNIST, and check every file."""
    for name in args.names or list(data.DATASETS):
        if name not in data.DATASETS:
            raise ValueError(f"unknown data set {name!r}; there are {', '.join(data.DATASETS)}")
        images = data.load(data.DATASETS[name], args.data)
        counts = len(images.train_labels), len(images.test_labels)
        where = ", ".join(map(str, images.folders))
        print(f"{name}: {counts[0]} training and {counts[1]} test images, checked, in {where}")
    return 0


# -- words ---------------------------------------------------------------------------------------------------


def output() -> Console:
    """Standard output, wide enough for tables if it is a file or a pipe."""
    console = Console()
    if not console.is_terminal:
        console.width = max(WIDE, console.width)
    return console


def say(console: Console, text: object, style: str = "") -> None:
    """A line as it is, whatever brackets and numbers are in it."""
    console.print(text, markup=False, highlight=False, style=style, soft_wrap=True)


def fail(console: Console, error: object) -> None:
    """An error in words: what the system says, with the file."""
    named = isinstance(error, OSError) and error.filename and error.strerror
    text = f"{error.filename}: {error.strerror}" if named else error  # type: ignore[attr-defined]
    say(console, f"error: {text}", "red")


def main(arguments: list[str] | None = None) -> int:
    """Do a command; the exit code: 2 for a bad command, 1 for a failure."""
    args = parser().parse_args(arguments)
    console = Console(stderr=True)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *place: say(console, f"warning: {message}", "yellow")
            code: int = args.function(args)
            return code
    except (Busy, record.Damaged, OSError) as error:
        fail(console, error)
        return 1
    except ValueError as error:
        fail(console, error)
        return 2
    except KeyboardInterrupt:
        say(console, "stopped.")
        return 130
