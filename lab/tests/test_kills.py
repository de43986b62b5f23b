"""Killed at any line, in any write, at any moment: the same command ends as if it had been left alone, bit
for bit."""

import random
import time

import pytest
from faults import THREE, TWO, copied, same
from runs import PENDULUM, facts, forks, names, the_record, undisturbed, weights


def killed(out, argv=TWO, **fault):
    undisturbed(*TWO)  # makes the file of trajectories, whose writes would count
    done = forks().start(*argv, "--out", out, fault=fault).wait()
    assert done.code == -9, done.text


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
