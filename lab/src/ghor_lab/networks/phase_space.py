"""Layers on z = (q, p), symplectic by construction; many copies of a layer are computed at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

import ghor

from .attention import STIEFEL, glorot_

Generators = Sequence[Generator | None]


class PhaseSpaceMap(nn.Module, ABC):
    """A map of z = (q, p) from R^in_dim to R^out_dim.

    `copies` is the leading dimension of every parameter: so many independent networks are computed, and
    trained, together. `generators` has one for each copy, which then gets, to the bit, the weights that a
    network of a single copy gets from it.
    """

    def __init__(self, in_dim: int, out_dim: int, copies: int) -> None:
        super().__init__()
        self.in_dim, self.out_dim, self.copies = in_dim, out_dim, copies
        for dim in (in_dim, out_dim):
            if dim < 2 or dim % 2:
                raise ValueError(
                    f"{type(self).__name__} acts on (q, p): an even number of dimensions, not {dim}"
                )

    @abstractmethod
    def features_first(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """Map q and p, each (copies, in_dim / 2, points), to (copies, out_dim / 2, points).

        In this layout every layer is two batched products on contiguous halves: use it for training.
        """

    def forward(self, z: Tensor) -> Tensor:
        """(copies, points, in_dim), or (points, in_dim) for all copies -> (copies, points, out_dim)."""
        q, p = z.expand(self.copies, *z.shape[-2:]).mT.chunk(2, 1)
        return torch.cat(self.features_first(q, p), 1).mT


class Gradient(PhaseSpaceMap):
    """Base class of GradientQ and GradientP: `weight` K (copies, m, d), `scale` a and `bias` b (copies, m).

    d = dim / 2, m = width. K is Glorot-uniform, a uniform in +-sqrt(6 / m), b zero.
    """

    def __init__(
        self, dim: int, width: int, copies: int = 1, generators: Generators = (), **factory: Any
    ) -> None:
        super().__init__(dim, dim, copies)
        self.weight = nn.Parameter(torch.empty(copies, width, dim // 2, **factory))
        self.scale = nn.Parameter(torch.empty(copies, width, **factory))
        self.bias = nn.Parameter(torch.zeros(copies, width, **factory))
        for K, a, g in zip(self.weight, self.scale, generators or [None] * copies, strict=True):
            glorot_(K.detach(), g)
            # (m,) counts as a row: fan_out is missing, hence sqrt(6 / m)
            glorot_(a.detach(), g)

    def kick(self, x: Tensor, y: Tensor) -> Tensor:
        """x + K^T (a * tanh(K y + b)); x and y (copies, d, points)."""
        K, a, b = self.weight, self.scale[..., None], self.bias[..., None]
        # scaling K is a pass over m x d weights instead of one over m x points activations
        return torch.baddbmm(x, (a * K).mT, torch.tanh(torch.baddbmm(b, K, y)))

    def extra_repr(self) -> str:
        return f"{self.in_dim}, width={self.weight.shape[1]}, copies={self.copies}"


class GradientQ(Gradient):
    """q <- q + K^T (a * tanh(K p + b)): the flow of a potential of p, symplectic whatever K, a and b are.

    >>> GradientQ(4, 40)(torch.randn(5, 4)).shape
    torch.Size([1, 5, 4])
    """

    def features_first(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return self.kick(q, p), p


class GradientP(Gradient):
    """p <- p + K^T (a * tanh(K q + b)): the flow of a potential of q, symplectic whatever K, a and b are."""

    def features_first(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return q, self.kick(p, q)


class PSD(PhaseSpaceMap):
    """Proper symplectic decomposition: (q, p) <- (Phi^T q, Phi^T p) if out_dim < in_dim, else (Phi q, Phi p).

    Phi is on St(n, N); 2N is the larger and 2n the smaller of the two dimensions. `weight` is Phi, (copies,
    N, n): it starts as the Q of a normal matrix and is declared on Stiefel.

    >>> PSD(2, 4)(torch.randn(5, 2)).shape
    torch.Size([1, 5, 4])
    """

    def __init__(
        self, in_dim: int, out_dim: int, copies: int = 1, generators: Generators = (), **factory: Any
    ) -> None:
        super().__init__(in_dim, out_dim, copies)
        n, N = sorted((in_dim // 2, out_dim // 2))
        self.weight = nn.Parameter(torch.empty(copies, N, n, **factory))
        each = generators or [None] * copies
        drawn = torch.stack([STIEFEL.random(N, n, generator=g, dtype=self.weight.dtype) for g in each])
        with torch.no_grad():
            self.weight.copy_(drawn)
            ghor.constrain(self, "weight", STIEFEL)
            self.weight.copy_(drawn)  # as drawn: rounding in `constrain` depends on the number of copies

    def features_first(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        Phi = self.weight.mT if self.out_dim < self.in_dim else self.weight
        return torch.bmm(Phi, q), torch.bmm(Phi, p)


class Chain(PhaseSpaceMap):
    """Maps one after another; q and p stay separate tensors from the first to the last."""

    def __init__(self, layers: Sequence[PhaseSpaceMap]) -> None:
        super().__init__(layers[0].in_dim, layers[-1].out_dim, layers[0].copies)
        self.layers = nn.ModuleList(layers)

    def features_first(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            q, p = layer.features_first(q, p)  # type: ignore[operator]
        return q, p


def jacobian(layer: PhaseSpaceMap, z: Tensor) -> Tensor:
    """Derivative of every copy at the points z (points, in_dim): (copies, points, out_dim, in_dim)."""
    x = z.detach().expand(layer.copies, *z.shape[-2:]).clone().requires_grad_()
    with torch.enable_grad():
        y = layer(x)
        # points and copies do not interact: a row of all Jacobians at once is the gradient of a sum over all
        rows = [torch.autograd.grad(row.sum(), x, retain_graph=True)[0] for row in y.unbind(-1)]
    return torch.stack(rows, -2)


def symplecticity(layer: PhaseSpaceMap, z: Tensor) -> Tensor:
    """How far a map is from symplectic: for each copy the largest defect over the points of z,

        max |M^T J M - J| if out_dim >= in_dim (decoder),    max |M J M^T - J| otherwise (encoder)

    with M the Jacobian, out_dim x in_dim, and J = [0, I; -I, 0] of the size that fits. Zero up to rounding
    for every layer here, for the encoder and for the decoder; not for the autoencoder, whose Jacobian has
    rank reduced_dim.
    """
    M = jacobian(layer, z)
    if layer.out_dim < layer.in_dim:
        M = M.mT
    return (M.mT @ canonical(M.shape[-2], M) @ M - canonical(M.shape[-1], M)).abs().amax((-3, -2, -1))


def canonical(dim: int, like: Tensor) -> Tensor:
    """J = [0, I; -I, 0] of order dim, with the dtype and device of `like`."""
    I = torch.eye(dim // 2, dtype=like.dtype, device=like.device)
    return torch.kron(torch.tensor([[0, 1], [-1, 0]]).to(I), I)
