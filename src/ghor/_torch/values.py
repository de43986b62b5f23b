"""Whether the values of a tensor may be read: on an accelerator a read waits for the device.

Reading is free on the CPU and nowhere else. So whatever in a step depends on values (long velocities, worn
anchors, changes from outside) happens at once on the CPU, and elsewhere without reading, or every `SELDOM`
steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

SELDOM = 100  # steps between two reads where they are not free

_forbidden = False


def may_read(t: Tensor) -> bool:
    """Whether reading a value of t costs nothing."""
    return t.device.type == "cpu" and not _forbidden


@contextmanager
def as_on_an_accelerator() -> Iterator[None]:
    """A context in which no value may be read: tests run an accelerator's branches on the CPU."""
    global _forbidden
    before, _forbidden = _forbidden, True
    try:
        yield
    finally:
        _forbidden = before
