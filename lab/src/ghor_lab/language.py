"""The methods that train the language model: where its 24 matrices live, and what moves them.

Only the matrices differ. The embedding, gains and scales, and with q, k and v by head the other matrices too,
are AdamW's with the rate `rest_lr` in every method.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ghor import Euclidean, Space, Sphere, Stiefel, constrain, optim

from .baselines import AdamH, MuonH, UnitRowsAdam
from .config import Config
from .networks.decoder import Decoder, Matrix


@dataclass(frozen=True)
class Method:
    """A row of the table. `rate` is where a sweep begins."""

    title: str
    rule: str  # a case of `optimizer_of`
    rate: float
    space: Space | None = None  # of the matrices
    by_head: bool = False  # only q, k and v, each head a point
    keeps: str = ""  # "size" or "rows": what is kept without a space, or what the space does not know
    decays: bool = False

    def chosen(self, name: str) -> bool:
        """Whether the method is for the matrix of this name."""
        return not self.by_head or name.endswith((".q", ".k", ".v"))


WHOLE, ROWS = Sphere(flatten=2, radius="start"), Sphere()
METHODS = {
    "adamw": Method("AdamW", "adam", 3e-3, decays=True),
    "torch-muon": Method("Muon of torch", "muon", 0.03, decays=True),
    "adamh": Method("AdamH, Hyperball", "adamh", 0.03, keeps="size"),
    "muonh": Method("MuonH, Hyperball", "muonh", 0.03, keeps="size"),
    "unit-rows": Method("Adam, then unit rows (nGPT)", "unit-rows", 3e-3, keeps="rows"),
    "sphere-adam": Method("Adam in g^hor, sphere of a matrix", "adam", 3e-3, WHOLE, keeps="size"),
    "sphere-muon": Method("Muon in g^hor, sphere of a matrix", "muon", 0.03, WHOLE, keeps="size"),
    "rows-adam": Method("Adam in g^hor, unit rows", "adam", 3e-3, ROWS),
    "rows-muon": Method("Muon in g^hor, unit rows", "muon", 0.03, ROWS),
    "heads-adam": Method("Adam in g^hor, heads on Stiefel", "adam", 3e-3, Stiefel(), by_head=True),
    "heads-muon": Method("Muon in g^hor, heads on Stiefel", "muon", 0.03, Stiefel(), by_head=True),
    "stiefel-adam": Method("Adam in g^hor, all on Stiefel", "adam", 3e-3, Stiefel()),
    "stiefel-muon": Method("Muon in g^hor, all on Stiefel", "muon", 0.03, Stiefel()),
    "stiefel-anchor": Method("AdamW in g^hor, anchored on Stiefel", "anchor", 3e-3, Stiefel(), decays=True),
}


def sizes(matrix: Matrix) -> Tensor:
    """(parts,): the norms of the groups of rows that have a scale each."""
    return torch.linalg.vector_norm(matrix.weight.detach().unflatten(0, (matrix.parts, -1)), dim=(1, 2))


def declare(model: Decoder, method: Method) -> Decoder:
    """Move the matrices to their space, with scales that make up for the size they lose or gain there.

    A radius "start" keeps the size and needs no scale.
    """
    for name, matrix in model.matrices().items():
        if not method.chosen(name) or (method.space is None and method.keeps != "rows"):
            continue
        before = sizes(matrix)
        if method.space is None:
            with torch.no_grad():
                matrix.weight.div_(torch.linalg.vector_norm(matrix.weight, dim=-1, keepdim=True))
        else:
            constrain(matrix, "weight", Stiefel(blocks=matrix.parts) if method.by_head else method.space)
        if method.space is not WHOLE:
            matrix.scale = nn.Parameter(before / sizes(matrix))
    return model


def optimizer_of(config: Config, model: Decoder) -> Optimizer:
    """The optimizer of a configuration: the matrices of the method, and AdamW for all else."""
    method = METHODS[config.optimizer]
    chosen = {id(m.weight): name for name, m in model.matrices().items() if method.chosen(name)}
    first = [(n, p) for n, p in model.named_parameters() if id(p) in chosen]
    others = [(n, p) for n, p in model.named_parameters() if id(p) not in chosen]
    adam: dict[str, Any] = {"betas": config.betas, "eps": config.eps, "fused": True}
    how: dict[str, Any] = {"retraction": config.retraction, "section": config.section}
    main: dict[str, Any] = {"params": first, "lr": config.lr}
    main["weight_decay"] = config.weight_decay if method.decays else 0.0
    rest: dict[str, Any] = {"params": others, "lr": config.rest_lr, "weight_decay": 0.0}
    match method.rule:
        case "adam" if method.space is None:
            return torch.optim.AdamW([main, rest], **adam)
        case "adam":
            return optim.AdamW([main, rest], **adam, **how)
        case "anchor":
            return optim.AdamW([{**main, "anchor": "start"}, rest], **adam, **how)
        case "muon" | "muonh":
            groups = [{**main, "adamw": False}, {**rest, "adamw": True, "hyperball": False}]
            if method.space is None:  # there it is torch's Muon, with AdamW beside it
                groups = [{**group, "space": Euclidean()} for group in groups]
            return (
                MuonH(groups, adamw=adam) if method.rule == "muonh" else optim.Muon(groups, adamw=adam, **how)
            )
        case "adamh":
            return AdamH([main, {**rest, "hyperball": False}], **adam)
        case _:
            return UnitRowsAdam([main, {**rest, "unit_rows": False}], **adam)


def off(model: Decoder, method: Method, start: dict[str, float]) -> Iterator[float]:
    """How far the matrices are from the sizes that a method keeps: the relative error of norms."""
    for name, matrix in model.matrices().items():
        W = matrix.weight.detach().double()
        if method.keeps == "size":
            yield abs(float(W.norm()) / start[name] - 1)
        elif method.keeps == "rows":
            yield float((W.norm(dim=-1) - 1).abs().max())
