"""From a configuration to its record: train, save a checkpoint and a line after every epoch, resume.

A checkpoint carries the line of its epoch and is written first. Whenever the process is killed, the disk
holds a complete checkpoint and a record that lacks at most that line. The next call adds it and resumes, to
the last bit.
"""

from __future__ import annotations

import copy
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import nn
from torch.optim import Optimizer

from ghor import __version__, baselines, optim
from ghor.constraints.declare import declared_spaces, param_groups
from ghor.spaces import Euclidean
from ghor_lab.networks.decoder import Decoder

from . import checkpoint, compiled
from .config import Config
from .files import clean
from .protocol import gate, random_frames
from .record import FORMAT, Damaged, Run, append, read
from .tasks import TASKS, generator
from .text import methods

Report = Callable[[int, dict[str, Any]], None]
PATIENCE = 1.0  # seconds to wait for a run that another process has: it may be about to end


class Busy(RuntimeError):
    """Another process is working on the run."""


def optimizer_of(config: Config, model: nn.Module) -> Optimizer:
    """The optimizer that a configuration names, before its first step."""
    if isinstance(model, Decoder):
        return methods.optimizer_of(config, model)
    opt = _optimizer_of(config, model)
    if config.frame == "random":
        random_frames(opt, model, generator(config.seeds[0]))
    return opt


def _optimizer_of(config: Config, model: nn.Module) -> Optimizer:
    adam: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    section = "transported" if config.frame == "random" else config.section
    space: dict[str, Any] = {"retraction": config.retraction, "section": section}
    params: Any = model
    if config.manifold_lr is not None:
        params = param_groups(model)
        for group in params:
            group["lr"] = config.lr if isinstance(group["space"], Euclidean) else config.manifold_lr
    match config.optimizer:
        case "geometric-adam":
            return optim.Adam(params, **adam, **space, fused=True)
        case "scalar-moment-adam":
            return baselines.ScalarMomentAdam(params, **adam, **space, norm=config.norm)
        case "momentum":
            return optim.SGD(params, lr=config.lr, momentum=config.momentum, **space, fused=True)
        case "gradient":
            return optim.SGD(params, lr=config.lr, **space, fused=True)
        case "muon":  # lr, or manifold_lr, is the angle of a step; Adam trains weights that are not matrices
            own = {**adam, "weight_decay": 0.0}
            return optim.Muon(params, lr=config.lr, weight_decay=0.0, adamw=own, **space)
        case "adamw-anchor":
            return optim.AdamW(
                params, **adam, **space, weight_decay=config.weight_decay, anchor="start", fused=True
            )
        case _:
            return torch.optim.Adam(model.parameters(), **adam, fused=True)


# -- what is written down ------------------------------------------------------------------------------------


def commit() -> str | None:
    """The commit of the lab and the library, with "+dirty" if they were changed since; None if they are not
    files of a repository.
    """
    source = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(source), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)  # not so if it is installed in a folder of a repository
        return git("rev-parse", "--short", "HEAD") + (
            "+dirty" if git("status", "--porcelain", "-uno", ".") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None


def machine() -> dict[str, Any]:
    """The machine that computed the numbers."""
    processor = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, StopIteration, ValueError):
        memory = None
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": memory,
    }


def now() -> str:
    """The time, for the record."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def in_c(task: Any) -> bool:
    """Whether compiled C, which rounds differently, computes all layers that have some; a batch shows it."""
    if compiled.used(task.model):  # if it can be
        with torch.no_grad():
            task.loss(next(task.batches(1)))
    return compiled.used(task.model)


def provenance(task: Any, world: int) -> dict[str, Any]:
    """Versions, commit and machine, and what computes the layers."""
    return {
        "ghor": __version__,
        "python": platform.python_version(),
        "commit": commit(),
        "torch": str(torch.__version__),
        "machine": machine(),
        "compiled": in_c(task),
        "processes": world,
    }


def count(model: nn.Module) -> dict[str, int]:
    """How many weights and entries are on manifolds."""
    weights = entries = euclidean = 0
    for _, p, space in declared_spaces(model):
        if isinstance(space, Euclidean):
            euclidean += p.numel()
        else:
            N, n = space.size(p.shape)
            weights, entries = weights + p.numel() // (N * n), entries + p.numel()
    return {"manifold_weights": weights, "manifold_entries": entries, "euclidean_entries": euclidean}


def count_state(config: Config, model: nn.Module) -> dict[str, Any]:
    """Entries of an optimizer's state after one step of a copy, without numbers all weights share."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    opt = optimizer_of(config, model)
    opt.step()
    by_key: dict[str, int] = {}
    manifold = euclidean = size = 0
    for _, p, space in declared_spaces(model):
        for key, value in opt.state[p].items():
            if torch.is_tensor(value) and value.dim() > 0:
                by_key[key] = by_key.get(key, 0) + value.numel()
                size += value.numel() * value.element_size()
                if isinstance(space, Euclidean):
                    euclidean += value.numel()
                else:
                    manifold += value.numel()
    weights = count(model)["manifold_weights"]
    return {
        "entries_per_manifold_weight": manifold / weights if weights else None,
        "manifold_entries": manifold,
        "euclidean_entries": euclidean,
        "total_entries": manifold + euclidean,
        "mib": size / 2**20,
        "by_key": by_key,
    }


