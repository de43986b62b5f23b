"""Small matrix functions, batched over leading dimensions, from which spaces and retractions are built.

Sums and products; LU, which is called nowhere else; rotations and their logarithm; the exponential; functions
of Hermitian matrices with their derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ghor._torch.transforms import differentiated, transformed, within_a_transform
from ghor._torch.values import may_read

LONG, PART = 4096, 512  # the most terms that float32 sums well, and the terms in each part of a longer sum
LARGE = 1 << 14  # the numbers in a matrix above which a call of a kernel for each takes little of the time
MANY, NARROW = 1000, 32  # rows, and their entries, that BLAS adds up faster than torch does
FAST = 128  # the side up to which products take little of the time of an inverse by LU
SMALL = 96  # the side up to which LAPACK's LU of a batch is right with any number of threads

# -- numbers -------------------------------------------------------------------------------------------------


def wide(X: Tensor) -> Tensor:
    """Convert X to the widest dtype of its kind, float64 or complex128."""
    return X.to(torch.promote_types(X.dtype, torch.float64))


def as_real(X: Tensor) -> Tensor:
    """View a complex tensor as pairs (..., 2) of real numbers, as torch's optimizers do; real ones stay."""
    return torch.view_as_real(X.resolve_conj()) if X.is_complex() else X


def _compilable(rule: Any) -> Any:
    """A Function with a `jvp`, which torch.compile does not take, and its twin without: for `_apply`."""
    own = {key: value for key, value in vars(rule).items() if key in ("forward", "setup_context", "backward")}
    return rule, type(rule)(rule.__name__, (torch.autograd.Function,), own)


def _apply(rules: Any, *args: Any) -> Tensor:
    """Apply a `_compilable` Function."""
    eager, compiled = rules
    out: Tensor = (compiled if torch.compiler.is_compiling() else eager).apply(*args)
    return out


def with_value(X: Tensor, value: Tensor) -> Tensor:
    """`value`, with the derivatives of X, which is the same up to rounding."""
    return _apply(_WithValue, X, value)


