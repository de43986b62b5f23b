"""Select parameters and modules by name, glob or predicate."""

from __future__ import annotations

import difflib
import fnmatch
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Predicate = Callable[[str, nn.Parameter], bool]
Holder = tuple[nn.Module, str]  # a module and its name for a parameter


class Selected(NamedTuple):
    """A parameter, where it was found, and all modules of the model that hold it: several if it is tied."""

    owner: nn.Module
    leaf: str
    p: Tensor
    holders: Sequence[Holder]


def check_module(module: object, function: str) -> None:
    """Raise TypeError for what is no module, as a list of parameters or a state dict."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"ghor.{function} takes a model, an nn.Module, got a {type(module).__name__}")


def select(module: nn.Module, which: str | Sequence[str] | Predicate) -> dict[str, Selected]:
    """The selected parameters by name; ValueError if a name or glob matches none."""
    every = _every(module)
    names = _satisfying(module, which) if callable(which) else _matching(module, every, which)
    for n in names:
        if isinstance(every[n].owner, torch.jit.ScriptModule):
            raise TypeError(
                f"{n} is a weight of a scripted module, and copies of that keep no declarations: constrain "
                "the module, then script it"
            )
    return {n: every[n] for n in names}


def _every(module: nn.Module) -> dict[str, Selected]:
    """All parameters of a module, a tied one by each of its names."""
    every: dict[str, Selected] = {}
    holders = defaultdict[int, list[Holder]](list)
    for path, owner in module.named_modules(remove_duplicate=False):
        for leaf, p in owner._parameters.items():
            if p is not None:
                held = holders[id(p)]
                if (owner, leaf) not in held:  # a module may have two names, too
                    held.append((owner, leaf))
                every[f"{path}.{leaf}".lstrip(".")] = Selected(owner, leaf, p, held)
    return every


def _satisfying(module: nn.Module, predicate: Predicate) -> list[str]:
    known = dict(module.named_parameters())
    found = [n for n, p in known.items() if predicate(n, p)]
    if not found:
        raise ValueError(
            f"the function selects none of the {len(known)} parameters of {type(module).__name__}"
        )
    return found


def _matching(module: nn.Module, every: dict[str, Selected], which: Any) -> list[str]:
    """The names that are given or match; of a tied weight, those given and the first that matches."""
    out = dict[str, None]()
    selected = set[int]()  # the ids of the weights in `out`
    several = isinstance(which, Iterable) and not isinstance(which, str | Tensor)
    for name in which if several else [which]:
        if not isinstance(name, str):
            got = f"a {type(name).__name__}, pass its name" if isinstance(name, Tensor) else repr(name)
            raise TypeError(
                "which parameters is said by names, patterns or a function of name and parameter, and then "
                f"the space; got {got}"
            )
        found = [name] if name in every else fnmatch.filter(every, name)
        if not found:
            raise ValueError(_no_match(module, name))
        for n in found:
            p = id(every[n].p)
            if n == name or p not in selected:
                out[n] = None
                selected.add(p)
    return list(out)


def _no_match(module: nn.Module, name: str) -> str:
    """What to say where no parameter has this name or matches it."""
    path, _, leaf = name.rpartition(".")
    owner = dict(module.named_modules(remove_duplicate=False)).get(path)
    if leaf in getattr(owner, "parametrizations", ()):
        return (
            f"{name} of {type(module).__name__} is computed by a parametrization; remove it with "
            "torch.nn.utils.parametrize.remove_parametrizations, or take it over with "
            "ghor.interop.from_parametrized"
        )
    known = [n for n, _ in module.named_parameters()]
    near = known if len(known) <= 3 else difflib.get_close_matches(name, known, 3, 0) or known[:3]
    rest = f" and {len(known) - len(near)} others" if len(known) > len(near) else ""
    like = " like" if set("*?[") & set(name) else ""
    there = ", ".join(near) or "none"
    return f"{type(module).__name__} has no parameter{like} {name!r}; it has: {there}{rest}"


def select_by_suffix(names: Iterable[str], target: str) -> list[str]:
    """The names that are `target`, end in ".target" or match it as a glob; ValueError if there are none."""
    names = list(names)
    found = [n for n in names if n == target or n.endswith(f".{target}") or fnmatch.fnmatchcase(n, target)]
    if not found:
        near = difflib.get_close_matches(target, {*names, *(n.rpartition(".")[2] for n in names)}, 3, 0)
        raise ValueError(f"there is no {target!r}; there are: {', '.join(near) or 'none'}, ...")
    return found