def peak_mib() -> float:
    """Peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


class Stopwatch:
    """The seconds that steps take to apply velocities: the `phase_hook` of a lifted optimizer."""

    def __init__(self, opt: Optimizer) -> None:
        self.retraction = self._since = 0.0
        self._phase = "done"
        if hasattr(opt, "phase_hook"):
            opt.phase_hook = self

    def __call__(self, phase: str) -> None:
        now = time.perf_counter()
        if (self._phase, phase) == ("retraction", "done"):
            self.retraction += now - self._since
        self._phase, self._since = phase, now


# -- the run -------------------------------------------------------------------------------------------------


def train(
    config: Config,
    folder: Path,
    *,
    data: Path | None = None,
    report: Report | None = None,
    rank: int = 0,
    world: int = 1,
) -> Path:
    """Train until the record has `config.epochs` epochs; returns the path of the record.

    `report` is called after each epoch. Raises `Busy` if another process is working on the run, and `Damaged`
    if a file is not what was written.
    """
    check_device(config.device)
    path = folder / f"{config.name}.jsonl"
    with in_hand(path, rank, world):
        before = torch.get_num_threads()
        try:
            _train(config, path, data, report, rank, world)
        finally:  # torch's own
            torch.set_num_threads(before)
            torch.set_flush_denormal(False)
    return path


def forget(path: Path) -> None:
    """Remove a record and its checkpoint, to start from scratch; `Busy` if another process has the run."""
    with in_hand(path):
        path.with_suffix(".ckpt").unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def check_device(name: str) -> None:
    """Raise ValueError unless the device exists."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {name} cannot be used: {str(error).splitlines()[0]}") from None


@contextmanager
def in_hand(path: Path, rank: int = 0, world: int = 1) -> Iterator[None]:
    """Lock the run for the processes that train it together; `Busy` in all of them if another has it.

    The first process holds the lock, and the system frees it if the process is killed. The lock's file stays:
    another process may just be opening it.
    """
    lock, free = FileLock(path.with_suffix(".lock")), [True]
    if rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=PATIENCE)
        except Timeout:
            free = [False]
    if world > 1:
        torch.distributed.broadcast_object_list(free)
    if not free[0]:
        raise Busy(f"{path} is locked by another process; wait for it, or stop it")
    try:
        if rank == 0:
            clean(path.with_suffix(".ckpt"))
        yield
    finally:
        lock.release()


def _train(
    config: Config, path: Path, data: Path | None, report: Report | None, rank: int, world: int
) -> None:
    torch.set_num_threads(config.threads)
    torch.set_flush_denormal(config.flush_subnormals)
    run = read(path) if path.exists() else None
    if (
        run is not None
        and len(run.epochs) >= config.epochs
        and (run.finished or run.epochs_asked > config.epochs)
    ):
        if report:
            report(config.epochs, run.epochs[config.epochs - 1])
        return
    task = TASKS[config.experiment](config, data, rank, world)
    model: nn.Module = task.model
    if world > 1:
        task.predict = nn.parallel.DistributedDataParallel(model)
    opt = optimizer_of(config, model)
    rates = [group["lr"] for group in opt.param_groups]
    done, size = resume(config, path, run, model, opt, task, rank, world)
    if world > 1:
        torch.distributed.barrier()  # no checkpoint is written before all processes have read the last one
    watch = Stopwatch(opt)
    for epoch in range(done + 1, config.epochs + 1):
        line = one_epoch(task, opt, epoch, watch, rates)
        if rank == 0:
            values = {"name": config.name, "epoch": epoch, "line": line}
            state = {"model": model.state_dict(), "optimizer": opt.state_dict()}
            checkpoint.save(values | state, path.with_suffix(".ckpt"))
            size = append(path, line, size)
            if report:
                report(epoch, line)
    if rank == 0:
        there = run.last("sample") if run is not None else None
        sample = None if there and there["epoch"] == config.epochs else task.sample()
        if sample is not None:
            size = append(path, {"kind": "sample", "epoch": config.epochs, **sample}, size)
        run = read(path)
        assert run is not None
        gated = {} if config.every else {"gate": gate(config.optimizer, run.epochs, model)}
        append(path, {"kind": "end", "epochs": config.epochs, **gated, "time": now()}, size)


