"""Checks and repairs around Algorithm 3 that read values: outside changes, long steps, rounding.

On the CPU reading a value costs nothing, and everything is checked in every step. On an accelerator a read
waits for the device, so checks are made every `SELDOM` steps, or in a form that reads nothing
(`ghor._torch.values`).
"""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor
from torch.optim import Optimizer

from ghor._torch.values import SELDOM
from ghor.constraints.validation import Warn, check_on_space, kind_of
from ghor.lifting.probe import left_ghor, not_in_ghor
from ghor.lifting.stack import Stack
from ghor.linalg import as_real, wide
from ghor.spaces.sections import POLISH_POINT

_version = operator.attrgetter("_version")

TRUSTED = 3  # first steps of a stack, all checked for velocities off g^hor; of later ones, one in SELDOM


# -- before the step -----------------------------------------------------------------------------------------


def before(s: Stack, warn: Warn) -> None:
    """Deal with changes that others have made to weights and state since the last step.

    A changed weight that is still on its space gets a new section; one that is off it raises an error.
    Called if `Stack.as_left` has found a difference, and in every step for sharded weights.
    """
    for p, name in zip(s.parameters, s.names, strict=True):
        if p.shape != s.given:
            raise ValueError(
                f"{name} had shape {tuple(s.given)} and has {tuple(p.shape)} now, for which the optimizer's "
                "state of it means nothing; build a new optimizer"
            )
    if s.params is not s.parameters:  # sharded
        s.params = s.pieces(s.parameters)
    if s.params[0].numel() == 0:  # this process holds none of their points
        return
    if len(s.parameters) > 1 and tuple(map(_version, s.seen.shared)) != s.seen.shared_versions:
        warn(
            "shared",
            f"a state tensor that {len(s.parameters)} weights share, such as the step count of "
            f"{s.names[0]}, was written in place, which changes all of them. Bind a new tensor to change "
            "one: optimizer.state[p]['step'] = ...",
        )
    versions, then = tuple(map(_version, s.parameters)), s.seen.expected
    touched = versions != s.seen.versions
    if not touched and (then is None or not (s.free or s.age % SELDOM == 0)):
        return
    now = s.W if then is None else s.reading()
    if then is not None and not touched and torch.equal(now, then):
        return
    written = torch.tensor(
        [a != b for a, b in zip(versions, s.seen.versions, strict=True)], device=s.W.device
    )
    changed = written
    if then is not None:
        changed = now.ne(then).flatten(1).any(1)
        changed = changed if s.half else s.any_of_weight(changed)
    # Writing the same values once more is the way to reset moments that are not finite.
    changed = changed | (written & ~_finite(s))
    if bool(changed.any()):
        _start_again(s, changed, warn)
    s.seen.versions, s.seen.expected = versions, s.expected()


def _finite(s: Stack) -> Tensor:
    """Which weights have finite moments: (P)."""
    ok = torch.ones(len(s.params), dtype=torch.bool, device=s.H.device)
    for value in s.moments():
        ok &= torch.isfinite(value).flatten(1).all(1)
    return ok


def _start_again(s: Stack, changed: Tensor, warn: Warn) -> None:
    """Build new sections for the changed weights where they are now; raise if one is off the space."""
    some = changed.nonzero().flatten().tolist()
    check_on_space([s.parameters[i] for i in some], s.space, [s.names[i] for i in some], warn)
    rows = changed.repeat_interleave(math.prod(s.batch[1:])).nonzero().flatten()
    s.section.rebuild(rows, s.exact(s.weights()[changed]))
    broken = ~_finite(s) & changed
    for value in s.moments():
        value[broken] = 0
    others = f" and {len(some) - 1} other weights" if len(some) > 1 else ""
    lost = int(broken.sum())
    reset = f" (the moments of {lost} were not finite and start from zero)" if lost else ""
    rounded = ". (Or a loaded section was rounded: it is repaired, and put where the weight is)"
    warn(
        "changed",
        f"{s.names[some[0]]}{others} changed outside the optimizer, within {s.space}: the section was "
        f"rebuilt, moments were kept{reset}{rounded if s.loaded else ''}",
    )


# -- in the middle -------------------------------------------------------------------------------------------


def check_velocity(s: Stack, Base: type[Optimizer]) -> None:
    """Raise if a rule has turned B into something that is not in g^hor.

    No weight on a manifold has moved yet, but the moments have, and Euclidean weights.
    """
    if (s.age >= TRUSTED and s.age % SELDOM) or not s.W.numel():
        return
    W, projected = s.W, s.space.one.hor(s.W)
    out = not_in_ghor(W, projected, s.space.dims)
    if bool(out.any()):
        i = int(out.flatten().nonzero()[0])
        raise left_ghor(Base, s.name_of_point(i), s.space, W[i], projected[i])


