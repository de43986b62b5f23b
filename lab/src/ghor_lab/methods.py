"""The paper's comparison of methods as data: what each can do, and how to build it. Tests check the cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch.optim import Optimizer

import ghor
from ghor.baselines import ScalarMomentAdam
from ghor_lab import baselines

from .table import Column, Row, Table


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

    def cells(self) -> tuple[str, ...]:
        """The cells for people, in the order of COLUMNS."""
        words = {True: "yes", False: "no", None: "not applicable"}
        return (
            self.title,
            *(words[x] for x in (self.so, self.stiefel, self.vector, self.unprojected, self.paper)),
        )


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

COLUMNS = (
    Column("method", "method"),
    Column("so", "on SO(N)"),
    Column("stiefel", "on St(n, N)"),
    Column("vector", "second moment per entry"),
    Column("unprojected", "no projections"),
    Column("paper", "in the paper's table"),
)
WORDS = (
    "The table shows what published methods can do. The first five rows and four columns are the paper's "
    "table. A test of this package checks the cells by experiment, except “not applicable”, which follows "
    "from the column before, and the last cell of the soft constraint, whose weights may be any matrices. "
    "Li's two algorithms stay on the manifold up to the error of their two iterations, which short steps "
    "make small (the test asks for 1e-5) and long ones do not.",
    "The paper cites the first of Lezcano-Casado's two papers of 2019. The second has Stiefel too; if its "
    "base is moved after every step, it equals the paper's algorithm with the geodesic retraction, step for "
    "step.",
)


def table() -> Table:
    """The comparison as a table."""
    return Table("methods", "Methods", COLUMNS, [Row(method.cells()) for method in METHODS])
