"""The command `ghor` as a person meets it."""

import itertools
import json
import os
import re
import shutil
import signal
import sys

import pytest
import torch
import typer
from runs import PENDULUM, forks, make_mnist, names, the_record, undisturbed, until
from typer.testing import CliRunner

import ghor
import ghor_lab
from ghor_lab import checkpoint, execute, plan, progress
from ghor_lab.check import runs_in, shown
from ghor_lab.cli import app
from ghor_lab.config import Config

TWO = (*PENDULUM, "--epochs", "2")
COMMANDS = ("run", "caught", "report", "pack", "numbers", "data", "check", "bench")


def call(*argv, code=0, columns=100):
    done = CliRunner(env={"COLUMNS": str(columns), "TERM": "dumb", "NO_COLOR": "1"}).invoke(
        app, [str(a) for a in argv]
    )
    assert done.exit_code == code, done.output
    return done.output


# -- help ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 120])
def test_help_teaches(columns):
    """Every command, every option, and examples that keep their lines."""
    text = call("--help", columns=columns)
    for name in (*COMMANDS, "--version"):
        assert name in text
    assert re.search(r"^ ghor run pendulum +train, or continue where it stopped *$", text, re.MULTILINE)
    text = call("run", "--help", columns=columns)
    for line in (
        r"ghor run pendulum +the paper's table: 4 optimizers, 10 seeds",
        r"ghor run mnist --seeds 0-1 +5 optimizers, 2 seeds, 25 epochs",
        "torchrun --nproc-per-node 2 --no-python ghor run mnist",
    ):
        assert re.search(f"^ {line} *$", text, re.MULTILINE), line
    assert max(map(len, text.splitlines())) <= columns
    assert "[default: (pendulum 1000, others 25)]" in text


def test_every_option_says_what_it_does():
    commands = typer.main.get_command(app).commands
    assert set(commands) == set(COMMANDS)
    for command in commands.values():
        assert len(command.help) > 20
        for parameter in command.params:
            assert len(getattr(parameter, "help", None) or "") > 5, f"{command.name} {parameter.name}"


def test_the_help_names_no_types_of_python():
    for command in ((), *((name,) for name in COMMANDS)):
        assert not re.search(r"<|\blist\[", call(*command, "--help")), command


def test_version_and_nothing():
    assert re.fullmatch(rf"ghor {re.escape(ghor.__version__)}, torch \S+\n", call("--version"))
    assert "Usage" in call(code=2)


