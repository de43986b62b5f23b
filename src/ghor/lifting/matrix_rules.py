"""Matrix rules, the second class that lifts: they see the blocks A and B of g^hor as parameters.

A rule that turns with its matrix, velocity(O X P) = O velocity(X) P for rotations O and P, takes skew blocks
to skew blocks; and where two frames differ by a rotation (not so on the symplectic spaces), its result does
not depend on the section. The rule gets each block of each weight as a matrix, a view of the shadow. State
tensors of the block's shape are kept in the weight's shape, under the rule's key; all other state is kept
by block, under key.0, key.1, ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ghor.lifting.lifted import Lifted
from ghor.lifting.probe import options_of, vectors
from ghor.lifting.stack import Stack


class InBlocks(Lifted):
    """Base class of `lift(Base, blocks=True)`."""

    stack = False
    blocks = True

    def turning_keys(self, group: dict[str, Any]) -> set[str]:
        """All state tensors. They must be vectors; rules with other state need a transported section."""
        return vectors(self.Base, options_of(self.Base, self._options, group), only_vectors=True)

    def _before(self) -> tuple[Callable[..., Any], list[Stack], list[Tensor]]:
        """Put blocks in place of the shadows, with their views of gradient and state."""
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
        """Apply Base's rule to the blocks, then project to g^hor."""

        def skewed(optimizer: Any) -> None:
            rule(optimizer)
            for s in stacks:
                s.W.copy_(s.space.one.hor(s.W))  # rules that round to bfloat16 leave A skew to 3 digits

        super()._velocities(skewed, stacks)

    def _put_back(self) -> None:
        """Join the states of blocks to those of their weights."""
        swapped, lent = self._swapped, self.__dict__.pop("_lent", {})
        if swapped is not None and self.state is not swapped.state:
            for s in swapped.stacks:
                states = [self.state.pop(X, {}) for X in lent.get(id(s.H), ())]
                self.state[s.H] = _joined(s, lent.get(id(s.H), []), states) if any(states) else s.state
        super()._put_back()


def blocks_of(s: Stack, X: Tensor) -> list[Tensor]:
    """The blocks of every point of X, a tensor like the shadow: matrices, and views."""
    by_kind = s.space.one.ghor_blocks(s.points(s.local(X)))
    return [block for of_point in zip(*by_kind, strict=True) for block in of_point]


def _joined(s: Stack, shadows: list[Tensor], states: list[dict[str, Any]]) -> dict[str, Any]:
    """The states of all blocks of a stack joined to one, as the module's docstring says."""
    out: dict[str, Any] = {}
    for key in states[0]:
        values = [state.get(key) for state in states]
        if all(torch.is_tensor(v) and v.shape == X.shape for v, X in zip(values, shadows, strict=True)):
            out[key] = whole = s.state.get(key, torch.zeros_like(s.H))
            for v, view in zip(values, blocks_of(s, whole), strict=True):
                if v is not None and v.data_ptr() != view.data_ptr():  # the rule has made it, or rebound it
                    view.copy_(v)
        else:
            out |= {f"{key}.{j}": v for j, v in enumerate(values)}
    return out
