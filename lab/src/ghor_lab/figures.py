"""The report's figures, drawn from records: as stand-alone SVG, and as SVG that takes a page's colours.

Runs are drawn one by one, without bands. Bars show what the paper reports, at the paper's number of epochs.
Colours are those of the Okabe-Ito palette that are legible on both white and black; colour-blind readers can
tell them apart, and line styles carry the same information.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator, NullLocator

from . import paper
from .pools import NAMES, Array, Pool
from .quantities import ERROR, FEW, Quantity
from .tables import counted
from .trials import AROUND, Book, Row, lowest

# placeholders for the page's text and background: no other colour may equal them
INK, PAPER = "#1b1d22", "#fffffe"
GREY = "#808080"
WIDTH = 5.2  # inches: a phone shows it at 3/4 of this, still legible
POINTS = 200  # points per line at most: more could not be told apart at this width

STYLES: dict[str, tuple[str, Any]] = {
    "geometric-adam": ("#3f51b5", "-"),  # the colour of ghor, as on the pages
    "scalar-moment-adam": ("#D55E00", (0, (5, 1.2))),
    "momentum": ("#009E73", (0, (6, 1.2, 1.2, 1.2))),
    "gradient": ("#CC79A7", (0, (1.5, 1))),
    "standard-adam": (GREY, (0, (3, 1, 1, 1, 1, 1))),
}
OTHER = ("#9A8A00", "-")
RECONSTRUCTION = "#D55E00"
# of the language model: a colour for each place where matrices can live
PLACES = {"adamw": INK, "torch": INK, "adamh": "#D55E00", "muonh": "#D55E00", "unit-rows": "#CC79A7"}
PLACES |= {"sphere": "#0072B2", "rows": "#009E73", "heads": "#9A8A00", "stiefel": GREY}

RC: dict[Any, Any] = {
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": "none",
    "font.size": 12,
    "axes.titlesize": 12,
    "legend.fontsize": 11,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GREY,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "path",  # the letters look the same everywhere, and nothing is loaded
    "svg.hashsalt": "ghor",  # the same records give the same bytes
    "axes.formatter.useoffset": False,
}


@dataclass(frozen=True)
class Figure:
    """A figure and its description in words, `alt`. It is drawn when `svg` is first requested."""

    name: str
    caption: str
    alt: str
    draw: Callable[[Canvas], None]
    height: float = 3.9
    width: float = WIDTH

    @cached_property
    def svg(self) -> str:
        """The file's content."""
        with matplotlib.rc_context(RC), warnings.catch_warnings():
            # a label in letters that the font lacks: boxes will do
            warnings.filterwarnings("ignore", message="Glyph")
            canvas = Canvas(figsize=(self.width, self.height), layout="constrained")
            self.draw(canvas)
            out = io.StringIO()
            nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            canvas.savefig(out, format="svg", metadata=nothing)
        return out.getvalue()

    def inline(self) -> str:
        """For a page: ink in the page's text colour, no background, unique ids, no addresses."""
        svg = self.svg[self.svg.index("<svg") :]
        svg = svg.replace(INK, "currentColor").replace(PAPER, "none")
        svg = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", svg)
        svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        svg = svg.replace("xlink:href", "href")
        used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
        svg = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg)
        svg = re.sub(r'( id="|href="#|url\(#)', rf"\1{self.name}-", svg)
        return re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', svg, count=1)


def style(optimizer: str) -> tuple[str, Any]:
    """Colour and line style."""
    return STYLES.get(optimizer, OTHER)


# -- curves over epochs --------------------------------------------------------------------------------------

Drawn = list[tuple[Pool, Array]]  # (epochs, seeds)


