"""Kills, full disks, damaged files, two processes at one run: nothing is lost, nothing is silently wrong.

The same command, given again, ends with the record and the weights of a run that was left alone, bit for bit.
"""

import random
import shutil
import subprocess
import time

import pytest
from runs import MNIST, PENDULUM, facts, forks, make_mnist, names, the_record, undisturbed, weights

TWO = (*PENDULUM, "--epochs", "2")
THREE = (*PENDULUM, "--epochs", "3")


def same(folder, argv=TWO):
    """The record and the checkpoint of an undisturbed run, and no other file but the lock's."""
    there = undisturbed(*argv)
    assert facts(the_record(folder)) == facts(the_record(there))
    assert weights(folder) == weights(there)
    assert names(folder) == names(there)
    assert [n.rpartition(".")[2] for n in names(folder)] == ["ckpt", "jsonl", "lock"]
    return True


def killed(out, argv=TWO, **fault):
    done = forks().start(*argv, "--out", out, fault=fault).wait()
    assert done.code == -9, done.text


# -- kills -------------------------------------------------------------------------------------------------------------


def lines():
    """How many lines a run executes in the functions where it can be killed."""
    undisturbed(*TWO)
    text = forks().run(*TWO, "--out", forks().folder / "lines", fault={"kill_at_line": 0})
    return int(text.split()[-2])


def test_killed_at_some_lines(tmp_path):
    """Every 23rd line between opening, writing, syncing and renaming."""
    count = lines()
    assert count > 150
    for number in range(1, count + 1, 23):
        out = tmp_path / str(number)
        killed(out, kill_at_line=number)
        forks().run(*TWO, "--out", out)
        assert same(out)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_every_line(tmp_path):
    for number in range(1, lines() + 1):
        out = tmp_path / str(number)
        killed(out, kill_at_line=number)
        forks().run(*TWO, "--out", out)
        assert same(out)


@pytest.mark.parametrize("what", ["kill_in_record", "kill_in_checkpoint"])
def test_killed_in_the_middle_of_a_write(tmp_path, what):
    """The record's header, epochs, sample and end; the two checkpoints. Readers see whole lines only."""
    for number in range(1, 6 if what == "kill_in_record" else 3):
        out = tmp_path / str(number)
        killed(out, **{what: number})
        if what == "kill_in_record":
            assert not the_record(out).read_bytes().endswith(b"\n")
            assert ("half written" in forks().run("check", out, code=0 if number > 1 else 1)) == (number > 1)
        else:
            assert any(n.endswith(".part") for n in names(out))
        forks().run(*TWO, "--out", out)
        assert same(out)


def killed_at_random_moments(folder, count):
    rng = random.Random(count)
    start = time.monotonic()
    undisturbed(*THREE)
    forks().run(*THREE, "--out", folder / "timed")
    seconds = time.monotonic() - start
    kills = 0
    for i in range(count):
        out, code = folder / str(i), -9
        while code == -9:
            child = forks().start(*THREE, "--out", out)
            if rng.random() < 0.8:
                time.sleep(rng.uniform(0, seconds))
                child.kill()
            done = child.wait()
            code, kills = done.code, kills + (done.code == -9)
            assert code in (0, -9), done.text
        assert same(out, THREE)
    return kills


def test_killed_at_random_moments(tmp_path):
    assert killed_at_random_moments(tmp_path, 4) >= 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_50_random_moments(tmp_path):
    assert killed_at_random_moments(tmp_path, 50) >= 25


def test_a_killed_run_can_be_made_longer(tmp_path):
    """2 epochs, killed on the way, then 4: the epochs are those of 4 at once."""
    killed(tmp_path, kill_in_record=3)
    forks().run(*PENDULUM, "--epochs", "4", "--out", tmp_path)
    found, expected = (
        [line for line in facts(the_record(f)) if line["kind"] == "epoch"]
        for f in (tmp_path, undisturbed(*PENDULUM, "--epochs", "4"))
    )
    assert found == expected
    assert weights(tmp_path) == weights(undisturbed(*PENDULUM, "--epochs", "4"))


# -- disks -------------------------------------------------------------------------------------------------------------


def fails(out, argv=TWO, **fault):
    text = forks().run(*argv, "--out", out, fault=fault, code=1)
    assert "Finished epochs are safe" in text
    return text


