"""`ghor numbers`: texts say what the committed records say, and a change of either is found."""

import re
from pathlib import Path

import pytest
from synthetic import loss, write
from typer.testing import CliRunner

from ghor_lab import numbers
from ghor_lab.cli import app

ROOT = Path(__file__).parents[2]
TEMPLATE = 'A loss of {{ run("mnist", "momentum").loss(3) }}.\n'
TEXT = """Before.

<!-- numbers: one -->

A loss of 9.

<!-- /numbers -->
After.
"""


@pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="not in a clone")
def test_readme_and_docs_say_what_the_records_say():
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    used = {name for path in files for _, name, *_ in numbers.BLOCK.findall(path.read_text())}
    templates = {path.stem: path.read_text() for path in (ROOT / "results" / "numbers").iterdir()}
    used |= {name for text in templates.values() for name in re.findall(r'import "([\w-]+)\.jinja"', text)}
    assert used == set(templates)
    assert numbers.write(files, ROOT / "results", check=True) == []


@pytest.fixture
def text(tmp_path):
    write(tmp_path / "results" / "mnist", "mnist", "momentum", [0], 3)
    (tmp_path / "results" / "numbers").mkdir()
    (tmp_path / "results" / "numbers" / "one.jinja").write_text(TEMPLATE)
    path = tmp_path / "text.md"
    path.write_text(TEXT)
    return path


def test_numbers_are_written_and_changes_found(text):
    results = text.parent / "results"
    assert numbers.write([text], results, check=True) == [f"{text}, line 3: the records say otherwise"]
    assert text.read_text() == TEXT
    assert len(numbers.write([text], results)) == 1
    assert text.read_text() == TEXT.replace("of 9.", f"of {loss('momentum', 0, 3):.3f}.")
    assert numbers.write([text], results, check=True) == []
    write(results / "mnist", "mnist", "momentum", [0], 3, changes=lambda seeds, epoch: {"loss": [0.5]})
    assert len(numbers.write([text], results, check=True)) == 1


def test_the_command_says_what_it_found(text):
    argv = ["numbers", str(text), "--results", str(text.parent / "results")]
    for more, code, says in (
        (["--check"], 1, f"{text}, line 3: the records say otherwise\n"),
        ([], 0, f"{text}, line 3: written\n"),
        (["--check"], 0, "1 block agrees with the records\n"),
    ):
        done = CliRunner().invoke(app, [*argv, *more])
        assert (done.exit_code, done.output) == (code, says)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<!-- /numbers -->", "", "does not begin with"),
        (": one", ": two", "line 3: there is no .*two.jinja; run it in the clone, or name .* with --results"),
        ("momentum", "gradient", "line 3: .* has no record of gradient, seed 0"),
        ("loss(3)", "nothing(3)", "line 3: .*nothing"),
        ("loss(3)", "loss(4)", "line 3: list index out of range"),
    ],
)
def test_what_cannot_be_written_is_said(text, old, new, message):
    text.write_text(TEXT.replace(old, new))
    (text.parent / "results" / "numbers" / "one.jinja").write_text(TEMPLATE.replace(old, new))
    with pytest.raises(ValueError, match=message):
        numbers.write([text], text.parent / "results")
