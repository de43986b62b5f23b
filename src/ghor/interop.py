"""Convert weights of other libraries to declared ones, at their present values; read and write peft's files.

Those libraries are not imported: whoever has a model with their weights has imported them already.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _Orthogonal

from ghor._torch.parametrized import remove_parametrizations
from ghor._torch.precision import wide
from ghor._torch.warn import Warnings
from ghor.adapters.adapted import is_conv1d, matrix_of
from ghor.adapters.attach import install
from ghor.adapters.files import parts_of, write_file
from ghor.adapters.kinds import LowRank, LowRankLayer, Rotation, RotationLayer
from ghor.constraints.declare import constrain, move_of
from ghor.constraints.selection import Selected
from ghor.linalg import eye, inverse
from ghor.spaces import SPD, Euclidean, Grassmann, Hyperbolic, Space, SpecialOrthogonal, Sphere, Stiefel

# Manifolds with the same points; metrics and retractions may differ.
GEOOPT: dict[str, Space] = {
    "CanonicalStiefel": Stiefel(),
    "Euclidean": Euclidean(),
    "EuclideanStiefel": Stiefel(),
    "EuclideanStiefelExact": Stiefel(),
    "Lorentz": Hyperbolic(),
    "PoincareBall": Hyperbolic(),
    "PoincareBallExact": Hyperbolic(),
    "Sphere": Sphere(),
    "SphereExact": Sphere(),
    "SymmetricPositiveDefinite": SPD(),
}
GEOTORCH: dict[str, Space] = {
    "Grassmannian": Grassmann(),
    "PSD": SPD(),
    "SO": SpecialOrthogonal(),
    "Sphere": Sphere(),
    "SphereEmbedded": Sphere(),
    "Stiefel": Stiefel(),
}

Model = TypeVar("Model", bound=nn.Module)


def from_geoopt(model: Model) -> Model:
    """Replace every `geoopt.ManifoldParameter` of a model, in place, by a plain one declared on its space.

    A weight u on PoincareBall becomes the point Y of `Hyperbolic()` with u = to_ball(Y); a weight on
    ProductManifold becomes one point for each factor. These points are parameters of their own
    (`parametrizations.<name>.original0`, ...), from which a parametrization computes `module.<name>` as
    before. Curvatures other than -1 and manifolds without an equivalent raise ValueError, and nothing is
    changed. Build the optimizer afterwards: the parameters are new.

    >>> opt = ghor.optim.Adam(from_geoopt(model), lr=1e-3)
    """
    found = [
        (module, leaf, p, _factors(p, name := f"{path}.{leaf}".lstrip(".")), name)
        for path, module in model.named_modules()
        for leaf, p in module._parameters.items()
        if hasattr(p, "manifold")
    ]
    for module, leaf, p, factors, name in found:
        X = p.detach().as_subclass(Tensor)
        values = Product(factors).right_inverse(X) if len(factors) > 1 or factors[0].ball else (X,)
        for factor, value in zip(factors, values, strict=True):
            _check(module, leaf, value, factor.space, name)
    new: dict[int, list[nn.Parameter]] = {}  # by the id of the old one, so that tied weights stay tied
    for module, leaf, p, factors, _ in found:
        setattr(module, leaf, nn.Parameter(p.detach().as_subclass(Tensor), p.requires_grad))
        owner, leaves = module, [leaf]
        if len(factors) > 1 or factors[0].ball:
            parametrize.register_parametrization(module, leaf, Product(factors))
            owner = module.parametrizations[leaf]
            leaves = [f"original{i}" for i in range(len(factors))]
        for own, twin in zip(
            leaves, new.setdefault(id(p), [getattr(owner, own) for own in leaves]), strict=True
        ):
            setattr(owner, own, twin)
        for own, factor in zip(leaves, factors, strict=True):
            if not isinstance(factor.space, Euclidean):
                constrain(owner, own, factor.space)
    return model


class Factor:
    """A factor of a product: its space, the shape of its points in geoopt, and whether they are in a ball."""

    def __init__(self, space: Space, shape: Sequence[int], ball: bool) -> None:
        self.space, self.shape, self.ball = space, tuple(shape), ball


class Product(nn.Module):
    """A parametrization: the tensor as geoopt has it, computed from a point of each factor."""

    def __init__(self, factors: Sequence[Factor]) -> None:
        super().__init__()
        self.factors = list(factors)

    def forward(self, *points: Tensor) -> Tensor:
        """Join points along the last dimension, hyperbolic ones as points of the ball."""
        old = (
            Hyperbolic().to_ball(Y) if factor.ball else Y
            for factor, Y in zip(self.factors, points, strict=True)
        )
        return torch.cat(
            [
                u.reshape(*u.shape[: u.dim() - len(factor.shape)], -1)
                for factor, u in zip(self.factors, old, strict=True)
            ],
            -1,
        )

    def right_inverse(self, X: Tensor) -> tuple[Tensor, ...]:
        """Split X into points of the factors."""
        pieces = X.split([math.prod(factor.shape) for factor in self.factors], -1)
        shaped = [u.unflatten(-1, factor.shape) for factor, u in zip(self.factors, pieces, strict=True)]
        return tuple(
            Hyperbolic().from_ball(u) if factor.ball else u.clone()
            for factor, u in zip(self.factors, shaped, strict=True)
        )


def _factors(p: Any, name: str) -> list[Factor]:
    """The factors of the manifold of a ManifoldParameter; one unless it is a product."""
    if type(p.manifold).__name__ == "ProductManifold":
        return [
            Factor(_space(m, f"factor {i} of {name}"), shape, hasattr(m, "c"))
            for i, (m, shape) in enumerate(zip(p.manifold.manifolds, p.manifold.shapes, strict=True))
        ]
    return [Factor(_space(p.manifold, name), p.shape[-1:], hasattr(p.manifold, "c"))]


def _space(manifold: Any, name: str) -> Space:
    """The space with the same points as a geoopt manifold."""
    kind = type(manifold).__name__
    if kind not in GEOOPT:
        raise ValueError(f"{name} is on geoopt's {kind}, which has no equivalent here")
    if getattr(manifold, "projector", None) is not None:
        raise ValueError(f"{name} is on the sphere of a subspace, which has no equivalent here")
    k = getattr(manifold, "k", None)
    if k is not None and (k.requires_grad or not bool((k.abs() - 1).abs().max() <= 1e-5)):
        raise ValueError(
            f"{name} is on geoopt's {kind} of curvature {-abs(float(k)):.4g}"
            f"{', learnable' * k.requires_grad}; Hyperbolic() has curvature -1: rescale the weight and the "
            "distances first"
        )
    return GEOOPT[kind]


def from_parametrized(model: Model) -> Model:
    """Replace parametrizations of geotorch and torch's `orthogonal`, in place, by declarations.

    The weights keep their present values. Manifolds of geotorch without an equivalent raise ValueError, and
    nothing is changed; other parametrizations stay. Build the optimizer afterwards.

    >>> layer = torch.nn.utils.parametrizations.orthogonal(nn.Linear(49, 7))
    >>> opt = ghor.optim.Adam(from_parametrized(layer), lr=1e-3)
    """
    found = []
    for path, module in model.named_modules():
        for leaf, chain in module.parametrizations.items() if parametrize.is_parametrized(module) else ():
            name = f"{path}.{leaf}".lstrip(".")
            spaces = [space for f in chain if (space := _parametrized(f, name)) is not None]
            if spaces and len(chain) > 1:
                raise ValueError(
                    f"{name} has {len(chain)} parametrizations, one on top of the other; remove the others"
                )
            for space in spaces:
                _check(module, leaf, getattr(module, leaf).detach(), space, name)
                found.append((module, leaf, space))
    for module, leaf, space in found:
        remove_parametrizations(module, leaf)
        p = getattr(module, leaf)
        p.data = p.data.contiguous()  # parametrizations compute wide matrices as transposes
        constrain(module, leaf, space)
    return model


def _check(module: nn.Module, leaf: str, p: Tensor, space: Space, name: str) -> None:
    """Raise the errors of `constrain` before anything is changed."""
    if not isinstance(space, Euclidean):
        move_of(name, Selected(module, leaf, p, [(module, leaf)]), space, Warnings())


def _parametrized(f: nn.Module, name: str) -> Space | None:
    """The space of a parametrization's values, or None if it is left alone."""
    if isinstance(f, _Orthogonal):
        return Stiefel()
    if not type(f).__module__.startswith("geotorch."):
        return None
    kind = type(f).__name__
    if kind not in GEOTORCH:
        raise ValueError(f"{name} is parametrized by geotorch's {kind}, which has no equivalent here")
    space = GEOTORCH[kind]
    return replace(space, radius=float(f.radius)) if isinstance(space, Sphere) else space  # type: ignore[arg-type]


