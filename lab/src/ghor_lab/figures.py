"""The report's figures, drawn from records: as stand-alone SVG, and as SVG that takes a page's colours.

Runs are drawn one by one, without bands. Bars show what the paper reports, at the paper's number of epochs.
Colours are those of the Okabe-Ito palette that are legible on both white and black; colour-blind readers can
tell them apart, and line styles carry the same information.
"""

from __future__ import annotations

import io
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
from numpy.typing import NDArray

from . import paper
from .pool import FEW, OPTIMIZERS, Array, Pool, counted, name

INK, PAPER = (
    "#1b1d22",
    "#fffffe",
)  # placeholders for the page's text and background: no other colour may equal them
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
SHORT = {"geometric-adam": "geometric", "scalar-moment-adam": "scalar-moment", "standard-adam": "standard"}
OTHER = ("#9A8A00", "-")
RECONSTRUCTION = "#D55E00"
MARKERS = ("", "s", "^", "D", "v", "P", "X")  # these tell pools of one optimizer apart

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
    drawn: Callable[[], str]
    caption: str
    alt: str

    @cached_property
    def svg(self) -> str:
        """The file's content."""
        return self.drawn()

    def inline(self) -> str:
        """For a page: ink in the page's text colour, no background, unique ids, no addresses."""
        svg = self.svg[self.svg.index("<svg") :]
        svg = svg.replace(INK, "currentColor").replace(PAPER, "none")
        svg = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", svg)
        svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        svg = svg.replace("xlink:href", "href")
        used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
        svg = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg)
        svg = re.sub(r'( id="|href="#|url\(#)', rf"\1{self.name}-", svg)
        return re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', svg, count=1)


def figure(
    file: str,
    caption: str,
    alt: str,
    draw: Callable[[Canvas], None],
    height: float = 3.9,
    width: float = WIDTH,
) -> Figure:
    """Draw on a canvas in the report's style."""

    def drawn() -> str:
        with matplotlib.rc_context(RC), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="Glyph"
            )  # a label in letters that the font lacks: boxes will do
            canvas = Canvas(figsize=(width, height), layout="constrained")
            draw(canvas)
            out = io.StringIO()
            canvas.savefig(
                out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
            )
        return out.getvalue()

    return Figure(file, drawn, caption, alt)


# -- curves over epochs --------------------------------------------------------------------------------------

Reported = Callable[[str, str], tuple[float, float, float] | None]


@dataclass(frozen=True)
class Quantity:
    """What is drawn by epoch: keys of the record, words, and the paper's (mid, low, high) by optimizer."""

    keys: tuple[str, ...]
    words: str
    log: bool = False
    worst: bool = False  # for many seeds draw only the largest value; the paper gives smallest and largest
    reported: Reported = lambda experiment, optimizer: None


def reported(key: str) -> Reported:
    """The paper's number of that name: mean, mean - s.d., mean + s.d.; for the drift its middle and ends."""

    def find(experiment: str, optimizer: str) -> tuple[float, float, float] | None:
        outcome = paper.OUTCOMES.get(experiment, {}).get(optimizer)
        pair = getattr(outcome, key, None)
        if pair is None:
            return None
        if key == "drift":
            return float(np.sqrt(pair[0] * pair[1])), pair[0], pair[1]
        return pair[0], pair[0] - pair[1], pair[0] + pair[1]

    return find


LOSS = Quantity(("loss",), "training loss", reported=reported("final"))
ERROR = Quantity(("loss",), "relative reconstruction error", log=True, reported=reported("final"))
ACCURACY = Quantity(("test_accuracy",), "test accuracy (%)", reported=reported("accuracy"))
DRIFT = Quantity(("drift",), "drift ‖YᵀY - I‖", log=True, worst=True, reported=reported("drift"))
ENCODER = Quantity(("symplecticity", "encoder"), "encoder ‖M J Mᵀ - J‖", log=True, worst=True)
DECODER = Quantity(("symplecticity", "decoder"), "decoder ‖Mᵀ J M - J‖", log=True, worst=True)

