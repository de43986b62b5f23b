"""Many processes, at one run or at many, and one of them killed: one record a run, and the others end or go
on."""

import os
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from faults import TWO, flip, same
from runs import (
    BOTH,
    MNIST,
    SOURCE,
    forks,
    free,
    make_mnist,
    records,
    the_record,
    undisturbed,
    until,
    weights,
)

from ghor_lab import checkpoint
from ghor_lab.record import read
from ghor_lab.train import in_hand

# -- two at once ---------------------------------------------------------------------------------------------


def test_two_processes_at_one_run(tmp_path):
    """The second says so, exits 1 and touches nothing; the lock of a killed process does not block."""
    sign, out = tmp_path / "sign", tmp_path / "out"
    first = forks().start(*TWO, "--out", out, fault={"wait_at_epoch": str(sign)})
    until(sign.exists)
    before = the_record(out).read_bytes()
    for argv in (TWO, (*TWO, "--restart")):
        text = forks().run(*argv, "--out", out, code=1)
        assert f"{the_record(out)} is locked by another process" in text
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


# -- --jobs --------------------------------------------------------------------------------------------------


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
        assert ("stopped. The same command resumes" in done.text) == (number == signal.SIGINT)
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
    assert "error: a training process was killed" in done.text
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


# -- torchrun ------------------------------------------------------------------------------------------------


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
    assert (
        "error: the 2 processes cannot work together, because one has ended or failed" in both[1 - rank].text
    )
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
    assert "locked by another process" in done[0].text
    flip(the_record(tmp_path), 30)
    done = [child.wait() for child in ranks(mnist(tmp_path), [{}, {}])]
    assert [d.code for d in done] == [1, 1]
    assert "its checksum is wrong" in done[0].text


def test_what_torchrun_does_not_go_with(tmp_path):
    for argv, words in (
        ((*TWO, "--out", tmp_path), "too small to be sharded"),
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
