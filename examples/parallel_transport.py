"""Parallel transport on the sphere S^2 = St(1, 3): the figure of the paper's appendix "Parallel Transport".

v1 (vermilion) is the final velocity, v2 (blue) the cache of an optimizer. The geodesic of v1 is followed for
a number of steps eta. v2 is transported along it with the canonical connection of the second kind, under
which its coordinates in g^hor stay the same.
"""

from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from torch import Tensor

import ghor

SPHERE = ghor.Sphere()
VELOCITY, CACHE, LINES = "#D55E00", "#0072B2", "#30343b"
ETAS = torch.linspace(0, 1.8, 5, dtype=torch.float64)


def camera(azimuth: float, elevation: float) -> Tensor:
    """The camera's axes as rows: right, up and towards the eye, (3, 3); angles in degrees."""
    a, e = torch.deg2rad(torch.tensor([azimuth, elevation], dtype=torch.float64))
    eye = torch.stack([e.cos() * a.cos(), e.cos() * a.sin(), e.sin()])
    right = torch.stack([-a.sin(), a.cos(), torch.zeros_like(a)])
    return torch.stack([right, torch.linalg.cross(eye, right), eye])


VIEW = camera(azimuth=10, elevation=24)


def line(axes: Axes, points: Tensor, behind: float = 0.0, **style: Any) -> None:
    """Draw a curve on the sphere, (T, 3); the far side has `behind` times the opacity."""
    x, y, depth = VIEW @ points.mT
    alpha = style.pop("alpha", 1.0)
    for side, strength in ((depth >= 0, 1.0), (depth < 0, behind)):
        if strength > 0 and bool(side.any()):
            hidden = torch.where(side, 0.0, torch.nan)
            axes.plot((x + hidden).numpy(), (y + hidden).numpy(), alpha=alpha * strength, **style)


def arrow(axes: Axes, Y: Tensor, V: Tensor, colour: str, label: str = "", **style: Any) -> None:
    """Draw the tangent vector V at Y."""
    (x, y, _), (u, v, _) = (VIEW @ Y).tolist(), (VIEW @ (Y + V)).tolist()
    kind = {"arrowstyle": "-|>", "mutation_scale": 12, "linewidth": 1.9, "shrinkA": 0, "shrinkB": 0, **style}
    axes.annotate("", (u, v), (x, y), arrowprops={"color": colour, **kind}, zorder=5)
    if label:
        length = ((u - x) ** 2 + (v - y) ** 2) ** 0.5
        place = (u + 0.11 * (u - x) / length, v + 0.11 * (v - y) / length)
        axes.text(*place, label, color=colour, fontsize=13, ha="center", va="center", zorder=6)


def ball(axes: Axes) -> None:
    """Draw a shaded ball with its meridians and parallels."""
    u = torch.linspace(-1, 1, 200, dtype=torch.float64)
    x, y = torch.meshgrid(u, u, indexing="xy")
    depth = (1 - x**2 - y**2).clamp_min(0).sqrt()
    light = torch.tensor([-0.35, 0.45, 0.82], dtype=torch.float64)
    shade = (x * light[0] + y * light[1] + depth * light[2]).clamp_min(0)
    image = axes.imshow(
        shade.numpy(), extent=(-1, 1, -1, 1), origin="lower", cmap="Greys_r", vmin=-2.6, vmax=1.05, zorder=0
    )
    rim = Circle((0, 0), 1, facecolor="none", edgecolor=LINES, linewidth=1)
    axes.add_patch(rim)
    image.set_clip_path(rim)
    t = torch.linspace(0, 2 * torch.pi, 181, dtype=torch.float64)
    style: dict[str, Any] = {"color": LINES, "alpha": 0.18, "linewidth": 0.7}
    for z in torch.deg2rad(torch.arange(-60.0, 61, 30, dtype=torch.float64)):
        line(axes, torch.stack([z.cos() * t.cos(), z.cos() * t.sin(), z.sin().expand_as(t)], -1), **style)
    for a in torch.deg2rad(torch.arange(0.0, 180, 30, dtype=torch.float64)):
        line(axes, torch.stack([t.cos() * a.cos(), t.cos() * a.sin(), t.sin()], -1), **style)
    axes.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05), aspect="equal")
    axes.axis("off")


def run() -> Figure:
    """Draw the vectors before the transport on the left and after it on the right."""
    Y = SPHERE.project(torch.tensor([0.62, -0.62, 0.35], dtype=torch.float64))
    v1 = SPHERE.tangent(Y, torch.tensor([0.2, 1.0, 0.55], dtype=torch.float64))
    v2 = SPHERE.tangent(Y, torch.tensor([-0.2, 0.1, 1.0], dtype=torch.float64))
    v1, v2 = v1 / SPHERE.norm(Y, v1), 0.5 * v2 / SPHERE.norm(Y, v2)

    figure = Figure(figsize=(5.2, 3.1), layout="constrained")
    before, after = figure.subplots(1, 2)
    for axes, title in ((before, "before"), (after, "after")):
        ball(axes)
        axes.set_title(title)
    before.plot(*(VIEW @ Y)[:2].tolist(), "o", markersize=4, color=LINES, zorder=7)
    arrow(before, Y, 0.6 * v1, VELOCITY, "v₁")
    arrow(before, Y, v2, CACHE, "v₂")
    x, y, _ = (VIEW @ Y).tolist()
    before.text(x - 0.04, y - 0.12, "Y", color=LINES, fontsize=13, ha="center", va="center")

    t = torch.linspace(0, float(ETAS[-1]), 200, dtype=torch.float64)[:, None]
    line(after, SPHERE.exp(Y.expand(200, 3), t * v1), color=VELOCITY, linewidth=1.6, behind=0.3)
    for eta in ETAS.tolist():
        here = SPHERE.exp(Y, eta * v1)
        moved1, moved2 = (SPHERE.transport(Y, eta * v1, v) for v in (v1, v2))
        after.plot(*(VIEW @ here)[:2].tolist(), "o", markersize=4, color=LINES, zorder=7)
        arrow(after, here, 0.25 * moved1, VELOCITY, alpha=0.5)  # the angle between the two stays the same
        arrow(after, here, moved2, CACHE)
    return figure


if __name__ == "__main__":
    run().savefig("parallel_transport.svg")
