"""Training that goes on where it stopped: the record and the weights of a run that was not stopped, bit for
bit."""

import dataclasses
import itertools
import platform
import shutil
import subprocess
from concurrent.futures import Future

import pytest
from blocks import COMPILER
from configs import MNIST, PENDULUM, Stop, stop_at
from runs import TIMES, facts, strip, the_record, weights

import ghor
from ghor_lab import execute, tables, train
from ghor_lab.compiled import gradients
from ghor_lab.config import OPTIMIZERS
from ghor_lab.record import append, lines, read

pytestmark = pytest.mark.usefixtures("as_before", "one_commit")
the_commit = train.commit  # as it is without the fixture


def cases(experiments=("pendulum", "mnist")):
    for experiment, optimizer in itertools.product(experiments, OPTIMIZERS):
        if (experiment, optimizer) != ("pendulum", "standard-adam"):
            yield dataclasses.replace(PENDULUM if experiment == "pendulum" else MNIST, optimizer=optimizer)


@pytest.mark.parametrize("config", list(cases()), ids=lambda c: f"{c.experiment}-{c.optimizer}")
def test_a_run_that_was_stopped_ends_as_if_it_was_not(config, images, tmp_path):
    """Record and checkpoint, bit for bit; with every optimizer, in another order of runs."""
    for folder, stops in (("a", []), ("b", [1])):
        for epoch in stops:
            with pytest.raises(Stop):
                train.train(config, tmp_path / folder, data=images, report=stop_at(epoch))
        train.train(config, tmp_path / folder, data=images)
    assert facts(the_record(tmp_path / "a")) == facts(the_record(tmp_path / "b"))
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    loss = [line["loss"] for line in read(the_record(tmp_path / "a")).epochs]
    assert loss[1] != loss[0]


@pytest.mark.parametrize(
    "options", [{"section": "implicit"}, {"compile": True}, {"retraction": "geodesic"}], ids=str
)
def test_stopped_between_two_polishings(options, tmp_path):
    """39 steps an epoch: sections are polished at steps that are no multiple of it, and the count is kept."""
    config = dataclasses.replace(PENDULUM, epochs=4, batch_size=256, **options)
    train.train(config, tmp_path / "a")
    for epoch in (1, 2, 3):
        with pytest.raises(Stop):
            train.train(config, tmp_path / "b", report=stop_at(epoch))
    train.train(config, tmp_path / "b")
    assert facts(the_record(tmp_path / "a")) == facts(the_record(tmp_path / "b"))
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_a_longer_run_is_a_run_made_longer(finished, tmp_path):
    """2 epochs, then 4: the epochs, the last sample and the weights of 4 at once; both ends stay in the
    record."""
    four = dataclasses.replace(PENDULUM, epochs=4)
    train.train(four, tmp_path / "a")
    for config in (PENDULUM, four):
        train.train(config, tmp_path / "b")
    at_once, longer = read(the_record(tmp_path / "a")), read(the_record(tmp_path / "b"))
    kinds = [line["kind"] for line in facts(the_record(tmp_path / "b"))]
    assert kinds == ["run", "epoch", "epoch", "sample", "end", "resumed", "epoch", "epoch", "sample", "end"]
    assert longer.last("resumed")["epochs"] == longer.epochs_asked == 4
    for line, other in zip(at_once.epochs, longer.epochs, strict=True):
        assert strip(line, TIMES) == strip(other, TIMES)
    assert at_once.last("sample") == longer.last("sample")
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    assert longer.finished


def test_asking_for_what_is_there_changes_nothing(finished, tmp_path):
    """Also for less than is there, also of a run that is on its way to more."""
    before = the_record(finished).read_bytes()
    seen = []
    for epochs in (2, 1):
        config = dataclasses.replace(PENDULUM, epochs=epochs)
        train.train(config, finished, report=lambda *args: seen.append(args))
    assert the_record(finished).read_bytes() == before
    assert [epoch for epoch, _ in seen] == [2, 1]
    with pytest.raises(Stop):
        train.train(dataclasses.replace(PENDULUM, epochs=4), tmp_path, report=stop_at(2))
    before = the_record(tmp_path).read_bytes()
    for epochs in (1, 2):
        train.train(dataclasses.replace(PENDULUM, epochs=epochs), tmp_path)
        assert the_record(tmp_path).read_bytes() == before
    assert not read(the_record(tmp_path)).finished


