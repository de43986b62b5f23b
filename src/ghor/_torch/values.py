"""May the values of a tensor be read? On an accelerator that would wait for the device.

Reading is free on the CPU and nowhere else. What the step does about values (long velocities, worn anchors,
changes from outside) it therefore does at once on the CPU, and elsewhere without reading, or every `SELDOM`
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
    """Within, no tensor may be read: the CPU takes the branches of an accelerator, so that tests can run
    them."""
    global _forbidden
    before, _forbidden = _forbidden, True
    try:
        yield
    finally:
        _forbidden = before
