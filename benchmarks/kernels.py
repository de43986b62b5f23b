"""What one optimizer step dispatches: kernels, host reads, and matrix products. Counts are exact.

    python benchmarks/kernels.py                       # ghor by space, and its peers
    python benchmarks/kernels.py --only Sphere --ops   # some cases, with their operations
    python benchmarks/kernels.py --json kernels.json

A kernel is an operation that PyTorch dispatches and that is not a view; calls of LAPACK count as one. What is
counted is the most frequent of 30 successive steps, and the mean over all of them: in some steps rounding is
repaired as well. Reads are values that the host waits for, counted as on an accelerator, where ghor avoids
them. Products are the multiplications of matrices in units of N n^2 per matrix, factorisations included.
Traffic is what kernels read and write, whether from a cache or from memory, in units of the weights' size:
8 for torch's fused Adam, which reads weight, gradient and two moments, and may write all of them. A distance
is counted like a step: forward, and backward to both points.
"Moved" are tensors that outlive a step and were at another address before it, also as on an accelerator:
a captured CUDA graph needs them to stay.
"""

from __future__ import annotations

import argparse
import gc
import math
import re
import types
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import fmean, mode
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ghor
from ghor._torch.values import as_on_an_accelerator

READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_unique2", "masked_select")
# These allocate or rename, and start nothing on a device.
FREE = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view")
COPIES = ("aten::copy_", "aten::_foreach_copy_", "aten::zero_", "aten::fill_")  # do not read what they write
STEPS = 30  # counted, after 3 that set things up


class Count(TorchDispatchMode):
    """Counts what is dispatched: `kernels` and `reads` by name, `flops` of products, `traffic` in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.flops = self.traffic = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        view = any(r.alias_info and not r.alias_info.is_write for r in function._schema.returns)
        if name in READS:
            self.reads[name] += 1
        elif not view and name not in FREE and not name.startswith(("_record_function", "profiler")):
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


# -- what outlives a step ------------------------------------------------------------------------------------


KINDS = (type, types.ModuleType, types.CodeType, str, bytes, int, float)  # these hold no tensors


def held(opt: Any, params: Sequence[Tensor]) -> dict[int, Tensor]:
    """All tensors that the optimizer holds, by the address of their memory; gradients are not among them."""
    found: dict[int, Tensor] = {}
    grads = {id(p.grad) for p in params}
    seen: set[int] = set()
    left: list[Any] = [opt]
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


def moved(opt: Any, params: Sequence[Tensor]) -> int:
    """How many tensors that the optimizer holds after a step were not where it held one before."""
    before = held(opt, params)
    opt.step()
    return len(held(opt, params).keys() - before.keys())


# -- cases ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An optimizer, or a `Distance`, over `count` tensors of one shape; `make` gets the parameters."""

    name: str
    shape: tuple[int, ...]
    make: Callable[..., Any]
    space: ghor.Space = field(default_factory=ghor.Stiefel)
    count: int = 1
    wrap: Callable[[Tensor], Tensor] = nn.Parameter
    peer: bool = False

    def build(self, **options: Any) -> tuple[Any, list[Tensor]]:
        generator = torch.Generator().manual_seed(0)
        params = []
        for _ in range(self.count):
            params.append(self.wrap(self.space.random(*self.shape, generator=generator)))
            params[-1].grad = torch.randn(self.shape, generator=generator)
        return self.make(params, **options), params

    @property
    def label(self) -> str:
        shape = " x ".join(map(str, self.shape))
        return f"{self.name}, {self.count} of {shape}" if self.count > 1 else f"{self.name}, {shape}"


def ours(optimizer: str, space: ghor.Space, *shape: int, count: int = 1, **options: Any) -> Case:
    def make(params: list[Tensor], **more: Any) -> torch.optim.Optimizer:
        cls: type[torch.optim.Optimizer] = getattr(ghor.optim, optimizer)
        return cls(params, space=space, lr=1e-3, **options, **more)

    words = [f"{k}={v!r}" for k, v in options.items()]
    return Case(", ".join([f"ghor {optimizer}", repr(space), *words]), shape, make, space, count)


