"""benchmarks/: what they measure is right, and they run; how long anything takes is not asserted."""

import json
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import measure
import workloads
from workloads import CONTENDERS, OURS, WORKLOADS, Contender, at, contenders


def run(monkeypatch, capsys, path, *words):
    """The record of `measure.py` and what it prints."""
    monkeypatch.setattr(sys, "argv", ["measure.py", *words, "--quick", "--threads", "1", "--json", str(path)])
    threads = torch.get_num_threads()
    try:
        measure.main()
    finally:
        torch.set_num_threads(threads)
    return json.loads(path.read_text()), capsys.readouterr().out


def test_the_table_names_each_workload_once_and_only_contenders_that_there_are():
    names = [w.name for w in WORKLOADS]
    assert len(names) == len(set(names))
    assert {name for w in WORKLOADS for name in w.contenders} <= set(CONTENDERS)
    assert {"time", "kernels", "memory", "calls", "beside", "grid"} == set().union(
        *(w.measured for w in WORKLOADS)
    )


def test_one_by_one_and_stacked_take_the_same_steps_and_every_weight_moves():
    """Nobody is fast by leaving work out."""
    one = at("", "", workloads.St, 9, 3, count=8, by=(OURS, workloads.FUSED, "ghor, geodesic"))
    Y, G = torch.stack(one.points()), torch.stack([p.grad for p in workloads.leaves(one.points())])
    for name, c in contenders(one):
        (p,) = workloads.leaves([Y])
        p.grad = G
        cls, space = (torch.optim.Adam, {}) if name == workloads.FUSED else (workloads.ghor.optim.Adam, {})
        if name != workloads.FUSED:
            retraction = "geodesic" if "geodesic" in name else "cayley"
            space = {"space": workloads.St, "retraction": retraction}
        opt = cls([p], lr=workloads.LR, **space)
        for _ in range(3):
            c.step()
            opt.step()
        ends = torch.stack([x.detach() for x in c.weights()])
        torch.testing.assert_close(ends, p.detach(), rtol=0, atol=3e-7)
        assert float((ends - Y).flatten(1).norm(dim=1).min()) > 1e-3


def test_rounds_are_interleaved_and_slow_contenders_come_last():
    calls = []
    entries = {
        name: Contender(lambda name=name: calls.append(name), None, slow=name == "slow")
        for name in ("a", "slow", "b")
    }
    times = measure.timed(entries, 0.0, 6)
    rounds = [calls[i : i + 6] for i in range(0, 36, 6)]
    assert len(calls) == 36
    for visits in rounds:
        assert visits[::2] == visits[1::2]  # twice in a row
        assert sorted(visits[::2]) == ["a", "b", "slow"]
        assert visits[-1] == "slow"
    assert {visits[0] for visits in rounds} == {"a", "b"}  # shuffled
    assert all(len(t["first"]) == len(t["again"]) == 6 for t in times.values())


def test_kernels_and_calls(monkeypatch, capsys, tmp_path):
    record, text = run(
        monkeypatch, capsys, tmp_path / "k.json", "kernels", "--only", "^Adam, SPD|^Muon, Stiefel.*, 49"
    )
    rows = {(r["workload"], r["contender"]): r for r in record["rows"]}
    torch_muon = rows["Muon, Stiefel(), 49 x 7", workloads.MUON]
    assert torch_muon["memory"] == torch_muon["state"] == 1  # its momentum
    assert all(r["kernels"] > 0 and r["reads"] in (0, None) for r in record["rows"])
    assert "Muon, Stiefel(), 49 x 7" in text
    record, text = run(monkeypatch, capsys, tmp_path / "c.json", "calls", "--only", "SGD")
    (row,) = record["rows"]
    assert row["calls"] == sum(row["by"]["files"].values()) > 0
    assert f"{row['calls']} calls of" in text
