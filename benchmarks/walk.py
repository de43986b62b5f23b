"""The way of one step through ghor's files: how many functions it calls, how often the file changes.

Counted by `sys.setprofile`, exactly and without any timing. Comprehensions and generator expressions are part
of the function that contains them; a generator counts once, however often it is resumed.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import ghor

ROOT = Path(ghor.__file__).parent
# These have frames of their own or not, depending on the version of Python.
INLINE = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


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


def walk(step: Callable[[], object], steps: int = 5) -> Walk:
    """The last of several steps with fixed gradients; what the first ones set up is left out."""
    for _ in range(steps - 1):
        step()
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
        step()
    finally:
        sys.setprofile(before)
    return found


def report(found: Walk, top: int = 60) -> str:
    return "\n".join(
        [
            f"{found.calls.total()} calls of {len(found.calls)} functions in {len(found.files)} files, "
            f"{found.switches.total()} switches of file, depth {found.depth}",
            *(f"{count:8}  {name}" for name, count in found.calls.most_common(top)),
            *(f"{count:8}  {name}" for name, count in found.files.most_common()),
            *(f"{count:8}  {a} -> {b}" for (a, b), count in found.switches.most_common()),
        ]
    )
