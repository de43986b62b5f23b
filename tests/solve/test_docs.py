"""The examples of docs/solving.md run."""

import re
from pathlib import Path

import torch

import ghor


def test_the_examples_of_the_page_run():
    page = (Path(__file__).parents[2] / "docs" / "solving.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[1:]  # the first one is a table of calls
    assert len(blocks) == 4
    scope, dtype = {"ghor": ghor}, torch.get_default_dtype()
    try:
        for block in blocks:
            exec(block, scope)
    finally:
        torch.set_default_dtype(dtype)
