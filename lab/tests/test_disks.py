"""Full disks and damaged files: found before anything is written, nothing is silently wrong, and there is a
way out."""

import shutil
import subprocess

import pytest
from faults import THREE, TWO, copied, flip, same
from runs import MNIST, PENDULUM, facts, forks, make_mnist, names, the_record, undisturbed

# -- disks ---------------------------------------------------------------------------------------------------


def fails(out, argv=TWO, **fault):
    undisturbed(*TWO)
    text = forks().run(*argv, "--out", out, fault=fault, code=1)
    assert "Finished epochs are safe" in text
    return text


@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("full_at_record", 1),
        ("full_at_record", 2),
        ("full_at_record", 4),
        *(("full_at_checkpoint", k) for k in (1, 2)),
    ],
)
def test_a_full_disk(tmp_path, what, number):
    """Half of the bytes fit. The record is as it was before, no unfinished file stays, and the message names
    both."""
    text = fails(tmp_path, **{what: number})
    assert "No space left on device" in text
    assert (".jsonl" if what == "full_at_record" else ".ckpt") in text
    assert not any(n.endswith(".part") for n in names(tmp_path))
    record = the_record(tmp_path).read_bytes()
    assert record == b"" or record.endswith(b"\n")
    forks().run(*TWO, "--out", tmp_path)
    assert same(tmp_path)


def test_the_largest_size_of_a_file(tmp_path):
    """The system itself cuts the write off: the first checkpoint, then the long line at the end."""
    there = undisturbed(*TWO)
    checkpoint, record = (max(p.stat().st_size for p in there.glob(g)) for g in ("*.ckpt", "*.jsonl"))
    assert "File too large" in fails(tmp_path, largest_file=checkpoint - 100)
    assert "File too large" in fails(tmp_path, largest_file=record - 1000)
    assert len(facts(the_record(tmp_path))) == 3
    forks().run(*TWO, "--out", tmp_path)
    assert same(tmp_path)


def test_a_disk_that_is_really_full(tmp_path):
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True)
    if mount.returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        out = tmp_path / "run"
        assert "No space left on device" in fails(out)
        kept = facts(the_record(out))
        assert "No space left on device" in fails(out)
        assert facts(the_record(out)) == kept
        subprocess.run(["mount", "-o", "remount,size=1m", tmp_path], check=True)
        forks().run(*TWO, "--out", out)
        assert same(out)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    text = forks().run(*TWO, "--out", tmp_path / "file" / "runs", code=1)
    assert str(tmp_path / "file") in text
    folder = forks().folder / "sealed"
    folder.mkdir()
    folder.chmod(0o555)
    text = forks().run(*TWO, "--out", folder, fault={"nobody": True}, code=1)
    assert f"error: {folder}" in text
    assert "Permission denied" in text
    assert names(folder) == []


