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
from torch.optim import Optimizer

from ghor import __version__

from . import checkpoint
from .config import Config
from .files import clean, named
from .protocol import gate
from .record import FORMAT, Damaged, Run, append, read
from .tasks import task_of
from .tasks.task import Task, on_spaces

Report = Callable[[int, dict[str, Any]], None]
PATIENCE = 1.0  # seconds to wait for a run that another process has: it may be about to end


class Busy(RuntimeError):
    """Another process is working on the run."""


def train(
    config: Config, folder: Path, data: Path | None = None, report: Report = lambda epoch, line: None
) -> Path:
    """Train until the record has `config.epochs` epochs; returns the path of the record.

    `report` is called after each epoch. Raises `Busy` if another process is working on the run, and `Damaged`
    if a file is not what was written.
    """
    path = folder / f"{config.name}.jsonl"
    with in_hand(path), settings(config):
        run = read(path) if path.exists() else None
        if run and len(run.epochs) >= config.epochs and (run.finished or run.asked > config.epochs):
            report(config.epochs, run.epochs[config.epochs - 1])
            return path

        task = task_of(config, data)
        task.read()
        opt = task.optimizer()
        rates = [group["lr"] for group in opt.param_groups]
        done, size = resume(task, opt, path)
        for epoch in range(done + 1, config.epochs + 1):
            losses: list[list[float]] = []
            began, ad, step, cpu = time.perf_counter(), 0.0, 0.0, math.inf
            for i, batch in enumerate(task.batches(epoch), (epoch - 1) * task.steps + 1):
                for group, rate in zip(opt.param_groups, rates, strict=True):
                    group["lr"] = rate * config.rate(i)
                t0, c0 = time.perf_counter(), time.process_time()
                opt.zero_grad()
                loss = task.losses(batch)
                t1 = time.perf_counter()
                opt.step()
                t2 = time.perf_counter()
                ad, step, cpu = ad + t1 - t0, step + t2 - t1, min(cpu, time.process_time() - c0)
                losses.append(task.losses(batch, backward=False) if config.loss == "after" else loss)
            parts = {"ad": ad, "step": step, "other": time.perf_counter() - began - ad - step}
            line = {
                "kind": "epoch",
                "epoch": epoch,
                "loss": [sum(column) / len(column) for column in zip(*losses, strict=True)],
                **task.evaluate(),
                "seconds": round(time.perf_counter() - began, 3),
                # of a step: forward and backward, the optimizer, and the rest of the loop
                "ms": {name: round(1000 * seconds / task.steps, 4) for name, seconds in parts.items()},
                # of all threads, the least: what else runs disturbs the others
                "step_cpu_ms": round(1000 * cpu, 3),
                "peak_mib": round(peak_mib(), 1),
                "time": now(),
            }
            state = {"model": task.model.state_dict(), "optimizer": opt.state_dict()}
            values = {"name": config.name, "epoch": epoch, "line": line, **state}
            checkpoint.save(values, path.with_suffix(".ckpt"))
            size = append(path, line, size)
            report(epoch, line)

        finish(task, path, size)
    return path


def finish(task: Task, path: Path, size: int) -> None:
    """Write what is drawn at the end of a run, and the end."""
    config, run = task.config, read(path)
    assert run is not None
    drawn = run.last("sample")
    sample = None if drawn and drawn["epoch"] == config.epochs else task.sample()
    if sample is not None:
        size = append(path, {"kind": "sample", "epoch": config.epochs, **sample}, size)
    gated = {} if config.every else {"gate": gate(config.optimizer, run.epochs, task.model)}
    append(path, {"kind": "end", "epochs": config.epochs, **gated, "time": now()}, size)


def resume(task: Task, opt: Optimizer, path: Path) -> tuple[int, int]:
    """Bring record, network and optimizer to the last finished epoch; its number, and the record's size."""
    config, here = task.config, provenance()
    run, state = found(task, path)
    if run is None:
        return 0, append(path, header(task, here), 0)
    done, size = 0, len(run.raw)
    if state is not None:
        done = int(state["epoch"])
        task.model.load_state_dict(state["model"])
        opt.load_state_dict(state["optimizer"])
        if len(run.epochs) == done - 1:  # stopped between the two files
            size = append(path, state["line"], size)
    last = run.last("resumed") or run.header
    if config.epochs > run.asked or any(last.get(k, v) != v for k, v in here.items()):
        line = {"kind": "resumed", "epoch": done, "epochs": config.epochs, **here, "time": now()}
        size = append(path, line, size)
    return done, size