@_compilable
class _WithValue(torch.autograd.Function):
    """X + (value - X.detach()), without its rounding; and `detach` acts on the innermost transform alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(X: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor, None]:
        return G, None

    @staticmethod
    def jvp(ctx: Any, dX: Tensor, dvalue: Any) -> Tensor:
        return with_value(dX, dX)  # torch loses a further tangent of anything else (pytorch#197867)


def phases(d: Tensor) -> Tensor:
    """d/|d|, and 1 where d = 0; for real d, its signs."""
    return torch.where(d == 0, 1, torch.sgn(d))


# -- sums and products ---------------------------------------------------------------------------------------


def dot(U: Tensor, V: Tensor) -> Tensor:
    """Re tr(U^H V): (..., N, n) -> (...)."""
    return (U.conj() * V).real.sum((-2, -1)) if U.is_complex() else (U * V).sum((-2, -1))


def frobenius(X: Tensor) -> Tensor:
    """||X||_F over the last two dimensions: (..., N, n) -> (...)."""
    return torch.linalg.vector_norm(X, dim=(-2, -1))


@cache
def ones(N: int, dtype: torch.dtype, first: float = 1.0) -> Tensor:
    """The vector (first, 1, ..., 1) on the CPU."""
    with torch.inference_mode(False):  # it is kept, and may meet autograd later
        return torch.tensor([first, *[1.0] * (N - 1)], dtype=dtype, device="cpu")


def by_coordinates(X: Tensor) -> Tensor:
    """A copy of X (..., N) in which each of the N coordinates is contiguous in memory."""
    out = X.new_empty(X.shape[-1], *X.shape[:-1]).movedim(0, -1)
    return out.copy_(X)  # five times as fast as `contiguous` of the transpose


def is_by_coordinates(X: Tensor) -> bool:
    """Whether X (M, N) is stored as `by_coordinates` stores it, also if it is a part of such a tensor."""
    return X.dim() == 2 and X.stride(0) == 1 < X.stride(1)


def row_sums(X: Tensor, first: float = 1.0) -> Tensor:
    """The sums of rows, in which the first entry counts `first` times, 0 or 1: (..., N) -> (..., 1)."""
    N = X.shape[-1]
    many = X.dim() == 2 and len(X) > MANY and N <= NARROW and not is_by_coordinates(X)
    if many and X.device.type == "cpu" and not torch.compiler.is_compiling():
        return torch.mv(X, ones(N, X.dtype, first)).unsqueeze(-1)
    return (X if first else X[..., 1:]).sum(-1, keepdim=True)


def row_dots(a: Tensor, b: Tensor, first: float = 1.0, out: Tensor | None = None) -> Tensor:
    """`row_sums` of a * b: (..., N) -> (..., 1); `out` (..., N) may be overwritten, to save memory."""
    if out is not None or not is_by_coordinates(a) or torch.compiler.is_compiling():
        return row_sums(torch.mul(a, b, out=out), first)
    # A sum of a few long vectors, without a tensor of the size of a.
    (x, y), *others = list(zip(a.unbind(-1), b.unbind(-1), strict=True))[0 if first else 1 :]
    sums = x * y
    for x, y in others:
        sums.addcmul_(x, y)
    return sums.unsqueeze(-1)


def norms(X: Tensor) -> Tensor:
    """The lengths of vectors: (..., N) -> (...); of long ones in parts, because a norm loses digits there."""
    N = X.shape[-1]
    if N > LONG:
        parts = X[..., : N // PART * PART].unflatten(-1, (-1, PART))
        X = torch.cat([torch.linalg.vector_norm(parts, dim=-1), X[..., N // PART * PART :]], -1)
    elif X.dim() == 2 and len(X) > MANY and N <= NARROW and not X.is_complex():
        return row_dots(X, X).squeeze(-1).sqrt_()
    return torch.linalg.vector_norm(X, dim=-1)


def spectral_bound(X: Tensor, multiplicity: int = 1) -> Tensor:
    """An upper bound of ||X||_2, at most n^(1/16) times as large: (..., N, n) -> (...).

    It is (tr (X^H X)^8 / k)^(1/16), where k = `multiplicity` divides that of every singular value: 2 for real
    skew matrices.
    """
    X = X.mH if X.shape[-2] < X.shape[-1] else X
    size = frobenius(X)
    G = X / torch.where(size == 0, 1, size)[..., None, None]  # 16th powers overflow
    G = G.mH @ G
    G = G @ G
    return size * (frobenius(G @ G).square() / multiplicity) ** (1 / 16)


def largest(X: Tensor) -> float:
    """The largest entry, NaN if there is a NaN, and 0 for an empty batch; of all points of a torch.vmap."""
    if X.numel() and transformed(X):
        return float(_Largest.apply(X))  # type: ignore[no-untyped-call]
    return float(X.amax() if X.numel() > 1 else X) if X.numel() else 0.0


class _Largest(torch.autograd.Function):
    """The largest entry, of all members where torch.vmap batches X, which lets no value of one be read."""

    @staticmethod
    def forward(X: Tensor) -> Tensor:
        return X.amax()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, X: Tensor) -> tuple[Tensor, None]:
        return _Largest.apply(X), None  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        return None

    jvp = backward


def everywhere(X: Tensor) -> bool:
    """Whether all entries of X, a tensor of bools, are true; of all points of a torch.vmap."""
    return largest(~X) == 0 if transformed(X) else bool(X.all())


def eye_like(X: Tensor) -> Tensor:
    """The n x n identity with X's dtype and device, n = X.shape[-1]."""
    return torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)


def identity(X: Tensor) -> Tensor:
    """`eye_like`, never to be written to: that of small matrices on the CPU is kept."""
    n = X.shape[-1]
    if n > SMALL or X.device.type != "cpu" or torch.compiler.is_compiling():
        return eye_like(X)
    return _kept_identity(n, X.dtype)


