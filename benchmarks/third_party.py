"""Every optimizer of seven libraries: does it lift, and is the lift its rule on the full matrix of g^hor?

    python benchmarks/third_party.py                        # some 250 classes, 10 to 30 minutes
    python benchmarks/third_party.py --quick                # 20 steps at 12 x 4
    python benchmarks/third_party.py --only Lion            # classes with this in their name
    python benchmarks/third_party.py --out table.md

An accepted class runs for 200 steps on three weights at once, with gradients of sizes 1, 10 and 0.1 that are
a fixed sequence in g^hor. The reference shares no code with ghor: it is the same class on one N x N parameter
for each weight, with gradient [[A, -B^T], [B, 0]] and its velocity W taken as it is, and Lambda <- Lambda (I
- W/2)^-1 (I + W/2) with dense matrices in float64. The number is the largest |Y - Lambda E| over all steps,
weights and entries. Some classes lift only with stack=False, because they take a norm or mean of a weight or
keep state of an odd shape; for them the reference has one N x n parameter [A; B] for each weight instead.

Some rules amplify small differences: they divide by an entry of the gradient that is near 0. If the number is
above 1e-5 in float32 or 1e-13 in float64, the reference runs a second time with gradients that differ by one
rounding, eps times their largest entry. The distance between the two references is in parentheses, and a
number above ten times that is bold. A bold number in float32 beside rounding in float64 comes from the sign
of a number that is 0 to rounding (Ano: of g^2 - v, in one entry of 90 x 50, at step 65).

The libraries: pip install ".[third-party]". timm as a whole needs torchvision to be imported; its optimizers
do not and are found without it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import pkgutil
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ghor

LIBRARIES = (
    "torch.optim",
    "pytorch_optimizer",
    "timm.optim",
    "torch_optimizer",
    "heavyball",
    "lion_pytorch",
    "bitsandbytes.optim",
)
SHAPES = ((12, 4), (90, 50))
DTYPES = (torch.float32, torch.float64)
SIZES = (1.0, 10.0, 0.1)  # of the gradients of the three weights
LIMIT = {torch.float32: 1e-5, torch.float64: 1e-13}  # below this a difference counts as rounding
ARGUMENTS = {"lr": 1e-3, "momentum": 0.9}  # where the class has no default
REFUSAL = "cannot be lifted to manifolds: "


# -- classes -------------------------------------------------------------------------------------------------


def classes(library: str) -> dict[str, type[Optimizer]]:
    """The optimizers that a library defines, by name."""
    modules = timm_modules() if library == "timm.optim" else [importlib.import_module(library)]
    found = {}
    for module in modules:
        for name, value in sorted(vars(module).items()):
            if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer:
                home = value.__module__.startswith("torch.optim")
                if home == (library == "torch.optim"):
                    found[name] = value
    return found


def timm_modules() -> list[types.ModuleType]:
    """timm.optim, or its files if torchvision is missing."""
    try:
        return [importlib.import_module("timm.optim")]
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.split(".")[0] == "timm"]:
            del sys.modules[name]
    spec = importlib.util.find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("timm is not installed")
    folder = Path(spec.submodule_search_locations[0])
    for name, place in (("timm", folder), ("timm.optim", folder / "optim")):
        module = types.ModuleType(name)
        module.__path__ = [str(place)]
        sys.modules[name] = module
    names = [m.name for m in pkgutil.iter_modules([str(folder / "optim")]) if "factory" not in m.name]
    return [importlib.import_module(f"timm.optim.{name}") for name in names if not name.startswith("_")]


def arguments(Base: type[Optimizer], library: str) -> dict[str, Any]:
    """The arguments that have to be given."""
    given = {}
    for p in list(inspect.signature(Base.__init__).parameters.values())[2:]:
        required = p.default is p.empty or not isinstance(
            p.default, (bool, int, float, str, tuple, type(None))
        )
        needed = library == "bitsandbytes.optim" and p.name == "momentum"  # 0 by default, and refused
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and (required or needed) and p.name in ARGUMENTS:
            given[p.name] = ARGUMENTS[p.name]
    return given


# -- the reference -------------------------------------------------------------------------------------------


def gradients(N: int, n: int, steps: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """[A; B] of three weights, A skew: (3, N, n); a constant part and a changing part."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        X = torch.randn(3, N, n, generator=generator, dtype=torch.float64)
        X[:, :n] = (X[:, :n] - X[:, :n].mT) / 2**0.5
        return X

    steady, sizes = 0.5 * draw(), torch.tensor(SIZES, dtype=torch.float64).view(3, 1, 1)
    for _ in range(steps):
        yield (sizes * (steady + draw())).to(dtype)


def whole(W: Tensor) -> Tensor:
    """[[A, -B^T], [B, 0]]: (..., N, n) -> (..., N, N)."""
    N, n = W.shape[-2:]
    out = W.new_zeros(*W.shape[:-1], N)
    out[..., :, :n] = W
    out[..., :n, n:] = -W[..., n:, :].mT
    return out