@pytest.mark.parametrize(
    ("what", "number"),
    [("full_at_record", 1), ("full_at_record", 2), ("full_at_record", 4), *(("full_at_checkpoint", k) for k in (1, 2))],
)
def test_a_full_disk(tmp_path, what, number):
    """Half of the bytes fit. The record is as it was before, no unfinished file stays, and the message names both."""
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
    assert "File too large" in fails(tmp_path, largest_file=record - 100)
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


# -- damage ------------------------------------------------------------------------------------------------------------


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def copied(folder, argv=TWO):
    shutil.copytree(undisturbed(*argv), folder, dirs_exist_ok=True)
    return the_record(folder), the_record(folder).with_suffix(".ckpt")


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    "head": lambda path: flip(path, 3),
    "sum": lambda path: flip(path, 30),
    "newline": lambda path: flip(path, 82),
    "middle": lambda path: flip(path, path.stat().st_size // 2),
    "end": lambda path: flip(path, -1),
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


@pytest.mark.parametrize("line", [1, 2, 4, 5])
def test_a_damaged_record(tmp_path, line):
    """Also in its last line: a whole line with a wrong sum is not half written."""
    record, checkpoint = copied(tmp_path)
    raw = record.read_bytes().splitlines(keepends=True)
    flip(record, sum(map(len, raw[: line - 1])) + 20)
    before = record.read_bytes(), checkpoint.read_bytes()
    text = forks().run(*TWO, "--out", tmp_path, code=1)
    assert f"{record}, line {line}: its check sum is wrong" in text
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
    assert "is missing" in forks().run("check", tmp_path / "b", code=1)
    record, checkpoint = copied(tmp_path / "c")
    other = [*TWO, "--label", "other"]
    for path in (record, checkpoint):
        path.rename(path.with_name(path.name.replace("as-run", "other").replace(path.stem[-6:], "XXXXXX")))
    forks().run(*other, "--out", tmp_path / "d")
    name = the_record(tmp_path / "d").stem
    for path in (record, checkpoint):
        moved = path.with_name(path.name.replace("as-run", "other").replace(path.stem[-6:], "XXXXXX"))
        moved.rename(tmp_path / "c" / f"{name}{path.suffix}")
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
    text = forks().run(*argv, fault={"mnist": str(tmp_path / "data")}, code=1, GHOR_CACHE=str(tmp_path / "cache"))
    assert "train-labels-idx1-ubyte is not mnist's" in text
    assert "error: mnist: train-labels-idx1-ubyte could not be fetched" in text
    assert "--data" in text
    assert not list((tmp_path / "out").glob("*.jsonl"))


# -- two at once -------------------------------------------------------------------------------------------------------


def until(ready, seconds=120):
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_two_processes_at_one_run(tmp_path):
    """The second says so, exits 1 and touches nothing; the lock of a killed process does not block."""
    sign, out = tmp_path / "sign", tmp_path / "out"
    first = forks().start(*TWO, "--out", out, fault={"wait_at_epoch": str(sign)})
    until(sign.exists)
    before = the_record(out).read_bytes()
    for argv in (TWO, (*TWO, "--restart")):
        text = forks().run(*argv, "--out", out, code=1)
        assert f"{the_record(out)} is in the hands of another process" in text
    assert the_record(out).read_bytes() == before
    first.kill()
    assert first.wait().code == -9
    forks().run(*TWO, "--out", out)
    assert same(out)


def test_many_processes_at_one_run(tmp_path):
    """Whoever comes first trains, the others give way; together they make one record."""
    children = [forks().start(*TWO, "--out", tmp_path) for _ in range(4)]
    codes = [child.wait().code for child in children]
    assert set(codes) <= {0, 1}
    assert 0 in codes
    assert same(tmp_path)


def test_unfinished_files_of_a_killed_run_are_removed(tmp_path):
    """At the next start of that run, also if nothing is left to do; those of other runs stay."""
    record, checkpoint = copied(tmp_path)
    mine, other = tmp_path / f".{checkpoint.name}.abc.part", tmp_path / ".other.ckpt.abc.part"
    for path in (mine, other):
        path.write_bytes(b"half")
    forks().run(*TWO, "--out", tmp_path)
    assert not mine.exists()
    assert other.exists()
    assert record.stat().st_size > 0
