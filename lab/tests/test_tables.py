"""Tables of a report: the committed ones are of the committed records, and rows say whose numbers they
have."""

import csv
import math
from pathlib import Path

import pytest
from synthetic import STATE, rows, write
from typer.testing import CliRunner

from ghor_lab import headline, record, tables
from ghor_lab.cli import app
from ghor_lab.pool import pool
from ghor_lab.report import write_tables

ROOT = Path(__file__).parents[2]
FOLDERS = ("mnist", "caught", "fashion-mnist", "pendulum")
AGAIN = f"ghor report {' '.join(f'results/{name}' for name in FOLDERS)} --out results --tables-only"


def cells(path):
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.reader(stream))


def same(a, b):
    """Texts, or numbers up to the rounding of sums."""
    try:
        return a == b or math.isclose(float(a), float(b), rel_tol=1e-9)
    except ValueError:
        return False


@pytest.mark.skipif(not (ROOT / "lab" / "results").is_dir(), reason="not in a clone")
def test_the_committed_tables_are_of_the_committed_records(tmp_path):
    made, _ = write_tables([ROOT / "lab" / "results" / name for name in FOLDERS], tmp_path)
    kept = ROOT / "lab" / "results" / "tables"
    assert {path.name for path in kept.iterdir()} == {path.name for path in made}, AGAIN
    for path in made:
        new, old = cells(path), cells(kept / path.name)
        assert [len(row) for row in new] == [len(row) for row in old], f"{path.name} is out of date: {AGAIN}"
        differ = [
            (a, b) for x, y in zip(new, old, strict=True) for a, b in zip(x, y, strict=True) if not same(a, b)
        ]
        assert not differ, f"{path.name} is out of date: {AGAIN}"
    assert {path.name for path in tmp_path.iterdir()} == {"tables"}  # nothing was drawn


def test_one_epoch_is_one_epoch(tmp_path):
    runs = [record.read(write(tmp_path, "mnist", "momentum", [n], n, name=f"{n}")) for n in (1, 3)]
    pools, _ = pool(runs)
    assert {p.title() for p in pools} == {f"Riemannian momentum, {text}" for text in ("1 epoch", "3 epochs")}
    assert {p.title(epochs=False) for p in pools} == {"Riemannian momentum"}
    assert {headline._lengths([(p, [0.5])]) for p in pools} == {"1 x 1 epoch", "1 x 3 epochs"}


def test_the_authors_numbers_are_not_of_a_variant(tmp_path):
    write(tmp_path, "mnist", "momentum", [0], 3, label="geodesic")
    write(tmp_path, "mnist", "gradient", [0], 3, done=0)
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "out"), "--tables-only"])
    assert f"{tmp_path / 'out' / 'tables' / 'mnist-equal-epochs.csv'}\n" in done.stdout
    assert "has no whole epoch yet: left out" in done.stderr
    found = [(row["configuration"], row["source"]) for row in rows(tmp_path / "out", "mnist-equal-epochs")]
    assert found == [
        ("Riemannian momentum", "authors, one run"),
        ("Riemannian momentum, geodesic", "ghor, seed 0"),
    ]


def test_states_that_are_written_with_other_digits_are_one(tmp_path):
    runs = []
    for seed, mib in enumerate((4.2595367431640625, 4.25953674)):
        runs.append(
            record.read(write(tmp_path, "mnist", "momentum", [seed], 2, name=f"{seed}", label=f"{seed}"))
        )
        runs[-1].header["state"] = {**STATE, "mib": mib}
    assert [row.cells[2] for row in tables.state(pool(runs)[0]).rows] == ["paper", "ghor"]
