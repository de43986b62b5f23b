"""Kills, full disks, damaged files, two processes at one run: nothing is lost, nothing is silently wrong.

The same command, given again, ends with the record and the weights of a run that was left alone, bit for bit.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from runs import (
    BOTH,
    MNIST,
    PENDULUM,
    SOURCE,
    facts,
    forks,
    free,
    make_mnist,
    names,
    records,
    the_record,
    undisturbed,
    until,
    weights,
)

from ghor_lab import checkpoint
from ghor_lab.record import read
from ghor_lab.train import in_hand

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
    undisturbed(*TWO)  # makes the file of trajectories, whose writes would count
    done = forks().start(*argv, "--out", out, fault=fault).wait()
    assert done.code == -9, done.text


# -- kills -------------------------------------------------------------------------------------------------------------


def lines():
    """How many lines a run executes in the functions where it can be killed."""
    undisturbed(*TWO)
    text = forks().run(*TWO, "--out", forks().folder / "lines", fault={"kill_at_line": 0})
    return int(text.split()[-2])


def test_killed_at_some_lines(tmp_path):
    """Some of those between opening, writing, syncing and renaming; all of them below."""
    count = lines()
    assert count > 150
    for number in range(5, count + 1, 41):
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
            if number < 3:
                assert ("half written" if number == 2 else "no whole line yet") in forks().run("check", out)
        else:
            assert any(n.endswith(".part") for n in names(out))
        forks().run(*TWO, "--out", out)
        assert same(out)


def killed_at_random_moments(folder, count):
    """Runs, each killed now and then until it is finished, until there were so many kills."""
    rng, kills, number = random.Random(count), 0, 0
    undisturbed(*THREE)
    start = time.monotonic()
    forks().run(*THREE, "--out", folder / "timed")
    seconds = time.monotonic() - start
    while kills < count:
        out, code, number = folder / str(number), -9, number + 1
        while code == -9:
            child = forks().start(*THREE, "--out", out)
            if rng.random() < 0.8:
                time.sleep(rng.uniform(0, seconds))
                child.kill()
            done = child.wait()
            code, kills = done.code, kills + (done.code == -9)
            assert code in (0, -9), done.text
        assert same(out, THREE)


def test_killed_at_random_moments(tmp_path):
    killed_at_random_moments(tmp_path, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_50_random_moments(tmp_path):
    killed_at_random_moments(tmp_path, 50)


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
    undisturbed(*TWO)
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
    text = forks().run(*argv, fault={"mnist": str(tmp_path / "data")}, code=1, GHOR_CACHE=str(tmp_path / "cache"))
    assert "train-labels-idx1-ubyte is not mnist's" in text
    assert "error: mnist: train-labels-idx1-ubyte could not be fetched" in text
    assert "--data" in text
    assert not list((tmp_path / "out").glob("*.jsonl"))


# -- two at once -------------------------------------------------------------------------------------------------------


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


# -- many processes ----------------------------------------------------------------------------------------------------


def test_two_jobs_make_the_records_of_one(tmp_path):
    text = forks().run(*BOTH, "--epochs", "2", "--jobs", "2", "--out", tmp_path, fault={"forked_jobs": True})
    there = undisturbed(*BOTH, "--epochs", "2")
    assert len(records(tmp_path)) == 2
    assert records(tmp_path) == records(there)
    assert weights(tmp_path) == weights(there)
    assert text.count("epoch 2 of 2") == 2


def test_jobs_end_with_the_process_that_started_them(tmp_path):
    """However it ends; and the same command goes on."""
    argv = (*BOTH, "--epochs", "2", "--jobs", "2", "--out", tmp_path / "out")
    for number, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        sign = tmp_path / str(number)
        child = forks().start(*argv, fault={"forked_jobs": True, "wait_at_epoch": str(sign)})
        until(lambda sign=sign: sign.exists() and len(list((tmp_path / "out").glob("*.ckpt"))) == 2)
        child.kill(number)
        done = child.wait()
        assert done.code == code, done.text
        assert "Traceback" not in done.text
        assert ("stopped. The same command goes on" in done.text) == (number == signal.SIGINT)
        until(lambda: all(map(free, (tmp_path / "out").glob("*.jsonl"))), 20)
    forks().run(*argv, fault={"forked_jobs": True})
    assert records(tmp_path / "out") == records(undisturbed(*BOTH, "--epochs", "2"))


def test_a_job_that_is_killed_is_told(tmp_path):
    sign = tmp_path / "sign"
    argv = (*BOTH, "--epochs", "2", "--jobs", "2", "--out", tmp_path / "out")
    child = forks().start(*argv, fault={"forked_jobs": True, "wait_at_epoch": str(sign)})
    until(sign.exists)
    os.kill(children(child.pid)[0], signal.SIGKILL)
    done = child.wait()
    assert done.code == 1
    assert "error: a process that trained was killed" in done.text
    assert "Traceback" not in done.text
    forks().run(*argv, fault={"forked_jobs": True})
    assert records(tmp_path / "out") == records(undisturbed(*BOTH, "--epochs", "2"))


def children(pid):
    """Processes that a process started."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.slow