def test_what_changed_when_a_run_was_taken_up_again_is_written_down(tmp_path, monkeypatch):
    """Once for each change, and only if something changed."""
    config = dataclasses.replace(PENDULUM, epochs=5)
    for last, commit in enumerate(["0000000", "0000000", "1111111", "1111111"], 1):
        monkeypatch.setattr(train, "commit", lambda commit=commit: commit)
        if last == 4:
            monkeypatch.setattr(train, "machine", lambda: {"system": "other"})
        with pytest.raises(Stop):
            train.train(config, tmp_path, report=stop_at(last))
    monkeypatch.setattr(train, "__version__", "9.9.9")
    train.train(config, tmp_path)
    lines = [line for line in facts(the_record(tmp_path)) if line["kind"] == "resumed"]
    assert [(line["epoch"], line["commit"], len(line["machine"])) for line in lines] == [
        (2, "1111111", 4),
        (3, "1111111", 1),
        (4, "1111111", 1),
    ]
    assert [line["ghor"] for line in lines] == [ghor.__version__] * 2 + ["9.9.9"]
    assert {line["python"] for line in lines} == {platform.python_version()}


@COMPILER
def test_a_record_says_whether_compiled_c_computed_it(tmp_path, monkeypatch):
    """Also when it is taken up again where there is no compiler, once."""
    config = dataclasses.replace(PENDULUM, epochs=3, compile=True)
    with pytest.raises(Stop):
        train.train(config, tmp_path, report=stop_at(1))
    monkeypatch.setattr(gradients, "missing", lambda d: "there is no C compiler")
    for last in (2, 3):
        with pytest.raises(Stop), pytest.warns(UserWarning, match="there is no C compiler"):
            train.train(config, tmp_path, report=stop_at(last))
    run = read(the_record(tmp_path))
    assert run.header["compiled"] is True
    assert [(line["epoch"], line["compiled"]) for line in run.others] == [(1, False)]
    assert "compiled C, then torch's" in tables.provenance([run]).rows[0].cells


def test_a_record_that_does_not_say_it_goes_on_as_before(tmp_path):
    with pytest.raises(Stop):
        train.train(PENDULUM, tmp_path, report=stop_at(1))
    path = the_record(tmp_path)
    header, epoch = lines(path)[0]
    assert header.pop("compiled") is False
    path.unlink()
    append(path, epoch, append(path, header, 0))
    train.train(PENDULUM, tmp_path)
    assert [line["kind"] for line in facts(path)] == ["run", "epoch", "epoch", "sample", "end"]
    assert "layers" not in [column.heading for column in tables.provenance([read(path)]).columns]


def test_the_commit_is_that_of_lab_and_library(tmp_path, monkeypatch):
    """Changes of either are noted; code that is installed in a folder of the repository is not its code."""

    def git(*words):
        return subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True, text=True)

    files = [tmp_path / "src" / name for name in ("ghor_lab/train.py", "ghor/linalg.py")]
    installed = tmp_path / "site-packages" / "ghor_lab" / "train.py"
    git("init", "-q")
    for path in (*files, installed):
        path.parent.mkdir(parents=True)
        path.write_text("1\n")
    git("add", "src")
    git("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "commit", "-qm", "a")
    head = git("rev-parse", "--short", "HEAD").stdout.strip()
    monkeypatch.setattr(train, "__file__", str(files[0]))
    assert the_commit() == head
    for path in files:
        path.write_text("2\n")
        assert the_commit() == f"{head}+dirty"
        path.write_text("1\n")
    monkeypatch.setattr(train, "__file__", str(installed))
    assert the_commit() is None


def test_a_run_begins_anew_when_it_is_forgotten(tmp_path):
    train.train(PENDULUM, tmp_path)
    before = facts(the_record(tmp_path))
    train.forget(the_record(tmp_path))
    assert [p.suffix for p in tmp_path.iterdir()] == [".lock"]
    train.train(PENDULUM, tmp_path)
    assert facts(the_record(tmp_path)) == before


def test_the_lock_is_held_while_a_run_is_in_hand(finished):
    path = the_record(finished)
    with train.in_hand(path), pytest.raises(train.Busy, match=f"{path} is locked by another process"):
        train.train(PENDULUM, finished)
    train.train(PENDULUM, finished)


def test_of_a_run_that_is_longer_the_last_epoch_that_was_asked_for_is_shown(finished):
    seen = []
    config, done = dataclasses.replace(PENDULUM, epochs=1), Future()
    done.set_result(None)
    execute.watch([config], finished, lambda config, epoch, line: seen.append((epoch, line["epoch"])), [done])
    assert seen == [(1, 1)]


def test_runs_that_are_left_are_told(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    path, seen = the_record(tmp_path), []
    other = dataclasses.replace(PENDULUM, label="other")
    with train.in_hand(path):
        left = execute.one_by_one([PENDULUM, other], tmp_path, None, lambda *args: seen.append(args[0]))
    assert len(left) == 1
    assert str(path) in left[0]
    assert seen == [other, other]