# -- damage --------------------------------------------------------------------------------------------------


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    "middle": lambda path: flip(path, path.stat().st_size // 2),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint(tmp_path, damage):
    """Found before anything is written; `ghor check` finds it too; --restart is the way out."""
    record, checkpoint = copied(tmp_path)
    DAMAGE[damage](checkpoint)
    before = record.read_bytes(), checkpoint.read_bytes()
    text = forks().run(*PENDULUM, "--epochs", "3", "--out", tmp_path, code=1)
    assert f"{checkpoint} is damaged" in text
    assert "--restart" in text
    assert (record.read_bytes(), checkpoint.read_bytes()) == before
    if damage == "middle":
        assert f"error: {checkpoint} is damaged" in forks().run("check", tmp_path, code=1)
        forks().run(*TWO, "--out", tmp_path)  # finished: the checkpoint is not needed
        forks().run(*TWO, "--out", tmp_path, "--restart")
        assert same(tmp_path)


@pytest.mark.parametrize("line", [2, 5])
def test_a_damaged_record(tmp_path, line):
    """Also in its last line: a whole line with a wrong sum is not half written."""
    record, checkpoint = copied(tmp_path)
    raw = record.read_bytes().splitlines(keepends=True)
    flip(record, sum(map(len, raw[: line - 1])) + 20)
    before = record.read_bytes(), checkpoint.read_bytes()
    text = forks().run(*TWO, "--out", tmp_path, code=1)
    assert f"{record}, line {line}: its checksum is wrong" in text
    assert "--restart" in text
    assert (record.read_bytes(), checkpoint.read_bytes()) == before
    if line == 2:
        assert f"{record}, line 2" in forks().run("check", tmp_path, code=1)


def test_a_record_without_its_last_bytes(tmp_path):
    """From the middle of the last epoch's line on: the checkpoint has the line."""
    record, _ = copied(tmp_path)
    raw = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(b"".join(raw[:2]) + raw[2][:50])
    forks().run(*TWO, "--out", tmp_path)
    assert same(tmp_path)


def test_files_that_do_not_belong_together(tmp_path):
    record, checkpoint = copied(tmp_path / "a", THREE)
    lines = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(b"".join(lines[:2]))
    text = forks().run(*THREE, "--out", tmp_path / "a", code=1)
    assert "has 1 epochs, its checkpoint is of epoch 3" in text
    checkpoint.unlink()
    assert "is missing" in forks().run(*THREE, "--out", tmp_path / "a", code=1)
    record, checkpoint = copied(tmp_path / "b")
    record.unlink()
    assert "has no record" in forks().run(*TWO, "--out", tmp_path / "b", code=1)
    assert f"{checkpoint} has no record beside it" in forks().run("check", tmp_path / "b", code=1)
    record, checkpoint = copied(tmp_path / "c")
    forks().run(*TWO, "--label", "other", "--out", tmp_path / "d")
    for path in (record, checkpoint):
        path.rename(path.with_name(f"{the_record(tmp_path / 'd').stem}{path.suffix}"))
    text = forks().run(*PENDULUM, "--epochs", "3", "--label", "other", "--out", tmp_path / "c", code=1)
    assert f"belongs to the run {record.stem}" in text


def test_other_runs_go_on_beside_a_damaged_one(tmp_path):
    both = (*TWO, "-o", "momentum")
    record, _ = copied(tmp_path)
    flip(record, 20)
    text = forks().run(*both, "--out", tmp_path, code=1)
    assert f"left: {record}, line 1" in text
    assert len([n for n in names(tmp_path) if n.endswith(".ckpt")]) == 2


def test_a_damaged_cache_of_trajectories_is_made_again(tmp_path):
    undisturbed(*TWO)
    for damage in (DAMAGE["cut"], DAMAGE["middle"]):
        cache = tmp_path / damage.__name__ / "pendulum" / "angles.f64"
        cache.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(forks().folder / "cache" / "pendulum" / "angles.f64", cache)
        whole = cache.read_bytes()
        damage(cache)
        out = tmp_path / f"out{len(names(tmp_path))}"
        text = forks().run(*TWO, "--out", out, GHOR_CACHE=str(cache.parents[1]))
        assert f"{cache} is damaged" in text
        assert same(out)
        assert cache.read_bytes() == whole


def test_a_damaged_image_file(tmp_path):
    """It is not used; where it came with --data somebody must bring a right one."""
    undisturbed(*TWO)
    make_mnist(tmp_path / "data")
    argv = (*MNIST, "--epochs", "1", "--out", tmp_path / "out", "--data", tmp_path / "other")
    shutil.copytree(tmp_path / "data" / "mnist", tmp_path / "other")
    flip(tmp_path / "other" / "train-labels-idx1-ubyte", -1)
    text = forks().run(
        *argv, fault={"mnist": str(tmp_path / "data")}, code=1, GHOR_CACHE=str(tmp_path / "cache")
    )
    assert "train-labels-idx1-ubyte is not mnist's" in text
    assert "error: mnist: train-labels-idx1-ubyte could not be fetched" in text
    assert "--data" in text
    assert not list((tmp_path / "out").glob("*.jsonl"))
