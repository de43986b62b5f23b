"""`ghor bench`, and the benchmarks that share its parts: what they time is right; how long it takes is not
asserted."""

import importlib
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn.functional import cross_entropy

from ghor_lab import bench, paper
from ghor_lab.config import OPTIMIZERS
from ghor_lab.networks import VisionTransformer

FOLDER = Path(__file__).parents[2] / "benchmarks"
ALL = {
    "ghor Adam, Cayley, fused | one stacked",
    "ghor Adam, Cayley, fused | 336 tensors",
    "torch Adam, fused | 336 tensors",
    "torch Adam, foreach | 336 tensors",
}


@pytest.fixture
def console():
    return Console(width=100, record=True, file=io.StringIO())


@pytest.fixture
def few(monkeypatch):
    """Eight weights are enough here."""
    monkeypatch.setattr(bench, "COUNT", 8)
    monkeypatch.setattr(bench, "WARMUP", 1)


def test_the_table(few, console, monkeypatch):
    monkeypatch.setitem(sys.modules, "geoopt", None)  # not installed
    monkeypatch.setattr(bench, "busy", lambda: True)
    calls = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    record = bench.bench(console, rounds=2, threads=2)
    assert calls == [2, torch.get_num_threads()]  # and back
    assert {f"{row['name']} | {row['layout']}" for row in record["rows"]} == ALL
    assert (record["rounds"], record["threads"]) == (2, 2)
    json.dumps(record)
    for row in record["rows"]:
        assert row["ms"] > 0
        # six steps of 1e-3: Euclidean Adam is off by the square root of the number of entries times that
        assert row["drift"] < 1e-6 if row["name"].startswith("ghor") else 1e-3 < row["drift"] < 1
        assert (row["over_torch_fused"] == 1) == (row["name"] == "torch Adam, fused")
    text = console.export_text()
    for words in (
        "/ torch fused",
        "geoopt is not installed: pip install geoopt",
        "busy with something else",
        "drift",
    ):
        assert words in text
    for row in record["rows"]:
        assert f"{row['ms']:.2f}" in text


def test_geoopt_takes_part_where_it_is_installed(few, console):
    pytest.importorskip("geoopt")
    record = bench.bench(console, rounds=1)
    assert record["missing"] == []
    (row,) = [row for row in record["rows"] if row["name"].startswith("geoopt")]
    assert row["drift"] < 1e-5
    assert row["layout"] == bench.SEPARATE


@pytest.mark.parametrize("name", ["rounds", "threads"])
def test_numbers_that_make_no_sense_are_refused(name, console):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        bench.bench(console, **{name: 0})


def test_both_layouts_take_the_same_steps(few):
    """And every weight moves: nobody is fast by leaving work out."""
    Y, G = bench.problem()
    for make in (bench.ghor_adam, lambda *a: bench.torch_adam(*a, "fused")):
        one, many = (make(Y, G, layout) for layout in (bench.STACKED, bench.SEPARATE))
        start = bench.points(one)
        for c in (one, many):
            for _ in range(3):
                c.step()
        torch.testing.assert_close(
            bench.points(one), bench.points(many), rtol=0, atol=1e-7
        )  # rounded at 6e-8
        assert float(torch.linalg.matrix_norm(bench.points(one) - start).min()) > 1e-2


def test_rounds_are_interleaved_and_warm_up_is_left_out():
    calls = []

    def contender(name, parametrized=False):
        return bench.Contender(name, "layout", lambda: calls.append(name), list, parametrized)

    told = []
    entries = [contender("a"), contender("slow", parametrized=True), contender("b")]
    times = bench.measure(entries, repeats=4, warmup=2, tell=lambda: told.append(len(calls)))
    assert told == [6, 12, 18, 24, 30, 36]
    for i in range(0, 36, 6):
        visits = calls[i : i + 6]
        assert visits[::2] == visits[1::2]  # twice in a row
        assert sorted(visits[::2]) == ["a", "b", "slow"]
        assert visits[-1] == "slow"
    assert {calls[i] for i in range(0, 36, 6)} == {"a", "b"}  # shuffled
    assert all(len(t["first"]) == len(t["again"]) == 4 for t in times.values())


# -- benchmarks/training.py ----------------------------------------------------------------------------------


