"""From other libraries: their weights as declared ones, at their present values.

Nothing is imported here: whose weights are in the model, that library is there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _Orthogonal

from ghor.constraints.declare import constrain, nearest
from ghor.constraints.packed import space_for
from ghor.spaces import SPD, Euclidean, Grassmann, Hyperbolic, Space, SpecialOrthogonal, Sphere, Stiefel

# The same points, whatever the metric and the retraction that a class adds to them.
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
    """Every `geoopt.ManifoldParameter` of a model, in place, as a plain parameter that is declared on its
    space.

    A PoincareBall weight u becomes the point Y of `Hyperbolic()` with u = to_ball(Y), a ProductManifold one a
    point of each part: these are parameters of their own (`parametrizations.<name>.original0`, ...), of which
    `module.<name>` is computed as before, by a parametrization. Curvatures other than 1 and manifolds without
    an equivalent raise ValueError, and nothing is changed. Make the optimizer afterwards: the parameters are
    new.

    >>> opt = ghor.optim.Adam(from_geoopt(model), lr=1e-3)
    """
    found = [
        (module, leaf, p, _parts(p, name := f"{path}.{leaf}".lstrip(".")), name)
        for path, module in model.named_modules()
        for leaf, p in module._parameters.items()
        if hasattr(p, "manifold")
    ]
    for module, leaf, p, parts, name in found:
        X = p.detach().as_subclass(Tensor)
        values = Joined(parts).right_inverse(X) if len(parts) > 1 or parts[0].ball else (X,)
        for part, value in zip(parts, values, strict=True):
            _check(module, leaf, value, part.space, name)
    new: dict[int, list[nn.Parameter]] = {}  # of a tied weight there is one
    for module, leaf, p, parts, _ in found:
        setattr(module, leaf, nn.Parameter(p.detach().as_subclass(Tensor), p.requires_grad))
        owner, leaves = module, [leaf]
        if len(parts) > 1 or parts[0].ball:
            parametrize.register_parametrization(module, leaf, Joined(parts))
            owner = module.parametrizations[leaf]
            leaves = [f"original{i}" for i in range(len(parts))]
        for own, twin in zip(
            leaves, new.setdefault(id(p), [getattr(owner, own) for own in leaves]), strict=True
        ):
            setattr(owner, own, twin)
        for own, part in zip(leaves, parts, strict=True):
            if not isinstance(part.space, Euclidean):
                constrain(owner, own, part.space)
    return model


class Part:
    """A factor of a product: its space, the shape that its points had, and whether they were points of the
    ball."""

    def __init__(self, space: Space, shape: Sequence[int], ball: bool) -> None:
        self.space, self.shape, self.ball = space, tuple(shape), ball


class Joined(nn.Module):
    """The tensor that geoopt had, as a function of the points of its parts."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = list(parts)

    def forward(self, *points: Tensor) -> Tensor:
        """Points, those of balls as such, side by side along the last dimension."""
        old = (
            Hyperbolic().to_ball(Y) if part.ball else Y for part, Y in zip(self.parts, points, strict=True)
        )
        return torch.cat(
            [
                u.reshape(*u.shape[: u.dim() - len(part.shape)], -1)
                for part, u in zip(self.parts, old, strict=True)
            ],
            -1,
        )

    def right_inverse(self, X: Tensor) -> tuple[Tensor, ...]:
        """The parts of X."""
        pieces = X.split([math.prod(part.shape) for part in self.parts], -1)
        shaped = [u.unflatten(-1, part.shape) for part, u in zip(self.parts, pieces, strict=True)]
        return tuple(
            Hyperbolic().from_ball(u) if part.ball else u.clone()
            for part, u in zip(self.parts, shaped, strict=True)
        )


def _parts(p: Any, name: str) -> list[Part]:
    """The factors of a ManifoldParameter, one where its manifold is no product."""
    if type(p.manifold).__name__ == "ProductManifold":
        return [
            Part(_space(m, f"part {i} of {name}"), shape, hasattr(m, "c"))
            for i, (m, shape) in enumerate(zip(p.manifold.manifolds, p.manifold.shapes, strict=True))
        ]
    return [Part(_space(p.manifold, name), p.shape[-1:], hasattr(p.manifold, "c"))]


def _space(manifold: Any, name: str) -> Space:
    """The space of the points of a geoopt manifold."""
    kind = type(manifold).__name__
    if kind not in GEOOPT:
        raise ValueError(f"{name} is on geoopt's {kind}, which has no equivalent here")
    if getattr(manifold, "projector", None) is not None:
        raise ValueError(f"{name} is on the sphere of a subspace, which has no equivalent here")
    k = getattr(manifold, "k", None)
    if k is not None and (k.requires_grad or not bool((k.abs() - 1).abs().max() <= 1e-5)):
        raise ValueError(
            f"{name} is on geoopt's {kind} of curvature {-abs(float(k)):.4g}{', learnable' * k.requires_grad}; "
            "Hyperbolic() has curvature -1: rescale the weight and the distances first"
        )
    return GEOOPT[kind]


def from_parametrized(model: Model) -> Model:
    """Weights under `torch.nn.utils.parametrizations.orthogonal` or geotorch's, in place, as plain declared
    ones.

    They keep their present values. geotorch's manifolds without an equivalent raise ValueError, and nothing
    is changed; other parametrizations stay. Make the optimizer afterwards.

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
        parametrize.remove_parametrizations(module, leaf)
        p = getattr(module, leaf)
        p.data = p.data.contiguous()  # wide ones are transposed
        constrain(module, leaf, space)
    return model


def _check(module: nn.Module, leaf: str, p: Tensor, space: Space, name: str) -> None:
    """Raise what `constrain` would raise, before anything is changed."""
    if not isinstance(space, Euclidean):
        nearest(p, space_for([(module, leaf)], p, space, name)[0], name)


def _parametrized(f: nn.Module, name: str) -> Space | None:
    """The space of the values of a parametrization, None of one that is left alone."""
    if isinstance(f, _Orthogonal):
        return Stiefel()
    if not type(f).__module__.startswith("geotorch."):
        return None
    kind, radius = type(f).__name__, getattr(f, "radius", 1)
    if kind not in GEOTORCH or radius != 1:
        what = kind if radius == 1 else f"{kind} of radius {radius}"
        raise ValueError(f"{name} is parametrized by geotorch's {what}, which has no equivalent here")
    return GEOTORCH[kind]
