"""A block of the transformer as one pass over memory, in C that the machine's compiler compiles on first use.

With 49 features, 7 per head, and 16 tokens, the products are too small for a matrix library, and the plain
formula spends most of its time moving activations. `block` gives the same values up to rounding, and on one
machine the same bits for any number of threads. If it cannot run, `unavailable` says why and the plain
formula is used.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ghor_lab.networks.attention import formula

from .build import build
from .fallback import derivatives, not_plain
from .parts import in_parts

SOURCE = Path(__file__).with_name("block_core.c")
LARGEST, WIDEST = 64, 128  # tokens and features of a head, features: beyond these a matrix library is fast


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


@functools.cache
def missing(H: int, C: int, T: int) -> str | None:
    """Why there is no library (None if there is one); remembers a failed compiler for all layers."""
    try:
        library(H, C, T)
    except RuntimeError as error:
        return str(error)
    return None


def unavailable(heads: int, x: Tensor, *weights: Tensor) -> str | None:
    """Why `block` does not take these (None if it does). x is (batch, D, tokens)."""
    if why := not_plain(x, *weights):
        return why
    D, T = x.shape[1:]
    C = D // heads
    if T & (T - 1) or not 4 <= T <= LARGEST or C > LARGEST or D > WIDEST:
        return (
            f"it is for 4, 8, 16, 32 or 64 tokens and at most {WIDEST} features, {LARGEST} of them a head, "
            f"not {T} tokens and {D} features, {C} of them a head"
        )
    return missing(heads, C, T)


class Block(torch.autograd.Function):
    """(batch, D, tokens) -> (batch, D, tokens). Saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, heads: int, *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.heads = heads
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
        heads, inputs = ctx.heads, ctx.saved_tensors
        if torch.is_grad_enabled() or not_plain(dy, *(t for t in inputs if t is not None)):
            return None, *derivatives(functools.partial(formula, heads), inputs, dy)
        given = [t if t is None else t.contiguous() for t in (*inputs, dy)]
        B, D, T = dy.shape
        lib, dx = library(heads, D // heads, T), dy.new_empty(B, D, T) if ctx.needs_input_grad[1] else None
        chunk = 4 * min(16, max(1, -(-B // 128)))  # images; it must not depend on the number of threads
        chunks = max(1, -(-B // chunk))
        sums = dy.new_empty(chunks, 4 * D, lib.gradient_columns())

        def part(c0: int, c1: int) -> None:
            work = dy.new_empty(lib.work_size(), dtype=torch.uint8)
            lib.backward(*map(address, (*given, dx, sums, work)), B, chunk, c0, c1)

        in_parts(part, chunks)
        lib.add_up(address(sums), chunks)
        dM, dA = sums[0].split([3 * D, D])
        return None, dx, dM[:, :D], *((dA[:, :D], dA[:, D]) if inputs[2] is not None else (None, None))


def address(t: Tensor | None) -> int | None:
    """The memory address of a tensor's numbers."""
    return t if t is None else t.data_ptr()


def block(heads: int, x: Tensor, M: Tensor, A: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    """z + tanh(A z + b), or z without A and b, with z = concat_h softmax(Q_h^T K_h) V_h and [Q; K; V] = M x.

    x is (batch, D, tokens), M (3 D, D), A (D, D), b (D). Gradients that will be differentiated again, and
    those of a traced or batched backward pass, are computed by torch's operations.
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
    y: Tensor = Block.apply(heads, x, M, A, b)  # type: ignore[no-untyped-call]
    return y


class Attention:
    """`networks.attention.formula` computed by `block` if possible; otherwise a warning says why not.

    `unused` keeps that reason until a call succeeds.
    """

    unused: str | None = None

    def __call__(
        self, heads: int, x: Tensor, M: Tensor, A: Tensor | None = None, b: Tensor | None = None
    ) -> Tensor:
        if torch.compiler.is_compiling():
            return formula(heads, x, M, A, b)
        said, self.unused = self.unused, unavailable(heads, *(t for t in (x, M, A, b) if t is not None))
        if self.unused is None:
            return block(heads, x, M, A, b)
        if self.unused != said:
            warnings.warn(f"compiled attention is not used: {self.unused}", stacklevel=2)
        return formula(heads, x, M, A, b)
