"""Configurations, the options that their fields make, and the commands: codes, messages, interrupts."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentTypeError
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers.lab import PENDULUM, SMALL, facts, weights
from rich.console import Console

from ghor_lab import cli, progress, runs, train
from ghor_lab.config import EXPERIMENTS, PAPER, READINGS, TEXT, Config, usual
from ghor_lab.language import METHODS
from ghor_lab.plan import plan, reader
from ghor_lab.record import read

LAB = Path(__file__).parents[1]
TINY = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
RUN = ["run", "pendulum", "-o", "geometric-adam", "--seeds", "0-1", "--batch-size", "5050", *TINY]


def call(*arguments, code=0):
    """What a command writes; its exit code has to be this one."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            found = cli.main([str(a) for a in arguments])
        except SystemExit as end:  # of argparse
            found = end.code
    assert found == code, text.getvalue()
    return text.getvalue()


# -- configurations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [*plan("pendulum", {}), *plan("mnist", {}), *plan("text", {})], ids=lambda c: c.name
)
def test_a_configuration_comes_back_from_its_record(config):
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_names_depend_on_everything_but_the_length():
    """That of the language model decides its rates."""
    base = Config("mnist", "geometric-adam", (3,), 25, 1e-3)
    assert base.name.startswith("geometric-adam-lr0.001-seed3-")
    assert dataclasses.replace(base, epochs=500).name == base.name
    assert dataclasses.replace(base, lr=1e-3, momentum=0.5).name == base.name
    others = [{"lr": 1e-2}, {"label": "x"}, {"threads": 2}, {"network": {"blocks": 4}}, {"start": "authors"}]
    names = {dataclasses.replace(base, **change).name for change in others}
    assert len(names | {base.name}) == 6
    text = Config("text", "adamw", (0,), 30, 3e-3, 8, every=50)
    assert dataclasses.replace(text, epochs=6).name != text.name
    assert "/" not in dataclasses.replace(base, label="../a b").name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"experiment": "cifar"}, "unknown experiment 'cifar'; there are pendulum, mnist"),
        ({"optimizer": "sgd"}, "unknown optimizer 'sgd'"),
        ({"optimizer": "adamw"}, "mnist is not trained with adamw"),
        ({"experiment": "pendulum", "optimizer": "standard-adam"}, "pendulum is not trained with standard"),
        ({"seeds": (1, 1)}, r"different numbers from 0 to 2\^40, got \[1, 1\]"),
        ({"seeds": (0, 1)}, r"trains one seed a run, got \[0, 1\]"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"lr": float("nan")}, "lr must be positive, got nan"),
        ({"betas": (0.9, 1.0)}, "betas must be from 0 to below 1, got 1.0"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        (
            {"optimizer": "standard-adam", "start": "authors"},
            "start is for .*: not for mnist with standard-adam",
        ),
        ({"norm": "frobenius"}, "norm is for scalar-moment-adam: not for mnist with geometric-adam"),
        ({"every": 5}, "every is for text: not for mnist"),
        ({"frame": "random", "section": "implicit"}, "an implicit section has no frame to choose"),
        ({"network": {"blocks": 0}}, "network option blocks must be a whole number from 1 on, got 0"),
        ({"network": {"depth": 1}}, "unknown network option 'depth'"),
    ],
)
def test_what_makes_no_sense_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        Config(**{"experiment": "mnist", "optimizer": "geometric-adam", **change})


# -- plans ---------------------------------------------------------------------------------------------------


def test_without_options_the_runs_are_the_papers():
    found = plan("pendulum", {})
    assert [(c.optimizer, c.lr, c.label, len(c.seeds), c.epochs) for c in found] == [
        (o, READINGS["as run"][o], "as run", 10, 1000) for o in PAPER[:4]
    ]
    assert [(c.optimizer, c.seeds, c.lr, c.batch_size) for c in plan("mnist", {"seeds": [0, 1]})] == [
        (o, (seed,), 1e-3, 2048) for seed in (0, 1) for o in PAPER
    ]
    found = plan("text", {})
    assert [(c.optimizer, c.lr) for c in found] == [(o, METHODS[o].rate) for o in TEXT]
    assert {(c.epochs * c.every, c.warmup, c.betas) for c in found} == {(1500, 150, (0.9, 0.95))}
    assert tuple(METHODS) == TEXT


