"""Training that goes on where it stopped, was killed or found a full disk: to the bit, with a way out."""

import dataclasses
import errno
import itertools
import os
import shutil

import pytest
import torch
from helpers.lab import MNIST, PENDULUM, TEXT, Stop, facts, kill_at, killed, stop_at, strip, weights

import ghor
from ghor_lab import checkpoint, files, record, runs, train
from ghor_lab.config import FURTHER, PAPER
from ghor_lab.language import METHODS
from ghor_lab.record import Damaged, read
from ghor_lab.tasks import task_of
from ghor_lab.tasks.task import on_spaces
from ghor_lab.train import Busy

AUTHORS = {"start": "authors", "frame": "random", "loss": "after"}


def cases():
    for base, optimizer in itertools.product((PENDULUM, MNIST), (*PAPER, *FURTHER)):
        if (base.experiment, optimizer) != ("pendulum", "standard-adam"):
            yield dataclasses.replace(base, optimizer=optimizer)
    for name in METHODS:
        yield dataclasses.replace(TEXT, optimizer=name, lr=METHODS[name].rate)
    for change in (AUTHORS, {"warmup": 5}, {"manifold_lr": 1e-2}, {"section": "implicit"}):
        yield dataclasses.replace(MNIST, **change)


@pytest.mark.parametrize("config", list(cases()), ids=lambda c: c.name)
def test_a_run_that_was_stopped_ends_as_if_it_was_not(config, tmp_path):
    """Record and checkpoint, bit for bit, and the weights are where the method keeps them."""
    a = train.train(config, tmp_path / "a")
    with pytest.raises(Stop):
        train.train(config, tmp_path / "b", report=stop_at(1))
    b = train.train(config, tmp_path / "b")
    assert facts(a) == facts(b)
    assert weights(a) == weights(b)
    run = read(a)
    assert run.finished
    assert run.epochs[0]["loss"] != run.epochs[1]["loss"]
    assert all(x < 2e-5 for line in run.epochs for x in line["drift"] or ())
    assert ("gate" in run.last("end")) == (config.experiment != "text")


def test_a_longer_run_is_a_run_made_longer(tmp_path):
    """2 epochs, then 4: the epochs, the sample and the weights of 4 at once; both ends stay in the record."""
    four = dataclasses.replace(PENDULUM, epochs=4)
    at_once = train.train(four, tmp_path / "a")
    for config in (PENDULUM, four):
        longer = train.train(config, tmp_path / "b")
    kinds = [line["kind"] for line in facts(longer)]
    assert kinds == ["run", "epoch", "epoch", "sample", "end", "resumed", "epoch", "epoch", "sample", "end"]
    assert strip(read(at_once).epochs) == strip(read(longer).epochs)
    assert read(at_once).last("sample") == read(longer).last("sample")
    assert weights(at_once) == weights(longer)
    assert read(longer).finished


def test_asking_for_what_is_there_changes_nothing(finished):
    before, seen = finished.read_bytes(), []
    for epochs in (2, 1):
        config = dataclasses.replace(PENDULUM, epochs=epochs)
        train.train(config, finished.parent, report=lambda *args: seen.append(args))
    assert finished.read_bytes() == before
    assert [epoch for epoch, _ in seen] == [2, 1]


def test_what_changed_when_a_run_was_taken_up_again_is_written_down(tmp_path, monkeypatch):
    """Once for each change, and only if something changed."""
    config = dataclasses.replace(PENDULUM, epochs=3)
    for last, commit in enumerate(["0000000", "0000000", "1111111"], 1):
        monkeypatch.setattr(train, "commit", lambda commit=commit: commit)
        with pytest.raises(Stop):
            train.train(config, tmp_path, report=stop_at(last))
    (path,) = tmp_path.glob("*.jsonl")
    assert [(x["epoch"], x["commit"]) for x in facts(path) if x["kind"] == "resumed"] == [(2, "1111111")]


