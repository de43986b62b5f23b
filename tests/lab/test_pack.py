"""Packed records: the same lines, the same report; damage is found."""

import shutil

import pytest
from runs import forks, the_record, undisturbed

from ghor_lab import check, pack, record, report
from ghor_lab.record import Damaged

COMMAND = (
    *("run", "pendulum", "-o", "geometric-adam", "--seeds", "0-1", "--batch-size", "5050", "--no-compile"),
    *(
        "--set",
        "encoder_layers=2",
        "--set",
        "decoder_layers=2",
        "--set",
        "decoder_output_layers=2",
        "--epochs",
        "3",
    ),
)


@pytest.fixture
def runs(tmp_path):
    shutil.copytree(undisturbed(*COMMAND), tmp_path / "runs")
    return tmp_path / "runs"


def packed(folder):
    (path,) = folder.glob("*.run.xz")
    return path


def test_the_very_lines_come_back(runs):
    path = the_record(runs)
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines(keepends=True)[2][:20])  # a run under way
    (made,) = pack.pack_all([runs], None)
    assert b"".join(map(record.encode, pack.unpacked(made))) == whole
    run, before = pack.load(made), record.read(path)
    assert (run.header, run.epochs, run.others) == (before.header, before.epochs, before.others)
    assert (run.finished, run.epochs_asked) == (True, 3)


def test_lines_between_epochs_and_epochs_of_another_form_stay_where_they_are(tmp_path):
    lines = [
        {"kind": "run", "format": 1, "config": {"epochs": 2}, "x": 0.1},
        {"kind": "epoch", "epoch": 1, "loss": [0.25, None], "drift": None, "ms": {"ad": 1.5}},
        {"kind": "resumed", "epoch": 1, "epochs": 3},
        {"kind": "epoch", "epoch": 2, "loss": [1e-9, 1.0], "drift": [1], "ms": {"ad": 2, "other": []}},
        {"kind": "epoch", "epoch": 3, "loss": [1.0, 2], "drift": [], "ms": {}},
        {"kind": "end", "epochs": 3},
    ]
    for count in range(1, len(lines) + 1):
        path = tmp_path / "r.jsonl"
        path.write_bytes(b"".join(map(record.encode, lines[:count])))
        pack.pack(path, tmp_path / "r.run.xz")
        assert b"".join(map(record.encode, pack.unpacked(tmp_path / "r.run.xz"))) == path.read_bytes()


def test_every_changed_bit_and_every_cut_is_found(runs):
    (path,) = pack.pack_all([runs], None)
    whole = path.read_bytes()
    for i in range(0, len(whole), 29):
        for damaged in (whole[:i], whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(Damaged, match=r"damaged or cut short .*put back a copy"):
                pack.load(path)


def test_report_and_check_read_packed_records(runs, tmp_path):
    made = tmp_path / "packed"
    text = forks().run("pack", runs, "--out", made)
    assert text.split() == [str(packed(made))]
    reports = {}
    for folder in (runs, made):
        forks().run("report", folder, "--out", tmp_path / "report")
        page = (tmp_path / "report" / "report.html").read_text()
        reports[folder] = page.replace(".run.xz", ".jsonl")
        csv = (tmp_path / "report" / "tables" / "pendulum-outcomes.csv").read_text()
        assert len(csv.splitlines()) == 3
    assert len(reports[runs]) == pytest.approx(len(reports[made]), rel=0.01)
    assert "ok" in forks().run("check", made)
    assert check.runs_in([packed(made)]) == [packed(made)]
    packed(made).write_bytes(packed(made).read_bytes()[:-5])
    assert "damaged or cut short" in forks().run("check", made, code=1)
    assert "damaged or cut short" in forks().run("report", made, "--out", tmp_path / "report", code=1)


def test_a_run_that_went_on_after_it_was_packed_counts_once(runs):
    """As `ghor run --epochs` makes it longer, beside what was packed before."""
    path = the_record(runs)
    whole = path.read_bytes()
    cut = b"".join(whole.splitlines(keepends=True)[:2])  # the first epoch
    path.write_bytes(cut)
    pack.pack_all([runs], None)
    path.write_bytes(whole)
    found, _ = report.read_all([runs])
    assert [len(run.epochs) for run in found] == [3]


def test_what_cannot_be_packed_is_refused(runs, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "log.jsonl").write_text('{"a": 1}\n')  # of another program
    for folder in ("other", "nowhere"):
        assert "error" in forks().run("pack", tmp_path / folder, code=2)
    path = the_record(runs)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"pendulum", b"pendulun", 1))
    assert "line 1: its checksum is wrong" in forks().run("pack", runs, code=1)
    path.write_bytes(b'{"kind":"run"')
    assert "no whole line" in forks().run("pack", runs, code=2)
    assert not list(runs.glob("*.run.xz"))
    path.write_bytes(whole)
    assert "two records" in forks().run("pack", runs, runs, "--out", tmp_path / "made", code=2)
