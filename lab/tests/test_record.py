"""Records and checkpoints: lines with checksums, half-written ends, damage, packing, links."""

import json
import lzma
import math
import os
import shutil

import pytest
import torch
from helpers.lab import write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ghor_lab import checkpoint
from ghor_lab.files import below, clean, store
from ghor_lab.record import Damaged, append, decode, encode, load, pack, read, read_all

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(width=32) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=9,
)


def mapped(value, how):
    if isinstance(value, dict):
        return {k: mapped(v, how) for k, v in value.items()}
    return [mapped(v, how) for v in value] if isinstance(value, list) else how(value)


@given(values)
def test_a_line_gives_its_values_back(value):
    """Numbers of float32 exactly; those that are not finite become null."""
    line = encode({"kind": "epoch", "value": value})
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1

    def single(x):
        if isinstance(x, float):
            return torch.tensor(x).item() if math.isfinite(x) else None
        return x

    assert json.dumps(mapped(decode(line)["value"], single)) == json.dumps(mapped(value, single))


@given(st.data())
def test_no_flipped_bit_goes_unnoticed(data):
    line = encode({"kind": "epoch", "epoch": 3, "loss": [0.123456789, None], "text": "aä"})
    at = data.draw(st.integers(0, 8 * len(line) - 1))
    changed = bytearray(line)
    changed[at // 8] ^= 1 << at % 8
    if changed[:-1] == line[:-1]:  # the end of the line: it is half written then
        assert not changed.endswith(b"\n")
    with pytest.raises(ValueError, match="checksum"):
        decode(bytes(changed))


def test_a_record_can_be_read_at_every_moment(finished, tmp_path):
    """Every prefix of it gives the lines that are whole."""
    raw, path = finished.read_bytes(), tmp_path / "r.jsonl"
    cuts = {i + d for i, c in enumerate(raw) if c == ord("\n") for d in (-1, 0, 1, 2)} | {0, 1, 500, len(raw)}
    for cut in sorted(c for c in cuts if c <= len(raw)):
        path.write_bytes(raw[:cut])
        run, whole = read(path), raw[:cut].count(b"\n")
        assert (run is None) == (whole == 0)
        if run is not None:
            assert 1 + len(run.epochs) + len(run.others) == whole
            assert run.raw == raw[: raw[:cut].rfind(b"\n") + 1]
            assert run.finished == (cut == len(raw))


def test_lines_out_of_order_are_damage(finished, tmp_path):
    lines, path = finished.read_bytes().splitlines(keepends=True), tmp_path / "r.jsonl"
    path.write_bytes(b"".join([lines[0], lines[2]]))
    with pytest.raises(Damaged, match="line 2: epoch 2 after epoch 0"):
        read(path)
    path.write_bytes(lines[1])
    with pytest.raises(Damaged, match="line 1 is not the header of a run of format 1"):
        read(path)


def test_appending_cuts_a_half_written_line(tmp_path):
    path = tmp_path / "r.jsonl"
    size = append(path, {"kind": "run", "format": 1}, 0)
    with path.open("ab") as stream:
        stream.write(b'{"kind":"epo')
    assert len(read(path).raw) == size
    end = append(path, {"kind": "epoch", "epoch": 1}, size)
    assert path.stat().st_size == end
    path.write_bytes(b"")
    with pytest.raises(Damaged, match=f"shorter than the {end} bytes"):
        append(path, {"kind": "epoch", "epoch": 2}, end)


# -- packing -------------------------------------------------------------------------------------------------


def test_packed_records_are_the_records(finished, tmp_path):
    """Every line, exactly; a run that went on takes the place of its shorter self, and others stay."""
    shutil.copy(finished, tmp_path)
    other = write(tmp_path, "mnist", "momentum", [0], [[1.0], [None]])
    whole = other.read_bytes()
    other.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    packed = pack(tmp_path)
    assert packed == tmp_path / "records.jsonl.xz"
    other.write_bytes(whole)
    (tmp_path / finished.name).unlink()
    assert pack(tmp_path) == packed
    found = {run.path: run.raw for run in load(packed)}
    assert found == {packed / path.name: path.read_bytes() for path in (finished, other)}
    assert lzma.decompress(packed.read_bytes()) == b"".join(found.values())
    runs, left = read_all(tmp_path)  # what is there twice counts once
    assert (len(runs), left) == (2, [])
    assert pack(tmp_path, tmp_path / "out").parent == tmp_path / "out"


def test_what_cannot_be_packed_or_read(finished, tmp_path):
    with pytest.raises(ValueError, match=r"has no records \(\*\.jsonl\)"):
        pack(tmp_path)
    with pytest.raises(ValueError, match="has no records"):
        read_all(tmp_path)
    (tmp_path / "other.jsonl").write_text('{"of": "another program"}\n')
    shutil.copy(finished, tmp_path)
    packed = pack(tmp_path)
    raw = packed.read_bytes()
    for damaged in (raw[:-1], raw[:40], raw[:200] + b"x" + raw[201:], b""):
        packed.write_bytes(damaged)
        with pytest.raises(Damaged, match=r"records\.jsonl\.xz is damaged or cut short"):
            load(packed)
    packed.write_bytes(raw)
    lines = finished.read_bytes().splitlines(keepends=True)
    header = {**decode(lines[0]), "started": "another day"}
    (tmp_path / finished.name).write_bytes(encode(header) + b"".join(lines[1:]))
    with pytest.raises(ValueError, match=r"begun at .* and at another day\. With --out"):
        pack(tmp_path)


# -- files ---------------------------------------------------------------------------------------------------


def test_folders_that_are_links_are_entered_once(tmp_path):
    """Those that lead back or to a folder beside, and folders with the name of a record, are no files."""
    root, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    first = write(root / "own", "mnist", "momentum", [0], [[1.0]])
    second = write(elsewhere, "mnist", "momentum", [1], [[1.0]])
    for name, to in (("disk", elsewhere), ("latest", root / "own"), ("own/up", root)):
        (root / name).symlink_to(to)
    (root / "folder.jsonl").mkdir()
    assert sorted(path.name for path in below(root, ".jsonl")) == sorted([first.name, second.name])
    assert len(read_all(root)[0]) == 2


def test_a_write_that_fails_leaves_nothing_and_names_the_file(tmp_path, monkeypatch):
    def fsync(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space") as error:
        store(b"x", tmp_path / "file")
    assert error.value.filename == str(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_unfinished_files_of_one_name_are_removed(tmp_path):
    for name in (".a.ckpt.x1.part", ".a.ckpt.x2.part", ".b.ckpt.x1.part", "a.ckpt"):
        (tmp_path / name).touch()
    clean(tmp_path / "a.ckpt")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".b.ckpt.x1.part", "a.ckpt"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_change_of_a_checkpoint_goes_unnoticed(tmp_path, data):
    """A flipped bit anywhere, or an end that is missing or too much."""
    path = tmp_path / "a.ckpt"
    checkpoint.save({"w": torch.arange(9.0)}, path)
    assert torch.equal(checkpoint.load(path)["w"], torch.arange(9.0))
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        raw[data.draw(st.integers(0, len(raw) - 1) | st.integers(0, 90))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        raw = data.draw(st.sampled_from([raw + b"x", raw[: data.draw(st.integers(0, len(raw) - 1))]]))
    path.write_bytes(raw)
    with pytest.raises(Damaged, match=rf"a.ckpt is damaged \({len(raw)} bytes.*--restart"):
        checkpoint.load(path)
