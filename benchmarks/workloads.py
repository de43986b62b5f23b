"""The table of workloads, and who steps them: `measure.py` and `beside.py` take both from here.

A workload is a list of tensors on a space, with an optimizer of ours and its options, the peers beside it,
and the measurements that it is for. All contenders of a workload have the same start, and the same fixed
gradients in place. A peer that is not installed is left out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from common import Weight, parametrized_step
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import ghor

LR = 1e-3
ADAM = {"lr": LR, "fused": True}


@dataclass(frozen=True)
class Workload:
    """Tensors of `shapes` on a space, `free` Euclidean ones of 7 x 7 beside them, and names of contenders."""

    name: str
    space: ghor.Space
    shapes: tuple[tuple[int, ...], ...]
    contenders: tuple[str, ...]
    measured: frozenset[str]  # "time", "kernels", "memory", "calls", "beside"
    optimizer: str = "Adam"
    options: Mapping[str, Any] = field(default_factory=dict)
    free: int = 0

    def points(self) -> list[Tensor]:
        """The start."""
        generator = torch.Generator().manual_seed(0)
        Ys = [self.space.random(*shape, generator=generator) for shape in self.shapes]
        if getattr(self.space, "radius", None) == "start":  # entries as GPT-2 starts with
            Ys = [Y.mul_(0.02 * math.sqrt(Y.numel())) for Y in Ys]
        return Ys


@dataclass(frozen=True)
class Contender:
    """`step()` is one whole step; `holder` holds tensors between steps, `weights()` are now."""

    step: Callable[[], object]
    holder: Any
    params: Sequence[Tensor] = ()
    weights: Callable[[], Sequence[Tensor]] = tuple
    slow: bool = False  # takes its turn last in a round


# -- contenders ----------------------------------------------------------------------------------------------


def leaves(Ys: Sequence[Tensor], make: Callable[[Tensor], Tensor] = nn.Parameter) -> list[Tensor]:
    """Parameters with gradients in place."""
    params, generator = [], torch.Generator().manual_seed(1)
    for Y in Ys:
        params.append(make(Y.clone()))
        params[-1].grad = torch.randn(Y.shape, generator=generator)
    return params


def of(opt: torch.optim.Optimizer, points: bool = True) -> Contender:
    """An optimizer; `points` are not read where they are no points of the workload's space."""
    params = [p for group in opt.param_groups for p in group["params"]]
    return Contender(opt.step, opt, params, partial(list, params) if points else tuple)


def ours(w: Workload, optimizer: str = "", **options: Any) -> Contender:
    """As a user would call it."""
    free = leaves([torch.zeros(7, 7)] * w.free)
    groups: Any = [
        {"params": leaves(w.points()), "space": w.space},
        {"params": free, "space": ghor.Euclidean()},
    ]
    cls: Any = getattr(ghor.optim, optimizer or w.optimizer)
    return of(cls(groups, lr=LR, **{**w.options, **options}))


def torch_adam(w: Workload, **options: Any) -> Contender:
    """It knows of no constraint: the cost of touching the same numbers."""
    return of(torch.optim.Adam(leaves(w.points()), lr=LR, **options))


def geoopt_adam(w: Workload, manifold: str, **options: Any) -> Contender:
    geoopt: Any = import_module("geoopt")
    Ys, chosen = w.points(), getattr(geoopt, manifold)(**options)
    ball = manifold == "PoincareBall"
    params = leaves(
        [ghor.Hyperbolic().to_ball(Y) for Y in Ys] if ball else Ys,
        lambda Y: geoopt.ManifoldParameter(Y, manifold=chosen),
    )
    return of(geoopt.optim.RiemannianAdam(params, lr=LR), points=not ball)


def pogo(w: Workload) -> Contender:
    """Batches of tall matrices; it has no stacks, so separate tensors get a batch dimension of 1 each."""
    POGO, VectorAdam = import_module("pogo").POGO, import_module("pogo.base").VectorAdam
    params = leaves([Y if Y.dim() > 2 else Y.unsqueeze(0) for Y in w.points()])
    return of(POGO(params, VectorAdam(), lr=LR, rows=False))


def adam_so(w: Workload) -> Contender:
    return of(import_module("ghor_lab.baselines").AdamSO(leaves(w.points()), lr=LR))


