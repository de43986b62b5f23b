"""Adapters in files: one adapter and nothing else of its model."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import nn

from ghor.adapters.adapted import adapted_layers
from ghor.adapters.attach import install
from ghor.adapters.kinds import KINDS, AdapterLayer


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


def parts_of(model: nn.Module, name: str) -> dict[str, AdapterLayer]:
    """One adapter of a model, by the names of its layers; ValueError if there is none, or several kinds."""
    parts: Any = {n: m.parts[name] for n, m in adapted_layers(model).items() if name in m.parts}
    if not parts:
        raise ValueError(f"the model has no adapter {name!r}")
    kinds = {part.adapter: n for n, part in parts.items()}
    if len(kinds) > 1:
        (a, n), (b, m) = list(kinds.items())[:2]
        raise ValueError(
            f"the adapter {name!r} is {a} on {n} and {b} on {m}, and a file has one kind; give them two names"
        )
    return parts


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
