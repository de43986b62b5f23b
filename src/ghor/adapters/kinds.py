"""The kinds of adapters: their options, their parameters for one layer, and what these compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ghor.constraints.declare import constrain
from ghor.spaces import SpecialOrthogonal, Stiefel

SIDES = {"right": "R", "left": "L", "both": "RL"}  # the factors of a rotation, by `sides`


@dataclass(frozen=True)
class Rotation:
    """Orthogonal fine-tuning: y = L W R x + c with block-diagonal L and R, blocks in SO(block).

    `sides` is "right" for R alone, in/block rotations of the inputs; "left" for L alone, out/block rotations
    of the outputs; or "both". All keep the singular values of W.
    """

    block: int = 32
    sides: Literal["right", "left", "both"] = "right"

    def __post_init__(self) -> None:
        if self.sides not in SIDES:
            raise ValueError(f"sides is one of {', '.join(map(repr, SIDES))}, got {self.sides!r}")

    def layer(self, out_features: int, in_features: int, factory: dict[str, Any]) -> AdapterLayer:
        """The parameters for a layer of this size."""
        return RotationLayer(self, out_features, in_features, factory)


@dataclass(frozen=True)
class LowRank:
    """y = W x + U diag(s) V^T x + c with orthonormal U and V: s are the singular values of the added term.

    With `full=True` the middle factor is a full matrix S, rank x rank, as in StelLA. Every U S V^T is also a
    U diag(s) V^T; but turning U and V by rotations can now be done by S alone.
    """

    rank: int = 8
    full: bool = False

    def layer(self, out_features: int, in_features: int, factory: dict[str, Any]) -> AdapterLayer:
        """The parameters for a layer of this size."""
        return LowRankLayer(self, out_features, in_features, factory)


KINDS: dict[str, type[Rotation | LowRank]] = {"Rotation": Rotation, "LowRank": LowRank}


class AdapterLayer(nn.Module):
    """The parameters of an adapter for one layer of size (out, in), and how they change what it computes."""

    def __init__(self, adapter: Rotation | LowRank) -> None:
        super().__init__()
        self.adapter = adapter

    def output(self, layer: Callable[[Tensor], Tensor], bias: Tensor | None, x: Tensor) -> Tensor:
        """The adapted output for x of a layer W x + bias."""
        raise NotImplementedError

    def weight(self, W: Tensor) -> Tensor:
        """The adapted weight."""
        raise NotImplementedError


class RotationLayer(AdapterLayer):
    """L W R x, blocks R (in/b, b, b) and L (out/b, b, b) on SO(b); a side that is left alone is None."""

    def __init__(
        self, adapter: Rotation, out_features: int, in_features: int, factory: dict[str, Any]
    ) -> None:
        super().__init__(adapter)
        b, sizes = adapter.block, {"R": in_features, "L": out_features}
        sides = {leaf: sizes[leaf] for leaf in SIDES[adapter.sides]}
        for leaf, size in sides.items():
            if b < 2 or size % b:
                fits = math.gcd(*sides.values())
                divisors = [k for k in range(2, fits + 1) if fits % k == 0]
                near = sorted(sorted(divisors, key=lambda k: abs(k - b))[:3])
                what = "inputs" if leaf == "R" else "outputs"
                raise ValueError(f"{size} {what} do not come in blocks of {b}; try one of {near}")
            self.register_parameter(leaf, nn.Parameter(torch.eye(b, **factory).repeat(size // b, 1, 1)))
            constrain(self, leaf, SpecialOrthogonal())

    # Not `self.R` and `self.L`, which adapters on one side do not have.
    right = property(lambda self: self._parameters.get("R"))
    left = property(lambda self: self._parameters.get("L"))

    def output(self, layer: Callable[[Tensor], Tensor], bias: Tensor | None, x: Tensor) -> Tensor:
        """L (y - bias) + bias, y = W R x + bias, in a form that is y to the bit for L = I."""
        y = layer(x if self.right is None else turned(self.right, x))
        if self.left is None:
            return y
        y = turned(self.left, y)
        if bias is None:
            return y
        bias = bias.to(y.dtype)  # under autocast the layer has added it in the precision of y
        return y + (bias - turned(self.left, bias))

    def weight(self, W: Tensor) -> Tensor:
        W = W if self.left is None else turned(self.left, W.mT).mT
        return W if self.right is None else turned(self.right.mT, W)


def turned(R: Tensor, x: Tensor) -> Tensor:
    """R x for vectors x (..., d) and block-diagonal R, given as blocks (d/b, b, b), in the dtype of R."""
    blocks = x.to(R.dtype).unflatten(-1, R.shape[:2])
    return torch.einsum("...kb,kcb->...kc", blocks, R).flatten(-2).to(x.dtype)


class LowRankLayer(AdapterLayer):
    """U diag(s) V^T x or U S V^T x, U (out, r) and V (in, r) on Stiefel."""

    U: Tensor
    V: Tensor

    def __init__(
        self, adapter: LowRank, out_features: int, in_features: int, factory: dict[str, Any]
    ) -> None:
        super().__init__(adapter)
        if adapter.rank < 1:
            raise ValueError(f"a layer {out_features} x {in_features} has no part of rank {adapter.rank}")
        rank = min(adapter.rank, out_features, in_features)  # no matrix of a layer has more
        for leaf, size in (("U", out_features), ("V", in_features)):
            if size == 1:  # the points are +-1, which cannot move
                self.register_buffer(leaf, torch.ones(1, 1, **factory))
            else:
                self.register_parameter(leaf, nn.Parameter(Stiefel().random(size, rank, **factory)))
                constrain(self, leaf, Stiefel())
        if adapter.full:
            self.S = nn.Parameter(torch.zeros(rank, rank, **factory))
        else:
            self.s = nn.Parameter(torch.zeros(rank, **factory))

    def scaled(self, X: Tensor) -> Tensor:
        """X diag(s) or X S^T."""
        return X @ self.S.mT if "S" in self._parameters else X * self.s

    def output(self, layer: Callable[[Tensor], Tensor], bias: Tensor | None, x: Tensor) -> Tensor:
        y = layer(x)
        return y + (self.scaled(x.to(self.V.dtype) @ self.V) @ self.U.mT).to(y.dtype)

    def weight(self, W: Tensor) -> Tensor:
        return W + self.U @ self.scaled(self.V).mT