@cache
def _kept_identity(n: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.eye(n, dtype=dtype, device="cpu")


def symmetric(X: Tensor) -> Tensor:
    """(X + X^T)/2, symmetric to the bit."""
    return (X + X.mT) / 2


def times(A: Tensor, B: Tensor, out: Tensor | None = None) -> Tensor:
    """A B in the layout of A, which may be the transpose of a wide tensor."""
    if torch.compiler.is_compiling():
        out = None
    if _by_columns(A):
        return torch.matmul(B.mT, A.mT, out=None if out is None else out.mT).mT
    return torch.matmul(A, B, out=out)


def plus_product(X: Tensor, A: Tensor, B: Tensor, alpha: float = 1, beta: float = 1) -> Tensor:
    """beta X + alpha A B, in one kernel if there is one batch dimension."""
    if X.dim() == 3:
        return torch.baddbmm(X, A, B, alpha=alpha, beta=beta)
    return (beta * X).add(A @ B, alpha=alpha)


def add_product(X: Tensor, A: Tensor, B: Tensor, alpha: float = 1) -> Tensor:
    """X <- X + alpha A B in place, in one kernel if X is one batch of whole or of large matrices.

    Where X is a slice, torch takes the matrices of a batch one by one, which is slow for small ones.
    """
    turned = _by_columns(X)
    rows = X.mT if turned else X
    if X.dim() != 3 or not (X.shape[0] == 1 or rows.is_contiguous() or X.stride(0) >= LARGE):
        return X.add_(A @ B, alpha=alpha)
    if turned:
        rows.baddbmm_(B.mT, A.mT, alpha=alpha)
    else:
        rows.baddbmm_(A, B, alpha=alpha)
    return X


def _by_columns(X: Tensor) -> bool:
    return X.stride(-1) != 1 and X.stride(-2) == 1


def product(A: Tensor, B: Tensor) -> Tensor:
    """A B; long sums are split into parts that are added up in float64.

    A sum of 1e6 terms in float32 would lose 4 digits.
    """
    if A.shape[-1] <= LONG:
        return A @ B
    k = A.shape[-1] // PART * PART
    pieces = A[..., :k].unflatten(-1, (-1, PART)).movedim(-2, -3) @ B[..., :k, :].unflatten(-2, (-1, PART))
    total = pieces.sum(-3, dtype=torch.complex128 if A.is_complex() else torch.float64)
    return (total + A[..., k:] @ B[..., k:, :]).to(A.dtype)


def defect(S: Tensor, X: Tensor) -> Tensor:
    """I - S X for X (..., N, n) and S near its left inverse, computed in float64 for n from 65 to 1024.

    In float32 the n^2 entries are wrong by about 1e-8 each: 5e-6 for n = 512, more than the steps between two
    polishings leave. Above, where products take seconds, and on devices without float64 it has to do.
    """
    if 64 < X.shape[-1] <= 1024 and X.device.type != "mps":
        return (eye_like(wide(X)) - wide(S) @ wide(X)).to(X.dtype)
    return eye_like(X) - product(S, X)


# -- LU ------------------------------------------------------------------------------------------------------


def inverse(X: Tensor) -> Tensor:
    """X^-1, not finite where X is singular."""
    if X.shape[-1] <= SMALL:  # called in every step, so without the detour through `_each`
        # torch inverts matrices stored by rows without a copy.
        return torch.linalg.inv_ex(X.mT)[0].mT if _by_columns(X) else torch.linalg.inv_ex(X)[0]
    return _each(lambda x: torch.linalg.inv_ex(x)[0], X)


def inverse_beside_identity(M: Tensor) -> Tensor:
    """(I - M/2)^-1, not finite where that is singular: by products if the step is short, otherwise by LU."""
    X = None if M.shape[-1] <= 16 else _by_products(M, 7 if M.shape[-1] <= FAST else 3)
    if X is not None:
        return X
    I = identity(M)
    return inverse(torch.sub(I.mT if _by_columns(M) else I, M, alpha=0.5))  # in the layout of M


def inverse_near(X: Tensor, P: Tensor) -> Tensor:
    """X^-1, from the inverse P of a matrix near X where that is faster: P (I - E)^-1, E = I - X P.

    E contains the error of P, so errors do not accumulate.
    """
    if FAST / 4 < X.shape[-1] <= FAST and may_read(X) and not torch.compiler.is_compiling():
        E = plus_product(identity(X).expand_as(X), X, P, alpha=-2, beta=2)
        S = _by_products(E, 4)
        if S is not None:
            return P @ S
    return inverse(X)


def _by_products(M: Tensor, most: int) -> Tensor | None:
    """(I - M/2)^-1 by products alone, where at most `most` rounds are exact to rounding; otherwise None.

    With E = M/2 it is I + X, X = E + E^2 + E^2 X. After k rounds from X = E + E^2 the error is E^(2k+2) X.
    LAPACK takes as long for an inverse as for 15 products if n <= 128, and as for 4 beyond. None also where
    values may not be read.
    """
    if not M.numel() or not may_read(M) or torch.compiler.is_compiling():
        return None
    square, eps = M @ M, torch.finfo(M.dtype).eps / 8
    size = largest(frobenius(square.detach())) / 4
    rest, rounds = size * size, 1
    while rest > eps and rounds < most:
        rest, rounds = rest * size, rounds + 1
    if not rest <= eps:
        return None
    start = X = torch.add(M, square, alpha=0.5)  # twice E + E^2, and so are the X below
    for k in range(rounds):
        last = 0.5 if k == rounds - 1 else 1
        X = plus_product(start, square, X, alpha=last / 4, beta=last)
    X.diagonal(dim1=-2, dim2=-1).add_(1)
    return X


def solve(A: Tensor, B: Tensor, left: bool = True) -> Tensor:
    """A^-1 B, or B A^-1 if not `left`, of matrices; not finite where A is singular."""
    if B.dim() < A.dim():  # torch would take one matrix for vectors, if it has as many rows as A has members
        B = B.expand(*A.shape[:-2], *B.shape[-2:])
    if transformed(A):  # a derivative of torch's own rule for forward mode is wrong (pytorch#192540)
        return inverse(A) @ B if left else B @ inverse(A)
    return _each(lambda a, b: torch.linalg.solve_ex(a, b, left=left)[0], A, B)


def det(X: Tensor) -> Tensor:
    """The determinant, (..., n, n) -> (...)."""
    return _each(torch.linalg.det, X)


def det_sign(X: Tensor) -> Tensor:
    """The sign of the determinant, which itself underflows for large matrices of small entries."""
    return _each(lambda X: torch.linalg.slogdet(X)[0], X)


def _each(function: Callable[..., Tensor], *matrices: Tensor) -> Tensor:
    """Apply a function that uses LU to a batch of matrices; large ones on the CPU one by one.

    torch runs a batch there in parallel, which oneMKL's LU does not allow: with two threads the factors of
    two matrices larger than about 150 are garbage (pytorch#141358, #142815). QR, SVD, Cholesky, eigh and
    matrix_exp are right with any number of threads.
    """
    first = matrices[0]
    if first.shape[-1] <= SMALL or first.dim() == 2 or first.device.type != "cpu":
        return function(*matrices)
    batch = torch.broadcast_shapes(*(X.shape[:-2] for X in matrices))
    if batch.numel() < 2:
        return function(*matrices)
    rows = zip(*(X.expand(*batch, *X.shape[-2:]).flatten(0, -3) for X in matrices), strict=True)
    return torch.stack([function(*row) for row in rows]).unflatten(0, batch)


# -- rotations -----------------------------------------------------------------------------------------------


def polar(X: Tensor) -> Tensor:
    """The unitary polar factor of square X; one of several where X is singular."""
    U, _, Vh = torch.linalg.svd(X)
    return U @ Vh


def log_rotation(R: Tensor) -> Tensor:
    """The principal logarithm of rotations or unitary matrices: (..., N, N) -> (..., N, N), skew.

    Angles must be below pi. Square roots sqrt(R) = polar(I + R) are taken until R is near I; then log R =
    2 atanh((R - I)(R + I)^-1). It uses only products and solves, so autograd works even where angles
    coincide.
    """
    I = eye_like(R)
    roots = 0
    # 0.25 makes ||K|| <= 1/7, where the series below ends in K^23/23, far under float64's eps.
    while roots < 12 and largest((R.detach() - I).abs().sum(-1)) > 0.25:
        R = _polar_newton(I + R)
        roots += 1
    K = solve(R + I, R - I)
    K = (K - K.mH) / 2
    K2, term, out = K @ K, K, K
    for j in range(3, 25, 2):
        term = term @ K2
        out = out + term / j
    return out * 2.0 ** (roots + 1)


def _polar_newton(X: Tensor) -> Tensor:
    """The unitary polar factor by Newton's iteration X <- (X + X^-H)/2, quadratic once X is near unitary."""
    for _ in range(60):
        X, last = (X + inverse(X).mH) / 2, X
        if largest((X - last).detach().abs()) <= 8 * torch.finfo(X.dtype).eps:
            break
    # Once more for the second derivative: one step from a unitary X has only the first one of the limit.
    return (X + inverse(X).mH) / 2 if differentiated(X) else X


# -- the exponential -----------------------------------------------------------------------------------------


def phi(X: Tensor) -> Tensor:
    """A(X) = sum_k X^(k-1)/k!, (..., m, m) -> (..., m, m), by scaling and modified squaring.

    exp(X) = I + X A(X). The series is summed at X/2^s, where ||X/2^s||_1 <= 1/2, and brought back with the
    exact W <- 2W + WXW (Algorithm "Evaluation of A(X)" in the paper). Every matrix of a batch has its own s.
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
    # Where s may not be read, 12 doublings: as many as the longest step of an optimizer needs.
    for j in range(int(largest(s)) if may_read(X) and X.numel() > 0 else 12):
        W = double(j, W)
    return W


# -- functions of Hermitian matrices -------------------------------------------------------------------------


def log_positive(T: Tensor) -> Tensor:
    """The logarithm of symmetric positive definite matrices."""
    return symmetric_function(T, lambda t: (t.log(), 1 / t), zero=0.0)


def log_gram(M: Tensor) -> Tensor:
    """log(M M^T) of square M, NaN where M is not finite."""
    return gram_function(M, lambda t: (t.log(), 1 / t), zero=0.0)


def gram_function(M: Tensor, f: Callable[[Tensor], tuple[Tensor, Tensor]], zero: float = 1.0) -> Tensor:
    """f(M M^H), f as in `symmetric_function`, by the singular values of M; NaN where M is not finite.

    The eigenvalues of the computed product would have lost half of the digits.
    """
    # Resolved, because torch.vmap has no rule for the imaginary part of a conjugate.
    bad = ~torch.isfinite(M.detach().resolve_conj()).all(-1).all(-1)[..., None, None]
    # LAPACK would raise, and the rest of the batch would be lost.
    M = torch.where(bad, torch.eye(*M.shape[-2:], dtype=M.dtype, device=M.device), M)
    U, s, _ = torch.linalg.svd(M.detach(), full_matrices=False)
    out = _function(M @ M.mH, s.square().flip(-1), U.flip(-1), f, zero)  # ascending, as from eigh
    return torch.where(bad, torch.nan, out)


def symmetric_function(T: Tensor, f: Callable[[Tensor], tuple[Tensor, Tensor]], zero: float = 1.0) -> Tensor:
    """f(T) of Hermitian T by its eigenvalues t, differentiable twice even where these coincide.

    f returns f(t) and f'(t), and can itself be differentiated. Eigenvalues count as equal where they differ
    by a small part of zero + |t|: zero=0 for functions that are singular at 0, such as log.
    """
    t, V = torch.linalg.eigh(T.detach())
    return _function(T, t, V, f, zero)


def _function(T: Tensor, t: Tensor, V: Tensor, f: Any, zero: float) -> Tensor:
    """f(T) from the eigenvalues t and eigenvectors V, which may be known to more digits than T has."""
    return _apply(_Function, T, t, V, f, zero)


@_compilable
class _Function(torch.autograd.Function):
    """V f(t) V^H, as a function of T = V t V^H alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(T: Tensor, t: Tensor, V: Tensor, f: Any, zero: float) -> Tensor:
        return V @ (f(t)[0].unsqueeze(-1) * V.mH)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.save_for_forward(*inputs[:3])
        ctx.of = inputs[3:]

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor | None, ...]:
        return _derivative(ctx, G), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dT: Tensor, *_: Any) -> Tensor:
        return _derivative(ctx, dT)


