"""A table in four forms: for the terminal, as CSV, as Markdown, and as cells for a page.

A cell is a text, a number, or a pair; None is an empty cell. People read "0.292 ± 0.055"; the CSV has the two
numbers with all their digits, in separate columns.
"""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

EMPTY = "-"

# kind of a column -> suffixes that name its columns in the CSV
KINDS = {
    "text": ("",),
    "number": ("",),
    "spread": ("_mean", "_sd"),  # a mean and a sample standard deviation, which is None for a single value
    "range": ("_min", "_max"),
    "epochs": ("", "_asked"),  # how many there are, and how many were asked for
}


@dataclass(frozen=True)
class Column:
    """`key` names the column in the CSV, `heading` for people; `spec` formats its numbers."""

    key: str
    heading: str
    kind: str = "text"
    spec: str = ""

    def show(self, cell: Any) -> str:
        """The cell for people."""
        if cell is None:
            return EMPTY
        if self.kind == "text":
            return "".join(c if c.isprintable() else " " for c in str(cell))
        if self.kind == "number":
            return self._number(cell)
        first, second = cell
        if self.kind == "epochs":
            return f"{first}" if second is None or first >= second else f"{first} of {second} epochs"
        one, two = self._number(first), None if second is None else self._number(second)
        if self.kind == "spread":
            return one if two is None else f"{one} ± {two}"
        return one if two in (None, one) else f"{one} to {two}"

    def _number(self, value: float) -> str:
        return short(format(value, self.spec)) if math.isfinite(value) else "not finite"

    def raw(self, cell: Any) -> list[Any]:
        """The cell as the values of its CSV columns."""
        if len(KINDS[self.kind]) == 1:
            return ["" if cell is None else cell]
        return ["" if value is None else value for value in (cell or (None, None))]


@dataclass(frozen=True)
class Row:
    """One cell per column; `paper` marks a row that is the paper's."""

    cells: tuple[Any, ...]
    paper: bool = False


@dataclass(frozen=True)
class Table:
    """`name` is the name of its files; the first column holds the row headings."""

    name: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]

    def filled(self) -> Table:
        """The same without empty columns."""
        kept = [i for i in range(len(self.columns)) if any(row.cells[i] is not None for row in self.rows)]
        rows = [replace(row, cells=tuple(row.cells[i] for i in kept)) for row in self.rows]
        return replace(self, columns=[self.columns[i] for i in kept], rows=rows)

    def shown(self, row: Row) -> list[str]:
        """The row's cells for people."""
        return [column.show(cell) for column, cell in zip(self.columns, row.cells, strict=True)]

    def csv(self) -> str:
        """One line of column names, then all numbers with all their digits."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([column.key + end for column in self.columns for end in KINDS[column.kind]])
        for row in self.rows:
            pairs = zip(self.columns, row.cells, strict=True)
            writer.writerow([value for column, cell in pairs for value in column.raw(cell)])
        return out.getvalue()

    def markdown(self) -> str:
        """A Markdown table; texts cannot break out of their cells."""
        rule = ["---" if column.kind == "text" else "--:" for column in self.columns]
        lines = [[markdown(column.heading) for column in self.columns], rule]
        lines += [[markdown(cell) for cell in self.shown(row)] for row in self.rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def rich(self, width: int) -> RichTable:
        """For a terminal of that many columns; the paper's rows are dim."""
        shown = [self.shown(row) for row in self.rows]
        columns = list(zip([column.heading for column in self.columns], *shown, strict=True))
        table = RichTable(title=Text(self.caption), title_justify="left", title_style="bold", header_style="")
        table.box, table.show_edge, table.padding = SIMPLE_HEAD, False, (0, 1, 0, 0)
        for column, room in zip(self.columns, _widths(columns, width - 2 * len(columns)), strict=True):
            justify: Literal["left", "right"] = "left" if column.kind == "text" else "right"
            table.add_column(Text(column.heading), justify=justify, overflow="fold", width=room)
        for row, texts in zip(self.rows, shown, strict=True):
            table.add_row(*map(Text, texts), style="dim" if row.paper else "")
        return table


def _widths(columns: Sequence[Sequence[str]], total: int) -> list[int | None]:
    """Widths of columns with these texts: the widest are narrowed first, and no word is broken.

    If not even that fits, rich chooses and breaks words.
    """
    widths = [max(map(len, texts)) for texts in columns]
    words = [max(len(word) for text in texts for word in text.split() or [""]) for texts in columns]
    while sum(widths) > total:
        i = max(range(len(widths)), key=lambda i: (widths[i] > words[i], widths[i]))
        if widths[i] <= words[i]:
            return [None] * len(widths)
        widths[i] -= 1
    return list(widths)


def short(number: str) -> str:
    """6.0e-07 -> 6.0e-7."""
    return re.sub(r"e([+-])0(?=\d)", r"e\1", number)


def markdown(text: str) -> str:
    """Escape text so that Markdown shows it as it is."""
    return re.sub(r"([\\`*_\[\]|#~$])", r"\\\1", html.escape(text, quote=False))
