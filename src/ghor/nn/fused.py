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
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import cache_folder, store

SOURCE = Path(__file__).with_name("attention_core.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-Wno-psabi")
LARGEST = 64  # tokens, and features of a head: beyond, a matrix library is faster


@functools.cache
def library(C: int, T: int) -> ctypes.CDLL:
    """The compiled functions for heads of C features and T tokens; RuntimeError says why there are none."""
    lib = build(SOURCE, C=C, T=T)
    pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
    lib.forward.argtypes = [pointer] * 2 + [size] * 4
    lib.backward.argtypes = [pointer] * 3 + [size] * 4
    return lib


def build(source: Path, **defines: int) -> ctypes.CDLL:
    """The library made of a C file and values for its names; RuntimeError says why there is none.

    It is kept in the cache folder. The name of a file has the digest of its content: loading a damaged library ends
    the process.
    """
    label = source.stem.removesuffix("_core")
    try:
        compiler = _compiler()
        version = _run([*compiler, "--version"])
        # -march=native: another processor needs another file
        key = _digest(repr((source.read_bytes(), FLAGS, version, processor(), defines)).encode())
        folder = cache_folder()
        for path in sorted(folder.glob(f"{label}-{key}-*.so")):
            if path.stem.endswith(_digest(path.read_bytes())):
                return ctypes.CDLL(str(path))
            path.unlink(missing_ok=True)
            warnings.warn(f"{path} was damaged: removed and made again", stacklevel=2)
        with tempfile.TemporaryDirectory(prefix="ghor-") as scratch:
            made = Path(scratch) / "made.so"
            _run([*compiler, *FLAGS, *(f"-D{k}={v}" for k, v in defines.items()), str(source), "-o", str(made)])
            content = made.read_bytes()
        path = folder / f"{label}-{key}-{_digest(content)}.so"
        store(content, path)
        return ctypes.CDLL(str(path))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"it could not be compiled or loaded: {error}") from None


def _compiler() -> list[str]:
    """CC, which may have arguments, or the first that is there."""
    if given := shlex.split(os.environ.get("CC", "")):
        return given
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise RuntimeError("there is no C compiler (cc, gcc, clang, or the one named by CC)")


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed: {done.stderr.strip()[:500]}")
    return done.stdout


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in lines[:40] if line.startswith(("model name", "flags", "Features")))


@functools.cache
def missing(C: int, T: int) -> str | None:
    """Why there is no library (None: there is one). A compiler that failed is not asked again by every layer."""
    try:
        library(C, T)
    except RuntimeError as error:
        return str(error)
    return None


def unavailable(QKV: Tensor, heads: int, tokens: int) -> str | None:
    """Why `attend` does not take these (None: it does). QKV is (3 D, batch * tokens)."""
    C = QKV.shape[0] // 3 // heads
    if QKV.device.type != "cpu" or QKV.dtype != torch.float32:
        return f"it is for float32 on the CPU, not {str(QKV.dtype).removeprefix('torch.')} on {QKV.device.type}"
    if tokens & (tokens - 1) or not 4 <= tokens <= LARGEST or C > LARGEST:
        return f"it is for 4, 8, 16, 32 or 64 tokens and heads of at most {LARGEST} features, not {tokens} and {C}"
    return missing(C, tokens)


@functools.cache
def pool(threads: int, flush: bool) -> ThreadPoolExecutor:
    """Threads for calls into the library, which run without Python's lock."""
    name, setting = "ghor-compiled", torch.set_flush_denormal
    return ThreadPoolExecutor(threads, name, initializer=setting, initargs=(flush,))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.cache_clear)  # threads stay behind in the parent


def flushes() -> bool:
    """Whether this thread takes subnormal numbers for 0. It is a setting of every thread; ours have to share it."""
    return sys.float_info.min * torch.finfo(torch.float32).eps == 0


def in_parts(call: Callable[[int, int], None], batch: int) -> None:
    """call(b0, b1) for the images of a batch, one part for every thread that torch uses."""
    threads = max(1, min(torch.get_num_threads(), batch))
    ends = [batch * i // threads for i in range(threads + 1)]
    parts = list(itertools.pairwise(ends))
    waiting = [pool(threads - 1, flushes()).submit(call, *part) for part in parts[1:]]
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

        def part(b0: int, b1: int) -> None:  # keeps both tensors until it is done, also if we are interrupted
            lib.forward(QKV.data_ptr(), O.data_ptr(), heads, columns, b0, b1)

        in_parts(part, columns // tokens)
        return O

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor, None, None]:
        (QKV,), dO = ctx.saved_tensors, dO.contiguous()
        heads, tokens, columns = ctx.heads, ctx.tokens, QKV.shape[1]
        lib, dQKV = library(QKV.shape[0] // 3 // heads, tokens), torch.empty_like(QKV)

        def part(b0: int, b1: int) -> None:
            lib.backward(QKV.data_ptr(), dO.data_ptr(), dQKV.data_ptr(), heads, columns, b0, b1)

        in_parts(part, columns // tokens)
        return dQKV, None, None


def attend(QKV: Tensor, heads: int, tokens: int) -> Tensor:
    """concat_h softmax(Q_h^T K_h) V_h for Q, K, V of all heads features first, (3 D, batch * tokens)."""
    if QKV.dim() != 2 or min(heads, tokens) < 1 or QKV.shape[0] % (3 * heads) or QKV.shape[1] % tokens:
        raise ValueError(f"expected (3 * {heads} * features, batch * {tokens}), got {tuple(QKV.shape)}")
    if why := unavailable(QKV, heads, tokens):
        raise ValueError(why)
    out: Tensor = Attend.apply(QKV, heads, tokens)  # type: ignore[no-untyped-call]
    return out
