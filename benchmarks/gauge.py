"""How much does the frame matter to Adam? Two sections in pairs, and the spread over random frames.

    python benchmarks/gauge.py --json gauge.json               # sections, problems a and b; minutes
    python benchmarks/gauge.py --only s,t --json spheres.json
    python benchmarks/gauge.py --frames --json frames.json     # problems a, b and d
    python benchmarks/gauge.py --quick                         # does it run?

Adam works on coordinates, and frames give the complement different bases (gauges). On these spaces Muon,
momentum and gradient descent do not depend on them.

(a) The first eigenvectors of a covariance with eigenvalues 1/i in a random basis, from samples: minimise
    -E |Y^T x|^2. Loss: 1 - tr(Y^T C Y) / (sum of the largest eigenvalues), exact. (s) The same on a sphere.
(b) Procrustes: minimise E |Y^T x - t|^2, t = Y*^T x + noise. Loss: tr((Y - Y*)^T C (Y - Y*)) / tr C, exact.
    (t) The same on a sphere.
(d) Brockett's function of C, exact gradients.

All in float64 with constant learning rates, all runs in one batch. A pair is a run with each section, from
the same start and with the same samples. Outcomes are "final", the mean loss over the last 5 % of the curve;
"area", the mean over all of it; and "early", the mean over its first 10 %. Tests are on logarithms, at level
0.05 with Holm's correction over all of them: Wilcoxon's signed-rank test on the pairs, and the
Kolmogorov-Smirnov test on the two distributions; the 90 % interval is that of a t-test on the pairs, for the
ratio of geometric means. "turned" is the transported section in a randomly turned coordinate system, which
is the same run in an arbitrary other gauge.

--frames: runs from one start in random frames, beside runs from random starts with the same samples. It shows
the standard deviation of the logarithm of the loss, in percent of the loss, and where the closed-form frames
of the two sections lie among random ones, in standard deviations over frames.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import stamp, write_json
from torch import Generator, Tensor, nn

import ghor

F64, LR, LEVEL = torch.float64, 1e-2, 0.05
SECTIONS, OUTCOMES = ("transported", "implicit"), ("final", "area", "early")
RULES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": lambda params, **o: ghor.optim.Adam(params, lr=LR, **o),
    "Muon": lambda params, **o: ghor.optim.Muon(params, lr=LR, **o),
    "momentum": lambda params, **o: ghor.optim.SGD(params, lr=3e-2, momentum=0.9, **o),
}


@dataclass(frozen=True)
class Problem:
    """N, n, samples a step, how many runs, and steps, of which every so many are points of the curve."""

    title: str
    kind: str
    N: int
    n: int
    samples: int
    runs: int
    steps: int
    every: int


PAIRS = {
    "a": Problem("top-10 eigenspace, N = 200", "eigenspace", 200, 10, 64, 20, 3000, 10),
    "b": Problem("Procrustes on St(20, 100)", "Procrustes", 100, 20, 64, 20, 3000, 10),
    "s": Problem("first eigenvector, S^63", "eigenspace", 64, 1, 64, 100, 3000, 10),
    "t": Problem("direction, S^7", "Procrustes", 8, 1, 64, 100, 3000, 10),
}
FRAMES = {
    "a": Problem("top-5 eigenspace, N = 60, from samples", "eigenspace", 60, 5, 32, 30, 400, 1),
    "b": Problem("Procrustes on St(6, 60), from samples", "Procrustes", 60, 6, 32, 30, 400, 1),
    "d": Problem("Brockett's function on St(5, 60), exact gradients", "Brockett", 60, 5, 1, 30, 100, 1),
}


def generators(stream: int, seeds: list[int]) -> list[Generator]:
    return [Generator().manual_seed(stream * 1_000_003 + s) for s in seeds]


def points(p: Problem, gens: list[Generator]) -> Tensor:
    return torch.stack([ghor.Stiefel().random(p.N, p.n, generator=g, dtype=F64) for g in gens])


def turns(p: Problem, gens: list[Generator]) -> Tensor:
    return torch.stack([torch.linalg.qr(torch.randn(p.N, p.N, generator=g, dtype=F64)).Q for g in gens])


def curve(
    p: Problem, starts: Tensor, seeds: list[int], section: str, rule: str = "Adam", turn: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Losses (points, runs), and the end; a seed is a basis, a target and samples, one for all or for each.

    With `turn` T (runs, N, N) the run is that of f(T^T Y) from T Y.
    """
    setup, samples = generators(2, seeds), generators(3, seeds)
    values = 1 / torch.arange(1, p.N + 1, dtype=F64)
    U = turns(p, setup)
    root, C, target = U * values.sqrt(), U * values @ U.mT, points(p, setup)
    D = torch.arange(p.n, 0, -1, dtype=F64)

    def look(Y: Tensor) -> Tensor:
        if p.kind == "Procrustes":
            return ((Y - target) * (C @ (Y - target))).sum((-2, -1)) / values.sum()
        weights = D if p.kind == "Brockett" else torch.ones_like(D)
        best = (values[: p.n] * weights).sum()
        return 1 - (Y * (C @ Y) * weights).sum((-2, -1)) / best

    def gradient(Y: Tensor) -> Tensor:
        if p.kind == "Brockett":
            return -2 * C @ Y * D
        Z = torch.stack([torch.randn(p.samples, p.N + p.n, generator=g, dtype=F64) for g in samples])
        X = Z[..., : p.N] @ root.mT
        if p.kind == "eigenspace":
            return -2 / p.samples * X.mT @ (X @ Y)
        return 2 / p.samples * X.mT @ (X @ (Y - target) - 0.3 * Z[..., p.N :])

    T = torch.eye(p.N, dtype=F64) if turn is None else turn
    Y, found = nn.Parameter(T @ starts), []
    space = ghor.Stiefel() if p.n > 1 else ghor.Sphere(flatten=2)
    opt = RULES[rule]([Y], space=space, section=section)
    for step in range(p.steps):
        own = T.mT @ Y.detach()
        if step % p.every == p.every - 1:
            found.append(look(own))
        Y.grad = T @ gradient(own)
        opt.step()
    return torch.stack(found), T.mT @ Y.detach()


