"""Put adapters on the layers of a model, choose among them, and group their parameters for an optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ghor._torch.precision import COMPUTE_DTYPE
from ghor.adapters.adapted import Adapted, adapted_layers, exchange, is_conv1d, matrix_of
from ghor.adapters.kinds import KINDS, AdapterLayer, LowRank, Rotation
from ghor.constraints.declare import declared_spaces
from ghor.constraints.selection import select_by_suffix
from ghor.constraints.validation import check_on_space
from ghor.spaces import SpecialOrthogonal, Stiefel


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
    if type(adapter) not in KINDS.values():
        raise TypeError(f"adapter is a Rotation(block) or LowRank(rank), got {adapter!r}")
    layers, parameters = _layers(model), dict(model.named_parameters(remove_duplicate=False))
    found = {layers[n] for target in _list(targets) for n in select_by_suffix(layers, target)}
    trained = [parameters[n] for pattern in _list(train) for n in select_by_suffix(parameters, pattern)]
    first = {m: n for n, m in reversed(layers.items()) if m in found}
    chosen = {n: m for n, m in layers.items() if first.get(m) == n}
    _attach(model, chosen, adapter, name, freeze)
    for p in trained:
        p.requires_grad_()
    return list(chosen)


def install(
    model: nn.Module, adapter: Rotation | LowRank, tensors: Mapping[str, Tensor], name: str, freeze: bool
) -> None:
    """Put an adapter with given factors, {name of a layer and factor: tensor}, on a model; all or nothing."""
    layers = _layers(model)
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
    _attach(model, {n: layers[n] for n in names}, adapter, name, freeze, tensors)


def activate(model: nn.Module, names: str | Sequence[str]) -> None:
    """Activate exactly these adapters, in this order; [] disables all."""
    layers, names = adapted_layers(model), _list(names)
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
            own = {}
            if type(space) in (SpecialOrthogonal, Stiefel):
                N = space.layout.size(p.shape)[0]
                own = {"lr": angle / math.sqrt(2 * N - 1 if p.is_complex() else N - 1)}
            group = {"params": [], "space": space, **options, **own}
            groups.setdefault((space, own.get("lr")), group)["params"].append((name, p))
    return list(groups.values())


def _attach(
    model: nn.Module,
    layers: Mapping[str, nn.Linear | Adapted],
    adapter: Rotation | LowRank,
    name: str,
    freeze: bool,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Put an adapter on these layers, with given factors or as it starts."""
    if not name or "." in name or hasattr(nn.ModuleDict(), name):
        raise ValueError(
            f"an adapter cannot be called {name!r}: it names a module, so it has no dots and is not an "
            "attribute of nn.ModuleDict"
        )
    parts = {n: _part(n, layer, adapter, name) for n, layer in layers.items()}
    if tensors is not None:
        _fill(parts, tensors)
    new: dict[Any, nn.Module] = {}
    for n, layer in layers.items():
        adapted = new[layer] = layer if isinstance(layer, Adapted) else Adapted(layer)
        adapted.parts[name] = parts[n]
        adapted.active.append(name)
    exchange(model, new)
    if freeze:  # other adapters stay as they are
        ours = {id(p) for m in adapted_layers(model).values() for p in m.parts.parameters()}
        for p in model.parameters():
            if id(p) not in ours:
                p.requires_grad_(False)


def _part(n: str, layer: nn.Linear | Adapted, adapter: Rotation | LowRank, name: str) -> AdapterLayer:
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
        return adapter.layer(out, into, {"device": W.device, "dtype": COMPUTE_DTYPE.get(W.dtype, W.dtype)})
    except (TypeError, ValueError) as error:
        raise type(error)(f"{n}: {error}") from None


def _fill(parts: Mapping[str, AdapterLayer], tensors: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into new adapters; ValueError for other names or shapes, or points off a space."""
    wanted = {f"{n}.{leaf}": (p, space) for n, m in parts.items() for leaf, p, space in declared_spaces(m)}
    has = {n: tuple(t.shape) for n, t in tensors.items()}
    needs = {n: tuple(p.shape) for n, (p, _) in wanted.items()}
    for n in has | needs:
        if has.get(n) != needs.get(n):
            raise ValueError(
                f"{n}: the file has {has.get(n, 'nothing')}, this model needs {needs.get(n, 'nothing')}; "
                "load it on layers of its own sizes"
            )
    for n, (p, space) in wanted.items():
        check_on_space([tensors[n]], space, [f"{n} of the file"])
        with torch.no_grad():  # converted to a wider dtype, a point is on its space only to the file's digits
            p.copy_(tensors[n] if tensors[n].dtype == p.dtype else space.project(tensors[n].to(p.dtype)))


def _layers(model: nn.Module) -> dict[str, nn.Linear | Adapted]:
    """The layers that can be adapted, by each of their names."""
    every = dict(model.named_modules(remove_duplicate=False))
    inside = {f"{n}.base".lstrip(".") for n, m in every.items() if isinstance(m, Adapted)}
    return {
        n: m
        for n, m in every.items()
        if (isinstance(m, (nn.Linear, Adapted)) or is_conv1d(m)) and n not in inside
    }


def _list(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names