def test_several_values_make_a_run_for_each_combination():
    given = {"optimizer": ["geometric-adam"], "lr": [1e-3, 1e-2], "start": ["uniform", "authors"]}
    found = plan("mnist", given)
    assert [(c.lr, c.start) for c in found] == [
        (1e-3, "uniform"), (1e-3, "authors"), (1e-2, "uniform"), (1e-2, "authors")
    ]  # fmt: skip
    assert len(plan("pendulum", {}, list(READINGS))) == 4 + 4 + 2 + 2


def test_a_field_goes_to_those_who_have_a_use_for_it():
    found = plan("mnist", {"norm": ["frobenius"], "frame": ["random"]})
    assert {c.optimizer for c in found if c.norm == "frobenius"} == {"scalar-moment-adam"}
    assert {c.optimizer for c in found if c.frame == "random"} == set(PAPER[:4])
    for experiment, given in (
        ("mnist", {"optimizer": ["momentum"], "norm": ["frobenius"]}),
        ("pendulum", {"start": ["authors"]}),
    ):
        with pytest.raises(ValueError, match=f"changes nothing for {experiment}"):
            plan(experiment, given)


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("lr", "1e-3,1e-2", [1e-3, 1e-2]),
        ("epochs", "3", [3]),
        ("betas", "0.9,0.95", [(0.9, 0.95)]),
        ("seeds", "0-2,7", [0, 1, 2, 7]),
        ("label", "a, b", ["a, b"]),
        ("frame", "random,closed-form", ["random", "closed-form"]),
        *[("seeds", text, None) for text in ("", "3-1", "a", "1,1", "0-9,3", "0-99999", "-1")],
        ("epochs", "1.5", None),
    ],
)
def test_options_are_read_by_the_kind_of_their_field(name, text, found):
    read = reader(Config.__dataclass_fields__[name])
    if found is None:
        with pytest.raises(ArgumentTypeError, match=r"takes (0-9 or 0,3,5|whole numbers)"):
            read(text)
    else:
        assert read(text) == found


# -- commands ------------------------------------------------------------------------------------------------


def test_every_field_is_an_option_with_its_help():
    text = " ".join(call("run", "--help").split())
    for field in dataclasses.fields(Config)[1:]:
        if field.metadata:
            assert f"--{field.name.replace('_', '-')} " in text
            assert " ".join(field.metadata["help"].split())[:20] in text
    assert all(usual("epochs", e) for e in EXPERIMENTS)
    assert re.match(r"ghor \d+\.\d+\.\d+, torch \d", call("--version"))


def test_a_run_is_made_and_looked_at(tmp_path):
    text = call(*RUN, "--epochs", 2, "-j", 1, "--out", tmp_path)
    assert "1 run, 2 epochs" in text
    assert f"records: {tmp_path}   next: ghor report {tmp_path}" in text
    (path,) = tmp_path.glob("*.jsonl")
    before = path.read_bytes()
    call(*RUN, "--epochs", 2, "-j", 1, "--out", tmp_path)
    assert path.read_bytes() == before
    assert "1 run, as written" in call("check", tmp_path)
    call(*RUN, "--epochs", 3, "-j", 1, "--out", tmp_path)
    assert len(read(path).epochs) == 3
    call(*RUN, "--epochs", 1, "-j", 1, "--out", tmp_path, "--restart")
    assert len(read(path).epochs) == 1
    assert call("pack", tmp_path, "--out", tmp_path / "kept").strip() == str(
        tmp_path / "kept" / "records.jsonl.xz"
    )
    assert "1 run, as written" in call("check", tmp_path / "kept")
    assert "tiny: 50 training and 20 test images" in call_data()


