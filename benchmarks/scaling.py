"""Time and memory of one Adam step as N grows: ghor's two sections against torch, geoopt and geotorch.

    python benchmarks/scaling.py                                # 2 threads; about half an hour
    python benchmarks/scaling.py --quick                        # does everything run? (not for quoting)
    python benchmarks/scaling.py --json scaling.json
    python benchmarks/scaling.py --crossover                    # from which N on is implicit faster?

n = 16 with N = 256 ... 32768 and n = 64 with N = 256 ... 8192, one matrix and a stack of 32, float32. Every
contender runs in its own process for every size, so that its peak memory is its own. It goes on to larger N
until a step, the set-up or the memory exceeds its budget; the table says which. Linux only: memory is read
from /proc.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import torch
from common import Weight, commit, machine, machine_lines, parametrized_step, quartiles, seconds, write_json
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

LR = 1e-3
SIZES = {16: [2**k for k in range(8, 16)], 64: [2**k for k in range(8, 14)]}  # n -> N
QUICK_SIZES = {16: [256, 2048, 4096, 8192], 64: [256]}
BATCHES = (1, 32)
FIT_FROM = 2048  # slopes are fitted over N from here on
TEN = 10  # steps that are timed together, so that what is done every ten steps counts with its share
LARGE = (30000, 50)

GHOR = ("ghor implicit", "ghor implicit, fused")
TRANSPORTED = ("ghor transported", "ghor transported, fused")
TORCH = "torch Adam, fused"


@dataclass(frozen=True)
class Budget:
    """Where a contender stops: seconds for one step and for the set-up, GiB beyond weight and gradient."""

    step: float
    setup: float
    memory: float


# -- contenders ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """`step()` does one whole step; `state` is the optimizer's; `held` is what must be kept beside the
    weight.
    """

    step: Callable[[], object]
    state: Callable[[], dict[Any, Any]]
    held: Callable[[], Iterable[Tensor]] = list


def ghor_adam(Y: Tensor, G: Tensor, section: str, fused: bool) -> Contender:
    ghor: Any = import_module("ghor")
    p = leaf(Y, G)
    options: dict[str, Any] = {"fused": True} if fused else {}
    opt = ghor.optim.Adam([p], space=ghor.Stiefel(), section=section, lr=LR, **options)
    return Contender(opt.step, lambda: opt.state)


def torch_adam(Y: Tensor, G: Tensor) -> Contender:
    """Plain Euclidean Adam on the same tensor: it leaves the manifold."""
    opt = torch.optim.Adam([leaf(Y, G)], lr=LR, fused=True)
    return Contender(opt.step, lambda: opt.state)


def geoopt_adam(Y: Tensor, G: Tensor, manifold: str) -> Contender:
    geoopt: Any = import_module("geoopt")
    p = leaf(Y, G, partial(geoopt.ManifoldParameter, manifold=getattr(geoopt, manifold)()))
    opt = geoopt.optim.RiemannianAdam([p], lr=LR)
    return Contender(opt.step, lambda: opt.state)


def geotorch_orthogonal(Y: Tensor, G: Tensor) -> Contender:
    geotorch: Any = import_module("geotorch")
    module: nn.Module = geotorch.orthogonal(Weight(Y))
    module.weight = Y  # geotorch starts at a random point of its own: bring it to ours
    return parametrized(module, G)


def torch_orthogonal(Y: Tensor, G: Tensor) -> Contender:
    return parametrized(parametrizations.orthogonal(Weight(Y)), G)


def parametrized(module: nn.Module, G: Tensor) -> Contender:
    step, _, opt = parametrized_step([module], [G], LR)
    return Contender(step, lambda: opt.state, module.buffers)


def leaf(Y: Tensor, G: Tensor, make: Callable[[Tensor], Tensor] = nn.Parameter) -> Tensor:
    """A parameter with its gradient already in place; no copies, the process is ours alone."""
    p = make(Y)
    p.grad = G
    return p


CONTENDERS: dict[str, Callable[[Tensor, Tensor], Contender]] = {
    GHOR[0]: partial(ghor_adam, section="implicit", fused=False),
    GHOR[1]: partial(ghor_adam, section="implicit", fused=True),
    TRANSPORTED[0]: partial(ghor_adam, section="transported", fused=False),
    TRANSPORTED[1]: partial(ghor_adam, section="transported", fused=True),
    TORCH: torch_adam,
    "geoopt, Euclidean": partial(geoopt_adam, manifold="EuclideanStiefel"),
    "geoopt, canonical": partial(geoopt_adam, manifold="CanonicalStiefel"),
    "geoopt, Euclidean exact": partial(geoopt_adam, manifold="EuclideanStiefelExact"),
    "geotorch orthogonal": geotorch_orthogonal,
    "torch orthogonal": torch_orthogonal,
}


def points(N: int, n: int, batch: int) -> tuple[Tensor, Tensor]:
    """A point and a gradient, (N, n) or (batch, N, n)."""
    generator = torch.Generator().manual_seed(0)
    shape = (N, n) if batch == 1 else (batch, N, n)
    Y = torch.linalg.qr(torch.randn(shape, dtype=torch.float64, generator=generator)).Q.float().contiguous()
    return Y, torch.randn(shape, generator=generator)


# -- memory --------------------------------------------------------------------------------------------------


def status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    found = re.search(rf"^{key}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def resident() -> int:
    """Resident bytes after free memory was given back to the system; resets the peak (VmHWM)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else a freed block of the last step hides an allocation of the next
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def out_of_memory(error: BaseException) -> bool:
    return (
        isinstance(error, MemoryError) or "allocate memory" in str(error) or "not enough memory" in str(error)
    )


