"""Record trajectories of every lifted optimizer on every space, and check that a change leaves them alone.

    python benchmarks/trajectories.py record before.pt         # with the code as it was
    python benchmarks/trajectories.py compare before.pt        # with the code as it is; exit 1 beyond 16 eps
    python benchmarks/trajectories.py compare before.pt --only Adam,Stiefel,float64

A case is an optimizer, a space, a section, a retraction and a dtype: 200 steps of two weights that share a
group and of one Euclidean weight. Gradients are a fixed mean plus fixed noise and do not depend on the
weights, so rounding is not fed back; now and then one of them, or all, are missing. The record keeps the
weights after some steps, the state at the end, and the state dict at step 100 as torch.save writes it, from
which a new optimizer takes the other 100 steps.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import io
import re
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from common import commit
from torch import Tensor, nn

import ghor
from ghor.baselines import ScalarMomentAdam

STEPS, HALF = 200, 100
KEPT = (1, 2, 5, 10, 50, 100, 200)
KEPT_RESUMED = (101, 110, 200)

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (ghor.optim.SGD, {"lr": 0.02}),
    "SGD-momentum": (ghor.optim.SGD, {"lr": 0.004, "momentum": 0.9, "dampening": 0.1}),
    "SGD-nesterov": (ghor.optim.SGD, {"lr": 0.004, "momentum": 0.9, "nesterov": True}),
    "Adam": (ghor.optim.Adam, {"lr": 0.01}),
    "Adam-amsgrad": (ghor.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (ghor.optim.AdamW, {"lr": 0.01}),
    "NAdam": (ghor.optim.NAdam, {"lr": 0.01}),
    "RAdam": (ghor.optim.RAdam, {"lr": 0.01}),
    "Adamax": (ghor.optim.Adamax, {"lr": 0.01}),
    "Adagrad": (ghor.optim.Adagrad, {"lr": 0.05}),
    "Adadelta": (ghor.optim.Adadelta, {"lr": 1.0}),
    "RMSprop": (ghor.optim.RMSprop, {"lr": 0.005}),
    "RMSprop-centered": (ghor.optim.RMSprop, {"lr": 0.003, "centered": True, "momentum": 0.5}),
    "Rprop": (ghor.optim.Rprop, {"lr": 0.01, "step_sizes": (1e-6, 0.03)}),
    "PaperAdam": (ghor.optim.PaperAdam, {"lr": 0.01}),
    "ScalarMomentAdam": (ScalarMomentAdam, {"lr": 0.05}),
}
SPACES: dict[str, tuple[ghor.Space, tuple[int, ...]]] = {
    "Stiefel-12x4": (ghor.Stiefel(), (12, 4)),
    "Stiefel-wide-3x7": (ghor.Stiefel(), (3, 7)),
    "Stiefel-9x8": (ghor.Stiefel(), (9, 8)),
    "Stiefel-batch-2x8x3": (ghor.Stiefel(), (2, 8, 3)),
    "Grassmann-10x3": (ghor.Grassmann(), (10, 3)),
    "SpecialOrthogonal-5x5": (ghor.SpecialOrthogonal(), (5, 5)),
    "Sphere-3x7": (ghor.Sphere(), (3, 7)),
    "SymplecticStiefel-8x4": (ghor.SymplecticStiefel(), (8, 4)),
}
SECTIONS = ("transported", "implicit")
RETRACTIONS = ("cayley", "geodesic")
DTYPES = {"float32": torch.float32, "float64": torch.float64}
EUCLIDEAN = (3, 2)
RESUMED = (
    ("cayley", "float64"),
    ("geodesic", "float32"),
)  # half of the cases are enough for loading, and save time

# Steps at which a gradient is missing, of: the first weight, the second, the Euclidean one. Up to step 100
# the two weights miss equally many with "geodesic", so that they are of one kind again when loaded; with
# "cayley" they do not.
MISSING = {
    "cayley": ({25, 33, 60, 90, 91, 150, 177}, {3, 17, 18, 25, 40, 77, 90, 91, 130, 131, 150}, {8, 90, 150}),
    "geodesic": ({25, 33, 60, 88, 90, 91, 150, 177}, {1, 2, 25, 70, 90, 91, 130, 131, 150}, {1, 90, 150}),
}


# -- cases ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    optimizer: str
    space: str
    section: str
    retraction: str
    dtype: str

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.optimizer, self.space, self.section, self.retraction, self.dtype)

    @property
    def name(self) -> str:
        return "|".join(self.parts)

    def make(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of these three weights, the last one Euclidean."""
        cls, options = OPTIMIZERS[self.optimizer]
        space, _ = SPACES[self.space]
        if isinstance(space, ghor.SymplecticStiefel):  # a tenth: its points could grow
            options = {**options, "lr": options["lr"] / 10}
            if "step_sizes" in options:
                options["step_sizes"] = (1e-6, 0.003)
        groups: Any = [
            {"params": weights[:2], "space": space},
            {"params": weights[2:], "space": ghor.Euclidean()},
        ]
        return cls(groups, section=self.section, retraction=self.retraction, **options)


