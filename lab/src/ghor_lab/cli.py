"""The command line: `ghor run`, `caught`, `report`, `pack`, `numbers`, `data`, `check`, `bench`."""

from __future__ import annotations

import os
import sys
import warnings
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Column, Table

from ghor import __version__

from . import data as datasets
from . import execute, plan
from .check import look_at, runs_in, shown
from .config import EXPERIMENTS, FURTHER, OPTIMIZERS, READINGS, Config
from .files import store
from .options import (
    DATA,
    DATA_ELSE,
    FLAG,
    HOW,
    JOBS,
    NETWORK,
    NETWORKS,
    RATE,
    THREADS,
    WHAT,
    WHERE,
    Plain,
    PlainGroup,
    option,
)
from .pack import pack_all
from .pool import counted, pool
from .progress import progress
from .record import Damaged, Run, read
from .text.methods import METHODS
from .train import Busy, check_device, forget

app = typer.Typer(
    cls=PlainGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Experiment = StrEnum("Experiment", {name: name for name in EXPERIMENTS})  # type: ignore[misc]
DataSet = StrEnum("DataSet", {name: name for name in datasets.DATASETS})  # type: ignore[misc]
OptimizerName = StrEnum("OptimizerName", {name: name for name in (*OPTIMIZERS, *FURTHER, *METHODS)})  # type: ignore[misc]
Reading = StrEnum("Reading", {name.replace(" ", "-"): name.replace(" ", "-") for name in READINGS})  # type: ignore[misc]


class Executor(StrEnum):
    """Where runs are done."""

    local = "local"
    ray = "ray"


class Protocol(StrEnum):
    """Whose set-up to use."""

    ours = "ours"
    authors = "authors"


WIDE = 120  # columns of a table that goes to a file or a pipe


def version(value: bool) -> None:
    """Print the versions and exit."""
    if value:
        print(f"ghor {__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def root(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=version, is_eager=True, help="Show the versions of ghor and torch."
        ),
    ] = False,
) -> None:
    """Optimizers on homogeneous spaces: the paper's experiments, from one command to tables and figures.

    \b
    ghor run pendulum           train, or continue where it stopped
    ghor check runs/pendulum    are files complete, and weights on their space?
    ghor report runs/pendulum   tables and figures beside the paper's
    """


# -- run -----------------------------------------------------------------------------------------------------