# -- in the child --------------------------------------------------------------------------------------------


@contextmanager
def phase(name: str, limit: float) -> Iterator[None]:
    """Announce what is going on, and end the process if it takes longer than `limit` seconds."""
    print(json.dumps({"phase": name}), flush=True)
    signal.setitimer(
        signal.ITIMER_REAL, limit
    )  # no handler: SIGALRM also ends a process that is deep inside LAPACK
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


def measure(
    contender: str, n: int, N: int, batch: int, budget: Budget, rounds: int, time_cap: float
) -> dict[str, Any]:
    """One contender at one size: set-up, steps, memory."""
    small = CONTENDERS[contender](
        *points(4 * n, n, batch)
    )  # imports, threads, buffers of libraries: not counted
    for _ in range(TEN + 1):
        small.step()
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + int(budget.memory * 2**30), -1))
    Y, G = points(N, n, batch)
    base = resident()
    with phase("set-up", budget.setup):
        start = time.perf_counter()
        c = CONTENDERS[contender](Y, G)
        setup = time.perf_counter() - start
    with phase("first step", budget.setup):
        first = seconds(c.step)  # ghor builds its section here
    if first < budget.step:
        with phase("steps", 60 + 20 * budget.step):
            times = timed(c.step, first, rounds, time_cap)
    else:
        times = [first]
    peak = status("VmHWM") - base
    over = median(times) > budget.step
    held = resident() - base
    if not over:
        for _ in range(TEN):  # what is done every ten steps is among them
            c.step()
    extra = status("VmHWM") - held - base
    state = [v for s in c.state().values() for v in s.values() if torch.is_tensor(v)]
    return {
        "ms": [1e3 * t for t in times],
        "setup_s": setup,
        "first_ms": 1e3 * first,
        "peak_bytes": max(peak, held + extra),
        "held_bytes": held,
        "extra_bytes": None if over else extra,
        "state_entries": sum(v.numel() for v in state),
        "held_entries": sum(v.numel() for v in c.held()),
        "stopped": f"a step takes {median(times):.1f} s" if over else None,
    }


