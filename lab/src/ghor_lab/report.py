"""`ghor report`: tables, figures and one page from the records of runs, with the paper's numbers beside.

Nothing is trained. The folder `out` receives report.html, which needs no other file and no network,
figures/*.svg and tables/*.csv: all quantities, and the runs that they are from.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from rich.console import Console

from . import caught, figures, methods, paper, quantities, trials
from .config import IMAGES, READINGS
from .figures import Figure
from .files import store
from .pools import NAMES, Pool, place, plain, pool
from .quantities import ACCURACY, BEST, COSTS, ERROR, FIRST, LOSS, OUTCOMES
from .record import Run, each_once, read_all
from .tables import EMPTY, Table, counted, listed, number

VERSIONS = ("commit", "ghor", "torch", "python", "machine")
WITHIN = 2  # so many of the paper's standard deviations count as agreement


@dataclass(frozen=True)
class Section:
    """A heading, and under it words (report.html has them, by kind), tables and figures."""

    kind: str
    title: str
    tables: Sequence[Table | None] = ()
    figures: Sequence[Figure | None] = ()

    @property
    def id(self) -> str:
        """The target of links inside the page."""
        return "section-" + re.sub(r"\W+", "-", self.title.lower()).strip("-")


# -- the page ------------------------------------------------------------------------------------------------


def report(folders: Sequence[Path], out: Path | None, console: Console, brief: bool = False) -> Path:
    """Make tables, figures and report.html from all records in the folders; returns the page's path.

    `out` is <first folder>/report by default; with `brief` the console shows only the verdict.
    """
    out, (runs, pools, books, left) = target(folders, out), read(folders)
    experiments = dict.fromkeys(p.experiment for p in pools)
    same = {e: plain([p for p in pools if p.experiment == e]) for e in experiments}
    verdict = [*words(same), *map(of_book, books)]
    first = next(iter(experiments), "")
    dots = [figure for q in FIRST.get(first, ()) if (figure := figures.dots(q, same[first]))]
    found = list(sections(pools, books))
    for figure in [*dots, *(figure for section in found for figure in section.figures if figure)]:
        store(figure.svg.encode(), out / "figures" / f"{figure.name}.svg")
    write_tables(out, runs, pools, books)
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    html = template.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8")).render(
        verdict=verdict,
        summary=summary(same),
        dots=dots,
        images=first in IMAGES,
        epochs=paper.EPOCHS.get(first),
        left=left,
        sections=found,
        runs=of_runs(runs),
        markup=Markup,
    )
    store(html.encode(), page := out / "report.html")

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=style != "")

    for line in (*verdict, *letters(same.get(first, []), console.width)):
        say(line)
    for table in (summary(same), *(() if brief else (t for section in found for t in section.tables))):
        if table:
            console.print("", table.filled().rich(console.width))
    for line in left:
        say(line, "yellow")
    say(f"\nreport: {page.resolve()}", "default")
    return page


def tables_only(folders: Sequence[Path], out: Path | None) -> list[Path]:
    """The tables of quantities and runs alone; nothing is drawn. Returns their paths."""
    return write_tables(target(folders, out), *read(folders)[:3])


def target(folders: Sequence[Path], out: Path | None) -> Path:
    """The folder for a report."""
    out = folders[0] / "report" if out is None else out
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder for the report")
    return out


def read(folders: Sequence[Path]) -> tuple[list[Run], list[Pool], list[trials.Book], list[str]]:
    """All runs, those of the paper's experiments in pools, the others in books, and what is left out."""
    each = [read_all(folder) for folder in folders]
    runs = each_once(run for found, _ in each for run in found)
    model = [run for run in runs if run.header["config"]["experiment"] == "text"]
    pools, left = pool(run for run in runs if run not in model)
    if unfinished := sum(not run.finished for run in model):
        left.append(f"{counted(unfinished, 'run')} of the language model not finished: left out")
    return runs, pools, trials.books(model), [line for _, some in each for line in some] + left


def write_tables(out: Path, runs: list[Run], pools: list[Pool], books: list[trials.Book]) -> list[Path]:
    """Write every quantity, and where it is from; returns the paths."""
    made, table = io.StringIO(), of_runs(runs)
    csv.writer(made, lineterminator="\n").writerows([table.headings, *table.rows])
    rows: list[tuple[Any, Any]] = [(p, (*OUTCOMES[p.experiment], *COSTS)) for p in pools]
    rows += [(row, trials.QUANTITIES) for book in books for row in book.rows.values()]
    content = {"quantities": quantities.as_csv(rows), "runs": made.getvalue()}
    for name, text in content.items():
        store(text.encode(), out / "tables" / f"{name}.csv")
    return [out / "tables" / f"{name}.csv" for name in content]