def call_data():
    from helpers.lab import TINY

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cli.data.DATASETS, "tiny", TINY)
        return call("data", "tiny")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ["run", "pendulum", "--lr", "fast"],
            2,
            "error: argument --lr: takes numbers such as 3 or 3,10, got 'fast'",
        ),
        (["run", "pendulum", "--start", "authors"], 2, "--start changes nothing for pendulum"),
        (["run", "mnist", "-j", "0"], 2, "--jobs must be at least 1, got 0"),
        (["run", "mnist", "--address", "a:1"], 2, "--address is for --executor ray"),
        (["run", "mnist", "--set", "blocks"], 2, "argument --set: takes NAME=VALUE, got 'blocks'"),
        (["run", "cifar"], 2, "invalid choice: 'cifar'"),
        (["report", "/nowhere"], 2, "/nowhere is not a folder; `ghor run` makes one"),
        (["check", "/nowhere"], 2, "/nowhere: no such file or folder"),
        (["numbers", "/nowhere.md"], 2, "/nowhere.md: no such file"),
        (["data", "cifar"], 2, "unknown data set 'cifar'; there are mnist, fashion-mnist"),
        ([], 2, "the following arguments are required: COMMAND"),
    ],
)
def test_bad_commands_say_what_is_wrong(arguments, code, words):
    assert words in call(*arguments, code=code)


