"""A block of the transformer as one pass over memory: C, compiled on first use by the machine's own compiler.

At 49 features, 7 of them a head, and 16 tokens the products are too small for a matrix library, and most of the time of
the plain formula goes into moving activations. `block` gives the same values up to rounding, on the same machine the
same bits for any number of threads. Where it cannot run, `unavailable` says why and the plain formula is used.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ghor_lab.files import cache_folder, store

SOURCE = Path(__file__).with_name("block_core.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-Wno-psabi")
Formula = Callable[..., Tensor]
LARGEST, WIDEST = 64, 128  # tokens and features of a head, features: beyond, a matrix library is good


@functools.cache
def library(H: int, C: int, T: int) -> ctypes.CDLL:
    """The compiled functions for H heads of C features and T tokens; RuntimeError says why there are none."""
    lib = build(SOURCE, H=H, C=C, T=T)
    pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
    lib.forward.argtypes = [pointer] * 6 + [size] * 2
    lib.backward.argtypes = [pointer] * 8 + [size] * 4
    lib.add_up.argtypes = [pointer, size]
    lib.work_size.restype = lib.gradient_columns.restype = size
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
def missing(H: int, C: int, T: int) -> str | None:
    """Why there is no library (None: there is one). A compiler that failed is not asked again by every layer."""
    try:
        library(H, C, T)
    except RuntimeError as error:
        return str(error)
    return None


def not_plain(*tensors: Tensor) -> str | None:
    """Why no compiled function can take these now, forward or backward (None: it can)."""
    for t in tensors:
        if not t.is_cpu or t.dtype is not torch.float32:
            return f"it is for float32 on the CPU, not {str(t.dtype).removeprefix('torch.')} on {t.device.type}"
        if type(t) not in (Tensor, nn.Parameter):
            return f"it is for tensors of torch itself, not {type(t).__name__}"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on, and it computes in float32"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "torch.func and forward mode differentiate operations of torch only"
    if is_in_torch_dispatch_mode() or torch._C._get_tracing_state() is not None:
        return "operations are being watched or traced, and it is none of torch"
    if not all(map(torch._C._has_storage, tensors)):
        return "it is for numbers that lie in memory, not for sparse tensors or a batch of gradients"
    return None


def unavailable(heads: int, x: Tensor, *weights: Tensor) -> str | None:
    """Why `block` does not take these (None: it does). x is (batch, D, tokens)."""
    if why := not_plain(x, *weights):
        return why
    D, T = x.shape[1:]
    C = D // heads
    if T & (T - 1) or not 4 <= T <= LARGEST or C > LARGEST or D > WIDEST:
        return (
            f"it is for 4, 8, 16, 32 or 64 tokens and at most {WIDEST} features, {LARGEST} of them a head, not {T} "
            f"tokens and {D} features, {C} of them a head"
        )
    return missing(heads, C, T)


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
    """call(b0, b1) for the images of a batch, one part for every thread that torch uses.

    What `call` refers to is kept until the last thread has ended, also if we are interrupted before. While the
    interpreter shuts down no thread takes a part any more, and we call for all that are left.
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


def derivatives(f: Callable[..., Tensor], inputs: Sequence[Tensor | None], dy: Tensor) -> list[Tensor | None]:
    """Of sum(f(*inputs) * dy), by automatic differentiation, to be differentiated again if gradients are enabled."""
    again = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):  # as in the forward pass, which was compiled
        inputs = [t if t is None else t.view_as(t) for t in inputs]  # a weight may be used before, too: not through x
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(f(*inputs), wanted, dy, create_graph=again))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


class Block(torch.autograd.Function):
    """(batch, D, tokens) -> (batch, D, tokens). Saves its inputs only."""

    @staticmethod
    def forward(ctx: Any, formula: Formula, heads: int, *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.formula, ctx.heads = formula, heads
        x, *weights = (t if t is None else t.contiguous() for t in inputs)
        assert x is not None
        B, D, T = x.shape
        lib, y = library(heads, D // heads, T), torch.empty_like(x)

        def part(b0: int, b1: int) -> None:
            work = y.new_empty(lib.work_size(), dtype=torch.uint8)
            lib.forward(*map(address, (x, *weights, y, work)), b0, b1)

        in_parts(part, B)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        formula, heads, inputs = ctx.formula, ctx.heads, ctx.saved_tensors
        if torch.is_grad_enabled() or not_plain(dy, *(t for t in inputs if t is not None)):
            return None, None, *derivatives(functools.partial(formula, heads), inputs, dy)
        given = [t if t is None else t.contiguous() for t in (*inputs, dy)]
        B, D, T = dy.shape
        lib, dx = library(heads, D // heads, T), dy.new_empty(B, D, T) if ctx.needs_input_grad[2] else None
        chunk = 4 * min(16, max(1, -(-B // 128)))  # images; it must not depend on the number of threads
        chunks = max(1, -(-B // chunk))
        sums = dy.new_empty(chunks, 4 * D, lib.gradient_columns())

        def part(c0: int, c1: int) -> None:
            work = dy.new_empty(lib.work_size(), dtype=torch.uint8)
            lib.backward(*map(address, (*given, dx, sums, work)), B, chunk, c0, c1)

        in_parts(part, chunks)
        lib.add_up(address(sums), chunks)
        dM, dA = sums[0].split([3 * D, D])
        return None, None, dx, dM[:, :D], *((dA[:, :D], dA[:, D]) if inputs[2] is not None else (None, None))


def address(t: Tensor | None) -> int | None:
    """Where the numbers of a tensor are."""
    return t if t is None else t.data_ptr()


def block(
    formula: Formula, heads: int, x: Tensor, M: Tensor, A: Tensor | None = None, b: Tensor | None = None
) -> Tensor:
    """z + tanh(A z + b), or z without A and b, with z = concat_h softmax(Q_h^T K_h) V_h and [Q; K; V] = M x.

    x is (batch, D, tokens), M (3 D, D), A (D, D), b (D). `formula` is the same by operations of torch: its are the
    gradients that are to be differentiated again, and those of a backward pass that is watched, traced or batched.
    """
    if x.dim() != 3 or heads < 1 or x.shape[1] % heads:
        raise ValueError(f"expected (batch, {heads} * features, tokens), got {tuple(x.shape)}")
    if (A is None) != (b is None):
        raise ValueError("A and b come together, one of them is None")
    D, weights = x.shape[1], [t for t in (M, A, b) if t is not None]
    for name, t, shape in zip("MAb", weights, ((3 * D, D), (D, D), (D,)), strict=False):
        if t.shape != shape:
            raise ValueError(f"expected {name} {shape} for {D} features, got {tuple(t.shape)}")
    if why := unavailable(heads, x, *weights):
        raise ValueError(why)
    y: Tensor = Block.apply(formula, heads, x, M, A, b)  # type: ignore[no-untyped-call]
    return y
