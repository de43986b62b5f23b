"""Does it matter to Adam which section it runs with? Implicit against transported, paired, on five problems.

    python benchmarks/gauge.py --out gauge                     # everything; half an hour
    python benchmarks/gauge.py --only a,b --out gauge          # minutes
    python benchmarks/gauge.py --only s,t --out spheres        # minutes
    python benchmarks/gauge.py --only c --epochs 5 --seeds 2 --data FOLDER
    python benchmarks/gauge.py --frames --out gauge            # spread over frames and starts (frames.py)

Adam works on coordinates, and the two sections give the complement different bases (gauges). A pair shares
the start, the data and the order of the data; only the section differs.

(a) The top-10 eigenspace of a 200 x 200 covariance with eigenvalues 1/i in a random basis, from samples:
    minimise -E |Y^T x|^2, 64 samples per step. Loss: 1 - tr(Y^T C Y) / (largest 10 eigenvalues), exact.
(b) Procrustes on St(20, 100): minimise E |Y^T x - t|^2, t = Y*^T x + noise, covariance of x with eigenvalues
    1/i in a random basis, 64 samples per step. Loss: tr((Y - Y*)^T C (Y - Y*)) / tr C, exact.
    Both in float64, from uniform starts, constant learning rates, noisy to the end, all seeds in one batch.
(c) The paper's vision transformer on MNIST, batch 2048, float32, learning rate 1e-3.
(s) The first eigenvector: (a) on the sphere S^63. (t) A direction: (b) on the sphere S^7.

Outcomes of a run are "final", the mean loss over the last 5 % of its curve; "area", the mean over all of it;
and "early", the mean over its first 10 %, where most of the descent happens and a stationary end does not
dilute it. Tests are on logarithms, at level 0.05 with Holm's correction over all of them: Wilcoxon's
signed-rank test on the pairs, and the Kolmogorov-Smirnov test on the two distributions. An equivalence test
(two one-sided t-tests on the pairs) asks whether the ratio of the geometric means lies between 1/1.05 and
1.05. As a control for (a) and (b), "turned" is the transported section on the same problem in a randomly
turned coordinate system, which is the same run in an arbitrary other gauge; it shows how much a gauge can
matter. One JSON line per epoch goes to records.jsonl, with a checkpoint beside it: a run that was killed
continues from there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import frames
import torch
from common import commit
from torch import Generator, Tensor

import ghor
from ghor_lab import data
from ghor_lab.networks import VisionTransformer

SECTIONS = ("transported", "implicit")
CONTROL = "turned"
MARGIN = 1.05
LEVEL = 0.05
TAIL, HEAD = 0.05, 0.1
OUTCOMES = ("final", "area", "early")
BATCH = 2048
SIZES = {"a": (200, 10), "b": (100, 20), "s": (64, 1), "t": (8, 1)}
EIGENSPACES = ("a", "s")
LR = {"a": 1e-2, "b": 1e-2, "c": 1e-3, "s": 1e-2, "t": 1e-2}
EPOCHS = {"a": 30, "b": 30, "c": 5, "s": 30, "t": 30}
SEEDS = {"a": 20, "b": 20, "c": 2, "s": 100, "t": 100}
TITLES = {
    "a": "top-10 eigenspace, N = 200",
    "b": "Procrustes on St(20, 100)",
    "c": "MNIST transformer",
    "s": "first eigenvector, S^63",
    "t": "direction, S^7",
}


def generator(*seed: int) -> Generator:
    """One stream of random numbers for every tuple of numbers."""
    return Generator().manual_seed(sum(s * 1_000_003**i for i, s in enumerate(seed, 1)))


# -- the problems --------------------------------------------------------------------------------------------


class Matrices:
    """All problems but (c): all seeds as a batch; an epoch is 100 steps, 10 points of the curve."""

    STEPS, EVERY, SAMPLES, NOISE = 100, 10, 64, 0.3

    def __init__(self, problem: str, section: str, seeds: list[int]) -> None:
        self.problem = problem
        N, n = SIZES[problem]
        self.space = ghor.Stiefel() if n > 1 else ghor.Sphere(flatten=2)
        setup = [generator(1, s) for s in seeds]
        draw = [ghor.Stiefel().random(N, n, generator=g, dtype=torch.float64) for g in setup]
        self.Y = torch.stack(draw).requires_grad_()
        self.root = torch.arange(1, N + 1, dtype=torch.float64).rsqrt()
        U = torch.stack(
            [torch.linalg.qr(torch.randn(N, N, generator=g, dtype=torch.float64)).Q for g in setup]
        )
        self.factor = (U * self.root).mT.contiguous()  # x = z factor with z normal, C = factor^T factor
        self.target = torch.stack(
            [ghor.Stiefel().random(N, n, generator=g, dtype=torch.float64) for g in setup]
        )
        self.samples = [generator(2, s) for s in seeds]
        if section == CONTROL:
            turn = torch.stack(
                [torch.linalg.qr(torch.randn(N, N, generator=g, dtype=torch.float64)).Q for g in setup]
            )
            self.Y = (turn @ self.Y.detach()).requires_grad_()
            self.factor, self.target, section = self.factor @ turn.mT, turn @ self.target, "transported"
        groups = [{"params": [self.Y], "space": self.space}]
        self.opt = ghor.optim.Adam(groups, lr=LR[problem], section=section)

    @torch.no_grad()
    def loss(self) -> list[float]:
        """The exact loss of every seed."""
        if self.problem in EIGENSPACES:
            captured = (self.factor @ self.Y).square().sum((-2, -1))
            return (1 - captured / self.root[: self.Y.shape[-1]].square().sum()).tolist()
        return (
            (self.factor @ (self.Y - self.target)).square().sum((-2, -1)) / self.root.square().sum()
        ).tolist()

    @torch.no_grad()
    def gradient(self) -> Tensor:
        """The gradient from fresh samples, the same for both sections."""
        N, n = self.Y.shape[-2:]
        size = (self.SAMPLES, N + n)
        drawn = torch.stack([torch.randn(size, generator=g, dtype=torch.float64) for g in self.samples])
        X = drawn[..., :N] @ self.factor
        if self.problem in EIGENSPACES:
            return -2 / self.SAMPLES * (X.mT @ (X @ self.Y))
        return 2 / self.SAMPLES * (X.mT @ (X @ (self.Y - self.target) - self.NOISE * drawn[..., N:]))

    def epoch(self) -> dict[str, Any]:
        """100 steps; the losses as one list per seed."""
        curve = []
        for step in range(self.STEPS):
            self.Y.grad = self.gradient()
            self.opt.step()
            if (step + 1) % self.EVERY == 0:
                curve.append(self.loss())
        off = float(self.space.residual(self.Y.detach()).max())
        return {"loss": [list(row) for row in zip(*curve, strict=True)], "drift": off}

    def state_dict(self) -> dict[str, Any]:
        return {
            "Y": self.Y.detach(),
            "opt": self.opt.state_dict(),
            "generators": [g.get_state() for g in self.samples],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.Y.copy_(state["Y"])
        self.opt.load_state_dict(state["opt"])
        for g, s in zip(self.samples, state["generators"], strict=True):
            g.set_state(s)

    def point(self) -> Tensor:
        """The weights, for the distance between the two runs of a pair: (seeds, N, n)."""
        return self.Y.detach()


class Transformer:
    """Problem (c): one seed; an epoch is a pass over MNIST, and every step is a point of the curve."""

    def __init__(self, section: str, seed: int, images: data.Images) -> None:
        self.x, self.test = images.train_images.float() / 255, images.test_images.float() / 255
        self.y = torch.nn.functional.one_hot(images.train_labels, 10).float()
        self.labels = images.test_labels
        self.model = VisionTransformer(generator=generator(3, seed))
        self.order = generator(4, seed)
        self.opt = ghor.optim.Adam(self.model, lr=LR["c"], section=section)

    def epoch(self) -> dict[str, Any]:
        """One shuffled pass; an incomplete last batch is dropped."""
        curve, seconds = [], {"gradient": 0.0, "step": 0.0}
        shuffled = torch.randperm(len(self.x), generator=self.order)
        for i in range(0, len(self.x) - BATCH + 1, BATCH):
            start = time.perf_counter()
            x, y = self.x[shuffled[i : i + BATCH]], self.y[shuffled[i : i + BATCH]]
            self.opt.zero_grad()
            loss = torch.linalg.vector_norm(self.model(x) - y) / torch.linalg.vector_norm(y)
            loss.backward()
            middle = time.perf_counter()
            self.opt.step()
            seconds["gradient"] += middle - start
            seconds["step"] += time.perf_counter() - middle
            curve.append(float(loss.detach()))
        with torch.no_grad():
            guess = torch.cat([self.model(part).argmax(-1) for part in self.test.split(BATCH)])
        accuracy = float((guess == self.labels).double().mean())
        steps = len(curve)
        off = float(ghor.Stiefel().residual(self.point().double()).max())
        times = {k: round(v / steps, 4) for k, v in seconds.items()}
        return {"loss": [curve], "accuracy": accuracy, "drift": off, "seconds_a_step": times}

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "opt": self.opt.state_dict(),
            "order": self.order.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.order.set_state(state["order"])

    def point(self) -> Tensor:
        """The weights on the manifold: (336, 49, 7)."""
        return torch.cat([p.detach().flatten(0, 1) for p in self.model.parameters() if p.dim() == 4])


# -- running -------------------------------------------------------------------------------------------------


def run_name(problem: str, section: str, seeds: list[int]) -> str:
    return f"{problem}-{section}-{seeds[0]}" + (f"-{seeds[-1]}" if len(seeds) > 1 else "")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records; a half-written last line is ignored."""
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def append(path: Path, record: dict[str, Any]) -> None:
    cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a") as stream:
        stream.write(("\n" if cut else "") + json.dumps(record) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def train(
    problem: str,
    section: str,
    seeds: list[int],
    epochs: int,
    out: Path,
    images: data.Images | None,
    threads: int,
) -> None:
    """Train up to `epochs`, from the last checkpoint.

    A record is written before its checkpoint: at worst it occurs twice.
    """
    name = run_name(problem, section, seeds)
    checkpoint = out / f"{name}.pt"
    run: Matrices | Transformer
    if problem == "c":
        assert images is not None
        torch.set_num_threads(threads)
        run = Transformer(section, seeds[0], images)
    else:
        torch.set_num_threads(1)  # hundreds of small products: a second thread waits more than it works
        run = Matrices(problem, section, seeds)
    done = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        done = saved["epoch"]
        run.load_state_dict(saved["run"])
    for epoch in range(done + 1, epochs + 1):
        start = time.perf_counter()
        record = {
            "run": name,
            "problem": problem,
            "section": section,
            "seeds": seeds,
            "epoch": epoch,
            "lr": LR[problem],
        }
        record |= run.epoch()
        record |= {
            "seconds": round(time.perf_counter() - start, 3),
            "commit": commit(),
            "threads": torch.get_num_threads(),
        }
        append(out / "records.jsonl", record)
        unfinished = checkpoint.with_suffix(".tmp")
        torch.save({"epoch": epoch, "run": run.state_dict(), "point": run.point()}, unfinished)
        unfinished.replace(checkpoint)
        if problem == "c" or epoch % 10 == 0:
            losses = [sum(row) / len(row) for row in record["loss"]]
            extra = (
                f", accuracy {record['accuracy']:.4f}, {record['seconds_a_step']}" if problem == "c" else ""
            )
            mean = sum(losses) / len(losses)
            print(
                f"{name}: epoch {epoch}/{epochs}, loss {mean:.5g}, {record['seconds']:.1f} s{extra}",
                flush=True,
            )


# -- the summary ---------------------------------------------------------------------------------------------


def curves(
    records: list[dict[str, Any]], problem: str, section: str, seeds: list[int], epochs: int
) -> dict[int, list[float]]:
    """seed -> loss curve; if a record occurs twice, the last one counts."""
    by: dict[tuple[int, int], list[float]] = {}
    for r in records:
        if r["problem"] == problem and r["section"] == section:
            for seed, row in zip(r["seeds"], r["loss"], strict=True):
                by[seed, r["epoch"]] = row
    whole = [s for s in seeds if all((s, e) in by for e in range(1, epochs + 1))]
    return {s: [x for e in range(1, epochs + 1) for x in by[s, e]] for s in whole}


def outcomes(curve: list[float]) -> dict[str, float]:
    tail = curve[-max(1, round(TAIL * len(curve))) :]
    head = curve[: max(1, round(HEAD * len(curve)))]
    return {"final": sum(tail) / len(tail), "area": sum(curve) / len(curve), "early": sum(head) / len(head)}


def compare(transported: list[float], implicit: list[float]) -> dict[str, Any]:
    """Tests and effect sizes on logarithms of the pairs."""
    import numpy as np
    from scipy import stats

    t, i = np.log(transported), np.log(implicit)
    d = i - t
    k, spread = len(d), float(np.std(np.concatenate([t - t.mean(), i - i.mean()]), ddof=2))
    out = {
        "pairs": k,
        "transported": {"mean": float(np.mean(transported)), "sd": float(np.std(transported, ddof=1))},
        "implicit": {"mean": float(np.mean(implicit)), "sd": float(np.std(implicit, ddof=1))},
        "ratio": float(np.exp(d.mean())),
        "implicit_lower_in": int((d < 0).sum()),
        "sd_of_log_ratio": float(d.std(ddof=1)),
        "d_paired": float(d.mean() / d.std(ddof=1)),
        "d_between_seeds": float(d.mean() / spread),
    }
    if k >= 6:
        half = float(stats.t.ppf(0.95, k - 1) * d.std(ddof=1) / math.sqrt(k))
        low, high = (float(np.exp(d.mean() + s * half)) for s in (-1, 1))
        sd = d.std(ddof=1) / math.sqrt(k)
        p = max(stats.t.sf((d.mean() + s * math.log(MARGIN)) / sd * s, k - 1) for s in (1, -1))
        out |= {
            "wilcoxon_p": float(stats.wilcoxon(d).pvalue),
            "ks": float(stats.ks_2samp(t, i).statistic),
            "ks_p": float(stats.ks_2samp(t, i).pvalue),
            "ratio_90": [low, high],
            "equivalence_p": float(p),
        }
    return out


def middle(curves: dict[int, list[float]]) -> list[float]:
    """The median curve over seeds, in four digits."""
    return [float(f"{median(losses):.4g}") for losses in zip(*curves.values(), strict=True)]


def holm(tests: dict[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values."""
    adjusted, largest = {}, 0.0
    for rank, (key, p) in enumerate(sorted(tests.items(), key=lambda kv: kv[1])):
        largest = max(largest, min(1.0, (len(tests) - rank) * p))
        adjusted[key] = largest
    return adjusted


def pair_distance(out: Path, problem: str, seeds: list[int]) -> float | None:
    """Median over the weights of ||Y_implicit - Y_transported||_F / sqrt(2 n) at the end.

    It is 1 for unrelated points.
    """
    found = []
    for group in [[s] for s in seeds] if problem == "c" else [seeds]:
        paths = [out / f"{run_name(problem, section, group)}.pt" for section in SECTIONS]
        if not all(p.exists() for p in paths):
            return None
        a, b = (torch.load(p, weights_only=True)["point"] for p in paths)
        found.append(torch.linalg.matrix_norm(a - b).double() / math.sqrt(2 * a.shape[-1]))
    return float(torch.cat(found).median())


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else None
    return {
        "cpu": model[1] if model else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def summarise(out: Path, plan: dict[str, tuple[list[int], int]]) -> dict[str, Any]:
    """Summarise the records and the last checkpoints; trains nothing."""
    records = list(read(out / "records.jsonl"))
    summary: dict[str, Any] = {
        "benchmark": "gauge",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "level": LEVEL,
        "margin": MARGIN,
        "problems": {},
    }
    tests: dict[str, float] = {}
    for problem, (seeds, epochs) in plan.items():
        pairs = {section: curves(records, problem, section, seeds, epochs) for section in SECTIONS}
        both = [s for s in seeds if all(s in pairs[section] for section in SECTIONS)]
        entry: dict[str, Any] = {"title": TITLES[problem], "lr": LR[problem], "epochs": epochs, "seeds": both}
        summary["problems"][problem] = entry
        if len(both) < 2:
            entry["missing"] = f"{len(both)} of {len(seeds)} pairs are complete"
            continue
        entry["distance_of_pairs"] = pair_distance(out, problem, seeds)
        if problem != "c":
            entry["median"] = {section: middle(pairs[section]) for section in SECTIONS}
        for outcome in OUTCOMES:
            values = [[outcomes(pairs[section][s])[outcome] for s in both] for section in SECTIONS]
            entry[outcome] = compare(*values)
            turned = curves(records, problem, CONTROL, both, epochs)
            if len(turned) == len(both):
                entry[f"{outcome} {CONTROL}"] = compare(
                    values[0], [outcomes(turned[s])[outcome] for s in both]
                )
            for test in ("wilcoxon_p", "ks_p"):
                if test in entry[outcome]:
                    tests[f"{problem} {outcome} {test}"] = entry[outcome][test]
        if problem == "c":
            last = {(r["section"], r["seeds"][0], r["epoch"]): r for r in records if r["problem"] == "c"}
            entry["epoch_loss"] = {
                f"{section} {s}": [round(sum(r["loss"][0]) / len(r["loss"][0]), 4), r["accuracy"]]
                for (section, s, e), r in sorted(last.items())
                if e == epochs
            }
    summary["holm"] = holm(tests)
    summary["differ"] = sorted(key for key, p in summary["holm"].items() if p < LEVEL)
    return summary


def report(summary: dict[str, Any]) -> str:
    m = summary["machine"]
    lines = [
        f"{m['cpu']}, {m['cores']} cores, {m['threads']} threads, torch {m['torch']}, Python {m['python']}, "
        f"commit {summary['commit']}, {summary['date']}"
    ]
    for problem, entry in summary["problems"].items():
        lines += ["", f"({problem}) {entry['title']}, Adam, lr {entry['lr']:g}, {entry['epochs']} epochs"]
        if "missing" in entry:
            lines.append(f"  {entry['missing']}")
            continue
        if entry["distance_of_pairs"] is not None:
            lines.append(
                f"  at the end the pairs are {entry['distance_of_pairs']:.2g} apart (1: unrelated points)"
            )
        for outcome in OUTCOMES:
            c = entry[outcome]
            values = ", ".join(f"{s} {c[s]['mean']:.4g} +- {c[s]['sd']:.2g}" for s in SECTIONS)
            lines.append(
                f"  {outcome:6}{values}; implicit/transported {c['ratio']:.4f}, lower in "
                f"{c['implicit_lower_in']} of {c['pairs']}; d {c['d_paired']:+.2f} (pairs), "
                f"{c['d_between_seeds']:+.2f} (spread of seeds)"
            )
            if "ks_p" in c:
                low, high = c["ratio_90"]
                verdict = "equivalent" if c["equivalence_p"] < LEVEL else "NOT shown equivalent"
                lines.append(
                    f"        Wilcoxon p = {c['wilcoxon_p']:.2g}, KS D = {c['ks']:.2f}, p = "
                    f"{c['ks_p']:.2g}; ratio in [{low:.3f}, {high:.3f}] (90 %), {verdict} within "
                    f"{100 * (summary['margin'] - 1):.0f} % (p = {c['equivalence_p']:.1e})"
                )
            if (control := entry.get(f"{outcome} {CONTROL}")) is not None:
                low, high = control.get("ratio_90", (math.nan, math.nan))
                lines.append(
                    f"        control: turned/transported {control['ratio']:.4f} in [{low:.3f}, "
                    f"{high:.3f}], sd of a pair's log ratio {control['sd_of_log_ratio']:.3f} (implicit: "
                    f"{c['sd_of_log_ratio']:.3f})"
                )
        for name, (loss, accuracy) in entry.get("epoch_loss", {}).items():
            lines.append(f"        {name}: last epoch {loss}, test accuracy {accuracy:.4f}")
    if summary["holm"]:
        found = ", ".join(summary["differ"]) or "none"
        lines += ["", f"Tests that find a difference at {summary['level']} after Holm's correction: {found}"]
    return "\n".join(lines)


def plot(out: Path, plan: dict[str, tuple[list[int], int]]) -> None:
    """One picture per problem: the curves, and for (a) and (b) the pairs of outcomes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    records = list(read(out / "records.jsonl"))
    for problem, (seeds, epochs) in plan.items():
        pairs = {section: curves(records, problem, section, seeds, epochs) for section in SECTIONS}
        if not all(pairs.values()):
            continue
        panels = 1 if problem == "c" else 1 + len(OUTCOMES)
        figure, axes = plt.subplots(
            1, panels, figsize=(6.5 if panels == 1 else 16, 4), layout="constrained", squeeze=False
        )
        left = axes[0, 0]
        for color, section in zip(("C0", "C3"), SECTIONS, strict=True):
            found = pairs[section]
            steps = np.arange(1, len(next(iter(found.values()))) + 1) * (
                1 if problem == "c" else Matrices.EVERY
            )
            if problem == "c":
                for s, style in zip(sorted(found), ("-", "--", "-.", ":"), strict=False):
                    left.plot(steps, found[s], style, color=color, linewidth=1, label=f"{section}, seed {s}")
            else:
                low, middle, high = np.quantile(np.array(list(found.values())), [0.1, 0.5, 0.9], axis=0)
                left.fill_between(steps, low, high, color=color, alpha=0.2)
                left.plot(steps, middle, color=color, label=f"{section}, median and 10 - 90 %")
        left.set(xlabel="step", ylabel="loss", yscale="linear" if problem == "c" else "log")
        left.set_title(f"{TITLES[problem]}, Adam, lr {LR[problem]:g}", fontsize=10)
        left.legend(fontsize=8)
        both = [s for s in seeds if all(s in pairs[section] for section in SECTIONS)]
        for axis, outcome in zip(axes[0, 1:], OUTCOMES, strict=False):
            t, i = ([outcomes(pairs[section][s])[outcome] for s in both] for section in SECTIONS)
            ends = [0.95 * min(t + i), 1.05 * max(t + i)]
            axis.plot(ends, ends, color="0.6", linewidth=1)
            axis.fill_between(
                ends, np.array(ends) / MARGIN, np.array(ends) * MARGIN, color="0.9", label="5 %"
            )
            axis.plot(t, i, "k.", label="a seed")
            axis.set(xlabel="transported", ylabel="implicit", xlim=ends, ylim=ends)
            axis.set_title(f"{outcome} loss", fontsize=10)
            axis.legend(fontsize=8)
        figure.savefig(out / f"gauge-{problem}.png", dpi=150)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="a,b,c", help="problems, separated by commas (default: a,b,c)")
    parser.add_argument(
        "--out", type=Path, default=Path("gauge"), help="folder of records, summary and plots"
    )
    parser.add_argument(
        "--epochs", type=int, help=f"for every problem chosen (default: {EPOCHS}; 100 steps in a and b)"
    )
    parser.add_argument("--seeds", type=int, help=f"how many pairs (default: {SEEDS})")
    parser.add_argument(
        "--lr", type=float, help=f"for every problem chosen (default: {LR}); give it an --out of its own"
    )
    parser.add_argument(
        "--data", type=Path, help="folder of the MNIST files (default: GHOR_DATA, the cache, mirrors)"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--frames", action="store_true", help="the spread over frames instead, see frames.py")
    parser.add_argument("--report", action="store_true", help="only summarise what is recorded")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    problems = args.only.split(",")
    if args.frames:
        args.out.mkdir(parents=True, exist_ok=True)
        chosen = ["a", "b", "d"] if args.only == parser.get_default("only") else problems
        frames.main(chosen, args.out, args.data, args.seeds or frames.COUNT)
        return
    if unknown := set(problems) - set(LR):
        parser.error(f"--only knows {', '.join(LR)}, not {', '.join(sorted(unknown))}")
    if args.lr:
        LR.update(dict.fromkeys(problems, args.lr))
    plan = {p: (list(range(args.seeds or SEEDS[p])), args.epochs or EPOCHS[p]) for p in problems}
    args.out.mkdir(parents=True, exist_ok=True)
    commit()
    if not args.report:
        images = data.load(data.MNIST, args.data) if "c" in problems else None
        for problem, (seeds, epochs) in plan.items():
            for group in [[s] for s in seeds] if problem == "c" else [seeds]:
                for section in SECTIONS if problem == "c" else (*SECTIONS, CONTROL):
                    train(problem, section, group, epochs, args.out, images, args.threads)
    summary = summarise(args.out, plan)
    print(report(summary))
    unfinished = args.out / "summary.json.tmp"
    unfinished.write_text(json.dumps(summary, indent=1) + "\n")
    unfinished.replace(args.out / "summary.json")
    plot(args.out, plan)


if __name__ == "__main__":
    main()
