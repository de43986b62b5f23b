"""`lift(Base)`: a subclass of any torch optimizer that takes weights on homogeneous spaces."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from ghor.lifting.lifted import NAMED, Lifted
from ghor.lifting.matrix_rules import InBlocks
from ghor.lifting.probe import refuse_unless_it_lifts

_lifted: dict[tuple[type[Optimizer], bool, bool], type[Lifted]] = {}


def lift(Base: type[Optimizer], *, stack: bool = True, blocks: bool = False) -> type[Lifted]:
    """A subclass of the optimizer class Base that takes weights on any space (Algorithm 3 of the paper).

    >>> opt = lift(torch.optim.Adam)(model, lr=1e-3)

    Raises ValueError, with the reason, if Base's update does not make sense in g^hor (`ghor.lifting.probe`).
    With `stack=False` weights are computed one by one: slower, but right for rules that take a norm or mean
    of each weight. With `blocks=True` the rule sees the blocks A and B of each weight as matrices: right for
    rules that turn with their matrix, as Muon does.
    """
    if not (isinstance(Base, type) and issubclass(Base, Optimizer)) or Base in (Optimizer, Lifted):
        raise TypeError(f"lift takes a class of torch optimizers, such as torch.optim.Adam, got {Base!r}")
    if issubclass(Base, Lifted):
        in_blocks = Base.blocks or issubclass(Base, NAMED[torch.optim.Muon])
        if (not stack and Base.stack) or (blocks and not in_blocks):
            raise TypeError(
                f"{Base.__name__} is lifted already, and computes with stack={Base.stack}, "
                f"blocks={Base.blocks}; lift {Base.Base.__name__} with other options"
            )
        return Base
    if Base in NAMED and ((stack and not blocks) or Base is torch.optim.Muon):  # Muon always has blocks
        return NAMED[Base]
    made_by = Base, stack and not blocks, blocks
    if made_by not in _lifted:
        parameters = list(inspect.signature(Base.__init__).parameters.values())[2:]
        optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if all(p.default is not p.empty or p.kind in optional for p in parameters):
            refuse_unless_it_lifts(Base, {}, *made_by[1:])
        name, doc = Base.__name__, inspect.getdoc(Base) or ""

        def reduce(self: Lifted) -> Any:
            if type(self) is not _lifted[made_by]:  # a subclass, which pickle finds by its name
                return Lifted.__reduce__(self)
            return _unpickle, made_by, self.__getstate__()

        content = {
            "Base": Base,
            "stack": made_by[1],
            "made_by_lift": True,
            "__doc__": f"{name} on homogeneous spaces: `ghor.lift({name})`.\n\n{doc}",
            "__module__": Base.__module__,
            "__reduce__": reduce,  # pickle cannot find the class by its name
        }
        _lifted[made_by] = type(name, (InBlocks if blocks else Lifted, Base), content)
    return _lifted[made_by]


def _unpickle(Base: type[Optimizer], stack: bool, blocks: bool = False) -> Any:
    cls = lift(Base, stack=stack, blocks=blocks)
    return cls.__new__(cls)