def test_a_disk_that_fails_is_told_with_the_way_on(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device", "runs/a.ckpt")

    monkeypatch.setattr(train.checkpoint, "save", full)
    text = call(*RUN, "--epochs", 2, "-j", 1, "--out", tmp_path, code=1)
    assert "error: runs/a.ckpt: No space left on device" in text
    assert "Finished epochs are safe: once this is fixed, the same command resumes there." in text


def test_check_finds_what_is_wrong(finished, tmp_path):
    """And says it with the file; what other programs wrote beside is left alone."""
    shutil.copytree(finished.parent, tmp_path, dirs_exist_ok=True)
    (tmp_path / "other.jsonl").write_text('{"of": "another program"}\n')
    path = tmp_path / finished.name
    assert "as written" in call("check", tmp_path)
    saved = path.with_suffix(".ckpt")
    values = train.checkpoint.load(saved)
    changed = {
        k: v * 1.001 if k.endswith("encoder.layers.2.weight") else v for k, v in values["model"].items()
    }
    train.checkpoint.save({**values, "model": changed}, saved)
    assert "encoder.layers.2.weight is 2.0e-03 off Stiefel()" in call("check", saved, code=1)
    saved.write_bytes(b"x")
    assert "is damaged" in call("check", tmp_path, code=1)
    saved.unlink()
    raw = path.read_bytes()
    path.write_bytes(raw[:-9])
    assert "last line half written" in call("check", path)
    path.write_bytes(raw.replace(b"loss", b"lost", 1))
    assert "its checksum is wrong" in call("check", path, code=1)
    path.rename(tmp_path / "renamed.jsonl").write_bytes(raw)
    assert "belongs to the run" in call("check", tmp_path, code=1)


def test_progress_in_a_terminal_and_elsewhere(monkeypatch):
    """Bars while runs go on, a line for each that is done; time left at the pace since the first epoch."""
    configs = [PENDULUM, dataclasses.replace(PENDULUM, optimizer="momentum", epochs=4)]
    for terminal in (True, False):
        text, clock = io.StringIO(), [100.0]
        console = Console(
            file=text, force_terminal=terminal, width=100, get_time=lambda clock=clock: clock[0]
        )
        with progress.progress(console, configs) as show:
            for config, epoch in ((configs[0], 2), (configs[1], 1), (configs[1], 2), (configs[1], 2)):
                clock[0] += 30.0
                show(config, epoch, {"loss": [0.5, None if epoch < config.epochs else 0.25]})
        said = text.getvalue()
        assert "geometric-adam 0-1: 2 epochs, loss 0.3750" in said
        assert "momentum 0-1" in said
        assert "loss nan" in said
        # one epoch was there before; of the five of this command two are left, at two a minute
        assert ("3/5" if terminal else "all: 3 of 5 epochs") in said
        assert "0:01:00" in said


def test_the_six_lines_that_the_demo_ends_with(capsys):
    """They run as they stand, and a training loop goes where they say."""
    text = (LAB / "six_lines.py").read_text().split('"""')[2]
    assert len([line for line in text.splitlines() if line and not line.startswith("#")]) == 6
    assert (
        "lab/six_lines.py"
        in (LAB.parent / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    )
    before, after = text.split("# ... your training loop, as it is ...")
    lines = {}
    exec(before, lines)
    model, optimizer = lines["model"], lines["optimizer"]
    start = model.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
    exec(after, lines)
    assert not torch.equal(start, model.weight)
    assert "Stiefel()" in capsys.readouterr().out


# -- processes -----------------------------------------------------------------------------------------------


def start(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{LAB / 'src'}:{LAB.parent / 'src'}"}
    command = [sys.executable, "-m", "ghor_lab", *map(str, arguments)]
    # A shell in the background starts its processes with Ctrl-C ignored.
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=listen)


def test_interrupted_at_the_keyboard_it_resumes(tmp_path):
    """In one process, with a code of its own; the same command ends as if it had been left alone."""
    process = start(*RUN, "--epochs", 60, "-j", 1, "--out", tmp_path)
    while not any(path.stat().st_size > 2000 for path in tmp_path.glob("*.jsonl")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert "stopped. The same command resumes from the last finished epoch." in process.communicate()[1]
    assert process.returncode == 130
    (path,) = tmp_path.glob("*.jsonl")
    done = len(read(path).epochs)
    assert 1 <= done < 60
    whole = train.train(dataclasses.replace(PENDULUM, epochs=done + 1), tmp_path / "whole")
    call(*RUN, "--epochs", done + 1, "-j", 1, "--out", tmp_path)
    assert weights(path)["model"] == weights(whole)["model"]


@pytest.mark.slow
def test_two_at_a_time_are_two_one_after_the_other(tmp_path):
    """The parent shows what its processes have done; one that is killed is told."""
    configs = [PENDULUM, dataclasses.replace(PENDULUM, optimizer="momentum")]
    seen = []
    show = lambda config, epoch, line: seen.append((config.optimizer, epoch))  # noqa: E731
    assert runs.in_processes(configs, tmp_path / "a", None, show, 2) == []
    assert {("geometric-adam", 2), ("momentum", 2)} <= set(seen)
    for config in configs:
        path = train.train(config, tmp_path / "b")
        a, b = (
            [line for line in facts(folder / path.name) if line["kind"] == "epoch"]
            for folder in (tmp_path / "a", tmp_path / "b")
        )
        assert a == b
        assert weights(tmp_path / "a" / path.name) == weights(path)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'ray>=2.50'")
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_of_two_nodes(tmp_path):
    """Both nodes work, and a worker that dies is replaced: the records are those of one process."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        configs = [dataclasses.replace(PENDULUM, optimizer=o) for o in PAPER[:4]]
        left = runs.on_ray(configs, tmp_path / "a", None, lambda *args: None, 1, cluster.address)
        assert left == []
        for config in configs:
            path = train.train(config, tmp_path / "b")
            assert weights(tmp_path / "a" / path.name) == weights(path)
    finally:
        cluster.shutdown()


def test_a_cluster_that_is_not_there_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    arguments = (*RUN, "--out", tmp_path, "--executor", "ray", "--address", "127.0.0.1:1")
    assert "--executor ray needs Ray: pip install 'ray>=2.50'" in call(*arguments, code=2)
    monkeypatch.setitem(sys.modules, "ray", object())
    assert "no Ray cluster can be reached at 127.0.0.1:1" in call(*arguments, code=1)
