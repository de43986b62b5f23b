"""`step.py --large` and `step.py --crossover`: one Adam step on large Stiefel matrices, float32.

Large: one matrix, in units of what its size allows: a product of N n^2 terms, and a step of Muon, which is
five Newton-Schulz iterations of three such products each, in bfloat16. Crossover: the ratio of transported to
implicit section, by N and n/N, which shows the rule for section="auto".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from fractions import Fraction
from functools import partial
from statistics import fmean
from typing import Any

import torch
from common import commit, machine, machine_lines, quartiles, seconds
from contenders import LR, Contender, measure
from torch import Tensor, nn

import ghor

SIZES = ((1024, 768), (1024, 512), (1024, 256), (2048, 512), (4096, 1024), (4096, 256), (2048, 64))
SECTIONS = ("transported", "implicit", "auto")
PRODUCT, MUON, TORCH = "product Y^T G", "torch Muon", "torch Adam, fused"

GRID_N = (256, 512, 1024, 2048, 4096)
GRID_SHARE = tuple(map(Fraction, ("1/64", "1/32", "1/16", "1/8", "1/4", "1/2", "3/4")))
GRID_BATCH = (1, 16)
CELL_SECONDS = 1.0  # of timed steps
# A cell is left out if its set-up (the polar factor of n x n) and one transported step take longer than this,
# or its sections more memory: the ratio has settled by then.
CELL_FLOPS, CELL_BYTES = 1e12, 1 << 29


def leaf(Y: Tensor, G: Tensor) -> nn.Parameter:
    p = nn.Parameter(Y.clone())
    p.grad = G.clone()
    return p


def ghor_adam(
    Y: Tensor, G: Tensor, section: str, **options: Any
) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    p = leaf(Y, G)
    return p, ghor.optim.Adam([p], space=ghor.Stiefel(), section=section, lr=LR, **options)


def problem(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return ghor.Stiefel().random(*shape, generator=generator), torch.randn(shape, generator=generator)


def common_record(
    name: str, before: dict[str, Any], after: dict[str, Any], **settings: Any
) -> dict[str, Any]:
    rates = ("matmul_gflops", "copy_gbs")
    return {
        "benchmark": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": before | {key: max(before[key], after[key]) for key in rates},
        "rates": [{key: m[key] for key in rates} for m in (before, after)],
        "settings": {"lr": LR, **settings},
    }


def first_lines(record: dict[str, Any]) -> list[str]:
    """The machine, and whether other work ran, before or meanwhile."""
    lines = machine_lines(record)
    for key, unit in (("matmul_gflops", "GFlop/s"), ("copy_gbs", "GB/s")):
        values = [rates[key] for rates in record["rates"]]
        if max(values) > 1.2 * min(values):
            lines.append(
                f"The machine changed meanwhile: {values[0]:.1f}, then {values[1]:.1f} {unit}: not to be "
                "quoted."
            )
    return lines


def tell(text: str) -> None:
    sys.stderr.write(f"\r{text:60}" if text else f"\r{'':60}\r")
    sys.stderr.flush()


# -- one matrix ----------------------------------------------------------------------------------------------


def contenders(N: int, n: int) -> Iterator[tuple[Contender, torch.optim.Optimizer | None]]:
    Y, G = problem(N, n)
    size = f"{N} x {n}"
    for section, options in (*((s, {}) for s in SECTIONS), ("auto", {"fused": True})):
        p, opt = ghor_adam(Y, G, section, **options)
        yield (
            Contender(
                f"ghor Adam, {section}{', fused' if options else ''}", size, opt.step, partial(list, [p])
            ),
            opt,
        )
    out = torch.empty(n, n)
    yield Contender(PRODUCT, size, lambda: torch.mm(Y.mT, G, out=out), list), None
    p = leaf(Y, G)
    yield Contender(MUON, size, torch.optim.Muon([p], lr=LR).step, partial(list, [p])), None
    p = leaf(Y, G)
    yield Contender(TORCH, size, torch.optim.Adam([p], lr=LR, fused=True).step, partial(list, [p])), None


def section_of(opt: torch.optim.Optimizer) -> str:
    (state,) = opt.state.values()
    return "implicit" if "anchor" in state else "transported"


def measure_size(N: int, n: int, repeats: int, warmup: int) -> list[dict[str, Any]]:
    entries = list(contenders(N, n))
    times = measure([c for c, _ in entries], repeats, warmup)
    again = {c.name: times[c.label]["again"] for c, _ in entries}

    def over(a: str, b: str) -> list[float]:
        return quartiles([x / y for x, y in zip(again[a], again[b], strict=True)])

    return [
        {
            "N": N,
            "n": n,
            "name": c.name,
            "section": None if opt is None else section_of(opt),
            "ms": quartiles(again[c.name]),
            "mean_ms": fmean(again[c.name]),
            "first_ms": quartiles(times[c.label]["first"]),
            "over_product": over(c.name, PRODUCT),
            "over_muon": over(c.name, MUON),
            "over_torch_fused": over(c.name, TORCH),
            "distance": None
            if opt is None
            else float(ghor.Stiefel().residual(c.weights()[0].detach().double())),
            "rounds_ms": times[c.label],
        }
        for c, opt in entries
    ]


def large_record(repeats: int, warmup: int, sizes: tuple[tuple[int, int], ...] = SIZES) -> dict[str, Any]:
    """All sizes, one after the other; rounds are interleaved within a size."""
    before, rows = machine(), []
    for i, (N, n) in enumerate(sizes):
        tell(f"{i + 1}/{len(sizes)}  {N} x {n}")
        rows += measure_size(N, n, repeats, warmup)
    tell("")
    return {**common_record("step, large", before, machine(), repeats=repeats, warmup=warmup), "rows": rows}


def large_report(record: dict[str, Any]) -> str:
    s = record["settings"]
    lines = [
        *first_lines(record),
        f"One step on one matrix of St(n,N), float32; {s['repeats']} interleaved rounds after {s['warmup']} "
        f"of warm-up" + ("." if s["repeats"] >= 10 else ": too few to quote."),
        "",
        f"{'N x n':13}{'contender':38}{'median ms':>10}{'q25 - q75':>20}{'best ms':>10}{'mean ms':>10}"
        f"{'/ product':>11}{'/ Muon':>9}{'/ fused':>9}{'off by':>10}",
    ]
    size = ""
    for row in record["rows"]:
        q, same = row["ms"], size == (size := f"{row['N']} x {row['n']}")
        name = f"{row['name']} ({row['section']})" if "auto" in row["name"] else row["name"]
        lines += [] if same or len(lines) < 5 or lines[-1].startswith("N x n") else [""]
        lines.append(
            f"{'' if same else size:13}{name:38}{q[1]:10.2f}{f'{q[0]:.2f} - {q[2]:.2f}':>20}"
            f"{min(row['rounds_ms']['again']):10.2f}{row['mean_ms']:10.2f}{row['over_product'][1]:11.1f}"
            f"{row['over_muon'][1]:9.2f}{row['over_torch_fused'][1]:9.1f}"
            + ("" if row["distance"] is None else f"{row['distance']:10.1e}")
        )
    return "\n".join(lines)


# -- crossover -----------------------------------------------------------------------------------------------


def measure_cell(N: int, n: int, batch: int, cap: float) -> dict[str, Any]:
    """Transported and implicit in turn, two steps each, the second of which counts, until the time is up."""
    Y, G = problem(*((batch,) if batch > 1 else ()), N, n)
    opts = {section: ghor_adam(Y, G, section)[1] for section in ("transported", "implicit")}
    times: dict[str, list[float]] = {section: [] for section in opts}
    for opt in opts.values():
        opt.step()
    begun = time.perf_counter()
    while not (rounds := len(times["implicit"])) or (rounds < 30 and time.perf_counter() - begun < cap):
        for section, opt in opts.items():
            opt.step()
            times[section].append(1e3 * seconds(opt.step))
    ratio = quartiles([a / b for a, b in zip(*times.values(), strict=True)])
    best = {section: min(ms) for section, ms in times.items()}
    return {"N": N, "n": n, "batch": batch, "ratio": ratio, "best_ms": best, "rounds_ms": times}


def crossover_record(cap: float = CELL_SECONDS, largest: int = GRID_N[-1]) -> dict[str, Any]:
    before, cells = machine(), []
    for batch in GRID_BATCH:
        for N in (N for N in GRID_N if N <= largest):
            for share in GRID_SHARE:
                n = int(N * share)
                flops = batch * (6 * N * N * n + 100 * n**3)
                if flops <= CELL_FLOPS and 4 * batch * N * N <= CELL_BYTES:
                    tell(f"{batch} x {N} x {n}")
                    cells.append(measure_cell(N, n, batch, cap))
    tell("")
    return {**common_record("step, crossover", before, machine(), cell_seconds=cap), "cells": cells}


def crossover_report(record: dict[str, Any]) -> str:
    """Ratios above 1 mean that implicit is faster; in brackets if 1 lies between the quartiles over the
    rounds.

    They are ratios of the best times: a cell has few rounds, and other work on the machine only adds time.
    """
    by = {(c["batch"], c["N"], Fraction(c["n"], c["N"])): c for c in record["cells"]}
    lines = [*first_lines(record), ""]
    for batch in GRID_BATCH:
        lines += [
            f"transported / implicit, {'one matrix' if batch == 1 else f'a stack of {batch}'} (best; "
            "implicit ms)",
            f"{'N':>6}"
            + "".join(f"{f'n = N/{1 / s}' if s.numerator == 1 else f'n = {s} N':>17}" for s in GRID_SHARE),
        ]
        for N in sorted({N for b, N, _ in by if b == batch}):
            row = f"{N:6}"
            for share in GRID_SHARE:
                cell = by.get((batch, N, share))
                if cell is None:
                    row += f"{'-':>17}"
                    continue
                q, best = cell["ratio"], cell["best_ms"]
                text = f"{best['transported'] / best['implicit']:.2f}"
                row += f"{f'({text})' if q[0] < 1 < q[2] else text:>8}{best['implicit']:8.2f} "
            lines.append(row)
        lines.append("")
    return "\n".join(lines[:-1])