# -- adapters in peft's files --------------------------------------------------------------------------------

PREFIX, VERSION = "base_model.model.", "0.21.2"  # of peft's names; the version whose formulas these are
MOST_TERMS = 64  # of a Neumann series that we write
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


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
    config: Mapping[str, Any],
    found: Mapping[str, Mapping[str, Tensor]],
    modules: Mapping[str, Any],
    warn: Any,
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
    config: Mapping[str, Any],
    found: Mapping[str, Mapping[str, Tensor]],
    modules: Mapping[str, Any],
    warn: Any,
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
    parts, tensors = parts_of(model, name), {}
    # peft takes a list for the ends of names, and a string for an expression that matches whole names.
    others = [n for n, _ in model.named_modules() if n not in parts]
    exact = any(other.endswith(f".{n}") for other in others for n in parts)
    targets: Any = "|".join(map(re.escape, parts)) if exact else list(parts)
    config: dict[str, Any] = {"peft_version": VERSION, "target_modules": targets, "inference_mode": True}
    terms = 5
    for n, part in parts.items():
        if isinstance(part, LowRankLayer):
            rank = part.V.shape[-1]
            config |= {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
            tensors[f"{n}.lora_A.weight"] = part.scaled(part.V).mT
            tensors[f"{n}.lora_B.weight"] = part.U
            continue
        assert isinstance(part, RotationLayer)
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
        config |= {"peft_type": "OFT", "oft_block_size": b, "r": 0}
        tensors[f"{n}.oft_R.weight"] = Q[:, *torch.triu_indices(b, b, 1)].to(part.right.dtype)
    if config["peft_type"] == "OFT":
        config |= {"use_cayley_neumann": neumann, "num_cayley_neumann_terms": terms}
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_file(Path(folder) / "adapter_config.json", json.dumps(config, indent=2, sort_keys=True).encode())
    _write_safetensors(
        Path(folder) / "adapter_model.safetensors", {PREFIX + n: t for n, t in tensors.items()}
    )


def _read_peft(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    file = folder / "adapter_config.json"
    try:
        config = json.loads(file.read_text())
        file = folder / "adapter_model.safetensors"
        if file.exists():
            tensors = _read_safetensors(file)
        else:
            file = folder / "adapter_model.bin"
            tensors = torch.load(file, weights_only=True, map_location="cpu")
    except (EOFError, KeyError, RuntimeError, TypeError, UnicodeError, ValueError, UnpicklingError) as error:
        if str(file) in str(error):  # it was read, and says what is wrong
            raise
        raise ValueError(f"{file} is damaged: {error}; copy it again") from error
    for n, t in tensors.items():
        if not bool(torch.isfinite(t).all()):
            raise ValueError(
                f"{file} has NaN or infinite entries in {n}; the training that wrote it diverged"
            )
    return config, {n.removeprefix(PREFIX).replace(".base_layer.", "."): t for n, t in tensors.items()}


# A safetensors file: the length of a header in 8 bytes, the header in JSON, the numbers of all tensors.


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    if start > len(data):
        raise ValueError(f"its header has {start - 8} bytes, and the file {len(data)}")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            if start + end > len(data):
                raise ValueError(f"it ends within {name}, after {len(data)} of {start + end} bytes")
            if entry["dtype"] not in DTYPES:
                raise ValueError(
                    f"{file} has {name} in {entry['dtype']}; what can be read here is {', '.join(DTYPES)}: "
                    "save it in one of these"
                )
            dtype = DTYPES[entry["dtype"]]
            numbers = (
                torch.frombuffer(data[start + begin : start + end], dtype=dtype)
                if end > begin
                else torch.empty(0, dtype=dtype)
            )
            tensors[name] = numbers.view(entry["shape"])
    return tensors


def _write_safetensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks, end, names = [], 0, {dtype: name for name, dtype in DTYPES.items()}
    for name, t in tensors.items():
        t = t.detach().cpu().contiguous()
        chunks.append(ctypes.string_at(t.data_ptr(), t.nbytes))
        header[name] = {
            "dtype": names[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [end, end + t.nbytes],
        }
        end += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    write_file(file, b"".join([len(text).to_bytes(8, "little"), text, *chunks]))
