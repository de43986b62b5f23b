"""Adapters: fine-tuning with a few parameters that stay on their space, beside frozen weights.

    Rotation(block)                  y = W R x + c      R = diag(R_1, R_2, ...), R_i in SO(block)
    Rotation(block, sides="both")    y = L W R x + c    L and R of this kind
    LowRank(rank)                    y = W x + U diag(s) V^T x + c    U, V on Stiefel, s the singular values
    LowRank(rank, full=True)         y = W x + U S V^T x + c          S any matrix rank x rank

Rotation is orthogonal fine-tuning; on both sides it reaches every weight with the singular values of W, if
the blocks are as large as the layer. All start as the layer they adapt: L = R = I, s = S = 0. Layers are
nn.Linear, or Hugging Face's Conv1D, whose weight is transposed. Adapted layers are ordinary modules around
the original ones, and the factors are declared with `ghor.constrain`, so that any ghor optimizer trains them:

    adapt(model, ["q_proj", "v_proj"], Rotation(block=16))
    optimizer = ghor.optim.AdamW(ghor.param_groups(model), lr=1e-3)

`merge` writes the adapters into the frozen weights and `unmerge` takes them out again, bit for bit; `save`
and `load` keep the adapters alone. A layer can have several, by name: rotations act one after the other,
low-rank terms add up.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from ghor._torch.parametrized import remove_parametrizations
from ghor._torch.precision import COMPUTE_DTYPE
from ghor._torch.warn import Warnings
from ghor.constraints.declare import constrain, declared_spaces
from ghor.constraints.multiples import multiples
from ghor.constraints.registry import RECORD, forget
from ghor.constraints.selection import check_module, select_by_suffix
from ghor.constraints.validation import check_on_space
from ghor.spaces import SpecialOrthogonal, Stiefel

SIDES = {"right": "R", "left": "L", "both": "RL"}  # the factors of a rotation, by `sides`


class AdapterLayer(nn.Module):
    """The parameters of an adapter for one layer of size (out, in), and how they change its output."""

    adapter: Rotation | LowRank

    def transform_input(self, x: Tensor) -> Tensor:
        """The input that the layer gets."""
        return x

    def transform_output(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """The output for the layer's y = W x + bias."""
        return y

    def output_term(self, x: Tensor) -> Tensor | None:
        """The term added to the output; x is the input before any transformation."""
        return None

    def transform_weight(self, weight: Tensor) -> Tensor:
        """The weight that makes `transform_input` and `transform_output` unnecessary."""
        return weight

    def weight_term(self) -> Tensor | None:
        """The addition to the weight that makes `output_term` unnecessary."""
        return None