class Distance:
    """A distance between two tensors of points with its derivatives, as a "step" to be counted."""

    def __init__(self, dist: Callable[[Tensor, Tensor], Tensor], points: list[Tensor]) -> None:
        self.dist, self.points = dist, points

    def step(self) -> None:
        torch.autograd.grad(self.dist(*self.points).sum(), self.points)


def theirs(
    name: str, make: Callable[[list[Tensor]], Any], *shape: int, count: int = 1, **options: Any
) -> Case:
    return Case(name, shape, make, count=count, peer=True, **options)


def distance(name: str, dist: Callable[[Tensor, Tensor], Tensor], *shape: int, **options: Any) -> Case:
    return theirs(f"{name}.dist", lambda points: Distance(dist, points), *shape, count=2, **options)


def cases() -> list[Case]:
    """ghor by space, section, optimizer and number of tensors; and a distance."""
    S, Sphere, Muon = ghor.Stiefel(), ghor.Sphere(), "Muon"
    return [
        ours("Adam", S, 49, 7, section="transported"),
        ours("Adam", S, 49, 7, count=336),
        ours("Adam", S, 336, 49, 7),
        ours("Adam", S, 3072, 768, section="implicit"),
        ours("Adam", S, 768, 64, section="implicit"),
        ours("Adam", S, 12, 768, 64, count=9, section="implicit"),
        ours("Adam", S, 768, 64, section="implicit", retraction="geodesic"),
        ours("Adam", ghor.Grassmann(), 1000, 10, section="implicit"),
        ours("Adam", ghor.SpecialOrthogonal(), 64, 64),
        ours("Adam", Sphere, 1000, 64),
        ours("Adam", Sphere, 1000, 64, section="transported"),
        ours("Adam", ghor.Hyperbolic(), 1000, 11),
        ours("Adam", ghor.SPD(), 100, 10, 10),
        ours("Adam", ghor.SpecialEuclidean(), 100, 3, 4),
        ours("Adam", ghor.PositionsOrientations(), 100, 2, 3),
        ours("Adam", ghor.SymplecticStiefel(), 20, 6),
        ours("SGD", S, 49, 7, count=336, momentum=0.9),
        ours("SGD", Sphere, 1000, 64, momentum=0.9),
        ours(Muon, S, 49, 7, section="transported"),
        ours(Muon, S, 49, 7, count=336),
        ours(Muon, S, 768, 64, section="implicit"),
        ours(Muon, ghor.Grassmann(), 1000, 10, section="implicit"),
        ours(Muon, ghor.SpecialOrthogonal(), 64, 64),
        ours(Muon, Sphere, 1000, 64),
        distance("ghor Hyperbolic", ghor.Hyperbolic().dist, 1000, 11, space=ghor.Hyperbolic()),
    ]


