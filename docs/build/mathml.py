"""A hook of mkdocs: formulas become MathML when the pages are built, so that no script has to be loaded."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(text: str, **_: Any) -> str:
    """What arithmatex has marked, as MathML."""
    return FORMULA.sub(
        lambda found: convert(html.unescape(found[3]), display="block" if found[2] == "[" else "inline"), text
    )