Drawn = list[tuple[Pool, Array]]  # (epochs, seeds), no run twice


def series(quantity: Quantity, pools: Sequence[Pool]) -> Drawn:
    """The quantity for every run once, at its full length."""
    seen: set[Any] = set()
    found: Drawn = []
    for p in sorted(pools, key=lambda p: -p.epochs):
        values = p.series(*quantity.keys)
        if values is None:
            continue
        owners = [(run.path, seed) for run in p.runs for seed in run.header["config"]["seeds"]]
        new = [i for i, owner in enumerate(owners) if owner not in seen]
        seen.update(owners)
        if new:
            found.append((p, values[:, new]))
    return sorted(found, key=lambda each: pools.index(each[0]))


def curves(file: str, title: str, quantity: Quantity, pools: Sequence[Pool]) -> Figure | None:
    """The quantity by epoch on a logarithmic axis: a line per run, and the paper's bars at its last epoch.

    Optimizers are named on the right, at the height of the paper's bar or of the end of their line. Returns
    None if no pool has the quantity.
    """
    drawn = series(quantity, pools)
    if not drawn:
        return None
    experiment = drawn[0][0].experiment
    theirs = {p.optimizer: mark for p, _ in drawn if (mark := quantity.reported(experiment, p.optimizer))}
    authors = paper.AUTHORS.get(quantity.keys[0]) if experiment == "mnist" else None
    end = max(p.epochs for p, _ in drawn)

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for p, values in drawn:
            _lines(axes, p, values, quantity)
        optimizers = list(dict.fromkeys(p.optimizer for p, _ in drawn))
        if authors:
            for optimizer in optimizers:
                _points(axes, authors, optimizer, end)
        for i, (optimizer, mark) in enumerate(theirs.items()):
            _bar(axes, end * (1.12 + 0.1 * i), mark, STYLES.get(optimizer, OTHER)[0])
        _epochs(axes, quantity, end, len(theirs))
        if theirs:
            _above_bars(axes, experiment, end)
        ends = {p.optimizer: _end(values, quantity) for p, values in reversed(drawn)}
        _names(axes, {o: theirs[o][0] if o in theirs else ends[o] for o in optimizers})

    about = f"{title}. {_what(drawn, quantity)}"
    if theirs:
        what = "smallest and largest" if quantity.worst else "mean and standard deviation"
        about += f" Bars: the paper's {what} after {paper.EPOCHS[experiment]} epochs."
    if authors and any(p.optimizer in authors.values for p, _ in drawn):
        about += " Circles: the authors' published run."
    return figure(file, about, f"{title}: {_in_words(drawn, quantity)}", draw, height=3.4)


