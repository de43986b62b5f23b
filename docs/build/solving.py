"""Run the examples of docs/solving.md and draw the results into docs/pictures; `make pictures` runs this."""

import re
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

HERE = Path(__file__).parents[1]


def examples() -> SimpleNamespace:
    """The variables that the page's code leaves."""
    scope: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", (HERE / "solving.md").read_text(), re.DOTALL)[1:]:
        exec(block, scope)
    return SimpleNamespace(**scope)


def picture(axes: int, width: float) -> tuple[Figure, list[Axes]]:
    """A figure with some axes in a row."""
    matplotlib.rcParams["axes.prop_cycle"] = matplotlib.cycler(color=["#3f51b5", "#e08214"])
    figure = Figure(figsize=(width, 2.5), layout="constrained")
    return figure, list(figure.subplots(1, axes, squeeze=False)[0])


def save(figure: Figure, name: str) -> None:
    """Write a figure into docs/pictures."""
    (HERE / "pictures").mkdir(exist_ok=True)
    figure.savefig(HERE / "pictures" / f"{name}.png", dpi=120)


def degrees(R: Tensor, truth: Tensor) -> Tensor:
    """Angles between rotations, each relative to the first of its batch."""
    turn = (R @ R[0].mT).mT @ (truth @ truth[0].mT)
    return torch.rad2deg(torch.acos(((turn.diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2).clamp(-1, 1)))


def main() -> None:
    """Draw all four pictures."""
    e = examples()

    figure, (left, right) = picture(2, 5)
    left.scatter(*(e.X @ e.pca.x).mT, c=e.kind, cmap="viridis", s=8)
    left.set(xlabel="first direction", ylabel="second", aspect="equal")
    x, y = ([h[key] for h in e.pca.history] for key in ("evaluations", "gradient_norm"))
    right.semilogy(x, y, ".-")
    right.set(xlabel="evaluations", ylabel="gradient norm")
    save(figure, "pca")

    figure, axes = picture(2, 4.5)
    for ax, Z, title in zip(axes, (e.A, e.A @ e.fit.x), ("as given", "turned"), strict=True):
        ax.plot(*e.B.mT, ".", color="C1", markersize=3)
        ax.plot(*Z.mT, color="C0")
        ax.set(title=title, aspect="equal", xticks=[], yticks=[])
    save(figure, "procrustes")

    figure, (ax,) = picture(1, 3.5)
    number, before, after = torch.arange(2, 13), *(degrees(R, e.truth)[1:] for R in (e.chained, e.found.x))
    ax.plot(number, before, "o", color="#8a8a8a", label="relative to the first alone")
    ax.plot(number, after, "o", color="#3f51b5", label="all measurements")
    ax.vlines(number, after, before, color="#c4c4c4", zorder=0)
    ax.set(xlabel="orientation", ylabel="error (degrees)", ylim=(0, 19))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, loc="upper right")
    save(figure, "rotations")

    figure, (ax,) = picture(1, 4)
    side = e.sides[:, e.edges.argmax()]
    for i, j in e.W.triu().nonzero().tolist():
        style = {"linewidth": 1.2, "ls": "-"} if side[i] != side[j] else {"linewidth": 0.8, "ls": ":"}
        ax.plot(*e.place[[i, j]].mT, color="0.5", **style)
    ax.scatter(*e.place.mT, c=side, cmap="coolwarm", s=25, zorder=2)
    ax.set(title=f"{int(e.edges.max())} edges cut, at most {float(e.bound):.1f}", xticks=[], yticks=[])
    save(figure, "maxcut")


if __name__ == "__main__":
    main()
