"""Adapters in files of peft, read and written."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ghor._torch.precision import wide
from ghor._torch.warn import Warnings
from ghor.adapters.adapted import is_conv1d, matrix_of
from ghor.adapters.attach import install
from ghor.adapters.files import parts_of, write_file
from ghor.adapters.kinds import LowRank, Rotation
from ghor.linalg import eye, inverse
from ghor.spaces import SpecialOrthogonal

PREFIX, VERSION = "base_model.model.", "0.21.2"  # of peft's names; the version whose formulas these are
MOST_TERMS = 64  # of a Neumann series that we write

Found = Mapping[str, Mapping[str, Tensor]]  # tensors of a file, by layer and name there


def load_peft(model: nn.Module, folder: Any, name: str = "default", freeze: bool = True) -> list[str]:
    """Put an adapter that peft has saved in `folder` on a model; returns the names of its layers.

    OFT becomes `Rotation`. A block is stored as a skew matrix Q; peft multiplies the input, as a row, with

        use_cayley_neumann=False    P = (I - Q)(I + Q)^-1
        use_cayley_neumann=True     P = I + 2 Q + 2 Q^2 + ... + Q^k,  the first terms of (I + Q)(I - Q)^-1

    The second is the inverse of the first, and not a rotation: the nearest rotation is taken, with a warning
    that says how far off P is. R = P^T, exact up to rounding for the first. LoRA becomes `LowRank`: s are
    the singular values of scaling B A. Other tensors of the file (biases, a new head) are copied to the
    parameters and buffers of these names. What has no equivalent raises ValueError, and nothing is changed.
    """
    config, tensors = _read_peft(Path(folder))
    kind = config.get("peft_type")
    if kind not in ("OFT", "LORA"):
        raise ValueError(f"{folder} has an adapter of type {kind}; OFT and LORA have equivalents here")
    ends = ("oft_R",) if kind == "OFT" else ("lora_A", "lora_B")
    found: dict[str, dict[str, Tensor]] = {}
    for n in [n for n in tensors if n.endswith(tuple(f".{end}.weight" for end in ends))]:
        layer, end, _ = n.rsplit(".", 2)
        found.setdefault(layer, {})[end] = tensors.pop(n)
    if not found or any(len(of_layer) < len(ends) for of_layer in found.values()):
        raise ValueError(f"{folder} does not have {' and '.join(ends)} for every layer")
    places: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    places |= dict(model.named_buffers(remove_duplicate=False))
    for n, t in tensors.items():
        if n not in places or places[n].shape != t.shape:
            raise ValueError(f"{folder} has {n} of shape {tuple(t.shape)}, which has no place in this model")
    convert, warn = _from_oft if kind == "OFT" else _from_lora, Warnings()
    adapter, factors = convert(config, found, dict(model.named_modules()), warn)
    install(model, adapter, factors, name, freeze)
    with torch.no_grad():
        for n, t in tensors.items():
            places[n].copy_(t)
    warn.flush()
    return list(found)


def _from_oft(
    config: Mapping[str, Any], found: Found, modules: Mapping[str, Any], warn: Warnings
) -> tuple[Rotation, dict[str, Tensor]]:
    _refuse(config, "coft")
    neumann, version = config.get("use_cayley_neumann"), str(config.get("peft_version", "0.0"))
    if neumann and tuple(map(int, version.split(".")[:2])) < (0, 18):
        raise ValueError("peft before 0.18 had another Neumann series; train this adapter again")
    factors, worst = {}, (0.0, "")
    for n, entries in ((n, wide(of_layer["oft_R"])) for n, of_layer in found.items()):
        b = math.isqrt(2 * entries.shape[1]) + 1
        if entries.dim() != 2 or b * (b - 1) != 2 * entries.shape[1]:
            raise ValueError(
                f"{n}: {tuple(entries.shape)} are no skew matrices; peft before 0.14 wrote others"
            )
        Q = entries.new_zeros(len(entries), b, b)
        Q[:, *torch.triu_indices(b, b, 1)] = entries
        Q, I = Q - Q.mT, eye(Q)
        P = _neumann(Q, int(config["num_cayley_neumann_terms"])) if neumann else (I - Q) @ inverse(I + Q)
        worst = max(worst, (float(torch.linalg.matrix_norm(P.mT @ P - I).max()), n))
        R = SpecialOrthogonal().project(P.mT)
        if config.get("block_share") and n in modules:
            R = R.repeat(matrix_of(modules[n]).shape[1] // b, 1, 1)
        factors[f"{n}.R"] = R
    if worst[0] > 1e-5:
        warn(
            "neumann",
            f"{worst[1]} was trained with use_cayley_neumann=True, and multiplies with matrices that are "
            f"{worst[0]:.1e} off rotations: the nearest rotations are taken, and the model's outputs change",
        )
    blocks = sorted({R.shape[-1] for R in factors.values()})
    if len(blocks) > 1:
        raise ValueError(f"the layers have blocks of several sizes, {blocks}; an adapter here has one")
    return Rotation(blocks[0]), factors


def _neumann(Q: Tensor, terms: int) -> Tensor:
    """What peft computes with num_cayley_neumann_terms=`terms`: 3 and 4 are the same."""
    P, power, highest = eye(Q).expand_as(Q), Q, max(terms, 4) - 1 if terms > 2 else 1
    P = P + 2 * Q if terms > 1 else P
    for k in range(2, highest + 1):
        power = power @ Q
        P = P + (2 if k < highest else 1) * power
    return P


# Options of LoRA that make another layer, and ways to start that leave the base weight as it is: with others,
# such as PiSSA, peft changes the base weight when it loads the adapter.
LORA_VARIANTS = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "alpha_pattern", "rank_pattern"),
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config"),
    "target_parameters",
)
LORA_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


def _from_lora(
    config: Mapping[str, Any], found: Found, modules: Mapping[str, Any], warn: Warnings
) -> tuple[LowRank, dict[str, Tensor]]:
    _refuse(config, *LORA_VARIANTS)
    if config.get("init_lora_weights") not in LORA_STARTS:
        _refuse(config, "init_lora_weights")
    rank = int(config["r"])
    factors: dict[str, Tensor] = {}
    scaling = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    for n, of_layer in found.items():
        for end, X in of_layer.items():
            if X.dim() != 2:
                raise ValueError(f"{n}: {end} of shape {tuple(X.shape)} is not that of a linear layer")
        # Householder's Q is orthonormal even if B and A do not have full rank.
        (QB, RB), (QA, RA) = (
            torch.linalg.qr(X) for X in (wide(of_layer["lora_B"]), wide(of_layer["lora_A"]).mT)
        )
        U, s, Vh = torch.linalg.svd(scaling * RB @ RA.mT)
        k = len(s)  # the rank, or a shorter side of the layer
        factors |= {f"{n}.U": QB @ U[:, :k], f"{n}.V": QA @ Vh[:k].mT, f"{n}.s": s}
    return LowRank(rank), factors


def _refuse(config: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        if config.get(key):
            raise ValueError(f"an adapter with {key}={config[key]!r} has no equivalent here")


def save_peft(model: nn.Module, folder: Any, name: str = "default", neumann: bool = False) -> None:
    """Write an adapter as peft does, for `PeftModel.from_pretrained`: `Rotation` as OFT, `LowRank` as LoRA.

    For rotations of the input alone. They are written for peft's exact mode, as Q = (R - I)(R + I)^-1, so no
    block may turn by pi. With `neumann=True` they are written for its default mode, with as many terms of the
    series as float32 needs; that takes more than 64 for turns by about 80 degrees, which raises ValueError.
    """
    parts: dict[str, Any] = dict(parts_of(model, name))
    if isinstance(next(iter(parts.values())).adapter, LowRank):
        config, tensors = _to_lora(parts)
    else:
        config, tensors = _to_oft(parts, model, neumann)
    # peft takes a list for the ends of names, and a string for an expression that matches whole names.
    others = [n for n, _ in model.named_modules() if n not in parts]
    exact = any(other.endswith(f".{n}") for other in others for n in parts)
    targets = "|".join(map(re.escape, parts)) if exact else list(parts)
    config |= {"peft_version": VERSION, "target_modules": targets, "inference_mode": True}
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_file(Path(folder) / "adapter_config.json", json.dumps(config, indent=2, sort_keys=True).encode())
    named = {f"{PREFIX}{n}.weight": t.detach().cpu().contiguous() for n, t in tensors.items()}
    content = _safetensors().save(named, metadata={"format": "pt"})
    write_file(Path(folder) / "adapter_model.safetensors", content)


def _to_lora(parts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """B A = U diag(s) V^T, with zeros beyond the rank that a small layer has."""
    tensors, rank = {}, max(part.V.shape[-1] for part in parts.values())
    for n, part in parts.items():
        A, B, more = part.scaled(part.V).mT, part.U, rank - part.V.shape[-1]
        tensors[f"{n}.lora_A"] = nn.functional.pad(A, (0, 0, 0, more))
        tensors[f"{n}.lora_B"] = nn.functional.pad(B, (0, more))
    return {"peft_type": "LORA", "r": rank, "lora_alpha": rank}, tensors


def _to_oft(
    parts: Mapping[str, Any], model: nn.Module, neumann: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The skew matrices Q of R^T = (I - Q)(I + Q)^-1, or of a series that is R^T to the digits of float32."""
    tensors, terms = {}, 5
    for n, part in parts.items():
        if part.left is not None:
            raise ValueError(f"{n} has a rotation of its outputs; peft's OFT turns inputs alone")
        if is_conv1d(model.get_submodule(n).base):  # type: ignore[arg-type]
            raise ValueError(f"{n} is a Conv1D, which peft's OFT does not take; LowRank can be written")
        R = SpecialOrthogonal().project(wide(part.right.detach()))
        I, b = eye(R), R.shape[-1]
        nearest_to_pi = float(torch.linalg.svdvals(R + I).min())  # 2 cos(angle/2) of the largest angle
        if not nearest_to_pi > 1e-3:
            raise ValueError(f"{n} has a block that turns by pi, which has no Cayley transform")
        Q = (R - I) @ inverse(R + I)
        if neumann:
            Q = -Q
            while float(torch.linalg.matrix_norm(_neumann(Q, terms) - R.mT).max()) > 1e-6:
                terms += 1
                if terms > MOST_TERMS:
                    angle = math.degrees(2 * math.acos(nearest_to_pi / 2))
                    raise ValueError(
                        f"{n} has a block that turns by {angle:.0f} degrees, for which the Neumann series "
                        f"takes more than {MOST_TERMS} terms; leave neumann out, and peft computes exactly"
                    )
        tensors[f"{n}.oft_R"] = Q[:, *torch.triu_indices(b, b, 1)].to(part.right.dtype)
    config = {"peft_type": "OFT", "oft_block_size": b, "r": 0, "use_cayley_neumann": neumann}
    return config | {"num_cayley_neumann_terms": terms}, tensors


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(
            "files of peft are read and written by safetensors: pip install 'safetensors[numpy]'"
        ) from error


def _read_peft(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    file = folder / "adapter_config.json"
    try:
        config = json.loads(file.read_text())
        file = folder / "adapter_model.safetensors"
        if file.exists():
            tensors = _safetensors().load(file.read_bytes())
        else:
            file = folder / "adapter_model.bin"
            tensors = torch.load(file, weights_only=True, map_location="cpu")
    except (OSError, ImportError):
        raise
    except Exception as error:  # of JSON, of safetensors, of pickles
        raise ValueError(f"{file} is damaged: {error}; copy it again") from error
    for n, t in tensors.items():
        if not bool(torch.isfinite(t.float()).all()):
            raise ValueError(
                f"{file} has NaN or infinite entries in {n}; the training that wrote it diverged"
            )
    return config, {n.removeprefix(PREFIX).replace(".base_layer.", "."): t for n, t in tensors.items()}
