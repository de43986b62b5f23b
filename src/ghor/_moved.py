"""Names of version 0.1.0 that have moved to ghor_lab since: imports and pickles still find them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def moved_to_lab(
    package: str, moved: Mapping[str, str], former_modules: Iterable[str]
) -> Callable[[str], Any]:
    """The `__getattr__` of a package, {name: module of ghor_lab}, under whose `former_modules` pickles look.

    These are entered in `sys.modules` as the package itself, so that its `__getattr__` finds their classes.
    """
    for module in former_modules:
        sys.modules[f"{package}.{module}"] = sys.modules[package]

    def __getattr__(name: str) -> Any:
        if name not in moved:
            raise AttributeError(f"{package} has no {name}")
        try:
            return getattr(importlib.import_module(f"ghor_lab.{moved[name]}"), name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("ghor_lab"):  # something that the lab itself needs
                raise
            raise ModuleNotFoundError(
                f"{package}.{name} has moved to ghor_lab, which is not installed: install it from the source "
                "of ghor, whose folder src has both",
                name=error.name,
            ) from None

    return __getattr__
