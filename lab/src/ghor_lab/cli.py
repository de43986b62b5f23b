"""The command line: `ghor run`, `report`, `check`, `pack`, `numbers`, `data`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import warnings
import webbrowser
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ghor import __version__

from . import data, plan
from .config import EXPERIMENTS, NETWORKS, READINGS, USUAL, Config
from .progress import progress
from .protocol import AUTHORS
from .record import Damaged, pack
from .runs import in_processes, on_ray, one_by_one
from .tables import counted, listed
from .train import Busy, forget

WIDE = 120  # columns of a table that goes to a file or a pipe
EXAMPLES = """
  ghor run pendulum                              the paper's table: 4 optimizers, 10 seeds
  ghor run pendulum --epochs 60 -j 2             a first look, two runs at a time
  ghor run mnist --seeds 0-9 --epochs 500 --protocol authors      as the authors
  ghor run mnist -o geometric-adam --lr 3e-4,1e-3,3e-3            a run for each rate
  ghor run mnist -o geometric-adam --epochs 1 --seeds 0-29 --start uniform,authors    how many are caught?
  ghor run text -o adamw -o heads-adam           a language model

Options of one line with several values, such as --lr 1e-3,1e-2, mean a run for every combination. The same
command resumes where it stopped; Ctrl-C, a kill or a full disk costs only the current epoch.
"""


def parser() -> argparse.ArgumentParser:
    """The commands and their options; those of `run` are the fields of `Config`."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        "ghor", description="The paper's experiments, from one command to one page."
    )
    top.add_argument("--version", action="version", version=f"ghor {__version__}, torch {torch.__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: Any, words: str, epilog: str = "") -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=words, description=words, epilog=epilog, formatter_class=raw)
        made.set_defaults(function=function)
        return made

    p = command("run", run, "Train every optimizer with every seed, with one record per run.", EXAMPLES)
    p.add_argument("experiment", choices=EXPERIMENTS)
    what = p.add_argument_group("the configuration, field by field")
    for field in dataclasses.fields(Config)[1:]:
        if field.metadata:
            names = [f"--{field.name.replace('_', '-')}", *(["-o"] if field.name == "optimizer" else [])]
            what.add_argument(*names, action="append", metavar="X", help=described(field))
    known = {experiment: assigned(options) for experiment, options in NETWORKS.items()}
    what.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help=f"Change the network: {known}."
    )
    what.add_argument(
        "--reading",
        action="append",
        default=[],
        choices=[name.replace(" ", "-") for name in READINGS],
        help="Learning rates of the pendulum, by default as-run: those with which the paper's numbers agree.",
    )
    what.add_argument(
        "--protocol", choices=["ours", "authors"], default="ours", help=f"authors: {assigned(AUTHORS)}."
    )
    where = p.add_argument_group("where, and how many at a time")
    where.add_argument(
        "--data", type=Path, help="Folder with data files, searched first; default: GHOR_DATA."
    )
    where.add_argument("--out", type=Path, help="Where records and checkpoints go; default: runs/EXPERIMENT.")
    where.add_argument("--restart", action="store_true", help="Remove what these runs have, and start anew.")
    where.add_argument(
        "-j", "--jobs", type=int, help="Runs at a time; default: as many as there are cores for."
    )
    where.add_argument("--executor", choices=["local", "ray"], default="local", help="ray: on a Ray cluster.")
    where.add_argument("--address", help="HOST:PORT of a running Ray cluster; default: start one here.")

    p = command(
        "report", report, "Make tables, figures and one page from records, beside the paper's numbers."
    )
    p.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    p.add_argument("--out", type=Path, help="Where to write it; default: report/ in the first folder.")
    p.add_argument("--brief", action="store_true", help="Show the verdict only; the tables are on the page.")
    p.add_argument("--open", action="store_true", help="Open the page in a browser.")
    p.add_argument(
        "--tables-only", action="store_true", help="Write the table of quantities and nothing else."
    )

    p = command(
        "check", check, "Are records and checkpoints as they were written, and the weights on their spaces?"
    )
    p.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="Folders, records or checkpoints.")

    p = command("pack", keep, "Pack the records of each folder into one file, a seventh of the size.")
    p.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    p.add_argument("--out", type=Path, help="Where to write it; default: beside the records.")

    p = command(
        "numbers",
        numbers,
        "Write the numbers in texts from records, by the templates in lab/results/numbers.",
    )
    p.add_argument("files", nargs="+", type=Path, metavar="FILE")
    p.add_argument("--results", type=Path, default=Path("lab/results"), help="default: lab/results")
    p.add_argument("--check", action="store_true", help="Change nothing; exit code 1 if something would.")

    p = command("data", find, "Find or download MNIST and Fashion-MNIST, and check every file.")
    p.add_argument("names", nargs="*", metavar="NAME", help="mnist, fashion-mnist; default: both.")
    p.add_argument("--data", type=Path, help="Folder that is searched first and receives downloads.")
    return top


