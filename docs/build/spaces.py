"""Draw small pictures of spaces, and the two of the idea: `make pictures`. The gallery has more spaces.

Points, frames and geodesics are computed by ghor.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon
from torch import Tensor

import ghor

OUT = Path(__file__).parents[1] / "pictures"
GHOR, WARM, GREY, PALE = "#3f51b5", "#e08214", "#9e9e9e", "#d7dbee"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "ghor", "font.size": 9}  # the reader's own font
STYLE |= {"axes.spines.top": False, "axes.spines.right": False}
TURN = torch.linspace(0, 2 * torch.pi, 73)
CIRCLE = torch.stack([TURN.cos(), TURN.sin()], -1)
DRAWN: dict[str, Callable[[Axes], None]] = {}

# an orthographic view: the rows are right, up and towards the reader
VIEW = torch.tensor([[-0.57, 0.82, 0.0], [-0.27, -0.19, 0.94], [0.77, 0.54, 0.33]])


def seen(X: Tensor) -> Tensor:
    """Points (..., 3) as (3, ...): right, up, depth."""
    return (X.float() @ VIEW.mT).movedim(-1, 0)


def line(ax: Axes, X: Tensor, color: str = GHOR, hide: bool = False, **style: object) -> None:
    """A curve in space, (T, 3); `hide`: what is behind the sphere is faint."""
    x, y, z = seen(X)
    if not hide:
        ax.plot(x, y, color=color, **style)
        return
    style.pop("alpha", None)
    for front, alpha in ((True, 1.0), (False, 0.25)):
        there = (z >= -0.02) == front
        ax.plot(x.where(there, torch.nan), y.where(there, torch.nan), color=color, alpha=alpha, **style)


def flat(P: Tensor) -> list[float]:
    """Where a point of space, or of the plane, is on paper."""
    return (seen(P)[:2] if P.shape[-1] == 3 else P).tolist()


def arrow(ax: Axes, P: Tensor, Q: Tensor, color: str = GHOR, width: float = 1.8, scale: float = 9) -> None:
    style = {"arrowstyle": "-|>", "color": color, "lw": width, "mutation_scale": scale}
    ax.annotate("", flat(Q), flat(P), arrowprops=style | {"shrinkA": 0, "shrinkB": 0})


def dot(ax: Axes, P: Tensor, color: str = GHOR, size: float = 5) -> None:
    ax.plot(*flat(P), "o", color=color, markersize=size)


def word(ax: Axes, text: str, P: Tensor, color: str = "black", shift: tuple[float, float] = (5, 3)) -> None:
    ax.annotate(text, flat(P), shift, textcoords="offset points", color=color)


def fill(ax: Axes, X: Tensor, color: str = GHOR, alpha: float = 0.2) -> None:
    """A filled polygon, (K, 2)."""
    ax.add_patch(Polygon(X.numpy(), color=color, alpha=alpha, linewidth=0))


def ball(ax: Axes) -> None:
    """The unit sphere with a few of its circles."""
    ax.fill(TURN.cos(), TURN.sin(), color="#f3f4fa", zorder=0)
    ax.plot(TURN.cos(), TURN.sin(), color=GREY, linewidth=0.8)
    for height in (-0.5, 0.0, 0.5):
        r = (1 - height**2) ** 0.5
        circle = torch.stack([r * TURN.cos(), r * TURN.sin(), torch.full_like(TURN, height)], -1)
        line(ax, circle, GREY, hide=True, linewidth=0.5)
    for angle in torch.tensor([0.3, 1.35, 2.4]):
        across = TURN.cos()[:, None] * torch.stack([angle.cos(), angle.sin(), torch.tensor(0.0)])
        line(ax, across + TURN.sin()[:, None] * torch.eye(3)[2], GREY, hide=True, linewidth=0.5)
    ax.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25))


def disc(ax: Axes, Y: Tensor, color: str, alpha: float) -> None:
    """The unit disc of span(Y), Y 3 x 2."""
    edge = seen(CIRCLE @ Y.float().mT)[:2]
    fill(ax, edge.mT, color, alpha)
    ax.plot(*edge, color=color, linewidth=1)


def unit(*x: float) -> Tensor:
    return torch.nn.functional.normalize(torch.tensor(x), dim=0)


ORIGIN = torch.zeros(3)
SQUARE = torch.tensor([[-1.0, -1], [1, -1], [1, 1], [-1, 1]])
# a plane that the reader sees half from the side: right, up and depth, back to space
FRAME = ghor.Stiefel().project((torch.tensor([[0.9, -0.25, -0.4], [0.15, 0.75, -0.6]]) @ VIEW).mT)
AXES3 = ghor.SpecialOrthogonal().project(
    torch.tensor([[0.85, -0.4, 0.1], [0.45, 0.85, -0.1], [0, 0.2, 0.95]])
)


def drawn(draw: Callable[[Axes], None]) -> Callable[[Axes], None]:
    DRAWN[draw.__name__] = draw
    return draw


@drawn
def stiefel(ax: Axes) -> None:
    ball(ax)
    disc(ax, FRAME, PALE, 0.5)
    for k in range(2):
        arrow(ax, ORIGIN, FRAME[:, k])
        word(ax, f"y{'₁₂'[k]}", FRAME[:, k], GHOR)


@drawn
def grassmann(ax: Axes) -> None:
    ball(ax)
    V = ghor.Grassmann().tangent(FRAME, torch.tensor([[0.9, 0.0], [-0.5, 0.4], [0.3, -0.6]]))
    for t, color, alpha in ((0.45, GREY, 0.12), (0.0, GHOR, 0.3)):
        disc(ax, ghor.Grassmann().exp(FRAME, t * V), color, alpha)
    word(ax, "span(Y)", FRAME[:, 1], GHOR, (-4, 7))


@drawn
def special_orthogonal(ax: Axes) -> None:
    ball(ax)
    turn = torch.tensor([[0.0, -1, 0.4], [1, 0, -0.2], [-0.4, 0.2, 0]])
    path = [ghor.SpecialOrthogonal().exp(AXES3, t * AXES3 @ turn) for t in torch.linspace(0, 0.7, 15)]
    for k in range(3):
        line(ax, torch.stack([R[:, k] for R in path]), WARM, linewidth=1)
        arrow(ax, ORIGIN, path[0][:, k], GREY, 1.2)
        arrow(ax, ORIGIN, path[-1][:, k])


@drawn
def flag(ax: Axes) -> None:
    ball(ax)
    disc(ax, FRAME, GHOR, 0.22)
    ends = torch.stack([-1.15 * FRAME[:, 0], 1.15 * FRAME[:, 0]])
    line(ax, ends, WARM, linewidth=2)
    word(ax, "a line", 1.15 * FRAME[:, 0], WARM, (-16, -14))
    word(ax, "in a plane", FRAME[:, 1], GHOR, (-4, 7))


@drawn
def sphere(ax: Axes) -> None:
    ball(ax)
    Y, space = unit(0.7, -0.35, 0.6), ghor.Sphere()
    V = 1.25 * space.tangent(Y, torch.tensor([0.0, 1.0, 0.45]))
    t = torch.linspace(0, 1, 30)
    line(ax, space.exp(Y.expand(30, 3), t[:, None] * V), linewidth=2)
    arrow(ax, Y, Y + 0.6 * V, WARM)
    dot(ax, Y)
    word(ax, "y", Y, GHOR, (-10, 3))


SHADES = ("#3f51b5", "#e08214", "#2e7d5b")
SHOWN = {0: "₀", 5: "₅", 10: "₁₀"}


def way() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Adam on the sphere: the point, its frame in the tangent plane, and W, at every step."""
    first, then, start = (
        (unit(*x) @ VIEW)[:, None] for x in ((-0.2, 0.9, 0.5), (0.8, -0.5, 0.3), (-0.65, -0.45, 0.6))
    )
    Y, found = torch.nn.Parameter(ghor.Stiefel().project(start)), []
    optimizer = ghor.optim.Adam([Y], lr=0.12, betas=(0.7, 0.9), space=ghor.Stiefel(), section="transported")
    for t in range(17):
        Y.grad = -first if t < 6 else -then  # a loss that changes, as batches do
        optimizer.step()
        found.append(optimizer.state[Y]["section"].clone())
    return [(L[:, 0], L[:, 1:], L[:, 1:].mT @ M[:, 0]) for L, M in pairwise(found)]


