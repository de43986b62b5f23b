"""What an adapter adds to one linear layer, and the two kinds of adapters: see `ghor.adapters`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .declare import constrain
from .spaces import SpecialOrthogonal, Stiefel


class Part(nn.Module):
    """What an adapter adds to one layer of size (out, in)."""

    adapter: Rotation | LowRank

    def before(self, x: Tensor) -> Tensor:
        """What the layer sees in place of its input."""
        return x

    def beside(self, x: Tensor) -> Tensor | None:
        """What is added to the output; x is the input itself."""
        return None

    def merged(self, weight: Tensor) -> Tensor:
        """The weight that does `before`."""
        return weight

    def added(self) -> Tensor | None:
        """The weight that does `beside`."""
        return None


class RotationPart(Part):
    """R x, blocks R (in/b, b, b) on SO(b)."""

    def __init__(self, block: int, out: int, into: int, like: dict[str, Any]) -> None:
        super().__init__()
        if into % block or block < 2:
            fits = [b for b in range(2, into + 1) if into % b == 0]
            near = sorted(sorted(fits, key=lambda b: abs(b - block))[:3])
            raise ValueError(f"{into} inputs do not come in blocks of {block}; try one of {near}")
        self.R = nn.Parameter(torch.eye(block, **like).repeat(into // block, 1, 1))
        constrain(self, "R", SpecialOrthogonal())

    def before(self, x: Tensor) -> Tensor:
        blocks = x.to(self.R.dtype).unflatten(-1, self.R.shape[:2])
        return torch.einsum("...kb,kcb->...kc", blocks, self.R).flatten(-2).to(x.dtype)

    def merged(self, weight: Tensor) -> Tensor:
        return torch.einsum("okc,kcb->okb", weight.unflatten(-1, self.R.shape[:2]), self.R).flatten(-2)


class LowRankPart(Part):
    """U diag(s) V^T x, U (out, r) and V (in, r) on Stiefel."""

    U: Tensor
    V: Tensor

    def __init__(self, rank: int, out: int, into: int, like: dict[str, Any]) -> None:
        super().__init__()
        if not 0 < rank <= min(out, into):
            raise ValueError(f"a layer {out} x {into} has no part of rank {rank}")
        for leaf, size in (("U", out), ("V", into)):
            if size == 1:  # +-1 does not move
                self.register_buffer(leaf, torch.ones(1, 1, **like))
            else:
                self.register_parameter(leaf, nn.Parameter(Stiefel().random(size, rank, **like)))
                constrain(self, leaf, Stiefel())
        self.s = nn.Parameter(torch.zeros(rank, **like))

    def beside(self, x: Tensor) -> Tensor:
        return ((x.to(self.s.dtype) @ self.V) * self.s @ self.U.mT).to(x.dtype)

    def added(self) -> Tensor:
        return (self.U * self.s) @ self.V.mT


@dataclass(frozen=True)
class Rotation:
    """Orthogonal fine-tuning: y = W R x + c with block-diagonal R, in/block rotations of SO(block)."""

    block: int = 32

    def part(self, out: int, into: int, like: dict[str, Any]) -> Part:
        return RotationPart(self.block, out, into, like)


@dataclass(frozen=True)
class LowRank:
    """y = W x + U diag(s) V^T x + c with orthonormal U and V: s are the singular values of what is added."""

    rank: int = 8

    def part(self, out: int, into: int, like: dict[str, Any]) -> Part:
        return LowRankPart(self.rank, out, into, like)


KINDS: dict[str, type[Rotation | LowRank]] = {"Rotation": Rotation, "LowRank": LowRank}
