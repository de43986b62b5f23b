"""One optimizer step over the 336 St(7,49) weights of the paper's transformer: ghor against its peers.

    python benchmarks/step.py                                  # 2 threads, 50 repetitions
    python benchmarks/step.py --quick                          # does everything run? (not for quoting)
    python benchmarks/step.py --json step.json
    python benchmarks/step.py --large           # one large matrix, against products and Muon (large.py)
    python benchmarks/step.py --crossover       # transported / implicit by N and n/N (large.py)

Rounds are interleaved: a round visits every contender once, in shuffled order (optimizers, then the much
slower parametrizations), so that noise of the machine affects all of them alike, and ratios are taken within
a round. A visit is two steps. The first finds the caches filled by the others, as a step after a backward
pass does ("first"); the second follows at once, and its time is the one compared ("again").
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import contenders as parts
import large
import torch
from common import Weight, commit, machine, machine_lines, parametrized_step, quartiles, write_json
from contenders import (
    COUNT,
    LAYOUTS,
    LR,
    SEPARATE,
    STACKED,
    Contender,
    N,
    distance,
    measure,
    n,
    points,
    split,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from ghor import Stiefel, optim

GHOR, GHOR_FUSED = "ghor Adam, Cayley", "ghor Adam, Cayley, fused"
TORCH, TORCH_FUSED = "torch Adam, foreach", "torch Adam, fused"
GHOR_MUON, TORCH_MUON = "ghor Muon, Cayley", "torch Muon"
GEOOPT = "geoopt RiemannianAdam, canonical"


# -- contenders ----------------------------------------------------------------------------------------------


def ghor_adam(Y: Tensor, G: Tensor) -> Iterator[Contender]:
    """The subject, with no special arguments except the retraction and torch's own `fused`."""
    for retraction in ("cayley", "geodesic"):
        for fused in (False, True):
            for layout in LAYOUTS:
                yield parts.ghor_adam(Y, G, layout, retraction, fused)


def torch_adam(Y: Tensor, G: Tensor) -> Iterator[Contender]:
    """Plain Euclidean Adam on the same tensors: the cost of a step without any manifold, which it leaves."""
    for implementation in ("foreach", "fused"):
        for layout in LAYOUTS:
            yield parts.torch_adam(Y, G, layout, implementation)


def muon(Y: Tensor, G: Tensor) -> Iterator[Contender]:
    """Ours in both layouts; torch's takes matrices one by one and leaves the manifold."""
    for layout in LAYOUTS:
        params = parts.leaves(Y, G, layout)
        opt = optim.Muon(params, space=Stiefel(), lr=LR)
        yield Contender(GHOR_MUON, layout, opt.step, partial(list, params))
    params = parts.leaves(Y, G, SEPARATE)
    yield Contender(TORCH_MUON, SEPARATE, torch.optim.Muon(params, lr=LR).step, partial(list, params))


def geoopt_adam(Y: Tensor, G: Tensor) -> Iterator[Contender]:
    """geoopt as in its documentation."""
    for metric in ("canonical", "Euclidean"):
        for layout in LAYOUTS:
            yield parts.geoopt_adam(Y, G, layout, metric)


def parametrized(name: str, layout: str, modules: list[nn.Module], G: Tensor) -> Contender:
    """Forward of the parametrization, backward of sum(w * G), fused Adam (torch's fastest here)."""
    step, weights, _ = parametrized_step(modules, split(G, layout), LR)
    return Contender(name, layout, step, weights, parametrized=True)


def geotorch_orthogonal(Y: Tensor, G: Tensor) -> Iterator[Contender]:
    """Both maps of geotorch; its default is expm."""
    geotorch: Any = import_module("geotorch")
    for triv in ("expm", "cayley"):
        for layout in LAYOUTS:
            modules: list[nn.Module] = [geotorch.orthogonal(Weight(y), triv=triv) for y in split(Y, layout)]
            for module, y in zip(modules, split(Y, layout), strict=True):
                module.weight = y  # geotorch starts at a random point of its own: bring it to ours
            yield parametrized(f"geotorch orthogonal, {triv}", layout, modules, G)


def torch_orthogonal(Y: Tensor, G: Tensor) -> Iterator[Contender]:
    """The three maps of torch; its default for tall matrices is householder."""
    for kind in ("householder", "cayley", "matrix_exp"):
        for layout in LAYOUTS:
            modules = [parametrizations.orthogonal(Weight(y), orthogonal_map=kind) for y in split(Y, layout)]
            yield parametrized(f"torch orthogonal, {kind}", layout, modules, G)


PEERS: tuple[Callable[[Tensor, Tensor], Iterable[Contender]], ...] = (
    ghor_adam,
    torch_adam,
    muon,
    geoopt_adam,
    geotorch_orthogonal,
    torch_orthogonal,
)


