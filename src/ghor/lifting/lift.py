"""`lift(Base)`: a class that takes weights on homogeneous spaces, and steps as the torch optimizer Base."""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from ghor._torch.precision import full_precision
from ghor.lifting.holder import Holder
from ghor.lifting.lifted import Lifted

HANDED_ON = ("train", "eval")  # methods of schedule-free rules, which training loops look for

# The lifted classes of `ghor.optim`, by their base; `ghor.optim` fills this.
NAMED: dict[type[Optimizer], type[Holder]] = {}
_lifted: dict[type[Optimizer], type[Lifted]] = {}


def lift(Base: type[Optimizer]) -> type[Holder]:
    """A class of optimizers for weights on any space, which step in g^hor as Base does (Algorithm 3).

    >>> opt = lift(torch.optim.Adam)(model, lr=1e-3)
    """
    if not (isinstance(Base, type) and issubclass(Base, Optimizer)) or Base in (Optimizer, Holder, Lifted):
        raise TypeError(f"lift takes a class of torch optimizers, such as torch.optim.Adam, got {Base!r}")
    if issubclass(Base, Holder):
        return Base
    if Base in NAMED:
        return NAMED[Base]
    if Base not in _lifted:
        name, doc = Base.__name__, inspect.getdoc(Base) or ""
        content = {
            "Base": Base,
            "__doc__": f"{name} on homogeneous spaces: `ghor.lift({name})`.\n\n{doc}",
            "__module__": Base.__module__,
            "__reduce__": _reduce,
        }
        methods = {method: handed_on(method) for method in HANDED_ON if hasattr(Base, method)}
        _lifted[Base] = type(name, (Lifted,), content | methods)
    return _lifted[Base]


def _reduce(self: Lifted) -> Any:
    """Pickle does not find the class by its name, which is Base's; a class derived from it is found."""
    if type(self) is not _lifted.get(self.Base):
        return copyreg.__newobj__, (type(self),), self.__getstate__()  # type: ignore[attr-defined]
    return _unpickle, (self.Base,), self.__getstate__()


def _unpickle(Base: type[Optimizer]) -> Any:
    cls = lift(Base)
    return cls.__new__(cls)


def handed_on(name: str) -> Callable[..., Any]:
    """A method of Base that moves weights: Euclidean ones as there, others by a step to where H goes."""

    @torch.no_grad()
    def method(self: Lifted, *args: Any, **kwargs: Any) -> Any:
        with full_precision():
            moving = self._ready(lambda p: self.state.get(p, {}).get("developed"))
            self._lend(moving)
            for b in moving:
                b.follow()
                b.in_motion = True
                assert b.developed is not None
                b.H.copy_(b.developed)
            out = getattr(self.inner, name)(*args, **kwargs)
            self._take_back(moving)
            for b in moving:
                b.limit(b.developed)
                b.push(b.H, b.state)
                b.scatter()
                b.publish(self.state)
                b.left.remember()
                b.in_motion = False
        return out

    method.__name__ = name
    return method