# -- bad commands --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("run pendulum --seeds x", "got 'x'"),
        ("run pendulum --seeds 5-3", "--seeds takes 0-9 or 0,3,5"),
        ("run pendulum --seeds 5-", "--seeds takes 0-9 or 0,3,5"),
        ("run text --seeds=", "--seeds takes 0-9 or 0,3,5"),
        ("run mnist -o standard-adam --manifold-lr 1", "--manifold-lr is for weights on manifolds"),
        ("run pendulum --seeds 0,0", "each number once"),
        ("run mnist --seeds 0,0", "each number once"),
        ("run pendulum --seeds 0-999999999999", "--seeds"),
        ("run pendulum --seeds -1", "--seeds"),
        ("run pendulum --set foo=3", "unknown network option 'foo'; there are full_dim"),
        ("run pendulum --set foo", "NAME=VALUE"),
        ("run pendulum --set upscale=many", "upscale must be a whole number from 1 on, got 'many'"),
        ("run pendulum --reading as-run --lr 1", "--reading"),
        ("run mnist --reading as-run", "--reading"),
        ("run pendulum --reading equal-1e-3 -o momentum", "it is of geometric-adam, scalar-moment-adam"),
        ("run pendulum -o standard-adam --lr 1e-3", "standard-adam is for mnist"),
        ("run pendulum -o standard-adam", "has no standard-adam"),
        ("run pendulum --retraction straight", "there are cayley, geodesic"),
        ("run pendulum --section none", "there are auto, transported, implicit"),
        ("run pendulum --norm none", "there are canonical, frobenius"),
        ("run mnist -o geometric-adam -o momentum --norm frobenius", "--norm is for -o scalar-moment-adam"),
        ("run pendulum --dtype half", "there are float32, float64"),
        ("run pendulum --device abacus", "unknown device 'abacus'"),
        ("run pendulum --epochs 0", "epochs must be at least 1"),
        ("run pendulum --batch-size 0", "batch_size must be at least 1"),
        ("run pendulum --threads 0", "threads must be at least 1"),
        ("run pendulum --jobs 0", "--jobs must be at least 1"),
        ("run pendulum --address here:1", "--address is for --executor ray"),
        ("run pendulum --executor ray --address here:1 --jobs 2", "not --jobs with --address, but --threads"),
        ("run mnist --lr -1", "lr must be a positive number"),
        ("run mnist --lr 0", "lr must be a positive number"),
        ("run mnist -o muon -o adamw-anchor --weight-decay 1", "--weight-decay is for -o adamw-anchor"),
        ("run mnist -o adamw-anchor --weight-decay -1", "weight_decay must be 0 or more"),
        ("run mnist --lr nan", "lr must be a positive number"),
        ("run mnist --sweep", "--sweep is for text"),
        ("run pendulum --steps 10", "--steps is for text"),
        ("run pendulum --rest-lr 1", "--rest-lr is for text"),
        ("run pendulum --steps 0", "--steps is for text"),
        ("run mnist -o standard-adam --retraction geodesic", "--retraction is for weights on manifolds"),
        ("run mnist -o standard-adam --frame random", "--frame is for weights on manifolds"),
        ("run text -o adamw -o adamh --section implicit", "--section is for weights on manifolds"),
        ("run text --epochs 3", "--epochs is not for text: --steps N"),
        ("run text --data .", "--data is not for text"),
        ("run text --manifold-lr 1", "--manifold-lr is not for text"),
        ("run text --start uniform", "--start is not for text"),
        ("run text --no-compile", "--no-compile"),
        ("run text --protocol authors", "--protocol"),
        ("run text --steps 0", "--steps must be a multiple of 50"),
        ("run text --steps 1501", "--steps must be a multiple of 50"),
        ("run text --warmup 1500", "warmup must be less than the 1500 steps"),
        ("run text -o momentum", "unknown optimizer 'momentum'; there are adamw"),
        ("run text --sweep --lr 1", "--sweep chooses these itself: not with --seeds, --lr"),
        ("run text -o adamh --weight-decay 1", "--weight-decay is for adamw, torch-muon, stiefel-anchor"),
        ("run text --set heads=3", "width must be a multiple of 2 * heads, got width=128, heads=3"),
        ("run mnist -o adamw", "unknown optimizer 'adamw'; there are geometric-adam"),
    ],
)
def test_a_bad_value_is_one_line_and_exit_code_2(argv, says, tmp_path):
    """It names the way out, and nothing is written."""
    text = call(*argv.split(), "--out", tmp_path / "out", code=2)
    assert re.fullmatch(r"error: [^\n]+\n", text)
    assert says in text
    assert not (tmp_path / "out").exists()


def test_weight_decay_of_the_anchor(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(execute, "one_by_one", lambda configs, *_: seen.extend(configs) or [])
    call("run", "mnist", "-o", "adamw-anchor", "--weight-decay", 0.3, "--out", tmp_path)
    assert [config.weight_decay for config in seen] == [0.3]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("run tennis", "pendulum"),
        ("run", "Missing argument"),
        ("run pendulum -o adam", "geometric-adam"),
        ("run pendulum --epochs many", "--epochs"),
        ("run pendulum --epoch 3", "--epochs"),
        ("train", "No such command"),
        ("data cifar", "unknown data set 'cifar'; there are mnist, fashion-mnist"),
        ("check nowhere.txt", "neither a record"),
        ("check nowhere", "nowhere: no such file or folder"),
        ("numbers nowhere.txt nowhere.md --check", "nowhere.md: no such file"),
        ("caught pendulum", "'mnist', 'fashion-mnist'"),
        ("report . --tables-only --brief", "not with --brief or --open"),
        ("bench --threads 0", "threads must be at least 1, got 0"),
    ],
)
def test_other_bad_commands(argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nowhere.txt").touch()
    assert says in " ".join(call(*argv.split(), code=2).replace("│", " ").split())
    assert names(tmp_path) == ["nowhere.txt"]


def test_words_to_values():
    assert plan.parse_seeds("0-3,7") == (0, 1, 2, 3, 7)
    assert [plan.assigned(f"a={text}") for text in ("4", "0.5", "dim")] == [
        ("a", 4),
        ("a", 0.5),
        ("a", "dim"),
    ]


def test_what_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    text = call(*TWO, "--executor", "ray", "--out", tmp_path, code=2)
    assert "pip install 'ray>=2.50'" in text
    monkeypatch.delitem(sys.modules, "ghor_lab.cli")
    monkeypatch.delattr(ghor_lab, "cli")
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=re.escape("needs typer: in a clone of ghor, pip install . ./lab")):
        ghor_lab.main()


