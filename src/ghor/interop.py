"""Convert weights of other libraries to declared ones, at their present values.

Those libraries are not imported: whoever has a model with their weights has imported them already.
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
        parametrize.remove_parametrizations(module, leaf)
        p = getattr(module, leaf)
        p.data = p.data.contiguous()  # parametrizations compute wide matrices as transposes
        constrain(module, leaf, space)
    return model


def _check(module: nn.Module, leaf: str, p: Tensor, space: Space, name: str) -> None:
    """Raise the errors of `constrain` before anything is changed."""
    if not isinstance(space, Euclidean):
        nearest(p, space_for([(module, leaf)], p, space, name)[0], name)


def _parametrized(f: nn.Module, name: str) -> Space | None:
    """The space of a parametrization's values, or None if it is left alone."""
    if isinstance(f, _Orthogonal):
        return Stiefel()
    if not type(f).__module__.startswith("geotorch."):
        return None
    kind, radius = type(f).__name__, getattr(f, "radius", 1)
    if kind not in GEOTORCH or radius != 1:
        what = kind if radius == 1 else f"{kind} of radius {radius}"
        raise ValueError(f"{name} is parametrized by geotorch's {what}, which has no equivalent here")
    return GEOTORCH[kind]
