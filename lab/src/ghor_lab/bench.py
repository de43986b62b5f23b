"""`ghor bench`: time one Adam step over the paper's 336 weights on St(7,49) against torch and geoopt.

Rounds are interleaved: a round visits every contender once, in shuffled order, so that noise of the machine
affects all of them alike, and ratios are taken within a round. A visit is two steps. The first finds the
caches filled by the others, as a step after a backward pass does ("first"); the second follows at once, and
its time is the one compared ("again").
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from ghor import Stiefel, optim
from ghor.retraction import RetractionName

from .table import Column, Row, Table
from .train import machine

COUNT, N, n = 336, 49, 7  # the transformer of the paper: 336 weights on St(7,49)
LR = 1e-3
WARMUP = 3
LAYOUTS = (SEPARATE, STACKED) = (f"{COUNT} tensors", "one stacked")


# -- contenders ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """`step()` does one whole step; `weights()` returns the matrices it has arrived at, in either layout."""

    name: str
    layout: str
    step: Callable[[], object]
    weights: Callable[[], Sequence[Tensor]]
    parametrized: bool = False

    @property
    def label(self) -> str:
        """Name and layout."""
        return f"{self.name} | {self.layout}"


def problem() -> tuple[Tensor, Tensor]:
    """Weights and gradients, (336, 49, 7) each: the same for every contender."""
    generator = torch.Generator().manual_seed(0)
    Y = (
        torch.linalg.qr(torch.randn(COUNT, N, n, dtype=torch.float64, generator=generator))
        .Q.float()
        .contiguous()
    )
    return Y, torch.randn(COUNT, N, n, generator=generator)


def split(X: Tensor, layout: str) -> list[Tensor]:
    """(336, 49, 7) -> 336 tensors of (49, 7), or the one tensor; always copies."""
    return [x.clone() for x in (X.unbind() if layout == SEPARATE else [X])]


def leaves(
    Y: Tensor, G: Tensor, layout: str, make: Callable[[Tensor], Tensor] = nn.Parameter
) -> list[Tensor]:
    """Parameters with their gradients already in place."""
    params = [make(y) for y in split(Y, layout)]
    for p, g in zip(params, split(G, layout), strict=True):
        p.grad = g
    return params


def ghor_adam(
    Y: Tensor, G: Tensor, layout: str, retraction: RetractionName = "cayley", fused: bool = False
) -> Contender:
    """The subject, with no special arguments except the retraction and torch's own `fused`."""
    params = leaves(Y, G, layout)
    options: dict[str, Any] = {"fused": True} if fused else {}
    opt = optim.Adam(params, space=Stiefel(), retraction=retraction, lr=LR, **options)
    name = f"ghor Adam, {retraction.replace('cayley', 'Cayley')}{', fused' if fused else ''}"
    return Contender(name, layout, opt.step, partial(list, params))


def torch_adam(Y: Tensor, G: Tensor, layout: str, implementation: str) -> Contender:
    """Plain Euclidean Adam on the same tensors: the cost of a step without any manifold, which it leaves."""
    params, options = leaves(Y, G, layout), {implementation: True}
    opt = torch.optim.Adam(params, lr=LR, **options)  # type: ignore[arg-type]
    return Contender(f"torch Adam, {implementation}", layout, opt.step, partial(list, params))


def geoopt_adam(Y: Tensor, G: Tensor, layout: str, metric: str = "canonical") -> Contender:
    """geoopt as in its documentation; `stabilize` keeps its default (never), which is also its fastest."""
    geoopt: Any = import_module("geoopt")
    manifold = geoopt.Stiefel(canonical=metric == "canonical")
    params = leaves(Y, G, layout, partial(geoopt.ManifoldParameter, manifold=manifold))
    opt = geoopt.optim.RiemannianAdam(params, lr=LR)
    return Contender(f"geoopt RiemannianAdam, {metric}", layout, opt.step, partial(list, params))


# -- measuring -----------------------------------------------------------------------------------------------