def panels(file: str, title: str, quantity: Quantity, pools: Sequence[Pool]) -> Figure | None:
    """The same with a panel for each optimizer, for many seeds whose lines would cover one another."""
    drawn = series(quantity, pools)
    if not drawn:
        return None
    experiment = drawn[0][0].experiment
    optimizers = list(dict.fromkeys(p.optimizer for p, _ in drawn))
    theirs = {o: mark for o in optimizers if (mark := quantity.reported(experiment, o))}
    end = max(p.epochs for p, _ in drawn)
    columns = min(2, len(optimizers))

    def draw(canvas: Canvas) -> None:
        grid = canvas.subplots(
            -(-len(optimizers) // columns), columns, squeeze=False, sharex=True, sharey=True
        )
        for axes in grid.flat[len(optimizers) :]:
            axes.set_visible(False)
        for axes, optimizer in zip(grid.flat, optimizers, strict=False):
            for p, values in drawn:
                if p.optimizer == optimizer:
                    _lines(axes, p, values, quantity)
                else:
                    epochs = drawn_epochs(len(values))
                    axes.plot(
                        epochs, values[epochs - 1].mean(1), color=GREY, alpha=0.5, linewidth=1, zorder=1
                    )
            if optimizer in theirs:
                _bar(axes, end * 1.15, theirs[optimizer], INK)
            axes.set_title(name(OPTIMIZERS, optimizer), color=STYLES.get(optimizer, OTHER)[0], loc="left")
            _epochs(axes, quantity, end, len(theirs) > 0, alone=False)
        canvas.supxlabel("epoch", fontsize=12)
        canvas.supylabel(quantity.words, fontsize=12)

    about = f"{title}. {_what(drawn, quantity)} Grey lines: the means of the others."
    if theirs:
        about += f" Bar: the paper's mean and standard deviation after {paper.EPOCHS[experiment]} epochs."
    height = 1.1 + 1.6 * -(-len(optimizers) // columns)
    return figure(file, about, f"{title}: {_in_words(drawn, quantity)}", draw, height=height)


def variants(file: str, title: str, quantity: Quantity, pools: Sequence[Pool]) -> Figure | None:
    """Runs with a label or another setting, each named in a legend."""
    drawn = series(quantity, pools)
    if not drawn:
        return None
    last = max(p.epochs for p, _ in drawn)

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for i, (p, values) in enumerate(drawn):
            _lines(axes, p, values, quantity, MARKERS[i % len(MARKERS)])
        _epochs(axes, quantity, last, 0)
        styles: dict[str, Any] = {"handlelength": 2.6, "ncols": 1}
        canvas.legend(*axes.get_legend_handles_labels(), loc="outside lower center", **styles)

    about = f"{title}. {_what(drawn, quantity)}"
    alt = f"{title}: {_in_words(drawn, quantity)}"
    return figure(file, about, alt, draw, height=2.9 + 0.22 * len(drawn))


def _lines(axes: Axes, p: Pool, values: Array, quantity: Quantity, marker: str = "") -> None:
    """Draw every seed; for many seeds thin lines and their mean, or the largest if only the worst counts."""
    colour, style = STYLES.get(p.optimizer, OTHER)
    epochs = drawn_epochs(len(values))
    many = values.shape[1] > FEW
    if many and quantity.worst:
        values = np.maximum.accumulate(values)
    values = values[epochs - 1]
    strong = values.max(1, keepdims=True) if quantity.worst else values.mean(1, keepdims=True)
    if quantity.log:
        values, strong = (np.where(x > 0, x, np.nan) for x in (values, strong))
    if many and not quantity.worst:
        axes.plot(epochs, values, color=colour, linewidth=0.6, alpha=0.45)
    axes.plot(
        *(epochs, strong if many else values),
        color=colour,
        linestyle=style,
        linewidth=1.8,
        alpha=1.0 if p.finished else 0.6,
        marker=marker or ("o" if len(epochs) == 1 else None),
        markevery=max(1, len(epochs) // 6),
        markersize=5,
        label=_legend(p),
    )


def _end(values: Array, quantity: Quantity) -> float:
    """Where the line of `_lines` ends."""
    return float(values.max() if quantity.worst and values.shape[1] > FEW else values[-1].mean())


def _epochs(axes: Axes, quantity: Quantity, end: int, bars: int, alone: bool = True) -> None:
    """Set up the axes of a curve, with room on the right for the paper's bars."""
    right = end * (1.1 + 0.1 * bars if alone else 1.35) if bars else end * 1.03
    axes.set(xscale="log", yscale="log" if quantity.log else "linear", xlim=(0.9, max(right, 1.2)))
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if tick <= end]
    ticks = (
        ticks
        if alone and len(ticks) < 7
        else [tick for tick in (1, 10, 100, 500, 1000) if tick <= end and (tick != 500 or end == 500)]
    )
    axes.set_xticks(ticks, [f"{tick}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    if alone:
        axes.set(xlabel="epoch", ylabel=quantity.words)
    if quantity is ERROR:  # less than two decades: numbers, not powers of ten
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        axes.yaxis.set_minor_formatter("{x:g}")


def _above_bars(axes: Axes, experiment: str, end: int) -> None:
    """Say whose bars these are, and after how many epochs if the axis ends earlier."""
    epochs = paper.EPOCHS[experiment]
    words = "paper" if end >= epochs else f"paper, {epochs} epochs"
    axes.annotate(words, (1, 1.01), xycoords="axes fraction", ha="right", fontsize=10)


def _bar(axes: Axes, x: float, mark: tuple[float, float, float], colour: str) -> None:
    mid, low, high = mark
    axes.plot([x, x], [low, high], color=colour, linewidth=4, alpha=0.6, solid_capstyle="butt")
    axes.plot(x, mid, marker="_", markersize=8, markeredgewidth=2, color=colour)


def _names(axes: Axes, heights: dict[str, float]) -> None:
    """Write the optimizers' names right of the axes at these heights, moved apart if they would touch."""
    axes.set_ylim(axes.get_ylim())
    scale = axes.transScale + axes.transLimits
    found = {o: float(scale.transform((1, y))[1]) for o, y in heights.items()}
    want = sorted((min(max(y, 0.0), 1.0), o) for o, y in found.items() if np.isfinite(y))
    places = [y for y, _ in want]
    for _ in range(100):
        for i in range(1, len(places)):
            gap = 0.085 - (places[i] - places[i - 1])
            if gap > 1e-6:
                places[i - 1], places[i] = places[i - 1] - gap / 2, places[i] + gap / 2
    for y, (_, o) in zip(places, want, strict=True):
        style = {
            "xycoords": "axes fraction",
            "va": "center",
            "color": STYLES.get(o, OTHER)[0],
            "annotation_clip": False,
        }
        axes.annotate(SHORT.get(o, o), (1.02, y), **style)  # type: ignore[arg-type]


def _legend(p: Pool) -> str:
    title = p.title().replace("$", r"\$")  # text between two of them would be read as TeX
    return title if p.finished else f"{title} ({p.epochs} of {p.asked} epochs)"


def drawn_epochs(count: int) -> NDArray[np.int64]:
    """1 ... count, or a selection that is even on a logarithmic axis and includes the last."""
    return np.unique(np.round(np.geomspace(1, count, POINTS)).astype(np.int64))


def _points(axes: Axes, authors: paper.Curve, optimizer: str, last: int) -> None:
    """Draw the authors' published run as far as the axis goes."""
    points = [
        (e, v) for e, v in zip(authors.epochs, authors.values.get(optimizer, ()), strict=False) if e <= last
    ]
    if points:
        style: dict[str, Any] = {"color": STYLES.get(optimizer, OTHER)[0], "linestyle": ""}
        axes.plot(*zip(*points, strict=True), **style, marker="o", markersize=5, markerfacecolor="none")


def _what(drawn: Drawn, quantity: Quantity) -> str:
    if not any(values.shape[1] > FEW for _, values in drawn):
        return "Each line is a run."
    return (
        "Line: the largest of all seeds so far."
        if quantity.worst
        else "Thin lines: seeds; thick: their mean."
    )


def _in_words(drawn: Drawn, quantity: Quantity) -> str:
    ends = [(p.title(), values[0].mean(), values[-1].mean(), p.epochs) for p, values in drawn]
    parts = [f"{title} from {a:.3g} to {b:.3g} in {counted(epochs, 'epoch')}" for title, a, b, epochs in ends]
    return f"{quantity.words} over epochs; {'; '.join(parts)}."


# -- the pendulum --------------------------------------------------------------------------------------------


def angles(points: Array) -> tuple[Array, Array]:
    """(..., 4) -> (...): theta in [0, 2 pi) and its derivative.

    From q = (sin, cos) and p = (theta' cos, -theta' sin).
    """
    sin, cos, p1, p2 = np.moveaxis(points, -1, 0)
    return np.arctan2(sin, cos) % (2 * np.pi), p1 * cos - p2 * sin


def phase_space(sample: dict[str, Any]) -> Figure:
    """The sample's trajectories in phase space: the data, and the autoencoder's reconstruction."""
    original, rebuilt = (np.array(sample[key], dtype=np.float64) for key in ("original", "reconstruction"))

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
        "make of them. θ is taken modulo 2π; the stable position is π."
    )
    alt = (
        f"Phase space of {len(original)} trajectories: closed curves around π oscillate, those from 0 to 2π "
        "rotate."
    )
    return figure("pendulum-phase-space", caption, alt, draw)


def reconstruction(sample: dict[str, Any], whose: str) -> Figure:
    """The four coordinates of one trajectory by time: data and reconstruction."""
    original, rebuilt = (np.array(sample[key], dtype=np.float64) for key in ("original", "reconstruction"))
    t = np.array(sample["t"], dtype=np.float64)
    # the trajectory that moves most among the sample: one at rest would show nothing
    i = int(np.argmax(original.std(1).sum(-1)))
    error = float(np.linalg.norm(original[i] - rebuilt[i]) / np.linalg.norm(original[i]))

    def draw(canvas: Canvas) -> None:
        panels = canvas.subplots(2, 2, sharex=True)
        for k, (axes, title) in enumerate(
            zip(panels.T.flat, ("q₁ = sin θ", "q₂ = cos θ", "p₁", "p₂"), strict=True)
        ):
            axes.plot(t, original[i, :, k], color=INK, linewidth=1.4, label=None if k else "data")
            style = {"color": RECONSTRUCTION, "linestyle": "--", "linewidth": 1.6}
            axes.plot(t, rebuilt[i, :, k], label=None if k else "reconstruction", **style)
            axes.set_title(title)
        for axes in panels[1]:
            axes.set_xlabel("t")
        canvas.legend(loc="outside lower center", ncols=2)

    caption = (
        f"Reconstruction over time by {whose}, seed {sample['seed']}, epoch {sample['epoch']}: of the "
        f"sample's {len(original)} trajectories the one that moves most; its relative error is {error:.2g}."
    )
    alt = f"Four coordinates over time, data and reconstruction, with a relative error of {error:.2g}."
    return figure("pendulum-reconstruction", caption, alt, draw, height=4.6)


def latent(samples: Sequence[tuple[Pool, dict[str, Any]]]) -> Figure:
    """The learned coordinates of the sample's trajectories, one panel per configuration."""
    columns = min(2, len(samples))
    lines = -(-len(samples) // columns)

    def draw(canvas: Canvas) -> None:
        panels = canvas.subplots(lines, columns, squeeze=False)
        for axes in panels.flat[len(samples) :]:
            axes.set_visible(False)
        for axes, (p, sample) in zip(panels.flat, samples, strict=False):
            data = np.array(sample["latent"], dtype=np.float64)  # (trajectories, points, 2)
            shades = matplotlib.colormaps["viridis"](np.linspace(0.3, 0.8, len(data)))
            for trajectory, shade in zip(data, shades, strict=True):
                axes.plot(*trajectory.T, color=shade, linewidth=1.2)
            axes.set_title(name(OPTIMIZERS, p.optimizer))
        for axes in panels[-1]:
            axes.set_xlabel("q, learned")
        for axes in panels[:, 0]:
            axes.set_ylabel("p, learned")

    label = samples[0][0].label
    caption = (
        "The learned coordinates in R² of the sample's trajectories"
        + (f", reading “{label}”" if label else "")
        + ", first seed of each configuration: a set of coordinates that is not (θ, dθ/dt)."
    )
    titles = ", ".join(name(OPTIMIZERS, p.optimizer) for p, _ in samples)
    alt = f"Curves in the plane of learned coordinates for {titles}."
    return figure("pendulum-latent", caption, alt, draw, height=1.2 + 2.2 * lines)
