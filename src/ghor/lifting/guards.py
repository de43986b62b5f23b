"""What looks at numbers, before and after the lines of Algorithm 3: changes from outside, long steps,
rounding.

On the CPU reading a value is free, and all of it happens at once. Elsewhere it happens every `SELDOM` steps,
or without reading (`ghor.reads`).
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from ghor._torch.values import SELDOM
from ghor.constraints.registry import declared_space
from ghor.constraints.validation import Warn, check_on_space, kind_of
from ghor.lifting.probe import left_ghor, not_in_ghor
from ghor.linalg import as_real, wide
from ghor.spaces.sections import POLISH_POINT

if TYPE_CHECKING:
    from ghor.lifting.stack import Stack

_version = operator.attrgetter("_version")

TRUSTED = 3  # steps of a new stack whose velocities are checked to lie in g^hor, then one in SELDOM


# -- before ------------------------------------------------------------------------------------------------------------


def before(s: Stack, warn: Warn) -> None:
    """Notice what others have written to weights and state since the last step.

    A weight that is still on its space gets its section rebuilt; one that is off raises. torch's version
    counters tell of most writes. Those through `.data` escape them and are found by comparing with what was
    left there: at once on the CPU, every `SELDOM` steps elsewhere.
    """
    if s.params is not s.owners:  # sharded
        s.params = s.pieces(s.owners)
    if s.params[0].numel() == 0:  # no point of theirs is on this process
        return
    if len(s.owners) > 1 and tuple(map(_version, s.seen.shared)) != s.seen.shared_versions:
        warn(
            "shared",
            f"a state tensor that {len(s.owners)} weights share, such as the step count of {s.names[0]}, was written "
            "in place, which changes all of them. Bind a new tensor to change one: optimizer.state[p]['step'] = ...",
        )
    versions, then = tuple(map(_version, s.owners)), s.seen.expected
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
    changed = changed | (written & ~_finite(s))  # the same values written again: "start again", after a NaN
    if bool(changed.any()):
        _start_again(s, changed, warn)
    s.seen = replace(s.seen, versions=versions, expected=expected(s))


def expected(s: Stack) -> Tensor:
    """What `Stack.reading` is to give before the next step, now that the weights are what they should be."""
    if s.section.holds_point and not s.half:
        return s.section.point(None)
    return s.weights().clone() if s.half else s.reading()


def expected_of_loaded(s: Stack) -> Tensor:
    """The same where the section comes from a file: half precision weights may be anywhere near its point."""
    if not s.half or not s.params[0].numel():
        return expected(s)
    weights, Y = s.weights(), s.section.point(None)
    near = (s.exact(weights) - Y).abs().flatten(1).amax(1) <= 1e-5
    near = ~s.any_of_weight(~near).view(-1, *[1] * len(s.shape))
    return torch.where(near, weights, Y.reshape(weights.shape).to(s.where[0]))


def _finite(s: Stack) -> Tensor:
    ok = torch.ones(len(s.params), dtype=torch.bool, device=s.H.device)
    for value in s.moments():
        ok &= torch.isfinite(value).flatten(1).all(1)
    return ok


def _start_again(s: Stack, changed: Tensor, warn: Warn) -> None:
    """Sections of some weights from where they are; raise if that is not on the space."""
    some = changed.nonzero().flatten().tolist()
    for i in some:
        declared = declared_space(s.owners[i])
        if declared is not None and declared != s.space:
            raise ValueError(
                f"{s.names[i]} was constrained to {declared} after this optimizer took it on {s.space}; build a new "
                "optimizer"
            )
    check_on_space([s.owners[i] for i in some], s.space, [s.names[i] for i in some], warn)
    rows = changed.repeat_interleave(math.prod(s.batch[1:])).nonzero().flatten()
    s.section.rebuild(rows, s.exact(s.weights()[changed]))
    broken = ~_finite(s) & changed
    for value in s.moments():
        value[broken] = 0
    others = f" and {len(some) - 1} other weights" if len(some) > 1 else ""
    lost = (
        f" ({int(broken.sum())} with moments that were not finite start from zero)"
        if bool(broken.any())
        else ""
    )
    warn(
        "changed",
        f"{s.names[some[0]]}{others} changed outside the optimizer, within {s.space}: the section was rebuilt, moments "
        f"were kept{lost}",
    )


# -- in the middle ----------------------------------------------------------------------------------------------------


def check_velocity(s: Stack, Base: type[Optimizer]) -> None:
    """Raise if what a rule has made of B is not in g^hor; nothing has moved yet."""
    if (s.age >= TRUSTED and s.age % SELDOM) or not s.W.numel():
        return
    W, projected = s.W, s.space.one.hor(s.W)
    out = not_in_ghor(W, projected)
    if bool(out.any()):
        i = int(out.flatten().nonzero()[0])
        raise left_ghor(Base, s.name_of_point(i), s.space, W[i], projected[i])


# -- after -------------------------------------------------------------------------------------------------------------


def after(s: Stack, length: Tensor, warn: Warn) -> None:
    """Take deferred long steps in float64; re-orthonormalise when due, and at once after long steps."""
    peak = float(length.max()) if s.free and len(length) else 0.0
    if peak != 0 or not s.free or not len(length):  # without a point here, as on the processes that have one
        s.age += 1
        s.moves += 1
        if len(length):
            _repair(s, length, peak, warn)
    s.in_motion = False
    if s.half or not s.section.holds_point:
        known = (s.free or s.age % SELDOM == 0) and len(length)
        s.seen = replace(s.seen, expected=expected(s) if known else None)


def _repair(s: Stack, length: Tensor, peak: float, warn: Warn) -> None:
    deferred = None if peak <= s.limit else _deferred(s, length, warn)
    at_once = not peak <= s.large and bool(((length > s.large) & (length <= s.limit)).any())
    blind = not s.free and not s.section.holds_point  # an anchor may be worn, and it is not known whether
    if at_once or blind or deferred is not None or s.age % POLISH_POINT == 0:
        Y = s.section.point(s.held_by_weights())
        s.section.polish(Y, s.age, (length > 0).to(Y.dtype), at_once)
        if deferred is not None:
            s.section.update_far(Y, *deferred, s.retraction, s.turning())
        s.apply_section(Y, length)
        if not s.space.compact and (s.free or s.age % SELDOM == 0):
            _say_if_outgrown(s, warn)


def _say_if_outgrown(s: Stack, warn: Warn) -> None:
    Lambda = s.section.tensors().get("section")
    large = None if Lambda is None else s.space.outgrown(Lambda)
    if Lambda is not None and large is not None and bool(large.any()):
        i = int(large.nonzero()[0])
        size = float(torch.linalg.vector_norm(Lambda[i]))
        warn(
            "outgrown",
            f"{s.name_of_point(i)} has grown until {kind_of(Lambda.dtype)} has no more digits for it (a section of "
            f"norm {size:.0f} on {s.space}): steps that would take it further are shortened. Lower the learning rate, "
            "or use a wider dtype",
        )


def _deferred(s: Stack, length: Tensor, warn: Warn) -> tuple[Tensor, Tensor] | None:
    """Of velocities that are long or not finite, the rows and values of those to be taken, in float64."""
    W, longest = s.W, s.space.max_velocity
    left = ~(length <= s.limit)
    if bool(
        torch.isnan(W).any()
    ):  # 0/0 where a coordinate is 0 by its structure, as Adam has it with eps = 0, is 0
        ones = torch.ones_like(as_real(W[0])).flatten().cumsum(0).view(as_real(W[0]).shape)
        ones = torch.view_as_complex(ones) if W.is_complex() else ones
        as_real(W).masked_fill_(as_real(s.space.one.hor(ones)) == 0, 0)
        length.copy_(torch.linalg.vector_norm(W, dim=tuple(range(1, W.dim()))))
    finite = torch.isfinite(W).flatten(1).all(1)
    if not bool(finite.all()):
        length[~finite] = 0
        warn(
            "nonfinite",
            f"the velocity of {s.name_of_point(int((~finite).nonzero()[0]))} is not finite (a NaN or infinite "
            "gradient?): the weight stays where it is, its moments are lost. Load a state dict, or constrain the "
            "weight again: they then start from zero",
        )
    rows = (finite & left & (length > 0)).nonzero().flatten()
    if len(rows) == 0:
        return None
    V = wide(W[rows])
    largest = s.each(V.abs().flatten(1).amax(1))
    norm = largest * s.each(torch.linalg.vector_norm((V / largest).flatten(1), dim=1))
    if bool((norm > longest).any()):
        warn(
            "long",
            f"a velocity of length {float(norm.max()):.1e} of {s.name_of_point(int(rows[0]))} was clipped to "
            f"{longest:.0e}; is the learning rate intentional?",
        )
    return rows, V * (longest / norm).clamp_max(1)
