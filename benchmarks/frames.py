"""How much does the frame matter? The spread of outcomes over 30 random frames and over 30 starts.

    python benchmarks/gauge.py --frames                          # three problems; minutes
    python benchmarks/gauge.py --frames --only c --data FOLDER   # one epoch of the transformer; half an hour

A frame is the basis of the complement in the first section, and any is as good as any other. Adam works by
coordinates and depends on it; on these spaces Muon, momentum and gradient descent do not. "frames" are runs
from one start with one sequence of samples in random frames; "starts" are runs from random starts, each with
its closed-form frame and the same samples. The outcome is the logarithm of the loss, averaged over the last 5
% of the steps; the table shows its standard deviation, in percent of the loss. Random frames are compared
with the closed-form one, transported and implicit: the table shows the shift of the outcome, in standard
deviations over frames.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from common import commit, machine, machine_lines, write_json
from torch import Generator, Tensor, nn

import ghor
from ghor_lab.config import Config
from ghor_lab.protocol import random_frames
from ghor_lab.tasks import Mnist
from ghor_lab.tasks.task import on_spaces

COUNT, SAMPLES = 30, 32
STEPS = {"a": 400, "b": 400, "d": 100}  # with exact gradients, stop before the loss is down to rounding
RULES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": lambda params, **o: ghor.optim.Adam(params, lr=1e-2, **o),
    "Muon": lambda params, **o: ghor.optim.Muon(params, lr=1e-2, **o),
    "momentum": lambda params, **o: ghor.optim.SGD(params, lr=3e-2, momentum=0.9, **o),
}
TITLES = {
    "a": "top-5 eigenspace of a covariance, N = 60, from samples",
    "b": "Procrustes on St(6, 60), from samples",
    "d": "Brockett's function on St(5, 60), exact gradients",
    "c": "MNIST transformer, one epoch",
}


class Weights(nn.Module):
    """A batch of points, declared on Stiefel."""

    def __init__(self, Y: Tensor) -> None:
        super().__init__()
        self.Y = nn.Parameter(Y.clone())
        ghor.constrain(self, "Y", ghor.Stiefel())


def problem(
    key: str, gen: Generator
) -> tuple[tuple[int, int], Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """(N, n), and a function of Y (P, N, n) and samples: the exact loss less the optimum, and a gradient."""
    N, n = (60, 6) if key == "b" else (60, 5)
    U = torch.linalg.qr(torch.randn(N, N, generator=gen, dtype=torch.float64)).Q
    values = 1 / torch.arange(1, N + 1, dtype=torch.float64)
    target = ghor.Stiefel().random(N, n, generator=gen, dtype=torch.float64)
    C, root, D = U * values @ U.mT, U * values.sqrt(), torch.arange(n, 0, -1, dtype=torch.float64)

    def eigenspace(Y: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
        X = Z[:, :N] @ root.mT
        return values[:n].sum() - (Y * (C @ Y)).sum((-2, -1)), -2 / SAMPLES * X.mT @ (X @ Y)

    def procrustes(Y: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
        X, E = Z[:, :N] @ root.mT, Y - target
        return (E * (C @ E)).sum((-2, -1)), 2 / SAMPLES * X.mT @ (X @ E - 0.3 * Z[:, N : N + n])

    def brockett(Y: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
        return (values[:n] * D).sum() - (Y * (C @ Y) * D).sum((-2, -1)), -2 * C @ Y * D

    return (N, n), {"a": eigenspace, "b": procrustes, "d": brockett}[key]


def outcomes(key: str, rule: str, starts: Tensor, frames: bool, section: str, steps: int) -> Tensor:
    """log(loss) of each run, all in one batch."""
    _, loss = problem(key, Generator().manual_seed(1))
    model, samples = Weights(starts), Generator().manual_seed(2)
    opt = RULES[rule](model, section=section)
    if frames:
        random_frames(opt, [p for _, p, _ in on_spaces(model)], Generator().manual_seed(3))
    curve = []
    for step in range(steps):
        Z = torch.randn(SAMPLES, 2 * starts.shape[-2], generator=samples, dtype=torch.float64)
        value, model.Y.grad = loss(model.Y.detach(), Z)
        if step >= steps - max(1, steps // 20):
            curve.append(value)
        opt.step()
    return torch.stack(curve).mean(0).log()


def compare(key: str, rule: str, count: int = COUNT) -> dict[str, float]:
    """Deviations over frames and over starts, and where closed-form frames lie among random ones."""
    (N, n), _ = problem(key, Generator().manual_seed(1))
    steps = STEPS[key]
    gen = Generator().manual_seed(4)
    starts = torch.stack(
        [ghor.Stiefel().random(N, n, generator=gen, dtype=torch.float64) for _ in range(count)]
    )
    same = starts[:1].expand_as(starts)
    over = outcomes(key, rule, same, True, "transported", steps)
    among = outcomes(key, rule, starts, False, "transported", steps)
    closed, implicit = (outcomes(key, rule, starts[:1], False, s, steps) for s in ("transported", "implicit"))
    return summary(over, among, closed, implicit)


def summary(over: Tensor, among: Tensor, closed: Tensor, implicit: Tensor) -> dict[str, float]:
    sd = float(over.std())
    out = {"loss": math.exp(float(over.mean())), "frames_sd": sd, "starts_sd": float(among.std())}
    for name, x in (("closed_form", closed), ("implicit", implicit)):
        out[name] = float(x - over.mean()) / sd if sd > 1e-6 else 0.0
    return out


def transformer(rule: str, out: Path, folder: Path | None, count: int) -> dict[str, float]:
    """One epoch of the paper's transformer, batch 2048: the mean loss of its last 5 steps.

    Every finished run is kept in frames-mnist.json and not repeated. Rules that do not depend on the frame
    need only a few runs to show it.
    """
    path, count = out / "frames-mnist.json", count if rule == "Adam" else min(count, 4)
    kept: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    task = Mnist(Config("mnist", "geometric-adam", (0,), 1, 1e-3, 2048), folder)
    task.read()

    def outcome(start: int, frame: int | None, section: str) -> Tensor:
        name = f"{rule}, start {start}, frame {'closed form' if frame is None else frame}, {section}"
        if name not in kept:
            task.config = replace(task.config, seeds=(start,))
            task.model = model = task.network()
            opt = RULES[rule](model, section=section)
            for group in opt.param_groups:
                turns = rule == "Muon" and not isinstance(group["space"], ghor.Euclidean)
                group["lr"] = 3e-3 if turns else 1e-3
            if frame is not None:
                random_frames(opt, [p for _, p, _ in on_spaces(model)], Generator().manual_seed(1000 + frame))
            losses = []
            for batch in task.batches(1):
                opt.zero_grad()
                losses += task.losses(batch)
                opt.step()
            kept[name] = sum(losses[-5:]) / 5
            write_json(kept, path)
            print(f"{name}: {kept[name]:.4f}", flush=True)
        return torch.tensor(kept[name], dtype=torch.float64).log()

    over = torch.stack([outcome(0, k, "transported") for k in range(count)])
    among = torch.stack([outcome(k, None, "transported") for k in range(count)])
    return summary(over, among, outcome(0, None, "transported"), outcome(0, None, "implicit"))


def draw(kept: dict[str, float], path: Path) -> None:
    """Adam on the transformer: one point per run, over frames and over starts."""
    from matplotlib.figure import Figure

    runs = [
        (name, loss)
        for name, loss in kept.items()
        if name.startswith("Adam") and name.endswith("transported")
    ]
    closed = {name for name, _ in runs if "closed form" in name}
    rows = {
        "random frames, one start": [loss for name, loss in runs if name not in closed],
        "random starts": [loss for name, loss in runs if name in closed],
    }
    figure = Figure(figsize=(7, 1.8), layout="constrained")
    axes = figure.subplots()
    for y, losses in enumerate(rows.values()):
        axes.plot(losses, [y] * len(losses), "|", color=f"C{y}", markersize=22)
    axes.set(
        yticks=range(len(rows)),
        yticklabels=rows,
        ylim=(1.6, -0.6),
        xlabel="loss at the end of the first epoch",
    )
    figure.savefig(path, dpi=90)


def report(record: dict[str, Any]) -> str:
    """Print the table."""
    lines = [*machine_lines(record), ""]
    lines.append(
        f"{'problem':<56}{'rule':<10}{'loss':>10}{'frames':>10}{'starts':>10}{'closed':>8}{'implicit':>10}"
    )
    for row in record["rows"]:
        lines.append(
            f"{TITLES[row['problem']]:<56}{row['rule']:<10}{row['loss']:>10.2e}"
            f"{100 * row['frames_sd']:>9.2g}%"
            f"{100 * row['starts_sd']:>9.2g}%{row['closed_form']:>+8.1f}{row['implicit']:>+10.1f}"
        )
    return "\n".join(lines)


def main(only: list[str], out: Path, folder: Path | None, count: int) -> None:
    """Run the requested problems; the record goes to frames.json, where rows of other problems stay."""
    path = out / "frames.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [row for row in before if row["problem"] not in only]
    for key in only:
        for rule in RULES:
            found = transformer(rule, out, folder, count) if key == "c" else compare(key, rule, count=count)
            rows.append({"problem": key, "rule": rule, **found})
            print(rows[-1], flush=True)
    record = {
        "benchmark": "frames",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "count": count,
        "steps": STEPS,
        "rows": rows,
    }
    if "c" in only:
        draw(json.loads((out / "frames-mnist.json").read_text()), out / "frames.png")
    print(report(record))
    write_json(record, path)
