"""The examples that draw pictures run, for two steps each, and are those of which the documentation has
pictures."""

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
NAMES = importlib.import_module("pictures").NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_draws(name, capsys):
    figure = importlib.import_module(name).run(steps=2)
    assert figure.axes
    assert capsys.readouterr().out
    lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) < 80


def test_pictures_are_there_and_small():
    pages = "".join((ROOT / "docs" / page).read_text() for page in ("index.md", "spaces.md"))
    for name in NAMES:
        assert f"(pictures/{name}.png)" in pages
        assert (ROOT / "docs" / "pictures" / f"{name}.png").stat().st_size < 70_000