def timed(step: Callable[[], object], first: float, rounds: int, time_cap: float) -> list[float]:
    """Seconds per step: ten steps in a row, `rounds` times; slow ones one by one, up to the cap."""
    together = TEN if first < 0.3 else 1
    for _ in range(3 if together > 1 else 1):
        step()
    out: list[float] = []
    start = time.perf_counter()
    gc.disable()
    while len(out) < rounds and time.perf_counter() - start < time_cap:
        out.append(seconds(lambda: [step() for _ in range(together)]) / together)
    gc.enable()
    return out


def _call(func: Callable[..., object], *args: Any, **kwargs: Any) -> object:
    return func(*args, **kwargs)


class Recorder(TorchDispatchMode):
    """Records every matrix product and inverse, with the memory it works on."""

    NAMES = (
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "mv",
        "dot",
        "addmm_",
        "baddbmm_",
        "linalg_inv_ex",
        "linalg_solve_ex",
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.NAMES:
            self.calls.append(
                (func, args, dict(kwargs or {}))
            )  # holds the tensors: no memory is used for another
        return func(*args, **(kwargs or {}))

    def replay(self) -> tuple[list[partial[Any]], list[partial[Any]]]:
        """The tall products, and the n x n products and inverses, on copies that share memory alike."""
        storages: dict[int, Tensor] = {}

        def copy(x: Any) -> Any:
            if not torch.is_tensor(x):
                return x
            storage = x.untyped_storage()
            if storage.data_ptr() not in storages:
                flat = torch.empty(0, dtype=x.dtype).set_(storage.clone())
                storages[storage.data_ptr()] = flat
            return torch.as_strided(storages[storage.data_ptr()], x.shape, x.stride(), x.storage_offset())

        tall: list[partial[Any]] = []
        small: list[partial[Any]] = []
        for func, args, kwargs in self.calls:
            sizes = [s for x in args if torch.is_tensor(x) for s in x.shape[-2:]]
            call = partial(_call, func, *map(copy, args), **{k: copy(v) for k, v in kwargs.items()})
            (tall if max(sizes) > 4 * min(sizes) else small).append(call)
        return tall, small


def products(contender: str, n: int, N: int, rounds: int) -> dict[str, Any]:
    """A step against its own products and inverses, recorded and called alone, and one fused Adam step."""
    Y, G = points(N, n, 1)
    c = CONTENDERS[contender](Y.clone(), G.clone())
    adam = torch_adam(Y.clone(), G.clone())
    for _ in range(TEN + 2):  # not one of the steps that polish
        c.step()
        adam.step()
    recorder = Recorder()
    with torch.no_grad():
        with recorder:
            c.step()
        tall, small = recorder.replay()
        times: dict[str, list[float]] = {"step": [], "tall": [], "small": [], "adam": []}
        everything = dict.fromkeys(times, 0.0)
        parts: tuple[tuple[str, Callable[[], object]], ...] = (
            ("step", c.step),
            ("tall", lambda: [call() for call in tall]),
            ("small", lambda: [call() for call in small]),
            ("adam", adam.step),
        )
        gc.disable()
        for round_ in range(5 * (rounds + 1)):
            for name, part in parts:
                both = [
                    1e3 * seconds(part) for _ in range(2)
                ]  # the second finds the caches as itself has left them
                if round_ >= 5:
                    times[name].append(both[1])
                    everything[name] += sum(both)
    sums = [a + b + d for a, b, d in zip(times["tall"], times["small"], times["adam"], strict=True)]
    return {
        "tall_products": len(tall),
        "tall_calls": [
            f"{call.args[0]} {[tuple(x.shape) for x in call.args[1:] if torch.is_tensor(x)]}" for call in tall
        ],
        "small_calls": len(small),
        "ms": {name: quartiles(t) for name, t in times.items()},
        "ratio": quartiles([s / p for s, p in zip(times["step"], sums, strict=True)]),
        "ratio_of_best": min(times["step"]) / sum(min(times[k]) for k in ("tall", "small", "adam")),
        "ratio_with_polishing": everything["step"] / sum(everything[k] for k in ("tall", "small", "adam")),
        "ratio_tall_only": median(times["step"]) / (median(times["tall"]) + median(times["adam"])),
    }


def large(N: int, n: int, steps: int = 100) -> dict[str, Any]:
    """A layer with an N x n weight: constrain, the default optimizer, `steps` steps with their backward."""
    ghor: Any = import_module("ghor")
    torch.manual_seed(0)
    layer = nn.Linear(n, N, bias=False)
    goal = ghor.Stiefel().random(N, n)
    base = resident()
    start = time.perf_counter()
    ghor.constrain(layer, "weight", ghor.Stiefel())
    constrained = time.perf_counter()
    opt = ghor.optim.Adam(layer, lr=LR)
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = (layer.weight - goal).square().sum()
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    end = time.perf_counter()
    return {
        "N": N,
        "n": n,
        "steps": steps,
        "constrain_s": constrained - start,
        "seconds": end - start,
        "peak_bytes": status("VmHWM") - base,
        "loss": [losses[0], losses[-1]],
        "distance": float(ghor.Stiefel().residual(layer.weight.detach().double())),
        "state_keys": sorted(opt.state[layer.weight]),
    }


def crossover(n: int, batch: int, rounds: int, largest: float) -> dict[str, Any]:
    """Ratios transported / implicit by N, both fused, ten steps each, until implicit wins for good."""
    rows: list[dict[str, Any]] = []
    for N in sorted({round(n * 2 ** (k / 2)) for k in range(1, 21)} - {n}):
        if 4 * batch * N * N > largest or N > 4096 or sum(row["ratio"][0] > 1.3 for row in rows) >= 3:
            break
        Y, G = points(N, n, batch)
        a, b = (CONTENDERS[name](Y.clone(), G.clone()) for name in (TRANSPORTED[1], GHOR[1]))
        times: dict[str, list[float]] = {"transported": [], "implicit": []}
        for round_ in range(rounds + 1):
            for key, c in (("transported", a), ("implicit", b)):
                ms = 1e3 * seconds(lambda c=c: [c.step() for _ in range(TEN)]) / TEN  # type: ignore[misc]
                if round_ > 0:
                    times[key].append(ms)
        ratio = quartiles([x / y for x, y in zip(times["transported"], times["implicit"], strict=True)])
        rows.append({"N": N, "ratio": ratio, **{k: min(v) for k, v in times.items()}})
    slower = [i for i, row in enumerate(rows) if row["ratio"][1] < 1]
    at = slower[-1] + 1 if slower else 0
    return {"n": n, "batch": batch, "rows": rows, "crossover": rows[at]["N"] if at < len(rows) else None}


def child(task: dict[str, Any]) -> None:
    """Do one task; print its result as the last line."""
    torch.set_num_threads(task.pop("threads"))
    kind = task.pop("kind")
    try:
        if kind == "measure":
            result = measure(**{**task, "budget": Budget(**task["budget"])})
        else:
            tasks: dict[str, Callable[..., dict[str, Any]]]
            tasks = {"products": products, "large": large, "crossover": crossover}
            result = tasks[kind](**task)
    except (ImportError, MemoryError, RuntimeError) as error:
        if isinstance(error, ImportError):
            result = {"stopped": f"was skipped: {error}; peers come with `pip install ghor[bench]`"}
        elif out_of_memory(error):
            result = {"stopped": "memory"}
        else:
            raise
    print(json.dumps(result), flush=True)


# -- in the parent -------------------------------------------------------------------------------------------


def run(kind: str, threads: int, **task: Any) -> dict[str, Any]:
    """One task in a fresh process; a result without "ms" gives the reason in "stopped"."""
    command = [sys.executable, __file__, "--child", json.dumps({"kind": kind, "threads": threads, **task})]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    last = lines[-1] if lines else {}
    if done.returncode == 0:
        return dict(last)
    doing = last.get("phase", "start")
    if done.returncode == -signal.SIGALRM:
        return {"stopped": doing}
    if done.returncode < 0 and kind == "measure":
        return {"stopped": f"died of {signal.Signals(-done.returncode).name} during its {doing}"}
    raise SystemExit(f"{kind} {task} failed:\n{done.stderr[-3000:]}")


def why(stopped: str, budget: Budget) -> str:
    """The reason in words."""
    return {
        "memory": f"needs more than {budget.memory:g} GiB",
        "set-up": f"set-up takes more than {budget.setup:g} s",
        "first step": f"the first step takes more than {budget.setup:g} s",
        "steps": f"a step takes more than {budget.step:g} s",
    }.get(stopped, stopped)


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr that calls of `tell` advance; nothing if rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda what: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total + 1)
        yield lambda what: bar.update(task, advance=1, description=what)


