"""One optimizer step at the sizes that people have: ghor beside the libraries they would use instead.

    python benchmarks/workloads.py                                       # about five minutes
    python benchmarks/workloads.py --only "unit|hyperbolic" --seconds 2  # some workloads
    python benchmarks/workloads.py --json workloads.json

Adam with fixed gradients in place, float32, 2 threads. Within a workload the contenders take turns, one step
each, in shuffled order, so that noise of the machine affects all of them alike. Each workload has a process
of its own, because memory that others leave behind changes times. "best" and "median" are over all rounds;
ratios are between the best times, which other work on the machine disturbs least. torch's fused Adam does not
know of any constraint: it is the cost of touching the same numbers. "memory" is all that the optimizer keeps
between steps, in the state and elsewhere, as a multiple of the weights.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import machine_lines, stamp, write_json
from kernels import held
from torch import Tensor, nn

import ghor

LR = 1e-3
OURS, FUSED, MUON = "ghor", "torch fused Adam, no constraint", "torch Muon, no constraint"
ADAM = {"lr": LR, "fused": True}


@dataclass(frozen=True)
class Workload:
    """`count` tensors of one shape, or tensors of `shapes`, on a space; `peers` are names of contenders."""

    name: str
    space: ghor.Space
    shapes: tuple[tuple[int, ...], ...]
    peers: tuple[str, ...] = ()
    optimizer: str = "Adam"
    section: str = "auto"


def same(count: int, *shape: int) -> tuple[tuple[int, ...], ...]:
    return (shape,) * count


GPT2 = tuple(s for _ in range(12) for s in ((2304, 768), (768, 768), (3072, 768), (768, 3072)))
SPHERE, STIEFEL, GEO_EUCLIDEAN = ghor.Sphere(), ghor.Stiefel(), "geoopt Stiefel, Euclidean metric"
WORKLOADS = (
    Workload("unit rows, 10000 x 768", SPHERE, same(1, 10000, 768), ("geoopt Sphere",)),
    Workload("unit rows, 10000 x 64", SPHERE, same(1, 10000, 64), ("geoopt Sphere",)),
    Workload("unit vectors, 100000 x 8", SPHERE, same(1, 100000, 8), ("geoopt Sphere",)),
    Workload("unit vectors, 100000 x 3", SPHERE, same(1, 100000, 3), ("geoopt Sphere",)),
    Workload("unit rows, 50257 x 768 (GPT-2's embedding)", SPHERE, same(1, 50257, 768), ("geoopt Sphere",)),
    Workload("whole matrices of GPT-2 small, norm kept", ghor.Sphere(flatten=2, radius="start"), GPT2),
    Workload("336 of 49 x 7, one by one", STIEFEL, same(336, 49, 7), (GEO_EUCLIDEAN, "POGO, VectorAdam")),
    Workload("336 x 49 x 7, stacked", STIEFEL, same(1, 336, 49, 7), (GEO_EUCLIDEAN, "POGO, VectorAdam")),
    Workload("heads: 9 of 12 x 768 x 64", STIEFEL, same(9, 12, 768, 64), (GEO_EUCLIDEAN, "POGO, VectorAdam")),
    Workload("heads of GPT-2 small: 36 of 12 x 768 x 64", STIEFEL, same(36, 12, 768, 64), (GEO_EUCLIDEAN,)),
    Workload("3072 x 768", STIEFEL, same(1, 3072, 768), (GEO_EUCLIDEAN, MUON)),
    Workload("3072 x 768, Muon", STIEFEL, same(1, 3072, 768), (MUON,), "Muon"),
    Workload("rotations, 512 x 512", ghor.SpecialOrthogonal(), same(1, 512, 512), ("AdamSO", GEO_EUCLIDEAN)),
    Workload(
        "rotations, 1024 x 1024", ghor.SpecialOrthogonal(), same(1, 1024, 1024), ("AdamSO", GEO_EUCLIDEAN)
    ),
    Workload("subspaces, 1000 x 10", ghor.Grassmann(), same(1, 1000, 10), (GEO_EUCLIDEAN,)),
    Workload(
        "hyperbolic, 100000 x 11", ghor.Hyperbolic(), same(1, 100000, 11), ("geoopt Lorentz", "geoopt ball")
    ),
    Workload("covariances, 10000 x 10 x 10", ghor.SPD(), same(1, 10000, 10, 10), ("geoopt SPD",)),
    Workload("poses, 100000 x 3 x 4", ghor.SpecialEuclidean(), same(1, 100000, 3, 4)),
)


# -- contenders ----------------------------------------------------------------------------------------------


def leaves(Ys: Sequence[Tensor], make: Callable[[Tensor], Tensor] = nn.Parameter) -> list[Tensor]:
    params = []
    generator = torch.Generator().manual_seed(1)
    for Y in Ys:
        params.append(make(Y.clone()))
        params[-1].grad = torch.randn(Y.shape, generator=generator)
    return params


def geoopt_adam(manifold: str, Ys: Sequence[Tensor], **options: Any) -> torch.optim.Optimizer:
    geoopt: Any = import_module("geoopt")
    chosen = getattr(geoopt, manifold)(**options)
    params = leaves(Ys, lambda Y: geoopt.ManifoldParameter(Y, manifold=chosen))
    out: torch.optim.Optimizer = geoopt.optim.RiemannianAdam(params, lr=LR)
    return out


def geoopt_ball(Ys: Sequence[Tensor]) -> torch.optim.Optimizer:
    return geoopt_adam("PoincareBall", [ghor.Hyperbolic().to_ball(Y) for Y in Ys])


def pogo(Ys: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Batches of tall matrices; it has no stacks, so separate tensors get a batch dimension of 1 each."""
    params = leaves([Y if Y.dim() > 2 else Y.unsqueeze(0) for Y in Ys])
    out: torch.optim.Optimizer = import_module("pogo").POGO(
        params, import_module("pogo.base").VectorAdam(), lr=LR, rows=False
    )
    return out


