"""Adam steps over the paper's 336 weights on St(7,49), in ghor, torch and geoopt, and how they are timed.

Rounds are interleaved: a round visits every contender once, in shuffled order, so that noise of the machine
affects all of them alike, and ratios are taken within a round. A visit is two steps. The first finds the
caches filled by the others, as a step after a backward pass does ("first"); the second follows at once, and
its time is the one compared ("again").
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ghor import Stiefel, optim

COUNT, N, n = 336, 49, 7  # the transformer of the paper: 336 weights on St(7,49)
LR = 1e-3
LAYOUTS = (SEPARATE, STACKED) = (f"{COUNT} tensors", "one stacked")


# -- contenders ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """`step()` does one whole step; `weights()` returns the matrices it has arrived at, in either layout."""

    name: str
    layout: str
    step: Callable[[], object]
    weights: Callable[[], Sequence[Tensor]]
    parametrized: bool = False

    @property
    def label(self) -> str:
        """Name and layout."""
        return f"{self.name} | {self.layout}"


def problem() -> tuple[Tensor, Tensor]:
    """Weights and gradients, (336, 49, 7) each: the same for every contender."""
    generator = torch.Generator().manual_seed(0)
    Y = (
        torch.linalg.qr(torch.randn(COUNT, N, n, dtype=torch.float64, generator=generator))
        .Q.float()
        .contiguous()
    )
    return Y, torch.randn(COUNT, N, n, generator=generator)


def split(X: Tensor, layout: str) -> list[Tensor]:
    """(336, 49, 7) -> 336 tensors of (49, 7), or the one tensor; always copies."""
    return [x.clone() for x in (X.unbind() if layout == SEPARATE else [X])]


def leaves(
    Y: Tensor, G: Tensor, layout: str, make: Callable[[Tensor], Tensor] = nn.Parameter
) -> list[Tensor]:
    """Parameters with their gradients already in place."""
    params = [make(y) for y in split(Y, layout)]
    for p, g in zip(params, split(G, layout), strict=True):
        p.grad = g
    return params


def ghor_adam(
    Y: Tensor, G: Tensor, layout: str, retraction: Any = "cayley", fused: bool = False
) -> Contender:
    """The subject, with no special arguments except the retraction and torch's own `fused`."""
    params = leaves(Y, G, layout)
    options: dict[str, Any] = {"fused": True} if fused else {}
    opt = optim.Adam(params, space=Stiefel(), retraction=retraction, lr=LR, **options)
    name = f"ghor Adam, {retraction.replace('cayley', 'Cayley')}{', fused' if fused else ''}"
    return Contender(name, layout, opt.step, partial(list, params))


def torch_adam(Y: Tensor, G: Tensor, layout: str, implementation: str) -> Contender:
    """Plain Euclidean Adam on the same tensors: the cost of a step without any manifold, which it leaves."""
    params, options = leaves(Y, G, layout), {implementation: True}
    opt = torch.optim.Adam(params, lr=LR, **options)  # type: ignore[arg-type]
    return Contender(f"torch Adam, {implementation}", layout, opt.step, partial(list, params))


def geoopt_adam(Y: Tensor, G: Tensor, layout: str, metric: str = "canonical") -> Contender:
    """geoopt as in its documentation; `stabilize` keeps its default (never), which is also its fastest."""
    geoopt: Any = import_module("geoopt")
    manifold = geoopt.Stiefel(canonical=metric == "canonical")
    params = leaves(Y, G, layout, partial(geoopt.ManifoldParameter, manifold=manifold))
    opt = geoopt.optim.RiemannianAdam(params, lr=LR)
    return Contender(f"geoopt RiemannianAdam, {metric}", layout, opt.step, partial(list, params))


# -- measuring -----------------------------------------------------------------------------------------------


def measure(
    entries: list[Contender], repeats: int, warmup: int, tell: Callable[[], object] = lambda: None
) -> dict[str, dict[str, list[float]]]:
    """Time the contenders in interleaved rounds without garbage collection.

    Returns label -> {"first": ms per round, "again": ms per round}. `tell` is called after each round.
    """
    times: dict[str, dict[str, list[float]]] = {c.label: {"first": [], "again": []} for c in entries}
    order = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for round_ in range(warmup + repeats):
            shuffled = order.sample(entries, len(entries))
            # the slow ones last, so that the others stay next to each other in time
            for c in sorted(shuffled, key=lambda c: c.parametrized):
                for which in ("first", "again"):
                    begun = time.perf_counter()
                    c.step()
                    ms = 1e3 * (time.perf_counter() - begun)
                    if round_ >= warmup:
                        times[c.label][which].append(ms)
            tell()
    finally:
        gc.enable()
    return times


@torch.no_grad()
def points(c: Contender) -> Tensor:
    """The weights of a contender as one float64 tensor (336, 49, 7), in either layout."""
    return torch.stack([w.as_subclass(Tensor) for w in c.weights()]).double().reshape(COUNT, N, n)


def distance(Y: Tensor) -> float:
    """max ||Y^T Y - I||_F over the weights."""
    return float(torch.linalg.matrix_norm(Y.mT @ Y - torch.eye(n, dtype=Y.dtype)).max())
