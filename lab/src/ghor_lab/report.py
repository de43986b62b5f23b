"""`ghor report`: tables, figures and one page from the records of runs, with the paper's numbers beside.

Nothing is trained. The folder `out` receives report.html, which needs no other file and no network,
report.md, tables/*.csv and figures/*.svg. Every file is written under another name first and renamed when it
is complete.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from rich.console import Console

from . import headline, tables
from .figures import Figure
from .files import below, store
from .pack import SUFFIX, is_packed, load
from .pool import Pool, counted, pool
from .record import Run, each_once, ours
from .sections import Part, Section, sections
from .table import Table, markdown
from .text import report as language
from .text.trials import books

WIDE = 140  # columns of tables that go to a file or a pipe, where nothing is cut off
TITLE = "ghor: experiments beside the paper"
INTRO = (
    "Runs of ghor beside the numbers in Brantner, Generalizing Adam To Manifolds For Efficiently Training "
    "Transformers: mean ± sample standard deviation over 10 seeds, 500 epochs for the transformer, 1000 for "
    "the pendulum, on an NVIDIA GeForce RTX 4090. Tables and figures are drawn from the records of the runs "
    "and from nothing else.",
)


def write_tables(folders: Sequence[Path], out: Path | None = None) -> tuple[list[Path], list[str]]:
    """The tables of `report` alone: their paths, and in words what was left out. Nothing is drawn."""
    out = _folder(folders, out)
    runs, warnings = read_all(folders)
    pools, left_out = pooled(runs)
    parts = [part for section in sections(runs, pools) for part in section.parts]
    return [store_table(part.table, out) for part in parts if part.table], warnings + left_out


def store_table(table: Table, out: Path) -> Path:
    """Write a table as CSV; returns its path."""
    path = out / "tables" / f"{table.name}.csv"
    store(table.csv().encode(), path)
    return path


def _folder(folders: Sequence[Path], out: Path | None) -> Path:
    if not folders:
        raise ValueError("no folder of records was given")
    out = Path(folders[0]) / "report" if out is None else Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder for the report")
    return out


def report(
    folders: Sequence[Path], out: Path | None = None, *, console: Console, brief: bool = False
) -> Path:
    """Make tables, figures and report.html from all records in the folders; returns the page's path.

    `out` is <first folder>/report by default; with `brief` the console shows only the verdict and a figure.
    """
    out = _folder(folders, out)
    runs, warnings = read_all(folders)
    pools, left_out = pooled(runs)
    warnings += left_out
    facts, found = about(runs), sections(runs, pools)
    verdict = [language.verdict(book) for book in books(runs)]
    verdict = [*headline.verdict(pools), *verdict] if pools or not verdict else verdict
    table = headline.summary(pools)
    first = First(verdict, table, headline.figures(pools), headline.key(pools), facts, warnings)
    parts = [Part(figures=first.figures), *(part for section in found for part in section.parts)]
    for part in parts:
        if part.table:
            store_table(part.table, out)
        for figure in part.figures:
            store(figure.svg.encode(), out / "figures" / f"{figure.name}.svg")
    store(as_markdown(first, found).encode(), out / "report.md")
    page = out / "report.html"
    store(as_html(first, found).encode(), page)

    width = console.width
    if not console.is_terminal:
        console.width = max(width, WIDE)
    try:
        for line in (*first.verdict, "\n".join(headline.in_letters(pools, console.width))):
            console.print(line, "", markup=False, highlight=False)
        if table:
            console.print(table.filled().rich(console.width), "")
        for part in parts:
            if part.table and not part.quiet and not brief:
                console.print(part.table.filled().rich(console.width), "")
    finally:
        console.width = width
    if not brief:
        console.print(facts, markup=False, highlight=False)
    for line in warnings:
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(f"report: {page.resolve()}", soft_wrap=True, markup=False, highlight=False)
    return page


def pooled(runs: Sequence[Run]) -> tuple[list[Pool], list[str]]:
    """The pools of the paper's experiments, and in words what is left out, of the language model too."""
    model, others = (
        [run for run in runs if (run.header["config"]["experiment"] == "text") is which]
        for which in (True, False)
    )
    pools, left_out = pool(others)
    return pools, [*left_out, *language.unfinished(sum(not run.finished for run in model))]


