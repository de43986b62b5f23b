"""A hook of mkdocs: formulas become MathML when the pages are built, so that no script has to be loaded.

LaTeX between dollar signs is converted as it is. In running text, that of docstrings included, powers and
indices (`Y^T`, `x_0`, `g^hor`) are set as such; code is left alone.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
MARKUP = re.compile(r"(<[^>]*>)")
VERBATIM = {"code", "pre", "math", "script", "style", "svg"}
POWER = re.compile(
    r"(?<![\w/^.-])([A-Za-z]|Lambda|eps|log|cond|\|\|?)?([_^])(\([^()]*\)|-?\d+|hor|[A-Za-z]{1,2}|\*)(?!\w)"
)
GHOR = convert(r"\mathfrak{g}^{\mathrm{hor}}")


def on_page_content(text: str, **_: Any) -> str:
    """What arithmatex has marked, and powers in the text, as MathML."""
    made = FORMULA.sub(
        lambda found: convert(html.unescape(found[3]), display="block" if found[2] == "[" else "inline"), text
    )
    parts, inside = MARKUP.split(made), []
    for i, part in enumerate(parts):
        if i % 2:
            name = re.match(r"</?([a-z0-9]*)", part)[1]
            if name in VERBATIM and not part.endswith("/>"):
                inside = inside[:-1] if part.startswith("</") else [*inside, name]
        elif not inside and ("^" in part or "_" in part):
            parts[i] = POWER.sub(power, part)
    return "".join(parts)


def power(found: re.Match[str]) -> str:
    """A letter with an exponent or an index."""
    base, kind, script = found.groups()
    if base is None:
        return found[0]
    if (base, script) == ("g", "hor"):
        return GHOR
    script = script[1:-1] if script.startswith("(") else script
    base = {"Lambda": "Λ"}.get(base, base)
    tag = {"^": "msup", "_": "msub"}[kind]
    script = script.replace("-", "&minus;")
    return f'<math><{tag}><mi mathvariant="normal">{base}</mi><mtext>{script}</mtext></{tag}></math>'