# -- what is run ---------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """The configurations of a command, which are not run."""

    def one_by_one(configs, folder, data, show, rank, world):
        seen.append((configs, folder, data))
        return []

    seen = []
    monkeypatch.setattr(execute, "one_by_one", one_by_one)

    def configs(*argv):
        call("run", *argv)
        return seen.pop()

    return configs


def test_the_defaults_are_the_papers_table(asked, monkeypatch):
    configs, folder, data = asked("pendulum")
    assert [(c.optimizer, c.lr, c.label) for c in configs] == [
        ("geometric-adam", 1e-3, "as run"),
        ("scalar-moment-adam", 1e-2, "as run"),
        ("momentum", 1e-2, "as run"),
        ("gradient", 1e-2, "as run"),
    ]
    assert {(c.seeds, c.epochs, c.batch_size, c.threads) for c in configs} == {
        (tuple(range(10)), 1000, 256, 1)
    }
    assert (str(folder), data) == ("runs/pendulum", None)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    configs, folder, _ = asked("fashion-mnist", "--seeds", "0-1")
    assert [(c.optimizer, c.seeds) for c in configs] == [
        (o, (s,))
        for s in (0, 1)
        for o in ("geometric-adam", "scalar-moment-adam", "momentum", "gradient", "standard-adam")
    ]
    assert {(c.epochs, c.batch_size, c.lr, c.label, c.threads) for c in configs} == {
        (25, 2048, 1e-3, None, 6)
    }
    assert str(folder) == "runs/fashion-mnist"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert asked("mnist")[0][0].threads == 3


def test_options_arrive(asked, tmp_path):
    """Each of them changes the configuration that it is about."""
    options = (
        "--lr 0.5 --batch-size 7 --label x --retraction geodesic --section implicit --norm frobenius "
        "--dtype float64 --device cuda --threads 3 --no-compile --epochs 4 --seeds 5 --set blocks=2 -o "
        "scalar-moment-adam -o scalar-moment-adam"
    )
    (config,), folder, data = asked("mnist", *options.split(), "--out", tmp_path, "--data", tmp_path / "d")
    assert config == Config(
        "mnist", "scalar-moment-adam", (5,), 4, 0.5, 7, "x", norm="frobenius", retraction="geodesic",
        section="implicit", dtype="float64", device="cuda", threads=3, compile=False, network={"blocks": 2},
    )  # fmt: skip
    assert (folder, data) == (tmp_path, tmp_path / "d")


@pytest.mark.parametrize("experiment", ["pendulum", "mnist"])
def test_the_norm_is_for_one_optimizer(asked, experiment):
    """The others are the runs that they are without it."""
    configs, usual = asked(experiment, "--norm", "frobenius")[0], asked(experiment)[0]
    changed = [a.optimizer for a, b in zip(configs, usual, strict=True) if a.name != b.name]
    assert changed == ["scalar-moment-adam"]


@pytest.mark.parametrize(
    ("experiment", "flat"),
    [("mnist", ["standard-adam"]), ("text", ["adamw", "torch-muon", "adamh", "muonh", "unit-rows"])],
)
def test_the_retraction_is_for_weights_on_manifolds(asked, experiment, flat):
    """The other runs are those that they are without it."""
    configs, usual = asked(experiment, "--retraction", "geodesic")[0], asked(experiment)[0]
    assert [a.optimizer for a, b in zip(configs, usual, strict=True) if a.name == b.name] == flat


def test_the_rate_on_manifolds_is_for_weights_on_manifolds(asked):
    """The run without any is the one that it is without it."""
    configs, usual = asked("mnist", "--manifold-lr", "3e-3")[0], asked("mnist")[0]
    assert [c.manifold_lr for c in configs] == [3e-3] * 4 + [None]
    assert configs[-1] == usual[-1]


