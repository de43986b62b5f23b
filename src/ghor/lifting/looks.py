"""What is reported of a batch: what happened since the last look, and what others have written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ghor.spaces.messages import no_digits

if TYPE_CHECKING:
    from ghor.lifting.batch import Batch
    from ghor.lifting.members import Members


def look(b: Batch) -> None:
    """Report what happened since the last look; the one place of a step that reads a value everywhere."""
    frame = b.frame
    y = frame.point() if b.written is None else None  # what was read from weights may be off
    off, held = b.lost if y is None else b.at.off(y), b.lost if frame.held is None else frame.held
    seen = [x.to(b.peak) for x in (b.peak.amax(), b.lost, off.any(), held.any())]
    peak, lost, any_off, any_held = torch.stack(seen).tolist()
    if not peak <= frame.longest:
        say_long(b)
    if lost:
        b.warn(
            "lost",
            f"{b.names[0]} or one of its kind was written through .data, which is not counted on this "
            "device: the write was lost; write under torch.no_grad() instead",
        )
    if frame.held is not None and any_held:
        b.warn("digits", no_digits(cast(Any, b.space), b.at.eps))
        frame.held.zero_()
    if y is not None and any_off:
        name = _name_of(b, off)
        b.warn("off", f"{name} is not on {b.space}, as after a write through .data: it was projected")
        frame.put(off, b.space.geometry.nearest(y[off]))
        b.scatter()
    b.peak.zero_(), b.lost.zero_()


def say_long(b: Batch) -> None:
    """Report velocities that were not finite, or too long."""
    longest, bad = b.frame.longest, ~(b.peak < torch.inf)
    if bool(bad.any()):
        b.warn(
            "nonfinite",
            f"the velocity of {_name_of(b, bad)} is not finite (a NaN or infinite gradient?): the weight "
            "stays where it is, but its moments are lost. Load a state dict, or constrain the weight again, "
            "which sets them to zero",
        )
    long = (b.peak > longest) & ~bad
    if bool(long.any()):
        most = float(b.peak[long].max())
        b.warn(
            "long",
            f"a velocity of length {most:.1e} of {_name_of(b, long)} was clipped to {longest:.1g}; is the "
            "learning rate intentional?",
        )


def say_changed(at: Members, changed: Sequence[bool]) -> None:
    """Say which weights others have written."""
    names = [name for name, there in zip(at.names, changed, strict=True) if there]
    others = f" and {len(names) - 1} other weights" if len(names) > 1 else ""
    if names:
        at.warn(
            "changed",
            f"{names[0]}{others} changed outside the optimizer, within {at.space}: the section was rebuilt, "
            "moments were kept",
        )


def _name_of(b: Batch, mask: Tensor) -> str:
    """The name of the first weight with a point that is marked."""
    return b.names[b.at.of_weights(mask).index(True)]
