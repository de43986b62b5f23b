"""Base class of the spaces whose frames are cheap: their geometry on points goes through a frame Lambda.

A space of this family defines the lines of Algorithm 3 and two maps between g^hor and T_Y:

    push(Lambda, W) -> Delta              the derivative of Lambda R(t W) E at t = 0
    global_rep(Lambda, X) -> W            its inverse on T_Y; other X are projected to T_Y first

The rest follows: exp(Y, Delta) = Lambda exp(W) E, and transport keeps coordinates. No result depends on which
frame above Y is taken.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from ghor._torch.values import may_read
from ghor.linalg import everywhere, eye_like
from ghor.retraction import Retraction, by_name
from ghor.spaces.base import Space, compute


class Framed(Space):
    """Base class of `Hyperbolic`, `SPD`, `SpecialEuclidean` and `PositionsOrientations`."""

    compact: ClassVar[bool] = False

    scale: ClassVar[float] = 1.0  # the metric is `scale` times the inner product of g^hor
    sides: ClassVar[int] = 2  # `dims`: 1 for vectors, 2 for matrices
    holds: ClassVar[str]  # a description of the points, for errors

    @property
    def dims(self) -> int:
        return self.sides

    def refuse_shape(self, shape: Sequence[int], good: bool) -> None:
        """Raise ValueError unless the shape is `good` and its points are not empty; a batch may be empty."""
        if not good or 0 in shape[-self.dims :]:
            raise ValueError(f"{self} holds {self.holds}, got shape {tuple(shape)}")

    def check_project(self, X: Tensor, good: bool = True) -> None:
        """Raise for tensors that have no nearest point."""
        self.check_shape(X.shape)
        self.check_dtype(X.dtype)
        if not everywhere(torch.isfinite(X)):
            raise ValueError(f"a tensor with NaN or infinite entries has no nearest point on {self}")
        if not good:
            raise ValueError(
                f"a tensor that is 0, degenerate or indefinite has no nearest point on {self}; initialise it "
                f"first, for example with {self}.random{tuple(X.shape)}"
            )

    def checked_section(self, Lambda: Tensor, E: Tensor) -> Tensor:
        """Lambda, if the point below it is on the space up to rounding, be it in a much coarser dtype."""
        Y = self.apply_section(Lambda, E)
        fits = Y.shape[Y.dim() - E.dim() :] == E.shape
        coarse = 1e-3 / torch.finfo(Y.dtype).eps  # the tolerance grows with the point, as rounding does
        if not fits or not bool((self.residual(Y) <= self.tolerance(Y) * coarse).all()):
            raise ValueError(
                f"the point below a loaded section of shape {tuple(Lambda.shape)} is not on {self}; load "
                "another state, or delete the key 'section' from it: it is then built from the weight"
            )
        return Lambda

    def warn_of_digits(self, held: Tensor, where: str, Y: Tensor) -> None:
        """Warn that points are held where the digits of Y's dtype end, if values may be read."""
        if readable(held) and bool(held.any()):
            way_out = "lower the learning rate" if Y.dtype == torch.float64 else "use float64"
            warnings.warn(
                f"a weight on {self} has come {where}, where {Y.dtype} has no digits left, and is held "
                f"there; {way_out}, or keep it nearer to E by weight decay or a penalty",
                stacklevel=2,
            )

    def project_part(self, part: Space, X: Tensor, of: Tensor) -> Tensor:
        """`part.project(X)` for the part X of a weight `of`; errors name this space, not `part`."""
        self.check_project(of)
        try:
            return part.project(X) if X.numel() else X.clone()
        except ValueError:
            self.check_project(of, False)
            raise

    def random(
        self,
        *shape: int,
        generator: Generator | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> Tensor:
        """A random point, `from_normal` of a standard normal tensor."""
        self.check_shape(shape)
        self.check_dtype(dtype or torch.get_default_dtype())
        X = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        return self.from_normal(compute(X)).to(X.dtype).contiguous()

    def from_normal(self, X: Tensor) -> Tensor:
        """The point made from a normal X: by default its projection (uniform rotations, normal positions)."""
        return self.project(X)

    def frame(self, Y: Tensor) -> Tensor:
        """The cheapest Lambda above Y, for `push` and `global_rep`."""
        return self.section(Y)

    def section_near(self, Lambda: Tensor, Y: Tensor) -> Tensor:
        """Lambda moved along the geodesic to Y, where that is short; its point is Y up to rounding."""
        try:
            W = self.global_rep(Lambda, self.log(self.apply_section(Lambda, Y), Y))
        except ValueError:  # some are so far away that there are several geodesics
            return self.section(Y)
        moved = self.update_section(Lambda, W, "geodesic")
        near = (self.step_length(W) <= 0.5).view(-1, *[1] * (Lambda.dim() - 1))
        return torch.where(near, moved, self.section(Y))

    @abstractmethod
    def pullback(self, Lambda: Tensor, G: Tensor) -> Tensor:
        """`global_grad` without `out`."""

    @abstractmethod
    def moved(self, Lambda: Tensor, W: Tensor, R: Retraction) -> Tensor:
        """`update_section` without `out`."""

    def global_grad(self, Lambda: Tensor, G: Tensor, out: Tensor | None = None) -> Tensor:
        B = self.pullback(Lambda, G)
        return B if out is None else out.copy_(B)

    def update_section(
        self, Lambda: Tensor, W: Tensor, retraction: str | Retraction = "cayley", out: Tensor | None = None
    ) -> Tensor:
        moved = self.moved(Lambda, W, by_name(retraction))
        return moved if out is None else out.copy_(moved)

    @abstractmethod
    def push(self, Lambda: Tensor, W: Tensor) -> Tensor:
        """Delta = d/dt Lambda R(t W) E at t = 0: g^hor -> T_Y."""

    @abstractmethod
    def global_rep(self, Lambda: Tensor, Delta: Tensor) -> Tensor:
        """The inverse of `push`: T_Y -> g^hor."""

    def metric(self, Y: Tensor, U: Tensor, V: Tensor) -> Tensor:
        """<W_U, W_V> in g^hor, times `scale`."""
        Lambda = self.frame(Y)
        return self.scale * self.ghor_inner(self.global_rep(Lambda, U), self.global_rep(Lambda, V))

    def rgrad(self, Y: Tensor, G: Tensor) -> Tensor:
        """The gradient in the metric of the space."""
        Lambda = self.frame(Y)
        return self.push(Lambda, self.global_grad(Lambda, G) / self.scale)

    def tangent(self, Y: Tensor, X: Tensor) -> Tensor:
        """The projection of X to T_Y."""
        Lambda = self.frame(Y)
        return self.push(Lambda, self.global_rep(Lambda, X))

    def retract(self, Y: Tensor, Delta: Tensor, retraction: str | Retraction = "cayley") -> Tensor:
        """Lambda R(W) E."""
        Lambda = self.frame(Y)
        return self.apply_section(self.update_section(Lambda, self.global_rep(Lambda, Delta), retraction), Y)

    def transport(self, Y: Tensor, Delta: Tensor, V: Tensor) -> Tensor:
        """Transport V along the geodesic of Delta: its coordinates in the moving frame stay the same."""
        Lambda = self.frame(Y)
        moved = self.update_section(Lambda, self.global_rep(Lambda, Delta), "geodesic")
        return self.push(moved, self.global_rep(Lambda, V))


def readable(X: Tensor) -> bool:
    """Whether a value of X can be read for free, and without breaking a compiled graph."""
    return not torch.compiler.is_compiling() and may_read(X)


def orthonormalised(X: Tensor, share: Tensor | float = 1.0) -> Tensor:
    """One Newton-Schulz step X + share X (I - X^T X)/2 of square X in place; `share` is a number or (...)."""
    share = share[..., None, None] if isinstance(share, Tensor) else share
    return X.add_(X @ ((eye_like(X) - X.mT @ X) * (share / 2)))
