"""Draw what benchmarks have recorded in lab/results/: `make pictures`. Nothing is measured here."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "pictures"
GHOR, GREY, ORANGE, GREEN = "#3f51b5", "#8a8a8a", "#e08214", "#2e7d5b"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "ghor"}  # the reader's own font
STYLE |= {"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "legend.frameon": False}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False}


def record(path: str) -> Any:
    return json.loads((ROOT / "lab" / "results" / path).read_text())["rows"]


def overview() -> Figure:
    """Bars from zero: one Adam step over 336 separate weights."""
    names = {
        "torch orthogonal, Cayley": "torch orthogonal",
        "geotorch orthogonal, Cayley": "geotorch",
        "geoopt Stiefel, canonical metric": "geoopt, canonical",
        "geoopt Stiefel, Euclidean metric": "geoopt, Euclidean",
        "torch fused Adam, no constraint": "torch, unconstrained",
        "ghor": "ghor",
    }
    rows = {r["contender"]: r["ms"][1] for r in record("step/step.json") if "one by one" in r["workload"]}
    ms = [rows[name] for name in names]
    figure = Figure(figsize=(3.5, 2.7), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([*names.values()], ms, color=[GHOR if name == "ghor" else "#c4c4c4" for name in names])
    axes.bar_label(bars, [f"{t:.0f} ms" if t >= 10 else f"{t:.1f} ms" for t in ms], padding=4)
    figure.suptitle("One Adam step over 336 weights on St(7, 49)", fontsize=9)
    axes.set(xlim=(0, 1.3 * max(ms)), xticks=[])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(left=False)
    return figure


def scaling() -> Figure:
    """Times of one matrix N x 16 as N grows; a cross where a larger N is over the budget."""
    lines = {
        "ghor, implicit": (GHOR, "-", "ghor, implicit section"),
        "ghor, transported": (GHOR, "--", "ghor, transported section"),
        "torch fused Adam, no constraint": (GREY, "-", "torch, unconstrained"),
        "geoopt Stiefel, Euclidean metric": (ORANGE, "-", "geoopt, Euclidean metric"),
        "geoopt Stiefel, canonical metric": (ORANGE, "--", "geoopt, canonical metric"),
        "geotorch orthogonal, exponential": (GREEN, "-", "geotorch"),
        "torch orthogonal, Householder": (GREEN, "--", "torch orthogonal"),
    }
    found = sorted(record("scaling/scaling.json"), key=lambda r: r["N"])
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    for name, (color, style, label) in lines.items():
        rows = [r for r in found if (r["contender"], r["n"], r["batch"]) == (name, 16, 1)]
        x, y = zip(*((r["N"], median(r["ms"])) for r in rows if r.get("ms")), strict=True)
        width = 2 if color == GHOR else 1.2
        axes.plot(x, y, style, color=color, linewidth=width, marker="o", markersize=2.5, label=label)
        if rows[-1].get("stopped"):
            axes.plot(x[-1], y[-1], "x", color=color, markersize=8, markeredgewidth=1.8)
    axes.plot([], [], "x", color="black", label="a larger N is over the budget")
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="N", title="One matrix N x 16, ms a step")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right center")
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {"overview-step": overview, "scaling": scaling}


def main() -> None:
    """Draw all of them."""
    with matplotlib.rc_context(STYLE):
        for name, draw in PICTURES.items():
            draw().savefig(OUT / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