def test_the_learning_rate_of_every_step(tmp_path, monkeypatch):
    """A linear warm-up, for the manifolds' own rate too; for text it falls to zero."""
    rates = []
    monkeypatch.setattr(train, "count_state", lambda task: {})
    for cls in (ghor.optim.Adam, torch.optim.AdamW):
        step = cls.step

        def noted(self, closure=None, step=step):
            rates.append([group["lr"] for group in self.param_groups])
            return step(self, closure)

        monkeypatch.setattr(cls, "step", noted)
    train.train(dataclasses.replace(MNIST, warmup=4, manifold_lr=1e-2), tmp_path)
    expected = [(1e-3 * share, 1e-2 * share) for share in (0.25, 0.5, 0.75, 1, 1, 1)]
    torch.testing.assert_close(torch.tensor(rates), torch.tensor(expected))
    rates.clear()
    train.train(TEXT, tmp_path)
    shares = [row[0] / 3e-3 for row in rates]
    assert shares == pytest.approx([1 / 2, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5])


def test_a_loss_after_the_step_changes_only_what_is_written(tmp_path):
    paths = [train.train(dataclasses.replace(MNIST, loss=x, lr=1e-2), tmp_path) for x in ("before", "after")]
    a, b = (weights(path) for path in paths)
    assert a["model"] == b["model"]
    first, second = (read(path).epochs[0]["loss"][0] for path in paths)
    assert second < first  # of random labels, learnt by heart


def test_the_state_is_counted_on_a_real_optimizer(tmp_path):
    """A projection on St(7, 49): 2 moments of 343 entries and a 49 x 49 section; all else has 2 moments."""
    counted = read(train.train(MNIST, tmp_path)).header["state"]
    free = 49 * 49 + 49 + 10 * 49
    assert counted["entries_per_manifold_weight"] == 2 * 343 + 49 * 49
    assert counted["total_entries"] == 21 * (2 * 343 + 49 * 49) + 2 * free
    assert counted["mib"] == pytest.approx(4 * counted["total_entries"] / 2**20)


# -- killed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(1, 8))
@pytest.mark.parametrize("where", ["before a sync", "before a rename", "after a line"])
def test_a_killed_run_ends_as_if_it_was_left_alone(where, number, finished, tmp_path, monkeypatch):
    """At every write: header, checkpoint and line of two epochs, sample, end."""
    module, name = {
        "before a sync": (os, "fsync"),
        "before a rename": (files, "sync_folder"),
        "after a line": (record, "append"),
    }[where]
    with monkeypatch.context() as patch:
        kill_at(patch, train if name == "append" else module, name, number)
        code = killed(lambda: train.train(PENDULUM, tmp_path))
    assert code == -9 or number > 2  # each place is passed at least so often
    path = train.train(PENDULUM, tmp_path)
    assert facts(path) == facts(finished)
    assert weights(path) == weights(finished)
    assert not list(tmp_path.glob(".*.part"))


def test_killed_in_the_middle_of_a_line(finished, tmp_path):
    """Half a line is no line, and is written over."""
    for cut in (10, 200):
        for path in (finished, finished.with_suffix(".ckpt")):
            shutil.copy(path, tmp_path)
        path = tmp_path / finished.name
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:2]) + lines[2][:cut])
        train.train(PENDULUM, tmp_path)
        assert [x for x in facts(path) if x["kind"] == "epoch"] == facts(finished)[1:3]


# -- disks and damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(1, 8))
def test_a_full_disk_loses_an_epoch_at_most(number, finished, tmp_path, monkeypatch):
    """The record is as it was, no unfinished file stays, and the message names the file."""
    real, calls = os.fsync, []

    def full(handle):
        calls.append(1)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left") as error:
            train.train(PENDULUM, tmp_path)
    assert str(tmp_path) in error.value.filename
    assert not list(tmp_path.glob(".*.part"))
    for path in tmp_path.glob("*.jsonl"):
        assert not path.read_bytes() or path.read_bytes().endswith(b"\n")
    path = train.train(PENDULUM, tmp_path)
    assert facts(path) == facts(finished)


def test_a_real_full_disk(tmp_path):
    """/dev/full: the system says it itself, and the file is named."""
    if not os.path.exists("/dev/full"):  # noqa: PTH110
        pytest.skip("no /dev/full")
    link = tmp_path / "a.jsonl"
    link.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left|Invalid argument") as error:
        record.append(link, {"kind": "run"}, 0)
    assert error.value.filename == str(link)


