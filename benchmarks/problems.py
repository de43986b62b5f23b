"""Problems on manifolds with known optima: our solvers, lifted Adam, geoopt, pymanopt.

    python benchmarks/problems.py --out out/problems

Writes problems.md, problems.json and profiles.png (performance profiles). "to 1e-6" means (f - f*) <= 1e-6
max(1, |f*|), checked at every evaluation; the gap is the smallest until a method stopped. If the optimum has
no closed form, the best value that any method found is used; for the eigenspace LOBPCG provides it. A start
may end in another critical point; the table says so, and then there are no evaluations.

An evaluation has the value and, at the same point, the gradient; a product with the Hessian counts as one
more in the profiles and has a column of its own. pymanopt, which calls f again for each gradient and twice
for each product, is counted in the same way. Seconds are CPU seconds on one thread. Learning rates (Adam
0.02, SGD 1e-3 with momentum 0.9) are the same everywhere and not tuned.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import stamp, write_json
from torch import Tensor

import ghor

GOAL = 1e-6
Loss = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    f: Loss
    start: list[Tensor]
    space: ghor.Space
    best: float | Callable[[], float] | None = None  # known, in closed form, or neither


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def point(space: ghor.Space, *shape: int, seed: int) -> Tensor:
    return space.random(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cases() -> list[Case]:
    St, Gr, SO, Sphere = ghor.Stiefel(), ghor.Grassmann(), ghor.SpecialOrthogonal(), ghor.Sphere()
    X = randn(150, 150, seed=0)
    S, k = (X + X.mT) / 2, torch.arange(1, 6, dtype=torch.float64)
    A, B, P = randn(40, 20, seed=1), randn(40, 5, seed=2), randn(20, 5, seed=3)
    U = point(SO, 8, 8, seed=4)
    joint = U @ torch.diag_embed(randn(12, 8, seed=5)) @ U.mT
    C = randn(20, 5, seed=6)
    mixed = point(St, 6, 6, seed=7) @ torch.empty(6, 2000, dtype=torch.float64).copy_(
        torch.sign(randn(6, 2000, seed=8)) * randn(6, 2000, seed=9).abs() ** 1.5
    )
    white = torch.linalg.inv(torch.linalg.cholesky(mixed @ mixed.mT / 2000)) @ mixed
    low_rank = randn(60, 3, seed=10) @ randn(3, 50, seed=11)
    mask = (torch.rand(60, 50, generator=torch.Generator().manual_seed(12)) < 0.5).double()
    R = point(SO, 20, 3, 3, seed=13)
    seen = R[:, None] @ R.mT[None]

    def completion(x: list[Tensor]) -> Tensor:
        """min over V of |mask (Y V - M)|^2, column by column."""
        Y, weights = x[0], mask.mT  # (50, 60)
        gram = Y.mT @ (weights[:, :, None] * Y)  # (50, 3, 3)
        V = torch.linalg.solve(gram, (Y.mT @ (mask * low_rank)).mT[..., None])[..., 0].mT
        return (mask * (Y @ V - low_rank)).square().sum()

    def rosenbrock(x: list[Tensor]) -> Tensor:
        a, b = x[0][:-1], x[0][1:]
        return (100 * (b - a * a).square() + (1 - a).square()).sum()

    upper = torch.triu_indices(12, 12, 1)

    def thomson(x: list[Tensor]) -> Tensor:
        """The energy of charges on a sphere: the sum of 1/|x_i - x_j|."""
        return (x[0][upper[0]] - x[0][upper[1]]).square().sum(-1).rsqrt().sum()

    def off_diagonal(x: list[Tensor]) -> Tensor:
        T = x[0].mT @ joint @ x[0]
        return T.square().sum() - T.diagonal(dim1=-2, dim2=-1).square().sum()

    return [
        Case(
            "Brockett 150 x 5",
            lambda x: (x[0] * (S @ x[0]) * k).sum(),
            [point(St, 150, 5, seed=20)],
            St,
            lambda: float((torch.linalg.eigvalsh(S)[:5] * k.flip(0)).sum()),
        ),
        Case(
            "eigenspace 150 x 5",
            lambda x: (x[0] * (S @ x[0])).sum(),
            [point(Gr, 150, 5, seed=21)],
            Gr,
            lambda: float(torch.lobpcg(S, 5, largest=False, tol=1e-12)[0].sum()),
        ),
        Case(
            "Procrustes 20 x 5",
            lambda x: -(x[0] * P).sum(),
            [point(St, 20, 5, seed=22)],
            St,
            lambda: -float(torch.linalg.svdvals(P).sum()),
        ),
        Case(
            "Procrustes, unbalanced", lambda x: (A @ x[0] - B).square().sum(), [point(St, 20, 5, seed=23)], St
        ),
        Case("joint diagonalisation 8", off_diagonal, [point(SO, 8, 8, seed=24)], SO, 0.0),
        Case(
            "SVD 20 x 5",
            lambda x: torch.linalg.matrix_norm(C - x[0] @ (x[1].mT @ C)),
            [point(St, 20, 3, seed=25), point(St, 20, 3, seed=26)],
            St,
            lambda: float(torch.linalg.svdvals(C)[3:].norm()),
        ),
        Case(
            "ICA 6",
            lambda x: torch.log(torch.cosh(x[0].mT @ white)).mean(1).sum(),
            [point(St, 6, 6, seed=27)],
            St,
        ),
        Case("completion 60 x 50", completion, [point(Gr, 60, 3, seed=28)], Gr, 0.0),
        Case("Rosenbrock on S^49", rosenbrock, [point(Sphere, 50, seed=30)], Sphere),
        Case("Thomson, 12 charges", thomson, [point(Sphere, 12, 3, seed=31)], Sphere, 49.165253057629),
        Case(
            "rotation averaging 20",
            lambda x: (x[0][:, None] @ x[0].mT[None] - seen).square().sum(),
            [point(SO, 20, 3, 3, seed=29)],
            SO,
            0.0,
        ),
    ]


class Counted:
    """A loss that records every value, with the time since the start and the Hessian products so far."""

    def __init__(self, case: Case) -> None:
        self.case, self.values, self.began = case, list[tuple[float, float, int]](), time.process_time()
        self.products, self.inside = 0, False

    def __call__(self, x: list[Tensor]) -> Tensor:
        value = self.case.f(x)
        if not self.inside:
            self.values.append((float(value.detach()), time.process_time() - self.began, self.products))
        return value

    def part(self, derivative: Callable[..., Any], products: int) -> Callable[..., Any]:
        """A derivative whose calls of f do not count as evaluations."""

        def call(*args: object) -> Any:
            self.products += products
            self.inside = True
            try:
                return derivative(*args)
            finally:
                self.inside = False

        return call


def ours(method: str) -> Callable[[Counted], object]:
    def run(f: Counted) -> object:
        result = ghor.minimize(f, f.case.start, f.case.space, method, tol=1e-9, max_iterations=3000)
        done = iter([(h["evaluations"], h["hessian_products"]) for h in result.history])
        count, products = next(done)
        for i, (value, seconds, _) in enumerate(f.values, 1):
            while i > count:
                count, products = next(done, (len(f.values), result.hessian_products))
            f.values[i - 1] = value, seconds, products
        return result

    return run


def stepped(
    make: Callable[[list[Tensor], Case], torch.optim.Optimizer], steps: int = 3000
) -> Callable[[Counted], object]:
    def run(f: Counted) -> None:
        x = [torch.nn.Parameter(p.clone()) for p in f.case.start]
        opt = make(x, f.case)
        for _ in range(steps):
            opt.zero_grad()
            loss = f(x)
            loss.backward()
            opt.step()

    return run


def geoopt_adam(x: list[Tensor], case: Case) -> torch.optim.Optimizer:
    import geoopt

    if not isinstance(case.space, ghor.Stiefel | ghor.SpecialOrthogonal):
        raise NotImplementedError("geoopt has no such space")
    held = [geoopt.ManifoldParameter(p.data, manifold=geoopt.CanonicalStiefel()) for p in x]
    x[:] = held
    return geoopt.optim.RiemannianAdam(held, lr=0.02)


def pymanopt(solver: str) -> Callable[[Counted], object]:
    def run(f: Counted) -> object:
        import pymanopt as pm

        case = f.case
        if len(case.start) > 1 or case.start[0].dim() > 2:
            raise NotImplementedError("one matrix")
        x = case.start[0]
        by_columns = isinstance(case.space, ghor.Sphere) and x.dim() == 2  # the oblique manifold
        x = x.mT if by_columns else x
        manifold = {
            "Stiefel": pm.manifolds.Stiefel,
            "Grassmann": pm.manifolds.Grassmann,
            "Sphere": pm.manifolds.Oblique if by_columns else pm.manifolds.Sphere,
            "SpecialOrthogonal": lambda n, _: pm.manifolds.SpecialOrthogonalGroup(n),
        }[type(case.space).__name__](*x.shape)

        @pm.function.pytorch(manifold)
        def cost(Y: Tensor) -> Tensor:
            return f([Y.mT if by_columns else Y])

        options = {"max_iterations": 3000, "max_time": 1e9, "min_gradient_norm": 1e-9, "verbosity": 0}
        problem = pm.Problem(manifold, cost)
        problem._riemannian_gradient = f.part(problem.riemannian_gradient, 0)
        problem._riemannian_hessian = f.part(problem.riemannian_hessian, 1)
        try:
            return getattr(pm.optimizers, solver)(**options).run(problem, initial_point=x.numpy())
        except RuntimeError as error:
            raise NotImplementedError("pymanopt has no second derivatives of a linear function") from error

    return run


METHODS: dict[str, Callable[[Counted], object]] = {
    "L-BFGS": ours("lbfgs"),
    "trust region": ours("trust-region"),
    "CG": ours("cg"),
    "lifted Adam": stepped(lambda x, case: ghor.optim.Adam(x, space=case.space, lr=0.02)),
    "lifted SGD": stepped(lambda x, case: ghor.optim.SGD(x, space=case.space, lr=1e-3, momentum=0.9)),
    "geoopt Adam": stepped(geoopt_adam),
    "pymanopt CG": pymanopt("ConjugateGradient"),
    "pymanopt TR": pymanopt("TrustRegions"),
}


def measure(case: Case, rounds: int) -> list[dict[str, Any]]:
    runs: dict[str, list[tuple[float, float, int]]] = {}
    ends: dict[str, Any] = {}
    for _ in range(rounds):
        for name, run in METHODS.items():
            f = Counted(case)
            try:
                ends[name] = run(f)
            except (NotImplementedError, ImportError):
                continue
            # All rounds have the same values. The time is that of the fastest.
            if name not in runs or f.values[-1][1] < runs[name][-1][1]:
                runs[name] = f.values
    best = min(min(v) for v in runs.values())[0]
    if callable(case.best):
        began = time.process_time()
        best = case.best()
        runs["closed form"] = [(best, time.process_time() - began, 0)]
    elif case.best is not None:
        best = case.best
    scale, rows = max(1.0, abs(best)), []
    for name, values in runs.items():
        hit = next((i for i, (v, *_) in enumerate(values) if v - best <= GOAL * scale), None)
        gap, end = max(0.0, min(v for v, *_ in values) - best) / scale, ends.get(name)
        rows.append(
            {
                "problem": case.name,
                "method": name,
                "evaluations": None if hit is None or name == "closed form" else hit + 1,
                "products": None if hit is None else values[hit][2],
                "seconds": None if hit is None else values[hit][1],
                "gap": gap,
                "all": len(values),
                "iterations": getattr(end, "iterations", None),
                "seconds in all": values[-1][1],
                "gradient": getattr(end, "gradient_norm", None),
                "end": "another critical point" if gap > 1e-8 and getattr(end, "success", False) else "",
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| problem | method | evaluations to 1e-6 | Hessian products | CPU seconds | gap at the end | "
        "gradient there | a start that ended elsewhere |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        count = "-" if r["evaluations"] is None else r["evaluations"]
        seconds = "-" if r["seconds"] is None else f"{r['seconds']:.3f}"
        gradient = "" if r["gradient"] is None else f"{r['gradient']:.1e}"
        cells = (
            r["problem"],
            r["method"],
            count,
            r["products"] or "",
            seconds,
            f"{r['gap']:.1e}",
            gradient,
            r["end"],
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """For each method, the share of problems that it solved within a factor of the best."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    problems, rows = {r["problem"] for r in rows}, [r for r in rows if r["method"] in METHODS]
    rows = [r | {"passes": r["evaluations"] + r["products"]} for r in rows if r["evaluations"] is not None]
    for ax, key, word in zip(
        axes, ("passes", "seconds"), ("evaluations, products", "CPU seconds"), strict=True
    ):
        least = {p: min((r[key] for r in rows if r["problem"] == p), default=1) for p in problems}
        for method in METHODS:
            ratios = sorted(r[key] / least[r["problem"]] for r in rows if r["method"] == method)
            share = [(i + 1) / len(problems) for i in range(len(ratios))]
            ax.step([1, *ratios, 1e4], [0, *share, len(ratios) / len(problems)], where="post", label=method)
        ax.set(
            xscale="log",
            xlim=(1, 1e4),
            ylim=(0, 1.02),
            xlabel=f"{word}, over the least",
            ylabel="share of problems",
        )
    axes[1].legend(fontsize=8)
    figure.savefig(out, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/problems"))
    parser.add_argument("--only", default="", help="problems whose name contains this")
    parser.add_argument("--methods", default="", help="methods, separated by commas")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each; the fastest counts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in list(METHODS):
        if args.methods and name not in args.methods.split(","):
            del METHODS[name]
    rows: list[dict[str, Any]] = []
    St = ghor.Stiefel()
    easy = Case("", lambda x: x[0][:2].square().sum(), [point(St, 6, 2, seed=0)], St)
    for run in METHODS.values():  # what libraries import at first use
        with suppress(NotImplementedError, ImportError):
            run(Counted(easy))
    for case in (c for c in cases() if args.only in c.name):
        rows += (new := measure(case, args.rounds))
        print(table(new), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    begun = stamp()
    write_json({"benchmark": "problems", **begun, "runs": rows}, args.out / "problems.json")
    (args.out / "problems.md").write_text(table(rows))
    draw(rows, args.out / "profiles.png")


if __name__ == "__main__":
    main()