def parametrized(modules: list[nn.Module], w: Workload) -> Contender:
    """Forward of the parametrization, backward of sum(w * G), and fused Adam on the tensors below it."""
    grads = [p.grad for p in leaves(w.points()) if p.grad is not None]
    step, weights, opt = parametrized_step(modules, grads, LR)
    return Contender(step, (opt, *modules), opt.param_groups[0]["params"], weights, slow=True)


def geotorch_orthogonal(w: Workload, triv: str) -> Contender:
    geotorch: Any = import_module("geotorch")
    modules: list[nn.Module] = []
    for Y in w.points():
        modules.append(geotorch.orthogonal(Weight(Y.clone()), triv=triv))
        modules[-1].weight = Y  # geotorch starts at a random point of its own: bring it to ours
    return parametrized(modules, w)


def torch_orthogonal(w: Workload, kind: str) -> Contender:
    return parametrized(
        [parametrizations.orthogonal(Weight(Y.clone()), orthogonal_map=kind) for Y in w.points()], w
    )


def product(w: Workload) -> Contender:
    """Y^T G of one matrix, a product of N n^2 terms."""
    (Y,) = leaves(w.points())
    G, out = Y.grad, torch.empty(Y.shape[-1], Y.shape[-1])
    X = Y.detach()
    return Contender(lambda: torch.mm(X.mT, G, out=out), None, [Y])  # type: ignore[arg-type]


def distance(w: Workload, space: Any) -> Contender:
    """The distances between points and the same points shuffled, forward and backward."""
    Y = w.points()[0]
    Y = (
        Y
        if isinstance(space, ghor.Space) or type(space).__name__ == "Lorentz"
        else ghor.Hyperbolic().to_ball(Y)
    )
    order = torch.randperm(len(Y), generator=torch.Generator().manual_seed(3))
    pair = [Y.clone().requires_grad_(), Y[order].requires_grad_()]
    return Contender(lambda: torch.autograd.grad(space.dist(*pair).sum(), pair), None, pair)


def geoopt_distance(w: Workload, manifold: str) -> Contender:
    return distance(w, getattr(import_module("geoopt"), manifold)(), manifold == "PoincareBall")


OURS, FUSED, MUON = "ghor", "torch fused Adam, no constraint", "torch Muon, no constraint"
FOREACH = "torch foreach Adam, no constraint"
EUCLIDEAN, CANONICAL = "geoopt Stiefel, Euclidean metric", "geoopt Stiefel, canonical metric"
CONTENDERS: dict[str, Callable[[Workload], Contender]] = {
    OURS: ours,
    "ghor, fused": partial(ours, fused=True),
    "ghor, geodesic": partial(ours, retraction="geodesic"),
    "ghor, implicit": partial(ours, section="implicit"),
    "ghor, transported": partial(ours, section="transported"),
    "ghor Muon": partial(ours, optimizer="Muon"),
    FUSED: partial(torch_adam, fused=True),
    FOREACH: partial(torch_adam, foreach=True),
    MUON: lambda w: of(torch.optim.Muon(leaves(w.points()), lr=LR)),
    EUCLIDEAN: partial(geoopt_adam, manifold="Stiefel", canonical=False),
    CANONICAL: partial(geoopt_adam, manifold="Stiefel", canonical=True),
    "geoopt Sphere": partial(geoopt_adam, manifold="Sphere"),
    "geoopt Lorentz": partial(geoopt_adam, manifold="Lorentz"),
    "geoopt ball": partial(geoopt_adam, manifold="PoincareBall"),
    "geoopt SPD": partial(geoopt_adam, manifold="SymmetricPositiveDefinite"),
    "POGO, VectorAdam": pogo,
    "AdamSO": adam_so,
    "geotorch orthogonal, exponential": partial(geotorch_orthogonal, triv="expm"),
    "geotorch orthogonal, Cayley": partial(geotorch_orthogonal, triv="cayley"),
    "torch orthogonal, Householder": partial(torch_orthogonal, kind="householder"),
    "torch orthogonal, Cayley": partial(torch_orthogonal, kind="cayley"),
    "torch orthogonal, exponential": partial(torch_orthogonal, kind="matrix_exp"),
    "product Y^T G": product,
    "ghor distances": partial(distance, space=ghor.Hyperbolic()),
    "geoopt Lorentz distances": partial(geoopt_distance, manifold="Lorentz"),
    "geoopt ball distances": partial(geoopt_distance, manifold="PoincareBall"),
}


