"""Records made up for tests of the report."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from ghor_lab import paper, record
from ghor_lab.pendulum import lift
from ghor_lab.report import report

OPTIMIZERS = list(paper.OUTCOMES["mnist"])
STATE = {"entries_per_manifold_weight": 3087, "total_entries": 1116612, "mib": 4.26}


def loss(optimizer, seed, epoch):
    return round(1.3 - 0.1 * OPTIMIZERS.index(optimizer) + 0.01 * seed - 0.2 * math.log(epoch), 6)


def header(experiment, optimizer, seeds, epochs, label=None, **config):
    settings = {"lr": 1e-3, "retraction": "cayley", "device": "cpu", "threads": 2, "network": {"blocks": 16}}
    what = {
        "experiment": experiment,
        "optimizer": optimizer,
        "label": label,
        "seeds": seeds,
        "epochs": epochs,
    }
    return {
        "kind": "run",
        "format": 1,
        "name": f"{optimizer}-{seeds}",
        "config": what | settings | config,
        "commit": "973580b",
        "ghor": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.7",
        "machine": {"system": "Linux", "processor": "a processor", "cores": 2, "memory_gib": 23.5},
        "started": "2026-11-15T23:30:00+00:00",
        "state": STATE,
    }


def epoch_line(experiment, optimizer, seeds, epoch, **change):
    values = {
        "kind": "epoch",
        "epoch": epoch,
        "loss": [loss(optimizer, seed, epoch) for seed in seeds],
        "drift": None if optimizer == "standard-adam" else [1e-7 * (seed + epoch) for seed in seeds],
        "seconds": 10.0 + epoch,
        "ms": {"ad": 700.0 + epoch, "direction": 1.0, "retraction": 2.0, "other": 3.0},
        "peak_mib": 1024.0 * epoch,
        "time": f"2026-11-15T23:{30 + epoch % 30}:00+00:00",
    }
    if experiment == "pendulum":
        values["symplecticity"] = {"encoder": [1e-7 for _ in seeds], "decoder": [2e-7 * epoch for _ in seeds]}
    else:
        values["test_accuracy"] = [50.0 + seed + epoch for seed in seeds]
    return {**values, **change}


def sample(seed):
    t = np.linspace(0, 1, 11)
    theta = np.stack([3.0 + 0.5 * np.cos(t), 6.0 + 2.0 * t])
    velocity = np.stack([-0.5 * np.sin(t), np.full_like(t, 2.0)])
    points = lift(torch.from_numpy(theta), torch.from_numpy(velocity)).numpy()
    values = {"original": points, "reconstruction": 0.9 * points, "latent": points[..., ::2]}
    return {
        "kind": "sample",
        "epoch": 3,
        "seed": seed,
        "t": list(t),
        **{k: v.tolist() for k, v in values.items()},
    }


def write(
    folder,
    experiment,
    optimizer,
    seeds,
    epochs,
    done=None,
    name=None,
    changes=lambda seeds, epoch: {},
    **settings,
):
    """A record with `done` of `epochs` epochs; returns its path."""
    done = epochs if done is None else done
    started = settings.pop("started", None)
    first = header(experiment, optimizer, seeds, epochs, **settings)
    lines = [first if started is None else {**first, "started": started}]
    lines += [epoch_line(experiment, optimizer, seeds, e, **changes(seeds, e)) for e in range(1, done + 1)]
    if done == epochs:
        lines += [sample(seeds[0])] if experiment == "pendulum" else []
        lines += [{"kind": "end", "epochs": epochs, "time": "2026-11-15T23:59:00+00:00"}]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name or f'{experiment}-{optimizer}-{seeds[0]}'}.jsonl"
    path.write_bytes(b"".join(record.encode(line) for line in lines))
    return path


def rows(out, table):
    with (out / "tables" / f"{table}.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def pick(found, **wanted):
    (row,) = [row for row in found if all(row[key] == value for key, value in wanted.items())]
    return row


def run(folders, out, width=80):
    with Path(out).with_suffix(".txt").open("w") as stream:
        page = report(folders, out, console=Console(file=stream, width=width))
    return page, Path(out).with_suffix(".txt").read_text()


@pytest.fixture(scope="module", name="mixed")
def mixed_records(tmp_path_factory):
    """Three experiments under two folders, an unfinished run among them; the report, and what the terminal
    showed."""
    root = tmp_path_factory.mktemp("mixed")
    for optimizer in OPTIMIZERS:
        for seed in (0, 1):
            write(root / "a", "mnist", optimizer, [seed], 7)
            write(root / "a" / "deeper", "fashion-mnist", optimizer, [seed], 3)
    write(root / "a", "mnist", "gradient", [2], 7, done=2)
    write(root / "a", "mnist", "gradient", [0], 3, label='<b>bold</b> & "18 x lr" | $1$', name="escape")
    for label, lr in (("as run", 1e-2), ("as stated", 1e-4)):
        for optimizer in paper.OUTCOMES["pendulum"]:
            write(
                root / "b",
                "pendulum",
                optimizer,
                [0, 1, 2],
                3,
                label=label,
                lr=lr,
                name=f"{label} {optimizer}",
            )
    before = {path: path.read_bytes() for path in root.rglob("*.jsonl")}
    page, shown = run([root / "a", root / "b"], root / "out")
    assert {path: path.read_bytes() for path in root.rglob("*.jsonl")} == before
    return root, page, shown
