"""The paper's comparison of methods as data: what each can do, and how to build it. Tests check the cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch.optim import Optimizer

import ghor
from ghor.baselines import ScalarMomentAdam

from . import baselines
from .tables import Table


@dataclass(frozen=True)
class Method:
    """A row. None means "not applicable": without second moments per entry there is nothing to project."""

    key: str
    title: str
    make: Callable[..., Optimizer]  # takes parameters and lr
    so: bool  # keeps weights on SO(N)
    stiefel: bool  # keeps them on St(n, N), n < N
    vector: bool  # has a second moment per entry
    unprojected: bool | None  # second moments turn tangent vectors into tangent vectors
    paper: bool = False  # a row of the paper's table


# On Stiefel() with n = N, weights move as on SO(N).
ours = partial(ghor.optim.Adam, space=ghor.Stiefel())
scalar = partial(ScalarMomentAdam, space=ghor.Stiefel())
dynamic = partial(baselines.Trivialization, every=10)

Y, N = True, False
METHODS = (
    Method("cheap", "Lezcano-Casado 2019, exp(A)", baselines.CheapOrthogonal, Y, N, Y, Y, paper=True),
    Method("kong-5", "Kong et al. 2022, Algorithm 5", baselines.AdamSO, Y, N, Y, Y, paper=True),
    Method("li-2", "Li et al. 2020, Algorithm 2", baselines.CayleyAdam, Y, Y, N, None, paper=True),
    Method("kong-2", "Kong et al. 2022, Algorithm 2", baselines.AdamStiefel, Y, Y, Y, N, paper=True),
    Method("ghor", "Brantner 2023, ghor.optim.Adam", ours, Y, Y, Y, Y, paper=True),
    Method("static", "Lezcano-Casado 2019, static base", baselines.Trivialization, Y, Y, Y, Y),
    Method("dynamic", "the same, base moved every 10 steps", dynamic, Y, Y, Y, Y),
    Method("scalar", "Li's second moment in g^hor", scalar, Y, Y, N, None),
    Method("li-1", "Li et al. 2020, Algorithm 1 (SGD)", baselines.CayleySGD, Y, Y, N, None),
    Method("muon", "Manifold Muon, Bernstein 2025", baselines.ManifoldMuon, Y, Y, N, None),
    Method("qr", "Adam, then QR", baselines.QRAdam, Y, Y, Y, N),
    Method("soft", "soft constraint, Adam", baselines.SoftConstraintAdam, N, N, Y, Y),
)
HEADINGS = (
    "method",
    "on SO(N)",
    "on St(n, N)",
    "second moment per entry",
    "no projections",
    "in the paper's table",
)


def table() -> Table:
    """The comparison as a table."""
    words = {True: "yes", False: "no", None: "not applicable"}
    cells = [(m.so, m.stiefel, m.vector, m.unprojected, m.paper) for m in METHODS]
    rows = [[m.title, *(words[x] for x in row)] for m, row in zip(METHODS, cells, strict=True)]
    return Table("Methods", HEADINGS, rows, HEADINGS)