def contenders(w: Workload, only: str = "") -> Iterator[tuple[str, Contender]]:
    """Those that are installed."""
    for name in w.contenders:
        try:
            if only in name:
                yield name, CONTENDERS[name](w)
        except (ImportError, AttributeError) as error:
            print(f"{name} was left out: {error}", file=sys.stderr)


# -- the table -----------------------------------------------------------------------------------------------

St, Gr, SO, Sphere = ghor.Stiefel(), ghor.Grassmann(), ghor.SpecialOrthogonal(), ghor.Sphere()
Hyperbolic, SPD, SE = ghor.Hyperbolic(), ghor.SPD(), ghor.SpecialEuclidean()
BATCHES = {1: (), 16: (16,), 32: (32,)}
GPT2 = tuple(s for _ in range(12) for s in ((2304, 768), (768, 768), (3072, 768), (768, 3072)))
GEOOPT, POGO = (OURS, EUCLIDEAN, FUSED), (OURS, EUCLIDEAN, "POGO, VectorAdam", FUSED)
ROWS, ROTATIONS = (OURS, "geoopt Sphere", FUSED), (OURS, "AdamSO", EUCLIDEAN, FUSED)
PARAMETRIZED = tuple(name for name in CONTENDERS if " orthogonal, " in name)
STACKED = (OURS, "ghor, fused", "ghor, geodesic", "ghor Muon", FOREACH, CANONICAL, *POGO[1:], *PARAMETRIZED)
HYPERBOLIC = (OURS, "geoopt Lorentz", "geoopt ball", FUSED)
DISTANCES = ("ghor distances", "geoopt Lorentz distances", "geoopt ball distances")
LARGE = (OURS, "ghor, transported", "ghor, implicit", "product Y^T G", MUON, FUSED)
GROWING = (OURS, "ghor, implicit", "ghor, transported", FUSED, EUCLIDEAN, CANONICAL, *PARAMETRIZED[::2])
HEADS, WALKED = "heads of GPT-2 small: 36 of 12 x 768 x 64", "336 of 49 x 7 and 16 Euclidean"


def at(measured: str, name: str, space: ghor.Space, *shape: int, **more: Any) -> Workload:
    """`count` tensors of one shape, stepped `by` some."""
    shapes, by = (shape,) * more.pop("count", 1), more.pop("by", (OURS, FUSED))
    return Workload(name, space, shapes, by, frozenset(measured.split()), **more)


def counted(space: ghor.Space, *shape: int, optimizer: str = "Adam", **more: Any) -> Workload:
    """A workload whose kernels alone are of interest, which do not depend on its size."""
    count, by = more.pop("count", 1), more.pop("by", (OURS,))
    words = ", ".join([optimizer, repr(space), *(f"{k}={v!r}" for k, v in more.items())])
    name = f"{words}, {f'{count} of ' * (count > 1)}{' x '.join(map(str, shape))}"
    return at("kernels", name, space, *shape, by=by, count=count, optimizer=optimizer, options=more)


