"""The attention of small heads as one pass over memory: C, compiled on first use by the machine's own compiler.

At 7 features and 16 tokens a head the products are too small for a matrix library, and two thirds of the time of the
plain formula goes into moving and normalising scores. `attend` gives the same values up to rounding, on the same
machine the same bits for any number of threads. Where it cannot run, `unavailable` says why and the plain formula is
used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import cache_folder, store

SOURCE = Path(__file__).with_name("attention_core.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC")
LARGEST = 64  # tokens, and features of a head: beyond, a head no longer fits into registers and the cache next to them


@functools.cache
def library(C: int, T: int) -> ctypes.CDLL:
    """The compiled functions for heads of C features and T tokens; RuntimeError says why there are none."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("there is no C compiler (cc, gcc, clang, or the one named by CC)")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    # -march=native: another processor needs another file
    key = repr((SOURCE.read_bytes(), FLAGS, version, processor(), C, T)).encode()
    path = cache_folder() / f"attention-{hashlib.sha256(key).hexdigest()[:16]}.so"
    if not path.is_file():
        try:
            with tempfile.TemporaryDirectory(prefix="ghor-") as folder:
                made = Path(folder) / "made.so"
                command = [compiler, *FLAGS, f"-DC={C}", f"-DT={T}", str(SOURCE), "-o", str(made)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
                if done.returncode:
                    raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[:500]}")
                store(made.read_bytes(), path)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"compiling into {path.parent} failed: {error}") from None
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        path.unlink(missing_ok=True)  # damaged: made again next time
        raise RuntimeError(f"{path} could not be loaded and was removed: {error}") from None
    pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
    lib.forward.argtypes = [pointer] * 2 + [size] * 4
    lib.backward.argtypes = [pointer] * 3 + [size] * 4
    return lib


def processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in lines[:40] if line.startswith(("model name", "flags", "Features")))


def unavailable(QKV: Tensor, heads: int, tokens: int) -> str | None:
    """Why `attend` does not take these (None: it does). QKV is (3 D, batch * tokens)."""
    C = QKV.shape[0] // 3 // heads
    if QKV.device.type != "cpu" or QKV.dtype != torch.float32:
        return f"it is for float32 on the CPU, not {str(QKV.dtype).removeprefix('torch.')} on {QKV.device.type}"
    if tokens & (tokens - 1) or not 4 <= tokens <= LARGEST or C > LARGEST:
        return f"it is for 4, 8, 16, 32 or 64 tokens and heads of at most {LARGEST} features, not {tokens} and {C}"
    try:
        library(C, tokens)
    except RuntimeError as error:
        return str(error)
    return None


@functools.cache
def pool(threads: int) -> ThreadPoolExecutor:
    """Threads for calls into the library, which run without Python's lock."""
    return ThreadPoolExecutor(threads, thread_name_prefix="ghor-attention")


def in_parts(call: Any, batch: int) -> None:
    """call(b0, b1) for the images of a batch, one part for every thread that torch uses."""
    threads = max(1, min(torch.get_num_threads(), batch))
    ends = [batch * i // threads for i in range(threads + 1)]
    parts = list(itertools.pairwise(ends))
    waiting = [pool(threads).submit(call, *part) for part in parts[1:]]
    call(*parts[0])
    for part in waiting:
        part.result()


class Attend(torch.autograd.Function):
    """(3 D, batch * tokens) -> (D, batch * tokens). Saves its input only."""

    @staticmethod
    def forward(ctx: Any, QKV: Tensor, heads: int, tokens: int) -> Tensor:
        QKV = QKV.contiguous()
        ctx.save_for_backward(QKV)
        ctx.heads, ctx.tokens = heads, tokens
        D, columns = QKV.shape[0] // 3, QKV.shape[1]
        lib, O = library(D // heads, tokens), QKV.new_empty(D, columns)
        pointers = QKV.data_ptr(), O.data_ptr()
        in_parts(lambda b0, b1: lib.forward(*pointers, heads, columns, b0, b1), columns // tokens)
        return O

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor, None, None]:
        (QKV,), dO = ctx.saved_tensors, dO.contiguous()
        heads, tokens, columns = ctx.heads, ctx.tokens, QKV.shape[1]
        lib, dQKV = library(QKV.shape[0] // 3 // heads, tokens), torch.empty_like(QKV)
        pointers = QKV.data_ptr(), dO.data_ptr(), dQKV.data_ptr()
        in_parts(lambda b0, b1: lib.backward(*pointers, heads, columns, b0, b1), columns // tokens)
        return dQKV, None, None


def attend(QKV: Tensor, heads: int, tokens: int) -> Tensor:
    """concat_h softmax(Q_h^T K_h) V_h for Q, K, V of all heads features first, (3 D, batch * tokens)."""
    out: Tensor = Attend.apply(QKV, heads, tokens)  # type: ignore[no-untyped-call]
    return out
