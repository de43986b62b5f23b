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
from .config import READINGS
from .figures import Figure
from .files import store
from .language import METHODS as LANGUAGE
from .pools import NAMES, Pool, place, plain, pool
from .quantities import COSTS, ERROR, FIRST, IMAGES, LOSS, OUTCOMES
from .record import Run, each_once, read_all
from .tables import Table, counted, listed, number

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
    out = target(folders, out)
    runs, pools, books, left = read(folders)
    experiments = dict.fromkeys(p.experiment for p in pools)
    same = {e: plain([p for p in pools if p.experiment == e]) for e in experiments}
    verdict = [*words(same), *map(of_book, books)]
    first = next(iter(experiments), "")
    dots = [figures.dots(q, same[first]) for q in FIRST.get(first, ())]
    found = list(sections(pools, books))
    drawn = [figure for section in found for figure in section.figures if figure]
    for figure in [*(f for f in dots if f), *drawn]:
        store(figure.svg.encode(), out / "figures" / f"{figure.name}.svg")
    quantities_in(out, runs, pools, books)
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    page = out / "report.html"
    html = template.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8")).render(
        verdict=verdict,
        summary=summary(same),
        dots=[f for f in dots if f],
        key=key(first),
        left=left,
        facts=about(runs),
        sections=found,
        runs=of_runs(runs),
        markup=Markup,
    )
    store(html.encode(), page)

    for line in verdict:
        console.print(line, "", markup=False, highlight=False)
    for line in letters(same.get(first, []), console.width):
        console.print(line, markup=False, highlight=False)
    for table in (summary(same), *(() if brief else (t for section in found for t in section.tables))):
        if table:
            console.print("", table.filled().rich(console.width))
    for line in left:
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nreport: {page.resolve()}", soft_wrap=True, markup=False, highlight=False)
    return page


def tables_only(folders: Sequence[Path], out: Path | None) -> list[Path]:
    """The tables of quantities and runs alone; nothing is drawn. Returns their paths."""
    runs, pools, books, _ = read(folders)
    return quantities_in(target(folders, out), runs, pools, books)


def target(folders: Sequence[Path], out: Path | None) -> Path:
    """The folder for a report."""
    out = folders[0] / "report" if out is None else out
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder for the report")
    return out


def read(folders: Sequence[Path]) -> tuple[list[Run], list[Pool], list[trials.Book], list[str]]:
    """All runs, those of the paper's experiments in pools, the others in books, and what is left out."""
    each = [read_all(folder) for folder in folders]
    runs, left = (
        each_once(run for found, _ in each for run in found),
        [line for _, some in each for line in some],
    )
    model = [run for run in runs if run.header["config"]["experiment"] == "text"]
    pools, more = pool(run for run in runs if run not in model)
    if unfinished := sum(not run.finished for run in model):
        more.append(f"{counted(unfinished, 'run')} of the language model not finished: left out")
    return runs, pools, trials.books(model), left + more


def quantities_in(
    out: Path, runs: Sequence[Run], pools: Sequence[Pool], books: Sequence[trials.Book]
) -> list[Path]:
    """Write every quantity, and where it is from."""
    made, table = io.StringIO(), of_runs(runs)
    csv.writer(made, lineterminator="\n").writerows([table.headings, *table.rows])
    content = {"quantities": quantities.as_csv(pools, trials.lines(books)), "runs": made.getvalue()}
    paths = {out / "tables" / f"{name}.csv": text for name, text in content.items()}
    for path, text in paths.items():
        store(text.encode(), path)
    return list(paths)


def sections(pools: Sequence[Pool], books: Sequence[trials.Book]) -> Iterator[Section]:
    """All sections for which there are records, in the paper's order."""
    for experiment in dict.fromkeys(p.experiment for p in pools):
        same = [p for p in pools if p.experiment == experiment]
        title, usual = NAMES.get(experiment, experiment), plain(same)
        table = quantities.table(
            f"{title}: outcomes", [p for p in same if p.epochs > 1] or same, OUTCOMES[experiment], True
        )
        if experiment == "pendulum":
            labels = sorted({p.label for p in same}, key=lambda label: place(READINGS, label))
            drawn = [
                figures.curves(
                    f"pendulum-error-{slug(label, i)}",
                    f"Pendulum{f', “{label}”' if label else ''}: reconstruction error",
                    ERROR,
                    [p for p in same if p.label == label],
                    panels=True,
                )
                for i, label in enumerate(labels)
            ]
            yield Section("pendulum", title, [table], [*drawn, *samples(same)])
        else:
            drawn = [
                figures.curves(f"{experiment}-{q.key}", f"{title}: {q.drawn or q.words}", q, usual)
                for q in (LOSS, quantities.ACCURACY, quantities.DRIFT)
            ]
            yield Section("images", title, [table], drawn)
            if any(len(p.seeds) > 1 for p in same) and (counts := caught.table(same)):
                yield Section("caught", f"{title}: caught runs", [counts])
    for i, book in enumerate(books):
        file, title = f"text-{i + 1}" if i else "text", NAMES["text"]
        drawn = [figures.language_curves(book, file), figures.language_rates(book, file)]
        yield Section("text", f"{title}, {book.steps} steps" if i else title, [trials.table(book)], drawn)
    costs = [
        quantities.table(f"{NAMES.get(e, e)}: cost of a step", [p for p in pools if p.experiment == e], COSTS)
        for e in dict.fromkeys(p.experiment for p in pools)
    ]
    if costs:
        yield Section("cost", "Cost", costs)
    yield Section("methods", "Methods", [methods.table()])