# -- two sections in pairs -----------------------------------------------------------------------------------


def outcomes(losses: Tensor) -> dict[str, Tensor]:
    k = len(losses)
    return {
        "final": losses[-max(1, k // 20) :].mean(0),
        "area": losses.mean(0),
        "early": losses[: max(1, k // 10)].mean(0),
    }


def compare(transported: Tensor, implicit: Tensor) -> dict[str, Any]:
    """Tests and effect sizes on logarithms of the pairs."""
    from scipy import stats

    t, i = transported.log().numpy(), implicit.log().numpy()
    d = i - t
    k, sd = len(d), float(d.std(ddof=1))
    half = float(stats.t.ppf(0.95, k - 1)) * sd / math.sqrt(k)
    return {
        "pairs": k,
        "transported": {"mean": float(transported.mean()), "sd": float(transported.std())},
        "implicit": {"mean": float(implicit.mean()), "sd": float(implicit.std())},
        "ratio": math.exp(d.mean()),
        "ratio_90": [math.exp(d.mean() - half), math.exp(d.mean() + half)],
        "implicit_lower_in": int((d < 0).sum()),
        "wilcoxon_p": float(stats.wilcoxon(d).pvalue),
        "ks_p": float(stats.ks_2samp(t, i).pvalue),
    }


def holm(tests: dict[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values."""
    adjusted, largest = {}, 0.0
    for rank, (key, p) in enumerate(sorted(tests.items(), key=lambda kv: kv[1])):
        largest = max(largest, min(1.0, (len(tests) - rank) * p))
        adjusted[key] = largest
    return adjusted


def pairs(p: Problem) -> dict[str, Any]:
    seeds = list(range(p.runs))
    starts = points(p, generators(1, seeds))
    found = {s: curve(p, starts, seeds, s) for s in SECTIONS}
    turned, _ = curve(p, starts, seeds, "transported", turn=turns(p, generators(4, seeds)))
    ends = [end for _, end in found.values()]
    apart = torch.linalg.matrix_norm(ends[0] - ends[1]).median() / math.sqrt(2 * p.n)
    entry: dict[str, Any] = {"title": p.title, "lr": LR, "seeds": seeds, "distance_of_pairs": float(apart)}
    entry["median"] = {s: [float(f"{median(x.tolist()):.4g}") for x in found[s][0]] for s in SECTIONS}
    t, i, c = (outcomes(losses) for losses in (*(found[s][0] for s in SECTIONS), turned))
    for name in OUTCOMES:
        entry |= {name: compare(t[name], i[name]), f"{name} turned": compare(t[name], c[name])}
    return entry


def sections(problems: dict[str, Problem]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for key, p in problems.items():
        found[key] = entry = pairs(p)
        print(f"({key}) {p.title}: pairs end {entry['distance_of_pairs']:.2g} apart (1: unrelated points)")
        for name in OUTCOMES:
            c, (low, high) = entry[name], entry[name]["ratio_90"]
            print(
                f"  {name:6} implicit/transported {c['ratio']:.4f} ({low:.3f} to {high:.3f}), lower in "
                f"{c['implicit_lower_in']} of {c['pairs']}; Wilcoxon {c['wilcoxon_p']:.2g}, "
                f"KS {c['ks_p']:.2g}; turned/transported {entry[f'{name} turned']['ratio']:.4f}",
                flush=True,
            )
    tests = ("wilcoxon_p", "ks_p")
    adjusted = holm({f"{k} {o} {t}": e[o][t] for k, e in found.items() for o in OUTCOMES for t in tests})
    differ = sorted(key for key, p in adjusted.items() if p < LEVEL)
    print("differ:", ", ".join(differ) or "none")
    return {"benchmark": "gauge", "level": LEVEL, "problems": found, "holm": adjusted, "differ": differ}


# -- the spread over frames ----------------------------------------------------------------------------------


def spread(p: Problem, rule: str) -> dict[str, float]:
    """Deviations over frames and over starts, and where closed-form frames lie among random ones."""
    starts = points(p, generators(1, list(range(p.runs))))
    same, turn = starts[:1].expand_as(starts), turns(p, generators(4, list(range(p.runs))))

    def end(starts: Tensor, section: str = "transported", turn: Tensor | None = None) -> Tensor:
        return outcomes(curve(p, starts, [0], section, rule, turn)[0])["final"].log()

    over, among = end(same, turn=turn), end(starts)
    sd = float(over.std())
    out = {"loss": math.exp(float(over.mean())), "frames_sd": sd, "starts_sd": float(among.std())}
    for name, section in (("closed_form", "transported"), ("implicit", "implicit")):
        out[name] = float(end(starts[:1], section)[0] - over.mean()) / sd if sd > 1e-6 else 0.0
    return out


def frames(problems: dict[str, Problem]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    print(f"{'problem':<56}{'rule':<10}{'loss':>10}{'frames':>10}{'starts':>10}{'closed':>8}{'implicit':>10}")
    for key, p in problems.items():
        for rule in RULES:
            rows.append({"problem": key, "rule": rule, **(r := spread(p, rule))})
            print(
                f"{p.title:<56}{rule:<10}{r['loss']:>10.2e}{100 * r['frames_sd']:>9.2g}%"
                f"{100 * r['starts_sd']:>9.2g}%{r['closed_form']:>+8.1f}{r['implicit']:>+10.1f}",
                flush=True,
            )
    return {"benchmark": "frames", "count": next(iter(problems.values())).runs, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", action="store_true", help="the spread over frames instead of pairs")
    parser.add_argument("--only", help="problems, separated by commas (default: a,b; frames: a,b,d)")
    parser.add_argument("--quick", action="store_true", help="ten steps, six runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record")
    args = parser.parse_args()
    torch.set_num_threads(1)  # hundreds of small products: a second thread waits more than it works
    table = FRAMES if args.frames else PAIRS
    chosen = {k: table[k] for k in (args.only or ("a,b,d" if args.frames else "a,b")).split(",")}
    if args.quick:
        chosen = {k: Problem(p.title, p.kind, p.N, p.n, p.samples, 6, 10, 1) for k, p in chosen.items()}
    record = frames(chosen) if args.frames else sections(chosen)
    if args.json:
        write_json({**stamp(), **record}, args.json)


if __name__ == "__main__":
    main()