def make_record(args: argparse.Namespace) -> dict[str, Any]:
    names = [name for name in CONTENDERS if re.search(args.only, name) and not args.crossover]
    sizes, batches = (QUICK_SIZES, BATCHES[:1]) if args.quick else (SIZES, BATCHES)
    rounds, cap = (2, 1.0) if args.quick else (args.rounds, 4.0)
    budget = Budget(args.step_budget, args.setup_budget, args.memory_budget)
    go = partial(run, threads=args.threads)
    torch.set_num_threads(args.threads)
    N, n = max(sizes[16]), 16
    record: dict[str, Any] = {
        "benchmark": "scaling",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(4 * 8 * N * n),
        "settings": {"lr": LR, "rounds": rounds, "quick": args.quick, "fit_from": FIT_FROM, **asdict(budget)},
        "rows": [],
        "products": {},
        "large": None,
        "crossover": [],
    }
    jobs = [(n, b, name, N) for n in sizes for b in batches for name in names for N in sizes[n]]
    crossings = [(n, b) for n in (4, 16, 64) for b in batches] if args.crossover else []
    ours = [name for name in GHOR if name in names]
    with progress(len(jobs) + len(crossings) + len(ours) + bool(ours)) as tell:
        stopped: set[tuple[int, int, str]] = set()
        for n, b, name, N in jobs:
            tell(f"{name}, n = {n}, N = {N}, batch {b}")
            if (n, b, name) in stopped:
                continue
            row = go(
                "measure",
                contender=name,
                n=n,
                N=N,
                batch=b,
                budget=asdict(budget),
                rounds=rounds,
                time_cap=cap,
            )
            if row.get("stopped"):
                row["stopped"] = why(row["stopped"], budget)
                stopped.add((n, b, name))
            record["rows"].append({"contender": name, "n": n, "N": N, "batch": b, **row})
        for name in ours:
            tell(f"{name}: the products of a step")
            record["products"][name] = go("products", contender=name, n=16, N=32768, rounds=rounds)
        if ours:
            tell(f"N = {LARGE[0]}, n = {LARGE[1]}")
            record["large"] = go("large", N=LARGE[0], n=LARGE[1])
        for n, b in crossings:
            tell(f"crossover, n = {n}, batch {b}")
            record["crossover"].append(
                go("crossover", n=n, batch=b, rounds=rounds, largest=budget.memory * 2**30 / 6)
            )
    record["slopes"] = slopes(record)
    record["targets"] = targets(record)
    return record


