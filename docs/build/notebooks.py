"""Make the notebooks from pages: `python docs/build/notebooks.py`. Python blocks become cells.

Notebooks are kept without outputs; tests/test_notebooks.py compares them with the pages, and runs them.
"""

import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).parents[2]
PAGES = ("tutorial", "quantization", "poses")
FIRST = "# in a clone of ghor:  %pip install .   (and lion-pytorch, for one cell of the tutorial)"
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")  # to another page
NOTE = re.compile(r'^!!! \w+ "([^"]*)"\n((?:    .*\n)+)', re.MULTILINE)


def notebook(page: str) -> str:
    """The notebook of a page; links to other pages lose their address, admonitions their marks."""
    text = LINK.sub(r"\1", (ROOT / "docs" / f"{page}.md").read_text())
    text = NOTE.sub(lambda m: f"**{m[1]}.** " + re.sub("(?m)^    ", "", m[2]), text)
    cells = [new_code_cell(FIRST, id="cell-0")]
    for i, part in enumerate(re.split(r"```python\n(.*?)```\n", text, flags=re.DOTALL), 1):
        if part.strip():
            made = new_markdown_cell if i % 2 else new_code_cell
            cells.append(made(part.strip("\n"), id=f"cell-{i}"))
    return nbformat.writes(new_notebook(cells=cells, metadata=KERNEL)) + "\n"


if __name__ == "__main__":
    for name in PAGES:
        (ROOT / "notebooks" / f"{name}.ipynb").write_text(notebook(name))
