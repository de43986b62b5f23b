"""Pools, the table of quantities, figures, the page, counts of caught runs, and the numbers in texts."""

import csv
import io
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from helpers.lab import write
from rich.console import Console
from scipy.stats import norm

from ghor_lab import caught, figures, numbers, paper, quantities, report, trials
from ghor_lab.check import look_at, runs_in
from ghor_lab.config import NETWORKS, PAPER
from ghor_lab.numbers import Found
from ghor_lab.pools import plain, pool
from ghor_lab.quantities import ACCURACY, BEST, DRIFT, ERROR, LOSS
from ghor_lab.record import read, read_all
from ghor_lab.tables import Table, between, listed, number, spread
from ghor_lab.tasks import text as library

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "results"
CLAIM = "Without a second moment the reconstruction error is 2.0 times as large, at the learning rate 0.01."
FOLDERS = ["mnist", "caught", "fashion-mnist", "pendulum", "text"]


def pools(folder):
    return pool(read_all(folder)[0])[0]


# -- what is kept --------------------------------------------------------------------------------------------


def test_readme_and_docs_say_what_the_records_say():
    """Otherwise: ghor numbers README.md docs/*.md. Every template is used."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    used = {name for path in files for _, name, *_ in numbers.BLOCK.findall(path.read_text())}
    templates = {path.stem: path.read_text() for path in (RESULTS / "numbers").iterdir()}
    used |= {name for text in templates.values() for name in re.findall(r'import "([\w-]+)\.jinja"', text)}
    assert used == set(templates)
    changed, _ = numbers.write(files, RESULTS, check=True)
    assert changed == []


def test_the_tables_that_are_kept_are_those_of_the_records(tmp_path):
    """Otherwise: ghor report lab/results/... --tables-only --out lab/results."""
    for path in report.tables_only([RESULTS / name for name in FOLDERS], tmp_path):
        assert path.read_text() == (RESULTS / "tables" / path.name).read_text(), path.name


def test_every_record_that_is_kept_is_as_it_was_written():
    found = [each for path in runs_in([RESULTS]) for each in look_at(path).values()]
    assert len(found) > 600
    assert not [each.wrong for each in found if each.wrong]


# -- pools ---------------------------------------------------------------------------------------------------


def test_seeds_of_one_configuration_are_one_pool(tmp_path):
    """Threads change rounding only; another length, rate or start is another pool."""
    write(tmp_path, "mnist", "momentum", [0], [[1.0], [0.5]])
    write(tmp_path, "mnist", "momentum", [1], [[1.0], [0.7]], threads=2)
    write(tmp_path, "mnist", "momentum", [2], [[1.0], [0.6], [0.4]])
    write(tmp_path, "mnist", "momentum", [3], [[1.0], [0.5]], lr=1e-2)
    write(tmp_path, "mnist", "momentum", [4], [[1.0], [0.5]], start="authors")
    write(tmp_path, "mnist", "geometric-adam", [0], [[1.0]])
    found = {(p.title(), p.epochs): p.seeds for p in pools(tmp_path)}
    assert found == {
        ("Geometric Adam", 1): [0],
        ("Riemannian momentum, lr 0.001, 3 epochs", 3): [2],
        ("Riemannian momentum, lr 0.001, 2 epochs", 2): [0, 1],
        ("Riemannian momentum, lr 0.01", 2): [3],
        ("Riemannian momentum, authors' start, lr 0.001", 2): [4],
    }
    (p,) = [p for p in pools(tmp_path) if p.seeds == [0, 1]]
    np.testing.assert_array_equal(p.series("loss"), [[1.0, 1.0], [0.5, 0.7]])
    assert p.series("held_out") is None
    assert {q.optimizer for q in plain(pools(tmp_path))} == {"momentum"}  # one epoch counts caught runs


def test_a_record_of_before_is_one_of_now(tmp_path):
    """It leaves out fields that are usual, and has some that are gone."""
    path = write(tmp_path, "mnist", "momentum", [0], [[1.0], [0.5]])
    other = write(
        tmp_path, "mnist", "momentum", [1], [[1.0], [0.5]], network={"blocks": 16}, betas=[0.9, 0.99]
    )
    assert path != other
    assert [p.seeds for p in pools(tmp_path)] == [[0, 1]]
    run = read(path)
    run.header["config"]["compile"] = True
    assert [p.seeds for p in pool([run, read(other)])[0]] == [[0, 1]]
    assert pool([run])[0][0].unusual() == []


def test_what_is_left_out_is_said(tmp_path):
    a = write(tmp_path / "a", "mnist", "momentum", [0], [[1.0], [None]])
    write(tmp_path / "b", "mnist", "momentum", [0], [[1.0], [0.5]])
    empty = write(tmp_path / "c", "mnist", "gradient", [0], [[1.0]])
    empty.write_bytes(empty.read_bytes().splitlines(keepends=True)[0])
    runs = [run for name in "abc" for run in read_all(tmp_path / name)[0]]
    _, left = pool(runs)
    assert len(left) == 3
    assert any("has the same configuration and seeds" in line for line in left)
    assert any("not finite with seed 0" in line for line in left)
    assert any("has no whole epoch yet" in line for line in left)
    a.write_bytes(a.read_bytes()[:50])
    assert "has no whole line yet" in read_all(tmp_path)[1][0]


# -- quantities ----------------------------------------------------------------------------------------------


def test_quantities_by_hand(tmp_path):
    losses = [[0.9, 0.8], [0.1, 0.3], [0.2, 0.4]]
    write(tmp_path, "pendulum", "geometric-adam", [0, 1], losses)
    (p,) = pools(tmp_path)
    np.testing.assert_array_equal(LOSS.of(p), [0.2, 0.4])
    np.testing.assert_array_equal(BEST.of(p), [0.1, 0.3])
    values = {q.key: q.of(p) for q in quantities.COSTS}
    assert values["ad_ms"] == [3.0]
    assert values["step_ms"] == [1.0]
    assert values["share_percent"] == [25.0]
    assert values["seconds"] == [6.0]
    assert values["peak_gib"] == [0.5]
    assert values["state_total"] is None
    # 18 seconds for 2 seeds and 3 epochs, of the paper's 1000
    np.testing.assert_allclose(quantities.MINUTES.of(p), [18 / 60 / 2 / 3 * 1000] * 2)


def test_a_step_of_before_was_in_two_parts(tmp_path):
    path = write(tmp_path, "pendulum", "momentum", [0], [[1.0]])
    run = read(path)
    run.epochs[0]["ms"] = {"ad": 3.0, "direction": 1.5, "retraction": 0.5, "other": 0.0}
    ((p,), _) = pool([run])
    assert {q.key: q.of(p) for q in quantities.COSTS}["step_ms"] == [2.0]


def test_off_is_in_the_papers_deviations_at_its_length(tmp_path, monkeypatch):
    monkeypatch.setitem(paper.EPOCHS, "pendulum", 2)
    write(tmp_path, "pendulum", "momentum", [0, 1], [[1.0, 1.0], [0.405, 0.519]])
    write(tmp_path, "pendulum", "gradient", [0], [[1.0], [0.5], [0.4]])
    longer, p = sorted(pools(tmp_path), key=lambda p: -p.epochs)
    assert ERROR.off(p) == pytest.approx(0.057 / 0.057)  # the mean is 0.462, the paper's 0.405 +- 0.057
    assert ERROR.off(longer) is None
    assert ERROR.bar("pendulum", "momentum") == pytest.approx((0.405, 0.348, 0.462))
    assert DRIFT.bar("mnist", "momentum") == pytest.approx((math.sqrt(3.4e-4 * 4.8e-4), 3.4e-4, 4.8e-4))


def test_few_seeds_are_shown_one_by_one(tmp_path):
    assert LOSS.show(np.array([0.1, 0.25])) == "0.100, 0.250"
    assert LOSS.show(np.arange(5) / 10) == "0.200 ± 0.158"
    assert LOSS.show(np.array([math.nan])) == "not finite"
    assert LOSS.show(None) == "-"
    assert DRIFT.show(np.array([1e-7, 3.21e-7])) == "1.0e-7 to 3.2e-7"
    assert ACCURACY.paper("mnist", "momentum") == "62.73 ± 1.77"
    assert (number(6e-7, ".0e"), spread(0.5, None, ".1f"), between(1.0, 1.01, ".1f")) == (
        "6e-7",
        "0.5",
        "1.0",
    )
    assert listed([7, 0, 1, 2]) == "0-2, 7"


def test_the_paper_stands_beside_ours(tmp_path):
    write(tmp_path, "mnist", "geometric-adam", [0], [[1.0], [0.5]])
    write(tmp_path, "mnist", "muon", [0], [[1.0], [0.4]])
    made = quantities.table("MNIST", pools(tmp_path), (LOSS, ACCURACY))
    assert [row[:4] for row in made.rows] == [
        ["Geometric Adam", "paper", "500", "10"],
        ["Geometric Adam", "ghor", "2", "1"],
        ["Muon", "ghor", "2", "1"],
    ]
    assert made.paper == {0}
    assert made.rows[0][4:] == ["0.240 ± 0.014", "86.02 ± 0.57"]


def test_all_digits_are_in_the_file(tmp_path):
    write(tmp_path, "mnist", "momentum", [0], [[1.0], [0.123456789]])
    rows = list(
        csv.DictReader(
            io.StringIO(
                quantities.as_csv(
                    (p, quantities.OUTCOMES["mnist"] + quantities.COSTS) for p in pools(tmp_path)
                )
            )
        )
    )
    found = {row["quantity"]: row for row in rows}
    assert found["loss"]["mean"] == "0.123456789"
    assert found["loss"]["paper"] == "0.705"
    assert set(found) >= {"loss", "best", "accuracy", "drift", "ad_ms", "step_ms", "seconds"}


def test_cells_cannot_break_out_of_a_table():
    table = Table("t", ["a", "b"], [["x|y", "<b>"], ["`_*", "-"]])
    assert table.markdown().splitlines()[2:] == ["| x\\|y | &lt;b&gt; |", "| \\`\\_\\* | - |"]
    assert Table("t", ["a", "b"], [["x", "-"]]).filled().headings == ["a"]
    console = Console(file=io.StringIO(), width=40)
    console.print(Table("t", ["a", "b"], [["[red]x", "1"]]).rich(40))
    assert "[red]x" in console.file.getvalue()


# -- caught --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "n"), [(0, 1), (0, 13), (2, 13), (7, 52), (13, 13)])
def test_wilsons_interval(k, n):
    """Its ends are the shares at which k of n is just as far off as z deviations."""
    assert norm.ppf(0.975) == pytest.approx(caught.Z, rel=1e-15)
    low, high = caught.wilson(k, n)
    for p in (low, high):
        if 0 < p < 1:
            assert abs(k / n - p) == pytest.approx(caught.Z * math.sqrt(p * (1 - p) / n), rel=1e-12)
    assert (low == 0) == (k == 0)
    assert (high == 1) == (k == n)


def test_caught_runs_are_counted(tmp_path):
    """By the loss of the last step of the first epoch, by start and in all; null is above everything."""
    for seed, loss in enumerate([1.31, 1.33, None, 0.9]):
        write(tmp_path, "mnist", "geometric-adam", [seed], [[loss]])
    write(tmp_path, "mnist", "geometric-adam", [0], [[1.34]], start="authors")
    made = caught.table(pools(tmp_path))
    assert [(row[0], *row[2:5], row[6]) for row in made.rows] == [
        ("Geometric Adam", "4", "2", "50", "1-2"),
        ("Geometric Adam, authors' start", "1", "1", "100", "0"),
        ("Geometric Adam, all starts and frames", "5", "3", "60", "-"),
    ]
    assert caught.table([]) is None


# -- figures and the page ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Runs of every experiment, one of them not finished."""
    for optimizer in PAPER:
        write(tmp_path, "mnist", optimizer, [0], [[1.0], [0.9], [0.8]])
        if optimizer != "standard-adam":
            losses = [[1 / i] * 6 for i in range(1, 5)]
            write(tmp_path, "pendulum", optimizer, list(range(6)), losses, label="as run")
    path = write(tmp_path, "fashion-mnist", "momentum", [0], [[1.0], [0.9]])
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    return tmp_path


