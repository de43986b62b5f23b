"""Memory of temporaries: torch keeps none on a CPU, and page faults take longer than the arithmetic."""

from __future__ import annotations

from functools import cache

import torch


@cache
def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed tensors up to 31 MiB, as it does once one of that size was freed.

    It takes blocks from its heap up to the size of the largest one that was freed, 32 MiB at most, and larger
    ones from the system, to which it returns them. Training frees large gradients, which has the same effect.
    """
    torch.empty(31 << 20, dtype=torch.uint8)  # freed here, and no page of it was touched
