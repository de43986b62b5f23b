"""The command `ghor` as a person meets it."""

import re
import subprocess
import sys

import pytest
from runs import MNIST, PENDULUM, facts, forks, make_mnist, the_record, undisturbed
from typer.testing import CliRunner

from ghor.lab.cli import app, parse_seeds

TWO = (*PENDULUM, "--epochs", "2")


def call(*argv, code=0):
    done = CliRunner(env={"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}).invoke(app, [str(a) for a in argv])
    assert done.exit_code == code, done.output
    return done.output


def test_help_names_every_command_and_gives_examples():
    text = call("--help")
    for name in ("run", "report", "data", "check", "bench", "--version"):
        assert name in text
    text = call("run", "--help")
    assert re.search(r"ghor run mnist --seeds 0-1 +5 optimizers", text)
    assert "torchrun --nproc-per-node 2" in text
    assert call("--version").startswith("ghor ")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("run", "pendulum", "--seeds", "x"), "got 'x'"),
        (("run", "pendulum", "--set", "foo=3"), "unknown network option 'foo'"),
        (("run", "pendulum", "--set", "foo"), "NAME=VALUE"),
        (("run", "pendulum", "--reading", "as-run", "--lr", "1"), "--reading"),
        (("run", "mnist", "--reading", "as-run"), "--reading"),
        (("run", "pendulum", "-o", "standard-adam", "--lr", "1e-3"), "standard-adam"),
        (("run", "pendulum", "--retraction", "straight"), "cayley, geodesic"),
        (("run", "pendulum", "--epochs", "0"), "epochs"),
        (("run", "pendulum", "--jobs", "0"), "--jobs"),
        (("run", "pendulum", "--address", "here:1"), "--executor ray"),
        (("run", "mnist", "--lr", "-1"), "lr"),
        (("run", "tennis"), "pendulum"),
    ],
    ids=lambda v: " ".join(v[1:]) if isinstance(v, tuple) else "",
)
def test_a_bad_command_is_one_message_and_exit_code_2(argv, says, tmp_path):
    text = call(*argv, *(["--out", tmp_path / "out"] if argv[1] != "tennis" else []), code=2)
    assert says in " ".join(text.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_seeds():
    assert parse_seeds("0-3,7") == (0, 1, 2, 3, 7)


def test_run_check_report(tmp_path):
    there = undisturbed(*TWO)
    text = forks().run("check", there)
    assert "2 of 2" in text
    text = forks().run("report", there, "--out", tmp_path / "report")
    assert text.count("report.html") == 1
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
    assert "ghor run" in forks().run("report", tmp_path / "report" / "tables", code=2)
    assert "no such" in forks().run("check", tmp_path / "nowhere", code=1).lower()


def test_a_terminal_has_bars_and_a_pipe_has_lines(tmp_path):
    text = forks().run(*TWO, "--out", tmp_path / "a", columns=100)
    assert "1 run" in text
    assert "loss" in text
    text = forks().run(*TWO, "--out", tmp_path / "b")
    assert re.search(r"epoch 2 of 2, loss \d\.\d+; all: 2 of 2 epochs", text)
    assert f"next: ghor report {tmp_path / 'b'}" in text


def test_torchrun_is_one_process(tmp_path):
    """Every batch is spread over two processes; losses agree to rounding, and only the first one writes."""
    make_mnist(tmp_path / "data")
    driver = tmp_path / "driver.py"
    folder = str(tmp_path / "data")
    driver.write_text(f"import runs, ghor.lab.cli\nruns.small_mnist({folder!r})\nghor.lab.cli.app()\n")
    losses = []
    for name, start in (
        ("one", [sys.executable]),
        ("two", [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]),
    ):
        command = [*start, str(driver), *MNIST, "--epochs", "2", "--data", folder, "--out", str(tmp_path / name)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env=environment(),
        )
        assert done.returncode == 0, done.stderr
        losses.append([line["loss"][0] for line in facts(the_record(tmp_path / name)) if line["kind"] == "epoch"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-8)  # records have nine digits


def environment():
    import os
    from pathlib import Path

    here = Path(__file__).parent
    return {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent / 'src'}", "OMP_NUM_THREADS": "1"}
