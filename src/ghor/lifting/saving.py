"""Saving, loading, copying and pickling: the contract of torch.optim with our keys in groups and state."""

from __future__ import annotations

import copyreg
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from ghor._torch.warn import Warnings
from ghor.lifting.param_groups import GROUP_KEYS, anchors_of, name_of, spaces_of
from ghor.spaces import Euclidean

# What is made again whenever groups or state come from outside.
MADE = ("_stacking", "_flight", "_rule", "_ruled", "_stateless", "phase_hook")


class Saving(Optimizer):
    """What of a lifted optimizer has to do with its state dict."""

    _lifted_by: ClassVar[tuple[type[Optimizer], bool, bool] | None] = None  # what `lift` was called with
    _ours: dict[str, Any]
    _warn: Warnings

    def _reset(self) -> None:
        """Reset what is derived from groups and state."""

    def _land(self) -> None:
        """End a step that was interrupted."""

    def state_dict(self) -> dict[str, Any]:
        """As torch's, of plain data: spaces in words, sections row by row (broadcasts look at memory, not
        strides)."""
        self._land()
        out = super().state_dict()
        for key, entries in out["state"].items():
            if isinstance(entries, dict) and "section" in entries:  # a hook may have added what it likes
                out["state"][key] = {**entries, "section": entries["section"].contiguous()}
        if any("moves" in entries for entries in out["state"].values() if isinstance(entries, dict)):
            for saved in out[
                "param_groups"
            ]:  # distributed checkpoints want every weight to have a state, or none
                for key in saved["params"]:
                    out["state"].setdefault(key, {})
        for group, saved in zip(self.param_groups, out["param_groups"], strict=True):
            space = group["space"]
            anchors = [a if a is None else "start" for a in anchors_of(group)]  # the point is in the state
            saved["anchor"] = anchors if len(set(anchors)) > 1 else anchors[0] if anchors else None
            saved["space"] = (
                list(map(repr, space)) if isinstance(space, (list, tuple)) else space and repr(space)
            )
        return out

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; sections and moments of weights on manifolds keep the dtype they were saved in.

        A state dict of the plain optimizer loads for the Euclidean weights; weights on manifolds then start
        afresh, for moments in R^(N x n) mean nothing in g^hor.
        """
        self._land()
        for gi, (group, loaded) in enumerate(
            zip(self.param_groups, state_dict["param_groups"], strict=False)
        ):
            if loaded.get("space") is not None and len(group["params"]) == len(loaded["params"]):
                for i, (a, b) in enumerate(zip(spaces_of(group), spaces_of(loaded), strict=True)):
                    if str(a) != str(b):
                        raise ValueError(f"{name_of(group, gi, i)} is on {a}, the loaded state has it on {b}")
            for key in ("section", "retraction"):
                if key in loaded and loaded[key] != group[key]:
                    self._warn(
                        f"loaded {key}",
                        f"the loaded state has {key}={loaded[key]!r} for group {gi}, which was {group[key]!r}: it is "
                        "taken over, as the learning rate is",
                    )

        def remember(_: Optimizer, final: dict[str, Any]) -> None:
            self._loading = final  # what the hooks before this one made of it

        handle = self.register_load_state_dict_pre_hook(remember)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self.__dict__.pop("_loading", None)
        self._warn.flush()

    def __getstate__(self) -> dict[str, Any]:
        """torch's three entries and what the base keeps on itself.

        Excludes hooks, caches and instance-level method overrides, as schedulers make them of `step`: those
        are bound to this optimizer.
        """
        self._land()
        rest = {
            k: v
            for k, v in self.__dict__.items()
            if k not in MADE
            and not k.startswith("_optimizer_")
            and not callable(getattr(type(self), k, None))
        }
        return {**rest, **super().__getstate__()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After load_state_dict, deepcopy and unpickling.

        Loaded groups may lack our keys, and without `space` a weight would leave its manifold in silence. The
        space stays what it was: a loaded group has it in words, and is refused if they say otherwise.
        """
        old = self.__dict__.get("param_groups", [])
        super().__setstate__(state)
        for i, group in enumerate(self.param_groups):
            ours = old[i] if i < len(old) else self._ours
            for key in GROUP_KEYS:
                group.setdefault(key, ours[key])
            if i < len(old):
                group["space"] = old[i]["space"]
                given = old[i]["anchor"]  # as it was built; where it had none, what the file has
                saved = group["anchor"]
                saved = tuple(saved) if isinstance(saved, list) else saved and "start"
                group["anchor"] = given if given is not None else saved
        self._explicit = self._built = True
        self._reset()
        if "_loading" in self.__dict__:
            self._restore(self._loading)

    def _restore(self, loaded: dict[str, Any]) -> None:
        """torch casts loaded state to the dtype of the weight; for weights on manifolds take it as it was
        saved."""
        fresh = 0
        for group, saved in zip(self.param_groups, loaded["param_groups"], strict=True):
            for p, space, key in zip(group["params"], spaces_of(group), saved["params"], strict=True):
                values = loaded["state"].get(key)
                if isinstance(space, Euclidean) or not values:
                    continue
                if "moves" in values:
                    for k, v in values.items():  # numbers as torch made them: a step count is a tensor now
                        theirs = self.state[p][k]
                        self.state[p][k] = v.to(theirs.device) if torch.is_tensor(v) else theirs
                elif any(torch.is_tensor(v) and v.dim() > 0 and bool(v.any()) for v in values.values()):
                    del self.state[p]
                    fresh += 1
        if fresh:
            self._warn(
                "fresh",
                f"the loaded state has no section for {fresh} weights on manifolds: their moments start afresh",
            )

    def __reduce__(self) -> Any:
        if self._lifted_by is not None:
            return _unpickle, self._lifted_by, self.__getstate__()
        return copyreg.__newobj__, (type(self),), self.__getstate__()  # type: ignore[attr-defined]


def _unpickle(Base: type[Optimizer], stack: bool, blocks: bool = False) -> Any:
    from ghor.lifting.lifted import lift

    cls = lift(Base, stack=stack, blocks=blocks)
    return cls.__new__(cls)
