"""A table of texts, for the terminal, as Markdown or on a page; and numbers as people read them."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

EMPTY = "-"


@dataclass(frozen=True)
class Table:
    """The first column has the row headings; columns are numbers unless named in `left`."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = ()
    paper: frozenset[int] = frozenset()  # rows that are the paper's

    def filled(self) -> Table:
        """The same without empty columns."""
        kept = [i for i in range(len(self.headings)) if any(row[i] != EMPTY for row in self.rows)]
        rows = [[row[i] for i in kept] for row in self.rows]
        return Table(self.caption, [self.headings[i] for i in kept], rows, self.left, self.paper)

    def is_text(self, column: int) -> bool:
        """Whether a column is aligned left."""
        return column == 0 or self.headings[column] in self.left

    def markdown(self) -> str:
        """A Markdown table; texts cannot break out of their cells."""
        rule = ["---" if self.is_text(i) else "--:" for i in range(len(self.headings))]
        lines = [
            [escaped(cell) for cell in self.headings],
            rule,
            *([escaped(c) for c in row] for row in self.rows),
        ]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def rich(self, width: int) -> RichTable:
        """For a terminal of that many columns; the paper's rows are dim."""
        table = RichTable(title=Text(self.caption), title_justify="left", title_style="bold", header_style="")
        table.box, table.show_edge, table.padding = SIMPLE_HEAD, False, (0, 1, 0, 0)
        columns = list(zip(self.headings, *self.rows, strict=True))
        words = [max(len(word) for text in texts for word in text.split() or [""]) for texts in columns]
        fits = sum(words) + 2 * len(words) <= width  # then no word is broken
        for i, (heading, room) in enumerate(zip(self.headings, words, strict=True)):
            side: Literal["left", "right"] = "left" if self.is_text(i) else "right"
            table.add_column(Text(heading), justify=side, overflow="fold", min_width=room if fits else None)
        for i, row in enumerate(self.rows):
            table.add_row(*map(Text, row), style="dim" if i in self.paper else "")
        return table


def number(value: float | None, spec: str) -> str:
    """6e-07 -> 6e-7; a text for what is missing or not finite."""
    if value is None:
        return EMPTY
    return short(format(value, spec)) if math.isfinite(value) else "not finite"


def spread(mean: float, sd: float | None, spec: str) -> str:
    """0.292 ± 0.055."""
    return number(mean, spec) + (f" ± {number(sd, spec)}" if sd is not None and math.isfinite(mean) else "")


def between(low: float, high: float, spec: str) -> str:
    """2.1e-7 to 3.5e-7."""
    ends = number(low, spec), number(high, spec)
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def short(text: str) -> str:
    """6.0e-07 -> 6.0e-7."""
    return re.sub(r"e([+-])0(?=\d)", r"e\1", text)


def plain(text: Any) -> str:
    """A text of a record as a cell: without control characters; "-" for None."""
    return EMPTY if text is None else "".join(c if c.isprintable() else " " for c in str(text))


def escaped(text: str) -> str:
    """Escape text so that Markdown shows it as it is."""
    return re.sub(r"([\\`*_\[\]|#~$])", r"\\\1", html.escape(text, quote=False))


def counted(count: int, what: str) -> str:
    """1 run, 2 runs."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def listed(values: Sequence[int]) -> str:
    """0 1 2 3 7 -> "0-3, 7"."""
    parts: list[list[int]] = []
    for value in sorted(values):
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