# -- after the step ------------------------------------------------------------------------------------------


def after(s: Stack, length: Tensor, warn: Warn) -> None:
    """Take deferred long steps in float64; re-orthonormalise when due, and at once after long steps."""
    peak, some = s.longest, length.numel() > 0
    if peak is None:
        peak = float(length.max()) if s.free and some else 0.0
    # Processes that hold none of these points count steps, too: all must agree on the age.
    if peak != 0 or not s.free or not some:
        s.age += 1
        s.moves += 1
        if some:
            _repair(s, length, peak, warn)
    s.in_motion = s.loaded = False
    if s.half or not s.section.holds_point:
        s.seen.expected = s.expected() if some and (s.free or s.age % SELDOM == 0) else None


def _repair(s: Stack, length: Tensor, peak: float, warn: Warn) -> None:
    deferred = None if peak <= s.limit else _deferred(s, length, warn)
    at_once = not peak <= s.large and bool(((length > s.large) & (length <= s.limit)).any())
    # An implicit section may be ill-conditioned, and where values may not be read we cannot tell.
    blind = not s.free and not s.section.holds_point
    if at_once or blind or deferred is not None or s.age % POLISH_POINT == 0:
        Y = s.section.point(s.held_by_weights())
        s.section.polish(Y, s.age, (length > 0).to(Y.dtype), at_once)
        if deferred is not None:
            s.section.update_far(Y, *deferred, s.retraction, s.turning())
        s.write_weights(Y, length)
        if not s.space.compact and (s.free or s.age % SELDOM == 0):
            _warn_if_outgrown(s, warn)


def _warn_if_outgrown(s: Stack, warn: Warn) -> None:
    Lambda = s.section.tensors().get("section")
    large = None if Lambda is None else s.space.outgrown(Lambda)
    if Lambda is not None and large is not None and bool(large.any()):
        i = int(large.nonzero()[0])
        size = float(torch.linalg.vector_norm(Lambda[i]))
        wider = "" if Lambda.dtype in (torch.float64, torch.complex128) else ", or use a wider dtype"
        warn(
            "outgrown",
            f"{s.name_of_point(i)} has grown until {kind_of(Lambda.dtype)} has no more digits for it (a "
            f"section of norm {size:.0f} on {s.space}): steps that would take it further are shortened. "
            f"Lower the learning rate{wider}",
        )


def _deferred(s: Stack, length: Tensor, warn: Warn) -> tuple[Tensor, Tensor] | None:
    """The finite velocities above the limit, as rows and values in float64; the weights of others stay."""
    W, longest = s.W, s.space.max_velocity
    left = ~(length <= s.limit)
    if bool(torch.isnan(W).any()):
        # 0/0 in a coordinate that is structurally 0, as Adam with eps = 0 makes it, counts as 0. These are
        # the entries in which the projection of 1, 2, 3, ... is 0: all distinct, so no difference cancels.
        ones = torch.ones_like(as_real(W[0])).flatten().cumsum(0).view(as_real(W[0]).shape)
        ones = torch.view_as_complex(ones) if W.is_complex() else ones
        as_real(W).masked_fill_(as_real(s.space.one.hor(ones)) == 0, 0)
        length.copy_(s.step_length(W))
    finite = torch.isfinite(W).flatten(1).all(1)
    if not bool(finite.all()):
        length[~finite] = 0
        warn(
            "nonfinite",
            f"the velocity of {s.name_of_point(int((~finite).nonzero()[0]))} is not finite (a NaN or "
            "infinite gradient?): the weight stays where it is, but its moments are lost. Load a state dict, "
            "or constrain the weight again, which sets them to zero",
        )
    rows = (finite & left & (length > 0)).nonzero().flatten()
    if len(rows) == 0:
        return None
    V = wide(W[rows])
    # Scaled by the largest entry, because the square of 1e200 overflows even in float64.
    largest = s.each(V.abs().flatten(1).amax(1))
    norm = largest * s.each(s.angular.step_length(V / largest))
    norm = norm / s.each(s.section.radius()[rows]) if s.of_radius else norm
    if bool((norm > longest).any()):
        warn(
            "long",
            f"a velocity of length {float(norm.max()):.1e} of {s.name_of_point(int(rows[norm.argmax()]))} "
            f"was clipped to {longest:.0e}; is the learning rate intentional?",
        )
    return rows, V * (longest / norm).clamp_max(1)