def curves(
    file: str, title: str, quantity: Quantity, pools: Sequence[Pool], panels: bool = False
) -> Figure | None:
    """The quantity by epoch on a logarithmic axis: a line per run, and the paper's bars at its last epoch.

    With `panels` every optimizer has its own, for many seeds whose lines would cover one another. Returns
    None if no pool has the quantity.
    """
    drawn: Drawn = [(p, x) for p in pools if (x := p.series(*quantity.keys)) is not None]
    if not drawn:
        return None
    experiment, end = drawn[0][0].experiment, max(p.epochs for p, _ in drawn)
    optimizers = list(dict.fromkeys(p.optimizer for p, _ in drawn))
    bars = {o: bar for o in optimizers if (bar := quantity.bar(experiment, o))}
    authors = paper.AUTHORS.get(quantity.keys[0]) if experiment == "mnist" and not panels else None
    groups = [[o] for o in optimizers] if panels else [optimizers]
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)

    def draw(canvas: Canvas) -> None:
        grid = canvas.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for axes in grid.flat[len(groups) :]:
            axes.set_visible(False)
        for axes, group in zip(grid.flat, groups, strict=False):
            for p, values in drawn:
                if p.optimizer in group:
                    lines(axes, p, values, quantity)
                else:
                    shown = selected(len(values))
                    axes.plot(shown, values[shown - 1].mean(1), color=GREY, alpha=0.5, linewidth=1, zorder=1)
            for i, o in enumerate(group):
                if o in bars:
                    upright(axes, end * (1.12 + 0.1 * i), bars[o], INK if panels else style(o)[0])
                if authors:
                    circles(axes, authors, o, end)
            if panels:
                axes.set_title(NAMES.get(group[0], group[0]), color=style(group[0])[0], loc="left")
            epochs(axes, quantity, end, end * (1.15 + 0.1 * len(group) if bars else 1.03), few=panels)
        for axes in grid[-1]:
            axes.set_xlabel("epoch")
        (canvas.supylabel if panels else grid[0, 0].set_ylabel)(quantity.drawn or quantity.words, fontsize=12)
        if not panels:
            handles, labels = grid[0, 0].get_legend_handles_labels()
            of = dict(zip(labels, handles, strict=True))  # one for each optimizer
            canvas.legend(of.values(), of, loc="outside lower center", ncols=2)

    height = 1.1 + 1.6 * rows if panels else 3.4 + 0.2 * -(-len(optimizers) // 2)
    about = told(drawn, quantity, panels)
    about += (
        [f"Bars: the paper's {quantity.deviation} after {paper.EPOCHS[experiment]} epochs."] if bars else []
    )
    about += ["Circles: the authors' published run."] if authors else []
    ends = [(p.title(), x[0].mean(), x[-1].mean(), counted(p.epochs, "epoch")) for p, x in drawn]
    alt = "; ".join(f"{name} from {a:.3g} to {b:.3g} in {length}" for name, a, b, length in ends)
    return Figure(file, " ".join([f"{title}.", *about]), f"{title}: {alt}.", draw, height)


def told(drawn: Drawn, quantity: Quantity, panels: bool) -> list[str]:
    """What the lines are."""
    if not any(values.shape[1] > FEW for _, values in drawn):
        what = "Each line is a run."
    elif quantity.ends:
        what = "Line: the largest of all seeds so far."
    else:
        what = "Thin lines: seeds; thick: their mean."
    return [what, "Grey lines: the means of the others."] if panels else [what]


def lines(axes: Axes, p: Pool, values: Array, quantity: Quantity) -> None:
    """Draw every seed; for many seeds thin lines and their mean, or the largest if only the worst counts."""
    colour, dashes = style(p.optimizer)
    shown, many = selected(len(values)), values.shape[1] > FEW
    if many and quantity.ends:
        values = np.maximum.accumulate(values)
    values = values[shown - 1]
    strong = values.max(1, keepdims=True) if quantity.ends else values.mean(1, keepdims=True)
    if quantity.log:
        values, strong = (np.where(x > 0, x, np.nan) for x in (values, strong))
    if many and not quantity.ends:
        axes.plot(shown, values, color=colour, linewidth=0.6, alpha=0.45)
    how: dict[str, Any] = {"color": colour, "linestyle": dashes, "linewidth": 1.8}
    how |= {"alpha": 1.0 if p.epochs >= p.asked else 0.6, "marker": "o" if len(shown) == 1 else None}
    axes.plot(shown, strong if many else values, label=NAMES.get(p.optimizer, p.optimizer), **how)


def selected(count: int) -> Any:
    """1 ... count, or a selection that is even on a logarithmic axis and includes the last."""
    return np.unique(np.round(np.geomspace(1, count, POINTS)).astype(np.int64))


def epochs(axes: Axes, quantity: Quantity, end: int, right: float, few: bool = False) -> None:
    """Set up the axes of a curve, with room on the right for the paper's bars."""
    axes.set(xscale="log", yscale="log" if quantity.log else "linear", xlim=(0.9, max(right, 1.2)))
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if tick <= end]
    if few or len(ticks) > 6:
        ticks = [tick for tick in (1, 10, 100, 500, 1000) if tick <= end and (tick != 500 or end == 500)]
    axes.set_xticks(ticks, [f"{tick}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    if quantity is ERROR:  # less than two decades: numbers, not powers of ten
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        axes.yaxis.set_minor_formatter("{x:g}")


def upright(axes: Axes, x: float, bar: tuple[float, float, float], colour: str) -> None:
    """The paper's number: its middle, and its ends."""
    middle, low, high = bar
    axes.plot([x, x], [low, high], color=colour, linewidth=4, alpha=0.6, solid_capstyle="butt")
    axes.plot(x, middle, marker="_", markersize=8, markeredgewidth=2, color=colour)


def circles(axes: Axes, authors: paper.Curve, optimizer: str, end: int) -> None:
    """Draw the authors' published run as far as the axis goes."""
    values = zip(authors.epochs, authors.values.get(optimizer, ()), strict=False)
    if points := [point for point in values if point[0] <= end]:
        how: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 5, "markerfacecolor": "none"}
        axes.plot(*zip(*points, strict=True), color=style(optimizer)[0], **how)


# -- the first screen ----------------------------------------------------------------------------------------


def dots(quantity: Quantity, pools: Sequence[Pool]) -> Figure | None:
    """Every run a dot, filled at the paper's number of epochs; the paper's mean and deviation a grey bar."""
    found = [(p, x) for p in pools if (x := quantity.of(p)) is not None and np.isfinite(x).any()]
    if not found:
        return None
    experiment = found[0][0].experiment
    optimizers = list(dict.fromkeys(p.optimizer for p in pools))

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for y, optimizer in enumerate(optimizers):
            colour = style(optimizer)[0]
            if bar := quantity.bar(experiment, optimizer):
                middle, low, high = bar
                axes.plot([low, high], [y, y], color=GREY, alpha=0.55, linewidth=11, solid_capstyle="butt")
                axes.plot(middle, y, marker="|", markersize=11, markeredgewidth=2, color=INK)
            same = [(p, values) for p, values in found if p.optimizer == optimizer]
            for p, values in same:
                inside = colour if p.epochs == paper.EPOCHS.get(experiment) else "none"
                how: dict[str, Any] = {"markerfacecolor": inside, "markeredgewidth": 1.5, "alpha": 0.85}
                axes.plot(values, np.full(len(values), y), "o", color=colour, markersize=7, **how)
            at: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            name = NAMES.get(optimizer, optimizer)
            axes.annotate(name, (0, y), (0, 10), **at, color=colour, weight="bold", fontsize=11)
            lengths = ", ".join(f"{len(x)} x {p.epochs}" for p, x in same[:2]) + (", ..." if same[2:] else "")
            words = f"{lengths} epochs" if same else "not on a manifold"
            axes.annotate(words, (1, y), (0, 10), **at, ha="right", fontsize=9)
        axes.set(ylim=(len(optimizers) - 0.6, -0.65), yticks=[], xlabel=quantity.words)
        axes.set_xscale("log" if quantity.log and quantity is not ERROR else "linear")
        axes.spines["left"].set_visible(False)
        axes.margins(x=0.06)

    title = f"{NAMES.get(experiment, experiment)}: {quantity.words}"
    numbers = [f"{p.title()} {', '.join(f'{v:.3g}' for v in values)}" for p, values in found]
    height = 0.75 + 0.52 * len(optimizers)
    return Figure(
        f"headline-{quantity.key}", f"{title}.", f"{title}: {'; '.join(numbers)}.", draw, height, 4.1
    )


# -- the pendulum --------------------------------------------------------------------------------------------


def angles(points: Array) -> tuple[Array, Array]:
    """(..., 4) -> (...): theta in [0, 2 pi) and its derivative.

    From q = (sin, cos) and p = (theta' cos, -theta' sin).
    """
    sin, cos, p1, p2 = np.moveaxis(points, -1, 0)
    return np.arctan2(sin, cos) % (2 * np.pi), p1 * cos - p2 * sin


def phase_space(sample: dict[str, Any], whose: str) -> Figure:
    """The sample's trajectories in phase space: the data, and the autoencoder's reconstruction."""
    original, rebuilt = (np.array(sample[key], dtype=np.float64) for key in ("original", "reconstruction"))
    error = float(np.linalg.norm(original - rebuilt) / np.linalg.norm(original))

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for data, colour, label in ((original, INK, "data"), (rebuilt, RECONSTRUCTION, "reconstruction")):
            for i, trajectory in enumerate(data):
                theta, velocity = angles(trajectory)
                jump = np.abs(np.diff(theta, append=theta[-1])) > np.pi  # from 2 pi back to 0: no line across
                theta = np.where(jump, np.nan, theta)
                axes.plot(theta, velocity, color=colour, linewidth=1.2, label=None if i else label)
        axes.set(xlabel="θ", ylabel="dθ/dt", xlim=(0, 2 * np.pi))
        axes.set_xticks(np.pi * np.arange(0, 2.1, 0.5), ["0", "π/2", "π", "3π/2", "2π"])
        canvas.legend(loc="outside lower center", ncols=2)

    caption = (
        "The pendulum in phase space: trajectories of the data, θ″ = sin θ, and what decoder and encoder "
        f"make of them, by {whose}, seed {sample['seed']}, epoch {sample['epoch']}; their relative error is "
        f"{error:.2g}. θ is taken modulo 2π; the stable position is π."
    )
    alt = f"Phase space of {len(original)} trajectories: closed curves around π, those from 0 to 2π rotate."
    return Figure("pendulum-phase-space", caption, alt, draw)


# -- the language model --------------------------------------------------------------------------------------


def language_curves(book: Book, file: str) -> Figure:
    """Held-out loss by step, the mean over seeds at the best rate."""
    ends = {row: float(row.course[1][-1]) for row in book.rows.values()}
    finite = [y for y in ends.values() if math.isfinite(y)]

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for row in ends:
            axes.plot(*row.course, **line_of(row))
        axes.set(xlabel="step", ylabel="held-out loss (nats a byte)")
        finish(canvas, axes, finite)

    return of_methods(book, f"{file}-curves", "held-out loss by step", draw, ends)


def language_rates(book: Book, file: str) -> Figure:
    """The loss at the end by learning rate, relative to the best: how forgiving is a method?"""

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for row in book.rows.values():
            rates = [t.rate / lowest(row.around).rate for t in row.around]
            ends = [t.final if math.isfinite(t.final) else math.nan for t in row.around]
            axes.plot(rates, ends, marker="o", markersize=3, **line_of(row))
        axes.set(xscale="log", xlabel="learning rate / best", ylabel="held-out loss at the end")
        axes.set_xticks(AROUND, ["1/4", "1/2", "1", "2", "4"])
        axes.xaxis.set_minor_locator(NullLocator())
        finish(canvas, axes, [min(lowest(row.around).final for row in book.rows.values())])

    worst = {row: max(t.final for t in row.around) for row in book.rows.values()}
    return of_methods(book, f"{file}-rates", "loss by learning rate, seed 0", draw, worst)


def line_of(row: Row) -> dict[str, Any]:
    """Colour and style of a method's lines: by the place of its matrices, and by its rule."""
    name = row.optimizer
    colour = next(c for place, c in PLACES.items() if name.startswith(place))
    dashes: Any = (0, (4, 1.5)) if "muon" in name else (0, (1.2, 1)) if name.endswith("anchor") else "-"
    return {"color": colour, "linestyle": dashes, "linewidth": 1.6, "label": row.title()}


def finish(canvas: Canvas, axes: Axes, ends: Sequence[float]) -> None:
    """The legend below the axes; more than a nat above the ends nothing is drawn."""
    if ends and math.isfinite(min(ends)):
        axes.set_ylim(min(ends) - 0.05, max(ends) + 1.0)
    how: dict[str, Any] = {"handlelength": 2.4, "ncols": 2, "fontsize": 9, "columnspacing": 1.0}
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside lower center", **how)


def of_methods(book: Book, file: str, words: str, draw: Any, numbers: dict[Row, float]) -> Figure:
    """A figure with its caption, and the numbers at its end in words."""
    caption = f"Language model, {book.steps} steps: {words}."
    alt = "; ".join(f"{row.title()} {value:.3f}" for row, value in numbers.items())
    height = 3.3 + 0.19 * math.ceil(len(book.rows) / 2)
    return Figure(file, caption, f"{caption} {alt}.", draw, height, 6.2)
