"""Write adapters into the weights, take them out again, and leave a plain model behind."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ghor._torch.parametrized import remove_parametrizations
from ghor._torch.warn import Warnings
from ghor.adapters.adapted import Adapted, adapted_layers, exchange
from ghor.adapters.kinds import LowRankLayer
from ghor.constraints.multiples import multiples
from ghor.constraints.registry import RECORD, forget
from ghor.constraints.selection import check_module


def merge(model: nn.Module) -> None:
    """Write the active adapters into the weights: the same outputs at the cost of the bare model.

    A layer whose weight is tied, for example to an embedding, gets a weight of its own until `unmerge`. A
    parametrized weight (`weight_norm`, `orthogonal`, ...) is written through its parametrization; if this
    cannot represent the merged weight, or two adapted layers have one base, ValueError is raised, and no
    layer is merged. Hooks of a layer that may have changed what an adapter gets are named in a warning.
    """
    warn = Warnings()
    held = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    adapted, merged = adapted_layers(model), list[Adapted]()
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
            _merge(m, held)
        except ValueError as error:
            for other in merged:
                _unmerge(other)
            raise ValueError(f"{n} cannot be merged: {error}") from None
        merged.append(m)
        for what, hooks in _hooks_between(m):
            warn(
                f"{what} {n}",
                f"{n} was merged, and {hooks}, a {what} of its base, now acts on the whole layer, "
                f"with its adapters. If it changes the {'input' if 'pre' in what else 'output'}, the merged "
                f"layer computes something else: unmerge, and register it on {n} instead of its base",
            )
    warn.flush()


def unmerge(model: nn.Module) -> None:
    """Take the adapters out of the weights again, which are then, bit for bit, as before `merge`."""
    for m in adapted_layers(model).values():
        _unmerge(m)


def remove(model: nn.Module) -> None:
    """Put the original layers back in place; after `merge` they keep what was learned."""
    if isinstance(model, Adapted):
        raise ValueError(
            "the model is an adapted layer itself: take its base, or remove from the model that holds it"
        )
    adapted, warn = adapted_layers(model), Warnings()
    exchange(model, {m: m.base for m in adapted.values()})
    for n, m in adapted.items():
        if hooks := _names([*m._forward_pre_hooks.values(), *m._forward_hooks.values()]):
            warn(
                n,
                f"{n} had hooks of its own, which the layer in its place lacks: {hooks}; register them there",
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
    adapted = [m for m in adapted_layers(model).values() if m is not model]
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


# -- one layer -----------------------------------------------------------------------------------------------


@torch.no_grad()
def _merge(layer: Adapted, held: Mapping[int, int]) -> None:
    """Write the active adapters into the weight, or into a copy of a tied one, which several modules hold.

    A parametrized weight is written through its `right_inverse`. Raises ValueError, and changes nothing, if
    the parametrization cannot represent the merged weight.
    """
    base, tensors = layer.base, _stored(layer.base)
    tied = any(held[id(t)] > 1 for t in tensors.values())
    stored = {key: t.detach().clone() for key, t in tensors.items()}
    W = base.weight  # evaluated once: in training mode spectral_norm changes with every evaluation
    before, merged = W.detach().clone(), layer.effective(W)
    if not parametrize.is_parametrized(base, "weight"):
        if tied:
            layer.tied, base.weight = (W,), nn.Parameter(merged.clone(), W.requires_grad)
        else:
            W.copy_(merged)
    elif tied:
        raise ValueError("the parametrization of its weight shares a tensor with another module; untie them")
    else:
        try:
            _write_parametrized(base, merged)
        except ValueError:
            _restore(base, stored)
            raise
        for key, value in stored.items():
            layer.register_buffer(f"{STORED}{key}", value)
    layer.before_merge = before


@torch.no_grad()
def _unmerge(layer: Adapted) -> None:
    """Restore the weight to the bit, and its tie."""
    own = dict(layer.named_buffers(recurse=False))
    stored = {key.removeprefix(STORED): t for key, t in own.items() if key.startswith(STORED)}
    if layer.tied:
        (layer.base.weight,), layer.tied = layer.tied, ()
    elif layer.before_merge is not None:
        _restore(layer.base, stored or {"weight": layer.before_merge})
    for key in stored:
        delattr(layer, STORED + key)
    layer.before_merge = None


STORED = "before_merge_"  # begins the names of the tensors of a parametrized weight, while it is merged


def _stored(base: nn.Module) -> dict[str, Tensor]:
    """The weight of a layer or, if it is parametrized, all tensors that it is computed from."""
    if parametrize.is_parametrized(base, "weight"):
        chain: Any = base.parametrizations["weight"]  # type: ignore[index]
        return {n.replace(".", "_"): t for n, t in (*chain.named_parameters(), *chain.named_buffers())}
    p = base._parameters.get("weight")
    if p is None:
        raise ValueError(
            "its weight is not a parameter: a hook computes it at each call; remove that hook first"
        )
    return {"weight": p}


def _restore(base: nn.Module, stored: Mapping[str, Tensor]) -> None:
    for key, t in _stored(base).items():
        t.copy_(stored[key])


def _write_parametrized(base: nn.Module, value: Tensor) -> None:
    """Assign to a parametrized weight; ValueError unless the weight then has this value, up to rounding."""
    chain: Any = base.parametrizations["weight"]  # type: ignore[index]
    kind = " and ".join(type(f).__name__ for f in chain)
    way_out = "remove it first: torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
    try:
        base.weight = value.clone()  # by right_inverse
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(f"its parametrization {kind} cannot be assigned to ({error}); {way_out}") from None
    off, size = (base.weight - value).norm(), value.norm()
    if not bool(off <= 10 * max(value.shape) ** 0.5 * torch.finfo(value.dtype).eps * size):
        raise ValueError(
            f"its parametrization {kind} has no parameters for the merged weight, and would change it by "
            f"{float(off / size):.1e}; {way_out}"
        )


def _hooks_between(layer: Adapted) -> Iterator[tuple[str, str]]:
    """The kinds and names of hooks that act between the base and active adapters, and so do not merge.

    Those on the input, where adapters have the input before them or change it; and those on the output,
    where adapters change it after them. Whether a hook changes anything cannot be told.
    """
    parts = [layer.parts[name] for name in layer.active]
    low_rank = any(isinstance(part, LowRankLayer) for part in parts)
    for what, side in (("forward_pre_hook", "right"), ("forward_hook", "left")):
        hooks = _names(getattr(layer.base, f"_{what}s").values())
        if hooks and (low_rank or any(getattr(part, side, None) is not None for part in parts)):
            yield what, hooks


def _names(hooks: Iterable[Callable[..., Any]]) -> str:
    return ", ".join(getattr(hook, "__qualname__", repr(hook)) for hook in hooks)