class Reference:
    """One weight: Base on its full matrix, or on its first columns, and Lambda as a dense matrix."""

    def __init__(
        self, Base: type[Optimizer], options: dict[str, Any], Lambda: Tensor, n: int, columns: bool
    ) -> None:
        N = len(Lambda)
        self.Lambda, self.n, self.columns = Lambda, n, columns
        self.H = nn.Parameter(torch.zeros(N, n if columns else N, dtype=options["dtype"]))
        self.optimizer = Base([self.H], **options["given"])

    def step(self, B: Tensor) -> None:
        self.H.grad = B.clone() if self.columns else whole(B)
        self.optimizer.step()
        W = self.H.detach().to(torch.float64, copy=True)
        self.H.data.zero_()
        W = whole(W) if self.columns else W
        I = torch.eye(len(W), dtype=torch.float64)
        self.Lambda = self.Lambda @ torch.linalg.solve(I - W / 2, I + W / 2)


def difference(
    Base: type[Optimizer],
    given: dict[str, Any],
    stack: bool,
    shape: tuple[int, int],
    dtype: torch.dtype,
    steps: int,
) -> float:
    """The largest |Y - Lambda E| along the way; raises ValueError if the lift refuses."""
    N, n = shape
    generator = torch.Generator().manual_seed(1)
    Lambdas = torch.linalg.qr(torch.randn(3, N, N, generator=generator, dtype=torch.float64))[0]
    params = [nn.Parameter(Lambda[:, :n].to(dtype, copy=True)) for Lambda in Lambdas]
    optimizer = ghor.lift(Base, stack=stack)(params, space=ghor.Stiefel(), section="transported", **given)
    start = [
        ghor.Stiefel().section(p.detach().double()) for p in params
    ]  # ours begins with this frame above Y
    refs = [Reference(Base, {"given": given, "dtype": dtype}, Lambda, n, not stack) for Lambda in start]
    worst = 0.0
    for B in gradients(N, n, steps, dtype):
        for p, Lambda, b in zip(params, start, B.double(), strict=True):
            half = torch.cat([b[:n] / 2, b[n:]])  # Y^T G - (Y^T G)^T = A, Q^T G = B
            own = (
                optimizer.state[p].get("section", Lambda) if optimizer.state[p] else Lambda
            )  # so B is the same to us
            p.grad = (own.double() @ half).to(dtype)
        optimizer.step()
        for p, ref, b in zip(params, refs, B, strict=True):
            ref.step(b)
            worst = max(worst, float((p.detach().double() - ref.Lambda[:, :n]).abs().max()))
    return worst


def own_rounding(
    Base: type[Optimizer],
    given: dict[str, Any],
    stack: bool,
    shape: tuple[int, int],
    dtype: torch.dtype,
    steps: int,
) -> float:
    """How far the reference is from itself when its gradients differ by one rounding."""
    N, n = shape
    start, options = torch.eye(N, dtype=torch.float64), {"given": given, "dtype": dtype}
    pairs = [[Reference(Base, options, start, n, not stack) for _ in range(2)] for _ in SIZES]
    generator, worst = torch.Generator().manual_seed(2), 0.0
    for B in gradients(N, n, steps, dtype):
        X = torch.randn(B.shape, generator=generator, dtype=torch.float64).to(dtype)
        X[:, :n] = (X[:, :n] - X[:, :n].mT) / 2**0.5
        other = B + torch.finfo(dtype).eps * B.abs().amax((1, 2), keepdim=True) * X
        for (a, b), g, h in zip(pairs, B, other, strict=True):
            a.step(g)
            b.step(h)
            worst = max(worst, float((a.Lambda - b.Lambda)[:, :n].abs().max()))
    return worst


# -- the table -----------------------------------------------------------------------------------------------


def judge(
    Base: type[Optimizer], library: str, shapes: tuple[tuple[int, int], ...], steps: int
) -> dict[str, Any]:
    """A row: how it lifts, the differences, or the reason why it does not."""
    given = arguments(Base, library)
    row: dict[str, Any] = {"how": "no", "cells": [], "reason": ""}
    for stack in (True, False):
        cells, reasons = [], []
        for shape in shapes:
            for dtype in DTYPES:
                run = Base, given, stack, shape, dtype, steps
                try:
                    value = difference(*run)
                    cells.append((dtype, value, own_rounding(*run) if value > LIMIT[dtype] else 0.0))
                except Exception as error:
                    cells.append((dtype, None, 0.0))
                    reasons.append(reason_of(Base, error))
        if stack:
            row["reason"] = reasons[0] if reasons else ""
        if any(value is not None for _, value, _ in cells):
            row |= {"how": "yes" if stack else "stack=False", "cells": cells}
            row["reason"] = row["reason"] if not stack else reasons[0] if reasons else ""
            break
    return row


