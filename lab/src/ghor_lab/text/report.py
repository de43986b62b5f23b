"""The language model in a report: a table, curves, the sweep over rates, and the result in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import NullLocator

from ghor_lab.figures import GREY, INK, Figure, figure
from ghor_lab.pool import counted
from ghor_lab.table import Column, Row, Table
from ghor_lab.text.methods import METHODS
from ghor_lab.text.trials import AROUND, Book

# a colour for each place where matrices can live, a line style for each rule
PLACES = {
    "adamw": INK,
    "torch-muon": INK,
    "adamh": "#D55E00",
    "muonh": "#D55E00",
    "unit-rows": "#CC79A7",
    "sphere": "#0072B2",
    "rows": "#009E73",
    "heads": "#9A8A00",
    "stiefel": GREY,
}
TITLE = "Language model"
ABOVE = 0.5  # nats above the lowest loss: what is higher is not drawn

WORDS = (
    "A decoder of bytes (RMSNorm, rotary positions, tied head) learns Python's standard library; files are "
    "held out by the hash of their content. The methods differ in what they do with the matrices of the "
    "layers; all other weights are AdamW's. Losses are in nats a byte.",
    "Rate and decay are those at which the first seed ended lowest with a warm-up; the loss is then mean ± "
    "sample standard deviation over seeds. At equal time: a run of its own, with as many steps as fit into "
    "the CPU time of AdamW's. Steps to AdamW's loss: when the mean curve reaches what AdamW ends with. Over "
    "rates: how much the loss grows, at worst, from a quarter of the best rate to four times it (the "
    "number of rates in the next column). Off: the largest distance from what the method keeps.",
)


def table(book: Book, name: str = "text") -> Table:
    """One row for each method; `name` is that of its file."""
    rows = []
    target = book.mean("adamw") if "adamw" in book.methods else None
    for method in book.methods:
        best, repeated, around = book.best(method), book.repeated(method), book.around(method)
        losses = np.array([t.final for t in repeated])
        sd = float(losses.std(ddof=1)) if len(losses) > 1 and np.isfinite(losses).all() else None
        cold, short = book.cold(method), book.equal_time(method)
        finals = [t.final for t in around]
        cells: tuple[Any, ...] = (
            METHODS[method].title,
            best.rate,
            best.decay if METHODS[method].decays else None,
            (float(losses.mean()), sd),
            len(losses),
            short.final if short else None,
            short.steps if short else None,
            None if target is None else book.reached(method, target),
            max(finals) - min(finals) if len(finals) > 1 else None,
            len(finals),
            cold.final if cold else None,
            best.ms,
            max((t.off for t in repeated if t.off is not None), default=None),
        )
        rows.append(Row(cells))
    columns = (
        Column("method", "method"),
        Column("rate", "best rate", "number", ".3g"),
        Column("decay", "decay", "number", "g"),
        Column("loss", "held-out loss", "spread", ".3f"),
        Column("seeds", "seeds", "number", "d"),
        Column("equal_time", "at equal time", "number", ".3f"),
        Column("equal_time_steps", "steps then", "number", "d"),
        Column("to_adamw", "steps to AdamW's loss", "number", ".0f"),
        Column("over_rates", "over rates", "number", "+.2f"),
        Column("rates", "rates", "number", "d"),
        Column("cold", "without warm-up", "number", ".3f"),
        Column("cpu_ms", "CPU ms a step", "number", ".0f"),
        Column("off", "off", "number", ".1e"),
    )
    caption = f"Language model: {book.steps} steps, {about(book)}"
    return Table(name, caption, columns, rows)


def about(book: Book) -> str:
    """Batch, network and text in words."""
    config, (train, held_out) = book.trials[0].config, book.facts["bytes"]
    network = config["network"]
    return (
        f"batch {config['batch_size']} x {network['context']}, {network['layers']} layers of width "
        f"{network['width']}, {train / 1e6:.1f} MB of text, {held_out / 1e6:.1f} MB held out, digest "
        f"{book.facts['digest']}"
    )


def verdict(book: Book) -> str:
    """The methods by their loss, in one sentence, and what AdamW's loss costs the best."""
    means = sorted((book.mean(name), name) for name in book.methods)
    seeds = {len(book.repeated(name)) for name in book.methods}
    of = f"{min(seeds)} to {max(seeds)}" if len(seeds) > 1 else str(max(seeds))
    runs = "seed" if seeds == {1} else "seeds"
    parts = "; ".join(f"{METHODS[name].title}: {loss:.3f}" for loss, name in means)
    text = f"Language model, held-out loss after {book.steps} steps ({of} {runs} at the best rate). {parts}."
    if means[0][1] != "adamw" and "adamw" in book.methods:
        steps = book.reached(means[0][1], book.mean("adamw"))
        text += f" The first has AdamW's loss after {steps:.0f} steps." if steps else ""
    return text