class RotationLayer(AdapterLayer):
    """L W R x, blocks R (in/b, b, b) and L (out/b, b, b) on SO(b); a side that is left alone is None."""

    def __init__(
        self, block: int, sides: str, out_features: int, in_features: int, factory: dict[str, Any]
    ) -> None:
        super().__init__()
        sizes = {"R": (in_features, "inputs"), "L": (out_features, "outputs")}
        for leaf in SIDES[sides]:
            size, what = sizes[leaf]
            if block < 2 or size % block:
                fits = math.gcd(*(sizes[other][0] for other in SIDES[sides]))
                divisors = [b for b in range(2, fits + 1) if fits % b == 0]
                near = sorted(sorted(divisors, key=lambda b: abs(b - block))[:3])
                raise ValueError(f"{size} {what} do not come in blocks of {block}; try one of {near}")
        for leaf, (size, _) in sizes.items():
            if leaf in SIDES[sides]:
                blocks = torch.eye(block, **factory).repeat(size // block, 1, 1)
                self.register_parameter(leaf, nn.Parameter(blocks))
                constrain(self, leaf, SpecialOrthogonal())

    # Not `self.R` and `self.L`, which adapters on one side do not have.
    right = property(lambda self: self._parameters.get("R"))
    left = property(lambda self: self._parameters.get("L"))

    def transform_input(self, x: Tensor) -> Tensor:
        return x if self.right is None else turned(self.right, x)

    def transform_output(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """L (y - bias) + bias, in a form that is y to the bit for L = I."""
        if self.left is None:
            return y
        y = turned(self.left, y)
        if bias is None:
            return y
        bias = bias.to(y.dtype)  # under autocast the layer has added it in the precision of y
        return y + (bias - turned(self.left, bias))

    def transform_weight(self, weight: Tensor) -> Tensor:
        weight = weight if self.left is None else turned(self.left, weight.mT).mT
        return weight if self.right is None else turned(self.right.mT, weight)


def turned(R: Tensor, x: Tensor) -> Tensor:
    """R x for vectors x (..., d) and block-diagonal R, given as blocks (d/b, b, b), in the dtype of R."""
    blocks = x.to(R.dtype).unflatten(-1, R.shape[:2])
    return torch.einsum("...kb,kcb->...kc", blocks, R).flatten(-2).to(x.dtype)


class LowRankLayer(AdapterLayer):
    """U diag(s) V^T x or U S V^T x, U (out, r) and V (in, r) on Stiefel."""

    U: Tensor
    V: Tensor

    def __init__(
        self, rank: int, full: bool, out_features: int, in_features: int, factory: dict[str, Any]
    ) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"a layer {out_features} x {in_features} has no part of rank {rank}")
        rank = min(rank, out_features, in_features)  # no matrix of a layer has more
        for leaf, size in (("U", out_features), ("V", in_features)):
            if size == 1:  # the points are +-1, which cannot move
                self.register_buffer(leaf, torch.ones(1, 1, **factory))
            else:
                self.register_parameter(leaf, nn.Parameter(Stiefel().random(size, rank, **factory)))
                constrain(self, leaf, Stiefel())
        if full:
            self.S = nn.Parameter(torch.zeros(rank, rank, **factory))
        else:
            self.s = nn.Parameter(torch.zeros(rank, **factory))

    def scaled(self, X: Tensor) -> Tensor:
        """X diag(s) or X S^T."""
        return X @ self.S.mT if "S" in self._parameters else X * self.s

    def output_term(self, x: Tensor) -> Tensor:
        return self.scaled(x.to(self.V.dtype) @ self.V) @ self.U.mT

    def weight_term(self) -> Tensor:
        return self.U @ self.scaled(self.V).mT


@dataclass(frozen=True)
class Rotation:
    """Orthogonal fine-tuning: y = L W R x + c with block-diagonal L and R, blocks in SO(block).

    `sides` is "right" for R alone, in/block rotations of the inputs; "left" for L alone, out/block rotations
    of the outputs; or "both". All keep the singular values of W.
    """

    block: int = 32
    sides: Literal["right", "left", "both"] = "right"

    def __post_init__(self) -> None:
        if self.sides not in SIDES:
            raise ValueError(f"sides is one of {', '.join(map(repr, SIDES))}, got {self.sides!r}")

    def layer(self, out_features: int, in_features: int, factory: dict[str, Any]) -> AdapterLayer:
        """The parameters for a layer of this size."""
        return RotationLayer(self.block, self.sides, out_features, in_features, factory)


@dataclass(frozen=True)
class LowRank:
    """y = W x + U diag(s) V^T x + c with orthonormal U and V: s are the singular values of the added term.

    With `full=True` the middle factor is a full matrix S, rank x rank, as in StelLA. Every U S V^T is also a
    U diag(s) V^T; but turning U and V by rotations can now be done by S alone.
    """

    rank: int = 8
    full: bool = False

    def layer(self, out_features: int, in_features: int, factory: dict[str, Any]) -> AdapterLayer:
        """The parameters for a layer of this size."""
        return LowRankLayer(self.rank, self.full, out_features, in_features, factory)


KINDS: dict[str, type[Rotation | LowRank]] = {"Rotation": Rotation, "LowRank": LowRank}


class Adapted(nn.Module):
    """A linear layer, `base`, with adapters by name; `active` lists those in use.

    `before_merge` holds the original weight while adapters are merged into it. It is in the state dict, which
    therefore fits merged layers only: in others the adapters would be applied twice.
    """

    before_merge: Tensor | None

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.parts = base, nn.ModuleDict()
        self.active: list[str] = []
        self.tied: tuple[Tensor, ...] = ()  # the tied weight, while the merged layer has one of its own
        self.register_buffer("before_merge", None)

    bias = property(lambda self: self.base.bias)
    in_features = property(lambda self: matrix_of(self.base).shape[1])
    out_features = property(lambda self: matrix_of(self.base).shape[0])

    def active_layers(self) -> list[AdapterLayer]:
        """The adapters to compute, in order: none while they are merged."""
        return [] if self.before_merge is not None else [self.parts[name] for name in self.active]  # type: ignore[misc]

    def forward(self, x: Tensor) -> Tensor:
        inner, layers = x, self.active_layers()
        for layer in layers:
            inner = layer.transform_input(inner)
        y: Tensor = self.base(inner)
        for layer in reversed(layers):
            y = layer.transform_output(y, self.bias)
        for layer in layers:
            term = layer.output_term(x)
            y = y if term is None else y + term.to(y.dtype)
        return y

    @property
    def weight(self) -> Tensor:
        """The weight as it acts: L_1 ... L_k W R_k ... R_1 + sum of U diag(s) V^T, in the base's layout."""
        return self.effective(self.base.weight)

    def effective(self, W: Tensor) -> Tensor:
        """W with the active adapters, computed in their precision."""
        layers = self.active_layers()
        if not layers:
            return W
        M = W.to(next(layers[0].parameters()).dtype)
        M = M.mT if is_conv1d(self.base) else M
        for layer in reversed(layers):
            M = layer.transform_weight(M)
        for term in (layer.weight_term() for layer in layers):
            M = M if term is None else M + term
        return (M.mT.contiguous() if is_conv1d(self.base) else M).to(W.dtype)

    @torch.no_grad()
    def merge(self, tied: bool = False) -> None:
        """Write the active adapters into the weight, or into a copy of a `tied` one, which others share.

        A parametrized weight is written through its `right_inverse`. Raises ValueError, and changes nothing,
        if the parametrization cannot represent the merged weight.
        """
        if self.before_merge is not None:
            return
        stored = {key: t.detach().clone() for key, t in stored_tensors(self.base).items()}
        W = self.base.weight  # evaluated once: in training mode spectral_norm changes with every evaluation
        merged = self.effective(W)
        if not parametrize.is_parametrized(self.base, "weight"):
            if tied:
                self.tied, self.base.weight = (W,), nn.Parameter(merged.clone(), W.requires_grad)
            else:
                W.copy_(merged)
        elif tied:
            raise ValueError(
                "the parametrization of its weight shares a tensor with another module; untie them"
            )
        else:
            try:
                _write_parametrized(self.base, merged)
            except ValueError:
                _restore(self.base, stored)
                raise
            for key, value in stored.items():
                self.register_buffer(f"before_merge_{key}", value)
        self.before_merge = W.detach().clone() if "weight" not in stored else stored["weight"]

    def hooks_between(self) -> Iterator[tuple[str, list[str]]]:
        """The kinds and names of hooks that act between the base and active adapters, and so do not merge.

        Those on the input, where adapters have the input before them or change it; and those on the output,
        where adapters change it after them. Whether a hook changes anything cannot be told.
        """
        layers = [self.parts[name] for name in self.active]
        low_rank = any(isinstance(part, LowRankLayer) for part in layers)
        for what, side in (("forward_pre_hook", "right"), ("forward_hook", "left")):
            held = getattr(self.base, f"_{what}s").values()
            if held and (low_rank or any(getattr(part, side, None) is not None for part in layers)):
                yield what, [getattr(hook, "__qualname__", repr(hook)) for hook in held]

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restore the weight to the bit, and its tie."""
        prefix = "before_merge_"
        stored = {
            k.removeprefix(prefix): v for k, v in self.named_buffers(recurse=False) if k.startswith(prefix)
        }
        if self.tied:
            (self.base.weight,), self.tied = self.tied, ()
        elif self.before_merge is not None:
            _restore(self.base, stored or {"weight": self.before_merge})
        for key in stored:
            delattr(self, prefix + key)
        self.before_merge = None


def is_conv1d(layer: nn.Module) -> bool:
    """Whether a layer is the Conv1D of Hugging Face's transformers: a linear layer, its weight in x out."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def matrix_of(layer: Any) -> Tensor:
    """The weight of a layer as a matrix out x in."""
    W: Tensor = layer.weight
    return W.mT if is_conv1d(layer) else W


def stored_tensors(layer: nn.Linear) -> dict[str, Tensor]:
    """The weight of a layer or, if it is parametrized, all tensors that it is computed from."""
    if parametrize.is_parametrized(layer, "weight"):
        chain: Any = layer.parametrizations["weight"]  # type: ignore[index]
        return {n.replace(".", "_"): t for n, t in (*chain.named_parameters(), *chain.named_buffers())}
    p = layer._parameters.get("weight")
    if p is None:
        raise ValueError(
            "its weight is not a parameter: a hook computes it at each call; remove that hook first"
        )
    return {"weight": p}


def _restore(layer: nn.Linear, stored: Mapping[str, Tensor | None]) -> None:
    for key, t in stored_tensors(layer).items():
        value = stored[key]
        assert value is not None
        t.copy_(value)


def _write_parametrized(layer: nn.Linear, value: Tensor) -> None:
    """Assign to a parametrized weight; ValueError unless the weight then has this value, up to rounding."""
    chain: Any = layer.parametrizations["weight"]  # type: ignore[index]
    kind = " and ".join(type(f).__name__ for f in chain)
    way_out = "remove it first: torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
    try:
        layer.weight = value.clone()  # by right_inverse
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(f"its parametrization {kind} cannot be assigned to ({error}); {way_out}") from None
    off, size = (layer.weight - value).norm(), value.norm()
    if not bool(off <= 10 * max(value.shape) ** 0.5 * torch.finfo(value.dtype).eps * size):
        raise ValueError(
            f"its parametrization {kind} has no parameters for the merged weight, and would change it by "
            f"{float(off / size):.1e}; {way_out}"
        )


def adapt(
    model: nn.Module,
    targets: str | Sequence[str],
    adapter: Rotation | LowRank,
    name: str = "default",
    freeze: bool = True,
    train: str | Sequence[str] = (),
) -> list[str]:
    """Put an adapter on the linear layers of a model that `targets` select; returns the names of the layers.

    Linear layers are nn.Linear and Hugging Face's Conv1D. A target is the end of a layer's name ("q_proj") or
    a glob ("model.layers.[0-7].*.q_proj"). A layer that occurs in several places of the model gets one
    adapter for all of them. All other parameters are frozen, except adapters that are there already, which
    stay as they are, and the parameters that `train` selects, such as those of a new head, which are trained;
    with `freeze=False` none is frozen.
    """
    _check_name(name)
    if type(adapter) not in (Rotation, LowRank):
        raise TypeError(f"adapter is a Rotation(block) or LowRank(rank), got {adapter!r}")
    layers, parameters = _layers(model), dict(model.named_parameters(remove_duplicate=False))
    found = {layers[n] for target in _list(targets) for n in select_by_suffix(layers, target)}
    trained = [parameters[n] for pattern in _list(train) for n in select_by_suffix(parameters, pattern)]
    first = {m: n for n, m in reversed(layers.items()) if m in found}
    names = [n for n, m in layers.items() if first.get(m) == n]
    _attach(model, {n: _new_layer(n, layers[n], adapter, name) for n in names}, name)
    if freeze:
        _freeze(model)
    for p in trained:
        p.requires_grad_()
    return names


def _check_name(name: str) -> None:
    if not name or "." in name or hasattr(nn.ModuleDict(), name):
        raise ValueError(
            f"an adapter cannot be called {name!r}: it names a module, so it has no dots and is not an "
            "attribute of nn.ModuleDict"
        )


def _list(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


def _layers(model: nn.Module) -> dict[str, nn.Linear | Adapted]:
    """The layers that can be adapted, by each of their names."""
    every = dict(model.named_modules(remove_duplicate=False))
    inside = {f"{n}.base".lstrip(".") for n, m in every.items() if isinstance(m, Adapted)}
    return {
        n: m
        for n, m in every.items()
        if (isinstance(m, (nn.Linear, Adapted)) or is_conv1d(m)) and n not in inside
    }


def _attach(model: nn.Module, adapter_layers: Mapping[str, AdapterLayer], name: str) -> None:
    layers, new = _layers(model), {}
    for n, adapter_layer in adapter_layers.items():
        layer = layers[n]
        adapted = new[layer] = layer if isinstance(layer, Adapted) else Adapted(layer)
        adapted.parts[name] = adapter_layer
        adapted.active.append(name)
    _exchange(model, new)


def _exchange(model: nn.Module, new: Mapping[Any, nn.Module]) -> None:
    """Replace some layers by others wherever they occur in the model."""
    for parent in list(model.modules()):
        for leaf, child in list(parent._modules.items()):
            if child in new and not isinstance(parent, Adapted):
                setattr(parent, leaf, new[child])


def _freeze(model: nn.Module) -> None:
    """Freeze everything but the adapters, which stay as they are."""
    ours = {id(p) for m in _adapted(model).values() for p in m.parts.parameters()}
    for p in model.parameters():
        if id(p) not in ours:
            p.requires_grad_(False)


def _new_layer(n: str, layer: nn.Linear | Adapted, adapter: Rotation | LowRank, name: str) -> AdapterLayer:
    """An adapter for the layer called n, in full precision even if the weight is in half precision."""
    if not n and not isinstance(layer, Adapted):
        raise ValueError(
            f"the model is a {type(layer).__name__} itself: adapt the model that holds it, or "
            "nn.Sequential(layer)"
        )
    if isinstance(layer, Adapted) and (name in layer.parts or layer.before_merge is not None):
        raise ValueError(f"{n} has an adapter {name!r} already, or is merged; give another name, or unmerge")
    W = matrix_of(layer.base if isinstance(layer, Adapted) else layer)
    if is_lazy(W):
        raise ValueError(f"{n}.weight has no shape yet: call the lazy module once, then put an adapter on it")
    out, into = W.shape
    try:
        new = adapter.layer(out, into, {"device": W.device, "dtype": COMPUTE_DTYPE.get(W.dtype, W.dtype)})
    except (TypeError, ValueError) as error:
        raise type(error)(f"{n}: {error}") from None
    new.adapter = adapter
    return new


def _adapted(model: nn.Module) -> dict[str, Adapted]:
    return {n: m for n, m in model.named_modules() if isinstance(m, Adapted)}


def activate(model: nn.Module, names: str | Sequence[str]) -> None:
    """Activate exactly these adapters, in this order; [] disables all."""
    layers, names = _adapted(model), _list(names)
    known = {name for m in layers.values() for name in m.parts}
    if set(names) - known:
        raise ValueError(f"there is no adapter {sorted(set(names) - known)}; there are {sorted(known)}")
    if any(m.before_merge is not None for m in layers.values()):
        raise ValueError("adapters are merged into the weights; call unmerge first")
    for m in layers.values():
        m.active = [name for name in names if name in m.parts]


def angle_groups(model: nn.Module, angle: float, **options: Any) -> list[dict[str, Any]]:
    """Optimizer groups in which one number is the step of every rotation and every orthonormal factor.

    Adam moves each coordinate of the velocity by about lr, whatever the gradient, so a column with N - 1
    coordinates turns by lr sqrt(N - 1): eight times as far in blocks of 65 as in blocks of 2. Here every
    column turns by `angle` a step: lr = angle/sqrt(N - 1) for rotations of SO(N) and factors N x n, and
    angle/sqrt(2N - 1) for complex factors, whose columns have 2N - 1 coordinates. Other parameters have the
    learning rate of the optimizer; `options` go into every group. For rules like Adam, whose steps do not
    grow with the gradient.

    >>> optimizer = ghor.optim.AdamW(angle_groups(model, 0.02), lr=1e-3)
    """
    groups: dict[Any, dict[str, Any]] = {}
    for name, p, space in declared_spaces(model):
        if p.requires_grad:
            coordinates = None
            if type(space) in (SpecialOrthogonal, Stiefel):
                N = space.layout.size(p.shape)[0]
                coordinates = 2 * N - 1 if p.is_complex() else N - 1
            own = {} if coordinates is None else {"lr": angle / math.sqrt(coordinates)}
            group = groups.setdefault((space, coordinates), {"params": [], "space": space, **options, **own})
            group["params"].append((name, p))
    return list(groups.values())


def merge(model: nn.Module) -> None:
    """Write the active adapters into the weights: the same outputs at the cost of the bare model.

    A layer whose weight is tied, for example to an embedding, gets a weight of its own until `unmerge`. A
    parametrized weight (`weight_norm`, `orthogonal`, ...) is written through its parametrization; if this
    cannot represent the merged weight, or two adapted layers have one base, ValueError is raised, and no
    layer is merged. Hooks of a layer that may have changed what an adapter gets are named in a warning.
    """
    warn = Warnings()
    held = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    adapted, merged = _adapted(model), list[Adapted]()
    users: dict[nn.Module, list[str]] = defaultdict(list)
    for n, m in adapted.items():
        users[m.base].append(n)
    for names in users.values():
        if len(names) > 1 and any(adapted[n].active for n in names):
            raise ValueError(
                f"{' and '.join(names)} adapt one and the same layer, so what is merged for one would change "
                "the other; give each a copy"
            )
    for n, m in adapted.items():
        if m.before_merge is not None:
            continue
        try:
            m.merge(tied=any(held[id(t)] > 1 for t in stored_tensors(m.base).values()))
        except ValueError as error:
            for other in merged:
                other.unmerge()
            raise ValueError(f"{n} cannot be merged: {error}") from None
        merged.append(m)
        for what, hooks in m.hooks_between():
            warn(
                f"{what} {n}",
                f"{n} was merged, and {', '.join(hooks)}, a {what} of its base, now acts on the whole layer, "
                f"with its adapters. If it changes the {'input' if 'pre' in what else 'output'}, the merged "
                f"layer computes something else: unmerge, and register it on {n} instead of its base",
            )
    warn.flush()


def unmerge(model: nn.Module) -> None:
    """Take the adapters out of the weights again, which are then, bit for bit, as before `merge`."""
    for m in _adapted(model).values():
        m.unmerge()


def remove(model: nn.Module) -> None:
    """Put the original layers back in place; after `merge` they keep what was learned."""
    if isinstance(model, Adapted):
        raise ValueError(
            "the model is an adapted layer itself: take its base, or remove from the model that holds it"
        )
    adapted, warn = _adapted(model), Warnings()
    _exchange(model, {m: m.base for m in adapted.values()})
    for n, m in adapted.items():
        if hooks := [*m._forward_pre_hooks.values(), *m._forward_hooks.values()]:
            names = ", ".join(getattr(hook, "__qualname__", repr(hook)) for hook in hooks)
            warn(
                n,
                f"{n} had hooks of its own, which the layer in its place lacks: {names}; register them there",
            )
    warn.flush()


def release(model: nn.Module) -> nn.Module:
    """Turn a model into a plain module, in place, and return it: weights stay, objects of ghor do not.

    Declarations are removed, active adapters are merged into the weights, and the layers put back in place;
    multiples s Q (`ghor.constrain_multiples`) become ordinary weights.
    Once saved, the model loads where ghor is not installed. If it holds another object of ghor, such as a
    space, this raises ValueError, and nothing is changed.

    >>> torch.save(release(model), "model.pt")
    """
    check_module(model, "release")
    adapted = [m for m in _adapted(model).values() if m is not model]
    scaled = multiples(model)
    replaced = {m for layer in adapted for m in (layer, *layer.parts.modules())} | {*scaled.values()}
    for name, module in model.named_modules():
        if module not in replaced:
            _refuse_objects_of_ghor(module, name)
    merge(model)
    remove(model)
    for module, leaf in scaled:
        remove_parametrizations(module, leaf)
    for module in model.modules():
        forget(module)
    return model


def _refuse_objects_of_ghor(module: nn.Module, name: str) -> None:
    held = [(k, v) for k, v in vars(module).items() if k not in (RECORD, "_modules")]
    for what, value in [("", module), *((k, x) for k, v in held for x in _within(v))]:
        kind = next((c for c in type(value).__mro__ if c.__module__.partition(".")[0] == "ghor"), None)
        if kind is not None:
            raise ValueError(
                f"{f'{name}.{what}'.strip('.') or 'the model'} is a {kind.__module__}.{kind.__qualname__}, "
                "which needs ghor: replace it with a plain one, then release the model"
            )


def _within(value: Any) -> list[Any]:
    """A value, and what is in it if it is a dict, list, tuple or set, at any depth."""
    found: dict[int, Any] = {}
    left = [value]
    while left:
        x = left.pop()
        if id(x) not in found and isinstance(x, (dict, list, tuple, set)):
            left += [*x, *x.values()] if isinstance(x, dict) else x
        found[id(x)] = x
    return list(found.values())


def parts_of(model: nn.Module, name: str) -> dict[str, AdapterLayer]:
    """One adapter of a model, by the names of its layers; ValueError if there is none, or several kinds."""
    parts: Any = {n: m.parts[name] for n, m in _adapted(model).items() if name in m.parts}
    if not parts:
        raise ValueError(f"the model has no adapter {name!r}")
    kinds = {part.adapter: n for n, part in parts.items()}
    if len(kinds) > 1:
        (a, n), (b, m) = list(kinds.items())[:2]
        raise ValueError(
            f"the adapter {name!r} is {a} on {n} and {b} on {m}, and a file has one kind; give them two names"
        )
    return parts


def save(model: nn.Module, path: Any, name: str = "default") -> None:
    """Write one adapter, and nothing else of the model, to a file for `torch.load(weights_only=True)`."""
    parts = parts_of(model, name)
    tensors = {
        f"{n}.{leaf}": p.detach().clone() for n, m in parts.items() for leaf, p in m.named_parameters()
    }
    adapter: Any = next(iter(parts.values())).adapter
    content = {"kind": type(adapter).__name__, "options": asdict(adapter), "name": name, "tensors": tensors}
    if not isinstance(path, str | os.PathLike):
        torch.save(content, path)
        return
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_file(path, buffer.getvalue())


def write_file(path: Any, data: bytes) -> None:
    """Write under another name first, so that an interrupted write leaves an old file as it was."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # a device; a folder raises
        target.write_bytes(data)
        return
    new = target.with_name(f".{uuid4().hex}.new")
    try:
        new.write_bytes(data)
        if target.exists():
            shutil.copymode(target, new)
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


def load(model: nn.Module, path: Any, name: str | None = None, freeze: bool = True) -> str:
    """Put a saved adapter on a model of the same layers, under its own name or another; returns the name."""
    folder = "a folder of peft is read by ghor.interop.load_peft"
    if isinstance(path, str | os.PathLike) and Path(path).is_dir():
        raise ValueError(f"{path} is a folder, not a file of ghor.adapters.save; {folder}")
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu")
    except (EOFError, RuntimeError, pickle.UnpicklingError) as error:  # of no, cut or other content
        raise ValueError(f"{path} is damaged, or no file of ghor.adapters.save; {folder}") from error
    if not isinstance(saved, dict) or not {"kind", "options", "name", "tensors"} <= saved.keys():
        raise ValueError(f"{path} is not a file of ghor.adapters.save; {folder}")
    if saved["kind"] not in KINDS:
        raise ValueError(
            f"{path} has an adapter of kind {saved['kind']!r}, which this version does not have: it has "
            f"{' and '.join(KINDS)}"
        )
    if not saved["tensors"]:
        raise ValueError(f"{path} has an adapter without tensors: it was saved from a model without layers")
    name = str(saved["name"]) if name is None else name
    install(model, KINDS[saved["kind"]](**saved["options"]), saved["tensors"], name, freeze)
    return name


def install(
    model: nn.Module, adapter: Rotation | LowRank, tensors: Mapping[str, Tensor], name: str, freeze: bool
) -> None:
    """Put an adapter with given factors, {name of a layer and factor: tensor}, on a model; all or nothing."""
    layers = _layers(model)
    _check_name(name)
    names = list(dict.fromkeys(n.rpartition(".")[0] for n in tensors))
    missing = set(names) - set(layers)
    if missing:
        raise ValueError(
            f"the adapter is for {min(missing)}, which this model does not have as a linear layer"
        )
    if len({layers[n] for n in names}) < len(names):
        raise ValueError(
            f"some of {', '.join(names)} are one layer in this model; the file has an adapter for each"
        )
    new = {n: _new_layer(n, layers[n], adapter, name) for n in names}
    _fill(new, tensors)
    _attach(model, new, name)
    if freeze:
        _freeze(model)


def _fill(layers: Mapping[str, AdapterLayer], tensors: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into new adapters; ValueError for other names or shapes, or points off a space."""
    wanted = {f"{n}.{leaf}": (p, space) for n, m in layers.items() for leaf, p, space in declared_spaces(m)}
    has = {n: tuple(t.shape) for n, t in tensors.items()}
    needs = {n: tuple(p.shape) for n, (p, _) in wanted.items()}
    wrong = [n for n in has | needs if has.get(n) != needs.get(n)]
    if wrong:
        got, need = has.get(wrong[0], "nothing"), needs.get(wrong[0], "nothing")
        raise ValueError(
            f"{wrong[0]}: the file has {got}, this model needs {need}; load it on layers of its own sizes"
        )
    for n, (p, space) in wanted.items():
        check_on_space([tensors[n]], space, [f"{n} of the file"])
        with torch.no_grad():  # converted to a wider dtype, a point is on its space only to the file's digits
            p.copy_(tensors[n] if tensors[n].dtype == p.dtype else space.project(tensors[n].to(p.dtype)))