def test_spawned_jobs(tmp_path):
    """The processes as users have them: the same records, and they go when their parent goes."""
    argv = (*BOTH, "--epochs", "40", "--jobs", "2", "--out", tmp_path)
    child = forks().start(*argv)
    until(lambda: len(list(tmp_path.glob("*.ckpt"))) == 2)
    child.kill()
    assert child.wait().code == -9
    until(lambda: all(map(free, tmp_path.glob("*.jsonl"))), 20)
    assert not all(read(p).finished for p in tmp_path.glob("*.jsonl"))
    forks().run(*argv)
    assert records(tmp_path, "commit") == records(undisturbed(*BOTH, "--epochs", "40"), "commit")


@cache
def images():
    folder = forks().folder / "images"
    make_mnist(folder)
    return folder


def mnist(out, *more):
    return (*MNIST, "--epochs", "2", "--data", str(images()), "--out", str(out), *more)


def ranks(argv, faults):
    """One process a fault, as torchrun starts them."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {"WORLD_SIZE": str(len(faults)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        forks().start(*argv, fault={"mnist": str(images()), **fault}, RANK=str(rank), **environment)
        for rank, fault in enumerate(faults)
    ]


def close(folder, other, tolerance=1e-12):
    """The losses, and the weights after the last step: each is a sum that is taken in another order."""
    a, b = (checkpoint.load(the_record(f).with_suffix(".ckpt")) for f in (folder, other))
    assert a["epoch"] == b["epoch"]
    assert a["line"]["loss"][0] == pytest.approx(b["line"]["loss"][0], rel=tolerance)
    assert a["line"]["test_accuracy"] == b["line"]["test_accuracy"]
    for x, y in zip(a["model"].values(), b["model"].values(), strict=True):
        assert torch.allclose(x, y, rtol=0, atol=tolerance)
    losses = [[line["loss"][0] for line in read(the_record(f)).epochs] for f in (folder, other)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-9)  # records have nine digits
    return True


def test_two_ranks_train_as_one_process_does(tmp_path):
    for argv in (mnist(tmp_path / "one"), mnist(tmp_path / "one")):  # the second finds it finished
        forks().run(*argv, fault={"mnist": str(images())})
    for _ in range(2):
        for child in ranks(mnist(tmp_path / "two"), [{}, {}]):
            done = child.wait()
            assert done.code == 0, done.text
    assert close(tmp_path / "one", tmp_path / "two")
    assert read(the_record(tmp_path / "two")).header["processes"] == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run_and_the_same_command_goes_on(tmp_path, rank):
    """In the second epoch; the other one says why it ends."""
    faults = [{}, {}]
    faults[rank]["kill_at_batch"] = 50 // 16 + 2
    both = [child.wait() for child in ranks(mnist(tmp_path / "a"), faults)]
    assert both[rank].code == -9
    assert both[1 - rank].code == 1
    assert "error: the 2 processes cannot work together, one has ended or failed" in both[1 - rank].text
    assert "Traceback" not in both[1 - rank].text
    assert len(read(the_record(tmp_path / "a")).epochs) == 1
    for child in ranks(mnist(tmp_path / "a"), [{}, {}]):
        assert child.wait().code == 0
    for child in ranks(mnist(tmp_path / "b"), [{}, {}]):
        assert child.wait().code == 0
    assert records(tmp_path / "a") == records(tmp_path / "b")


def test_a_rank_whose_disk_is_full_ends_both(tmp_path):
    first, second = (child.wait() for child in ranks(mnist(tmp_path), [{"full_at_checkpoint": 1}, {}]))
    assert (first.code, second.code) == (1, 1)
    assert "No space left on device" in first.text
    assert "one has ended or failed" in second.text
    assert "Traceback" not in first.text + second.text


def test_two_ranks_find_a_run_busy_or_damaged_together(tmp_path):
    """Neither waits for the other for ever."""
    for child in ranks(mnist(tmp_path), [{}, {}]):
        assert child.wait().code == 0
    with in_hand(the_record(tmp_path)):
        done = [child.wait() for child in ranks(mnist(tmp_path), [{}, {}])]
    assert [d.code for d in done] == [1, 1]
    assert "in the hands of another process" in done[0].text
    flip(the_record(tmp_path), 30)
    done = [child.wait() for child in ranks(mnist(tmp_path), [{}, {}])]
    assert [d.code for d in done] == [1, 1]
    assert "its check sum is wrong" in done[0].text


def test_what_torchrun_does_not_go_with(tmp_path):
    for argv, words in (
        ((*TWO, "--out", tmp_path), "too small to be spread"),
        (mnist(tmp_path, "--jobs", "2"), "not with --jobs"),
        (mnist(tmp_path, "--executor", "ray"), "not with --jobs or --executor ray"),
    ):
        for child in ranks(argv, [{}, {}]):
            done = child.wait()
            assert done.code == 2, done.text
            assert words in done.text


@pytest.mark.slow
def test_torchrun(tmp_path):
    """With its own processes, one of which is killed on the way."""
    out = tmp_path / "two"
    script = [str(Path(__file__).with_name("runs.py")), str(images()), *mnist(out)]
    script[script.index("--epochs") + 1] = "30"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *script]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    until(lambda: list(out.glob("*.ckpt")))
    os.kill(children(process.pid)[1], signal.SIGKILL)
    process.communicate()
    assert process.returncode == 1
    assert not read(the_record(out)).finished
    subprocess.run(command, env=environment, check=True, capture_output=True)
    one = list(mnist(tmp_path / "one"))
    one[one.index("--epochs") + 1] = "30"
    forks().run(*one, fault={"mnist": str(images())})
    assert close(tmp_path / "one", out, 1e-10)  # 30 epochs of 3 steps
