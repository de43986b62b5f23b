"""What a step dispatches and what outlives it, counted exactly: `measure.py kernels`."""

from __future__ import annotations

import gc
import math
import types
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, mode
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# These allocate or rename, and start nothing on a device.
FREE = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view")
COPIES = ("aten::copy_", "aten::_foreach_copy_", "aten::zero_", "aten::fill_")  # do not read what they write


class Count(TorchDispatchMode):
    """Counts what is dispatched: `kernels` by name, `flops` of products, `traffic` in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[str] = Counter()
        self.flops = self.traffic = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        view = any(r.alias_info and not r.alias_info.is_write for r in function._schema.returns)
        ours = name.startswith(("_record_function", "profiler"))
        if not view and not ours and name not in FREE and name != "_local_scalar_dense":
            self.kernels[name] += 1
            self.flops += flops(name, args)
            self.traffic += traffic(function._schema, args, kwargs or {}, out)
        return out


def traffic(schema: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Bytes that an operation reads and writes: arguments, twice if changed in place, and results."""
    total, known = 0, set()
    for i, argument in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        once = argument.is_out or schema.name in COPIES
        for x in tree_leaves(value):
            if torch.is_tensor(x):
                known.add(id(x))
                total += size(x) * (2 if written and not once else 1)
    return total + sum(size(x) for x in tree_leaves(out) if torch.is_tensor(x) and id(x) not in known)


def size(x: Tensor) -> int:
    """Bytes of the numbers in a tensor, those of expanded dimensions counted once."""
    return x.element_size() * math.prod(n for n, s in zip(x.shape, x.stride(), strict=True) if s or n == 0)


def flops(name: str, args: Sequence[Any]) -> int:
    """Multiplications and additions of a matrix product or factorisation, for all matrices of a batch."""
    name = name.rstrip("_")
    tensors = [x for x in args if torch.is_tensor(x)]
    if name in ("mm", "bmm", "mv", "addmm", "baddbmm", "addmv", "addbmm"):
        X, Y = tensors[-2:]
        return 2 * X.numel() * (Y.shape[-1] if Y.dim() > 1 else 1)
    if name in ("linalg_inv_ex", "linalg_lu_factor_ex", "linalg_solve_ex", "_linalg_solve_ex", "linalg_qr"):
        N, n = tensors[0].shape[-2:]
        batch = tensors[0].numel() // (N * n)
        if name == "linalg_inv_ex":
            return 2 * n**3 * batch
        if name == "linalg_qr":  # R and Q of the reduced form
            return 4 * N * n * n * batch
        right = tensors[1].shape[-1] if len(tensors) > 1 and tensors[1].dim() > 1 else 0
        return (2 * n**3 // 3 + 2 * n * n * right) * batch
    if name in ("linalg_lu_solve", "linalg_solve_triangular"):
        return 2 * tensors[0].shape[-1] * tensors[-1].numel()
    return 0


# -- what the host waits for ---------------------------------------------------------------------------------


class Reads(TorchFunctionMode):
    """Counts values that the host reads from the lazy device, and gives what a healthy step would read."""

    VALUES: dict[Any, Any] = {  # noqa: RUF012
        Tensor.__bool__: False,
        Tensor.__int__: 0,
        Tensor.__index__: 0,
        Tensor.__float__: 0.0,
        Tensor.item: 0.0,
        Tensor.is_nonzero: False,
        torch.is_nonzero: False,
        Tensor.equal: True,
        torch.equal: True,
    }

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = 0

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tolist = f in (Tensor.tolist, Tensor.cpu)
        x = args[0] if args else None
        if (f not in self.VALUES and not tolist) or not torch.is_tensor(x):
            return f(*args, **(kwargs or {}))
        if x.device.type == "cpu":  # the counts of steps
            return f(*args, **(kwargs or {})) if type(x) is Tensor else type(self.VALUES.get(f, 0.0))(2)
        self.reads += 1
        if tolist:
            return torch.empty_like(x, device="cpu") if f is Tensor.cpu else [0.0] * x.numel()
        return False if f is Tensor.item and x.dtype == torch.bool else self.VALUES[f]


def reads(make: Callable[[list[Tensor]], torch.optim.Optimizer], shapes: Sequence[Sequence[int]]) -> float:
    """Values that the host waits for in a step, the mean of twenty, on a device whose tensors have no values.

    A rule that mixes devices fails here as on an accelerator.
    What is read every hundredth step is not among them.
    """
    with (
        warnings.catch_warnings(action="ignore"),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        Reads() as counted,
    ):
        params = [torch.nn.Parameter(torch.empty(*shape, device="lazy")) for shape in shapes]
        opt = make(params)
        for step in range(22):
            counted.reads *= step > 1
            for p in params:
                p.grad = torch.empty_like(p)
            opt.step()
    return counted.reads / 20


# -- what outlives a step ------------------------------------------------------------------------------------

KINDS = (type, types.ModuleType, types.CodeType, str, bytes, int, float)  # these hold no tensors


def held(holder: Any, params: Sequence[Tensor]) -> dict[int, Tensor]:
    """All tensors that an optimizer holds, by the address of their memory; gradients are not among them."""
    found: dict[int, Tensor] = {}
    grads = {id(p.grad) for p in params}
    seen: set[int] = set()
    left: list[Any] = [holder]
    while left:
        x = left.pop()
        if id(x) in seen or id(x) in grads or isinstance(x, KINDS):
            continue
        seen.add(id(x))
        if torch.is_tensor(x):
            if x.device.type != "meta" and x.numel():
                found[x.untyped_storage().data_ptr()] = x
            continue
        if isinstance(x, types.FunctionType):
            left += [c.cell_contents for c in x.__closure__ or ()]
        else:
            left += gc.get_referents(x)
    return found


def memory(holder: Any, params: Sequence[Tensor]) -> float:
    """Bytes of all tensors that are held between steps, per byte of weights."""
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in params}
    kept = {at: X.untyped_storage().nbytes() for at, X in held(holder, params).items() if at not in weights}
    return sum(kept.values()) / sum(weights.values())


def moved(step: Callable[[], object], holder: Any, params: Sequence[Tensor]) -> int:
    """How many tensors that outlive a step were elsewhere before it: a CUDA graph needs them to stay."""
    before = held(holder, params)
    step()
    return len(held(holder, params).keys() - before.keys())


def count(step: Callable[[], object], repeats: int = 20) -> tuple[Count, float]:
    """What the most frequent kind of step dispatches, and the mean number of kernels."""
    for _ in range(3):
        step()
    steps = []
    for _ in range(repeats):
        with Count() as counted:
            step()
        steps.append(counted)
    totals = [c.kernels.total() for c in steps]
    return steps[totals.index(mode(totals))], fmean(totals)
