"""Small matrix functions, batched over leading dimensions: what the spaces and retractions are made of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator, ExitStack
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .reads import may_read

F = TypeVar("F", bound=Callable[..., Any])

# Half precision has no LAPACK and too few digits for a group element: everything is computed in float32 there.
COMPUTE_DTYPE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class full_precision(ContextDecorator):
    """A context, or decorator, without autocast: a product rounded to bfloat16 is 2e-3 off the group."""

    devices = ("cpu", "cuda", "mps", "xpu")

    def __call__(self, function: F) -> F:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not any(map(torch.is_autocast_enabled, self.devices)):  # a context costs more than this look
                return function(*args, **kwargs)
            with full_precision():
                return function(*args, **kwargs)

        return cast(F, call)

    def __enter__(self) -> None:
        self.off = ExitStack()
        for device in filter(torch.is_autocast_enabled, self.devices):
            self.off.enter_context(torch.autocast(device, enabled=False))

    def __exit__(self, *error: object) -> None:
        self.off.close()


def wide(X: Tensor) -> Tensor:
    """X in the widest dtype of its kind: float64, or complex128."""
    return X.to(torch.promote_types(X.dtype, torch.float64))


def parts(X: Tensor) -> Tensor:
    """Real tensors as they are, complex ones as pairs (..., 2) of real numbers, as torch's optimizers see them."""
    return torch.view_as_real(X.resolve_conj()) if X.is_complex() else X


def phases(d: Tensor) -> Tensor:
    """d/|d|, 1 where d = 0: the signs of real numbers."""
    return torch.where(d == 0, 1, torch.sgn(d))


def dot(U: Tensor, V: Tensor) -> Tensor:
    """Re tr(U^H V): (..., N, n) -> (...)."""
    return (U.conj() * V).real.sum((-2, -1)) if U.is_complex() else (U * V).sum((-2, -1))


def frobenius(X: Tensor) -> Tensor:
    """||X||_F over the last two dimensions: (..., N, n) -> (...)."""
    return torch.linalg.vector_norm(X, dim=(-2, -1))


def eye_like(X: Tensor) -> Tensor:
    """The n x n identity with X's dtype and device, n = X.shape[-1]."""
    return torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)


def add_product(X: Tensor, A: Tensor, B: Tensor, alpha: float = 1) -> Tensor:
    """X <- X + alpha A B, in place; in one kernel where there is one batch dimension."""
    return X.baddbmm_(A, B, alpha=alpha) if X.dim() == 3 else X.add_(A @ B, alpha=alpha)


def product(A: Tensor, B: Tensor) -> Tensor:
    """A B; where the sums are long, in parts that are added up in float64: 1e6 terms in float32 would lose 4 digits."""
    k = A.shape[-1] // PART * PART
    if A.shape[-1] <= LONG:
        return A @ B
    pieces = A[..., :k].unflatten(-1, (-1, PART)).movedim(-2, -3) @ B[..., :k, :].unflatten(-2, (-1, PART))
    total = pieces.sum(-3, dtype=torch.complex128 if A.is_complex() else torch.float64)
    return (total + A[..., k:] @ B[..., k:, :]).to(A.dtype)


LONG, PART = 4096, 512  # terms of a sum that float32 can take, and of each part of a longer one


def inverse(X: Tensor) -> Tensor:
    """X^-1, not finite where X is singular."""
    return torch.stack([torch.linalg.inv_ex(x)[0] for x in X]) if _one_by_one(X) else torch.linalg.inv_ex(X)[0]


def solve(A: Tensor, B: Tensor) -> Tensor:
    """A^-1 B, not finite where A is singular."""
    if not _one_by_one(A):
        return torch.linalg.solve_ex(A, B)[0]
    return torch.stack([torch.linalg.solve_ex(a, b)[0] for a, b in zip(A, B, strict=True)])


def _one_by_one(X: Tensor) -> bool:
    """A batch of large matrices on the CPU: with several threads its LU factors are wrong (oneMKL, torch 2.13)."""
    return X.dim() == 3 and X.shape[-1] > SMALL and X.device.type == "cpu"


SMALL = 96  # sides of matrices whose batches LAPACK's LU takes in any case


def polar(X: Tensor) -> Tensor:
    """The unitary polar factor of square X, any one where X is singular."""
    U, _, Vh = torch.linalg.svd(X)
    return U @ Vh


def phi(X: Tensor) -> Tensor:
    """A(X) = sum_k X^(k-1)/k!, (..., m, m) -> (..., m, m), by scaling and modified squaring.

    exp(X) = I + X A(X). The series is summed at X/2^s, where ||X/2^s||_1 <= 1/2, and brought back with the exact
    W <- 2W + WXW (Algorithm "Evaluation of A(X)" in the paper). Every matrix of a batch has its own s.
    """
    I = eye_like(X)
    with torch.no_grad():
        norm = torch.linalg.matrix_norm(X, ord=1, keepdim=True)
        s = torch.ceil(torch.log2(2 * norm.clamp_min(0.25))).clamp_min(0).nan_to_num(0, 0, 0)
    Y = X * torch.exp2(-s)
    terms = 9 if torch.finfo(X.dtype).eps > 1e-10 else 15  # (1/2)^terms / (terms + 1)! < eps
    out = I.expand_as(X)
    for k in range(terms, 1, -1):
        out = I + (Y @ out) / k
    W = out * torch.exp2(-s)

    def double(j: int | Tensor, W: Tensor) -> Tensor:
        return torch.where(j < s, 2 * W + W @ X @ W, W)

    if torch.compiler.is_compiling() and not X.requires_grad:
        top = s.amax()
        start = torch.zeros((), dtype=torch.int64, device=X.device)
        _, W = torch.while_loop(lambda j, _: j < top, lambda j, W: (j + 1, double(j, W)), (start, W))
        return W
    # Where s may not be read there are as many as the longest step needs that the optimizer takes.
    for j in range(int(s.max()) if may_read(X) and X.numel() > 0 else 12):
        W = double(j, W)
    return W