def cases(only: str = "") -> Iterator[Case]:
    """All cases, or those that `only` names.

    "Adam" is Adam and Adam-amsgrad; names of one axis are alternatives.
    """
    axes: list[list[str]] = [list(OPTIMIZERS), list(SPACES), list(SECTIONS), list(RETRACTIONS), list(DTYPES)]
    wanted: list[set[str]] = [set() for _ in axes]
    for part in filter(None, only.split(",")):
        found = [{name for name in axis if name == part or name.startswith(part + "-")} for axis in axes]
        if not any(found):
            raise SystemExit(
                f"{part!r} names nothing; there are {', '.join(name for axis in axes for name in axis)}"
            )
        wanted = [w | f for w, f in zip(wanted, found, strict=True)]
    for optimizer in OPTIMIZERS:
        for space in SPACES:
            for section in SECTIONS:
                if section == "implicit" and (
                    optimizer == "RMSprop-centered"
                    or space.startswith(("SymplecticStiefel", "SpecialOrthogonal"))
                ):
                    continue  # refused, no such section, no complement
                for retraction in RETRACTIONS:
                    for dtype in DTYPES:
                        case = Case(optimizer, space, section, retraction, dtype)
                        if all(not w or part in w for w, part in zip(wanted, case.parts, strict=True)):
                            yield case


