"""Many runs: one after another, in several processes, or on a Ray cluster.

A run that cannot be done now, because another process is working on it or one of its files is damaged, is
skipped, and the reason is returned. Any other error ends all runs.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

from .config import Config
from .record import Damaged, read
from .train import Busy, Report, train

Show = Callable[[Config, int, dict[str, Any]], None]
POLL = 0.5  # seconds between looks at the records of runs in other processes


def attempt(config: Config, folder: Path, data: Path | None, report: Report) -> str | None:
    """Do one run; the reason if it was skipped."""
    try:
        train(config, folder, data, report)
    except (Busy, Damaged) as error:
        return str(error)
    return None


def one_by_one(configs: Sequence[Config], folder: Path, data: Path | None, show: Show) -> list[str]:
    """Run them in this process."""
    found = [attempt(config, folder, data, partial(show, config)) for config in configs]
    return [reason for reason in found if reason is not None]


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
        where = folder.absolute(), data and data.absolute()
        cpus = [config.threads if address else 1 for config in configs]
        started = zip(configs, cpus, strict=True)
        refs = [task.options(num_cpus=n).remote(config.to_dict(), *where) for config, n in started]
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


def work(values: dict[str, Any], folder: Path, data: Path | None) -> str | Exception | None:
    """One run in another process; errors meant for people come back as values, without a stack trace."""
    try:
        return attempt(Config.from_dict(values), folder, data, lambda epoch, line: None)
    except (ValueError, OSError) as error:
        return error


def watch(
    configs: Sequence[Config], folder: Path, show: Show, futures: Sequence[Future[str | Exception | None]]
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
            if isinstance(error, Exception):
                raise error
        if len(done) == len(futures):
            return [reason for reason in results if isinstance(reason, str)]
        time.sleep(POLL)
