"""Moré, Garbow and Hillstrom's problems for unconstrained minimisation, from the formulas of their paper.

    python benchmarks/more_garbow_hillstrom.py

"Testing unconstrained optimization software", ACM Transactions on Mathematical Software 7 (1981). Small, and
chosen to be hard: curved valleys, flat regions, singular Hessians, and variables whose scales differ by up to
12 orders of magnitude. Each is a sum of squares with the authors' start and the smallest values that they
list; some have several. A method has solved a problem if it comes to one of these values, to five digits, or
to 1e-9 where the value is zero. Runs go on until rounding ends them: where the scales of variables differ
that much, a gradient that is small compared with the first one says little.

The table has calls of f, and products with the Hessian after a plus sign. What was not solved is in bold,
with the value that was reached.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import ghor
from ghor.solve.minimize import METHODS, Method


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def count(m: int) -> Tensor:
    return torch.arange(1, m + 1, dtype=torch.float64)


@dataclass(frozen=True)
class Problem:
    """Residuals, whose squares are summed; a start; the values of the minima."""

    name: str
    residuals: Callable[[Tensor], Tensor]
    start: Tensor
    minima: tuple[float, ...] = (0.0,)

    def f(self, x: Tensor) -> Tensor:
        return self.residuals(x).square().sum()

    def solved(self, value: float) -> bool:
        """Whether this is the value of a minimum."""
        slack = 1e-9 * min(1.0, float(self.f(self.start)))
        return any(abs(value - best) <= max(1e-5 * best, slack) for best in self.minima)

    def run(self, method: Method) -> ghor.solve.Result[Tensor]:
        return ghor.minimize(self.f, self.start, None, method, rtol=1e-15, max_iterations=3000)


def rosenbrock(x: Tensor) -> Tensor:
    return torch.cat([10 * (x[1::2] - x[::2] ** 2), 1 - x[::2]])


def freudenstein_roth(x: Tensor) -> Tensor:
    a, b = x
    return torch.stack([-13 + a + ((5 - b) * b - 2) * b, -29 + a + ((b + 1) * b - 14) * b])


def powell_badly_scaled(x: Tensor) -> Tensor:
    return torch.stack([1e4 * x[0] * x[1] - 1, (-x).exp().sum() - 1.0001])


def brown_badly_scaled(x: Tensor) -> Tensor:
    return torch.stack([x[0] - 1e6, x[1] - 2e-6, x[0] * x[1] - 2])


def beale(x: Tensor) -> Tensor:
    return numbers(1.5, 2.25, 2.625) - x[0] * (1 - x[1] ** count(3))


def jennrich_sampson(x: Tensor) -> Tensor:
    i = count(10)
    return 2 + 2 * i - (i * x[0]).exp() - (i * x[1]).exp()


def helical_valley(x: Tensor) -> Tensor:
    # The angle in turns, continuous but at x[0] = 0.
    angle = torch.atan(x[1] / x[0]) / (2 * math.pi) + (0.5 if x[0] < 0 else 0.0)
    return torch.stack([10 * (x[2] - 10 * angle), 10 * (x[:2].norm() - 1), x[2]])


def bard(x: Tensor) -> Tensor:
    y = numbers(0.14, 0.18, 0.22, 0.25, 0.29, 0.32, 0.35, 0.39, 0.37, 0.58, 0.73, 0.96, 1.34, 2.10, 4.39)
    u = count(15)
    return y - (x[0] + u / ((16 - u) * x[1] + torch.minimum(u, 16 - u) * x[2]))


def gaussian(x: Tensor) -> Tensor:
    y = numbers(0.0009, 0.0044, 0.0175, 0.0540, 0.1295, 0.2420, 0.3521, 0.3989)
    t = (8 - count(15)) / 2
    return x[0] * (-x[1] * (t - x[2]) ** 2 / 2).exp() - torch.cat([y, y[:-1].flip(0)])


def meyer(x: Tensor) -> Tensor:
    y = numbers(34780, 28610, 23650, 19630, 16370, 13720, 11540, 9744, 8261, 7030, 6005, 5147, 4427, 3820)
    y = torch.cat([y, numbers(3307, 2872)])
    return x[0] * (x[1] / (45 + 5 * count(16) + x[2])).exp() - y


def box(x: Tensor) -> Tensor:
    t = count(10) / 10
    return (-t * x[0]).exp() - (-t * x[1]).exp() - x[2] * ((-t).exp() - (-10 * t).exp())


def powell_singular(x: Tensor) -> Tensor:
    a, b, c, d = x
    return torch.stack([a + 10 * b, math.sqrt(5) * (c - d), (b - 2 * c) ** 2, math.sqrt(10) * (a - d) ** 2])


def wood(x: Tensor) -> Tensor:
    a, b, c, d = x
    parts = [10 * (b - a**2), 1 - a, math.sqrt(90) * (d - c**2), 1 - c]
    return torch.stack([*parts, math.sqrt(10) * (b + d - 2), (b - d) / math.sqrt(10)])


def kowalik_osborne(x: Tensor) -> Tensor:
    y = numbers(0.1957, 0.1947, 0.1735, 0.1600, 0.0844, 0.0627, 0.0456, 0.0342, 0.0323, 0.0235, 0.0246)
    u = numbers(4, 2, 1, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625)
    return y - x[0] * (u**2 + u * x[1]) / (u**2 + u * x[2] + x[3])


def brown_dennis(x: Tensor) -> Tensor:
    t = count(20) / 5
    return (x[0] + t * x[1] - t.exp()) ** 2 + (x[2] + x[3] * t.sin() - t.cos()) ** 2


def biggs(x: Tensor) -> Tensor:
    t = count(13) / 10
    y = (-t).exp() - 5 * (-10 * t).exp() + 3 * (-4 * t).exp()
    return x[2] * (-t * x[0]).exp() - x[3] * (-t * x[1]).exp() + x[5] * (-t * x[4]).exp() - y


def watson(x: Tensor) -> Tensor:
    t, j = (count(29) / 29)[:, None], torch.arange(len(x), dtype=torch.float64)
    rows = (j[1:] * x[1:] * t ** (j[1:] - 1)).sum(1) - (x * t**j).sum(1) ** 2 - 1
    return torch.cat([rows, torch.stack([x[0], x[1] - x[0] ** 2 - 1])])


def penalty(x: Tensor) -> Tensor:
    return torch.cat([math.sqrt(1e-5) * (x - 1), x.dot(x)[None] - 0.25])


def variably_dimensioned(x: Tensor) -> Tensor:
    along = count(len(x)).dot(x - 1)
    return torch.cat([x - 1, torch.stack([along, along**2])])


def trigonometric(x: Tensor) -> Tensor:
    return len(x) - x.cos().sum() + count(len(x)) * (1 - x.cos()) - x.sin()


PROBLEMS = [
    Problem("Rosenbrock", rosenbrock, numbers(-1.2, 1)),
    Problem("Freudenstein and Roth", freudenstein_roth, numbers(0.5, -2), (0.0, 48.98425)),
    Problem("Powell, badly scaled", powell_badly_scaled, numbers(0, 1)),
    Problem("Brown, badly scaled", brown_badly_scaled, numbers(1, 1)),
    Problem("Beale", beale, numbers(1, 1)),
    Problem("Jennrich and Sampson", jennrich_sampson, numbers(0.3, 0.4), (124.3622,)),
    Problem("helical valley", helical_valley, numbers(-1, 0, 0)),
    Problem("Bard", bard, numbers(1, 1, 1), (8.214877e-3, 17.42869)),
    Problem("Gaussian", gaussian, numbers(0.4, 1, 0), (1.127933e-8,)),
    Problem("Meyer", meyer, numbers(0.02, 4000, 250), (87.94586,)),
    Problem("Box, three-dimensional", box, numbers(0, 10, 20), (0.0, 0.07558874)),
    Problem("Powell, singular", powell_singular, numbers(3, -1, 0, 1)),
    Problem("Wood", wood, numbers(-3, -1, -3, -1)),
    Problem("Kowalik and Osborne", kowalik_osborne, numbers(0.25, 0.39, 0.415, 0.39), (3.075056e-4,)),
    Problem("Brown and Dennis", brown_dennis, numbers(25, 5, -5, -1), (85822.2,)),
    Problem("Biggs EXP6", biggs, numbers(1, 2, 1, 1, 1, 1), (0.0, 5.655650e-3)),
    Problem("Watson", watson, torch.zeros(6, dtype=torch.float64), (2.287670e-3,)),
    Problem("extended Rosenbrock", rosenbrock, numbers(-1.2, 1).repeat(10)),
    Problem("penalty", penalty, count(4), (2.249978e-5,)),
    Problem("variably dimensioned", variably_dimensioned, 1 - count(10) / 10),
    Problem("trigonometric", trigonometric, torch.full((10,), 0.1, dtype=torch.float64), (0.0, 2.795061e-5)),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="problems whose name contains this")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    args = parser.parse_args()
    print("| problem | " + " | ".join(args.methods) + " |\n|---|" + "---|" * len(args.methods))
    for problem in (p for p in PROBLEMS if args.only in p.name):
        cells = []
        for method in args.methods:
            r = problem.run(method)
            cell = f"{r.evaluations}" + (f" + {r.hessian_products}" if r.hessian_products else "")
            cells.append(cell if problem.solved(r.value) else f"**{cell}: {r.value:.6g}**")
        print(f"| {problem.name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
