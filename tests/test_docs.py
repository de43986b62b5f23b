"""The pages run as they stand."""

import re
from pathlib import Path

import pytest
import torch

import ghor

DOCS = Path(__file__).parents[1] / "docs"


# the first block of "solving" is a table of calls
@pytest.mark.parametrize(("page", "skipped", "blocks"), [("tutorial.md", 0, 6), ("solving.md", 1, 4)])
def test_the_examples_of_a_page_run(page, skipped, blocks):
    found = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)[skipped:]
    assert len(found) == blocks
    scope, dtype = {"ghor": ghor}, torch.get_default_dtype()
    try:
        with torch.random.fork_rng():
            for block in found:
                exec(block, scope)
    finally:
        torch.set_default_dtype(dtype)


def test_every_page_is_in_the_navigation_and_every_picture_is_there():
    """`make docs` is strict about links between pages; this is about what it does not know."""
    nav = (DOCS.parent / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert str(page.relative_to(DOCS)) in nav, page
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / picture).is_file(), f"{page.name}: {picture}"
