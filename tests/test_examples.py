"""The examples that draw pictures run, for two steps each, and are those of which the documentation has
pictures."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

import ghor

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
pictures = importlib.import_module("pictures")
NAMES = pictures.NAMES


def script(name):
    """A script of docs/build, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "build" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [*NAMES, "procrustes"])
def test_it_draws(name, capsys):
    figure = importlib.import_module(name).run(steps=2)
    assert figure.axes
    assert capsys.readouterr().out
    lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) < 80


def test_the_figure_of_parallel_transport():
    assert len(importlib.import_module("parallel_transport").run().axes) == 2


def test_pictures_are_there_and_small():
    pages = "".join((ROOT / "docs" / page).read_text() for page in ("index.md", "gallery.md"))
    for name in NAMES:
        file = pictures.FILES.get(name, f"{name}.png")
        assert f"(pictures/{file})" in pages
        assert (ROOT / "docs" / "pictures" / file).stat().st_size < 70_000


@pytest.mark.skipif(not (ROOT / "lab" / "results").is_dir(), reason="not in a clone")
def test_what_is_recorded_is_drawn():
    """Every picture of docs/build/records.py, from records; none has bars on a logarithmic axis."""
    records = script("records")
    for name, draw in records.PICTURES.items():
        for axes in draw().axes:
            assert not axes.containers or axes.get_xscale() == axes.get_yscale() == "linear", name
        assert (ROOT / "docs" / "pictures" / f"{name}.svg").stat().st_size < 70_000


def test_every_space_has_a_page_and_a_picture():
    for cls in set(ghor.spaces.__all__) - {"Space", "GroupSpace", "Euclidean"}:
        name = re.sub("(?<=[a-z])(?=[A-Z])", "_", cls).lower()
        page = ROOT / "docs" / "spaces" / f"{name}.md"
        assert f"ghor.{cls}(" in page.read_text()
        pictures = re.findall(r"\((\.\./pictures/[^)]*)\)", page.read_text())
        assert pictures
        assert all((page.parent / picture).stat().st_size < 70_000 for picture in pictures)


@pytest.mark.parametrize("name", script("spaces").DRAWN)
def test_pictures_of_spaces_are_drawn(name):
    axes = Figure().add_subplot()
    script("spaces").DRAWN[name](axes)
    assert axes.lines