def test_the_page_needs_nothing_else(folder):
    """No address, no script; texts of records are escaped; every picture has its words."""
    write(folder, "mnist", "momentum", [7], [[1.0], [0.5]], label="<script>alert(1)</script> $x$")
    console = Console(file=io.StringIO(), width=120)
    page = report.report([folder], None, console)
    html = page.read_text()
    assert not re.search(r"<script|https?://|src=", html)
    assert "&lt;script&gt;" in html
    assert len(re.findall(r'role="img" aria-label="[^"]+"', html)) == len(
        list((page.parent / "figures").iterdir())
    )
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    for name in ("MNIST", "Pendulum", "Fashion-MNIST", "Cost", "Methods", "Runs"):
        assert name in html
    text = console.file.getvalue()
    assert "●" in text
    assert str(page) in text
    for svg in (page.parent / "figures").iterdir():
        ET.parse(svg)
    rows = list(csv.DictReader(io.StringIO((page.parent / "tables" / "runs.csv").read_text())))
    assert len(rows) == 11
    assert {row["epochs"] for row in rows} == {"3 of 3", "4 of 4", "1 of 2", "2 of 2"}


def test_the_first_sentence(tmp_path, monkeypatch):
    for optimizer, end in (
        ("geometric-adam", 0.3),
        ("scalar-moment-adam", 0.3),
        ("momentum", 0.6),
        ("gradient", 0.6),
    ):
        write(tmp_path, "pendulum", optimizer, [0, 1], [[1.0, 1.0], [end, end]], lr=1e-2)
    words = report.words({"pendulum": pools(tmp_path)})
    assert words[0] == CLAIM
    assert words[1].startswith("No weight was ever further than 1.0e-7 from its manifold")
    assert "chance" in words[2]
    monkeypatch.setitem(paper.EPOCHS, "pendulum", 2)
    assert report.words({"pendulum": pools(tmp_path)})[0].startswith("2 of 4 results at the paper's number")
    assert report.words({}) == []


