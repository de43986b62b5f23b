"""Rules of matrices, the second class that lifts: they see the blocks A and B of g^hor as parameters of their
own.

A rule that turns with its matrix, velocity(O X P) = O velocity(X) P for rotations O and P, takes skew blocks
to skew ones and does not depend on the section. It is given each block of each weight as a matrix, a view of
the shadow. Of its state, tensors of the block's shape are kept in the weight's shape, as key; all else under
key.0, key.1, by block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ghor.lifting.lifted import Lifted
from ghor.lifting.probe import options_of, parity
from ghor.lifting.stack import Stack


class InBlocks(Lifted):
    """What optimizers share that `lift(Base, blocks=True)` makes."""

    stack = False
    blocks = True

    def turning_keys(self, group: dict[str, Any]) -> set[str]:
        """Momentum turns with the frame; a rule that keeps anything else but numbers needs a transported
        one."""
        return set(parity(self.Base, options_of(self.Base, self._options, group), only_vectors=True))

    def _before(self) -> tuple[Callable[..., Any], list[Stack], list[Tensor]]:
        """Blocks in place of shadows."""
        rule, stacks, grads = super()._before()
        lent: dict[int, list[Tensor]] = {}
        for s, B in zip(stacks, grads, strict=True):
            lent[id(s.H)] = shadows = blocks_of(s, s.H)
            views = {
                k: blocks_of(s, v) for k, v in s.state.items() if torch.is_tensor(v) and v.shape == s.H.shape
            }
            for j, (X, g) in enumerate(zip(shadows, blocks_of(s, B), strict=True)):
                X.grad, end = g, f".{j}"
                own = {k.removesuffix(end): v for k, v in s.state.items() if k.endswith(end)}
                state = own | {k: v[j] for k, v in views.items()}
                if state:
                    self.state[X] = state
        for group in self.param_groups:
            group["params"] = [X for p in group["params"] for X in lent.get(id(p), [p])]
        self._lent = lent
        return rule, stacks, grads

    def _velocities(self, rule: Callable[..., Any], stacks: list[Stack]) -> None:
        def skewed(optimizer: Any) -> None:
            rule(optimizer)
            for s in stacks:
                s.W.copy_(s.space.one.hor(s.W))  # rules that round to bfloat16 leave A skew to 3 digits

        super()._velocities(skewed, stacks)

    def _put_back(self) -> None:
        """The state of blocks becomes that of their weights."""
        flight, lent = self._swapped, self.__dict__.pop("_lent", {})
        if flight is not None and self.state is not flight.state:
            for s in flight.stacks:
                states = [self.state.pop(X, {}) for X in lent.get(id(s.H), ())]
                self.state[s.H] = _joined(s, lent.get(id(s.H), []), states) if any(states) else s.state
        super()._put_back()


def blocks_of(s: Stack, X: Tensor) -> list[Tensor]:
    """The blocks of each point of a tensor in the layout of the shadow, as matrices; views."""
    return [
        block
        for blocks in zip(*s.space.one.ghor_blocks(s.points(s.local(X))), strict=True)
        for block in blocks
    ]


def _joined(s: Stack, shadows: list[Tensor], states: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key in states[0]:
        values = [state.get(key) for state in states]
        if all(torch.is_tensor(v) and v.shape == X.shape for v, X in zip(values, shadows, strict=True)):
            out[key] = whole = s.state.get(key, torch.zeros_like(s.H))
            for v, view in zip(values, blocks_of(s, whole), strict=True):
                if v is not None and v.data_ptr() != view.data_ptr():
                    view.copy_(v)
        else:
            out |= {f"{key}.{j}": v for j, v in enumerate(values)}
    return out
