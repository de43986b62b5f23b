"""A griffe extension: docstrings hold formulas, so `Y* Y`, `<G, V>` and `||X||_F` must not be read as markup.

Doctests become blocks of code. Lists of parameters are added from parameters.toml.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import griffe

KEPT = re.compile(r"(`[^`]*`|(?<!\w)\*\w[^*]*\w\*(?!\w))")  # `code` and *emphasis*
MARKUP = re.compile(r"([*_\[\]])")
PARAMETERS = tomllib.loads((Path(__file__).parent / "parameters.toml").read_text())


def escape(text: str) -> str:
    """Markdown's characters made plain, except in `code`, *emphasis*, indented blocks and doctests."""
    lines, example = [], False
    for line in text.splitlines():
        if line.startswith(">>>") and not example:
            example = True
            lines += ["", "```pycon"]
        elif example and not line:
            example = False
            lines.append("```")
        if not example and not line.startswith("    "):
            parts = KEPT.split(line)
            parts[::2] = [MARKUP.sub(r"\\\1", part.replace("<", "&lt;")) for part in parts[::2]]
            line = "".join(parts)
        lines.append(line)
    return "\n".join([*lines, "```"] if example else lines)


class Formulas(griffe.Extension):
    """Escapes every docstring once, when its object has been read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and not obj.is_alias:
            told = PARAMETERS.get(obj.path, {})
            listed = [f"    {name}: {escape(text)}" for name, text in told.items()]
            obj.docstring.value = "\n".join(
                [escape(obj.docstring.value), *(["", "Args:", *listed] if told else [])]
            )
