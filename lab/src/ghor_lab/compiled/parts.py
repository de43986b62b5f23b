"""Split a call for a batch into one part per thread. Calls into a library run without Python's lock."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch


@functools.cache
def pool(threads: int, flush: bool) -> ThreadPoolExecutor:
    """Threads for calls into the library, which run without Python's lock."""
    name, setting = "ghor-compiled", torch.set_flush_denormal
    return ThreadPoolExecutor(threads, name, initializer=setting, initargs=(flush,))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.cache_clear)  # threads stay behind in the parent


def flushes() -> bool:
    """Whether this thread flushes subnormal numbers to 0: a setting per thread, which ours have to share."""
    return sys.float_info.min * torch.finfo(torch.float32).eps == 0


def in_parts(call: Callable[[int, int], None], batch: int) -> None:
    """call(b0, b1) for the images of a batch, one part for every thread that torch uses.

    Everything `call` refers to is kept until the last thread has ended, even if we are interrupted before.
    While the interpreter shuts down, no thread takes a part any more, and we do the remaining calls
    ourselves.
    """
    threads = max(1, min(torch.get_num_threads(), batch))
    ends = [batch * i // threads for i in range(threads + 1)]
    ours, *others = itertools.pairwise(ends)
    waiting: list[Future[None]] = []
    try:
        for part in others:
            waiting.append(pool(threads - 1, flushes()).submit(call, *part))
    except RuntimeError as error:
        if "cannot schedule new futures" not in str(error):
            raise
    try:
        for part in (ours, *others[len(waiting) :]):
            call(*part)
    finally:
        wait(waiting)
    for future in waiting:
        future.result()