def resume(
    config: Config,
    path: Path,
    run: Run | None,
    model: nn.Module,
    opt: Optimizer,
    task: Any,
    rank: int,
    world: int,
) -> tuple[int, int]:
    """Bring record, network and optimizer to the last finished epoch; its number, and the record's size."""
    saved, write, here = path.with_suffix(".ckpt"), rank == 0, provenance(task, world)
    state = checkpoint.load(saved, config.device) if saved.exists() else None
    for file, owner in ((saved, state and state["name"]), (path, run and run.header["name"])):
        if owner is not None and owner != config.name:
            raise Damaged(f"{file} belongs to the run {owner}; move it away")
    if run is None:
        if state is not None:
            raise Damaged(
                f"{saved} has no record {path.name} beside it. Put it back, or remove the checkpoint to "
                "start from scratch, as ghor run --restart does"
            )
        header = {
            "kind": "run",
            "format": FORMAT,
            "name": config.name,
            "config": config.to_dict(),
            **here,
            "started": now(),
            "steps_per_epoch": task.steps,
            "parameters": count(model),
            "state": count_state(config, model),
            **({"data": task.facts} if task.facts else {}),
        }
        return 0, append(path, header, 0) if write else 0
    if (before := run.header.get("data", task.facts)) != task.facts:
        raise Damaged(
            f"{path} was trained on other data ({before}) than there is now ({task.facts}): go on with the "
            "interpreter that began it, or choose another --out"
        )
    done = 0 if state is None else int(state["epoch"])
    if len(run.epochs) not in (done, done - 1):
        there = "is missing" if state is None else f"is of epoch {done}"
        raise Damaged(
            f"{path} has {len(run.epochs)} epochs, its checkpoint {there}: the run cannot go on from there. "
            "Put back a copy of the file, or remove both to start from scratch, as ghor run --restart does"
        )
    size = run.size
    if state is not None:
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["optimizer"])
        if write and len(run.epochs) == done - 1:  # stopped between the two files
            size = append(path, state["line"], size)
    last = run.last("resumed") or run.header
    if write and (config.epochs > run.epochs_asked or any(last.get(k, v) != v for k, v in here.items())):
        size = append(
            path, {"kind": "resumed", "epoch": done, "epochs": config.epochs, **here, "time": now()}, size
        )
    return done, size


def one_epoch(task: Any, opt: Optimizer, epoch: int, watch: Stopwatch, rates: list[float]) -> dict[str, Any]:
    """Train for one epoch; returns its line. `rates` are the learning rates of the groups after a warm-up."""
    began = time.perf_counter()
    ad, step, cpu = 0.0, 0.0, math.inf
    config = task.config
    watch.retraction = 0.0
    losses: list[list[float]] = []
    for i, batch in enumerate(task.batches(epoch), (epoch - 1) * task.steps + 1):
        if config.warmup or config.every:
            for group, rate in zip(opt.param_groups, rates, strict=True):
                group["lr"] = rate * config.rate(i)
        t0, c0 = time.perf_counter(), time.process_time()
        opt.zero_grad()
        objective, values = task.loss(batch)
        objective.backward()
        t1 = time.perf_counter()
        opt.step()
        t2 = time.perf_counter()
        ad, step, cpu = ad + t1 - t0, step + t2 - t1, min(cpu, time.process_time() - c0)
        if config.loss == "after":
            with torch.no_grad():
                _, values = task.loss(batch)
        losses.append(values)
    trained = time.perf_counter() - began
    per_step = 1000 / task.steps
    found = task.evaluate()
    return {
        "kind": "epoch",
        "epoch": epoch,
        "loss": [sum(column) / len(column) for column in zip(*losses, strict=True)],
        **found,
        "seconds": round(time.perf_counter() - began, 3),
        "ms": {
            "ad": round(ad * per_step, 3),
            "direction": round((step - watch.retraction) * per_step, 4),
            "retraction": round(watch.retraction * per_step, 4),
            "other": round((trained - ad - step) * per_step, 3),
        },
        "step_cpu_ms": round(1000 * cpu, 3),  # all threads, the least: what else runs disturbs the others
        "peak_mib": round(peak_mib(), 1),
        "time": now(),
    }