def samples(pools: Sequence[Pool]) -> Iterator[Figure]:
    """What the first autoencoder that has recorded it does with a few trajectories."""
    for p in pools:
        for run in p.runs:
            if sample := run.last("sample"):
                yield figures.phase_space(sample)
                yield figures.reconstruction(sample, p.title())
                return


def slug(label: str | None, i: int) -> str:
    """A label as part of a file name; free labels are numbered, since two may differ only in signs."""
    text = re.sub(r"[^a-z0-9]+", "-", (label or "no label").lower()).strip("-")
    return text if label is None or label in READINGS else f"{i}-{text}"


# -- the first screen ----------------------------------------------------------------------------------------


def words(same: dict[str, list[Pool]]) -> list[str]:
    """The results in words: first one claim, then what else is to be said; the numbers are in `summary`."""
    if not same:
        return []
    quantities = [(p, q) for e, pools in same.items() for p in pools for q in FIRST[e][:2]]
    off = [distance for p, q in quantities if q.key != "best" and (distance := q.off(p)) is not None]
    near = sum(abs(distance) <= WITHIN for distance in off)
    if off:
        claim = (
            f"{near} of {len(off)} results at the paper's number of epochs "
            f"are within {WITHIN} of its standard deviations."
        )
    else:
        claim = smallest(*next(iter(same.items())))
    said = [claim]
    drifts = [
        float(x.max()) for pools in same.values() for p in pools if (x := p.series("drift")) is not None
    ]
    theirs = [o.drift[1] for e in same for o in paper.OUTCOMES[e].values() if o.drift]
    if drifts and np.isfinite(drifts).all():
        beside = f" (in the paper up to {number(max(theirs), '.1e')})" if theirs else ""
        said.append(
            f"No weight was ever further than {number(max(drifts), '.1e')} from its manifold{beside}."
        )
    if {"geometric-adam", "scalar-moment-adam"} <= {p.optimizer for p in same.get("pendulum", ())}:
        said.append(
            "On St(1, 2) the two Adams are one algorithm: what they differ by, at equal rates, is chance."
        )
    for experiment, pools in same.items():
        for p in pools if experiment in IMAGES else ():
            if k := sum(why is not None for why in p.verdicts):
                runs = f"{k} of {counted(len(p.seeds), 'run')} of {p.title()}"
                said.append(f"{NAMES[experiment]}: {runs} would not pass the authors' gate.")
    return said


def smallest(experiment: str, pools: Sequence[Pool]) -> str:
    """The claim of runs that are shorter than the paper's."""
    what = "reconstruction error" if experiment == "pendulum" else "training loss"
    ends = [(float(x.mean()), p) for p in pools if (x := LOSS.of(p)) is not None and np.isfinite(x).all()]
    ends.sort(key=lambda each: each[0])
    if not ends:
        return f"{NAMES.get(experiment, experiment)}: no loss is finite yet."
    adams = [end for end, p in ends if p.optimizer.endswith("-adam")]
    others = [end for end, p in ends if p.optimizer in ("momentum", "gradient")]
    rates = {(p.config["lr"], p.epochs) for _, p in ends}
    if experiment == "pendulum" and len(rates) == 1 and len(adams) == 2 and others:
        ratio = sum(others) / len(others) / (sum(adams) / 2)
        rate = f"at the learning rate {ends[0][1].config['lr']:g}"
        return f"Without a second moment the {what} is {ratio:.1f} times as large, {rate}."
    end, p = ends[0]
    asked = paper.EPOCHS.get(experiment)
    return f"{p.title()} has the smallest {what}, {end:.3f}, after {p.epochs} of the paper's {asked} epochs."


def of_book(book: trials.Book) -> str:
    """The methods of the language model by their loss."""
    means = sorted((book.mean(m), m) for m in book.methods)
    parts = "; ".join(f"{LANGUAGE[m].title}: {loss:.3f}" for loss, m in means)
    return f"Language model, held-out loss after {book.steps} steps, at the best rate. {parts}."