def measure(
    entries: list[Contender], repeats: int, warmup: int, tell: Callable[[], object] = lambda: None
) -> dict[str, dict[str, list[float]]]:
    """Time the contenders in interleaved rounds without garbage collection.

    Returns label -> {"first": ms per round, "again": ms per round}. `tell` is called after each round.
    """
    times: dict[str, dict[str, list[float]]] = {c.label: {"first": [], "again": []} for c in entries}
    order = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for round_ in range(warmup + repeats):
            shuffled = order.sample(entries, len(entries))
            # the slow ones last, so that the others stay next to each other in time
            for c in sorted(shuffled, key=lambda c: c.parametrized):
                for which in ("first", "again"):
                    begun = time.perf_counter()
                    c.step()
                    ms = 1e3 * (time.perf_counter() - begun)
                    if round_ >= warmup:
                        times[c.label][which].append(ms)
            tell()
    finally:
        gc.enable()
    return times


@torch.no_grad()
def points(c: Contender) -> Tensor:
    """The weights of a contender as one float64 tensor (336, 49, 7), in either layout."""
    return torch.stack([w.as_subclass(Tensor) for w in c.weights()]).double().reshape(COUNT, N, n)


def distance(Y: Tensor) -> float:
    """max ||Y^T Y - I||_F over the weights."""
    return float(torch.linalg.matrix_norm(Y.mT @ Y - torch.eye(n, dtype=Y.dtype)).max())


def busy() -> bool:
    """Whether other work is running on this machine; False if the system does not tell."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.3 * (os.cpu_count() or 1)


# -- for users -----------------------------------------------------------------------------------------------


def bench(console: Console, rounds: int = 20, threads: int = 1) -> dict[str, Any]:
    """Time the contenders, print a table, and return the data behind it."""
    for name, value in (("rounds", rounds), ("threads", threads)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    others, before = busy(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        record = _record(console, rounds)
    finally:
        torch.set_num_threads(before)
    record |= {"busy": others, "rounds": rounds, "threads": threads, "torch": str(torch.__version__)}
    where = record["machine"]
    console.print(_table(record).rich(console.width))
    lines = [
        "drift: largest distance of a weight from the manifold, ||Y^T Y - I||, after all steps. torch's "
        "Adam knows nothing about the manifold.",
        f"{where['processor']}, {where['cores']} cores, threads: {threads}, torch {record['torch']}; "
        f"medians of {rounds} interleaved rounds.",
        *record["missing"],
        *(
            ["The machine was busy with something else when this began: times may be far off."]
            if others
            else []
        ),
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False)
    return record


def _record(console: Console, rounds: int) -> dict[str, Any]:
    Y, G = problem()
    entries = [
        ghor_adam(Y, G, STACKED, fused=True),
        ghor_adam(Y, G, SEPARATE, fused=True),
        torch_adam(Y, G, SEPARATE, "fused"),
        torch_adam(Y, G, SEPARATE, "foreach"),
    ]
    base, missing = entries[2].label, []
    try:
        entries.append(geoopt_adam(Y, G, SEPARATE))
    except ImportError:
        missing.append("geoopt is not installed: pip install geoopt")
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("rounds", total=WARMUP + rounds)
        times = {
            label: t["again"]
            for label, t in measure(entries, rounds, WARMUP, partial(bar.advance, task)).items()
        }
    rows = [
        {
            "name": c.name,
            "layout": c.layout,
            "ms": median(times[c.label]),
            "over_torch_fused": median(a / b for a, b in zip(times[c.label], times[base], strict=True)),
            "drift": distance(points(c)),
        }
        for c in entries
    ]
    return {"machine": machine(), "rows": rows, "missing": missing}


def _table(record: dict[str, Any]) -> Table:
    columns = (
        Column("optimizer", "optimizer"),
        Column("weights", "weights"),
        Column("ms", "ms a step", "number", ".2f"),
        Column("over_torch_fused", "/ torch fused", "number", ".2f"),
        Column("drift", "drift", "number", ".0e"),
    )
    keys = ("name", "layout", "ms", "over_torch_fused", "drift")
    rows = [Row(tuple(row[key] for key in keys)) for row in record["rows"]]
    return Table("bench", f"One Adam step over {COUNT} weights on St({n},{N}), float32", columns, rows)
