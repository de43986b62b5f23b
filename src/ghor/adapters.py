"""Adapters: fine-tuning by a small part that stays on its space, exactly, beside frozen weights.

    Rotation(block)    y = W R x + c            R = diag(R_1, R_2, ...), rotations of SO(block); orthogonal fine-tuning
    LowRank(rank)      y = W x + U diag(s) V^T x + c      U, V on the Stiefel manifold, s their singular values

Both start as what was there: R = I, s = 0. The layers are ordinary modules around the ones they adapt, and
the factors are declared with `ghor.constrain`, so that any ghor optimizer trains them:

    adapt(model, ["q_proj", "v_proj"], Rotation(block=16))
    optimizer = ghor.optim.AdamW(ghor.param_groups(model), lr=1e-3)

`merge` writes the sum into the frozen weights and `unmerge` takes it out again, to the bit; `save` and `load`
keep the adapters alone. A layer can have several, by name: rotations act one after the other, low-rank parts
add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ghor._torch.precision import COMPUTE_DTYPE
from ghor.constraints.declare import constrain, declared_spaces
from ghor.constraints.selection import select_by_suffix
from ghor.constraints.validation import check_on_space
from ghor.spaces import SpecialOrthogonal, Stiefel


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

    U: Tensor
    V: Tensor

    def __init__(self, rank: int, out: int, into: int, like: dict[str, Any]) -> None:
        super().__init__()
        if not 0 < rank <= min(out, into):
            raise ValueError(f"a layer {out} x {into} has no part of rank {rank}")
        for leaf, size in (("U", out), ("V", into)):
            if size == 1:  # +-1 does not move
                self.register_buffer(leaf, torch.ones(1, 1, **like))
            else:
                self.register_parameter(leaf, nn.Parameter(Stiefel().random(size, rank, **like)))
                constrain(self, leaf, Stiefel())
        self.s = nn.Parameter(torch.zeros(rank, **like))

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
    """A linear layer, `base`, with adapters by name. `active` names those that count; when merged, none is
    computed."""

    before_merge: Tensor | None  # the weight, as it was: in the state dict, which fits merged layers alone

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.parts = base, nn.ModuleDict()
        self.active: list[str] = []
        self.tied: tuple[Tensor, ...] = ()  # the weight that others hold too, while the layer has its own
        self.register_buffer("before_merge", None)

    bias = property(lambda self: self.base.bias)
    in_features = property(lambda self: self.base.in_features)
    out_features = property(lambda self: self.base.out_features)

    def current(self) -> list[Part]:
        """The parts to compute, in order."""
        return [] if self.before_merge is not None else [self.parts[name] for name in self.active]  # type: ignore[misc]

    def forward(self, x: Tensor) -> Tensor:
        turned, parts = x, self.current()
        for part in parts:
            turned = part.before(turned)
        y: Tensor = self.base(turned)
        for part in parts:
            beside = part.beside(x)
            y = y if beside is None else y + beside
        return y

    @property
    def weight(self) -> Tensor:
        """The weight as it acts: W R_k ... R_1 + sum of U diag(s) V^T, computed in the precision of the
        adapters."""
        parts, W = self.current(), self.base.weight
        M = W.to(next(parts[0].parameters()).dtype) if parts else W
        for part in reversed(parts):
            M = part.merged(M)
        for added in (part.added() for part in parts):
            M = M if added is None else M + added
        return M.to(W.dtype)

    @torch.no_grad()
    def merge(self, tied: bool = False) -> None:
        """The active adapters into the weight; of one that is tied, into a copy, and the others keep it."""
        if self.before_merge is None:
            W, merged = self.base.weight, self.weight
            self.before_merge = W.detach().clone()
            if tied:
                self.tied, self.base.weight = (W,), nn.Parameter(merged.clone(), W.requires_grad)
            else:
                W.copy_(merged)

    @torch.no_grad()
    def unmerge(self) -> None:
        """The weight as it was, to the bit, and tied as it was."""
        if self.tied:
            (self.base.weight,), self.tied = self.tied, ()
        elif self.before_merge is not None:
            self.base.weight.copy_(self.before_merge)
        self.before_merge = None


def adapt(
    model: nn.Module,
    targets: str | Sequence[str],
    adapter: Rotation | LowRank,
    name: str = "default",
    freeze: bool = True,
    train: str | Sequence[str] = (),
) -> list[str]:
    """Put an adapter on the linear layers of a model that `targets` name; returns the names of the layers.

    A target is the end of a layer's name ("q_proj") or a pattern ("model.layers.[0-7].*.q_proj"). A layer
    that the model has in several places is adapted in all, as one. All other parameters are frozen, except
    adapters that are there and those that the patterns `train` name, such as a new head's; with
    `freeze=False` they stay as they are.
    """
    if type(adapter) not in (Rotation, LowRank):
        raise TypeError(f"adapter is a Rotation(block) or LowRank(rank), got {adapter!r}")
    layers, parameters = _layers(model), dict(model.named_parameters(remove_duplicate=False))
    found = {layers[n] for target in _list(targets) for n in select_by_suffix(layers, target)}
    trained = [parameters[n] for pattern in _list(train) for n in select_by_suffix(parameters, pattern)]
    first = {m: n for n, m in reversed(layers.items()) if m in found}
    names = [n for n, m in layers.items() if first.get(m) == n]
    _attach(model, {n: _part(n, layers[n], adapter, name) for n in names}, name)
    if freeze:
        _freeze(model)
    for p in trained:
        p.requires_grad_()
    return names


def _list(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


def _layers(model: nn.Module) -> dict[str, nn.Linear | Adapted]:
    """What can be adapted, by each of its names."""
    every = dict(model.named_modules(remove_duplicate=False))
    inside = {f"{n}.base".lstrip(".") for n, m in every.items() if isinstance(m, Adapted)}
    return {n: m for n, m in every.items() if isinstance(m, (nn.Linear, Adapted)) and n not in inside}


def _attach(model: nn.Module, parts: Mapping[str, Part], name: str) -> None:
    layers, new = _layers(model), {}
    for n, part in parts.items():
        layer = layers[n]
        adapted = new[layer] = layer if isinstance(layer, Adapted) else Adapted(layer)
        adapted.parts[name] = part
        adapted.active.append(name)
    _exchange(model, new)


def _exchange(model: nn.Module, new: Mapping[Any, nn.Module]) -> None:
    """Put others in place of some layers, wherever the model has these."""
    for parent in list(model.modules()):
        for leaf, child in list(parent._modules.items()):
            if child in new and not isinstance(parent, Adapted):
                setattr(parent, leaf, new[child])


def _freeze(model: nn.Module) -> None:
    """All but the adapters."""
    ours = {id(p) for m in _adapted(model).values() for p in m.parts.parameters()}
    for p in model.parameters():
        p.requires_grad_(id(p) in ours)


def _part(n: str, layer: nn.Linear | Adapted, adapter: Rotation | LowRank, name: str) -> Part:
    """In full precision also where the weight is not."""
    if not n and not isinstance(layer, Adapted):
        raise ValueError(
            "the model is a Linear itself: adapt the model that holds it, or nn.Sequential(layer)"
        )
    if isinstance(layer, Adapted) and (name in layer.parts or layer.before_merge is not None):
        raise ValueError(f"{n} has an adapter {name!r} already, or is merged; give another name, or unmerge")
    W: Tensor = layer.base.weight if isinstance(layer, Adapted) else layer.weight
    out, into = W.shape
    try:
        part = adapter.part(out, into, {"device": W.device, "dtype": COMPUTE_DTYPE.get(W.dtype, W.dtype)})
    except ValueError as error:
        raise ValueError(f"{n}: {error}") from None
    part.adapter = adapter
    return part


def _adapted(model: nn.Module) -> dict[str, Adapted]:
    return {n: m for n, m in model.named_modules() if isinstance(m, Adapted)}


def activate(model: nn.Module, names: str | Sequence[str]) -> None:
    """Let these adapters count and no others, in this order; none of them: the model as it was."""
    layers, names = _adapted(model), _list(names)
    known = {name for m in layers.values() for name in m.parts}
    if set(names) - known:
        raise ValueError(f"there is no adapter {sorted(set(names) - known)}; there are {sorted(known)}")
    if any(m.before_merge is not None for m in layers.values()):
        raise ValueError("adapters are merged into the weights; call unmerge first")
    for m in layers.values():
        m.active = [name for name in names if name in m.parts]


def merge(model: nn.Module) -> None:
    """Write the active adapters into the weights: the same outputs at the cost of the bare model.

    A layer whose weight is tied, to an embedding for example, has one of its own until `unmerge`.
    """
    held = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    for m, tied in [(m, held[id(m.base.weight)] > 1) for m in _adapted(model).values()]:
        m.merge(tied)


def unmerge(model: nn.Module) -> None:
    """Take them out again: the weights are, to the bit, what they were."""
    for m in _adapted(model).values():
        m.unmerge()


def remove(model: nn.Module) -> None:
    """Put the layers themselves back in place: with `merge` before it, a plain model that has learned."""
    if isinstance(model, Adapted):
        raise ValueError(
            "the model is an adapted layer itself: take its base, or remove from the model that holds it"
        )
    _exchange(model, {m: m.base for m in _adapted(model).values()})


def _tensors(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Parameter]]:
    for n, m in _adapted(model).items():
        if name in m.parts:
            for leaf, p in m.parts[name].named_parameters():
                yield f"{n}.{leaf}", p


def save(model: nn.Module, path: Any, name: str = "default") -> None:
    """Write one adapter, and nothing else of the model, to a file that `torch.load(weights_only=True)`
    reads."""
    tensors = {n: p.detach().clone() for n, p in _tensors(model, name)}
    if not tensors:
        raise ValueError(f"the model has no adapter {name!r}")
    adapter: Any = next(m.parts[name].adapter for m in _adapted(model).values() if name in m.parts)
    torch.save(
        {"kind": type(adapter).__name__, "options": asdict(adapter), "name": name, "tensors": tensors}, path
    )


def load(model: nn.Module, path: Any, name: str | None = None, freeze: bool = True) -> str:
    """Put a saved adapter on a model of the same layers, under its own name or another; returns the name."""
    saved = torch.load(path, weights_only=True, map_location="cpu")
    name, layers, tensors = saved["name"] if name is None else name, _layers(model), saved["tensors"]
    names = list(dict.fromkeys(n.rpartition(".")[0] for n in tensors))
    missing = set(names) - set(layers)
    if missing:
        raise ValueError(f"the adapter is for {min(missing)}, which this model does not have")
    if len({layers[n] for n in names}) < len(names):
        raise ValueError(
            f"some of {', '.join(names)} are one layer in this model; the file has an adapter for each"
        )
    adapter = KINDS[saved["kind"]](**saved["options"])
    parts = {n: _part(n, layers[n], adapter, name) for n in names}
    _fill(parts, tensors)
    _attach(model, parts, name)
    if freeze:
        _freeze(model)
    return name


def _fill(parts: Mapping[str, Part], tensors: Mapping[str, Tensor]) -> None:
    """Saved tensors into the parts of the layers; other names or shapes, and points off their spaces, are
    refused."""
    wanted = {
        f"{n}.{leaf}": (p, space) for n, part in parts.items() for leaf, p, space in declared_spaces(part)
    }
    has, needs = (
        {n: tuple(t.shape) for n, t in tensors.items()},
        {n: tuple(p.shape) for n, (p, _) in wanted.items()},
    )
    wrong = [n for n in has | needs if has.get(n) != needs.get(n)]
    if wrong:
        got, need = has.get(wrong[0], "nothing"), needs.get(wrong[0], "nothing")
        raise ValueError(
            f"{wrong[0]}: the file has {got}, this model needs {need}; load it on layers of its own sizes"
        )
    for n, (p, space) in wanted.items():
        check_on_space([tensors[n]], space, [f"{n} of the file"])
        with torch.no_grad():  # in another precision it is on its space to the digits of the file alone
            p.copy_(tensors[n] if tensors[n].dtype == p.dtype else space.project(tensors[n].to(p.dtype)))