def idea_sphere(ax: Axes) -> None:
    found = way()
    ball(ax)
    line(ax, torch.stack([Y for Y, _, _ in found]), GREY, linewidth=1)
    for Y, _, _ in found:
        dot(ax, Y, GREY, size=2.5)
    for (k, number), shade in zip(SHOWN.items(), SHADES, strict=True):
        Y, Q, W = found[k]
        for i in range(2):
            arrow(ax, Y, Y + 0.27 * Q[:, i], "#606060", 1.1, 6)
        arrow(ax, Y, Y + Q @ W * 2.6, shade, 2.2)
        dot(ax, Y, shade, size=5)
        word(ax, f"Y{number}", Y, shade, (-5, 14) if k == 5 else (-14, -11))
    ax.set_title("The weight Y moves, and its frame Λ moves with it.", fontsize=9)


def idea_plane(ax: Axes) -> None:
    ax.add_patch(Polygon((SQUARE / 2).numpy(), color="#f3f4fa", zorder=0))
    ax.plot([-0.5, 0.5], [0, 0], color=GREY, linewidth=0.6)
    ax.plot([0, 0], [-0.5, 0.5], color=GREY, linewidth=0.6)
    origin, found = torch.zeros(2), way()
    for i in range(2):
        arrow(ax, origin, 0.17 * torch.eye(2)[i], "#606060", 1.1, 6)
    for (k, number), shade in zip(SHOWN.items(), SHADES, strict=True):
        W = 2.2 * found[k][2]
        arrow(ax, origin, W, shade, 2.2)
        ax.text(*(1.22 * W).tolist(), f"W{number}", ha="center", va="center", color=shade)
    ax.set_title("In the frame every step is a vector of one plane, g$^{hor}$.", fontsize=9)
    ax.set(xlim=(-0.55, 0.55), ylim=(-0.55, 0.55))


def save(name: str, draw: Callable[[Axes], None], width: float) -> None:
    figure = Figure(figsize=(width, width), layout="constrained")
    ax = figure.add_subplot(aspect="equal")
    ax.axis("off")
    draw(ax)
    path = OUT / name
    figure.savefig(path, metadata={"Date": None})
    print(f"{path}, {path.stat().st_size / 1000:.0f} kB")


def main() -> None:
    """Draw all of them."""
    OUT.joinpath("spaces").mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, draw in DRAWN.items():
            save(f"spaces/{name}.svg", draw, 2.4)
        save("idea-sphere.svg", idea_sphere, 3.5)
        save("idea-plane.svg", idea_plane, 3.5)


if __name__ == "__main__":
    main()