def reason_of(Base: type[Optimizer], error: Exception) -> str:
    text = str(error)
    if REFUSAL not in text:
        return f"cannot be built or run: {type(error).__name__}: {text.splitlines()[0] if text else ''}"[:160]
    return text.split(REFUSAL, 1)[1].split(" (tried for")[0]


def cell(dtype: torch.dtype, value: float | None, own: float) -> str:
    if value is None:
        return "refused"
    if value <= LIMIT[dtype]:
        return f"{value:.0e}"
    return f"{value:.0e} ({own:.0e})" if value <= 10 * own else f"**{value:.0e} ({own:.0e})**"


def table(rows: list[tuple[str, str, dict[str, Any]]], shapes: tuple[tuple[int, int], ...]) -> str:
    heads = [f"{N} x {n}, {str(dtype).split('.')[1]}" for N, n in shapes for dtype in DTYPES]
    lines = [
        f"| library | optimizer | lifts | {' | '.join(heads)} | reason |",
        "|" + "---|" * (4 + len(heads)),
    ]
    for library, name, row in rows:
        cells = [cell(*c) for c in row["cells"]] or [""] * len(heads)
        lines.append(
            f"| {library} | {name} | {row['how']} | {' | '.join(cells)} | {row['reason'].replace('|', '/')} |"
        )
    return "\n".join(lines)


def summary(rows: list[tuple[str, str, dict[str, Any]]]) -> str:
    counts = Counter(row["how"] for _, _, row in rows)
    lines = [
        f"{len(rows)} classes: {counts['yes']} lift, {counts['stack=False']} more with stack=False, "
        f"{counts['no']} do not."
    ]
    for how, against in (("yes", "the rule on N x N"), ("stack=False", "the rule on [A; B]")):
        for dtype in DTYPES:
            runs = [c[1:] for _, _, row in rows if row["how"] == how for c in row["cells"] if c[0] is dtype]
            runs = [(value, own) for value, own in runs if value is not None]
            if runs:
                name, limit = str(dtype).split(".")[1], LIMIT[dtype]
                small = [value for value, _ in runs if value <= limit]
                as_own = sum(limit < value <= 10 * own for value, own in runs)
                lines.append(
                    f"- {how}, {name}, {len(runs)} runs against {against}: {len(small)} within {limit:.0e} "
                    f"(at most {max(small, default=0.0):.1e}), {as_own} within their own rounding, "
                    f"{len(runs) - len(small) - as_own} beyond"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="classes with this in their name, or library.name")
    parser.add_argument("--quick", action="store_true", help="20 steps at 12 x 4")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, help="a file for the table")
    parser.add_argument("--json", type=Path, help="a file for the rows; those in it are not run again")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # theirs
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # the rules, not compiled kernels: some compile for a minute
    shapes, steps = (SHAPES[:1], 20) if args.quick else (SHAPES, args.steps)
    todo, versions = [], []
    for library in LIBRARIES:
        try:
            found = classes(library)
        except ImportError as error:
            print(f"{library}: left out, {error}", file=sys.stderr)
            continue
        versions.append(f"{library.split('.')[0]} {version(library)}")
        todo += [(library.split(".")[0], name, Base, library) for name, Base in found.items()]
    if args.only:
        todo = [t for t in todo if args.only.lower() in f"{t[0]}.{t[1]}".lower()]
    rows = []
    known = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for i, (short, name, Base, library) in enumerate(todo, 1):
        began = time.perf_counter()
        if f"{short}.{name}" in known:
            row = known[f"{short}.{name}"]
            rows.append(
                (short, name, {**row, "cells": [(getattr(torch, d), v, own) for d, v, own in row["cells"]]})
            )
            continue
        row = judge(Base, library, shapes, steps)
        rows.append((short, name, row))
        if args.json:
            done = {f"{s}.{n}": plain(r) for s, n, r in rows}
            args.json.write_text(json.dumps(known | done))
        what = ", ".join(cell(*c) for c in row["cells"]) or row["reason"][:80]
        spent = time.perf_counter() - began
        print(
            f"[{i:3d}/{len(todo)}] {short}.{name}: {row['how']}; {what} ({spent:.1f} s)",
            file=sys.stderr,
            flush=True,
        )
    about = f"Largest |Y - Lambda E| over {steps} steps. {', '.join(versions)}."
    text = f"{summary(rows)}\n\n{about}\n\n{table(rows, shapes)}\n"
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
        print(summary(rows))
    else:
        print(text)


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "cells": [(str(d).split(".")[1], value, own) for d, value, own in row["cells"]]}


def version(library: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    for name in (library.split(".")[0], library.split(".")[0].replace("_", "-")):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "?"


if __name__ == "__main__":
    main()
