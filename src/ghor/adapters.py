"""Adapters: fine-tuning by a small part that stays on its space, exactly, beside frozen weights.

    Rotation(block)    y = W R x + c            R = diag(R_1, R_2, ...), rotations of SO(block); orthogonal fine-tuning
    LowRank(rank)      y = W x + U diag(s) V^T x + c      U, V on the Stiefel manifold, s their singular values

Both start as what was there: R = I, s = 0. The layers are ordinary modules around the ones they adapt, and the factors
are declared with `ghor.constrain`, so that any ghor optimizer trains them:

    adapt(model, ["q_proj", "v_proj"], Rotation(block=16))
    optimizer = ghor.optim.AdamW(ghor.param_groups(model), lr=1e-3)

`merge` writes the sum into the frozen weights and `unmerge` takes it out again, to the bit; `save` and `load` keep the
adapters alone. A layer can have several, by name: rotations act one after the other, low-rank parts add up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .chosen import ending
from .declare import check_on_space, constrain, spaces
from .linalg import COMPUTE_DTYPE
from .spaces import SpecialOrthogonal, Stiefel


class Part(nn.Module):
    """What an adapter adds to one layer of size (out, in)."""

    adapter: Rotation | LowRank

    def before(self, x: Tensor) -> Tensor:
        """What the layer sees in place of its input."""
        return x

    def beside(self, x: Tensor) -> Tensor | None:
        """What is added to the output; x is the input itself."""
        return None

    def merged(self, weight: Tensor) -> Tensor:
        """The weight that does `before`."""
        return weight

    def added(self) -> Tensor | None:
        """The weight that does `beside`."""
        return None


class RotationPart(Part):
    """R x, blocks R (in/b, b, b) on SO(b)."""

    def __init__(self, block: int, out: int, into: int, like: dict[str, Any]) -> None:
        super().__init__()
        if into % block or block < 2:
            fits = [b for b in range(2, into + 1) if into % b == 0]
            near = sorted(sorted(fits, key=lambda b: abs(b - block))[:3])
            raise ValueError(f"{into} inputs do not come in blocks of {block}; try one of {near}")
        self.R = nn.Parameter(torch.eye(block, **like).repeat(into // block, 1, 1))
        constrain(self, "R", SpecialOrthogonal())

    def before(self, x: Tensor) -> Tensor:
        blocks = x.to(self.R.dtype).unflatten(-1, self.R.shape[:2])
        return torch.einsum("...kb,kcb->...kc", blocks, self.R).flatten(-2).to(x.dtype)

    def merged(self, weight: Tensor) -> Tensor:
        return torch.einsum("okc,kcb->okb", weight.unflatten(-1, self.R.shape[:2]), self.R).flatten(-2)


class LowRankPart(Part):
    """U diag(s) V^T x, U (out, r) and V (in, r) on Stiefel."""

    def __init__(self, rank: int, out: int, into: int, like: dict[str, Any]) -> None:
        super().__init__()
        if not 0 < rank <= min(out, into):
            raise ValueError(f"a layer {out} x {into} has no part of rank {rank}")
        self.U, self.V = (nn.Parameter(Stiefel().random(size, rank, **like)) for size in (out, into))
        self.s = nn.Parameter(torch.zeros(rank, **like))
        constrain(self, ["U", "V"], Stiefel())

    def beside(self, x: Tensor) -> Tensor:
        return ((x.to(self.s.dtype) @ self.V) * self.s @ self.U.mT).to(x.dtype)

    def added(self) -> Tensor:
        return (self.U * self.s) @ self.V.mT


@dataclass(frozen=True)
class Rotation:
    """Orthogonal fine-tuning: y = W R x + c with block-diagonal R, in/block rotations of SO(block)."""

    block: int = 32

    def part(self, out: int, into: int, like: dict[str, Any]) -> Part:
        return RotationPart(self.block, out, into, like)


@dataclass(frozen=True)
class LowRank:
    """y = W x + U diag(s) V^T x + c with orthonormal U and V: s are the singular values of what is added."""

    rank: int = 8

    def part(self, out: int, into: int, like: dict[str, Any]) -> Part:
        return LowRankPart(self.rank, out, into, like)


KINDS: dict[str, type[Rotation | LowRank]] = {"Rotation": Rotation, "LowRank": LowRank}


class Adapted(nn.Module):
    """A linear layer, `base`, with adapters by name. `active` names those that count; when merged, none is computed."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.parts = base, nn.ModuleDict()
        self.active: list[str] = []
        self.before_merge: Tensor | None = None  # the weight, as it was

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)
    in_features = property(lambda self: self.base.in_features)
    out_features = property(lambda self: self.base.out_features)

    def current(self) -> list[Part]:
        """The parts that count, in order."""
        return [self.parts[name] for name in self.active]  # type: ignore[misc]

    def forward(self, x: Tensor) -> Tensor:
        if self.before_merge is not None or not self.active:
            return self.base(x)
        turned, parts = x, self.current()
        for part in parts:
            turned = part.before(turned)
        y: Tensor = self.base(turned)
        for part in parts:
            beside = part.beside(x)
            y = y if beside is None else y + beside
        return y

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """W R_k ... R_1 + sum of U diag(s) V^T, computed in the precision of the adapters."""
        parts = self.current()
        W = self.base.weight.to(next(parts[0].parameters()).dtype) if parts else self.base.weight
        for part in reversed(parts):
            W = part.merged(W)
        for added in (part.added() for part in parts):
            W = W if added is None else W + added
        return W.to(self.base.weight.dtype)

    @torch.no_grad()
    def merge(self) -> None:
        """The active adapters into the weight."""
        if self.before_merge is None:
            self.before_merge, merged = self.base.weight.detach().clone(), self.merged_weight()
            self.base.weight.copy_(merged)

    @torch.no_grad()
    def unmerge(self) -> None:
        """The weight as it was, to the bit."""
        if self.before_merge is not None:
            self.base.weight.copy_(self.before_merge)
            self.before_merge = None