def found(task: Task, path: Path) -> tuple[Run | None, dict[str, Any] | None]:
    """The record and the checkpoint that are there; `Damaged` if they are not of one run, this one."""
    saved, config = path.with_suffix(".ckpt"), task.config
    run = read(path) if path.exists() else None
    state = checkpoint.load(saved, config.device) if saved.exists() else None
    for file, owner in ((saved, state and state["name"]), (path, run and run.header["name"])):
        if owner is not None and owner != config.name:
            raise Damaged(f"{file} belongs to the run {owner}; move it away")
    done = int(state["epoch"]) if state else 0
    if run is None and state is not None:
        raise Damaged(
            f"{saved} has no record {path.name} beside it. Put it back, or remove the checkpoint to "
            "start from scratch, as ghor run --restart does"
        )
    if run is not None and (before := run.header.get("data", task.facts)) != task.facts:
        raise Damaged(
            f"{path} was trained on other data ({before}) than there is now ({task.facts}): go on with the "
            "interpreter that began it, or choose another --out"
        )
    if run is not None and len(run.epochs) not in (done, done - 1):
        there = f"is of epoch {done}" if state else "is missing"
        raise Damaged(
            f"{path} has {len(run.epochs)} epochs, its checkpoint {there}: the run cannot go on from there. "
            "Put back a copy of the file, or remove both to start from scratch, as ghor run --restart does"
        )
    return run, state


def header(task: Task, here: dict[str, Any]) -> dict[str, Any]:
    """The first line of a record."""
    return {
        "kind": "run",
        "format": FORMAT,
        "name": task.config.name,
        "config": task.config.to_dict(),
        **here,
        "started": now(),
        "steps_per_epoch": task.steps,
        "state": count_state(task),
        **({"data": task.facts} if task.facts else {}),
    }


@contextmanager
def settings(config: Config) -> Iterator[None]:
    """The run's threads, and what becomes of subnormal numbers; torch's own are put back."""
    before = torch.get_num_threads()
    try:
        torch.empty(0, device=config.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {config.device} cannot be used: {str(error).splitlines()[0]}") from None
    torch.set_num_threads(config.threads)
    torch.set_flush_denormal(config.flush_subnormals)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(False)


@contextmanager
def in_hand(path: Path) -> Iterator[None]:
    """Lock the run; `Busy` if another process has it.

    The system frees the lock if the process is killed. The lock's file stays: another process may just be
    opening it.
    """
    with named(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        raise Busy(f"{path} is locked by another process; wait for it, or stop it") from None
    try:
        clean(path.with_suffix(".ckpt"))
        yield
    finally:
        lock.release()


def forget(path: Path) -> None:
    """Remove a record and its checkpoint, to start from scratch; `Busy` if another process has the run."""
    with in_hand(path):
        path.with_suffix(".ckpt").unlink(missing_ok=True)
        path.unlink(missing_ok=True)


# -- what is written down ------------------------------------------------------------------------------------


def commit() -> str | None:
    """The commit of lab and library, with "+dirty" if they were changed since; None outside a repository."""
    lab = Path(__file__).parents[3]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(lab.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)  # not so if it is installed in a folder of a repository
        changed = git("status", "--porcelain", "-uno", "src", "lab/src")
        return git("rev-parse", "--short", "HEAD") + ("+dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def machine() -> dict[str, Any]:
    """The machine that computed the numbers."""
    processor, memory = platform.processor(), None
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, StopIteration, ValueError):
        pass
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": memory,
    }


def provenance() -> dict[str, Any]:
    """Versions, commit and machine."""
    versions = {"ghor": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    return {**versions, "commit": commit(), "machine": machine()}


def now() -> str:
    """The time, for the record."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def peak_mib() -> float:
    """Peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def count_state(task: Task) -> dict[str, Any]:
    """Entries of an optimizer's state after one step of a copy, without numbers that all weights share."""
    task = copy.copy(task)
    task.model = copy.deepcopy(task.model)
    for p in task.model.parameters():
        p.grad = torch.ones_like(p)
    opt = task.optimizer()
    opt.step()
    manifolds = {id(p) for _, p, _ in on_spaces(task.model)}
    manifold = weights = total = size = 0
    for p in task.model.parameters():
        found = [v for v in opt.state[p].values() if torch.is_tensor(v) and v.dim() > 0]
        count = sum(v.numel() for v in found)
        total, size = total + count, size + sum(v.numel() * v.element_size() for v in found)
        if id(p) in manifolds:
            manifold += count
            weights += p.shape[:-2].numel()
    return {
        "entries_per_manifold_weight": manifold / weights if weights else None,
        "total_entries": total,
        "mib": size / 2**20,
    }
