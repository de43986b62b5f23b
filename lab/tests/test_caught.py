"""`ghor caught`: its configurations, its table, and that it goes on."""

import csv

import pytest
from runs import forks, make_mnist
from scipy.stats import norm
from test_cli import call

from ghor_lab import caught, execute
from ghor_lab.pool import pool
from ghor_lab.record import Run, append

SMALL = (
    *(
        "caught",
        "mnist",
        "--seeds",
        "0-1",
        "--batch-size",
        "16",
        "--no-compile",
        "--threads",
        "1",
        "--warmup",
        "2",
    ),
    *("--set", "blocks=1"),
)


def table(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_starts_frames_and_a_warm_up():
    configs = caught.configurations(("mnist", "fashion-mnist"), "geometric-adam", (0, 1), 10, batch_size=2048)
    assert len({c.name for c in configs}) == len(configs) == 2 * 5 * 2
    assert {(c.start, c.frame, c.warmup) for c in configs} == {
        ("uniform", "closed-form", 0),
        ("uniform", "random", 0),
        ("authors", "closed-form", 0),
        ("authors", "random", 0),
        ("uniform", "closed-form", 10),
    }
    assert {(c.epochs, c.lr, c.loss) for c in configs} == {(1, 1e-3, "before")}
    assert len(caught.configurations(("mnist",), "standard-adam", (0,), 10, batch_size=2048)) == 2
    rates = {"lr": 1e-2, "manifold_lr": 0.1}
    configs = caught.configurations(("mnist",), "momentum", (0,), 0, batch_size=2048, **rates)
    assert {(c.start, c.frame, c.lr, c.manifold_lr) for c in configs} == {
        ("uniform", "closed-form", 1e-2, 0.1),
        ("authors", "closed-form", 1e-2, 0.1),
    }


@pytest.mark.parametrize(("k", "n"), [(0, 1), (0, 13), (0, 30), (2, 13), (7, 52), (13, 13)])
def test_wilsons_interval(k, n):
    """Its ends are the shares at which k of n is just as far off as z deviations."""
    assert caught.Z == pytest.approx(norm.ppf(0.975), rel=1e-15)
    low, high = caught.wilson(k, n)
    assert 0 <= low <= k / n <= high <= 1
    for p in (low, high):
        if 0 < p < 1:
            assert abs(k / n - p) == pytest.approx(caught.Z * (p * (1 - p) / n) ** 0.5, rel=1e-9)


def a_run(seed, last, epochs=1, **config):
    names = {
        "experiment": "mnist",
        "optimizer": "geometric-adam",
        "seeds": [seed],
        "epochs": epochs,
        "label": None,
    }
    line = {"loss": [1.0], "test_accuracy": [50.0], "drift": [1e-7]}
    lines = [{"kind": "epoch", "epoch": i + 1, **line} for i in range(epochs)]
    if last != "unknown":
        lines[0]["last_loss"] = [last]
        lines[-1].setdefault("last_loss", [0.1])
    return Run(
        None, {"config": names | config, "started": "2026"}, lines, [{"kind": "end", "epochs": epochs}]
    )


def test_the_table_counts_seeds():
    runs = [
        *(a_run(seed, last) for seed, last in enumerate([1.0, 1.33, 1.32, None, "unknown"])),
        a_run(7, 1.34, epochs=3),
        *(a_run(seed, last, start="authors") for seed, last in enumerate([1.0, 1.33])),
        a_run(0, 1.1, warmup=10),
    ]
    found = {row.cells[0]: row.cells for row in caught.table("caught", pool(runs)[0]).rows}
    titles = ["Geometric Adam", "Geometric Adam, authors' start", "Geometric Adam, 10 steps of warm-up"]
    assert [found[title][2:4] for title in titles if title in found] == [(5, 3), (2, 1), (1, 0)]
    assert found["Geometric Adam"][6] == "1, 3, 7"
    assert found["Geometric Adam, all starts and frames"][2:4] == (7, 4)
    low, high = caught.wilson(3, 5)
    assert found["Geometric Adam"][5] == (100 * low, 100 * high)
    assert caught.table("caught", pool([a_run(0, "unknown")])[0]) is None


def test_it_trains_counts_and_goes_on(tmp_path):
    data, out = tmp_path / "data", tmp_path / "caught"
    make_mnist(data)
    argv = (*SMALL, "--data", data, "--out", out)
    text = forks().run(*argv, fault={"mnist": str(data)})
    assert "95 % interval (%)" in text  # a pipe is wide enough for the heading
    rows = table(out / "caught.csv")
    assert [(row["runs"], row["caught"]) for row in rows] == [("2", "0")] * 5 + [("8", "0")]
    assert float(rows[0]["interval_min"]) == 0
    assert rows[0]["configuration"] == "Geometric Adam"
    before = {path: path.read_bytes() for path in out.glob("*.jsonl")}
    assert len(before) == 10
    forks().run(*argv[:2], "--seeds", "0-2", *argv[4:], fault={"mnist": str(data)})
    assert all(path.read_bytes() == content for path, content in before.items())
    assert [row["runs"] for row in table(out / "caught.csv")] == ["3"] * 5 + ["12"]
    forks().run("report", out, "--out", tmp_path / "report")
    assert table(tmp_path / "report" / "tables" / "mnist-caught.csv") == table(out / "caught.csv")


def test_what_is_left_is_told_and_the_others_are_counted(tmp_path, monkeypatch):
    """Records that are damaged, and those that others have just begun."""
    configs = caught.configurations(("mnist",), "momentum", (0,), 0, batch_size=2048, threads=1)
    monkeypatch.setattr(execute, "one_by_one", lambda *_: ["one of them"])
    argv = ("caught", "mnist", "-o", "momentum", "--seeds", "0", "--warmup", "0", "--threads", 1)
    header = {"kind": "run", "format": 1, "started": "2026"}
    line = {"kind": "epoch", "epoch": 1, "loss": [1.0], "last_loss": [1.0], "test_accuracy": [50.0]}
    first, second = (tmp_path / f"{config.name}.jsonl" for config in configs)
    for path, config in zip((first, second), configs, strict=True):
        size = append(path, {**header, "name": config.name, "config": config.to_dict()}, 0)
        append(path, {**line, "drift": None}, size)
    first.write_bytes(b"x" + first.read_bytes()[1:])
    text = call(*argv, "--out", tmp_path, code=1)
    assert "0 to 79" in text  # Wilson's interval of one run
    assert text.endswith("left: one of them\n")
    second.write_bytes(second.read_bytes().splitlines(keepends=True)[0])
    assert call(*argv, "--out", tmp_path, code=1).endswith("\nleft: one of them\n")


def test_bad_commands_are_refused(tmp_path):
    for words in (
        ["caught", "mnist", "-o", "moun"],
        ["caught", "--seeds", "x"],
        ["caught", "-j", "0"],
    ):
        assert "error" in forks().run(*words, "--out", tmp_path, code=2).lower()