def colour(name: str) -> str:
    """By the place where the method keeps its matrices."""
    return next(c for place, c in PLACES.items() if name.startswith(place))


def line(name: str) -> dict[str, Any]:
    """Colour and style of a method's lines."""
    anchored = name.endswith("anchor")
    style = (0, (4, 1.5)) if "muon" in name else (0, (1.2, 1)) if anchored else "-"
    return {"color": colour(name), "linestyle": style, "linewidth": 1.6, "label": METHODS[name].title}


def draw_legend(canvas: Canvas, axes: Any) -> None:
    """All methods below the axes."""
    styles: dict[str, Any] = {"handlelength": 2.4, "ncols": 2, "fontsize": 9, "columnspacing": 1.0}
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside lower center", **styles)


def curves(book: Book, file: str = "text") -> Figure:
    """Held-out loss by step, the mean over seeds at the best rate."""
    drawn = {
        name: np.array([[x for _, x in t.curve] for t in book.repeated(name)]).mean(0)
        for name in book.methods
    }
    ends = [float(values[-1]) for values in drawn.values() if math.isfinite(values[-1])]

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for name, values in drawn.items():
            axes.plot([step for step, _ in book.best(name).curve], values, **line(name))
        axes.set(xlabel="step", ylabel="held-out loss (nats a byte)")
        if ends:
            axes.set_ylim(min(ends) - 0.05, max(ends) + 2 * ABOVE)
        draw_legend(canvas, axes)

    ends_of = {name: float(values[-1]) for name, values in drawn.items()}
    return made(book, f"{file}-curves", "held-out loss by step", draw, ends_of)


def rates(book: Book, file: str = "text") -> Figure:
    """The loss at the end by learning rate, relative to the best: how forgiving is a method?"""
    lowest = min(t.final for name in book.methods for t in book.over_rates(name))

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for name in book.methods:
            trials = book.around(name)
            middle = min(trials, key=lambda t: (t.final, t.rate)).rate
            ends = [t.final if math.isfinite(t.final) else math.nan for t in trials]
            axes.plot([t.rate / middle for t in trials], ends, marker="o", markersize=3, **line(name))
        axes.set(xscale="log", xlabel="learning rate / best", ylabel="held-out loss at the end")
        axes.set_xticks(AROUND, ["1/4", "1/2", "1", "2", "4"])
        axes.xaxis.set_minor_locator(NullLocator())
        if math.isfinite(lowest):
            axes.set_ylim(lowest - 0.05, lowest + 2 * ABOVE)
        draw_legend(canvas, axes)

    spread = {name: max(t.final for t in book.around(name)) for name in book.methods}
    return made(book, f"{file}-rates", "loss by learning rate, seed 0", draw, spread)


def made(book: Book, file: str, words: str, draw: Any, numbers: dict[str, float]) -> Figure:
    """A figure with its caption, and the numbers at its end in words."""
    caption = f"Language model, {book.steps} steps: {words}."
    alt = "; ".join(f"{METHODS[name].title} {value:.3f}" for name, value in numbers.items())
    height = 3.3 + 0.19 * math.ceil(len(book.methods) / 2)
    return figure(file, caption, f"{caption} {alt}.", draw, height=height, width=6.2)


def unfinished(count: int) -> Sequence[str]:
    """A warning about runs that are not in the tables."""
    return [f"{counted(count, 'run')} of the language model not finished: left out"] if count else []