def test_the_authors_protocol(asked):
    (config, standard), _, _ = asked(
        "mnist", "--protocol", "authors", "-o", "geometric-adam", "-o", "standard-adam"
    )
    assert (config.start, config.frame, config.loss) == ("authors", "random", "after")
    assert (standard.start, standard.frame, standard.loss) == ("uniform", "closed-form", "after")
    options = "--protocol authors --frame closed-form --loss before --warmup 10 -o momentum"
    (config,), _, _ = asked("mnist", *options.split())
    assert (config.start, config.frame, config.loss, config.warmup) == (
        "authors",
        "closed-form",
        "before",
        10,
    )
    (config,), _, _ = asked("mnist", "--start", "authors", "-o", "momentum")
    assert config == Config(
        "mnist", "momentum", (0,), 25, 1e-3, 2048, threads=config.threads, start="authors"
    )
    assert "for mnist and fashion-mnist" in call("run", "pendulum", "--protocol", "authors", code=2)


def test_readings(asked):
    configs, _, _ = asked("pendulum", "--reading", "as-stated", "--reading", "equal-1e-2")
    assert [(c.label, c.optimizer, c.lr) for c in configs][-3:] == [
        ("as stated", "gradient", 1e-4),
        ("equal 1e-2", "geometric-adam", 1e-2),
        ("equal 1e-2", "scalar-moment-adam", 1e-2),
    ]
    again = [word for name in ("as-run", "as-run", "equal-1e-3") for word in ("--reading", name)]
    configs, _, _ = asked("pendulum", *again, "--label", "x")
    rates = [("geometric-adam", 1e-3), ("scalar-moment-adam", 1e-2), ("momentum", 1e-2), ("gradient", 1e-2)]
    assert [(c.optimizer, c.lr) for c in configs] == [*rates, ("scalar-moment-adam", 1e-3)]  # each run once
    configs, _, _ = asked("pendulum", "--lr", "0.1", "-o", "momentum")
    assert [(c.label, c.optimizer, c.lr, len(c.seeds)) for c in configs] == [(None, "momentum", 0.1, 10)]


def test_begin_anew(tmp_path):
    """--restart removes the asked runs and no others, before any is trained."""
    forks().run(*TWO, "-o", "momentum", "--out", tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.glob("*.jsonl")}
    forks().run(*TWO, "--out", tmp_path, "--restart")
    changed = [name for name, raw in before.items() if (tmp_path / name).read_bytes() != raw]
    assert [name.partition("-as-run")[0] for name in changed] == ["geometric-adam"]


