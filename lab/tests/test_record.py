"""Records and checkpoints as files: what they say comes back, and no damage goes unnoticed."""

import json
import math
import os
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import TIMES, facts, strip, the_record
from synthetic import write

from ghor_lab import checkpoint
from ghor_lab.check import runs_in
from ghor_lab.files import below, clean, store
from ghor_lab.pack import pack_all
from ghor_lab.record import Damaged, append, decode, encode, read
from ghor_lab.report import read_all

pytestmark = pytest.mark.usefixtures("as_before")


# -- lines ---------------------------------------------------------------------------------------------------


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(width=32) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=9,
)


def finite(value):
    """What a line makes of numbers that are not finite."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@given(values)
def test_a_line_gives_its_values_back(value):
    """Numbers of float32 exactly, to the last bit."""
    line = encode({"kind": "epoch", "value": value})
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    back = decode(line)["value"]

    def single(x):
        return torch.tensor(x).item() if isinstance(x, float) else x

    assert json.dumps(rounded(back, single)) == json.dumps(rounded(finite(value), single))


def rounded(value, how):
    if isinstance(value, dict):
        return {k: rounded(v, how) for k, v in value.items()}
    return [rounded(v, how) for v in value] if isinstance(value, list) else how(value)


@given(st.data())
def test_no_flipped_bit_goes_unnoticed(data):
    line = encode({"kind": "epoch", "epoch": 3, "loss": [0.123456789, None], "text": "a\u00e4"})
    at = data.draw(st.integers(0, 8 * len(line) - 1))
    changed = bytearray(line)
    changed[at // 8] ^= 1 << at % 8
    if changed[:-1] == line[:-1]:  # the end of the line: it is half written then
        assert not changed.endswith(b"\n")
    with pytest.raises(ValueError, match="checksum"):
        decode(bytes(changed))


# -- records -------------------------------------------------------------------------------------------------


def test_a_record_can_be_read_at_every_moment(finished, tmp_path):
    """Every prefix of it gives the lines that are whole."""
    raw, path = the_record(finished).read_bytes(), tmp_path / "r.jsonl"
    cuts = {i + d for i, c in enumerate(raw) if c == ord("\n") for d in (-1, 0, 1, 2)} | {0, 1, 500, len(raw)}
    for cut in sorted(c for c in cuts if c <= len(raw)):
        path.write_bytes(raw[:cut])
        run, whole = read(path), raw[:cut].count(b"\n")
        assert (run is None) == (whole == 0)
        if run is not None:
            assert 1 + len(run.epochs) + len(run.others) == whole
            assert run.size == raw[:cut].rfind(b"\n") + 1
            assert run.finished == (cut == len(raw))


def test_a_flipped_bit_in_a_record_is_found_or_cuts_the_last_line(finished, tmp_path):
    """Never other values than those that were written."""
    raw, path, rng = the_record(finished).read_bytes(), tmp_path / "r.jsonl", random.Random(0)
    lines = facts(the_record(finished))
    for at in [*(rng.randrange(len(raw)) for _ in range(100)), len(raw) - 1]:
        changed = bytearray(raw)
        changed[at] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        if at < len(raw) - 1:
            number = raw[:at].count(b"\n") + 1
            with pytest.raises(Damaged, match=rf"r.jsonl, line {number}: its checksum is wrong.*--restart"):
                read(path)
        else:
            assert [strip(line, TIMES) for line in read(path).epochs] == lines[1:3]


def test_lines_out_of_order_are_damage(finished, tmp_path):
    lines, path = the_record(finished).read_bytes().splitlines(keepends=True), tmp_path / "r.jsonl"
    path.write_bytes(b"".join([lines[0], lines[2]]))
    with pytest.raises(Damaged, match="line 2: epoch 2 after epoch 0"):
        read(path)
    path.write_bytes(lines[1])
    with pytest.raises(Damaged, match="not the header of a run of format 1"):
        read(path)


def test_appending_cuts_a_half_written_line(tmp_path):
    path = tmp_path / "r.jsonl"
    size = append(path, {"kind": "run", "format": 1}, 0)
    with path.open("ab") as stream:
        stream.write(b'{"kind":"epo')
    assert read(path).size == size
    end = append(path, {"kind": "epoch", "epoch": 1}, size)
    assert path.stat().st_size == end
    assert len(read(path).epochs) == 1


def test_a_line_that_cannot_be_written_leaves_the_record_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    size = append(path, {"kind": "run", "format": 1}, 0)
    before = path.read_bytes()

    def fsync(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space") as caught:
        append(path, {"kind": "epoch", "epoch": 1}, size)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == before
    with pytest.raises(OSError, match="No space") as caught:
        store(b"x", tmp_path / "file")
    assert caught.value.filename == str(tmp_path / "file")
    assert [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]


def test_a_record_that_became_shorter_is_not_filled_with_zeros(tmp_path):
    path = tmp_path / "r.jsonl"
    size = append(path, {"kind": "run", "format": 1}, 0)
    path.write_bytes(b"")
    with pytest.raises(Damaged, match=f"shorter than the {size} bytes"):
        append(path, {"kind": "epoch", "epoch": 1}, size)


def test_a_link_to_a_file_stays_one(tmp_path):
    (tmp_path / "there").mkdir()
    there, link = tmp_path / "there" / "a.ckpt", tmp_path / "b.ckpt"
    link.symlink_to(there)
    for content in (b"x", b"y"):
        store(content, link)
        assert (link.is_symlink(), there.read_bytes()) == (True, content)
    (tmp_path / "there" / ".a.ckpt.x1.part").touch()
    clean(link)
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["a.ckpt"]


def test_folders_that_are_links_are_entered_once(tmp_path):
    """By report, check and pack; those that lead back or to a folder beside, and folders with the name of a
    record, are no files."""
    root, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    first, second = (write(f, "mnist", "momentum", [i], 2) for i, f in enumerate((root / "own", elsewhere)))
    for name, to in (("disk", elsewhere), ("latest", root / "own"), ("own/up", root)):
        (root / name).symlink_to(to)
    (root / "folder.jsonl").mkdir()
    linked = root / "disk" / second.name
    assert below(root, ".jsonl") == runs_in([root]) == [linked, first]
    assert [run.path for run in read_all([root])[0]] == [linked, first]
    assert pack_all([root], None) == [path.with_name("records.run.xz") for path in (linked, first)]


def test_unfinished_files_of_one_name_are_removed(tmp_path):
    for name in (".a.ckpt.x1.part", ".a.ckpt.x2.part", ".b.ckpt.x1.part", "a.ckpt"):
        (tmp_path / name).touch()
    clean(tmp_path / "a.ckpt")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".b.ckpt.x1.part", "a.ckpt"]


# -- checkpoints ---------------------------------------------------------------------------------------------


def test_a_checkpoint_gives_its_values_back(tmp_path):
    values = {"name": "x", "epoch": 3, "model": {"w": torch.randn(5, 3)}, "line": {"loss": [0.1, None]}}
    checkpoint.save(values, tmp_path / "a.ckpt")
    back = checkpoint.load(tmp_path / "a.ckpt")
    assert torch.equal(back.pop("model")["w"], values.pop("model")["w"])
    assert back == values
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_change_of_a_checkpoint_goes_unnoticed(tmp_path, data):
    """A flipped bit anywhere, or an end that is missing or too much."""
    path = tmp_path / "a.ckpt"
    checkpoint.save({"w": torch.arange(9.0)}, path)
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        raw[data.draw(st.integers(0, len(raw) - 1) | st.integers(0, 90))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        raw = data.draw(st.sampled_from([raw + b"x", raw[: data.draw(st.integers(0, len(raw) - 1))]]))
    path.write_bytes(raw)
    with pytest.raises(Damaged, match=rf"a.ckpt is damaged \({len(raw)} bytes.*--restart"):
        checkpoint.load(path)
