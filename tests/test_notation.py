"""The notation table of the docs: what it names is what runs."""

import re
import sys
from pathlib import Path

import torch
from torch import nn

import ghor

ROOT = Path(__file__).parents[1]


def table():
    """(name, file) of every function in the table."""
    text = (ROOT / "docs" / "notation.md").read_text()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and cells[2].startswith("`"):
            names, files = (re.findall(r"`([^`]+)`", cell) for cell in cells[1:])
            for i, name in enumerate(names):
                yield name, files[min(i, len(files) - 1)]


def called():
    """(qualified name, file) of every function that some steps call."""
    seen = set()

    def look(frame, event, arg):
        if event == "call":
            seen.add((frame.f_code.co_qualname, frame.f_code.co_filename))

    sys.setprofile(look)
    try:
        for section, retraction in (("transported", "cayley"), ("implicit", "geodesic")):
            Y = nn.Parameter(torch.eye(9, 3))
            opt = ghor.optim.Adam([Y], space=ghor.Stiefel(), section=section, retraction=retraction)
            for _ in range(2):
                Y.grad = torch.ones(9, 3)
                opt.step()
    finally:
        sys.setprofile(None)
    return seen


def test_every_function_of_the_table_is_called_by_a_step():
    rows = list(table())
    assert len(rows) >= 15
    seen = {(name, Path(file).resolve()) for name, file in called()}
    missing = [(name, file) for name, file in rows if (name, (ROOT / file).resolve()) not in seen]
    assert missing == []