@functools.cache
def starts(space: str) -> list[Tensor]:
    """Two points and a Euclidean weight, float64."""
    generator = torch.Generator().manual_seed(1)
    kind, shape = SPACES[space]
    points = [kind.random(*shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    return [*points, torch.randn(EUCLIDEAN, generator=generator, dtype=torch.float64)]


@functools.cache
def gradients(shape: tuple[int, ...], dtype: torch.dtype) -> list[list[Tensor]]:
    """gradients[i][t - 1] of weight i at step t: mean plus noise, drawn in float64."""
    generator = torch.Generator().manual_seed(2)
    out = []
    for s in (shape, shape, EUCLIDEAN):
        mean = torch.randn(s, generator=generator, dtype=torch.float64)
        noise = torch.randn(STEPS, *s, generator=generator, dtype=torch.float64)
        out.append(list((0.5 * mean + noise).to(dtype).unbind()))
    return out


def fingerprint() -> str:
    """A fingerprint of all gradients: another torch may draw others."""
    digest = hashlib.sha256()
    for _, shape in SPACES.values():
        for g in gradients(shape, torch.float64):
            digest.update(torch.stack(g).numpy().tobytes())
    return digest.hexdigest()


# -- running -------------------------------------------------------------------------------------------------


def run(
    case: Case, weights: list[nn.Parameter], opt: torch.optim.Optimizer, first: int, last: int
) -> Iterator[int]:
    """Take steps first..last; each number follows its step."""
    grads = gradients(SPACES[case.space][1], DTYPES[case.dtype])
    missing = MISSING[case.retraction]
    for t in range(first, last + 1):
        for i, p in enumerate(weights):
            # a clone: no rule may write to the sequence
            p.grad = None if t in missing[i] else grads[i][t - 1].clone()
        opt.step()
        yield t


def snapshot(weights: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in weights]


def plain(value: Any) -> Any:
    """State without views: tensors cloned, the rest as it is."""
    if torch.is_tensor(value):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return value


def trajectory(case: Case, start: list[Tensor]) -> dict[str, Any]:
    """One case from its start to its end, with the current code."""
    weights = [nn.Parameter(w.clone()) for w in start]
    opt = case.make(weights)
    kept: dict[int, list[Tensor]] = {}
    saved = io.BytesIO()
    for t in run(case, weights, opt, 1, STEPS):
        if t in KEPT:
            kept[t] = snapshot(weights)
        if t == HALF:
            torch.save(opt.state_dict(), saved)
    state = plain(opt.state_dict()["state"])
    return {
        "weights": kept,
        "state": state,
        "saved": torch.frombuffer(saved.getbuffer(), dtype=torch.uint8).clone(),
    }


def resumed(case: Case, half: list[Tensor], saved: Tensor) -> dict[str, Any]:
    """Steps 101..200 by a new optimizer, from weights and a saved state dict."""
    weights = [nn.Parameter(w.clone()) for w in half]
    opt = case.make(weights)
    opt.load_state_dict(torch.load(io.BytesIO(saved.numpy().tobytes()), weights_only=True))
    kept = {t: snapshot(weights) for t in run(case, weights, opt, HALF + 1, STEPS) if t in KEPT_RESUMED}
    return {"resumed": kept, "resumed_state": plain(opt.state_dict()["state"])}


def whole(case: Case, start: list[Tensor], recorded: dict[str, Any] | None = None) -> dict[str, Any]:
    """Trajectory and resumption (from what was recorded, if given), and what was warned or raised."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out: dict[str, Any] = {"start": start}
        try:
            out |= trajectory(case, start)
            source = out if recorded is None or "saved" not in recorded else recorded
            if (case.retraction, case.dtype) in RESUMED:
                out |= resumed(case, source["weights"][HALF], source["saved"])
        except Exception as error:
            out["raised"] = f"{type(error).__name__}: {error}"
    out["warned"] = sorted({str(w.message) for w in caught})
    return out


def progress(done: int, total: int, begun: float, name: str) -> None:
    seconds = time.perf_counter() - begun
    end = "\n" if done == total else ""
    sys.stderr.write(
        f"\r{done}/{total}  {seconds:.0f} s of about {seconds / done * total:.0f}  {name:70}{end}"
    )
    sys.stderr.flush()


def record(path: Path, only: str) -> None:
    """Run and write; the file is complete or not there, with its sha256 beside it."""
    chosen, begun, entries = list(cases(only)), time.perf_counter(), {}
    commit()  # of the code that runs, not of what is there at the end
    for i, case in enumerate(chosen):
        start = [w.to(DTYPES[case.dtype]) for w in starts(case.space)]
        entries[case.name] = whole(case, start)
        progress(i + 1, len(chosen), begun, case.name)
    content = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "torch": str(torch.__version__),
        "gradients": fingerprint(),
        "cases": entries,
    }
    unfinished = path.with_name(path.name + ".tmp")
    torch.save(content, unfinished)
    digest = hashlib.sha256(unfinished.read_bytes()).hexdigest()
    unfinished.replace(path)
    path.with_name(path.name + ".sha256").write_text(f"{digest}  {path.name}\n")
    print(
        f"{len(entries)} cases in {time.perf_counter() - begun:.0f} s, {path.stat().st_size / 1e6:.1f} MB: "
        f"{path}"
    )
    for name, entry in entries.items():
        if "raised" in entry:
            print(f"raised: {name}: {entry['raised']}")


# -- comparing -----------------------------------------------------------------------------------------------


def flat(value: Any, where: str = "") -> dict[str, Any]:
    """Nested dicts and lists as one dict of leaves."""
    items: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if items is None:
        return {where: value}
    return {k: leaf for key, part in items for k, leaf in flat(part, f"{where}/{key}").items()}


def difference(a: Any, b: Any, eps: float, entrywise: bool) -> float:
    """In eps of max(1, |a|) entry by entry, or of the largest entry; 0 is bit-equal, inf another kind of
    thing.

    Moments are small numbers of no fixed size, so states use the largest entry.
    """
    if not (torch.is_tensor(a) and torch.is_tensor(b)):
        return 0.0 if type(a) is type(b) and a == b else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(a, b) or a.numel() == 0:
        return 0.0
    x, y = a.double(), b.double()
    scale = x.abs().clamp_min(1) if entrywise else (x.abs().max() or 1)
    worst = float(((x - y).abs() / scale).max())
    return worst / eps if worst == worst else float("inf")


@dataclass
class Row:
    cases: int = 0
    equal: int = 0
    weights: float = 0.0
    resumed: float = 0.0
    state: float = 0.0


def compare_case(case: Case, old: dict[str, Any], new: dict[str, Any], limit: float) -> tuple[Row, list[str]]:
    """The largest differences of one case, and a line for each one beyond the limit."""
    row, failures = Row(cases=1), []
    if old.get("raised") != new.get("raised"):
        failures.append(f"raised {new.get('raised')!r}, recorded {old.get('raised')!r}")
    if old["warned"] != new["warned"]:
        failures.append(f"warned {new['warned']}, recorded {old['warned']}")
    eps = torch.finfo(DTYPES[case.dtype]).eps
    for part, column in (
        ("weights", "weights"),
        ("state", "state"),
        ("resumed", "resumed"),
        ("resumed_state", "state"),
    ):
        a, b = flat(old.get(part, {})), flat(new.get(part, {}))
        a = {re.sub("/anchor$", "/frame_anchor", key): value for key, value in a.items()}  # its name in 0.1.0
        if a.keys() != b.keys():
            failures.append(
                f"{part}: only recorded {sorted(a.keys() - b.keys())}, only now {sorted(b.keys() - a.keys())}"
            )
        worst = {k: difference(a[k], b[k], eps, column != "state") for k in a.keys() & b.keys()}
        key = max(worst, key=worst.__getitem__, default=None)
        if key is not None:
            setattr(row, column, max(getattr(row, column), worst[key]))
            if worst[key] > limit:
                first = next(k for k in a if worst.get(k, 0) > limit)
                failures.append(f"{part}: {worst[key]:.1f} eps in {key}, first beyond {limit:g} in {first}")
    row.equal = int(not failures and max(row.weights, row.resumed, row.state) == 0)
    return row, failures


def compare(path: Path, only: str, limit: float) -> int:
    """Run again and print a table; returns the number of cases beyond the limit."""
    recorded = torch.load(path, weights_only=True)
    beside = path.with_name(path.name + ".sha256")
    if beside.exists() and beside.read_text().split()[0] != hashlib.sha256(path.read_bytes()).hexdigest():
        raise SystemExit(f"{path} is not what {beside.name} is of")
    if recorded["gradients"] != fingerprint():
        raise SystemExit(
            f"torch {torch.__version__} draws other gradients than torch {recorded['torch']} did"
        )
    chosen = [c for c in cases(only) if c.name in recorded["cases"]]
    if not chosen:
        raise SystemExit(f"nothing in {path} matches {only!r}")
    rows: dict[tuple[str, str, str], Row] = {}
    failed: dict[str, list[str]] = {}
    begun = time.perf_counter()
    for i, case in enumerate(chosen):
        old = recorded["cases"][case.name]
        row, failures = compare_case(case, old, whole(case, old["start"], old), limit)
        total = rows.setdefault((case.optimizer, case.space, case.section), Row())
        for key in ("cases", "equal"):
            setattr(total, key, getattr(total, key) + getattr(row, key))
        for key in ("weights", "resumed", "state"):
            setattr(total, key, max(getattr(total, key), getattr(row, key)))
        if failures:
            failed[case.name] = failures
        progress(i + 1, len(chosen), begun, case.name)
    print(f"recorded: {recorded['commit']}, {recorded['date']}, torch {recorded['torch']}")
    print(
        f"now:      {commit()}, torch {torch.__version__}; largest differences in eps; resumed: from the "
        "saved state"
    )
    print(
        f"{'optimizer':18}{'space':24}{'section':13}{'bit-equal':>10}{'weights':>10}{'resumed':>10}{'state':>10}"
    )
    for (optimizer, space, section), row in rows.items():
        print(
            f"{optimizer:18}{space:24}{section:13}{f'{row.equal}/{row.cases}':>10}{row.weights:10.1f}{row.resumed:10.1f}{row.state:10.1f}"
        )
    for name, lines in failed.items():
        for line in lines:
            print(f"FAILED {name}: {line}")
    equal = sum(row.equal for row in rows.values())
    print(
        f"{len(chosen)} cases in {time.perf_counter() - begun:.0f} s: {equal} bit-equal, {len(failed)} "
        f"failed ({limit:g} eps); largest difference of weights "
        f"{max(row.weights for row in rows.values()):.1f} eps, resumed "
        f"{max(row.resumed for row in rows.values()):.1f}, of states "
        f"{max(row.state for row in rows.values()):.1f}"
    )
    return len(failed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--eps", type=float, default=16, help="largest difference that passes, in eps (default: 16)"
    )
    parser.add_argument("--only", default="", help="names of optimizers, spaces, ..., with commas between")
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order
    if args.what == "record":
        record(args.file, args.only)
    elif compare(args.file, args.only, args.eps):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
