"""Make the notebooks from pages: `python docs/build/notebooks.py`. Python blocks become cells.

Notebooks are kept without outputs; tests/test_notebooks.py compares them with the pages, and runs them.
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ("tutorial", "quantization", "poses")
FIRST = "# in a clone of ghor:  %pip install .   (and lion-pytorch, for one cell of the tutorial)"


def cell(kind: str, text: str, number: int) -> dict[str, Any]:
    """A cell without output."""
    made: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
    made |= {"execution_count": None, "outputs": []} if kind == "code" else {}
    return made | {"source": text.strip("\n").splitlines(keepends=True)}


def notebook(page: str) -> str:
    """The notebook of a page; links to other pages lose their address, admonitions their marks."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    text = re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)
    text = re.sub(
        r'^!!! \w+ "([^"]*)"\n((?:    .*\n)+)',
        lambda m: f"**{m[1]}.** " + re.sub("(?m)^    ", "", m[2]),
        text,
        flags=re.M,
    )
    parts = re.split(r"```python\n(.*?)```\n", text, flags=re.DOTALL)
    cells = [cell("code", FIRST, 0)]
    for i, part in enumerate(parts, 1):
        if part.strip():
            cells.append(cell("markdown" if i % 2 else "code", part, i))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write them all."""
    (ROOT / "notebooks").mkdir(exist_ok=True)
    for page in PAGES:
        (ROOT / "notebooks" / f"{page}.ipynb").write_text(notebook(page))


if __name__ == "__main__":
    main()