def test_an_experiment_of_ones_own_has_a_report(tmp_path, monkeypatch):
    """Without a word about it in the report: what every run records, and nothing of the paper's."""
    monkeypatch.setitem(NETWORKS, "own", {})
    run = read(write(tmp_path, "mnist", "momentum", [0], [[1.0], [0.5]]))
    run.header["config"]["experiment"] = "own"
    found, _ = pool([run])
    claim = "Riemannian momentum has the smallest training loss, 0.500, after 2 epochs."
    assert report.words({"own": found})[0] == claim
    section, *_ = report.sections(found, [])
    assert section.tables[0].rows == [["Riemannian momentum", "ghor", "2", "1", "0.500", "0.500", "1.0e-7"]]
    assert report.letters(found, 80)[-1] == "final loss: ● a run"


def test_curves_are_drawn_from_records(folder):
    """A line for each run, or the seeds and their mean; the paper's bars; the same bytes again."""
    for panels in (False, True):
        same = [p for p in pools(folder) if p.experiment == "pendulum"]
        drawn = figures.curves("x", "Pendulum", ERROR, same, panels=panels)
        assert drawn.svg == figures.curves("x", "Pendulum", ERROR, same, panels=panels).svg
        assert "Thin lines: seeds; thick: their mean." in drawn.caption
        assert "Geometric Adam, as run from 1 to 0.25 in 4 epochs" in drawn.alt
    inline = drawn.inline()
    assert "xmlns" not in inline
    assert figures.INK not in inline
    assert figures.curves("x", "y", ACCURACY, []) is None
    assert list(figures.selected(3)) == [1, 2, 3]
    assert figures.selected(1000)[-1] == 1000
    assert len(figures.selected(1000)) <= figures.POINTS