def adapt(
    model: nn.Module,
    targets: Sequence[str],
    adapter: Rotation | LowRank,
    name: str = "default",
    freeze: bool = True,
    train: Sequence[str] = (),
) -> list[str]:
    """Put an adapter on the linear layers of a model that `targets` name; returns the names of the layers.

    A target is the end of a layer's name ("q_proj") or a pattern ("model.layers.[0-7].*.q_proj"). All other parameters
    are frozen, except adapters that are there and those that the patterns `train` name, such as a new head's; with
    `freeze=False` they stay as they are.
    """
    if type(adapter) not in (Rotation, LowRank):
        raise TypeError(f"adapter is a Rotation(block) or LowRank(rank), got {adapter!r}")
    layers, parameters = _layers(model), [n for n, _ in model.named_parameters()]
    found = {n for target in targets for n in ending(layers, target)}
    trained = {n for pattern in train for n in ending(parameters, pattern)}
    _attach(model, [n for n in layers if n in found], adapter, name)
    if freeze:
        _freeze(model, trained)
    return [n for n in layers if n in found]


def _layers(model: nn.Module) -> dict[str, nn.Linear | Adapted]:
    """What can be adapted, by name."""
    inside = {f"{n}.base" for n in _adapted(model)}
    return {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, Adapted)) and n not in inside}


def _attach(model: nn.Module, names: Sequence[str], adapter: Rotation | LowRank, name: str) -> None:
    layers = _layers(model)
    parts = {n: _part(n, layers[n], adapter, name) for n in names}  # what cannot be is refused before anything changes
    for n, part in parts.items():
        layer, (parent, _, leaf) = layers[n], n.rpartition(".")
        adapted = layer if isinstance(layer, Adapted) else Adapted(layer)
        adapted.parts[name] = part
        adapted.active.append(name)
        setattr(model.get_submodule(parent), leaf, adapted)


