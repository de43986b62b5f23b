"""Parameter groups of a lifted optimizer: torch's, with keys of ours, checked when they are added."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ghor._torch.sharding import gathered
from ghor.lifting.param_groups import check_group, name_of, spaces_of
from ghor.lifting.partition import Stacking, section_kind
from ghor.lifting.probe import verify
from ghor.lifting.saving import Saving
from ghor.spaces import Euclidean

# Lifted classes with a name of their own (ghor.optim); they are known to lift and need no probe.
NAMED: dict[type[Optimizer], type[Any]] = {}


class Contract(Saving):
    """What of a lifted optimizer has to do with its groups. `Base` is the optimizer class that works in
    g^hor."""

    Base: ClassVar[type[Optimizer]]
    stack: ClassVar[bool] = True
    blocks: ClassVar[bool] = False

    _stacking: Stacking | None
    _options: dict[str, Any]  # what the constructor was given
    _named: bool  # whether the first groups came from a module

    def _refuse_nonfinite(self) -> None:
        """Raise for gradients that are not finite, where a group asks for it. A scaler skips such steps
        itself."""
        if getattr(self, "found_inf", None) is not None:
            return
        for gi, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"] if group["error_if_nonfinite"] else ()):
                if p.grad is None:
                    continue
                grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
                if int(gathered(torch.isfinite(grad).logical_not_().sum())):
                    raise RuntimeError(
                        f"the gradient of {name_of(group, gi, i)} is not finite; nothing was moved "
                        "(error_if_nonfinite=True)"
                    )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        self._land()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; a group can name its `space`, `retraction`, `section`, `anchor` and
        `error_if_nonfinite`."""
        self._land()
        decay = param_group.get("weight_decay", 0) if isinstance(param_group, dict) else 0
        gi = len(self.param_groups)
        try:
            super().add_param_group(self._with_names(param_group, gi))
        except ValueError as error:
            raise self._name_the_twice_given(param_group, error) from None
        group = self.param_groups[-1]
        try:
            self._explicit |= group.get("space") is not None
            for key, default in self._ours.items():
                group.setdefault(key, default)
            check_group(group, gi, self.defaults, self._warn)
            if self.Base not in NAMED or self.blocks:
                verify(self.Base, self._options, group, spaces_of(group), self.stack, self.blocks)
            for i, (p, s) in enumerate(zip(group["params"], spaces_of(group), strict=True)):
                if not isinstance(s, Euclidean):
                    section_kind(self, gi, s, p, name_of(group, gi, i))
        except BaseException:
            self.param_groups.pop()
            raise
        if decay and group["anchor"] is None and not any(isinstance(s, Euclidean) for s in spaces_of(group)):
            self._warn_decay(decay, f"the weights of group {gi}, on {group['space']}")
        self._stacking = None
        if self._built:
            self._warn.flush()

    def _with_names(self, group: Any, gi: int) -> Any:
        """Where the first groups came with the names of a module, those of a group that comes without."""
        given = group.get("params") if isinstance(group, dict) else None
        if not (self._named and self._built) or given is None:
            return group
        params = [given] if isinstance(given, Tensor) else list(given)
        if all(isinstance(p, Tensor) for p in params):
            params = [(f"parameter {i} of group {gi}", p) for i, p in enumerate(params)]
        return {**group, "params": params}

    def _name_the_twice_given(self, group: dict[str, Any], error: ValueError) -> ValueError:
        """torch's message, and which parameter it is about."""
        known = {
            id(p): name_of(g, gi, i)
            for gi, g in enumerate(self.param_groups)
            for i, p in enumerate(g["params"])
        }
        for i, p in enumerate(group["params"] if "more than one parameter group" in str(error) else ()):
            if id(p) in known:
                name = name_of(group, len(self.param_groups), i)
                return ValueError(
                    f"{error}: {name} of shape {tuple(p.shape)} is {known[id(p)]} too; give it once"
                )
        return error

    def _warn_decay(self, decay: float, where: str) -> None:
        self._warn(
            "decay",
            f"weight_decay={decay} has no effect on {where}: they do not decay (paper, section 4.1) without an anchor",
        )
