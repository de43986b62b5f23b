"""What the published methods share: the loop over weights that are matrices of one space, and checks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ghor import Space, Stiefel


class OnMatrices(Optimizer):
    """Optimizer of matrices (..., N, n) on `space`, one `update` for each; wide matrices are transposed.

    All weights have to be on the space: give those of vector spaces to an optimizer of their own, as with
    torch.optim.Muon.
    """

    space: ClassVar[Space] = Stiefel()
    # How far off the space, beyond rounding, weights may start: for methods that do not stay on it.
    room: ClassVar[float] = 0.0

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, checked(options))

    @abstractmethod
    def update(self, Y: Tensor, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Move Y (..., N, n) in place, G the Euclidean gradient there."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; refuses weights that are not on the space."""
        super().add_param_group(param_group)
        try:
            for i, p in enumerate(self.param_groups[-1]["params"]):
                self.check(p, f"parameter {i} of group {len(self.param_groups) - 1}")
        except BaseException:
            self.param_groups.pop()
            raise

    def check(self, p: Tensor, name: str) -> None:
        """Raise an error unless p is a weight of this method."""
        kind = type(self).__name__
        if p.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} is {p.dtype}; weights of {kind} are float32 or float64")
        off = float(self.space.residual(p.detach()).max())
        if not off <= torch.finfo(p.dtype).eps ** 0.6 + self.room:
            raise ValueError(
                f"{name} of shape {tuple(p.shape)} is {off:.1e} off {self.space}; copy "
                f"ghor.{self.space}.project(weight) into it"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every weight that has a gradient; returns the loss if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(tall(p), tall(p.grad), self.state[p], group)
        return loss


def tall(X: Tensor) -> Tensor:
    """The matrices, or their transposes if they are wide."""
    return X.mT if X.shape[-2] < X.shape[-1] else X


def checked(options: dict[str, Any]) -> dict[str, Any]:
    """The options; ValueError, in torch's words, for those out of range. Only Kong's `a` may be negative."""
    for name, value in options.items():
        if name == "betas":
            for i, beta in enumerate(value):
                if not 0 <= beta < 1:
                    raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
        elif isinstance(value, (int, float)) and name != "a" and not value >= 0:
            what = "learning rate" if name == "lr" else name
            raise ValueError(f"Invalid {what}: {value}, it must not be negative")
    return options


def tick(state: dict[str, Any]) -> float:
    """t <- t + 1, in a float32 tensor as in torch's optimizers."""
    state["step"] = state.get("step", torch.zeros((), dtype=torch.float32)) + 1
    return float(state["step"])


def average(state: dict[str, Any], key: str, value: Tensor, beta: float) -> Tensor:
    """state[key] <- beta state[key] + (1 - beta) value, from zero."""
    if key not in state:
        state[key] = torch.zeros_like(value)
    mean: Tensor = state[key].mul_(beta).add_(value, alpha=1 - beta)
    return mean


def adam(state: dict[str, Any], g: Tensor, group: dict[str, Any]) -> Tensor:
    """The direction of torch's Adam, elementwise: (m/(1 - beta1^t))/(sqrt(v/(1 - beta2^t)) + eps)."""
    t, (beta1, beta2) = tick(state), group["betas"]
    m, v = average(state, "exp_avg", g, beta1), average(state, "exp_avg_sq", g * g, beta2)
    return m / (1 - beta1**t) / ((v.sqrt() / math.sqrt(1 - beta2**t)).add_(group["eps"]))


def eye(X: Tensor) -> Tensor:
    """The identity of as many columns as X has."""
    return torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)


def norm(X: Tensor) -> Tensor:
    """The Frobenius norm of every matrix, (..., 1, 1)."""
    return torch.linalg.matrix_norm(X, keepdim=True)


def polar(X: Tensor) -> Tensor:
    """X (X^T X)^(-1/2), the matrix with orthonormal columns nearest to tall X: Muon's "msign", by SVD."""
    U, _, Vh = torch.linalg.svd(X, full_matrices=False)
    Y = U @ Vh
    return Y + Y @ (eye(Y) - Y.mT @ Y) / 2  # single precision SVD is orthogonal to 1e-5 only