@app.command(cls=Plain)
def run(
    experiment: Annotated[
        Experiment, typer.Argument(metavar="EXPERIMENT", help="One of pendulum, mnist, fashion-mnist, text.")
    ],
    optimizer: Annotated[
        list[OptimizerName] | None,
        option(
            f"One of {', '.join(OPTIMIZERS)} (not for the pendulum), and beyond the paper "
            f"{', '.join(FURTHER)}; for text one of {', '.join(METHODS)}. May be repeated.",
            "NAME",
            WHAT,
            "all of the paper's, or of text",
            names=("--optimizer", "-o"),
        ),
    ] = None,
    seeds: Annotated[
        str | None, option("Such as 0-9 or 0,3,5.", "LIST", WHAT, "pendulum 0-9, others 0")
    ] = None,
    epochs: Annotated[
        int | None,
        option(
            "A larger number makes a finished run longer. The paper has 1000 and 500. Not for text.",
            "N",
            WHAT,
            "pendulum 1000, others 25",
        ),
    ] = None,
    steps: Annotated[
        int | None, option("Steps of the language model.", "N", WHAT, f"text {plan.STEPS}")
    ] = None,
    sweep: Annotated[
        bool,
        option(
            "For text: search for the best rate and weight decay of every method, then run other seeds, no "
            "warm-up and equal time. What is most useful comes first.",
            FLAG,
            WHAT,
            names=("--sweep",),
        ),
    ] = False,
    reading: Annotated[
        list[Reading] | None,
        option(
            "Learning rates of the pendulum. as-run: 1e-3 for geometric-adam and 1e-2 for the others, with "
            "which the paper's numbers agree; as-stated: 1e-4 for all, as its table says; equal-1e-3, "
            "equal-1e-2: this rate for the two Adams alone. May be repeated.",
            "NAME",
            WHAT,
            "as-run",
        ),
    ] = None,
    lr: Annotated[
        float | None,
        option(
            f"{RATE} For text that of the matrices.", "X", WHAT, "see --reading, others 1e-3, text by method"
        ),
    ] = None,
    manifold_lr: Annotated[
        float | None, option("Learning rate of the weights on manifolds.", "X", WHAT, "as the others")
    ] = None,
    rest_lr: Annotated[
        float | None, option("For text: learning rate of what is not a matrix.", "X", WHAT, "3e-3")
    ] = None,
    weight_decay: Annotated[
        float | None,
        option(
            "Weight decay of adamw-anchor, towards where a weight started, and of the methods of text that "
            "have one.",
            "X",
            WHAT,
            "0.1",
        ),
    ] = None,
    batch_size: Annotated[
        int | None, option("Samples per step.", "N", WHAT, "pendulum 256, text 8, others 2048")
    ] = None,
    label: Annotated[
        str | None, option("What is special about these runs, for their names and tables.", "TEXT", WHAT)
    ] = None,
    protocol: Annotated[
        Protocol,
        option(
            "authors: short for --start authors --frame random --loss after, for mnist and fashion-mnist.",
            "ours|authors",
            HOW,
        ),
    ] = Protocol.ours,
    start: Annotated[
        str | None,
        option(
            "Initial weights on manifolds: uniform, or authors, the Q of LAPACK's QR of a normal matrix.",
            "NAME",
            HOW,
            "uniform",
        ),
    ] = None,
    frame: Annotated[
        str | None,
        option(
            "How the frame above each starting weight is completed: closed-form, a function of the weight, "
            "or random.",
            "NAME",
            HOW,
            "closed-form",
        ),
    ] = None,
    loss: Annotated[
        str | None,
        option(
            "Record the training loss before or after each step, on its batch.", "before|after", HOW, "before"
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        option(
            "Steps in which the learning rate grows to its value, linearly.",
            "N",
            HOW,
            "text a tenth of its steps, others 0",
        ),
    ] = None,
    retraction: Annotated[
        str, option("How a weight takes its step: cayley or geodesic.", "NAME", HOW)
    ] = "cayley",
    section: Annotated[
        str, option("How frames are kept from step to step: auto, transported or implicit.", "NAME", HOW)
    ] = "auto",
    norm: Annotated[
        str | None,
        option(
            "Norm whose square scalar-moment-adam averages: canonical or frobenius.", "NAME", HOW, "canonical"
        ),
    ] = None,
    dtype: Annotated[str, option("float32 or float64.", "NAME", HOW)] = "float32",
    device: Annotated[str, option("Torch device, such as cpu or cuda.", "NAME", HOW)] = "cpu",
    threads: Annotated[int | None, option(THREADS, "N", HOW, "pendulum 1, others cores / jobs")] = None,
    compiled: Annotated[
        bool,
        option(
            "Layers as compiled C, where there is a compiler, or in torch alone. Text has none of these.",
            FLAG,
            HOW,
            names=("--compile/--no-compile",),
        ),
    ] = True,
    setting: Annotated[
        list[str] | None,
        option(NETWORKS, "NAME=VALUE", HOW, names=("--set",)),
    ] = None,
    data: Annotated[Path | None, option(DATA, "FOLDER", WHERE, DATA_ELSE)] = None,
    out: Annotated[
        Path | None, option("Where records and checkpoints go.", "FOLDER", WHERE, "runs/EXPERIMENT")
    ] = None,
    restart: Annotated[
        bool,
        option(
            "Remove the records and checkpoints of these runs, with --sweep of all that it compares, and "
            "start from scratch.",
            FLAG,
            WHERE,
            names=("--restart",),
        ),
    ] = False,
    jobs: Annotated[int, option(JOBS, "N", WHERE, names=("--jobs", "-j"))] = 1,
    executor: Annotated[
        Executor, option("local: on this machine; ray: on a Ray cluster.", "NAME", WHERE)
    ] = Executor.local,
    address: Annotated[
        str | None,
        option("Address of a running Ray cluster.", "HOST:PORT", WHERE, "start one on this machine"),
    ] = None,
) -> None:
    """Train every optimizer with every seed, with one record per run.

    The same command resumes where it stopped. Ctrl-C, a kill or a full disk
    costs only the current epoch.

    \b
    ghor run pendulum                    the paper's table: 4 optimizers, 10 seeds
    ghor run pendulum --epochs 60 -j 2   a first look, two runs at a time
    ghor run mnist --seeds 0-1           5 optimizers, 2 seeds, 25 epochs
    ghor run mnist --seeds 0-1 --epochs 100      the same runs, made longer
    ghor run mnist -o geometric-adam --set blocks=4 --label small
    ghor run mnist --seeds 0-9 --epochs 500 --protocol authors   as the authors
    ghor run text --sweep -j 2           a language model: 14 methods, tuned

    Under torchrun the processes share every batch of the transformer:

    \b
    torchrun --nproc-per-node 2 --no-python ghor run mnist
    """
    options: dict[str, Any] = dict(locals())
    for name in ("experiment", "threads", "setting", "data", "out", "restart", "jobs", "executor", "address"):
        del options[name]
    console = Console(stderr=True)
    with told(console, f"the same command{' without --restart' if restart else ''}"):
        if jobs < 1:
            raise ValueError(f"--jobs must be at least 1, got {jobs}")
        if executor == "local" and address is not None:
            raise ValueError("--address is for --executor ray")
        if address is not None and jobs > 1:
            raise ValueError(
                "a Ray cluster runs as many as it has cores for: not --jobs with --address, but --threads"
            )
        options["threads"] = plan.threads(experiment, threads, jobs)
        options["network"] = dict(plan.assigned(text) for text in setting or ())
        if experiment == "text":
            configs = plan.text(**options, data=data)
        else:
            configs = plan.paper(str(experiment), **options)
        folder = out if out is not None else Path("runs") / str(experiment)
        if execute.world_size() > 1 and (jobs > 1 or executor == "ray"):
            raise ValueError("torchrun's processes do one run together: not with --jobs or --executor ray")
        if execute.world_size() > 1 and experiment in ("pendulum", "text"):
            raise ValueError(
                f"{experiment}: its networks are too small to be sharded over processes: run it without "
                "torchrun"
            )

        def do(configs: list[Config], rank: int = 0, world: int = 1) -> list[str]:
            with progress(console, configs, rank) as show:
                if executor == "ray":
                    return execute.on_ray(configs, folder, data, show, jobs, address)
                if jobs > 1:
                    return execute.in_processes(configs, folder, data, show, jobs)
                return execute.one_by_one(configs, folder, data, show, rank, world)

        # only after everything that can be refused: the other processes would wait
        with execute.ranks() as (rank, world):
            if restart and executor == "local":
                check_device(device)  # before anything is removed
            if restart and rank == 0:
                anew(configs, folder, sweep)
            elif rank == 0:
                tell_of_other_threads(console, configs, folder)
            left = swept(configs, folder, do, console, restart) if sweep else do(configs, rank, world)
    if rank == 0:
        for line in left:
            console.print(f"left: {line}", markup=False, highlight=False, soft_wrap=True)
        last = f"records: {folder}   next: ghor report {folder}"
        console.print(last, markup=False, highlight=False, soft_wrap=True)
    if left:
        raise typer.Exit(1)


def anew(configs: list[Config], folder: Path, sweep: bool = False) -> None:
    """Forget these runs, and those that a sweep which begins with them would build on."""
    from .text.sweep import counted_in

    others = [run.path for run in counted_in(configs, runs_of(folder))] if sweep else []
    for path in dict.fromkeys([*(folder / f"{config.name}.jsonl" for config in configs), *others]):
        forget(path)


def swept(
    first: list[Config],
    folder: Path,
    do: Callable[[list[Config]], list[str]],
    console: Console,
    restart: bool = False,
) -> list[str]:
    """Do the runs of a sweep, stage by stage; returns what had to be left."""
    from .text.sweep import todo

    while True:
        words, configs = todo(first, runs_of(folder))
        if not configs:
            return []
        if restart:
            anew(configs, folder)  # what is left of them could not be read at the beginning
        console.print(f"{words}: {counted(len(configs), 'run')} to do", highlight=False)
        if left := do(configs):
            return left


def runs_of(folder: Path) -> list[Run]:
    """The records of a folder that can be read; a damaged one is reported by its own run."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        with suppress(Damaged, OSError):
            found.append(read(path))
    return [run for run in found if run is not None]


def tell_of_other_threads(console: Console, configs: list[Config], folder: Path) -> None:
    """Mention runs with other threads: whoever changed --jobs or the machine may want to continue them."""
    for line in execute.with_other_threads(configs, folder):
        console.print(line, markup=False, highlight=False, style="yellow", soft_wrap=True)


def output() -> Console:
    """Standard output, wide enough for tables if it is a file or a pipe."""
    console = Console()
    if not console.is_terminal:
        console.width = max(WIDE, console.width)
    return console


@contextmanager
def told(console: Console, resumes: str = "") -> Iterator[None]:
    """Turn errors that people can fix into messages; exit code 2 for a bad command, 1 for a failure.

    `resumes` says what goes on with training that was stopped, if anything was trained.
    """

    def say(error: object) -> None:
        console.print(f"error: {error}", markup=False, highlight=False, style="red", soft_wrap=True)

    def warn(message: object, *place: object) -> None:
        console.print(f"warning: {message}", markup=False, highlight=False, style="yellow", soft_wrap=True)

    try:
        with warnings.catch_warnings():
            warnings.showwarning = warn  # type: ignore[assignment]
            yield
    except KeyboardInterrupt:
        how = f" {resumes.capitalize()} resumes from the last finished epoch." if resumes else ""
        console.print(f"stopped.{how}", highlight=False)
        raise typer.Exit(130) from None
    except (Busy, Damaged) as error:
        say(error)
        raise typer.Exit(1) from None
    except ValueError as error:
        say(error)
        raise typer.Exit(2) from None
    except OSError as error:
        say(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error)
        if resumes:
            how = f"Finished epochs are safe: once this is fixed, {resumes} resumes there."
            console.print(how, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


@app.command(cls=Plain)
def caught(
    experiment: Annotated[
        list[DataSet] | None,
        typer.Argument(metavar="EXPERIMENT", help="mnist, fashion-mnist.", show_default="both"),
    ] = None,
    optimizer: Annotated[
        str,
        option(f"One of {', '.join((*OPTIMIZERS, *FURTHER))}.", "NAME", WHAT, names=("--optimizer", "-o")),
    ] = "geometric-adam",
    seeds: Annotated[str, option("Such as 0-9 or 0,3,5.", "LIST", WHAT)] = "0-9",
    lr: Annotated[float, option(RATE, "X", WHAT)] = 1e-3,
    manifold_lr: Annotated[
        float | None, option("Learning rate of the weights on manifolds.", "X", WHAT, "as the others")
    ] = None,
    warmup: Annotated[
        int, option("Steps of the runs with a linear warm-up; 0: none of these.", "N", WHAT)
    ] = 10,
    batch_size: Annotated[int, option("Samples per step.", "N", WHAT)] = 2048,
    dtype: Annotated[str, option("float32 or float64.", "NAME", HOW)] = "float32",
    threads: Annotated[int | None, option(THREADS, "N", HOW, "cores / jobs")] = None,
    compiled: Annotated[
        bool, option("Layers as compiled C, or in torch alone.", FLAG, HOW, names=("--compile/--no-compile",))
    ] = True,
    setting: Annotated[
        list[str] | None,
        option(NETWORK, "NAME=VALUE", HOW, names=("--set",)),
    ] = None,
    data: Annotated[Path | None, option(DATA, "FOLDER", WHERE, DATA_ELSE)] = None,
    out: Annotated[Path, option("Where records and the table go.", "FOLDER", WHERE)] = Path("runs/caught"),
    jobs: Annotated[int, option(JOBS, "N", WHERE, names=("--jobs", "-j"))] = 1,
) -> None:
    """Count the runs that are caught in the constant prediction by the end of their first epoch.

    Trains the first epoch of every seed with a uniform start or the authors',
    with a closed-form or a random frame (if the optimizer depends on it), and
    with a warm-up. The same command resumes where it stopped; with more seeds
    it adds theirs.

    \b
    ghor caught mnist --seeds 0-49 -j 2
    ghor caught mnist -o muon --manifold-lr 3e-3
    """
    from .caught import configurations, table

    console = Console(stderr=True)
    with told(console, "the same command"):
        if jobs < 1:
            raise ValueError(f"--jobs must be at least 1, got {jobs}")
        configs = configurations(
            [str(e) for e in experiment or ("mnist", "fashion-mnist")],
            optimizer,
            plan.parse_seeds(seeds),
            warmup,
            lr,
            manifold_lr=manifold_lr,
            batch_size=batch_size,
            dtype=dtype,
            compile=compiled,
            threads=threads if threads is not None else max(1, (os.cpu_count() or 1) // jobs),
            network=dict(plan.assigned(text) for text in setting or ()),
        )
        tell_of_other_threads(console, configs, out)
        with progress(console, configs, 0) as show:
            if jobs > 1:
                left = execute.in_processes(configs, out, data, show, jobs)
            else:
                left = execute.one_by_one(configs, out, data, show)
        asked = {config.name for config in configs}
        made = table("caught", pool([run for run in runs_of(out) if run.header["name"] in asked])[0])
        if made is not None:  # otherwise all of them were left
            store(made.csv().encode(), out / "caught.csv")
    screen = output()
    if made is not None:
        screen.print(made.rich(screen.width))
    for line in left:
        console.print(f"left: {line}", markup=False, highlight=False, soft_wrap=True)
    if left:
        raise typer.Exit(1)


# -- report, pack, data, check, bench ------------------------------------------------------------------------


@app.command(cls=Plain)
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Folders of records, such as runs/mnist.")
    ],
    out: Annotated[
        Path | None, option("Where to write it.", "FOLDER", default="report/ in the first folder")
    ] = None,
    brief: Annotated[
        bool, option("Show the verdict only; the tables are on the page.", FLAG, names=("--brief",))
    ] = False,
    show: Annotated[bool, option("Open the page in a browser.", FLAG, names=("--open",))] = False,
    only: Annotated[
        bool, option("Write the tables and nothing else.", FLAG, names=("--tables-only",))
    ] = False,
) -> None:
    """Make tables, figures and one page from records, beside the paper's numbers. Trains nothing.

    \b
    ghor report runs/pendulum --open
    ghor report runs/pendulum runs/mnist runs/fashion-mnist --out report
    """
    from .report import report as make
    from .report import write_tables

    console = Console(stderr=True)
    with told(console):
        if only:
            if brief or show:
                raise ValueError("--tables-only shows and draws nothing: not with --brief or --open")
            paths, left_out = write_tables(folders, out)
            for path in paths:
                print(path)
            for line in left_out:
                console.print(line, markup=False, highlight=False, style="yellow", soft_wrap=True)
            return
        page = make(folders, out, console=Console(), brief=brief)
        if show and not webbrowser.open(page.resolve().as_uri()):
            console.print("no browser was found to open the page with", highlight=False)


@app.command(cls=Plain)
def pack(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Folders of records, such as runs/mnist.")
    ],
    out: Annotated[
        Path | None, option("Where to write them.", "FOLDER", default="beside the records")
    ] = None,
) -> None:
    """Pack the records of a folder into one file for keeping; long or many runs take a seventh of the space.

    \b
    ghor pack runs/pendulum --out results/pendulum
    """
    with told(Console(stderr=True)):
        for path in pack_all(folders, out):
            print(path)


@app.command(cls=Plain)
def numbers(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Texts, such as README.md docs/*.md.")],
    results: Annotated[Path, option("The records.", "FOLDER")] = Path("lab/results"),
    check: Annotated[
        bool, option("Change nothing; exit code 1 if something would.", FLAG, names=("--check",))
    ] = False,
) -> None:
    """Write the numbers in texts from records, by the templates in lab/results/numbers. Trains nothing.

    \b
    ghor numbers README.md docs/*.md
    """
    from .numbers import count, write

    with told(Console(stderr=True)):
        changed, blocks = write(files, results, check), count(files)
    for line in changed:
        print(line if check else line.replace("the records say otherwise", "written"))
    if not changed:
        print(f"{counted(blocks, 'block')} {'agrees' if blocks == 1 else 'agree'} with the records")
    elif check:
        raise typer.Exit(1)


@app.command(cls=Plain)
def data(
    name: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="mnist, fashion-mnist.", show_default="both")
    ] = None,
    folder: Annotated[
        Path | None,
        option(DATA, "FOLDER", default=DATA_ELSE, names=("--data",)),
    ] = None,
) -> None:
    """Find or download the data sets and check every file against its SHA-256.

    ghor run does the same when it needs them.
    """
    with told(Console(stderr=True)):
        for each in name or list(datasets.DATASETS):
            images = datasets.load(each, folder)
            counts = len(images.train_labels), len(images.test_labels)
            where = ", ".join(map(str, images.folders))
            print(f"{each}: {counts[0]} training and {counts[1]} test images, checked, in {where}")


@app.command(cls=Plain)
def check(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH", help="Folders of runs, or single records and checkpoints.")
    ],
) -> None:
    """Check that every record and checkpoint is as it was written, and every weight on its space.

    Exit code 1 if something is wrong, 2 if a path does not exist.
    """
    with told(Console(stderr=True)):
        runs = runs_in(paths)
    table = Table(Column("run", overflow="fold"), "epochs", "record", "checkpoint", "off the space")
    wrong: list[list[str]] = []
    looked = {name: found for path in runs for name, found in look_at(path).items()}
    for path, found in looked.items():
        table.add_row(shown(path, paths), found.epochs, found.record, found.checkpoint, found.off)
        wrong += [found.wrong] if found.wrong else []
    screen, console = output(), Console(stderr=True)
    screen.print(table)
    for line in (line for lines in wrong for line in lines):
        console.print(f"error: {line}", markup=False, highlight=False, style="red", soft_wrap=True)
    how = (
        f"{len(wrong)} with errors"
        if wrong
        else "all as they were written"
        if len(looked) > 1
        else "as it was written"
    )
    screen.print(f"{counted(len(looked), 'run')}, {how}", highlight=False)
    if wrong:
        raise typer.Exit(1)


@app.command(cls=Plain)
def bench(
    rounds: Annotated[int, option("Interleaved rounds of every optimizer.", "N")] = 20,
    threads: Annotated[int | None, option("Threads that torch uses.", "N", default="all cores")] = None,
) -> None:
    """Time one step on the 336 weights of the paper's transformer, beside torch and geoopt."""
    from .bench import bench as measure

    with told(Console(stderr=True)):
        measure(Console(), rounds=rounds, threads=threads if threads is not None else os.cpu_count() or 1)


if __name__ == "__main__":
    sys.exit(app())
