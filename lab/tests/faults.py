"""A command that was disturbed, given again, must leave what `undisturbed` leaves: record and weights, bit
for bit."""

import shutil

from runs import PENDULUM, facts, names, the_record, undisturbed, weights

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


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def copied(folder, argv=TWO):
    shutil.copytree(undisturbed(*argv), folder, dirs_exist_ok=True)
    return the_record(folder), the_record(folder).with_suffix(".ckpt")