@pytest.fixture
def training(monkeypatch, tmp_path):
    """The script, at a batch of 4 and without measuring the machine."""
    monkeypatch.setenv("GHOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("training", "common"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("training")
    common = importlib.import_module("common")
    machine = {
        "cpu": "a processor",
        "capability": "AVX",
        "cores": 2,
        "threads": 1,
        "load": 0.1,
        "busy": False,
    }
    machine |= {"python": "3", "torch": "2", "matmul_gflops": 100.0, "copy_gbs": 20.0}
    monkeypatch.setattr(module, "machine", machine.copy)
    monkeypatch.setattr(module, "BATCH", 4)
    monkeypatch.setattr(module, "POINTS", 8)
    monkeypatch.setattr(module, "STEPS", 1)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    for m in (module, common):
        sys.modules.pop(m.__name__, None)


def test_training_times_every_configuration(training, tmp_path, monkeypatch, capsys):
    path = tmp_path / "training.json"
    monkeypatch.setattr(
        sys, "argv", ["training.py", "--threads", "1", "--rounds", "2", "--warmup", "1", "--out", str(path)]
    )
    training.main()
    record, text = json.loads(path.read_text()), capsys.readouterr().out
    names = [row["name"] for row in record["transformer"]]
    assert set(names) == {*OPTIMIZERS, training.PLAIN}
    assert {row["name"] for row in record["pendulum"]} == {*OPTIMIZERS[:-1], training.PLAIN}
    for row in record["transformer"] + record["pendulum"]:
        assert all(len(rounds) == 2 for rounds in row["rounds_ms"].values())
        assert row["ad"][1] > 0
        assert row["direction"][1] > 0
        assert (row["retraction"][1] > 0) == (row["name"] != "standard-adam")
        shares = [100 * (d + r) / (ad + d + r) for ad, d, r in zip(*row["rounds_ms"].values(), strict=True)]
        assert row["share_percent"][1] == pytest.approx(sum(shares) / 2)  # the median of two
        assert not (row["name"] == training.PLAIN and row["compiled"])
    for cost in paper.COSTS["mnist"].values():
        assert f"{cost.share}" in text
    assert "as in training" in text
    assert "Bar:" not in text  # which is for the paper's batch


def test_training_counts_the_flops_that_torch_counts(training):
    """torch counts the products of the plain formula; it does not need the gradient of the first block's
    input."""
    from torch.utils.flop_counter import FlopCounterMode

    model = VisionTransformer()
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model(torch.rand(4, 28, 28)), torch.zeros(4, dtype=torch.long)).backward()
    first = 2 * (3 * 49) * 49 * 4 * 16
    assert sum(training.flops().values()) == counter.get_total_flops() + first


def test_training_scales_the_bar(training):
    """At the rates of the bar it is the bar; a machine twice as slow in products has twice the time, or 1.5
    times."""
    rates = {"matmul_gflops": training.BAR_GFLOPS, "copy_gbs": training.BAR_GBS}
    assert training.limits(rates, 0.5)["bar_seconds"] == {"max": 0.5, "mean": 0.5}
    assert training.limits(rates, 0.5)["met"] == {"max": True, "mean": True}
    slower = training.limits(rates | {"matmul_gflops": training.BAR_GFLOPS / 2}, 0.8)
    assert slower["bar_seconds"] == {"max": 1.0, "mean": 0.75}
    assert slower["met"] == {"max": True, "mean": False}
    assert slower["floor_seconds"] == pytest.approx(sum(training.flops().values()) / 100e9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_contract_holds_for_torch_and_for_ghor(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    contract, path = importlib.import_module("contract"), tmp_path / "contract.json"
    monkeypatch.setattr(contract, "stamp", dict)  # the rates of the machine take a while
    monkeypatch.setattr(sys, "argv", ["contract.py", "--json", str(path)])
    contract.main()
    found = json.loads(path.read_text())["found"]
    for name in ("torch", "ghor", "ghor, Stiefel"):
        assert set(found[name]["passed"].values()) == {found[name]["configurations"]} == {15}
        assert found[name]["refused"] == (None if "Stiefel" in name else [12, 12])
        assert (found[name]["resumed_gap"], found[name]["errors"]) == (0, {})
