"""Layers on z = (q, p), symplectic by construction; many copies of a layer are computed at once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ghor.constraints.declare import constrain
from ghor.constraints.registry import declare
from ghor_lab.networks.attention import STIEFEL, glorot_

Generators = Generator | Sequence[Generator] | None


class PhaseSpaceMap(nn.Module, ABC):
    """A map of z = (q, p) from R^in_dim to R^out_dim.

    `copies` are the leading dimensions of every parameter: independent networks that are computed, and
    trained, together.
    """

    def __init__(self, in_dim: int, out_dim: int, copies: Iterable[int] = ()) -> None:
        super().__init__()
        self.in_dim, self.out_dim, self.copies = in_dim, out_dim, tuple(copies)
        for dim in (in_dim, out_dim):
            if dim < 2 or dim % 2:
                raise ValueError(
                    f"{type(self).__name__} acts on (q, p), so on an even number of dimensions, got {dim}"
                )
        if any(k < 1 for k in self.copies):
            raise ValueError(f"copies must be positive, got {self.copies}")

    @abstractmethod
    def features_first(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """Map q and p, each (copies, in_dim / 2, points), to (copies, out_dim / 2, points).

        Here copies are a single dimension. In this layout every layer is two batched products on contiguous
        halves: use it for training.
        """

    @abstractmethod
    def reset_parameters(self, generator: Generators = None) -> None:
        """Draw all parameters again, from one generator or from a sequence with one for each copy.

        In the latter case copy i gets, to the bit, the weights that a network without copies gets from
        generator i.
        """

    def forward(self, z: Tensor) -> Tensor:
        """(..., points, in_dim) -> (..., points, out_dim), where ... and `copies` broadcast."""
        if z.dim() < 2 or z.shape[-1] != self.in_dim:
            raise ValueError(f"expected (..., points, {self.in_dim}), got {tuple(z.shape)}")
        lead, points, C = self.broadcast(z), z.shape[-2], math.prod(self.copies)
        more = math.prod(lead) // C  # dimensions without copies count as more points
        # Those before the copies are first already; those among them are moved there, and back at the end.
        among = [i for i, k in enumerate(self.copies, -2 - len(self.copies)) if k == 1]
        first = list(range(len(among)))
        x = z.expand(*lead, *z.shape[-2:])
        x = x.movedim(among, first) if among else x
        q, p = x.reshape(more, C, points, self.in_dim).permute(1, 3, 0, 2).flatten(2).chunk(2, 1)
        y = torch.cat(self.features_first(q, p), 1)
        y = y.view(C, self.out_dim, more, points).permute(2, 0, 3, 1).reshape(*x.shape[:-1], self.out_dim)
        return y.movedim(first, among) if among else y

    def broadcast(self, z: Tensor) -> tuple[int, ...]:
        """The leading dimensions of the output for z (..., points, in_dim)."""
        try:
            return tuple(torch.broadcast_shapes(z.shape[:-2], self.copies))
        except RuntimeError:
            raise ValueError(
                f"expected (..., points, {self.in_dim}) whose leading dimensions broadcast with "
                f"copies={self.copies}, got {tuple(z.shape)}"
            ) from None

    def generators(self, generator: Generators) -> list[Generator | None]:
        """One generator for each copy; from a single one the copies draw one after another."""
        C = math.prod(self.copies)
        if generator is None or isinstance(generator, Generator):
            return [generator] * C
        if len(generator) != C:
            raise ValueError(f"{len(generator)} generators for copies={self.copies}; give one, or {C}")
        return list(generator)

    def extra_repr(self) -> str:
        return f"{self.in_dim}, {self.out_dim}" + (f", copies={self.copies}" if self.copies else "")


class Gradient(PhaseSpaceMap):
    """Base class of GradientQ and GradientP: `weight` K (*copies, m, d), `scale` a and `bias` b (*copies, m).

    d = dim / 2, m = width. K is Glorot-uniform, a uniform in +-sqrt(6 / m), b zero.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        copies: Iterable[int] = (),
        generator: Generators = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, dim, copies)
        if width < 1:
            raise ValueError(f"width must be positive, got {width}")
        self.width = width
        self.weight = nn.Parameter(torch.empty(*self.copies, width, dim // 2, device=device, dtype=dtype))
        self.scale = nn.Parameter(torch.empty(*self.copies, width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(*self.copies, width, device=device, dtype=dtype))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: Generators = None) -> None:
        K_all, a_all = self.weight.view(-1, *self.weight.shape[-2:]), self.scale.view(-1, self.width)
        for K, a, g in zip(K_all, a_all, self.generators(generator), strict=True):
            glorot_(K.detach(), g)
            glorot_(a.detach(), g)
        nn.init.zeros_(self.bias)

    def kick(self, x: Tensor, y: Tensor) -> Tensor:
        """x + K^T (a * tanh(K y + b))."""
        return kick(x, y, self.weight, self.scale, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_dim}, width={self.width}" + (f", copies={self.copies}" if self.copies else "")


def kick(x: Tensor, y: Tensor, K: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x + K^T (a * tanh(K y + b)); x and y (copies, d, points), K (*copies, m, d), a and b (*copies, m)."""
    m, d = K.shape[-2:]
    K, a, b = K.reshape(-1, m, d), a.reshape(-1, m, 1), b.reshape(-1, m, 1)
    # Scaling K is a pass over m x d weights instead of one over m x points activations.
    return torch.baddbmm(x, (a * K).mT, torch.tanh(torch.baddbmm(b, K, y)))


class GradientQ(Gradient):
    """q <- q + K^T (a * tanh(K p + b)): the flow of a potential of p, symplectic whatever K, a and b are.

    >>> GradientQ(4, 40)(torch.randn(5, 4)).shape
    torch.Size([5, 4])
    """

    def features_first(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return self.kick(q, p), p


class GradientP(Gradient):
    """p <- p + K^T (a * tanh(K q + b)): the flow of a potential of q, symplectic whatever K, a and b are."""

    def features_first(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return q, self.kick(p, q)


class PSD(PhaseSpaceMap):
    """Proper symplectic decomposition: (q, p) <- (Phi^T q, Phi^T p) if out_dim < in_dim, else (Phi q, Phi p).

    Phi is on St(n, N); 2N is the larger and 2n the smaller of the two dimensions. `weight` is Phi, (*copies,
    N, n): it starts as the Q of a normal matrix and is declared on Stiefel.

    >>> PSD(2, 4)(torch.randn(5, 2)).shape
    torch.Size([5, 4])
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        copies: Iterable[int] = (),
        generator: Generators = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_dim, out_dim, copies)
        n, N = sorted((in_dim // 2, out_dim // 2))
        self.weight = nn.Parameter(torch.empty(*self.copies, N, n, device=device, dtype=dtype))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: Generators = None) -> None:
        p = self.weight
        points = [
            STIEFEL.random(
                *p.shape[-2:], generator=g, dtype=p.dtype, device=p.device if g is None else g.device
            )
            for g in self.generators(generator)
        ]
        drawn = torch.stack(points).view(p.shape)
        if p.is_meta:  # values come later, from here or from a state dict
            declare(self, "weight", STIEFEL)
            return
        with torch.no_grad():
            p.copy_(drawn)
            constrain(self, "weight", STIEFEL)
            p.copy_(drawn)  # the points as drawn: rounding in `constrain` depends on the number of copies

    def features_first(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        Phi = self.weight.view(-1, *self.weight.shape[-2:])
        if self.out_dim < self.in_dim:
            Phi = Phi.mT
        return torch.bmm(Phi, q), torch.bmm(Phi, p)


def chained(layers: Iterable[PhaseSpaceMap], q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Apply maps one after another."""
    for layer in layers:
        q, p = layer.features_first(q, p)
    return q, p


class Chain(PhaseSpaceMap):
    """Maps one after another; q and p stay separate tensors from the first to the last.

    `formula` computes them; it can be replaced by another function of the same arguments.
    """

    formula: Callable[..., tuple[Tensor, Tensor]] = staticmethod(chained)

    def __init__(self, layers: Sequence[PhaseSpaceMap]) -> None:
        super().__init__(layers[0].in_dim, layers[-1].out_dim, layers[0].copies)
        self.layers = nn.ModuleList(layers)

    def reset_parameters(self, generator: Generators = None) -> None:
        for layer in self.layers:
            assert isinstance(layer, PhaseSpaceMap)
            layer.reset_parameters(generator)

    def features_first(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return self.formula(self.layers, q, p)


def jacobian(layer: PhaseSpaceMap, z: Tensor) -> Tensor:
    """Derivative of every copy at every point: (..., points, in_dim) -> (..., points, out_dim, in_dim)."""
    x = z.detach().expand(*layer.broadcast(z), *z.shape[-2:]).clone().requires_grad_()
    with torch.enable_grad():
        y = layer(x)
        # Points and copies do not interact: a row of all Jacobians at once is the gradient of a sum over all.
        rows = [torch.autograd.grad(row.sum(), x, retain_graph=True)[0] for row in y.unbind(-1)]
    return torch.stack(rows, -2)


def symplecticity(layer: PhaseSpaceMap, z: Tensor) -> Tensor:
    """How far a map is from symplectic: for each copy the largest defect over the points of z,

        max |M^T J M - J| if out_dim >= in_dim (decoder),    max |M J M^T - J| otherwise (encoder)

    with M the Jacobian, out_dim x in_dim, and J = [0, I; -I, 0] of the size that fits. z is (..., points,
    in_dim). Zero up to rounding for every layer here, for the encoder and for the decoder; not for the
    autoencoder, whose Jacobian has rank reduced_dim.
    """
    M = jacobian(layer, z)
    if layer.out_dim < layer.in_dim:
        M = M.mT
    return (M.mT @ canonical(M.shape[-2], M) @ M - canonical(M.shape[-1], M)).abs().amax((-3, -2, -1))


def canonical(dim: int, like: Tensor) -> Tensor:
    """J = [0, I; -I, 0] of order dim, with the dtype and device of `like`."""
    I = torch.eye(dim // 2, dtype=like.dtype, device=like.device)
    zero = torch.zeros_like(I)
    return torch.cat([torch.cat([zero, I], 1), torch.cat([-I, zero], 1)])
