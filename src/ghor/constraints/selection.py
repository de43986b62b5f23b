"""Select parameters and modules by name, glob or predicate."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Predicate = Callable[[str, nn.Parameter], bool]


def check_module(module: object, function: str) -> None:
    """Raise TypeError for what is no module, as a list of parameters or a state dict."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"ghor.{function} takes a model, an nn.Module, got a {type(module).__name__}")


def select(module: nn.Module, which: str | Sequence[str] | Predicate) -> dict[str, tuple[nn.Module, str]]:
    """{name: (owner, name there)} of the selected parameters; ValueError if a name or glob matches none."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"parameters are selected from a module, by name, got a {type(module).__name__}")
    owners = dict(module.named_modules(remove_duplicate=False))
    every = {
        f"{n}.{leaf}" if n else leaf: (m, leaf)
        for n, m in owners.items()
        for leaf, p in m._parameters.items()
        if p is not None
    }
    known = [n for n, _ in module.named_parameters()]
    if not isinstance(which, str) and callable(which):
        found = [n for n, p in module.named_parameters() if which(n, p)]
        if not found:
            raise ValueError(
                f"the function selects none of the {len(known)} parameters of {type(module).__name__}"
            )
        return _unscripted({n: every[n] for n in found})
    out: dict[str, tuple[nn.Module, str]] = {}
    selected = set[int]()  # the ids of the weights in `out`
    several = isinstance(which, Iterable) and not isinstance(which, str | Tensor)
    names: list[Any] = list(which) if several else [which]
    for name in names:
        if not isinstance(name, str):
            got = f"a {type(name).__name__}, pass its name" if isinstance(name, Tensor) else repr(name)
            raise TypeError(
                "which parameters is said by names, patterns or a function of name and parameter, and then "
                f"the space; got {got}"
            )
        found = [name] if name in every else fnmatch.filter(every, name)
        if not found:
            path, _, leaf = name.rpartition(".")
            if path in owners and leaf in getattr(owners[path], "parametrizations", ()):
                raise ValueError(
                    f"{name} of {type(module).__name__} is computed by a parametrization; remove it with "
                    "torch.nn.utils.parametrize.remove_parametrizations, or take it over with "
                    "ghor.interop.from_parametrized"
                )
            near = known if len(known) <= 3 else difflib.get_close_matches(name, known, 3, 0) or known[:3]
            rest = f" and {len(known) - len(near)} others" if len(known) > len(near) else ""
            like = " like" if set("*?[") & set(name) else ""
            there = ", ".join(near) or "none"
            raise ValueError(
                f"{type(module).__name__} has no parameter{like} {name!r}; it has: {there}{rest}"
            )
        # A tied weight has several names: a name always selects it, and a glob unless it is selected already.
        for n in found:
            owner, leaf = every[n]
            p = id(owner._parameters[leaf])
            if n == name or p not in selected:
                out[n] = owner, leaf
                selected.add(p)
    return _unscripted(out)


def _unscripted(found: dict[str, tuple[nn.Module, str]]) -> dict[str, tuple[nn.Module, str]]:
    for n, (owner, _) in found.items():
        if isinstance(owner, torch.jit.ScriptModule):
            raise TypeError(
                f"{n} is a weight of a scripted module, and copies of that keep no declarations: constrain "
                "the module, then script it"
            )
    return found


def select_by_suffix(names: Iterable[str], target: str) -> list[str]:
    """The names that are `target`, end in ".target" or match it as a glob; ValueError if there are none."""
    names = list(names)
    found = [n for n in names if n == target or n.endswith(f".{target}") or fnmatch.fnmatchcase(n, target)]
    if not found:
        near = difflib.get_close_matches(target, {*names, *(n.rpartition(".")[2] for n in names)}, 3, 0)
        raise ValueError(f"there is no {target!r}; there are: {', '.join(near) or 'none'}, ...")
    return found
