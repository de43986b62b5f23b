"""Names that have moved from this package to `ghor_lab`, found under their old ones."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def moved(package: str, names: dict[str, str], modules: list[str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that looks names up in ghor_lab, whose modules `names` gives.

    `modules` are the former modules of the package: pickles of version 0.1.0 look for the names there.
    """
    sys.modules.update((f"{package}.{module}", sys.modules[package]) for module in modules)

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"{package} has no {name}")
        try:
            return getattr(importlib.import_module(f"ghor_lab.{names[name]}"), name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("ghor_lab"):  # something that the lab itself needs
                raise
            raise ModuleNotFoundError(
                f"{package}.{name} has moved to ghor_lab, which is not installed: it comes with "
                "`pip install '.[lab]'` in a clone of ghor",
                name=error.name,
            ) from None

    return find