def test_angles_undo_the_lift():
    from ghor_lab.tasks.pendulum import lift, torch

    angle = torch.tensor([[0.5, 1.0], [3.0, -2.0], [6.0, 0.1]], dtype=torch.float64)
    np.testing.assert_allclose(np.stack(figures.angles(lift(angle).numpy()), -1), angle, atol=1e-14)


# -- the language model --------------------------------------------------------------------------------------


def trial(folder, optimizer, lr, losses, seed=0, ms=100.0, every=50, **more):
    more |= {"data": {"digest": "d", "bytes": [1e6, 1e5]}, "lr": lr, "every": every, "batch_size": 8}
    line = lambda loss: {"held_out": loss, "step_cpu_ms": ms, "drift": None}  # noqa: E731
    write(folder, "text", optimizer, [seed], [[x] for x in losses], line, **more)


def test_the_best_of_the_language_model_by_hand(tmp_path):
    for lr, end in ((1e-3, 2.3), (3e-3, 2.0), (6e-3, 2.2), (1e-1, 3.0)):
        trial(tmp_path, "adamw", lr, [3.0, 2.5, end], warmup=5)
    trial(tmp_path, "adamw", 3e-3, [3.0, 2.5, 2.2], seed=1, warmup=5)
    trial(tmp_path, "adamw", 3e-3, [3.0, 2.5, 2.6], warmup=0)
    trial(tmp_path, "rows-adam", 3e-3, [2.5, 2.0, 1.5], ms=200.0, warmup=5)
    trial(tmp_path, "rows-adam", 3e-3, [2.6, 2.4, 2.2], ms=200.0, warmup=5, every=25)
    (book,) = trials.books(read_all(tmp_path)[0])
    adamw, rows = book.rows.values()
    assert (adamw.title(), adamw.seeds, book.steps, adamw.best.rate) == ("AdamW", [0, 1], 150, 3e-3)
    assert adamw.mean == pytest.approx(2.1)
    assert [t.rate for t in adamw.around] == [3e-3, 6e-3]
    assert rows.equal_time.steps == 75  # at twice the time of a step
    assert adamw.equal_time is adamw.best
    found = {q.key: q.show(q.of(adamw)) for q in trials.QUANTITIES}
    assert (found["held_out"], found["over_rates"], found["equal_time"]) == (
        "2.100 ± 0.141",
        "+0.20",
        "2.000",
    )
    lines = csv.DictReader(io.StringIO(quantities.as_csv([(adamw, trials.QUANTITIES)])))
    assert {x["quantity"]: x["sd"] for x in lines}["held_out"].startswith("0.141")
    for draw in (figures.language_curves, figures.language_rates):
        assert "Adam in g^hor, unit rows" in draw(book, "text").alt


