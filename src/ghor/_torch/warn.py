"""Deferred warnings: given once each, attributed to the caller, after the call has succeeded."""

from __future__ import annotations

import sys
import warnings


class Warnings:
    """Collects warnings until `flush`, at most one of each kind."""

    def __init__(self) -> None:
        self.said: set[str] = set()
        self.pending: list[str] = []

    def __call__(self, kind: str, message: str) -> None:
        """Give this warning with the next `flush`, unless one of its kind came before."""
        if kind not in self.said:
            self.said.add(kind)
            self.pending.append(message)

    def flush(self) -> None:
        """Give the pending warnings, attributed to the first frame outside torch and ghor."""
        pending, self.pending = self.pending, []
        level, frame = 1, sys._getframe()
        while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "ghor"):
            level, frame = level + 1, frame.f_back
        for message in pending:
            warnings.warn(message, stacklevel=level)
