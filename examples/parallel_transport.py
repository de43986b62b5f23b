"""Parallel transport on the sphere S^2 = St(1, 3): the figure of the paper's appendix "Parallel Transport".

v1 (red) is the final velocity, v2 (purple) the cache of an optimizer. The geodesic of v1 is followed for a number of
steps eta, and v2 is transported along it with the canonical connection of the second kind, under which its coordinates
in g^hor stay the same.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

import ghor

try:
    import matplotlib
except ImportError as error:
    sys.exit(f"this figure needs {error.name}: pip install 'ghor[lab]'")

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

SPHERE = ghor.Sphere()
RED, PURPLE, INK = "#d62728", "#9467bd", "#30343b"
ETAS = torch.linspace(0, 1.8, 5)


def camera(azimuth: float, elevation: float) -> Tensor:
    """Rows: right, up and towards the eye (3, 3), angles in degrees."""
    a, e = torch.deg2rad(torch.tensor([azimuth, elevation], dtype=torch.float64))
    eye = torch.stack([e.cos() * a.cos(), e.cos() * a.sin(), e.sin()])
    right = torch.stack([-a.sin(), a.cos(), torch.zeros_like(a)])
    return torch.stack([right, torch.linalg.cross(eye, right), eye])


VIEW = camera(azimuth=10, elevation=24)


def line(axes: Axes, points: Tensor, behind: float = 0.0, **style) -> None:
    """A curve on the sphere, (T, 3); the part on the far side is drawn with the opacity `behind` times as strong."""
    x, y, depth = VIEW @ points.mT
    alpha = style.pop("alpha", 1.0)
    for side, strength in ((depth >= 0, 1.0), (depth < 0, behind)):
        if strength > 0:
            hidden = torch.where(side, 0.0, torch.nan)
            axes.plot(x + hidden, y + hidden, alpha=alpha * strength, solid_capstyle="round", **style)


def arrow(axes: Axes, Y: Tensor, V: Tensor, colour: str, label: str = "", **style) -> None:
    """The tangent vector V at Y."""
    (x, y, _), (u, v, _) = (VIEW @ Y).tolist(), (VIEW @ (Y + V)).tolist()
    kind = {"arrowstyle": "-|>", "mutation_scale": 16, "linewidth": 2.4, "shrinkA": 0, "shrinkB": 0, **style}
    axes.annotate("", (u, v), (x, y), arrowprops={"color": colour, **kind}, zorder=5)
    if label:
        length = ((u - x) ** 2 + (v - y) ** 2) ** 0.5
        place = (u + 0.08 * (u - x) / length, v + 0.08 * (v - y) / length)
        axes.text(*place, label, color=colour, fontsize=15, ha="center", va="center", zorder=6)


def sphere(axes: Axes) -> None:
    """A shaded ball with its meridians and parallels."""
    u = torch.linspace(-1, 1, 400, dtype=torch.float64)
    x, y = torch.meshgrid(u, u, indexing="xy")
    depth = (1 - x**2 - y**2).clamp_min(0).sqrt()
    light = torch.tensor([-0.35, 0.45, 0.82], dtype=torch.float64)
    shade = (x * light[0] + y * light[1] + depth * light[2]).clamp_min(0)
    ball = axes.imshow(shade, extent=(-1, 1, -1, 1), origin="lower", cmap="Greys_r", vmin=-2.6, vmax=1.05, zorder=0)
    rim = plt.Circle((0, 0), 1, facecolor="none", edgecolor=INK, linewidth=1)
    axes.add_patch(rim)
    ball.set_clip_path(rim)
    t = torch.linspace(0, 2 * torch.pi, 361, dtype=torch.float64)
    style = {"color": INK, "alpha": 0.18, "linewidth": 0.7}
    for z in torch.deg2rad(torch.arange(-60.0, 61, 30, dtype=torch.float64)):
        line(axes, torch.stack([z.cos() * t.cos(), z.cos() * t.sin(), z.sin().expand_as(t)], -1), **style)
    for a in torch.deg2rad(torch.arange(0.0, 180, 30, dtype=torch.float64)):
        line(axes, torch.stack([t.cos() * a.cos(), t.cos() * a.sin(), t.sin()], -1), **style)
    axes.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05), aspect="equal")
    axes.axis("off")


def draw(out: Path) -> None:
    Y = SPHERE.project(torch.tensor([0.62, -0.62, 0.35], dtype=torch.float64))
    v1 = SPHERE.tangent(Y, torch.tensor([0.2, 1.0, 0.55], dtype=torch.float64))
    v2 = SPHERE.tangent(Y, torch.tensor([-0.2, 0.1, 1.0], dtype=torch.float64))
    v1, v2 = v1 / SPHERE.norm(Y, v1), 0.5 * v2 / SPHERE.norm(Y, v2)

    figure, (before, after) = plt.subplots(1, 2, figsize=(11, 5.9))
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=0.93, wspace=0.02)
    for axes in (before, after):
        sphere(axes)
    before.plot(*(VIEW @ Y)[:2].tolist(), "o", color=INK, zorder=7)
    arrow(before, Y, 0.6 * v1, RED, "$v_1$")
    arrow(before, Y, v2, PURPLE, "$v_2$")
    x, y, _ = (VIEW @ Y).tolist()
    before.text(x - 0.04, y - 0.08, "$Y$", color=INK, fontsize=15, ha="center", va="center")
    before.set_title("before: velocity $v_1$ and cache $v_2$ at $Y$")

    t = torch.linspace(0, float(ETAS[-1]), 200, dtype=torch.float64)[:, None]
    line(after, SPHERE.exp(Y.expand(200, 3), t * v1), color=RED, linewidth=1.8, behind=0.3)
    for eta in ETAS.tolist():
        here = SPHERE.exp(Y, eta * v1)
        moved1, moved2 = (SPHERE.transport(Y, eta * v1, v) for v in (v1, v2))
        after.plot(*(VIEW @ here)[:2].tolist(), "o", color=INK, zorder=7)
        arrow(after, here, 0.25 * moved1, RED, alpha=0.5)  # the angle between the two stays the same
        arrow(after, here, moved2, PURPLE)
    after.set_title("after: $v_2$ transported along the geodesic of $v_1$")

    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}.unfinished")
    try:
        figure.savefig(unfinished, dpi=150, format="png")
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/parallel_transport.png"), help="default: %(default)s")
    args = parser.parse_args()
    draw(args.out)
    print(f"picture: {args.out.resolve()}")


if __name__ == "__main__":
    main()
