"""Write src/ghor/optim/__init__.pyi, from which type checkers, editors and the site learn signatures.

    python tests/signatures.py

A class of ghor.optim takes what torch's class takes, and the options that are ours. test_typing.py fails
if the file is not what this writes.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import ghor.optim
from ghor.lifting import Lifted

STUB = Path(__file__).parents[1] / "src/ghor/optim/__init__.pyi"
HEAD = '''"""Signatures, written by tests/signatures.py."""

from typing import Unpack

from torch import Tensor

from ghor.lifting.groups import Options, Params
from ghor.lifting.lifted import Lifted
from ghor.optim.lbfgs import LBFGS as LBFGS
from ghor.optim.muon import Muon as Muon

__all__ = {names}
'''


def stub() -> str:
    """The text of the file, for the torch that is installed."""
    source = ast.parse(STUB.with_suffix(".py").read_text())
    names = [
        node.name for node in source.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    listed = "[\n" + "".join(f'    "{name}",\n' for name in ghor.optim.__all__) + "]"
    return HEAD.format(names=listed) + "".join(f"\n{of(getattr(ghor.optim, name))}" for name in names)


def of(cls: type[Lifted]) -> str:
    """A class with its constructor."""
    lines, by_keyword = ["self", "params: Params"], False
    for p in list(inspect.signature(cls.Base).parameters.values())[1:]:
        if p.kind is p.KEYWORD_ONLY and not by_keyword:
            lines, by_keyword = [*lines, "*"], True
        lines.append(f"{p.name}: {type_of(p)} = {p.default!r}")
    arguments = "".join(f"        {line},\n" for line in [*lines, "**ours: Unpack[Options]"])
    return f"class {cls.__name__}(Lifted):\n    def __init__(\n{arguments}    ) -> None: ...\n"


def type_of(p: inspect.Parameter) -> str:
    """Its annotation, as one would write it."""
    return re.sub(r"\b(torch|typing|collections\.abc)\.", "", inspect.formatannotation(p.annotation)).strip(
        "'"
    )


if __name__ == "__main__":
    STUB.write_text(stub())