Panel = tuple[int, int]  # n, batch


def panels(record: dict[str, Any]) -> dict[Panel, dict[str, list[dict[str, Any]]]]:
    """(n, batch) -> contender -> its rows by N, stopped ones included."""
    out: dict[Panel, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in record["rows"]:
        out[row["n"], row["batch"]][row["contender"]].append(row)
    return out


def slope(rows: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> float | None:
    """The slope of log value by log N, fitted over N >= 2048; None for fewer than three N."""
    found = [
        (math.log(row["N"]), math.log(value(row))) for row in rows if row["N"] >= FIT_FROM and row.get("ms")
    ]
    return linear_regression(*zip(*found, strict=True)).slope if len(found) > 2 else None


def time_of(row: dict[str, Any]) -> float:
    return float(median(row["ms"]))


def memory_of(row: dict[str, Any]) -> float:
    """Peak MiB beyond weight and gradient; anything below 0.1 is noise."""
    return max(0.1, float(row["peak_bytes"]) / 2**20)


def slopes(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "n": n,
            "batch": b,
            "contender": name,
            "time": slope(rows, time_of),
            "memory": slope(rows, memory_of),
        }
        for (n, b), contenders in panels(record).items()
        for name, rows in contenders.items()
    ]


def targets(record: dict[str, Any]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []

    def target(what: str, value: float | None, at_most: float, text: str) -> None:
        met = None if value is None else value <= at_most
        out.append({"what": what, "value": value, "at_most": at_most, "met": met, "text": text})

    for s in record["slopes"]:
        if s["contender"] in GHOR and s["n"] == 16:
            value = s["time"]
            text = "not measured" if value is None else f"{value:.2f}"
            target(
                f"{s['contender']}, batch {s['batch']}: slope of time, N >= {FIT_FROM}, n = 16",
                value,
                1.2,
                text,
            )
    for (n, b), contenders in panels(record).items():
        for name in GHOR:
            rows = [row for row in contenders.get(name, []) if row.get("ms")]
            if not rows:
                continue
            row = rows[-1]
            N, entries = row["N"], b * row["N"] * n
            rest = (row["state_entries"] - 2 * entries) / (b * n * n)
            where = f"{name}, batch {b}, n = {n}, N = {N}"
            target(
                f"{where}: state less 2 N n, in n^2",
                rest,
                1.1,
                f"{row['state_entries']} = 2 N n + {rest:.2f} n^2",
            )
            extra = in_entries(row, "extra_bytes")
            target(f"{where}: peak of a step, in N n", extra, 8, number(extra))
    for name, row in record["products"].items():
        value = row["ratio"][1]
        target(f"{name}: step / (its products + fused Adam), N = 32768, n = 16", value, 2, f"{value:.2f}")
    return out


# -- the report ----------------------------------------------------------------------------------------------


def report(record: dict[str, Any]) -> str:
    """The record in words and tables; measures nothing."""
    s = record["settings"]
    lines = [
        *machine_lines(record),
        f"One Adam step, float32; a time is the mean of ten steps in a row, median of {s['rounds']} such. "
        f"Budgets: {s['step']:g} s a step, {s['setup']:g} s set-up, {s['memory']:g} GiB.",
    ]
    fitted = {(f["n"], f["batch"], f["contender"]): f for f in record["slopes"]}
    for (n, b), contenders in panels(record).items():
        sizes = sorted({row["N"] for rows in contenders.values() for row in rows})
        tables: tuple[tuple[str, str | None, Callable[[dict[str, Any]], float | None]], ...] = (
            ("ms a step", "time", time_of),
            ("peak MiB beyond weight and gradient, set-up included", "memory", memory_of),
            ("kept between steps, in N n entries", None, partial(in_entries, key="held_bytes")),
            (
                "more than that at the peak of a step, in N n entries",
                None,
                partial(in_entries, key="extra_bytes"),
            ),
        )
        for title, which, value in tables:
            head = f"{'N':26}" + "".join(f"{N:>9}" for N in sizes) + ("    slope" if which else "")
            if all(value(row) is None for rows in contenders.values() for row in rows if row.get("ms")):
                continue
            lines += ["", f"n = {n}, batch {b}: {title}", head]
            for name, rows in contenders.items():
                cells = {row["N"]: value(row) for row in rows if row.get("ms")}
                fit = fitted[n, b, name][which] if which else None
                text = "".join(f"{number(cells.get(N)):>9}" for N in sizes)
                lines.append(f"{name:26}{text}" + ("" if fit is None else f"{fit:9.2f}"))
        lines += ["", "  state entries (of the optimizer; kept beside it) at the largest N reached"]
        for name, rows in contenders.items():
            done = [row for row in rows if row.get("ms")]
            if done:
                N, unit = done[-1]["N"], b * done[-1]["N"] * n
                state, held = (done[-1][key] / unit for key in ("state_entries", "held_entries"))
                lines.append(f"  {name:26}N = {N:<7}{state:9.3f} N n{held:12.3f} N n")
        lines += [
            f"  {name} ends at N = {rows[-1]['N']}: {rows[-1]['stopped']}"
            for name, rows in contenders.items()
            if rows[-1].get("stopped")
        ]
    for name, row in record["products"].items():
        ms = {k: f"{q[1]:.2f} ms" for k, q in row["ms"].items()}
        lines += [
            "",
            f"{name}, N = 32768, n = 16: a step {ms['step']}; its {row['tall_products']} tall products "
            f"{ms['tall']}, {row['small_calls']} n x n products and inverses {ms['small']}, one fused Adam "
            f"step {ms['adam']}",
            f"  step / (products + Adam) = {row['ratio'][1]:.2f} ({row['ratio'][0]:.2f} - "
            f"{row['ratio'][2]:.2f}), of the best times {row['ratio_of_best']:.2f}, mean with polishing "
            f"{row['ratio_with_polishing']:.2f}, tall products only {row['ratio_tall_only']:.2f}",
        ]
    if record["large"]:
        row = record["large"]
        lines += [
            "",
            f"N = {row['N']}, n = {row['n']}: constrain {row['constrain_s']:.2f} s; with {row['steps']} "
            f"steps and their backward {row['seconds']:.2f} s, {row['peak_bytes'] / 2**20:.0f} MiB; loss "
            f"{row['loss'][0]:.3g} -> {row['loss'][1]:.3g}, {row['distance']:.1e} off the manifold",
        ]
    for row in record["crossover"]:
        at = f"from N = {row['crossover']} on" if row["crossover"] else "nowhere here"
        lines += [
            "",
            f"n = {row['n']}, batch {row['batch']}: implicit is faster {at}; time transported / implicit:",
        ]
        lines.append("  " + "  ".join(f"{r['N']}: {r['ratio'][1]:.2f}" for r in row["rows"]))
    lines += ["", "Targets"] if record["targets"] else []
    for line in record["targets"]:
        verdict = {True: "met", False: "NOT MET", None: ""}[line["met"]]
        lines.append(f"  {line['what']:74} <= {line['at_most']:<6g}{line['text']:32}{verdict}")
    return "\n".join(lines)


def in_entries(row: dict[str, Any], key: str) -> float | None:
    """Bytes in units of the weight's float32; None if not measured or lost in pages and noise."""
    entries = row["batch"] * row["N"] * row["n"]
    return None if row[key] is None or 4 * entries < 2**20 else float(row[key] / 4 / entries)


def number(x: float | None) -> str:
    if x is None:
        return "-"
    return f"{x:.0f}" if x >= 1000 else f"{x:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of ten steps (default: 7)")
    parser.add_argument(
        "--quick", action="store_true", help="few sizes and rounds, batch 1: to see it run, not to quote"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="only contenders whose name matches")
    parser.add_argument(
        "--crossover", action="store_true", help="only this: the N from which implicit beats transported"
    )
    parser.add_argument(
        "--step-budget", type=float, default=2, metavar="S", help="seconds for a step (default: 2)"
    )
    parser.add_argument(
        "--setup-budget", type=float, default=60, metavar="S", help="seconds for set-up (default: 60)"
    )
    parser.add_argument("--memory-budget", type=float, default=6, metavar="GIB", help="GiB (default: 6)")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the whole record, raw times included"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    if not os.access("/proc/self/clear_refs", os.W_OK):
        raise SystemExit("memory is read from /proc/self, which is not there or not writable: Linux only")
    record = make_record(args)
    print(report(record))
    if args.json:
        write_json(record, args.json)


if __name__ == "__main__":
    main()
