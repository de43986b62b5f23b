"""Optimizers of other libraries, lifted: which run, and which find the optimum of two problems on Stiefel.

    python benchmarks/third_party.py                  # writes lab/results/third_party/; about ten minutes
    python benchmarks/third_party.py --only Adam      # some, and prints

Each class is lifted as it is and takes 300 steps in float32 from one point of St(4, 40), at one of five
rates:

    Procrustes    |C Y - B|^2/50, with an exact solution on the space
    eigenspace    tr(Y^T S Y), over the four smallest of 40 eigenvalues, less their sum

Both begin above 1 and end at 0. A class *runs* if it takes all steps, *reaches* a problem if its best loss is
below 1e-2, and is off the space by |Y^T Y - I| at most. "Asked" is what the lift has found out about the
rule: whether it reads its weight, which is then developed; whether weights share a tensor; whether its state
turns with a frame.

The libraries: pip install ".[third-party]". timm as a whole needs torchvision to be imported; its optimizers
do not and are found without it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import pkgutil
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ghor
from ghor.lifting.law import Traits

OUT = Path("lab/results/third_party/table.md")
LIBRARIES = (
    "torch.optim",
    "pytorch_optimizer",
    "timm.optim",
    "torch_optimizer",
    "heavyball",
    "lion_pytorch",
    "bitsandbytes.optim",
)
RATES, STEPS, NEAR, SECONDS = (0.1, 0.03, 1.0, 0.01, 0.003), 300, 1e-2, 20
ARGUMENTS = {"lr": 1e-3, "momentum": 0.9}  # where the class has no default
USE_MUON = {"use_muon": True}  # what some classes called Muon want to find in a group
SPACE = ghor.Stiefel()

Loss = Callable[[Tensor], Tensor]


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
    """The arguments that have to be given, other than the rate."""
    given = {}
    for p in list(inspect.signature(Base.__init__).parameters.values())[2:]:
        plain = p.default is not p.empty and isinstance(p.default, (bool, int, float, str, tuple, type(None)))
        needed = library == "bitsandbytes.optim" and p.name == "momentum"  # 0 by default, and refused
        if p.name in ARGUMENTS and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and (needed or not plain):
            given[p.name] = ARGUMENTS[p.name]
    return given


# -- problems ------------------------------------------------------------------------------------------------


def problems() -> tuple[Tensor, dict[str, Loss]]:
    """The start, and the losses by name; 0 is their least value."""
    gen = torch.Generator().manual_seed(3)
    C = torch.randn(50, 40, generator=gen)
    B = C @ torch.linalg.qr(torch.randn(40, 4, generator=gen))[0]
    start = torch.linalg.qr(torch.randn(40, 4, generator=gen))[0]
    Q = torch.linalg.qr(torch.randn(40, 40, generator=gen))[0]
    values = torch.cat([torch.linspace(0.1, 0.4, 4), torch.linspace(1, 2, 36)])
    S = (Q * values) @ Q.mT
    return start, {
        "Procrustes": lambda Y: (C @ Y - B).square().sum() / 50,
        "eigenspace": lambda Y: (Y * (S @ Y)).sum() - values[:4].sum(),
    }


@dataclass
class Row:
    """How a class does."""

    library: str
    name: str
    asked: Traits | None = None
    best: dict[str, tuple[float, float]] = field(default_factory=dict)  # loss and rate, by problem
    off: float = 0.0
    error: str = ""


def tried(library: str, name: str, Base: type[Optimizer]) -> Row:
    """A row of the table."""
    row, given = Row(library.split(".")[0], name), arguments(Base, library)
    start, losses = problems()
    rates = [{"lr": lr} for lr in RATES] if "lr" in inspect.signature(Base.__init__).parameters else [{}]
    extra = USE_MUON if "use_muon" in (inspect.getdoc(Base) or "") + _source(Base) else {}
    for problem, loss in losses.items():
        for rate in rates:
            try:
                with at_most(SECONDS):
                    value = descend(Base, given | rate, extra, start, loss, row)
            except Exception as error:  # of every kind: it is the rule's own
                row.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:110]
                return row
            if value < row.best.get(problem, (float("inf"),))[0]:
                row.best[problem] = value, rate.get("lr", float("nan"))
            if value < NEAR:
                break
    return row


def _source(Base: type[Optimizer]) -> str:
    try:
        return inspect.getsource(Base)
    except (OSError, TypeError):
        return ""


def descend(
    Base: type[Optimizer], options: dict[str, Any], extra: dict[str, Any], start: Tensor, loss: Loss, row: Row
) -> float:
    """The loss after all steps."""
    p = nn.Parameter(start.clone())
    torch.manual_seed(0)
    params = [{"params": [p], **extra}] if extra else [p]  # some take no groups
    opt = ghor.lift(Base)(params, space=SPACE, **options)
    for _ in range(STEPS):
        opt.zero_grad()
        loss(p).backward()
        opt.step()
    row.asked = opt._traits(opt._roster.curved[0]) if opt._roster.curved else None
    row.off = max(row.off, float(SPACE.residual(p.detach())))
    value = float(loss(p.detach()))
    return value if value == value else float("inf")


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after so many seconds of this process, whatever else the machine does."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"not done in {seconds} s")

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


# -- the table -----------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    names = list(problems()[1])
    lines = [
        f"| library | optimizer | runs | {' | '.join(names)} | off | reads | shares | turns | error |",
        "|" + "---|" * (7 + len(names) + 1),
    ]
    for row in rows:
        cells = [cell(*row.best[n]) if n in row.best else "" for n in names]
        how = [] if row.asked is None else [row.asked.reads, row.asked.stacks, row.asked.turns]
        marks = ["x" if yes else "" for yes in how] or [""] * 3
        off = f"{row.off:.0e}" if not row.error else ""
        what = [row.library, row.name, "no" if row.error else "yes", *cells, off, *marks]
        lines.append("| " + " | ".join([*what, row.error.replace("|", "/")]) + " |")
    return "\n".join(lines)


def cell(loss: float, rate: float) -> str:
    return f"{loss:.0e}" + (f" at {rate:g}" if rate == rate else "")


def summary(rows: list[Row]) -> str:
    ran = [row for row in rows if not row.error]
    lines = [f"{len(rows)} classes: {len(ran)} run."]
    for n in problems()[1]:
        reached = sum(row.best[n][0] < NEAR for row in ran)
        lines.append(f"- {n}: {reached} reach {NEAR:g}")
    both = sum(all(loss < NEAR for loss, _ in row.best.values()) for row in ran)
    lines.append(f"- both: {both}; off the space by more than 1e-5: {sum(not row.off < 1e-5 for row in ran)}")
    return "\n".join(lines)


def version(library: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    for name in (library.split(".")[0], library.split(".")[0].replace("_", "-")):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "?"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="classes with this in library.name; prints")
    parser.add_argument("--out", type=Path, default=OUT, help="a file for the table")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # theirs
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # the rules, not compiled kernels: some compile for a minute
    rows, versions, left_out = [], [], []
    for library in LIBRARIES:
        try:
            found = classes(library)
        except ImportError:
            left_out.append(library.split(".")[0])
            continue
        versions.append(f"{library.split('.')[0]} {version(library)}")
        for name, Base in found.items():
            if args.only.lower() in f"{library}.{name}".lower():
                rows.append(tried(library, name, Base))
                row = rows[-1]
                print(f"{row.library}.{name}: {row.error or row.best}", file=sys.stderr, flush=True)
    about = f"`python benchmarks/third_party.py`, {STEPS} steps, float32. {', '.join(versions)}."
    about += f" Not installed: {', '.join(left_out)}." if left_out else ""
    text = f"{summary(rows)}\n\n{about}\n\n{table(rows)}\n"
    if args.only:
        print(text)
    else:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
        print(summary(rows))


if __name__ == "__main__":
    main()
