"""Many runs: one after another, in several processes, on a Ray cluster, or as one rank of torchrun.

A run that cannot be done now, because another process is working on it or one of its files is damaged, is
skipped, and the reason is returned. Any other error ends all runs.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .config import Config
from .pool import counted
from .record import Damaged, Run, read
from .train import Busy, Report, train

Show = Callable[[Config, int, dict[str, Any]], None]
POLL = 0.5  # seconds between looks at the records of runs in other processes


def world_size() -> int:
    """The number of processes under torchrun; 1 otherwise."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def ranks() -> Iterator[tuple[int, int]]:
    """Rank and world size under torchrun, with its process group; (0, 1) otherwise."""
    world = world_size()
    if world == 1:
        yield 0, 1
        return
    try:
        torch.distributed.init_process_group("gloo")
        yield torch.distributed.get_rank(), world
    except RuntimeError as error:
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error).lower():
            raise
        # Another process is gone. The error holds Gloo's objects, and tearing these down may wait forever,
        # so exit without it.
        atexit.register(lambda kept: os._exit(1), error)
        reason = str(error).partition(". ")[0]
        raise OSError(
            f"the {world} processes cannot work together, because one has ended or failed: {reason}"
        ) from None
    torch.distributed.destroy_process_group()


def one_by_one(
    configs: Sequence[Config], folder: Path, data: Path | None, show: Show, rank: int = 0, world: int = 1
) -> list[str]:
    """Run them in this process."""
    left = []
    for config in configs:

        def report(epoch: int, line: dict[str, Any], config: Config = config) -> None:
            show(config, epoch, line)

        error = attempt(config, folder, data, report, rank, world)
        left += [str(error)] if error else []
    return left


def attempt(
    config: Config,
    folder: Path,
    data: Path | None,
    report: Report | None = None,
    rank: int = 0,
    world: int = 1,
) -> Busy | Damaged | None:
    """Do one run; the reason if it was skipped."""
    try:
        train(config, folder, data=data, report=report, rank=rank, world=world)
    except (Busy, Damaged) as error:
        return error
    return None


def with_other_threads(configs: Sequence[Config], folder: Path) -> list[str]:
    """Point out existing records of these runs with another number of threads, and how to continue them."""
    found: dict[int, list[Run]] = {}
    for config in configs:
        if not begun(folder / f"{config.name}.jsonl"):
            for path in sorted(folder.glob(f"{config.name.rpartition('-')[0]}-*.jsonl")):
                run = begun(path)
                threads = run.header["config"]["threads"] if run else config.threads
                if run and replace(config, threads=threads).name == path.stem:
                    found.setdefault(threads, []).append(run)
    lines = []
    for threads, (first, *others) in found.items():
        more = f", and {counted(len(others), 'more record')}" if others else ""
        lines.append(
            f"starting anew, but {first.path} has {len(first.epochs)} of "
            f"{counted(first.epochs_asked, 'epoch')} with {counted(threads, 'thread')}{more}: --threads "
            f"{threads} goes on with {'them' if others else 'it'}"
        )
    return lines


def begun(path: Path) -> Run | None:
    """A record that has an epoch and can be continued."""
    try:
        run = read(path) if path.exists() and path.with_suffix(".ckpt").exists() else None
    except (Damaged, OSError):
        return None  # the run itself reports it
    return run if run is not None and run.epochs else None


# -- in other processes --------------------------------------------------------------------------------------


def in_processes(
    configs: Sequence[Config], folder: Path, data: Path | None, show: Show, jobs: int
) -> list[str]:
    """Run them in `jobs` processes on this machine, each with the configuration's threads."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=follow_parent) as pool:
        # the processes inherit this: Ctrl-C is for the parent only
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        futures = [pool.submit(work, config.to_dict(), folder, data) for config in configs]
        signal.signal(signal.SIGINT, before)
        try:
            return watch(configs, folder, show, futures)
        except BaseException as error:
            for process in list(pool._processes.values()):
                process.terminate()
            pool.shutdown(cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise OSError("a training process was killed, by the user or for lack of memory") from None
            raise


def follow_parent() -> None:
    """In a pool's process: end when the parent is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)  # as safe as any other kill: the run resumes from its last checkpoint

    threading.Thread(target=wait, daemon=True).start()


def on_ray(
    configs: Sequence[Config], folder: Path, data: Path | None, show: Show, jobs: int, address: str | None
) -> list[str]:
    """Run them as tasks of a Ray cluster; `folder` must be the same for all of its machines.

    A task whose worker dies is started again elsewhere and resumes from its last checkpoint.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise ValueError("--executor ray needs Ray: pip install 'ray>=2.50'") from None
    if address is not None:
        knock(address)
    own: dict[str, Any] = {"num_cpus": jobs, "include_dashboard": False} if address is None else {}
    ray.init(address or "local", **own, log_to_driver=False, logging_level=logging.ERROR)
    try:
        task = ray.remote(max_retries=20)(work)
        refs = [
            task.options(num_cpus=config.threads if address else 1, name=config.name).remote(
                config.to_dict(), folder.absolute(), data and data.absolute()
            )
            for config in configs
        ]
        return watch(configs, folder, show, [ref.future() for ref in refs])
    finally:
        ray.shutdown()


def knock(address: str) -> None:
    """Raise OSError at once if nobody answers; Ray itself would try for many minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise OSError(f"no Ray cluster can be reached at {address}: {error}") from None


def work(values: dict[str, Any], folder: Path, data: Path | None) -> Exception | None:
    """One run in another process; errors meant for people come back as values, without a stack trace."""
    try:
        return attempt(Config.from_dict(values), folder, data)
    except (ValueError, OSError) as error:
        return error


def watch(
    configs: Sequence[Config], folder: Path, show: Show, futures: Sequence[Future[Exception | None]]
) -> list[str]:
    """Show the records as they grow until all runs are done; raise the first error."""
    sizes: dict[Path, int] = {}
    while True:
        done = [future for future in futures if future.done()]
        for config in configs:
            path = folder / f"{config.name}.jsonl"
            size = path.stat().st_size if path.exists() else 0
            if size == sizes.get(path, 0):
                continue
            sizes[path] = size
            try:
                run = read(path)
            except Damaged:
                continue  # the run itself reports it
            if run is not None and run.epochs:
                line = run.epochs[: config.epochs][-1]  # it may have more than were asked for
                show(config, line["epoch"], line)
        results = [future.result() for future in done]
        for error in results:
            if error is not None and not isinstance(error, Busy | Damaged):
                raise error
        if len(done) == len(futures):
            return [str(error) for error in results if error is not None]
        time.sleep(POLL)