def _freeze(model: nn.Module, trained: Collection[str] = ()) -> None:
    ours = {id(p) for m in _adapted(model).values() for p in m.parts.parameters()}
    for n, p in model.named_parameters():
        p.requires_grad_(id(p) in ours or n in trained)


def _part(n: str, layer: nn.Linear | Adapted, adapter: Rotation | LowRank, name: str) -> Part:
    """In full precision also where the weight is not."""
    if isinstance(layer, Adapted) and (name in layer.parts or layer.before_merge is not None):
        raise ValueError(f"{n} has an adapter {name!r} already, or is merged; give another name, or unmerge")
    W: Tensor = layer.weight
    out, into = W.shape
    try:
        part = adapter.part(out, into, {"device": W.device, "dtype": COMPUTE_DTYPE.get(W.dtype, W.dtype)})
    except ValueError as error:
        raise ValueError(f"{n}: {error}") from None
    part.adapter = adapter
    return part


def _adapted(model: nn.Module) -> dict[str, Adapted]:
    return {n: m for n, m in model.named_modules() if isinstance(m, Adapted)}


def activate(model: nn.Module, names: Sequence[str]) -> None:
    """Let these adapters count and no others, in this order; none of them: the model as it was."""
    layers = _adapted(model)
    known = {name for m in layers.values() for name in m.parts}
    if set(names) - known:
        raise ValueError(f"there is no adapter {sorted(set(names) - known)}; there are {sorted(known)}")
    if any(m.before_merge is not None for m in layers.values()):
        raise ValueError("adapters are merged into the weights; call unmerge first")
    for m in layers.values():
        m.active = [name for name in names if name in m.parts]


def merge(model: nn.Module) -> None:
    """Write the active adapters into the weights: the same outputs at the cost of the bare model."""
    for m in _adapted(model).values():
        m.merge()


def unmerge(model: nn.Module) -> None:
    """Take them out again: the weights are, to the bit, what they were."""
    for m in _adapted(model).values():
        m.unmerge()


def remove(model: nn.Module) -> None:
    """Put the layers themselves back in place: with `merge` before it, a plain model that has learned."""
    for n, m in _adapted(model).items():
        parent, _, leaf = n.rpartition(".")
        setattr(model.get_submodule(parent), leaf, m.base)


def _tensors(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Parameter]]:
    for n, m in _adapted(model).items():
        if name in m.parts:
            for leaf, p in m.parts[name].named_parameters():
                yield f"{n}.{leaf}", p


def save(model: nn.Module, path: Any, name: str = "default") -> None:
    """Write one adapter, and nothing else of the model, to a file that `torch.load(weights_only=True)` reads."""
    tensors = {n: p.detach().clone() for n, p in _tensors(model, name)}
    if not tensors:
        raise ValueError(f"the model has no adapter {name!r}")
    adapter: Any = next(m.parts[name].adapter for m in _adapted(model).values() if name in m.parts)
    torch.save({"kind": type(adapter).__name__, "options": asdict(adapter), "name": name, "tensors": tensors}, path)


def load(model: nn.Module, path: Any, name: str | None = None, freeze: bool = True) -> str:
    """Put a saved adapter on a model of the same layers, under its own name or another; returns the name."""
    saved = torch.load(path, weights_only=True, map_location="cpu")
    name = saved["name"] if name is None else name
    layers = dict.fromkeys(n.rpartition(".")[0] for n in saved["tensors"])
    missing = set(layers) - set(_layers(model))
    if missing:
        raise ValueError(f"the adapter is for {min(missing)}, which this model does not have")
    _attach(model, list(layers), KINDS[saved["kind"]](**saved["options"]), name)
    if freeze:
        _freeze(model)
    with torch.no_grad():
        for n, p in _tensors(model, name):
            p.copy_(saved["tensors"][n])
    for n, p, space in spaces(model):
        if space in (SpecialOrthogonal(), Stiefel()) and f".parts.{name}." in n:
            check_on_space([p], space, [n])
    return name