def _derivative(ctx: Any, G: Tensor) -> Tensor:
    """The derivative of f(T) along G, which is its own adjoint."""
    T, t, V = ctx.saved_tensors
    return _apply(_Derivative, T, G, t, V, *ctx.of)


@_compilable
class _Derivative(torch.autograd.Function):
    """V (f[t_i, t_j] G_ij) V^H, with G in the basis V, as a function of T and G."""

    generate_vmap_rule = True

    @staticmethod
    def forward(T: Tensor, G: Tensor, t: Tensor, V: Tensor, f: Any, zero: float) -> Tensor:
        return V @ (_first(t, f, zero) * _in_basis(G, V)) @ V.mH

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.save_for_forward(*inputs[:4])
        ctx.of = inputs[4:]

    @staticmethod
    def backward(ctx: Any, H: Tensor) -> tuple[Tensor | None, ...]:
        return *_bend(ctx, H, H), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dT: Tensor | None, dG: Tensor | None, *_: Any) -> Tensor | None:
        bend, along = _bend(ctx, dT, dG)
        return along if bend is None else bend if along is None else bend + along


def _bend(ctx: Any, H: Tensor | None, dG: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The second derivative of f(T) along G and H, and the first along dG; None where there is no direction.

    sum_k f[t_i, t_k, t_j] (G_ik H_kj + H_ik G_kj): f[., ., .] is symmetric in its three arguments.
    """
    T, G, t, V = ctx.saved_tensors
    along = None if dG is None else _apply(_Derivative, T, dG, t, V, *ctx.of)
    if H is None:
        return None, along
    A, B, F = _in_basis(G.detach(), V), _in_basis(H.detach(), V), _second(t, *ctx.of)
    bend = torch.einsum("...ikj,...ik,...kj->...ij", F.to(A.dtype), A, B)
    bend = _apply(_Last, V @ (bend + bend.mH) @ V.mH, T, G, H)
    return bend, along


@_compilable
class _Last(torch.autograd.Function):
    """The identity; raises when differentiated, instead of silently giving a zero third derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(X: Tensor, *of: Tensor) -> Tensor:
        return X.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "functions of symmetric matrices (log, dist, project) are differentiated twice here, not more"
        )

    jvp = backward


