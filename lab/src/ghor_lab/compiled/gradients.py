"""A run of gradient layers as one pass over memory, in C that the machine's compiler compiles on first use.

With halves of one or two dimensions and 20 rows per dimension, the plain formula is about a hundred small
operations whose activations, width x points, go through memory several times. `kicks` gives the same values
up to rounding, and on one machine the same bits for any number of threads. If it cannot run, `unavailable`
says why.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ghor_lab.networks.phase_space import Gradient, GradientQ, PhaseSpaceMap, kick

from .build import build
from .fallback import derivatives, not_plain
from .parts import in_parts

SOURCE = Path(__file__).with_name("gradient_core.c")
LARGEST = 16  # dimensions of a half: more do not fit into registers, and a matrix library is fast
N = 16  # points of a vector, as in the C file


@functools.cache
def library(d: int) -> ctypes.CDLL:
    """The compiled functions for halves of d dimensions; RuntimeError says why there are none."""
    lib = build(SOURCE, D=d)
    pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
    lib.forward.argtypes = [pointer] * 6 + [size] * 6
    lib.backward.argtypes = [pointer] * 8 + [size] * 6
    return lib


@functools.cache
def missing(d: int) -> str | None:
    """Why there is no library (None if there is one); remembers a failed compiler for all layers."""
    try:
        library(d)
    except RuntimeError as error:
        return str(error)
    return None


def unavailable(x: Tensor, *others: Tensor) -> str | None:
    """Why `kicks` does not take these (None if it does). x is a half of z, (copies, d, points)."""
    if why := not_plain(x, *others):
        return why
    if x.shape[1] > LARGEST:
        return f"it is for halves of at most {LARGEST} dimensions, not {x.shape[1]}"
    return missing(x.shape[1])


def addresses(tensors: Sequence[Tensor]) -> Any:
    """An array of pointers that keeps its tensors alive, even if we are interrupted."""
    array: Any = (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
    array.tensors = tensors
    return array


def formula(x: Tensor, y: Tensor, *parameters: Tensor) -> Tensor:
    """The same as `kicks` by torch's operations: x and y in one tensor (copies, 2 d, points)."""
    for i in range(len(parameters) // 3):
        K, a, b = parameters[3 * i : 3 * i + 3]
        x, y = (x, kick(y, x, K, a, b)) if i % 2 else (kick(x, y, K, a, b), y)
    return torch.cat([x, y], 1)


class Kicks(torch.autograd.Function):
    """x, y, K, a, b of the first layer, ... -> x, y. Saves its inputs and what every layer reads, not its
    tanh.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        inputs = (x, y, *parameters)
        x, y, *w = (t.contiguous() for t in inputs)
        (copies, d, points), layers, m = x.shape, len(w) // 3, w[1].shape[-1]
        lib, last, previous = library(d), torch.empty_like(x), torch.empty_like(x)
        h = x.new_empty(layers, copies, d, -(-points // N) * N)
        where = addresses(w)

        def part(c0: int, c1: int) -> None:  # keeps the tensors until it is done, also if we are interrupted
            tensors = (x, y, h, last, previous)
            lib.forward(where, *(t.data_ptr() for t in tensors), layers, copies, m, points, c0, c1)

        in_parts(part, copies)
        ctx.save_for_backward(h, *inputs)
        return (last, previous) if layers % 2 else (previous, last)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, *inputs = ctx.saved_tensors
        if torch.is_grad_enabled() or not_plain(dx, dy, h, *inputs):
            return tuple(derivatives(formula, inputs, torch.cat([dx, dy], 1)))
        w = [p.contiguous() for p in inputs[2:]]
        layers, copies, d, padded = h.shape
        points, m = dx.shape[-1], w[1].shape[-1]
        dlast, dprevious = (t.contiguous() for t in ((dx, dy) if layers % 2 else (dy, dx)))
        lib, dw, work = library(d), [torch.empty_like(p) for p in w], h.new_empty(copies, 2, d, padded)
        dx, dy = torch.empty_like(dlast), torch.empty_like(dlast)
        where, to = addresses(w), addresses(dw)

        def part(c0: int, c1: int) -> None:
            into = (t.data_ptr() for t in (dx, dy, work))
            before = (h.data_ptr(), dlast.data_ptr(), dprevious.data_ptr())
            lib.backward(where, *before, to, *into, layers, copies, m, points, c0, c1)

        in_parts(part, copies)
        return dx, dy, *dw


def kicks(x: Tensor, y: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """x <- x + K^T (a * tanh(K y + b)), then y from x with the next K, a, b, and so on; returns the last x
    and y.

    x and y are (copies, d, points); `parameters` are K, a, b of every layer, (*copies, m, d) and twice
    (*copies, m). Gradients that will be differentiated again, and those of a traced or batched backward pass,
    are computed by torch's operations.
    """
    if x.dim() != 3 or x.shape != y.shape or not parameters or len(parameters) % 3:
        raise ValueError(
            f"expected two of (copies, d, points) and K, a, b of every layer, got {tuple(x.shape)}, "
            f"{tuple(y.shape)} and {len(parameters)} parameters"
        )
    (copies, d, _), m = x.shape, parameters[1].shape[-1]
    for i, p in enumerate(parameters):
        if p.numel() != copies * m * (1 if i % 3 else d):
            expected = f"{copies} copies, width {m}" + ("" if i % 3 else f" and {d} dimensions")
            raise ValueError(f"parameter {i} is {tuple(p.shape)}, not of {expected}")
    if why := unavailable(x, y, *parameters):
        raise ValueError(why)
    out: tuple[Tensor, Tensor] = Kicks.apply(x, y, *parameters)  # type: ignore[no-untyped-call]
    return out


class Gradients:
    """`ghor_lab.networks.phase_space.chained` with runs of gradient layers by `kicks` if possible.

    Otherwise a warning says why not; `unused` keeps that reason until a call succeeds.
    """

    unused: str | None = None

    def __call__(self, layers: Iterable[PhaseSpaceMap], q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        said, self.unused = self.unused, None
        for run in runs(layers):
            if isinstance(run[0], Gradient) and not torch.compiler.is_compiling():
                parameters = [w for layer in run for w in (layer.weight, layer.scale, layer.bias)]
                why = unavailable(q, p, *parameters)
                if why is None:
                    if isinstance(run[0], GradientQ):
                        q, p = kicks(q, p, parameters)
                    else:
                        p, q = kicks(p, q, parameters)
                    continue
                self.unused = why
            for layer in run:
                q, p = layer.features_first(q, p)
        if self.unused not in (None, said):
            warnings.warn(f"compiled gradient layers are not used: {self.unused}", stacklevel=2)
        return q, p


def runs(layers: Iterable[PhaseSpaceMap]) -> list[list[Any]]:
    """Group the layers: alternating gradient layers of one size, Q and P, form one run; others are alone."""
    found: list[list[Any]] = []
    for layer in layers:
        last = found[-1][-1] if found else None
        one_run = (
            isinstance(layer, Gradient)
            and isinstance(last, Gradient)
            and type(layer) is not type(last)
            and (layer.in_dim, layer.width) == (last.in_dim, last.width)
        )
        if one_run:
            found[-1].append(layer)
        else:
            found.append([layer])
    return found
