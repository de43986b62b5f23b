"""Record trajectories of lifted optimizers on every space, and check that a change leaves them alone.

    python benchmarks/trajectories.py record before.pt         # with the code as it was
    python benchmarks/trajectories.py compare before.pt        # with the code as it is; exit 1 beyond 1e-11
    python benchmarks/trajectories.py compare before.pt --only Adam,Stiefel

A case is an optimizer, a space, a section and a retraction: 50 steps of two weights that share a group, in
float64. Every optimizer runs on a few spaces, and three of them on all. The record has the points where
weights start and the targets that their gradients point to, so both sides compute the same. `DIFFERENCES`
names the cases that are meant to differ, and why.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ghor
from ghor.baselines.scalar_moment_adam import ScalarMomentAdam

STEPS, CLOSE = 50, 1e-11
F64, C128 = torch.float64, torch.complex128

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (ghor.optim.SGD, {"lr": 0.05}),
    "SGD-momentum": (ghor.optim.SGD, {"lr": 0.03, "momentum": 0.9, "dampening": 0.1}),
    "SGD-nesterov": (ghor.optim.SGD, {"lr": 0.03, "momentum": 0.9, "nesterov": True}),
    "Adam": (ghor.optim.Adam, {"lr": 0.03}),
    "Adam-amsgrad": (ghor.optim.Adam, {"lr": 0.03, "amsgrad": True}),
    "AdamW": (ghor.optim.AdamW, {"lr": 0.03}),
    "NAdam": (ghor.optim.NAdam, {"lr": 0.03}),
    "RAdam": (ghor.optim.RAdam, {"lr": 0.03}),
    "Adamax": (ghor.optim.Adamax, {"lr": 0.03}),
    "Adagrad": (ghor.optim.Adagrad, {"lr": 0.1}),
    "Adadelta": (ghor.optim.Adadelta, {"lr": 1.0}),
    "RMSprop": (ghor.optim.RMSprop, {"lr": 0.01}),
    "Rprop": (ghor.optim.Rprop, {"lr": 0.01}),
    "Muon": (ghor.optim.Muon, {"lr": 0.02}),
    "ScalarMomentAdam": (ScalarMomentAdam, {"lr": 0.05}),
}
EVERYWHERE = ("SGD-momentum", "Adam", "ScalarMomentAdam")
BOTH = ("transported", "implicit")
SPACES: dict[str, tuple[ghor.Space, tuple[int, ...], torch.dtype, tuple[str, ...]]] = {
    "Stiefel": (ghor.Stiefel(), (12, 4), F64, BOTH),
    "Stiefel-wide": (ghor.Stiefel(), (3, 12), F64, BOTH),
    "Stiefel-nearly-square": (ghor.Stiefel(), (9, 8), F64, BOTH),
    "Stiefel-batch": (ghor.Stiefel(), (2, 8, 3), F64, BOTH),
    "Stiefel-blocks": (ghor.Stiefel(blocks=2), (18, 4), F64, BOTH),
    "Stiefel-blocks-columns": (ghor.Stiefel(blocks=2, along="columns"), (3, 16), F64, BOTH),
    "Stiefel-kernels": (ghor.Stiefel(flatten=3), (5, 3, 3, 3), F64, BOTH),
    "Stiefel-complex": (ghor.Stiefel(), (12, 4), C128, BOTH),
    "Grassmann": (ghor.Grassmann(), (10, 3), F64, BOTH),
    "Grassmann-complex": (ghor.Grassmann(), (12, 3), C128, BOTH),
    "Flag": (ghor.Flag((2, 1)), (9, 3), F64, BOTH),
    "SpecialOrthogonal": (ghor.SpecialOrthogonal(), (5, 5), F64, BOTH[:1]),
    "Unitary": (ghor.Unitary(), (4, 4), C128, BOTH[:1]),
    "Sphere": (ghor.Sphere(), (6, 7), F64, BOTH),
    "Sphere-columns": (ghor.Sphere(along="columns"), (7, 6), F64, BOTH),
    "Sphere-short": (ghor.Sphere(), (1200, 3), F64, BOTH[1:]),
    "Sphere-radius": (ghor.Sphere(radius=2.5), (6, 7), F64, BOTH),
    "Sphere-any-radius": (ghor.Sphere(radius="start"), (6, 7), F64, BOTH),
    "Sphere-complex": (ghor.Sphere(), (6, 5), C128, BOTH),
    "Sphere-padding": (ghor.Sphere(padding_idx=1), (6, 7), F64, BOTH[1:]),
    "Hyperbolic": (ghor.Hyperbolic(), (6, 5), F64, BOTH),
    "Hyperbolic-padding": (ghor.Hyperbolic(padding_idx=0), (6, 5), F64, BOTH[1:]),
    "SPD": (ghor.SPD(), (2, 5, 5), F64, BOTH[:1]),
    "SpecialEuclidean-2": (ghor.SpecialEuclidean(), (4, 2, 3), F64, BOTH[:1]),
    "SpecialEuclidean-3": (ghor.SpecialEuclidean(), (4, 3, 4), F64, BOTH[:1]),
    "PositionsOrientations": (ghor.PositionsOrientations(), (5, 2, 3), F64, BOTH[:1]),
    "SymplecticStiefel": (ghor.SymplecticStiefel(), (8, 4), F64, BOTH[:1]),
    "SymplecticGrassmann": (ghor.SymplecticGrassmann(), (8, 4), F64, BOTH[:1]),
}
FEW = (
    "Stiefel",
    "Grassmann",
    "SpecialOrthogonal",
    "Sphere",
    "SymplecticStiefel",
)  # where every optimizer runs

# Cases that differ from ba79b46, by pattern, and why; the number is how far they may be apart.
LARGE = float("inf")
DIFFERENCES: dict[str, tuple[float, str]] = {
    r"^Adam Stiefel-(batch|blocks-columns) implicit": (LARGE, "another reference of the closed form"),
    r"^Adam Sphere-complex implicit": (LARGE, "another reference of the closed form"),
    r"^Adam Sphere-short implicit": (LARGE, "second moments of spheres are not spread"),
    r"^(?!SGD|Muon|Scalar)\S+ SymplecticStiefel": (LARGE, "coordinates with rounding for gradients are zero"),
}


class Case(NamedTuple):
    """An optimizer on a space."""

    optimizer: str
    space: str
    section: str
    retraction: str

    def __str__(self) -> str:
        return " ".join(self)


def cases() -> Iterator[Case]:
    """All of them."""
    for optimizer in OPTIMIZERS:
        for name, (_, _, dtype, sections) in SPACES.items():
            if optimizer not in EVERYWHERE and name not in FEW:
                continue
            if optimizer == "Rprop" and dtype.is_complex:
                continue
            for section in sections:
                if section == "implicit" and optimizer not in ("SGD", *EVERYWHERE):
                    continue
                yield from (Case(optimizer, name, section, R) for R in ("cayley", "geodesic"))


def weights_of(name: str) -> list[Tensor]:
    """Two points where a case starts, and two targets."""
    space, shape, dtype, _ = SPACES[name]
    generator = torch.Generator().manual_seed(len(name))
    X = [space.random(*shape, generator=generator, dtype=dtype) for _ in range(4)]
    return [x * 1.7 for x in X] if space == ghor.Sphere(radius="start") else X


def run(case: Case, start: list[Tensor]) -> list[Tensor]:
    """The weights after 1, 2, 5, 10, 20 and all steps; gradients point away from targets."""
    space = SPACES[case.space][0]
    Base, options = OPTIMIZERS[case.optimizer]
    params = [nn.Parameter(x.clone()) for x in start[:2]]
    group = {"params": params, "space": space, "section": case.section, "retraction": case.retraction}
    optimizer, kept = Base([group], **options), []
    for t in range(1, STEPS + 1):
        for p, target in zip(params, start[2:], strict=True):
            p.grad = 0.2 * (p.detach() - target) * (1 + 0.5 * (-1) ** t)
        optimizer.step()
        if t in (1, 2, 5, 10, 20, STEPS):
            kept.append(torch.stack([p.detach().clone() for p in params]))
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file")
    parser.add_argument("--only", default="", help="cases with all of these words, separated by commas")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    words = [w for w in given.only.split(",") if w]
    chosen = [c for c in cases() if all(re.search(w, str(c)) for w in words)]
    if given.what == "record":
        starts = {name: weights_of(name) for name in SPACES}
        ends: dict[str, Any] = {}
        for c in chosen:
            try:
                ends[str(c)] = run(c, starts[c.space])
            except (ValueError, TypeError) as error:
                print(f"{c}: {error}")
        torch.save({"starts": starts, "ends": ends}, given.file)
        print(f"{len(ends)} trajectories in {given.file}")
        return 0
    before, wrong, worst = torch.load(given.file), 0, 0.0
    for c in chosen:
        if str(c) not in before["ends"]:
            continue
        try:
            now = run(c, before["starts"][c.space])
        except Exception as error:  # of every kind: it is what is looked for
            print(f"{c}: {type(error).__name__}: {error}")
            wrong += 1
            continue
        pairs = zip(before["ends"][str(c)], now, strict=True)
        off = [float((x - y).abs().max() / max(1.0, float(x.abs().max()))) for x, y in pairs]
        allowed, why = next((v for k, v in DIFFERENCES.items() if re.search(k, str(c))), (CLOSE, ""))
        worst = max(worst, off[-1]) if not why else worst
        if not off[-1] <= allowed or why:
            print(f"{c}: {', '.join(f'{x:.0e}' for x in off)} {why}", flush=True)
        wrong += not off[-1] <= allowed
    print(f"{len(chosen)} cases, {wrong} further apart than they may be; the others at most {worst:.0e}")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