def _in_basis(G: Tensor, V: Tensor) -> Tensor:
    """The Hermitian part of V^H G V."""
    G = V.mH @ G @ V
    return (G + G.mH) / 2


def _near(a: Tensor, b: Tensor, zero: float) -> Tensor:
    """Whether eigenvalues are so close that a divided difference of f would be mostly rounding.

    At a distance h its error is eps/h, and that of Simpson's rule in `_first` is h^4.
    """
    return (b - a).abs() <= torch.finfo(a.dtype).eps ** 0.25 * (zero + a.abs())


def _first(t: Tensor, f: Any, zero: float) -> Tensor:
    """f[a, b] = (f(a) - f(b))/(a - b), and the mean of f' between a and b where they nearly coincide."""
    a, b = t.unsqueeze(-1), t.unsqueeze(-2)
    near, (ft, dft) = _near(a, b, zero), f(t)
    # Simpson's rule for the integral of f' from a to b, divided by b - a
    mean = (dft.unsqueeze(-1) + 4 * f((a + b) / 2)[1] + dft.unsqueeze(-2)) / 6
    return torch.where(near, mean, (ft.unsqueeze(-1) - ft.unsqueeze(-2)) / torch.where(near, 1, a - b))


def _slope(f: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """f'(t), entry by entry. (torch.func.grad refuses to work below hooks of saved tensors.)"""
    if within_a_transform():
        return torch.func.grad(lambda t: f(t).sum())(t)
    with torch.enable_grad():
        t = t.detach().requires_grad_()
        return torch.autograd.grad(f(t).sum(), t)[0]


def _second(t: Tensor, f: Any, zero: float) -> Tensor:
    """f[a, b, c] = (f[b, c] - f[a, b])/(c - a), a <= b <= c; f''/2 at their mean where all three coincide."""
    i = torch.arange(t.shape[-1], device=t.device)
    low, middle, high = torch.stack(torch.meshgrid(i, i, i, indexing="ij")).sort(0)[0]  # eigenvalues ascend
    a, b, c, F = t[..., low], t[..., middle], t[..., high], _first(t, f, zero)
    near = _near(a, c, zero)
    bend = _slope(lambda t: f(t)[1], (a + b + c) / 3)
    return torch.where(
        near, bend / 2, (F[..., middle, high] - F[..., low, middle]) / torch.where(near, 1, c - a)
    )
