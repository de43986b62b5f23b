"""The report's figures: drawn from records, as SVG that stands alone and as SVG that takes the colours of a page.

Lines are means over seeds, bands one sample standard deviation; the narrow panel on the right holds what the paper
reports, which is for more epochs than the lines may show. Colours are from the Okabe-Ito palette, which colour-blind
readers can tell apart, those of it that are legible on white and on black; line styles tell the same.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator
from numpy.typing import NDArray

from . import paper
from .pool import OPTIMIZERS, Array, Pool, name

INK, PAPER = "#1b1d22", "#fffffe"  # stand for the page's text and background: no other colour may be one of them
GREY = "#808080"
WIDTH = 5.2  # inches: on a phone it is shown at 3/4 of this, and the letters are still legible
POINTS = 250  # drawn of a line at most: more than can be told apart at this width

STYLES: dict[str, tuple[str, Any]] = {
    "geometric-adam": ("#0072B2", "-"),
    "scalar-moment-adam": ("#D55E00", (0, (5, 1.2))),
    "momentum": ("#009E73", (0, (6, 1.2, 1.2, 1.2))),
    "gradient": ("#CC79A7", (0, (1.5, 1))),
    "standard-adam": (GREY, (0, (3, 1, 1, 1, 1, 1))),
}
OTHER = ("#9A8A00", "-")
RECONSTRUCTION = "#D55E00"
MARKERS = ("", "s", "^", "D", "v", "P", "X")  # tell pools of one optimizer apart

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
    """`alt` says in words what is to be seen."""

    name: str
    svg: str
    caption: str
    alt: str

    def inline(self) -> str:
        """For a page: its text colour for the ink, no background, ids of its own, no addresses."""
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
    file: str, caption: str, alt: str, draw: Callable[[Canvas], None], height: float = 3.9, width: float = WIDTH
) -> Figure:
    """Draw on a canvas of the report's style."""
    with matplotlib.rc_context(RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a label in letters that the font has not: boxes will do
        canvas = Canvas(figsize=(width, height), layout="constrained")
        draw(canvas)
        out = io.StringIO()
        canvas.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return Figure(file, out.getvalue(), caption, alt)


# -- curves over epochs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantity:
    """What is drawn over epochs: keys of the record, words, and the paper's (mid, low, high) of an optimizer."""

    keys: tuple[str, ...]
    words: str
    log: bool = False
    extremes: bool = False  # the band is from smallest to largest, not mean -+ standard deviation
    reported: Callable[[str, str], tuple[float, float, float] | None] = lambda experiment, optimizer: None


def _reported(key: str) -> Callable[[str, str], tuple[float, float, float] | None]:
    def find(experiment: str, optimizer: str) -> tuple[float, float, float] | None:
        outcome = paper.OUTCOMES.get(experiment, {}).get(optimizer)
        pair = getattr(outcome, key, None)
        if pair is None:
            return None
        if key == "drift":
            return float(np.sqrt(pair[0] * pair[1])), pair[0], pair[1]
        return pair[0], pair[0] - pair[1], pair[0] + pair[1]

    return find


LOSS = Quantity(("loss",), "training loss", reported=_reported("final"))
ERROR = Quantity(("loss",), "relative reconstruction error", log=True, reported=_reported("final"))
ACCURACY = Quantity(("test_accuracy",), "test accuracy (%)", reported=_reported("accuracy"))
DRIFT = Quantity(("drift",), "drift ‖YᵀY - I‖", log=True, extremes=True, reported=_reported("drift"))
ENCODER = Quantity(("symplecticity", "encoder"), "encoder ‖M J Mᵀ - J‖", log=True, extremes=True)
DECODER = Quantity(("symplecticity", "decoder"), "decoder ‖Mᵀ J M - J‖", log=True, extremes=True)


def curves(file: str, title: str, quantity: Quantity, pools: Sequence[Pool]) -> Figure | None:
    """The quantity over epochs of pools of one experiment; None where none of them has it."""
    drawn = [(p, values) for p in pools if (values := p.series(*quantity.keys)) is not None]
    if not drawn:
        return None
    experiment = drawn[0][0].experiment
    with_label = len({p.label for p, _ in drawn}) > 1
    theirs = {p.optimizer: mark for p, _ in drawn if (mark := quantity.reported(experiment, p.optimizer))}
    authors = paper.AUTHORS.get(quantity.keys[0]) if experiment == "mnist" else None

    legend_columns = 1 if any(len(_legend(p, with_label)) > 24 for p, _ in drawn) else 2
    legend_lines = -(-(len(drawn) + bool(authors)) // legend_columns)

    def draw(canvas: Canvas) -> None:
        axes, strip = _panels(canvas, quantity, experiment, theirs)
        count: dict[str, int] = {}
        for p, values in drawn:
            nth = count[p.optimizer] = count.get(p.optimizer, -1) + 1
            _line(axes, p, values, quantity, MARKERS[nth % len(MARKERS)], _legend(p, with_label))
        handles, labels = axes.get_legend_handles_labels()
        last = max(p.epochs for p, _ in drawn)
        if authors and sum(_points(axes, authors, optimizer, last) for optimizer in count):
            handles.append(Line2D([], [], color=INK, marker="o", markerfacecolor="none", linestyle=":"))
            labels.append("authors' published run")
        axes.set_xlim(0 if last > 1 else 0.5, last + (0.02 * last if last > 1 else 0.5))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        if strip is not None:
            _marks(strip, theirs)
        style: dict[str, Any] = {"ncols": legend_columns, "handlelength": 2.6, "columnspacing": 1.2}
        canvas.legend(handles, labels, loc="outside lower center", **style)

    band = "smallest to largest" if quantity.extremes else "one sample standard deviation"
    about = f"{title}. Line: mean over seeds; band: {band}."
    step = -(-max(p.epochs for p, _ in drawn) // POINTS)
    if step > 1:
        about += f" One epoch in {step} is drawn."
    if theirs:
        what = "smallest and largest" if quantity.extremes else "mean and standard deviation"
        about += f" Right: the paper's {what} after {paper.EPOCHS[experiment]} epochs."
    return figure(file, about, f"{title}: {_in_words(drawn, quantity)}", draw, height=3.4 + 0.22 * legend_lines)


def _panels(canvas: Canvas, quantity: Quantity, experiment: str, theirs: dict[str, Any]) -> tuple[Axes, Axes | None]:
    """The panel of the curves and, where the paper has numbers, the narrow one of the paper."""
    strip = None
    if theirs:
        axes, strip = canvas.subplots(1, 2, sharey=True, width_ratios=(1, 0.2))
        strip.set(xlim=(-0.7, len(theirs) - 0.3), xticks=[])
        strip.set_xlabel(f"paper,\nepoch {paper.EPOCHS[experiment]}", fontsize=10)
        strip.tick_params(axis="y", left=False, which="both")
        strip.spines["left"].set_visible(False)
    else:
        axes = canvas.subplots()
    axes.set(xlabel="epoch", ylabel=quantity.words, yscale="log" if quantity.log else "linear")
    if quantity is ERROR:  # less than two decades: numbers, not powers of ten
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        axes.yaxis.set_minor_formatter("{x:g}")
    return axes, strip


def _line(axes: Axes, p: Pool, values: Array, quantity: Quantity, marker: str, label: str) -> None:
    colour, style = STYLES.get(p.optimizer, OTHER)
    epochs = drawn_epochs(len(values))
    values = values[epochs - 1]
    mean = values.mean(1)
    deviation = values.std(1, ddof=1) if values.shape[1] > 1 else np.zeros_like(mean)
    low, high = (values.min(1), values.max(1)) if quantity.extremes else (mean - deviation, mean + deviation)
    if quantity.log:  # nothing at or below 0 has a place there; a band that reaches it goes down to a tenth of its line
        mean, high = (np.where(x > 0, x, np.nan) for x in (mean, high))
        low = np.where(low > 0, low, mean / 10)
    fade = 1.0 if p.finished else 0.6
    axes.fill_between(epochs, low, high, color=colour, alpha=0.18 * fade, linewidth=0)
    axes.plot(
        *(epochs, mean),
        color=colour,
        linestyle=style,
        linewidth=1.8,
        alpha=fade,
        marker=marker or ("o" if len(epochs) == 1 else None),
        markevery=max(1, len(epochs) // 8),
        markersize=5,
        label=label,
    )


def _legend(p: Pool, label: bool) -> str:
    title = p.title(label).replace("$", r"\$")  # what is between two of them would be read as TeX
    return title if p.finished else f"{title} ({p.epochs} of {p.asked} epochs)"


def drawn_epochs(count: int) -> NDArray[np.int64]:
    """1 ... count, or every k-th of them and the last."""
    step = -(-count // POINTS)
    return np.append(np.arange(1, count, step), count)


def _points(axes: Axes, authors: paper.Curve, optimizer: str, last: int) -> int:
    """The authors' published run as far as ours go; how many points that is."""
    points = [(e, v) for e, v in zip(authors.epochs, authors.values.get(optimizer, ()), strict=False) if e <= last]
    if points:
        axes.plot(
            *zip(*points, strict=True),
            color=STYLES.get(optimizer, OTHER)[0],
            linestyle=":",
            linewidth=1,
            marker="o",
            markersize=5,
            markerfacecolor="none",
        )
    return len(points)


def _marks(strip: Axes, theirs: dict[str, tuple[float, float, float]]) -> None:
    for x, (optimizer, (mid, low, high)) in enumerate(theirs.items()):
        colour = STYLES.get(optimizer, OTHER)[0]
        strip.plot([x, x], [low, high], color=colour, linewidth=2, solid_capstyle="butt")
        strip.plot(x, mid, marker="_", markersize=9, markeredgewidth=2, color=colour)


def _in_words(drawn: Sequence[tuple[Pool, Array]], quantity: Quantity) -> str:
    ends = [(p.title(), values[0].mean(), values[-1].mean(), p.epochs) for p, values in drawn]
    parts = [f"{title} from {first:.3g} to {last:.3g} in {epochs} epochs" for title, first, last, epochs in ends]
    return f"{quantity.words} over epochs; {'; '.join(parts)}."


# -- the pendulum ------------------------------------------------------------------------------------------------------


def angles(points: Array) -> tuple[Array, Array]:
    """theta in [0, 2 pi) and its derivative from q = (sin, cos), p = (theta' cos, -theta' sin): (..., 4) -> (...)."""
    sin, cos, p1, p2 = np.moveaxis(points, -1, 0)
    return np.arctan2(sin, cos) % (2 * np.pi), p1 * cos - p2 * sin


def phase_space(sample: dict[str, Any]) -> Figure:
    """The sample's trajectories in phase space, the original and what the autoencoder makes of them."""
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
        "The pendulum in phase space: trajectories of the data, θ″ = sin θ, and what decoder and encoder make of them. "
        "θ is taken modulo 2π; the stable position is π."
    )
    alt = f"Phase space of {len(original)} trajectories: closed curves around π oscillate, those from 0 to 2π rotate."
    return figure("pendulum-phase-space", caption, alt, draw)


def reconstruction(sample: dict[str, Any], whose: str) -> Figure:
    """The four coordinates of one trajectory over time, original and reconstruction."""
    original, rebuilt = (np.array(sample[key], dtype=np.float64) for key in ("original", "reconstruction"))
    t = np.array(sample["t"], dtype=np.float64)
    # the trajectory that moves most among the sample: one at rest would show nothing
    i = int(np.argmax(original.std(1).sum(-1)))
    error = float(np.linalg.norm(original[i] - rebuilt[i]) / np.linalg.norm(original[i]))

    def draw(canvas: Canvas) -> None:
        panels = canvas.subplots(2, 2, sharex=True)
        for k, (axes, title) in enumerate(zip(panels.T.flat, ("q₁ = sin θ", "q₂ = cos θ", "p₁", "p₂"), strict=True)):
            axes.plot(t, original[i, :, k], color=INK, linewidth=1.4, label=None if k else "data")
            style = {"color": RECONSTRUCTION, "linestyle": "--", "linewidth": 1.6}
            axes.plot(t, rebuilt[i, :, k], label=None if k else "reconstruction", **style)
            axes.set_title(title)
        for axes in panels[1]:
            axes.set_xlabel("t")
        canvas.legend(loc="outside lower center", ncols=2)

    caption = (
        f"Reconstruction over time by {whose}, seed {sample['seed']}, epoch {sample['epoch']}: of the sample's "
        f"{len(original)} trajectories the one that moves most; its relative error is {error:.2g}."
    )
    alt = f"Four coordinates over time, data and reconstruction, with a relative error of {error:.2g}."
    return figure("pendulum-reconstruction", caption, alt, draw, height=4.6)


def latent(samples: Sequence[tuple[Pool, dict[str, Any]]]) -> Figure:
    """The learned coordinates of the sample's trajectories, a panel a configuration."""
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