WORKLOADS = (
    # What people have.
    at("time beside", "unit rows, 10000 x 768", Sphere, 10000, 768, by=ROWS),
    at("time beside", "unit rows, 10000 x 64", Sphere, 10000, 64, by=ROWS),
    at("beside", "rows of radius 2, 10000 x 64", ghor.Sphere(radius=2.0), 10000, 64),
    at("time", "unit vectors, 100000 x 8", Sphere, 100000, 8, by=ROWS),
    at("time beside", "unit vectors, 100000 x 3", Sphere, 100000, 3, by=ROWS),
    at("time", "unit rows, 50257 x 768 (GPT-2's embedding)", Sphere, 50257, 768, by=ROWS),
    Workload(
        "whole matrices of GPT-2 small, norm kept",
        ghor.Sphere(flatten=2, radius="start"),
        GPT2,
        (OURS, FUSED),
        frozenset({"time"}),
    ),
    at("time kernels beside", "336 of 49 x 7, one by one", St, 49, 7, count=336, by=(*STACKED, MUON)),
    at("time kernels beside", "336 x 49 x 7, stacked", St, 336, 49, 7, by=STACKED),
    at("time beside", "heads: 9 of 12 x 768 x 64", St, 12, 768, 64, count=9, by=POGO),
    at("time", HEADS, St, 12, 768, 64, count=36, by=GEOOPT),
    at("time kernels beside", "3072 x 768", St, 3072, 768, by=(*GEOOPT, MUON)),
    at("time", "3072 x 768, Muon", St, 3072, 768, by=(OURS, MUON, FUSED), optimizer="Muon"),
    at("time", "rotations, 512 x 512", SO, 512, 512, by=ROTATIONS),
    at("time", "rotations, 1024 x 1024", SO, 1024, 1024, by=ROTATIONS),
    at("time", "subspaces, 1000 x 10", Gr, 1000, 10, by=GEOOPT),
    at("time", "hyperbolic, 100000 x 11", Hyperbolic, 100000, 11, by=HYPERBOLIC),
    at("beside", "hyperbolic, 50000 x 11", Hyperbolic, 50000, 11),
    at("time kernels", "hyperbolic, 1000 x 11", Hyperbolic, 1000, 11, by=HYPERBOLIC),
    at("time", "hyperbolic distances, 100000 x 11", Hyperbolic, 100000, 11, by=DISTANCES),
    at("kernels", "hyperbolic distances, 1000 x 11", Hyperbolic, 1000, 11, by=DISTANCES),
    at("time", "covariances, 10000 x 10 x 10", SPD, 10000, 10, 10, by=(OURS, "geoopt SPD", FUSED)),
    at("time", "poses, 100000 x 3 x 4", SE, 100000, 3, 4),
    # One large matrix, in products of N n^2 terms.
    *(
        at("time", f"large, {N} x {n}", St, N, n, by=LARGE)
        for N, n in ((1024, 768), (1024, 256), (2048, 512), (4096, 1024), (4096, 256), (2048, 64))
    ),
    # The two sections by N and n/N, one matrix and 16: the rule of section="auto".
    *(
        at(
            "grid",
            f"grid, {batch} of {N} x {N * k // 64}",
            St,
            *BATCHES[batch],
            N,
            N * k // 64,
            by=LARGE[2:0:-1],
        )
        for batch in (1, 16)
        for N in (256, 512, 1024, 2048, 4096)
        for k in (1, 2, 4, 8, 16, 32, 48)
        if batch * N**3 * k < 3e12 and batch * N * N < 1 << 27
    ),
    # As N grows.
    *(
        at("memory", f"growing, {batch} of {N} x {n}", St, *BATCHES[batch], N, n, by=GROWING)
        for n, most in ((16, 16), (64, 14))
        for batch in (1, 32)
        for N in (2**k for k in range(8, most))
    ),
    # The way of a step.
    *(
        at("calls", f"{WALKED}, {name}", St, 49, 7, count=336, by=(OURS,), free=16, optimizer=name)
        for name in ("Adam", "SGD", "Muon")
    ),
    # Every kind of frame.
    counted(St, 49, 7, section="transported"),
    counted(St, 768, 64, section="implicit"),
    counted(St, 12, 768, 64, count=9, section="implicit"),
    counted(St, 768, 64, section="implicit", retraction="geodesic"),
    counted(Gr, 1000, 10, section="implicit", by=GEOOPT),
    counted(SO, 64, 64),
    counted(Sphere, 1000, 64, by=ROWS),
    counted(Sphere, 1000, 64, section="transported"),
    counted(SPD, 100, 10, 10),
    counted(SE, 100, 3, 4),
    counted(ghor.PositionsOrientations(), 100, 2, 3),
    counted(ghor.SymplecticStiefel(), 20, 6),
    counted(St, 49, 7, count=336, optimizer="SGD", momentum=0.9),
    counted(Sphere, 1000, 64, optimizer="SGD", momentum=0.9),
    counted(St, 49, 7, optimizer="Muon", by=(OURS, MUON)),
    counted(St, 49, 7, optimizer="Muon", count=336),
    counted(St, 768, 64, optimizer="Muon"),
    counted(St, 12, 768, 64, optimizer="Muon"),
    counted(Gr, 1000, 10, optimizer="Muon"),
    counted(SO, 64, 64, optimizer="Muon"),
    counted(Sphere, 1000, 64, optimizer="Muon"),
)