def peers() -> list[Case]:
    """torch without a constraint; geoopt and POGO, if they are installed."""
    adam, muon = torch.optim.Adam, torch.optim.Muon
    found = [
        theirs("torch Adam, foreach", lambda p: adam(p, lr=1e-3, foreach=True), 49, 7, count=336),
        theirs("torch Adam, fused", lambda p: adam(p, lr=1e-3, fused=True), 49, 7, count=336),
        theirs("torch Muon", lambda p: muon(p, lr=1e-3), 49, 7),
        theirs("torch Muon", lambda p: muon(p, lr=1e-3), 49, 7, count=336),
    ]
    try:
        geoopt: Any = import_module("geoopt")

        def radam(p: list[Tensor]) -> Any:
            return geoopt.optim.RiemannianAdam(p, lr=1e-3)

        def on(manifold: Any) -> Callable[[Tensor], Tensor]:
            return lambda Y: geoopt.ManifoldParameter(Y, manifold=manifold)

        for words, canonical in (("canonical", True), ("Euclidean", False)):
            wrap = on(geoopt.Stiefel(canonical=canonical))
            name = f"geoopt RiemannianAdam, Stiefel {words}"
            found += [theirs(name, radam, 49, 7, count=count, wrap=wrap) for count in (1, 336)]
            found.append(theirs(name, radam, 336, 49, 7, wrap=wrap))
            if not canonical:  # the other solves with N x N matrices: minutes
                found.append(theirs(name, radam, 3072, 768, wrap=wrap))
        sphere, lorentz, ball = map(on, (geoopt.Sphere(), geoopt.Lorentz(), geoopt.PoincareBall()))
        found.append(
            theirs("geoopt RiemannianAdam, Sphere", radam, 1000, 64, wrap=sphere, space=ghor.Sphere())
        )
        found.append(
            theirs("geoopt RiemannianAdam, Lorentz", radam, 1000, 11, wrap=lorentz, space=ghor.Hyperbolic())
        )
        # The ball's points have a coordinate less; any points inside it will do.
        name, flat = "geoopt RiemannianAdam, PoincareBall", ghor.Euclidean()
        found.append(theirs(name, radam, 1000, 10, wrap=lambda x: ball(x / 10), space=flat))
        found.append(distance("geoopt Lorentz", geoopt.Lorentz().dist, 1000, 11, space=ghor.Hyperbolic()))
        inside = {"wrap": lambda x: nn.Parameter(x / 10), "space": flat}
        found.append(distance("geoopt PoincareBall", geoopt.PoincareBall().dist, 1000, 10, **inside))
    except ImportError:
        pass
    try:
        pogo, base = import_module("pogo"), import_module("pogo.base")

        def pogo_adam(p: list[Tensor]) -> Any:
            return pogo.POGO(p, base.VectorAdam(), lr=1e-3, rows=False)

        found += [theirs("POGO, VectorAdam", pogo_adam, 1, 49, 7, count=count) for count in (1, 336)]
        found.append(theirs("POGO, VectorAdam", pogo_adam, 336, 49, 7))
    except ImportError:
        pass
    return found


def count(case: Case, repeats: int | None = None) -> dict[str, Any]:
    """Counts of a case, see the module's docstring."""
    repeats = repeats or (5 if case.peer else STEPS)  # the steps of peers are all alike
    # torch's own rules read their step counts, unless they are fused
    opt, params = case.build(**({"fused": True} if re.match("ghor (Adam|SGD)", case.name) else {}))
    with nullcontext() if case.peer else as_on_an_accelerator():
        for _ in range(3):
            opt.step()
        with Count() as reading:
            for _ in range(repeats):
                opt.step()
        shifted = max(moved(opt, params) for _ in range(3))
    opt, params = case.build()
    for _ in range(3):
        opt.step()
    steps = []
    for _ in range(repeats):
        with Count() as counted:
            opt.step()
        steps.append(counted)
    totals = [c.kernels.total() for c in steps]
    typical = mode(totals)
    example = steps[totals.index(typical)]
    dims = params[0].shape[-case.space.dims :]
    N, n = max(dims), min(dims) if len(dims) > 1 else 1
    per_product = 2 * N * n * n * (math.prod(params[0].shape) // math.prod(dims)) * case.count
    return {
        "case": case.label,
        "kernels": typical,
        "mean": fmean(totals),
        "reads": reading.reads.total() / repeats,
        "products": example.flops / per_product,
        "traffic": example.traffic / sum(map(size, params)),
        "moved": shifted,
        "ops": dict(example.kernels.most_common()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name matches this regular expression")
    parser.add_argument("--ops", action="store_true", help="list the operations of a step, too")
    parser.add_argument("--json", type=Path, help="write a record")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    print(f"{'kernels':>8} {'mean':>8} {'reads':>6} {'products':>9} {'traffic':>8} {'moved':>6}")
    for case in (c for c in (*cases(), *peers()) if re.search(args.only, c.label)):
        row = count(case)
        rows.append(row)
        print(
            f"{row['kernels']:8} {row['mean']:8.1f} {row['reads']:6.1f} {row['products']:9.1f} "
            f"{row['traffic']:8.0f} {row['moved']:6}  {row['case']}",
            flush=True,
        )
        if args.ops:
            print("        " + ", ".join(f"{name} {n}" for name, n in row["ops"].items()))
    if args.json:
        from common import commit, write_json

        record = {"benchmark": "kernels", "commit": commit(), "torch": torch.__version__, "rows": rows}
        write_json(record, args.json)


if __name__ == "__main__":
    main()
