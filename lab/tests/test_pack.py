"""Packed records: the same lines, the same report; damage is found."""

import json
import lzma
import re
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
    assert b"".join(map(record.encode, pack.unpacked(made)[path.name])) == whole
    (run,), before = pack.load(made), record.read(path)
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
        path = tmp_path / "some" / "r.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"".join(map(record.encode, lines[:count])))
        (made,) = pack.pack_all([path.parent], tmp_path)
        assert b"".join(map(record.encode, pack.unpacked(made)["r.jsonl"])) == path.read_bytes()


def test_a_folder_is_one_file_and_what_it_has_stays(runs, tmp_path):
    """Records packed later are added; the sources may be gone by then; packed files are sources too."""
    path = the_record(runs)
    first, *rest = record.lines(path)[0]
    kept = tmp_path / "kept"
    pack.pack_all([runs], kept)
    path.rename(path.with_name("first.jsonl"))
    path.with_name("second.jsonl").write_bytes(
        b"".join(map(record.encode, [first | {"name": "second"}, *rest]))
    )
    (made,) = pack.pack_all([runs], kept)
    assert made.name == "records.run.xz"
    assert sorted(pack.unpacked(made)) == sorted([path.name, "first.jsonl", "second.jsonl"])
    (again,) = pack.pack_all([kept], tmp_path / "again")
    assert again.read_bytes() == made.read_bytes()
    text = forks().run("check", made, code=1)  # one was renamed: it belongs to another
    assert "3 runs, 1 with errors" in text
    assert f"belongs to the run {path.stem}" in text


def test_a_single_run_of_the_first_format_is_read(runs, tmp_path):
    """As version 0.1.0 packed it: one file for each run, named after it."""
    path = the_record(runs)
    lines = record.lines(path)[0]
    others = [[i, line] for i, line in enumerate(lines) if line["kind"] != "epoch"]
    epochs = pack.columns([line for line in lines if line["kind"] == "epoch"])
    content = {"packed": 1, "lines": len(lines), "others": others, "epochs": epochs}
    old = tmp_path / "old" / f"{path.stem}.run.xz"
    old.parent.mkdir()
    old.write_bytes(lzma.compress(json.dumps(content).encode(), check=lzma.CHECK_SHA256))
    assert pack.unpacked(old) == {path.name: lines}
    assert "ok" in forks().run("check", old.parent)
    (made,) = pack.pack_all([old.parent], tmp_path / "new")
    assert pack.unpacked(made) == {path.name: lines}


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
        reports[folder] = (tmp_path / "report" / "report.html").read_text()
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


def test_a_run_that_began_anew_after_it_was_packed_is_another(runs):
    """The packed one stays, and the message says which is which and where to put the new one."""
    (kept,) = pack.pack_all([runs], None)
    before, path = kept.read_bytes(), the_record(runs)
    first, *rest = record.lines(path)[0]
    again = first | {"started": "2027-01-01T00:00:00+00:00"}
    path.write_bytes(b"".join(map(record.encode, [again, *rest])))
    says = f"{path.name}: begun at {first['started']} and at {again['started']}. With --out"
    with pytest.raises(ValueError, match=re.escape(says)):
        pack.pack_all([runs], None)
    assert kept.read_bytes() == before


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
    first, *rest = record.lines(path)[0]
    (tmp_path / "namesake").mkdir()
    changed = first | {"config": first["config"] | {"lr": 0.5}}
    (tmp_path / "namesake" / path.name).write_bytes(b"".join(map(record.encode, [changed, *rest])))
    text = forks().run("pack", runs, tmp_path / "namesake", "--out", tmp_path / "made", code=2)
    assert "two records" in text
    assert not (tmp_path / "made").exists()