def summary(same: dict[str, list[Pool]]) -> Table | None:
    """The longest runs of each optimizer beside the paper."""
    longest = {
        (p.experiment, p.optimizer): p
        for pools in same.values()
        for p in sorted(pools, key=lambda p: p.epochs)
    }
    rows = []
    for (experiment, optimizer), p in sorted(
        longest.items(), key=lambda x: (place(NAMES, x[0][0]), place(NAMES, x[0][1]))
    ):
        length = f"{p.epochs} of {paper.EPOCHS.get(experiment)}"
        row = [NAMES.get(experiment, experiment), NAMES.get(optimizer, optimizer), length, str(len(p.seeds))]
        for q in (FIRST[experiment][0], quantities.ACCURACY):
            row += [q.show(q.of(p)), q.paper(experiment, optimizer), number(q.off(p), "+z.1f")]
        rows.append(row)
    headings = ["experiment", "optimizer", "epochs", "runs", "loss or error", "paper", "off by"]
    headings += ["test accuracy (%)", "paper", "off by"]
    return Table("The longest runs beside the paper", headings, rows, ("optimizer",)) if rows else None


def key(experiment: str) -> str:
    """What dots and bars mean."""
    epochs, drift = paper.EPOCHS.get(experiment), ", of the drift its range" if experiment in IMAGES else ""
    return (
        "A dot is a run, filled if it has the paper's number of epochs; grey bars are the paper's mean and "
        f"standard deviation ({epochs} epochs, 10 seeds){drift}."
    )


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
            _, left, right = bars[optimizer]
            cells[column(left) : column(right) + 1] = "░" * (column(right) + 1 - column(left))
        for x in row:
            cells[column(x)] = "●"
        lines.append(f"{NAMES.get(optimizer, optimizer):22}{''.join(cells)}".rstrip())
    lines.append(f"{'':22}{low:<{room - 5}.2f}{high:5.2f}")
    epochs = paper.EPOCHS.get(pools[0].experiment)
    return [*lines, f"{q.words}: ● a run   ░ the paper after {epochs} epochs"]


# -- where the numbers come from -----------------------------------------------------------------------------


def history(run: Run, key: str) -> list[str]:
    """The header's value, and each value that it had when the run was resumed, in words."""
    found = [line[key] for line in (run.header, *run.others) if line.get(key) is not None]
    return list(dict.fromkeys(machine(value) if key == "machine" else str(value) for value in found))


def machine(found: dict[str, Any]) -> str:
    """The machine in words."""
    words = {"processor": "{}", "cores": "{} cores", "memory_gib": "{:.0f} GiB", "system": "{}"}
    return ", ".join(text.format(found[key]) for key, text in words.items() if found.get(key))


def minute(time: str | None) -> str:
    """2026-11-15T23:30:00+00:00 -> 2026-11-15 23:30."""
    return time[:16].replace("T", " ") if time else "-"


def about(runs: Sequence[Run]) -> str:
    """When, where and with what the runs were made, in a sentence."""
    times = [
        time
        for run in runs
        for line in (run.header, *run.epochs[-1:])
        if (time := line.get("started") or line.get("time"))
    ]
    seeds = {seed for run in runs for seed in run.header["config"]["seeds"]}

    def each(key: str) -> str:
        return "; ".join(dict.fromkeys(value for run in runs for value in history(run, key))) or "unknown"

    first, last = (minute(of(times, default=None)) for of in (min, max))
    return (
        f"{counted(len(runs), 'run')}, seeds {listed(sorted(seeds))}, recorded from {first} to {last}. "
        f"Commit {each('commit')}, ghor {each('ghor')}, torch {each('torch')}, Python {each('python')}. "
        f"{each('machine')}."
    )


def of_runs(runs: Sequence[Run]) -> Table:
    """One row per run: what, when, where, and with which versions."""
    keys = ("commit", "ghor", "torch", "python", "machine")
    rows = []
    for run in runs:
        config, last = run.header["config"], run.epochs[-1].get("time") if run.epochs else None
        what = ", ".join(
            filter(None, [NAMES.get(config["optimizer"], config["optimizer"]), config.get("label")])
        )
        rows.append(
            [
                run.path.name,
                NAMES.get(config["experiment"], config["experiment"]),
                what,
                listed(config["seeds"]),
                f"{len(run.epochs)} of {run.asked}",
                *(", then ".join(history(run, key)) for key in keys),
                *(str(config.get(key)) for key in ("device", "threads")),
                *(minute(time) for time in (run.header.get("started"), last)),
            ]
        )
    headings = (
        "file",
        "experiment",
        "configuration",
        "seeds",
        "epochs",
        *keys,
        "device",
        "threads",
        "started",
        "last epoch",
    )
    return Table("Runs", headings, rows, headings)