def sections(pools: Sequence[Pool], books: Sequence[trials.Book]) -> Iterator[Section]:
    """All sections for which there are records, in the paper's order."""
    experiments = {
        e: [p for p in pools if p.experiment == e] for e in dict.fromkeys(p.experiment for p in pools)
    }
    for experiment, same in experiments.items():
        title = NAMES.get(experiment, experiment)
        longer = [p for p in same if p.epochs > 1] or same
        table = quantities.table(f"{title}: outcomes", longer, OUTCOMES[experiment], True)
        if experiment == "pendulum":
            yield Section("pendulum", title, [table], [*by_label(same), *samples(same)])
            continue
        drawn = [
            figures.curves(f"{experiment}-{q.key}", f"{title}: {q.drawn or q.words}", q, plain(same))
            for q in FIRST[experiment]
        ]
        yield Section("images" if experiment in IMAGES else "own", title, [table], drawn)
        if any(len(p.seeds) > 1 for p in same) and (counts := caught.table(same)):
            yield Section("caught", f"{title}: caught runs", [counts])
    for i, book in enumerate(books):
        file, title = f"text-{i + 1}" if i else "text", NAMES["text"]
        drawn = [figures.language_curves(book, file), figures.language_rates(book, file)]
        yield Section("text", f"{title}, {book.steps} steps" if i else title, [trials.table(book)], drawn)
    costs = [
        quantities.table(f"{NAMES.get(e, e)}: cost of a step", same, COSTS) for e, same in experiments.items()
    ]
    if costs:
        yield Section("cost", "Cost", costs)
    yield Section("methods", "Methods", [methods.table()])


def by_label(pools: Sequence[Pool]) -> Iterator[Figure | None]:
    """The pendulum's curves, a figure for each reading of the learning rates."""
    for i, label in enumerate(sorted({p.label for p in pools}, key=lambda label: place(READINGS, label))):
        # free labels are numbered, since two may differ only in signs
        text = re.sub(r"[^a-z0-9]+", "-", (label or "no label").lower()).strip("-")
        name = text if label is None or label in READINGS else f"{i}-{text}"
        title = f"Pendulum{f', “{label}”' if label else ''}: reconstruction error"
        same = [p for p in pools if p.label == label]
        yield figures.curves(f"pendulum-error-{name}", title, ERROR, same, panels=True)


def samples(pools: Sequence[Pool]) -> list[Figure]:
    """What the first autoencoder that has recorded it does with a few trajectories."""
    found = [(sample, p.title()) for p in pools for run in p.runs if (sample := run.last("sample"))]
    return [figures.phase_space(*first) for first in found[:1]]


# -- the first screen ----------------------------------------------------------------------------------------


def words(same: dict[str, list[Pool]]) -> list[str]:
    """The results in words: first one claim, then what else is to be said; the numbers are in `summary`."""
    if not same:
        return []
    every = [p for pools in same.values() for p in pools]
    off = [x for p in every for q in FIRST[p.experiment] if q is not BEST and (x := q.off(p)) is not None]
    near = sum(abs(distance) <= WITHIN for distance in off)
    claim = f"{near} of {len(off)} results at the paper's number of epochs are within {WITHIN} of its"
    said = [f"{claim} standard deviations." if off else smallest(*next(iter(same.items())))]
    drifts = [float(y.max()) for p in every if (y := p.series("drift")) is not None]
    theirs = [x["drift"][1] for e in same for x in paper.REPORTED.get(e, {}).values() if "drift" in x]
    if drifts and np.isfinite(drifts).all():
        beside = f" (in the paper up to {number(max(theirs), '.1e')})" if theirs else ""
        said += [f"No weight was ever further than {number(max(drifts), '.1e')} from its manifold{beside}."]
    if {"geometric-adam", "scalar-moment-adam"} <= {p.optimizer for p in same.get("pendulum", ())}:
        said += [
            "On St(1, 2) the two Adams are one algorithm: what they differ by, at equal rates, is chance."
        ]
    for p in every:
        if p.experiment in IMAGES and (k := sum(why is not None for why in p.verdicts)):
            runs = f"{k} of {counted(len(p.seeds), 'run')} of {p.title()}"
            said += [f"{NAMES[p.experiment]}: {runs} would not pass the authors' gate."]
    return said


def smallest(experiment: str, pools: Sequence[Pool]) -> str:
    """The claim of runs that are shorter than the paper's."""
    what = "reconstruction error" if experiment == "pendulum" else "training loss"
    ends = [(float(x.mean()), p) for p in pools if (x := LOSS.of(p)) is not None and np.isfinite(x).all()]
    if not ends:
        return f"{NAMES.get(experiment, experiment)}: no loss is finite yet."
    adams = [end for end, p in ends if p.optimizer.endswith("-adam")]
    others = [end for end, p in ends if p.optimizer in ("momentum", "gradient")]
    rates = {(p.config["lr"], p.epochs) for _, p in ends}
    end, p = min(ends, key=lambda each: each[0])
    if experiment == "pendulum" and len(rates) == 1 and len(adams) == 2 and others:
        ratio = sum(others) / len(others) / (sum(adams) / 2)
        rate = f"at the learning rate {p.config['lr']:g}"
        return f"Without a second moment the {what} is {ratio:.1f} times as large, {rate}."
    asked = f" of the paper's {paper.EPOCHS[experiment]}" if experiment in paper.EPOCHS else ""
    return f"{p.title()} has the smallest {what}, {end:.3f}, after {p.epochs}{asked} epochs."