def test_a_folder_that_cannot_be_written_to(tmp_path):
    """Its name, and what the system says."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file") as error:
        train.train(PENDULUM, tmp_path / "file" / "runs")
    assert str(tmp_path / "file") in str(error.value)
    if os.geteuid():  # root may write everywhere
        (tmp_path / "locked").mkdir(mode=0o555)
        with pytest.raises(PermissionError, match="locked"):
            train.train(PENDULUM, tmp_path / "locked")


def test_links_stay_links(finished, tmp_path):
    """Folder and files may be links to another disk: what they lead to is written."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    with pytest.raises(Stop):
        train.train(PENDULUM, tmp_path / "runs", report=stop_at(1))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for end in (".jsonl", ".ckpt"):
        path = (tmp_path / "disk" / finished.name).with_suffix(end)
        shutil.move(path, moved)
        path.symlink_to(moved / path.name)
    path = train.train(PENDULUM, tmp_path / "runs")
    assert path.is_symlink()
    assert path.with_suffix(".ckpt").is_symlink()
    assert facts(moved / path.name) == facts(finished)
    assert weights(moved / path.name) == weights(finished)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda r, c: r.unlink(), "has no record .* beside it"),
        (lambda r, c: c.unlink(), "has 2 epochs, its checkpoint is missing"),
        (lambda r, c: c.write_bytes(c.read_bytes()[:-1]), "is damaged .*its checksum is wrong"),
        (lambda r, c: r.write_bytes(r.read_bytes().replace(b"0", b"1", 1)), "line 1: its checksum is wrong"),
        (lambda r, c: checkpoint.save({**checkpoint.load(c), "epoch": 7}, c), "checkpoint is of epoch 7"),
        (lambda r, c: checkpoint.save({**checkpoint.load(c), "name": "x"}, c), "belongs to the run x"),
    ],
)
def test_damage_is_named_with_the_way_out(damage, words, finished, tmp_path):
    for path in (finished, finished.with_suffix(".ckpt")):
        shutil.copy(path, tmp_path)
    path = tmp_path / finished.name
    damage(path, path.with_suffix(".ckpt"))
    longer = dataclasses.replace(PENDULUM, epochs=3)
    with pytest.raises(Damaged, match=words) as error:
        train.train(longer, tmp_path)
    assert any(way in str(error.value) for way in ("--restart", "move it away"))
    train.forget(path)
    assert [p.suffix for p in tmp_path.iterdir()] == [".lock"]


class Code:
    """What a file must not make us run."""

    def __reduce__(self):
        return os.system, ("touch /tmp/ghor-was-here",)


def test_a_checkpoint_that_holds_code_is_refused_by_name(finished, tmp_path):
    """Its checksum is right: nothing in it runs, and nobody is told to load it all the same."""
    path = tmp_path / finished.name
    shutil.copy(finished, path)
    checkpoint.save({"name": PENDULUM.name, "epoch": 2, "model": Code()}, path.with_suffix(".ckpt"))
    with pytest.raises(Damaged, match=r"\.ckpt was not written by ghor: .* nothing in it was run") as error:
        train.train(dataclasses.replace(PENDULUM, epochs=3), tmp_path)
    assert "weights_only" not in str(error.value)
    assert not os.path.exists("/tmp/ghor-was-here")  # noqa: PTH110


def test_one_process_has_a_run(finished, tmp_path):
    """Others leave it, say so, and go on with the next."""
    shutil.copytree(finished.parent, tmp_path, dirs_exist_ok=True)
    other = dataclasses.replace(PENDULUM, label="other")
    seen = []
    with train.in_hand(tmp_path / finished.name):
        with pytest.raises(Busy, match="is locked by another process"):
            train.train(PENDULUM, tmp_path)
        left = runs.one_by_one([PENDULUM, other], tmp_path, None, lambda *args: seen.append(args[:2]))
    assert len(left) == 1
    assert finished.name in left[0]
    assert seen == [(other, 1), (other, 2)]


def test_threads_and_subnormals_are_torchs_again(tmp_path):
    before = torch.get_num_threads()
    with pytest.raises(Stop):
        train.train(dataclasses.replace(PENDULUM, threads=2), tmp_path, report=stop_at(1))
    assert torch.get_num_threads() == before
    assert float(torch.tensor(1e-40) * 1) != 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is there")
def test_a_device_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="device cuda cannot be used"):
        train.train(dataclasses.replace(PENDULUM, device="cuda"), tmp_path)


def test_drift_is_seen():
    task = task_of(MNIST)
    (_, p, _), *_ = on_spaces(task.model)
    with torch.no_grad():
        p[0, 0] *= 1.01
    found = train.gate("geometric-adam", [{"loss": [1.0]}, {"loss": [0.5], "drift": [0.05]}], task.model)
    assert found == ["drift 5.0e-02"]
