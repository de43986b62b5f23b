"""`ghor numbers`: texts say what the committed records say, and a change of either is found."""

import dataclasses
import re
from pathlib import Path

import pytest
from synthetic import loss, write
from typer.testing import CliRunner

from ghor_lab import numbers, record
from ghor_lab.cli import app

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "results"
TEMPLATE = 'A loss of {{ run("mnist", "momentum").loss(3) }}.\n'
TEXT = """Before.

<!-- numbers: one -->

A loss of 9.

<!-- /numbers -->
After.
"""


@pytest.mark.skipif(not RESULTS.is_dir(), reason="not in a clone")
def test_readme_and_docs_say_what_the_records_say():
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    used = {name for path in files for _, name, *_ in numbers.BLOCK.findall(path.read_text())}
    templates = {path.stem: path.read_text() for path in (RESULTS / "numbers").iterdir()}
    used |= {name for text in templates.values() for name in re.findall(r'import "([\w-]+)\.jinja"', text)}
    assert used == set(templates)
    assert numbers.write(files, RESULTS, check=True) == []


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
        ("loss(3)", "loss(4)", "line 3: .*mnist-momentum-0.jsonl has 3 epochs, there is no 4"),
        ("loss(3)", "loss(0)", "line 3: .* has 3 epochs, there is no 0"),
        (
            'm")',
            'm", epochs=9)',
            "line 3: .* has no record of momentum, seed 0, label None, of 9 epochs or more",
        ),
        (
            'run("mnist", "momentum").loss(3)',
            'text("mnist")',
            "mnist has no finished run of the language model",
        ),
    ],
)
def test_what_cannot_be_written_is_said(text, old, new, message):
    text.write_text(TEXT.replace(old, new))
    assert old in TEXT + TEMPLATE
    (text.parent / "results" / "numbers" / "one.jinja").write_text(TEMPLATE.replace(old, new))
    with pytest.raises(ValueError, match=message):
        numbers.write([text], text.parent / "results")


def test_a_file_that_is_no_text_is_named(text):
    text.write_bytes(b"\x80")
    with pytest.raises(ValueError, match=f"{text} is not a text in UTF-8"):
        numbers.write([text], text.parent / "results")


@pytest.mark.parametrize(
    ("drifts", "shown"),
    [([None] * 3, "-"), ([[1e-7], None, [2e-7]], "2.0e-7"), ([[1e-7], [None], [2e-7]], "not finite")],
)
def test_the_drift_of_weights_some_of_which_have_none(drifts, shown, tmp_path):
    path = write(tmp_path, "mnist", "momentum", [0], 3, changes=lambda s, e: {"drift": drifts[e - 1]})
    assert numbers.Found(record.read(path)).drift() == shown


def test_numbers_that_are_not_finite_are_said(tmp_path, monkeypatch):
    monkeypatch.setitem(numbers.paper.EPOCHS, "mnist", 3)
    path = write(
        tmp_path, "mnist", "momentum", [0], 3, changes=lambda s, e: {"loss": [0.5 if e == 2 else None]}
    )
    found = numbers.Found(record.read(path))
    assert (found.loss(), found.loss(2), found.best(), found.off()) == ("not finite", "0.500", "0.500", "")
    header = {**found.record.header, "config": found.record.header["config"] | {"experiment": "text"}}
    assert numbers.Found(dataclasses.replace(found.record, header=header)).off() == ""