def of_book(book: trials.Book) -> str:
    """The methods of the language model by their loss."""
    rows = sorted(book.rows.values(), key=lambda row: row.mean)
    parts = "; ".join(f"{row.title()}: {row.mean:.3f}" for row in rows)
    return f"Language model, held-out loss after {book.steps} steps, at the best rate. {parts}."


def summary(same: dict[str, list[Pool]]) -> Table | None:
    """The longest runs of each optimizer beside the paper."""
    longest = {
        (p.experiment, p.optimizer): p
        for pools in same.values()
        for p in sorted(pools, key=lambda p: p.epochs)
    }
    rows = []
    for (e, optimizer), p in sorted(longest.items(), key=lambda x: [place(NAMES, name) for name in x[0]]):
        length = f"{p.epochs} of {paper.EPOCHS[e]}" if e in paper.EPOCHS else f"{p.epochs}"
        row = [NAMES.get(e, e), NAMES.get(optimizer, optimizer), length, str(len(p.seeds))]
        for q in (FIRST[e][0], ACCURACY):
            row += [q.show(q.of(p)), q.paper(e, optimizer), number(q.off(p), "+z.1f")]
        rows.append(row)
    headings = ["experiment", "optimizer", "epochs", "runs", "loss or error", "paper", "off by"]
    headings += ["test accuracy (%)", "paper", "off by"]
    return Table("The longest runs beside the paper", headings, rows, ("optimizer",)) if rows else None


def letters(pools: Sequence[Pool], width: int) -> list[str]:
    """The first figure for a terminal: a line for each optimizer."""
    q = FIRST[pools[0].experiment][0] if pools else LOSS
    rows: dict[str, list[float]] = {}
    for p in pools:
        found = q.of(p)
        rows.setdefault(p.optimizer, []).extend([] if found is None else found[np.isfinite(found)].tolist())
    bars = {o: bar for o in rows if (bar := q.bar(pools[0].experiment, o))}
    values = [x for row in (*rows.values(), *bars.values()) for x in row]
    if not values:
        return []
    low, high, room = min(values), max(values), max(20, min(width - 24, 72))

    def column(x: float) -> int:
        return round((x - low) / ((high - low) or 1) * (room - 1))

    lines = []
    for optimizer, row in rows.items():
        cells = [" "] * room
        if optimizer in bars:
            _, left, right = map(column, bars[optimizer])
            cells[left : right + 1] = "░" * (right + 1 - left)
        for x in row:
            cells[column(x)] = "●"
        lines.append(f"{NAMES.get(optimizer, optimizer):22}{''.join(cells)}".rstrip())
    lines.append(f"{'':22}{low:<{room - 5}.2f}{high:5.2f}")
    epochs = paper.EPOCHS.get(pools[0].experiment)
    return [*lines, f"{q.words}: ● a run" + (f"   ░ the paper after {epochs} epochs" if epochs else "")]


# -- where the numbers come from -----------------------------------------------------------------------------


def of_runs(runs: Sequence[Run]) -> Table:
    """One row per run: what, when, where, and with which versions; "then" are those it was resumed with."""
    rows = []
    for run in runs:
        config, last = run.header["config"], run.epochs[-1].get("time") if run.epochs else None

        def seen(key: str, run: Run = run) -> str:
            found = [line[key] for line in (run.header, *run.others) if line.get(key) is not None]
            return ", then ".join(dict.fromkeys(machine(x) if key == "machine" else str(x) for x in found))

        what = [NAMES.get(config["optimizer"], config["optimizer"]), config.get("label")]
        row = [run.path.name, NAMES.get(config["experiment"], config["experiment"])]
        row += [", ".join(filter(None, what)), listed(config["seeds"]), f"{len(run.epochs)} of {run.asked}"]
        row += [*map(seen, VERSIONS), *(str(config.get(key)) for key in ("device", "threads"))]
        times = (run.header.get("started"), last)
        rows.append([*row, *(time[:16].replace("T", " ") if time else EMPTY for time in times)])
    head = ("file", "experiment", "configuration", "seeds", "epochs")
    headings = (*head, *VERSIONS, "device", "threads", "started", "last epoch")
    return Table("Runs", headings, rows, headings)


def machine(found: dict[str, Any]) -> str:
    """The machine in words."""
    words = {"processor": "{}", "cores": "{} cores", "memory_gib": "{:.0f} GiB", "system": "{}"}
    return ", ".join(text.format(found[key]) for key, text in words.items() if found.get(key))