def adam_so(Ys: Sequence[Tensor]) -> torch.optim.Optimizer:
    out: torch.optim.Optimizer = import_module("ghor_lab.baselines").AdamSO(leaves(Ys), lr=LR)
    return out


PEERS: dict[str, Callable[[Sequence[Tensor]], torch.optim.Optimizer]] = {
    FUSED: lambda Ys: torch.optim.Adam(leaves(Ys), **ADAM),  # type: ignore[arg-type]
    MUON: lambda Ys: torch.optim.Muon(leaves(Ys), lr=LR),
    "geoopt Sphere": lambda Ys: geoopt_adam("Sphere", Ys),
    GEO_EUCLIDEAN: lambda Ys: geoopt_adam("Stiefel", Ys, canonical=False),
    "geoopt Lorentz": lambda Ys: geoopt_adam("Lorentz", Ys),
    "geoopt ball": geoopt_ball,
    "geoopt SPD": lambda Ys: geoopt_adam("SymmetricPositiveDefinite", Ys),
    "POGO, VectorAdam": pogo,
    "AdamSO": adam_so,
}


def contenders(w: Workload) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """ghor first, as a user would call it; then the peers that are installed."""
    generator = torch.Generator().manual_seed(0)
    Ys = [w.space.random(*shape, generator=generator) for shape in w.shapes]
    if getattr(w.space, "radius", None) == "start":  # entries as GPT-2 starts with
        Ys = [Y.mul_(0.02 * math.sqrt(Y.numel())) for Y in Ys]
    cls: Any = getattr(ghor.optim, w.optimizer)
    yield OURS, cls(leaves(Ys), space=w.space, lr=LR, section=w.section)
    if w.optimizer == "Adam":
        yield f"{OURS}, fused", cls(leaves(Ys), space=w.space, section=w.section, **ADAM)
    for name in (*w.peers, FUSED):
        try:
            yield name, PEERS[name](Ys)
        except ImportError as error:
            print(f"{name} was left out: {error}", file=sys.stderr)


# -- measuring -----------------------------------------------------------------------------------------------


def memory(opt: torch.optim.Optimizer) -> float:
    """Bytes of all tensors that the optimizer holds between steps, per byte of weights."""
    params = [p for group in opt.param_groups for p in group["params"]]
    tensors, weights = held(opt, params), {p.untyped_storage().data_ptr(): p for p in params}
    sizes = [{at: X.untyped_storage().nbytes() for at, X in of.items()} for of in (tensors, weights)]
    return sum(n for at, n in sizes[0].items() if at not in weights) / sum(sizes[1].values())


def measure(w: Workload, seconds: float) -> list[dict[str, Any]]:
    entries = list(contenders(w))
    for _, opt in entries:
        for _ in range(3):
            opt.step()
    times: dict[str, list[float]] = {name: [] for name, _ in entries}
    order, end = random.Random(0), time.perf_counter() + seconds
    gc.collect()
    gc.disable()
    try:
        while time.perf_counter() < end or len(times[OURS]) < 5:
            for name, opt in order.sample(entries, len(entries)):
                begun = time.perf_counter()
                opt.step()
                times[name].append(1e3 * (time.perf_counter() - begun))
    finally:
        gc.enable()
    return [
        {
            "workload": w.name,
            "contender": name,
            "best_ms": min(times[name]),
            "median_ms": median(times[name]),
            "rounds": len(times[name]),
            "memory": memory(opt),
        }
        for name, opt in entries
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each contender, with the ratio of ghor's best time to its own."""
    lines = [f"{'best ms':>9} {'median':>9} {'ghor /':>8} {'memory':>6}"]
    for name in dict.fromkeys(row["workload"] for row in rows):
        lines.append(name)
        of = [row for row in rows if row["workload"] == name]
        for row in of:
            ratio = of[0]["best_ms"] / row["best_ms"]
            lines.append(
                f"{row['best_ms']:9.2f} {row['median_ms']:9.2f} {ratio:8.2f} {row['memory']:6.2f}  "
                f"{row['contender']}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="workloads whose name matches this regular expression")
    parser.add_argument("--seconds", type=float, default=12, help="for each workload (default: 12)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write a record")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    chosen = [w for w in WORKLOADS if re.search(args.only, w.name)]
    if not chosen:
        parser.error(f"no workload matches {args.only!r}; there are: {', '.join(w.name for w in WORKLOADS)}")
    record: dict[str, Any] = {"benchmark": "workloads", **stamp(), "rows": []}
    spawn, threads = get_context("spawn"), torch.set_num_threads
    with ProcessPoolExecutor(1, spawn, threads, (args.threads,), max_tasks_per_child=1) as pool:
        for i, w in enumerate(chosen):
            sys.stderr.write(f"\r{i + 1} of {len(chosen)}: {w.name:60}")
            sys.stderr.flush()
            record["rows"] += pool.submit(measure, w, args.seconds).result()
    sys.stderr.write(f"\r{'':70}\r")
    print(*machine_lines(record), "", table(record["rows"]), sep="\n")
    if args.json:
        write_json(record, args.json)


if __name__ == "__main__":
    main()
