"""Draw what benchmarks have recorded in lab/results/: `make pictures`. Nothing is measured here.

Each picture is narrow enough for a phone, and the pages put panels beside each other where there is room.
"""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "pictures"
GHOR, GREY = "#3f51b5", "#8a8a8a"
OTHERS = ("#e08214", "#2e7d5b", "#b2506e", "#7a6a00", "#4d9fb8", "#8d6cab")
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "ghor"}  # the reader's own font
STYLE |= {"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "legend.frameon": False}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False}


def record(path: str) -> Any:
    return json.loads((ROOT / "lab" / "results" / path).read_text())


def panel(width: float = 3.5, height: float = 2.7) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def short(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 10 else f"{ms:.1f}"


def beside(axes: Axes, text: str, at: tuple[float, float], color: str, right: int) -> None:
    """Words, some points to the right of a place."""
    axes.annotate(text, at, (right, 0), textcoords="offset points", va="center", fontsize=7.5, color=color)


def label(axes: Axes, labels: list[str], ours: list[bool], size: float) -> None:
    """The names of the rows, ours in colour."""
    axes.set_yticks(range(len(labels)), labels, fontsize=size)
    for text, own in zip(axes.get_yticklabels(), ours, strict=True):
        text.set_color(GHOR if own else "black")
    axes.set_ylim(-0.7, len(labels) - 0.3)
    axes.grid(axis="x", alpha=0.25)


def overview() -> Figure:
    """Bars from zero: one Adam step over 336 separate weights."""
    names = {
        "ghor": "ghor",
        "torch fused Adam, no constraint": "torch, unconstrained",
        "geoopt Stiefel, Euclidean metric": "geoopt, Euclidean",
        "geoopt Stiefel, canonical metric": "geoopt, canonical",
        "geotorch orthogonal, Cayley": "geotorch",
        "torch orthogonal, Cayley": "torch orthogonal",
    }
    rows = {
        r["contender"]: r["ms"][1] for r in record("step/step.json")["rows"] if "one by one" in r["workload"]
    }
    shown = {label: rows[name] for name, label in names.items() if name in rows}
    labels, ms = list(shown)[::-1], list(shown.values())[::-1]
    figure, axes = panel()
    bars = axes.barh(labels, ms, color=[GHOR if name == "ghor" else "#c4c4c4" for name in labels])
    axes.bar_label(bars, [f"{short(t)} ms" for t in ms], padding=4)
    figure.suptitle("One Adam step over 336 weights on St(7, 49)", fontsize=9)
    axes.set(xlim=(0, 1.3 * max(ms)), xticks=[])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(left=False)
    return figure


def step() -> Figure:
    """All contenders: a dot is the median, the line spans the quartiles."""
    found = record("step/step.json")
    rows = sorted(found["rows"], key=lambda row: -row["ms"][1])
    figure, axes = panel(4.9, 0.19 * len(rows) + 0.9)
    for y, row in enumerate(rows):
        color = GHOR if row["contender"].startswith("ghor") else GREY
        axes.plot(row["ms"][::2], [y, y], color=color, linewidth=1.5)
        axes.plot(row["ms"][1], y, "o", color=color, markersize=4.5)
        beside(axes, short(row["ms"][1]), (row["ms"][2], y), color, 6)
    axes.set(xscale="log", xlabel=f"ms a step, {found['machine']['threads']} threads")
    axes.set_xlim(right=2.5 * rows[0]["ms"][2])
    labels = [
        f"{row['contender'].removesuffix(', no constraint')}, {row['workload'].split(', ')[1]}"
        for row in rows
    ]
    label(axes, labels, [row["contender"].startswith("ghor") for row in rows], 7.5)
    return figure


SCALING = {
    "ghor, implicit": (GHOR, "-", "ghor, implicit section"),
    "ghor, transported": (GHOR, "--", "ghor, transported section"),
    "torch fused Adam, no constraint": (GREY, "-", "torch, unconstrained"),
    "geoopt Stiefel, Euclidean metric": (OTHERS[0], "-", "geoopt, Euclidean metric"),
    "geoopt Stiefel, canonical metric": (OTHERS[0], "--", "geoopt, canonical metric"),
    "geotorch orthogonal, exponential": (OTHERS[1], "-", "geotorch"),
    "torch orthogonal, Householder": (OTHERS[1], "--", "torch orthogonal"),
}


def look(color: str) -> dict[str, Any]:
    """How a line of `scaling` looks."""
    return {"color": color, "marker": "o", "markersize": 2.5, "linewidth": 2 if color == GHOR else 1.2}


def scaling(n: int, batch: int) -> Figure:
    """Times as N grows; a cross where a larger N is over the budget."""
    found = sorted(record("scaling/scaling.json")["rows"], key=lambda r: r["N"])
    figure, axes = panel()
    for name, (color, style, _) in SCALING.items():
        rows = [r for r in found if (r["contender"], r["n"], r["batch"]) == (name, n, batch)]
        done = [r for r in rows if r.get("ms")]
        if done:
            x, y = [r["N"] for r in done], [median(r["ms"]) for r in done]
            axes.plot(x, y, style, **look(color))
            if rows[-1].get("stopped"):
                axes.plot(x[-1], y[-1], "x", color=color, markersize=8, markeredgewidth=1.8)
    axes.set_xscale("log", base=2)
    matrices = "one matrix" if batch == 1 else f"{batch} matrices"
    axes.set(yscale="log", xlabel="N", title=f"{matrices} N x {n}, ms a step")
    axes.grid(alpha=0.25)
    return figure


def legend() -> Figure:
    """The names of the lines of `scaling`."""
    figure = Figure(figsize=(3.5, 1.55))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    for color, style, name in SCALING.values():
        axes.plot([], [], style, label=name, **look(color))
    axes.plot([], [], "x", color="black", markersize=8, linestyle="", label="a larger N is over the budget")
    axes.legend(loc="center left", fontsize=9)
    return figure


SWEEP = {
    "ghor": "ghor Adam (Brantner 2023)",
    "scalar": "its scalar second moment",
    "li-2": "Li et al. 2020, Adam",
    "li-1": "Li et al. 2020, SGD",
    "kong-2": "Kong et al. 2022",
    "static": "Lezcano-Casado 2019",
    "dynamic": "the same, moving base",
    "muon": "manifold Muon",
    "qr": "Adam, then QR",
    "soft": "penalty",
}


def sweep() -> Figure:
    """For each method a row: every rate is a dot, the best one large."""
    runs: dict[str, list[tuple[float, float]]] = {}
    for r in record("sweep/runs.json"):
        last = r["losses"][-1]
        runs.setdefault(r["method"], []).append((r["lr"], math.inf if last is None else last))
    keys = sorted(runs, key=lambda key: -min(loss for _, loss in runs[key]))
    figure, axes = panel(4.6, 0.3 * len(keys) + 0.9)
    for y, key in enumerate(keys):
        color = GHOR if key == "ghor" else GREY
        for _, loss in runs[key]:
            axes.plot(min(loss, 1.34), y, "o", color=color, markersize=4, alpha=0.35)
        lr, best = min(runs[key], key=lambda pair: pair[1])
        axes.plot(best, y, "o", color=color, markersize=6.5)
        beside(axes, f"{best:.3f} at {lr:.2g}", (1.02, y), color, 0)
    axes.axvline(1.3416, color="black", linestyle=":", linewidth=0.8)
    axes.annotate("constant prediction ", (1.3416, -0.5), fontsize=7, ha="right", va="center")
    label(axes, [SWEEP.get(key, key) for key in keys], [key == "ghor" for key in keys], 8)
    axes.set(xlabel="loss of the second epoch, at seven rates", ylim=(-0.8, len(keys) - 0.4))
    return figure


def muon(over: str) -> Figure:
    """The loss over steps, or over the time of the steps on manifolds."""
    found = record("muon/muon.json")
    every = max(1, found["steps"] // 100)
    figure, axes = panel()
    colors = {"ghor Muon": (GHOR, "-"), "ghor Muon, no momentum": (GHOR, ":"), "ghor Adam": (GHOR, "--")}
    for row in found["rows"]:
        color, style = colors.get(row["method"], (OTHERS[0], "-"))
        x = [every * k * (row["ms"] / 1e3 if over == "seconds" else 1) for k in range(len(row["curve"]))]
        name = f"{row['method']}, lr {row['lr']:g}"
        axes.plot(x, row["curve"], style, color=color, linewidth=1.3, label=name)
    axes.set(yscale="log", ylabel="loss")
    if over == "seconds":
        axes.set(xscale="log", xlabel="seconds of steps on the manifolds")
    else:
        axes.set(xlabel="steps")
        axes.legend()
    return figure


def spheres(problem: str) -> Figure:
    """Median loss of paired runs of Adam with the two sections."""
    entry = record("gauge/spheres.json")["problems"][problem]
    figure, axes = panel()
    styles = {"transported": (OTHERS[0], "-"), "implicit": (GHOR, "--")}
    for section, curve in entry["median"].items():
        color, style = styles[section]
        steps = [10 * (k + 1) for k in range(len(curve))]
        axes.plot(steps, curve, style, color=color, linewidth=1.3, label=section)
    axes.set(xscale="log", yscale="log", xlabel="step", ylabel="median loss", title=entry["title"])
    axes.legend()
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "overview-step": overview,
    "step": step,
    **{f"scaling-{n}-{batch}": partial(scaling, n, batch) for n in (16, 64) for batch in (1, 32)},
    "scaling-legend": legend,
    "sweep": sweep,
    "muon-steps": partial(muon, "steps"),
    "muon-seconds": partial(muon, "seconds"),
    "spheres-s": partial(spheres, "s"),
    "spheres-t": partial(spheres, "t"),
}


def main() -> None:
    """Draw all of them."""
    with matplotlib.rc_context(STYLE):
        for name, draw in PICTURES.items():
            path = OUT / f"{name}.svg"
            draw().savefig(path, metadata={"Date": None})
            print(f"{path}, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