# -- reading -------------------------------------------------------------------------------------------------


def read_all(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs in the folders, each once, and in words the files that could not be read."""
    runs: dict[Path, list[Run]] = {}
    warnings = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; `ghor run` makes one and says which")
        found = below(folder, ".jsonl", SUFFIX)
        for path in found:
            if path.resolve() in runs:
                continue
            try:
                if not is_packed(path) and not ours(path):
                    continue  # a file of another program
                read = load(path)
            except OSError as error:
                warnings.append(f"{path} cannot be read and is left out: {error.strerror}")
                continue
            if not read:
                warnings.append(f"{path} has no whole line yet and is left out")
            else:
                runs[path.resolve()] = read
        if not any(path.resolve() in runs for path in found):
            raise ValueError(
                f"{folder} has no records (*.jsonl, *{SUFFIX}){''.join(f'; {line}' for line in warnings)}; "
                "`ghor run pendulum`, mnist, fashion-mnist or text makes some"
            )
    return each_once(run for read in runs.values() for run in read), warnings


def about(runs: Sequence[Run]) -> str:
    """When, where and with what the runs were made, in a sentence."""
    lines = [line for run in runs for line in (run.header, *run.epochs[-1:])]
    times = [time for line in lines if (time := line.get("started") or line.get("time"))]
    seeds = {seed for run in runs for seed in run.header["config"]["seeds"]}

    def each(key: str) -> str:
        return (
            "; ".join(dict.fromkeys(value for run in runs for value in tables.history(run, key))) or "unknown"
        )

    return (
        f"{counted(len(runs), 'run')}, seeds {tables.numbers(sorted(seeds))}, recorded from "
        f"{tables.minute(min(times, default=None))} to {tables.minute(max(times, default=None))}. Commit "
        f"{each('commit')}, ghor {each('ghor')}, torch {each('torch')}, Python {each('python')}. "
        f"{each('machine')}."
    )


# -- writing -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class First:
    """The first screen: the verdict, its figures, and where the numbers come from."""

    verdict: Sequence[str]
    table: Table | None
    figures: Sequence[Figure]
    key: str
    facts: str
    warnings: Sequence[str]


def as_html(first: First, sections: Sequence[Section]) -> str:
    """The page; everything put into it is escaped, except for the figures, which contain no text."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    template = environment.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    return template.render(
        title=TITLE,
        intro=INTRO,
        first=first,
        sections=sections,
        markup=Markup,
        base64=lambda text: base64.b64encode(text.encode()).decode(),
    )


def as_markdown(first: First, sections: Sequence[Section]) -> str:
    """The same words and tables, with links to the figures' files."""
    blocks = [f"# {markdown(TITLE)}", *map(markdown, first.verdict)]
    if first.table:
        blocks += [f"**{markdown(first.table.caption)}**", first.table.filled().markdown().strip()]
    blocks += [*map(_picture, first.figures), first.key]
    blocks += [*map(markdown, INTRO), markdown(first.facts)]
    if first.warnings:
        blocks.append("\n".join(f"- {markdown(line)}" for line in first.warnings))
    for section in sections:
        blocks.append(f"## {markdown(section.title)}")
        for part in section.parts:
            blocks += map(markdown, part.text)
            if part.table:
                blocks += [f"**{markdown(part.table.caption)}**", part.table.filled().markdown().strip()]
            blocks += map(_picture, part.figures)
    return "\n\n".join(blocks) + "\n"


def _picture(figure: Figure) -> str:
    return f"![{markdown(figure.alt)}](figures/{figure.name}.svg)\n\n{markdown(figure.caption)}"
