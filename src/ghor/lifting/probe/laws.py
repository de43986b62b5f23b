"""The laws a rule must keep to be lifted, each tried on numbers.

g^hor is stored by its first columns [A; B] of the full matrix [[A, -B*], [B, 0]], A = -A*; a rule sees a
shadow that is 0 before every step, of many weights at once. What it then does must be what it does elsewhere:

    moves         the shadow, and no other tensor
    mixes         velocity(P g) = P velocity(g), P a permutation with signs: elementwise and odd, up to norms
    shift-free    the same from the weight 0, put back to 0 after every step, as from a weight that goes on
    full matrix   of a stack, for each weight, the first columns of what the rule does to its full N x N matrix alone
    states        of a stack, for each weight, the state that it would have alone
    by itself     of one weight with its own shadow, what it is without the others; and W stays in g^hor
    turns         velocity(O X P) = O velocity(X) P for the blocks A and B: a second class of rules, not elementwise

The gradients keep their signs and, where the weight matters, are orthogonal to it row by row: step-size
estimates show themselves in the former case after some dozen steps, and some rules look at the weight only in
the latter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ghor.lifting.probe.trial import (
    ENTRIES,
    SIDE,
    Case,
    Differs,
    Trial,
    compare,
    faint_decay,
    gradients,
    point,
    same_numbers,
    same_state,
    shadow,
)
from ghor.spaces import Space

NOT_ELEMENTWISE = "its update is not odd and elementwise in the gradient, so it does not keep g^hor"
DEPENDS = "its update depends on the value of the weight, or keeps a copy of it, and in g^hor the weight is 0"
NOT_FINITE = "its velocity from the weight 0 is not finite"
STILL = "it does not move a weight that is 0, as weights are in g^hor before every step"
OWN_LIST = "it moves tensors of a list of its own, not those in its param_groups, where the lift puts g^hor"
NORMS = "its update takes a norm or mean over the whole tensor, and weights of one shape are computed as one tensor"
ANOTHER = "on weights of one shape, computed as one tensor with one dimension more, it is another rule than on each of them"
STATES = (
    "it keeps state that cannot be told apart by weights, and weights of one shape are computed as one tensor"
)
DECAYED = "its weight decay changes the velocity, not the weight alone; give these weights a group with weight_decay=0"
NOT_TURNING = (
    "its update does not turn with the gradient, velocity(O B) = O velocity(B), so it depends on the section"
)
GROUPED = "its update of a weight depends on the other weights, beside which it may not be in g^hor"


# -- laws: each gives the reason why it is broken, or None -------------------------------------------------


def _as_it_runs(case: Case) -> Trial:
    """A trial of the whole stack, or of one weight with its own shadow."""
    if not case.stack:
        return Trial(case, [shadow(case)], [shadow(case)])
    return Trial(case, [shadow(case)] * case.count, [shadow(case, case.count)])


def moves(case: Case) -> str | None:
    """The shadow moves, by finite numbers, and nothing else does."""
    case = case.within(16, 512)
    trial, moved = _as_it_runs(case), False
    for p in trial.weights:  # in the lift the weights have gradients, too
        p.grad = torch.ones_like(p)
    for g in gradients(case, (case.count,) if case.stack else (), 12):
        (V,) = trial.step(g)
        if not bool(torch.isfinite(V).all()):
            return NOT_FINITE
        moved |= bool(V.any())
        if any(bool(p.any()) for p in trial.weights):
            return OWN_LIST
    return None if moved else STILL


def mixes(case: Case) -> str | None:
    """velocity(P g) = P velocity(g), P a permutation with signs of all entries: of few, then at the size it
    runs at."""
    return _mixes(case.within(16, 512)) or _mixes(case.within(4096, ENTRIES))


def _mixes(case: Case) -> str | None:
    H = shadow(case, case.count) if case.stack else shadow(case)
    generator = torch.Generator().manual_seed(1)
    perm = torch.randperm(H.numel(), generator=generator).to(case.device)
    signs = torch.where(torch.rand(H.numel(), generator=generator) < 0.5, -1.0, 1.0).to(
        case.device, case.dtype
    )

    def mix(x: Tensor) -> Tensor:
        return (x.flatten()[perm] * signs).view(x.shape)

    plain, mixed, scale = _as_it_runs(case), _as_it_runs(case), 0.0

    def step(g: Tensor) -> None:
        nonlocal scale
        (V,), (U,) = plain.step(g), mixed.step(mix(g))
        scale = compare(mix(V), U, scale)

    lead = (case.count,) if case.stack else ()
    try:
        for g in gradients(case, lead, 12):
            step(g)
        _late(step, gradients(case, lead, 3), [plain, mixed])
    except Differs:
        return NOT_ELEMENTWISE
    return None


def shift_free(case: Case) -> str | None:
    """From the weight 0 as from any other. Weight decay of 0 is 0: beside it, it must not change the rule."""
    reason, faint = _shift_free(case, case.options), faint_decay(case.Base, case.options)
    if reason is None or faint == case.options or _shift_free(case, faint) is not None:
        return reason
    return DECAYED


def _shift_free(case: Case, options: dict[str, Any]) -> str | None:
    """As above, with other options for the weight 0."""
    case = case.within(SIDE, 4096)
    first = Trial(case, [shadow(case)], [shadow(case)])
    size = max(float(first.step(g)[0].abs().max()) for g in gradients(case, (), 8))
    plain = Trial(case, [shadow(case)], [shadow(case)], options)
    # a velocity that is lost in the digits of the weight would say nothing
    shifted = Trial(case, [point(case) * min(1.0, 100 * size)], options=faint_decay(case.Base, case.options))
    (Y,), scale, largest = shifted.params, 0.0, 0.0
    for g in gradients(case, ()):
        g = _nearly_orthogonal(g, Y.detach())
        (V,), (U,) = plain.step(g), shifted.step(g)
        largest = max(largest, float(Y.detach().abs().max()))
        try:
            scale = compare(V, U, scale, noise=8 * torch.finfo(torch.float32).eps * largest)
        except Differs:
            return DEPENDS
    return None


def _nearly_orthogonal(g: Tensor, Y: Tensor) -> Tensor:
    """g with rows at almost 90 degrees to those of the weight: some rules look at the weight only then."""
    rows = Y / torch.linalg.vector_norm(Y, dim=-1, keepdim=True).clamp_min(1e-30)
    G = g - (g * rows).sum(-1, keepdim=True) * rows
    return G + 0.02 / g.shape[-1] ** 0.5 * torch.linalg.vector_norm(G, dim=-1, keepdim=True) * rows


def full_matrix(case: Case) -> str | None:
    """Two weights of a stack, each against the rule on its full matrix alone; the first also against itself
    alone."""
    case = case.within(SIDE, 2**14)
    last, whole = case.count - 1, full(case.space, shadow(case))
    stack, single = _as_it_runs(case), Trial(case, [shadow(case)], [shadow(case)])
    wholes = [Trial(case, [whole], [whole]) for _ in range(2)]
    scales = [0.0, 0.0]

    def step(g: Tensor) -> None:
        g[last] *= 10
        g = hor(case.space, g)
        V, one = _tidy(stack.step(g)[0], g == 0), _tidy(single.step(g[0])[0], g[0] == 0)
        for k, i in enumerate((0, last)):
            W = _first_columns(case, wholes[k], g[i])
            scales[k] = compare(V[i], W, scales[k])
            if k == 0:
                compare(one, W, scales[k])
        if bool(not_in_ghor(V, hor(case.space, V)).any()):
            raise Differs

    try:
        for g in gradients(case, (case.count,)):
            step(g)
        same = same_state(stack, single)
        _late(step, gradients(case, (case.count,), 3), [stack, single, *wholes])
    except Differs:
        return ANOTHER if mixes(replace(case, stack=False)) else NORMS
    return None if same else STATES


def _first_columns(case: Case, trial: Trial, g: Tensor) -> Tensor:
    """W = F E, F the velocity of the full matrix, which must be that of W."""
    G = full(case.space, g)
    F = _tidy(trial.step(G)[0], G == 0)
    W = case.space.unmatrix(F[..., : case.space.size(case.shape)[1]], case.shape)
    compare(F, full(case.space, W), 0.0)
    return W


def _late(step: Callable[[Tensor], None], later: Iterator[Tensor], trials: list[Trial]) -> None:
    """Some steps more, much later. A rule that cannot be taken there says nothing."""
    try:
        for trial in trials:
            trial.jump()
        for g in later:
            step(g)
    except Differs:
        raise
    except Exception:
        return


def by_itself(case: Case) -> str | None:
    """Two weights of a group, each with its own shadow, against each alone; velocities stay in g^hor."""
    case = case.within(SIDE, 4096)
    both = Trial(case, [shadow(case)] * 2, [shadow(case)] * 2)
    alone = [Trial(case, [shadow(case)], [shadow(case)]) for _ in range(2)]
    scales = [0.0, 0.0]
    for g in gradients(case, (2,)):
        g[1] *= 10
        g = hor(case.space, g)
        for i, V in enumerate(both.step(*g)):
            W = _tidy(V, g[i] == 0)
            if bool(not_in_ghor(W, hor(case.space, W)).any()):
                return NOT_ELEMENTWISE
            try:
                scales[i] = compare(W, _tidy(alone[i].step(g[i])[0], g[i] == 0), scales[i])
            except Differs:
                return GROUPED
    return None if same_numbers(both.learned(), alone[0].learned()) else GROUPED


def turns(case: Case) -> str | None:
    """velocity(O X P) = O velocity(X) P, O and P rotations, for the blocks X = A and B alone; of A its skew
    part.

    To a tenth: such rules orthogonalise in bfloat16, and those that do not turn are off by as much as they
    move. What they make of the kernel of a skew A with an odd side is noise, but symmetric, and the lift
    leaves it out.
    """
    case = case.within(SIDE, 4096)
    N, n = case.space.size(case.shape)
    generator = torch.Generator().manual_seed(3)

    def rotation(k: int) -> Tensor:
        X = torch.randn(k, k, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(X)[0].to(case.device, case.dtype)

    for rows, skew in ((n, True), (N - n, False)) if N > n else ((n, True),):
        zero = torch.zeros(rows, n, dtype=case.dtype, device=case.device)
        plain, turned = Trial(case, [zero], [zero]), Trial(case, [zero], [zero])
        O, scale = rotation(rows), 0.0
        P = O.mT if skew else rotation(n)
        for g in gradients(replace(case, shape=(rows, n)), (), 12):
            X = g - g.mT if skew else g
            (V,), (U,) = plain.step(X), turned.step(O @ X @ P)
            V, U = (Z - Z.mT if skew else Z for Z in (V, U))
            try:
                scale = compare(O @ V @ P, U, scale, tol=0.1)
            except Differs:
                return NOT_TURNING
        if scale == 0 or not math.isfinite(scale):
            return STILL if scale == 0 else NOT_FINITE
    return None


def _tidy(V: Tensor, zero: Tensor) -> Tensor:
    """0/0 where a coordinate is 0 by its structure, as Adam has it with eps = 0, is 0."""
    return torch.where(zero & torch.isnan(V), 0, V)


# -- g^hor -------------------------------------------------------------------------------------------------


def hor(space: Space, X: Tensor) -> Tensor:
    """X brought to g^hor: its block A made skew (or 0, on Grassmann), B as it is; in the layout of X."""
    M = space.matrix(X)
    n = M.shape[-1]
    return space.unmatrix(torch.cat([space.skew(M[..., :n, :]) / 2, M[..., n:, :]], -2), X.shape)


def full(space: Space, W: Tensor) -> Tensor:
    """The N x N matrix [[A, -B*], [B, 0]] of W = [A; B]."""
    return space.algebra(space.matrix(W))


def not_in_ghor(W: Tensor, projected: Tensor) -> Tensor:
    """Of velocities (..., N, n), which differ from themselves brought to g^hor, max |W - projected| > 16 eps
    max |W|.

    (...), without reading a value. What is not finite counts as in: others take care of that.
    """
    dims = tuple(range(-min(2, W.dim()), 0))
    off, size = (W - projected).abs().amax(dims), W.abs().amax(dims)
    return off > 16 * torch.finfo(W.dtype).eps * size


# Laws by class of rule; the last is for rules that are given A and B as parameters of their own
# (`ghor.blocks`).
LAWS: dict[str, tuple[Callable[[Case], str | None], ...]] = {
    "elementwise": (moves, mixes, shift_free, full_matrix),
    "one by one": (moves, mixes, shift_free, by_itself),
    "equivariant": (moves, turns, shift_free),
}
