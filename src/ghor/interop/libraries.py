"""Weights of geoopt, of geotorch and of torch's parametrizations become declared ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _Orthogonal

from ghor._torch.parametrized import remove_parametrizations
from ghor._torch.warn import Warnings
from ghor.constraints.declare import constrain, move_of
from ghor.constraints.selection import Selected
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
        (module, leaf, p, Product(_factors(p, name := f"{path}.{leaf}".lstrip("."))), name)
        for path, module in model.named_modules()
        for leaf, p in module._parameters.items()
        if hasattr(p, "manifold")
    ]
    for module, leaf, p, product, name in found:
        X = _plain(p)
        points = (X,) if product.trivial else product.right_inverse(X)
        for factor, point in zip(product.factors, points, strict=True):
            _check(module, leaf, point, factor.space, name)
    new: dict[int, list[nn.Parameter]] = {}  # by the id of the old one, so that tied weights stay tied
    for module, leaf, p, product, _ in found:
        module._parameters[leaf] = nn.Parameter(_plain(p), p.requires_grad)
        owner, leaves = module, [leaf]
        if not product.trivial:
            parametrize.register_parametrization(module, leaf, product)
            owner = module.parametrizations[leaf]
            leaves = [f"original{i}" for i in range(len(product.factors))]
        twins = new.setdefault(id(p), [owner._parameters[own] for own in leaves])
        for own, twin, factor in zip(leaves, twins, product.factors, strict=True):
            owner._parameters[own] = twin
            if not isinstance(factor.space, Euclidean):
                constrain(owner, own, factor.space)
    return model


class Factor(NamedTuple):
    """A factor of a product: its space, the shape of its points in geoopt, and whether they are in a ball."""

    space: Space
    shape: Sequence[int]
    ball: bool


class Product(nn.Module):
    """A parametrization: the tensor as geoopt has it, computed from a point of each factor."""

    def __init__(self, factors: Sequence[Factor]) -> None:
        super().__init__()
        self.factors = list(factors)

    @property
    def trivial(self) -> bool:
        """Whether a point is the tensor itself, as geoopt has it."""
        return len(self.factors) == 1 and not self.factors[0].ball

    def forward(self, *points: Tensor) -> Tensor:
        """Join points along the last dimension, hyperbolic ones as points of the ball."""
        joined = []
        for (_, shape, ball), Y in zip(self.factors, points, strict=True):
            u = Hyperbolic().to_ball(Y) if ball else Y
            joined.append(u.reshape(*u.shape[: u.dim() - len(shape)], -1))
        return torch.cat(joined, -1)

    def right_inverse(self, X: Tensor) -> tuple[Tensor, ...]:
        """Split X into points of the factors."""
        pieces = X.split([math.prod(factor.shape) for factor in self.factors], -1)
        shaped = [u.unflatten(-1, factor.shape) for factor, u in zip(self.factors, pieces, strict=True)]
        return tuple(
            Hyperbolic().from_ball(u) if factor.ball else u.clone()
            for factor, u in zip(self.factors, shaped, strict=True)
        )


def _plain(p: Tensor) -> Tensor:
    """A ManifoldParameter as an ordinary tensor."""
    return p.detach().as_subclass(Tensor)


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