# -- numbers in texts ----------------------------------------------------------------------------------------

TEMPLATE = 'A loss of {{ run("mnist", "momentum").loss(3) }}.\n'
TEXT = "Before.\n\n<!-- numbers: one -->\n\nA loss of 9.\n\n<!-- /numbers -->\nAfter.\n"


@pytest.fixture
def text(tmp_path):
    write(tmp_path / "results" / "mnist", "mnist", "momentum", [0], [[1.0], [0.9], [0.8]])
    (tmp_path / "results" / "numbers").mkdir()
    (tmp_path / "results" / "numbers" / "one.jinja").write_text(TEMPLATE)
    path = tmp_path / "text.md"
    path.write_text(TEXT)
    return path


def test_numbers_are_written_and_changes_found(text):
    results = text.parent / "results"
    assert numbers.write([text], results, check=True) == ([f"{text}, line 3"], 1)
    assert text.read_text() == TEXT
    numbers.write([text], results)
    assert text.read_text() == TEXT.replace("of 9.", "of 0.800.")
    assert numbers.write([text], results, check=True) == ([], 1)
    write(results / "mnist", "mnist", "momentum", [0], [[1.0], [0.9], [0.5]])
    assert numbers.write([text], results, check=True)[0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<!-- /numbers -->", "", "does not begin with"),
        (": one", ": two", "line 3: there is no .*two.jinja; run it in the clone, or name .* with --results"),
        ("momentum", "gradient", "line 3: .* has no record of gradient, seed 0"),
        ("loss(3)", "nothing(3)", "line 3: .*nothing"),
        ("loss(3)", "loss(4)", "line 3: .* has 3 epochs, there is no 4"),
        ('m")', 'm", epochs=9)', "has no record of momentum, seed 0, label None, of 9 epochs or more"),
        ('run("mnist", "momentum").loss(3)', 'text("mnist")', "has no finished run of the language model"),
    ],
)
def test_what_cannot_be_written_is_said(text, old, new, message):
    text.write_text(TEXT.replace(old, new))
    assert old in TEXT + TEMPLATE
    (text.parent / "results" / "numbers" / "one.jinja").write_text(TEMPLATE.replace(old, new))
    with pytest.raises(ValueError, match=message):
        numbers.write([text], text.parent / "results")


def test_a_run_in_numbers(tmp_path, monkeypatch):
    monkeypatch.setitem(paper.EPOCHS, "mnist", 3)
    found = Found(read(write(tmp_path, "mnist", "momentum", [0], [[1.0], [0.69], [0.735]])))
    assert (found.loss(), found.loss(2), found.off()) == ("0.735", "0.690", "+2.0")
    assert (found.accuracy(digits=2), found.drift()) == ("80.00", "1.0e-7")
    assert found.range("loss", 2, ".2f") == "0.69 to 0.73"
    assert Found(read(write(tmp_path, "mnist", "standard-adam", [0], [[None]]))).drift() == "-"
    assert numbers.of_paper("mnist", "momentum") == "0.705 ± 0.015"
    assert numbers.of_paper("mnist", "geometric-adam", "drift") == "8.5e-3 to 9.0e-3"
    assert numbers.authors("loss", "gradient", 400) == "0.736"
    assert library.HELD_OUT == 16  # of 256: the documentation says it