def test_what_cannot_begin_anew_is_kept(tmp_path, monkeypatch):
    """The device is tried before records are removed."""

    def none(device):
        raise ValueError(f"device {device} cannot be used")

    shutil.copytree(undisturbed(*TWO), tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr("ghor_lab.cli.check_device", none)
    assert "device cpu cannot be used" in call(*TWO, "--out", tmp_path, "--restart", code=2)
    assert names(tmp_path) == names(undisturbed(*TWO))


def test_a_run_with_other_threads_is_told_of(asked, tmp_path):
    """Going on with other threads is beginning anew: not without a word."""
    shutil.copytree(undisturbed(*TWO), tmp_path, dirs_exist_ok=True)
    record = the_record(tmp_path)
    more = (*PENDULUM, "--epochs", "3", "--out", tmp_path)
    told = f"starting anew, but {record} has 2 of 2 epochs with 1 thread: --threads 1 goes on with it\n"
    assert told in call(*more, "--threads", 3)
    for other in (["--threads", 1], ["--threads", 3, "--lr", 0.5], ["--threads", 3, "--restart"]):
        assert "starting anew" not in call(*more, *other)
    record.with_suffix(".ckpt").unlink()
    assert "starting anew" not in call(*more, "--threads", 3)


# -- progress ------------------------------------------------------------------------------------------------


def test_a_pipe_has_lines(tmp_path):
    text = forks().run(*TWO, "--out", tmp_path)
    assert text.startswith("1 run, 2 epochs\n")
    assert re.search(r"epoch 2 of 2, loss \d\.\d+; all: 2 of 2 epochs\n", text)
    assert f"records: {tmp_path}   next: ghor report {tmp_path}\n" in text
    assert "\x1b" not in text


def test_a_terminal_has_bars(tmp_path):
    """One for all and one for the run under way, with the loss and both times left; what is finished is a
    line."""
    argv = (*PENDULUM, "-o", "momentum", "--epochs", "4", "--out", tmp_path)
    text = forks().run(*argv, columns=80, fault={"slow_epochs": 0.3})
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert re.search(r"2 runs +\S+ [1-7]/8 0:00:\d\d left", plain)
    assert re.search(r"geometric-adam 0-1 +\S+ [123]/4 loss \d\.\d{4}, 0:00:0\d left", plain)
    assert re.search(r"[\r\n]momentum 0-1: 4 epochs, loss \d\.\d{4} *[\r\n]", plain)
    assert max(len(line) for line in re.split(r"[\r\n]+", plain) if "records:" not in line) <= 80
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is there again


@pytest.mark.parametrize("columns", [None, 80])
def test_ctrl_c_says_how_to_go_on(tmp_path, columns):
    child = forks().start(*PENDULUM, "--epochs", "5000", "--out", tmp_path, columns=columns)
    until(lambda: list(tmp_path.glob("*.ckpt")))
    child.kill(signal.SIGINT)
    done = child.wait()
    assert done.code == 130, done.text
    assert "stopped. The same command resumes from the last finished epoch." in done.text
    assert "Traceback" not in done.text
    if columns:
        assert done.text.rindex("\x1b[?25h") > done.text.rindex("\x1b[?25l")


def test_what_was_stopped_says_which_command_goes_on(monkeypatch, tmp_path):
    """The same one with --restart would begin anew, and a report trains nothing."""

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(execute, "one_by_one", stopped)
    argv = (*TWO, "--out", tmp_path)
    assert "The same command resumes from the last finished epoch" in call(*argv, code=130)
    assert "The same command without --restart resumes" in call(*argv, "--restart", code=130)
    monkeypatch.setattr("ghor_lab.cli.runs_in", stopped)
    assert call("check", tmp_path, code=130) == "stopped.\n"


def test_the_time_left(monkeypatch):
    """From the epochs of this call: what was there before took no time."""
    a, b, c = (Config("mnist", "momentum", (seed,), 10, 1e-3, 1) for seed in range(3))
    now = itertools.count(0, 0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    pace = progress.Pace([a, b, c])
    assert pace.left() == ""
    assert pace.see(a, 10)  # found finished
    assert pace.left() == ""
    assert pace.see(b, 6)  # taken up after 5
    assert not pace.see(b, 6)
    assert pace.see(b, 7)
    now = itertools.count(60, 0)
    assert (pace.done, pace.total) == (17, 30)
    assert pace.left() == "0:06:30 left"  # 13 epochs, 30 seconds each
    assert progress.clock(3 * 3600 + 61.9) == "3:01:01 left"


def test_a_loss_that_is_no_number_is_shown_as_such():
    assert progress.found({"loss": [0.5, None]}) == "loss nan"
    assert progress.found({"loss": [0.5, 1.5], "test_accuracy": [97.123]}) == "loss 1.0000, 97.12 %"


def test_warnings_are_lines(tmp_path):
    argv = [*TWO, "--lr", "1e20", "--out", tmp_path]
    text = forks().run(*argv)
    assert re.search(
        r"^warning: a velocity of length .* is the learning rate intentional\?$", text, re.MULTILINE
    )
    assert "UserWarning" not in text


# -- report, data, check -------------------------------------------------------------------------------------


def test_report(tmp_path):
    there = undisturbed(*TWO)
    text = forks().run("report", there, "--out", tmp_path / "report")
    assert text.count("report.html") == 1
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
    assert "ghor run" in forks().run("report", tmp_path / "report" / "tables", code=2)
    brief = forks().run(
        "report", there, "--out", tmp_path / "report", "--brief", "--open", BROWSER="echo open %s"
    )
    assert "manifold" in brief
    assert "outcomes" not in brief
    assert f"open {(tmp_path / 'report' / 'report.html').as_uri()}" in brief


def test_data(tmp_path):
    make_mnist(tmp_path / "data")
    fault = {"mnist": str(tmp_path / "data")}
    text = forks().run("data", "mnist", "--data", tmp_path / "data", fault=fault)
    assert text == f"mnist: 50 training and 20 test images, checked, in {tmp_path / 'data' / 'mnist'}\n"
    cache = {"GHOR_CACHE": str(tmp_path / "data")}
    text = forks().run("data", "mnist", "--data", tmp_path / "nothere", fault=fault, **cache)
    assert text.startswith(
        f"mnist: there is no {tmp_path / 'nothere'}; used are those in the cache, {tmp_path / 'data'}"
    )
    assert text.endswith(f"checked, in {tmp_path / 'data' / 'mnist'}\n")
    (tmp_path / "empty").mkdir()
    text = forks().run(
        "data", "mnist", "--data", tmp_path / "empty", fault=fault, code=1, GHOR_CACHE=str(tmp_path / "cache")
    )
    assert "error: mnist: train-images-idx3-ubyte" in text
    assert "--data or GHOR_DATA" in text
    assert "Finished epochs" not in text


def test_check(tmp_path):
    there = undisturbed(*TWO)
    record = the_record(there)
    for path in (there, record, record.with_suffix(".ckpt")):
        text = call("check", path)
        assert re.search(rf"{record.stem} .* 2 of 2 .* ok .* ok, epoch 2 .* [\d.]+e-0[78]", text)
        assert text.endswith("\n1 run, as it was written\n")
    assert "no records in" in call("check", tmp_path, code=2)
    shutil.copy(record, tmp_path)
    assert re.search(r"ok +│ - +│ [\d.]+e-0[78]", call("check", tmp_path))  # the drift that the record says
    (tmp_path / "other.jsonl").write_text(json.dumps({"some": "thing"}) + "\n")
    call("check", tmp_path)
    text = call("check", tmp_path / "other.jsonl", code=1)
    assert "checksum" in text
    assert text.endswith("\n1 run, 1 with errors\n")


def test_check_goes_on_after_what_cannot_be_read(tmp_path):
    shutil.copy(the_record(undisturbed(*TWO)), tmp_path)
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    text = call("check", tmp_path, code=1)
    assert f"error: [Errno 2] No such file or directory: '{tmp_path / 'gone.jsonl'}'" in text
    assert "2 runs, 1 with errors" in text


def test_check_tells_runs_of_one_name_apart(tmp_path):
    record = the_record(undisturbed(*TWO))
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(record, tmp_path / folder)
    text = call("check", tmp_path)
    assert all(f" {folder}/{record.stem} " in text for folder in ("a", "b"))
    assert text.endswith("\n2 runs, all as they were written\n")
    found = runs_in([tmp_path / "a", tmp_path / "b"])
    assert [shown(path, [tmp_path / "a", tmp_path / "b"]) for path in found] == [
        str(p.with_suffix("")) for p in found
    ]


def test_check_finds_weights_that_are_off_their_space(tmp_path):
    shutil.copytree(undisturbed(*TWO), tmp_path, dirs_exist_ok=True)
    saved = the_record(tmp_path).with_suffix(".ckpt")
    values = checkpoint.load(saved)
    name = next(n for n, p in values["model"].items() if p.shape[-2:] == (2, 1) and "layers.2" in n)
    values["model"][name] *= 1.001
    checkpoint.save(values, saved)
    text = call("check", tmp_path, code=1)
    assert f"error: {saved}: {name} is " in text
    assert "off Stiefel()" in text
    values["model"][name] *= torch.nan
    checkpoint.save(values, saved)
    assert f"{name} is nan off" in call("check", tmp_path, code=1)


def test_check_finds_files_that_do_not_belong_together(tmp_path):
    shutil.copytree(undisturbed(*TWO), tmp_path, dirs_exist_ok=True)
    record = the_record(tmp_path)
    lines = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(lines[0])
    assert "has 0 epochs, its checkpoint is of epoch 2" in call("check", tmp_path, code=1)
    record.write_bytes(b"".join(lines))
    record.rename(tmp_path / "other.jsonl")
    text = call("check", tmp_path, code=1)
    assert f"{tmp_path / 'other.jsonl'} belongs to the run {record.stem}" in text
    assert f"{record.with_suffix('.ckpt')} has no record beside it" in text


def test_check_of_a_run_under_way(tmp_path, monkeypatch):
    """Between its looks at the two files the run may get ahead; a checkpoint that stays behind is another
    matter."""
    shutil.copytree(undisturbed(*TWO), tmp_path, dirs_exist_ok=True)
    load, epochs = checkpoint.load, [0, 2]
    monkeypatch.setattr(checkpoint, "load", lambda path: {**load(path), "epoch": epochs.pop(0)})
    call("check", tmp_path)
    epochs += [0, 0]
    assert "has 2 epochs, its checkpoint is of epoch 0" in call("check", tmp_path, code=1)


def test_check_of_another_version(tmp_path):
    shutil.copytree(undisturbed(*TWO), tmp_path, dirs_exist_ok=True)
    record = the_record(tmp_path)
    values = checkpoint.load(record.with_suffix(".ckpt"))
    values["model"].popitem()
    checkpoint.save(values, record.with_suffix(".ckpt"))
    assert re.search(
        r"error: .*\.ckpt: .* was written by another version of ghor", call("check", tmp_path, code=1)
    )