def contenders(only: str) -> tuple[list[Contender], list[str]]:
    """The contenders whose label matches `only`, with the same weights; a sentence for each missing one."""
    Y, G = parts.problem()
    found: list[Contender] = []
    skipped: list[str] = []
    for peer in PEERS:
        try:
            found += [c for c in peer(Y, G) if re.search(only, c.label)]
        except ImportError as error:
            skipped.append(
                f"{peer.__name__} was skipped: {error}. Peers come with `pip install ghor[bench]`."
            )
    return found, skipped


def moved(Y: Tensor, Z: Tensor) -> float:
    """min ||Y - Z||_F over the weights: reveals a contender that forgets some of its weights."""
    return float(torch.linalg.matrix_norm(Y - Z).min())


# -- the floor -----------------------------------------------------------------------------------------------

# Numbers of one weight that must cross memory in a step with a stored section (design: Lambda = [Y, Q] is N x
# N).
READ = {"G": N * n, "Lambda": N * N, "moments": 2 * N * n}
WRITTEN = {"Lambda": N * N, "moments": 2 * N * n, "Y": N * n}
FLOOR_BYTES = 4 * COUNT * (sum(READ.values()) + sum(WRITTEN.values()))

# Flops of one weight, a multiply-add counted as two; the re-orthonormalisation every ~100 steps is left out.
FLOPS = {
    "Lambda^T G": 2 * N * N * n,  # Y^T G and B = Q^T G
    "A = Y^T G - (Y^T G)^T": n * n,
    "Adam": 12 * N * n,  # m: 3, v: 4, bias, root, eps, quotient, lr: 5
    "S = I - A/2 + B^T B/4": 2 * n * n * (N - n) + 3 * n * n,
    "Lambda [A - B^T B/2; B]": 2 * N * N * n + 2 * n * n,  # Y (A - B^T B/2) + Q B
    "D = (...) S^-1": 2 * n**3 // 3 + 2 * N * n * n,
    "Y + D": N * n,
    "Q - (Y + D/2) B^T": 2 * N * n * (N - n) + 2 * N * n,
}


def floor(rates: dict[str, Any]) -> dict[str, float]:
    """A lower bound: the step's traffic at the measured copy rate, its flops at the measured matmul rate.

    The weights of a step fit into the caches of a large machine, so the faster of the two copies counts.
    """
    flops = COUNT * sum(FLOPS.values())
    bytes_ms = FLOOR_BYTES / max(rates["copy_gbs"], rates["copy_small_gbs"]) / 1e6
    flops_ms = flops / rates["matmul_gflops"] / 1e6
    return {
        "bytes": FLOOR_BYTES,
        "flops": flops,
        "bytes_ms": bytes_ms,
        "flops_ms": flops_ms,
        "ms": max(bytes_ms, flops_ms),
    }


# -- the record ----------------------------------------------------------------------------------------------


Key = tuple[str, str]  # name, layout


def make_record(only: str, repeats: int, warmup: int) -> dict[str, Any]:
    entries, skipped = contenders(only)
    if not entries:
        raise SystemExit(f"no contender matches {only!r}")
    rates = machine(FLOOR_BYTES)
    start = {c.label: points(c) for c in entries}
    times = measure(entries, repeats, warmup)
    end = {c.label: points(c) for c in entries}

    def versus(a: Key, b: Key) -> list[float] | None:
        """Quartiles of time(a) / time(b), each ratio taken within a round; None where one of them did not
        run."""
        ta, tb = (times.get(" | ".join(key), {}).get("again") for key in (a, b))
        return quartiles([x / y for x, y in zip(ta, tb, strict=True)]) if ta and tb else None

    def target(
        what: str, a: Key, b: Key, at_most: float | None = None, at_least: float | None = None
    ) -> dict[str, Any]:
        ratio = versus(a, b)
        met = None
        if ratio is not None:
            met = (at_most is None or ratio[1] <= at_most) and (at_least is None or ratio[1] >= at_least)
        return {"what": what, "at_most": at_most, "at_least": at_least, "ratio": ratio, "met": met}

    return {
        "benchmark": "step",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": rates,
        "settings": {"count": COUNT, "N": N, "n": n, "lr": LR, "repeats": repeats, "warmup": warmup},
        "skipped": skipped,
        "contenders": [
            {
                "name": c.name,
                "layout": c.layout,
                "ms": quartiles(times[c.label]["again"]),
                "first_ms": quartiles(times[c.label]["first"]),
                "over_torch_foreach": versus((c.name, c.layout), (TORCH, SEPARATE)),
                "over_geoopt_canonical": versus((c.name, c.layout), (GEOOPT, SEPARATE)),
                "distance_at_start": distance(start[c.label]),
                "distance": distance(end[c.label]),
                "moved": moved(start[c.label], end[c.label]),
                "rounds_ms": times[c.label],
            }
            for c in entries
        ],
        "like_for_like": [
            {
                "what": f"{ours} / {TORCH_FUSED}, {layout}",
                "ratio": versus((ours, layout), (TORCH_FUSED, layout)),
            }
            for ours in (GHOR, GHOR_FUSED)
            for layout in (STACKED, SEPARATE)
        ],
        "targets": [
            line
            for ours in (GHOR, GHOR_FUSED)
            for line in (
                target(
                    f"{ours}, {STACKED} / {TORCH}, {SEPARATE}",
                    (ours, STACKED),
                    (TORCH, SEPARATE),
                    at_most=0.6,
                ),
                target(
                    f"{ours}, {SEPARATE} / {TORCH}, {SEPARATE}",
                    (ours, SEPARATE),
                    (TORCH, SEPARATE),
                    at_most=1.0,
                ),
                target(
                    f"{GEOOPT}, {SEPARATE} / {ours}, {STACKED}",
                    (GEOOPT, SEPARATE),
                    (ours, STACKED),
                    at_least=20,
                ),
                target(
                    f"{GEOOPT}, {SEPARATE} / {ours}, {SEPARATE}",
                    (GEOOPT, SEPARATE),
                    (ours, SEPARATE),
                    at_least=10,
                ),
            )
        ],
        "floor": floor(rates),
    }


