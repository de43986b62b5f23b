"""The way of one step through ghor's files: how many functions it calls, how often the file changes.

    python benchmarks/walk.py                                  # Adam, 336 St(7,49) weights, 16 Euclidean
    python benchmarks/walk.py --optimizer SGD --weights 1

It counts with `sys.setprofile`, so the result is exact and involves no timing. Comprehensions and generator
expressions are part of the function that contains them; a generator counts once, however often it is resumed.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import ghor
from ghor.baselines import ScalarMomentAdam

ROOT = Path(ghor.__file__).parent
INLINE = {
    "<listcomp>",
    "<setcomp>",
    "<dictcomp>",
    "<genexpr>",
}  # these have frames of their own or not, depending on the version of Python


@dataclass
class Walk:
    """`calls` by function, `switches` by (file, other file): calls from one of ghor's files into another."""

    calls: Counter[str] = field(default_factory=Counter)
    switches: Counter[tuple[str, str]] = field(default_factory=Counter)
    depth: int = 0  # the deepest nesting of ghor's functions

    @property
    def files(self) -> Counter[str]:
        """Calls by file."""
        out: Counter[str] = Counter()
        for name, count in self.calls.items():
            out[name.partition(":")[0]] += count
        return out


def walk(optimizer: torch.optim.Optimizer, steps: int) -> Walk:
    """The last of several steps with fixed gradients; what the first ones set up is left out."""
    for _ in range(steps - 1):
        optimizer.step()
    found, stack, generators = Walk(), [], set()
    files: dict[str, str | None] = {}

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code.co_filename not in files:
            path = Path(code.co_filename)
            files[code.co_filename] = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else None
        file = files[code.co_filename]
        if file is None or code.co_name in INLINE:
            return
        if event == "call":
            resumed = code.co_flags & inspect.CO_GENERATOR and frame in generators
            if not resumed:
                found.calls[f"{file}:{code.co_qualname}"] += 1
                if stack and stack[-1] != file:
                    found.switches[stack[-1], file] += 1
                if code.co_flags & inspect.CO_GENERATOR:
                    generators.add(frame)
            stack.append(file)
            found.depth = max(found.depth, len(stack))
        elif event == "return" and stack:
            stack.pop()

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        optimizer.step()
    finally:
        sys.setprofile(before)
    return found


def problem(optimizer: str, weights: int, euclidean: int = 16, **options: Any) -> torch.optim.Optimizer:
    """An optimizer of some weights on St(7,49) and some Euclidean ones, with gradients in place."""
    generator = torch.Generator().manual_seed(0)
    space = ghor.Stiefel()
    on_space = [nn.Parameter(space.random(49, 7, generator=generator)) for _ in range(weights)]
    others = [nn.Parameter(torch.randn(7, 7, generator=generator)) for _ in range(euclidean)]
    for p in (*on_space, *others):
        p.grad = torch.randn(p.shape, generator=generator)
    groups: Any = [{"params": on_space, "space": space}, {"params": others, "space": ghor.Euclidean()}]
    cls = ScalarMomentAdam if optimizer == "ScalarMomentAdam" else getattr(ghor.optim, optimizer)
    return cls([g for g in groups if g["params"]], lr=1e-3, **options)


def report(found: Walk, top: int) -> str:
    lines = [
        f"{found.calls.total()} calls of {len(found.calls)} functions in {len(found.files)} files, "
        f"{found.switches.total()} switches of file, depth {found.depth}",
        "",
        f"{'calls':>7}  function",
        *(f"{count:7}  {name}" for name, count in found.calls.most_common(top)),
        *([f"{'':7}  and {len(found.calls) - top} more"] if len(found.calls) > top else []),
        "",
        f"{'calls':>7}  file",
        *(f"{count:7}  {name}" for name, count in found.files.most_common()),
        "",
        f"{'switches':>8}",
        *(f"{count:8}  {a} -> {b}" for (a, b), count in found.switches.most_common()),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizer", default="Adam", choices=[*ghor.optim.__all__, "ScalarMomentAdam"])
    parser.add_argument("--weights", type=int, default=336, help="on St(7,49) (default: 336)")
    parser.add_argument("--euclidean", type=int, default=16, help="Euclidean weights (default: 16)")
    parser.add_argument("--section", default="auto", choices=("auto", "transported", "implicit"))
    parser.add_argument("--step", type=int, default=5, help="which step (default: 5)")
    parser.add_argument("--top", type=int, default=40, help="functions to list (default: 40)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    optimizer = problem(args.optimizer, args.weights, args.euclidean, section=args.section)
    print(
        f"Step {args.step} of {args.optimizer}, {args.weights} weights on St(7,49), {args.euclidean} "
        "Euclidean"
    )
    print(report(walk(optimizer, args.step), args.top))


if __name__ == "__main__":
    main()
