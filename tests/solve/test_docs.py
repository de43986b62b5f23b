"""The examples of docs/solving.md run."""

import re
from pathlib import Path

import ghor


def test_the_examples_of_the_page_run():
    page = (Path(__file__).parents[2] / "docs" / "solving.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[1:]  # the first one is a table of calls
    assert len(blocks) == 4
    scope = {"ghor": ghor}
    for block in blocks:
        exec(block, scope)