# -- the report ----------------------------------------------------------------------------------------------


def report(record: dict[str, Any]) -> str:
    """The record in words and tables; measures nothing."""

    def spread(q: list[float] | None) -> str:
        return "did not run" if q is None else f"{q[1]:.2f} ({q[0]:.2f} - {q[2]:.2f})"

    def ratio(q: list[float] | None) -> str:
        return "" if q is None else f"{q[1]:.2f}"

    s, low = record["settings"], record["floor"]
    lines = [
        *machine_lines(record),
        f"One step over {s['count']} weights of St({s['n']},{s['N']}), float32; {s['repeats']} interleaved "
        "rounds "
        f"after {s['warmup']} of warm-up" + ("." if s["repeats"] >= 30 else ": too few to quote."),
        "",
        f"{'contender':34}{'layout':13}{'median ms':>10}{'q25 - q75':>18}{'best ms':>10}{'first ms':>10}"
        f"{'/ foreach':>11}{'/ geoopt':>10}{'off by':>10}{'moved':>10}",
    ]
    for row in record["contenders"]:
        q = row["ms"]
        lines.append(
            f"{row['name']:34}{row['layout']:13}{q[1]:10.2f}{f'{q[0]:.2f} - {q[2]:.2f}':>18}"
            f"{min(row['rounds_ms']['again']):10.2f}{row['first_ms'][1]:10.2f}"
            f"{ratio(row['over_torch_foreach']):>11}{ratio(row['over_geoopt_canonical']):>10}"
            f"{row['distance']:10.1e}{row['moved']:10.1e}"
        )
    lines += record["skipped"]
    lines += ["", "Like for like (median and quartiles of the ratio within a round)"]
    lines += [f"  {line['what']:62}{spread(line['ratio'])}" for line in record["like_for_like"]]
    lines += ["", "Targets"]
    for line in record["targets"]:
        bound = f">= {line['at_least']:g}" if line["at_most"] is None else f"<= {line['at_most']:g}"
        verdict = {True: "met", False: "NOT MET", None: ""}[line["met"]]
        lines.append(f"  {line['what']:84}{bound:>8}   {spread(line['ratio']):24}{verdict}")
    lines += [
        "",
        "Floor of a Cayley step with a stored section, which neither its traffic nor its arithmetic can "
        "undercut:",
        f"  {low['bytes'] / 1e6:.1f} MB = {low['bytes_ms']:.2f} ms of copying; {low['flops'] / 1e6:.1f} "
        f"MFlop = {low['flops_ms']:.2f} ms of matmul; so {low['ms']:.2f} ms",
    ]
    for row in record["contenders"]:
        if row["name"] in (GHOR, GHOR_FUSED):
            lines.append(f"  {row['name']}, {row['layout']}: {row['ms'][1] / low['ms']:.1f} times the floor")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--repeats", type=int, help="timed rounds (default: 50; with --large 20)")
    parser.add_argument("--warmup", type=int, help="rounds before those (default: 5; with --large 2)")
    parser.add_argument("--quick", action="store_true", help="few rounds: to see it run, not to quote")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="only contenders whose 'name | layout' matches"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the whole record, raw times included"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--large", action="store_true", help="one large matrix instead, see large.py")
    mode.add_argument("--crossover", action="store_true", help="both sections over a grid of sizes instead")
    args = parser.parse_args()
    if (args.large or args.crossover) and args.only:
        parser.error("--only belongs to the 336 weights")
    torch.set_num_threads(args.threads)
    default, few = ((20, 2), (2, 1)) if args.large else ((50, 5), (5, 1))
    rounds = few if args.quick else default
    rounds = (args.repeats or rounds[0], rounds[1] if args.warmup is None else args.warmup)
    if args.large:
        record = large.large_record(*rounds)
        print(large.large_report(record))
    elif args.crossover:
        record = large.crossover_record(**({"cap": 0.1, "largest": 1024} if args.quick else {}))
        print(large.crossover_report(record))
    else:
        record = make_record(args.only, *rounds)
        print(report(record))
    if args.json:
        write_json(record, args.json)


if __name__ == "__main__":
    main()
