"""Shared by the benchmarks: the machine and its rates, quartiles, parametrizations as contenders, writing."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor, nn


def busy_cores(wait: float = 1.0) -> float:
    """How many cores are at work while this process sleeps; without /proc/stat, the load average.

    The load average is that of the last minutes, and says little of this one.
    """
    stat = Path("/proc/stat")
    if not stat.exists():
        return os.getloadavg()[0]

    def times() -> list[int]:
        return [
            int(x) for x in stat.read_text().splitlines()[0].split()[1:9]
        ]  # user, nice, system, idle, ...

    before = times()
    time.sleep(wait)
    spent = [b - a for a, b in zip(before, times(), strict=True)]
    idle = spent[3] + spent[4]  # the second of these waits for a disk
    return (1 - idle / max(1, sum(spent))) * (os.cpu_count() or 1)


def seconds(f: Callable[[], object]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def quartiles(values: Sequence[float]) -> list[float]:
    """[25 %, 50 %, 75 %]"""
    return quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3


# -- contenders ----------------------------------------------------------------------------------------------


class Weight(nn.Module):
    """A module that is nothing but its weight, so that only the parametrization costs time."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def parametrized_step(
    modules: list[nn.Module], grads: list[Tensor], lr: float
) -> tuple[Callable[[], None], Callable[[], list[Tensor]], torch.optim.Optimizer]:
    """Forward of the parametrization, backward of sum(w * G), and fused Adam (torch's fastest here) below it.

    Returns the step, the weights, and the optimizer.
    """
    params = [p for module in modules for p in module.parameters()]
    for p in params:
        p.data = (
            p.data.contiguous()
        )  # geotorch leaves slices behind, and torch's fused CPU kernels ignore strides
    opt = torch.optim.Adam(params, lr=lr, fused=True)

    def weights() -> list[Tensor]:
        return [module.weight for module in modules]  # type: ignore[misc]  # a Tensor, through the parametrization

    def step() -> None:
        opt.zero_grad()
        torch.autograd.backward(
            weights(), grads
        )  # the gradient of sum(w * G) at w is G: the loss itself is free
        opt.step()

    return step, weights, opt


# -- the machine ---------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """The machine and its rates, each the best of several measurements."""
    load = busy_cores()
    A, B, C = (torch.rand(2048, 2048) for _ in range(3))
    product = min(seconds(lambda: torch.mm(A, B, out=C)) for _ in range(8))
    x = torch.rand(1 << 26)  # 256 MiB
    y = torch.empty_like(x)
    copy = min(seconds(lambda: y.copy_(x)) for _ in range(8))  # reads and writes every entry
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else None
    return {
        "cpu": model[1] if model else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": load,
        "busy": 0.15 * (os.cpu_count() or 1) < load,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "matmul_gflops": 2 * 2048**3 / product / 1e9,
        "copy_gbs": 2 * 4 * x.numel() / copy / 1e9,
    }


def machine_lines(record: dict[str, Any]) -> list[str]:
    """The machine, its rates and the commit of a record, in words."""
    m = record["machine"]
    return [
        f"{m['cpu']} ({m['capability']}), {m['cores']} cores, {m['threads']} threads, load {m['load']:.1f}, "
        f"torch {m['torch']}, Python {m['python']}, commit {record['commit']}, {record['date']}",
        f"matmul 2048 float32: {m['matmul_gflops']:.0f} GFlop/s; copy: {m['copy_gbs']:.1f} GB/s (256 MiB)",
        *(
            ["The machine was busy with something else when this began: not to be quoted."]
            if m["busy"]
            else []
        ),
    ]


@functools.cache  # the code that runs is the code of the start
def commit(tree: Path = Path(__file__).parent) -> str:
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(git, cwd=tree, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def stamp() -> dict[str, Any]:
    """The start of a record: code, time and place."""
    return {"commit": commit(), "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}


def write_json(record: Any, path: Path) -> None:
    """Write the file completely or not at all."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    unfinished.replace(path)