def described(field: dataclasses.Field[Any]) -> str:
    """What the help says of a field."""
    about, default = field.metadata, field.default

    def shown(value: Any) -> str:
        if field.name == "seeds":
            return listed(value)
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    own = [f"{e} {shown(values[field.name])}" for e, values in USUAL.items() if field.name in values]
    words = [about["help"]]
    words += (
        [f"One of {', '.join(about['choices'])}."] if about["choices"] and field.name != "optimizer" else []
    )
    words += [f"For {', '.join(about['of'])}."] if len(about["of"]) < len(EXPERIMENTS) else []
    if field.name == "optimizer":
        words += [f"{', '.join(about['choices'][:7])}; of text: {', '.join(about['choices'][7:])}."]
    if default not in (None, dataclasses.MISSING):
        words += [f"Default: {'; '.join([shown(default), *own])}."]
    return " ".join(words).replace("%", "%%")


def assigned(options: dict[str, Any]) -> str:
    """start=authors, frame=random."""
    return ", ".join(f"{name}={value}" for name, value in options.items())


# -- the commands --------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Train; the exit code."""
    console = Console(stderr=True)
    given: dict[str, list[Any]] = {}
    for name in Config.__dataclass_fields__:
        texts = getattr(args, name, None) if name != "experiment" else None
        given[name] = [value for text in texts or () for value in plan.values(name, text)]
    if args.protocol == "authors":
        given = {
            **{name: [value] for name, value in AUTHORS.items()},
            **{k: v for k, v in given.items() if v},
        }
    readings = [name.replace("-", " ", 1) for name in args.reading]
    configs = plan.plan(args.experiment, given, readings, dict(map(plan.assigned, args.set)))
    cores = os.cpu_count() or 1
    jobs = min(len(configs), max(1, cores // configs[0].threads)) if args.jobs is None else args.jobs
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {jobs}")
    if args.address is not None and args.executor == "local":
        raise ValueError("--address is for --executor ray")
    folder = args.out if args.out is not None else Path("runs") / args.experiment
    if args.restart:
        for config in configs:
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


def report(args: argparse.Namespace) -> int:
    """Write the page."""
    from .report import report, tables_only

    if args.tables_only:
        for path in tables_only(args.folders, args.out):
            print(path)
        return 0
    page = report(args.folders, args.out, output(), args.brief)
    if args.open and not webbrowser.open(page.resolve().as_uri()):
        print("no browser was found to open the page with", file=sys.stderr)
    return 0


def check(args: argparse.Namespace) -> int:
    """Look at runs."""
    from .check import look_at, runs_in, table

    found = {name: each for path in runs_in(args.paths) for name, each in look_at(path).items()}
    screen, console = output(), Console(stderr=True)
    screen.print(table(found).rich(screen.width))
    for line in (line for each in found.values() for line in each.wrong):
        fail(console, line)
    wrong = sum(bool(each.wrong) for each in found.values())
    print(f"{counted(len(found), 'run')}, {f'{wrong} with errors' if wrong else 'as written'}")
    return 1 if wrong else 0


def keep(args: argparse.Namespace) -> int:
    """Pack records."""
    for folder in args.folders:
        print(pack(folder, args.out))
    return 0


def numbers(args: argparse.Namespace) -> int:
    """Write numbers into texts."""
    from .numbers import write

    changed, blocks = write(args.files, args.results, args.check)
    for line in changed:
        print(f"{line}: the records say otherwise" if args.check else f"{line}: written")
    if not changed:
        print(f"{counted(blocks, 'block')} {'agrees' if blocks == 1 else 'agree'} with the records")
    return 1 if changed and args.check else 0


def find(args: argparse.Namespace) -> int:
    """Find data."""
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
    except (Busy, Damaged, OSError) as error:
        fail(console, error)
        return 1
    except ValueError as error:
        fail(console, error)
        return 2
    except KeyboardInterrupt:
        say(console, "stopped.")
        return 130
