"""L-BFGS on homogeneous spaces, with the calling convention of torch.optim.LBFGS."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch import Tensor

from ghor._torch.precision import full_precision
from ghor._torch.sharding import is_sharded
from ghor.constraints.validation import check_on_space
from ghor.lifting.lifted import Lifted
from ghor.lifting.param_groups import Options, Params, name_of, refuse_late_declarations, spaces_of
from ghor.retraction import by_name
from ghor.solve.curves import Ray
from ghor.solve.descent import search
from ghor.solve.directions import Limited
from ghor.solve.points import Points
from ghor.solve.problem import Place
from ghor.spaces import Euclidean
from ghor.spaces.sections import SECTION_KEYS

ABSOLUTE = 1e-10  # y^T s must exceed it, as in torch
VECTORS = ("old_dirs", "old_stps", "d", "prev_flat_grad")
MEMORY = (*VECTORS, "t", "ro", "H_diag", "prev_loss", "products")


class LBFGS(Lifted, torch.optim.LBFGS):
    """L-BFGS in g^hor, where s = t W and y = B_new - B_old are vectors of one space: nothing is transported.

        W      <- -H B                            the two-loop recursion, inner product of g^hor
        t      <- strong Wolfe, or lr             slope <B_t, V_t>, exact along either retraction
        Lambda <- Lambda R(t W)
        y, s   <- B_new - B_old, t W

    Options and state are torch's: `closure` is called several times per step, there is one parameter group,
    and all weights are on one device. On Euclidean weights alone it is torch's LBFGS up to rounding.
    Elsewhere a pair counts only if its curvature is positive beyond rounding, the memory is emptied if a
    direction does not descend, no step is longer than the retraction allows, and one to where the gradient is
    not finite is taken back. On a sphere W is in radians, so nothing depends on its radius.
    """

    __module__ = "ghor.optim"
    Base = torch.optim.LBFGS

    if TYPE_CHECKING:

        def __init__(
            self,
            params: Params,
            lr: float | Tensor = 1,
            max_iter: int = 20,
            max_eval: int | None = None,
            tolerance_grad: float = 1e-07,
            tolerance_change: float = 1e-09,
            history_size: int = 100,
            line_search_fn: Literal["strong_wolfe"] | None = None,
            **ours: Unpack[Options],
        ) -> None: ...

    _points: Points | None = None
    _held: tuple[Limited, list[Tensor]] | None = None  # the memory, and the list of its steps in the state

    def _reset(self) -> None:
        super()._reset()
        self._points = self._held = None

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k not in ("_points", "_held")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but every tensor keeps the dtype in which it was saved.

        torch casts the state of a weight to its dtype. Here the first weight holds the memory of all of them,
        in the widest of their dtypes, with float32 for half precision; the next step converts it if they have
        other dtypes now.
        """
        seen: list[dict[str, Any]] = []
        # Registered last, so it sees the state dict as all other hooks have left it.
        handle = self.register_load_state_dict_pre_hook(lambda _, final: seen.append(final))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        group = self.param_groups[0]
        for p, key in zip(group["params"], seen[-1]["param_groups"][0]["params"], strict=True):
            values, own = seen[-1]["state"].get(key, {}), self.state.get(p, {})
            keys = [k for k in (*MEMORY, *SECTION_KEYS) if k in values and k in own]
            own |= {k: _copied(values[k], p.device) for k in keys}
        curved = [
            p for p, s in zip(group["params"], spaces_of(group), strict=True) if not isinstance(s, Euclidean)
        ]
        if any("moves" not in self.state.get(p, {}) for p in curved):
            self._forget()  # saved by torch's own LBFGS, whose vectors are not in g^hor

    def turning_keys(self, group: dict[str, Any]) -> set[str]:
        """None: the memory is one set of flat vectors for all weights, which `Points` turns."""
        return set()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the only group; its `space` may be a list with one for each parameter."""
        if self.param_groups:
            raise ValueError(
                "LBFGS has one memory for all parameters and takes one group, got a second; pass the model "
                "itself, or one group whose 'space' is a list with one for each parameter"
            )
        super().add_param_group(param_group)
        group = self.param_groups[0]
        if group["max_angle"] is not None:
            self.param_groups.clear()
            raise ValueError("LBFGS chooses the lengths of its steps itself: leave max_angle out")
        for i, p in enumerate(group["params"]):
            if is_sharded(p):
                raise ValueError(
                    f"{name_of(group, 0, i)} is sharded, and LBFGS works on whole weights; gather it"
                )

    # -- where we are ----------------------------------------------------------------------------------------

    def _memory(self) -> list[Tensor]:
        """The flat vectors in the state."""
        state = self.state[self.param_groups[0]["params"][0]]
        held = [state.get(key) for key in VECTORS]
        return [v for x in held if x is not None for v in (x if isinstance(x, list) else [x])]

    def _convert(self, dtype: torch.dtype) -> None:
        """Convert the memory, if it was computed or saved in another dtype than that of the weights now."""
        state = self.state.get(self.param_groups[0]["params"][0], {})
        for key in (*VECTORS, "products"):
            value = state.get(key)
            if torch.is_tensor(value):
                state[key] = value.to(dtype)
            elif value and value[0].dtype != dtype:  # a new list: `_pairs` then reads it
                state[key] = [v.to(dtype) for v in value]

    def _pairs(self, size: int, least: float | None) -> Limited:
        """The curvature pairs as we left them; made from the state if that is not ours."""
        state = self.state[self.param_groups[0]["params"][0]]
        s, y = (state.get(key) or [] for key in ("old_stps", "old_dirs"))
        if self._held is not None and self._held[1] is s and self._held[0].size == size:
            return self._held[0]
        pairs = Limited.of(size, least, s, y, state.get("products"))
        pairs.scale = float(state.get("H_diag", 1.0))
        return pairs

    def _locate(self) -> Points:
        """The points as we left them; if others moved weights on manifolds, new ones and an empty memory."""
        refuse_late_declarations(self.param_groups)
        group = self.param_groups[0]
        params, spaces, retraction = group["params"], spaces_of(group), by_name(group["retraction"])
        before = points = self._points
        if points is None or points.asked != group["section"] or not points.have_dtypes_of(params):
            states = [self.state.get(p, {}) for p in params]
            points = Points(params, spaces, retraction, group["section"], states, self._memory())
            self._convert(points.dtype)
            self._keep(points, any(states))
            if before is not None and [b.index for b in before.batches] != [b.index for b in points.batches]:
                self._warn("dtypes", "some weights of one shape have got another dtype: the memory is empty")
                self._forget()
        moved = points.changed(params)
        if any(not isinstance(spaces[i], Euclidean) for i in moved):
            for i in moved:
                check_on_space([params[i]], spaces[i], [name_of(group, 0, i)], self._warn)
            name = name_of(group, 0, moved[0])
            self._warn(
                "changed", f"{name} changed outside the optimizer: its frame was rebuilt, the memory is empty"
            )
            self._forget()
            points = Points(params, spaces, retraction, group["section"])
        elif moved:
            states = [{} if i in moved else state for i, state in enumerate(points.states())]
            points = Points(params, spaces, retraction, group["section"], states)
        points.retraction = retraction
        return points

    def _keep(self, points: Points, in_state: bool = True) -> None:
        """Continue from these points; the state holds the frames that its memory belongs to, no others."""
        self._points = points
        for p, own in zip(self.param_groups[0]["params"], points.states() if in_state else (), strict=False):
            state = self.state[p] if own else self.state.get(p, {})
            for key in SECTION_KEYS:
                state.pop(key, None)
            state.update(own)

    def _forget(self) -> None:
        """Empty the memory."""
        state = self.state.get(self.param_groups[0]["params"][0], {})
        for key in MEMORY:
            state.pop(key, None)
        state["n_iter"] = 0

    # -- the step --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Do up to `max_iter` iterations; the closure clears gradients, computes them, returns the loss."""
        with full_precision():
            loss = self._solve(torch.enable_grad()(closure))
        self._warn.flush()
        return loss

    def _put(self, points: Points) -> None:
        """Write the points into the weights."""
        for p, Y in zip(self.param_groups[0]["params"], points.tensors(), strict=True):
            p.copy_(Y)

    def _stays(self, at: Place, flat_spaces: bool) -> bool:
        """Whether the gradient is not finite, so that the weights stay where they are, or go back there.

        With `error_if_nonfinite` raises; otherwise Euclidean weights alone go to NaN, as in torch.
        """
        if bool(torch.isfinite(at.gradient).all()):
            return False
        group = self.param_groups[0]
        if group["error_if_nonfinite"]:
            parts = [(i, part) for b in at.points.batches for i, part in b.parts(at.gradient)]
            bad = next(i for i, part in parts if not bool(torch.isfinite(part).all()))
            raise RuntimeError(
                f"the gradient of {name_of(group, 0, bad)} is not finite after a step; the weights stay "
                "where they were before it (error_if_nonfinite=True)"
            )
        if not flat_spaces:
            text = "a gradient is not finite (is the loss?): the weights stay where they are"
            self._warn("nonfinite", text)
        return not flat_spaces

    def _solve(self, closure: Callable[[], Any]) -> Any:
        group, params = self.param_groups[0], self.param_groups[0]["params"]
        flat_spaces = all(isinstance(s, Euclidean) for s in spaces_of(group))
        lr, wolfe, last = float(group["lr"]), group["line_search_fn"], group["max_iter"]
        if wolfe not in (None, "strong_wolfe"):
            raise RuntimeError(f"line_search_fn is None or 'strong_wolfe', got {wolfe!r}")
        points, state = self._locate(), self.state[params[0]]
        state.setdefault("func_evals", 0)
        state.setdefault("n_iter", 0)
        losses, places = list[Any](), list[Place]()

        def evaluate(at: Points) -> Place:
            if losses:  # the first evaluation is at the weights as they are
                self._put(at)
            losses.append(closure())
            state["func_evals"] += 1
            places[:] = [Place(at, float(losses[-1]), at.gradient([p.grad for p in params]))]
            return places[0]

        place = evaluate(points)
        self._refuse_nonfinite()
        if float(place.gradient.abs().max()) <= group["tolerance_grad"] or self._stays(place, flat_spaces):
            return losses[0]
        d, t, before = state.get("d"), state.get("t"), state.get("prev_flat_grad")
        size, least = group["history_size"], ABSOLUTE if flat_spaces else None
        pairs = self._pairs(size, least)
        try:
            for iteration in range(1, last + 1):
                g, then = place.gradient, place.value
                state["n_iter"] += 1
                # Also after a first step that was not taken, t = 0.
                fresh = d is None or state["n_iter"] == 1 or not (flat_spaces or t or pairs.informed)
                if not fresh:
                    pairs.update(d * t, before, g)
                d = pairs.direction(g) if not fresh else g.neg()
                slope = float(g.dot(d))
                if not flat_spaces and not slope < 0 and pairs.informed:  # rounding has spoilt the memory
                    pairs, d, slope, fresh = Limited(size, least), g.neg(), -float(g.dot(g)), True
                t = min(1.0, 1.0 / float(g.abs().sum())) * lr if fresh else lr
                before = g
                if slope > -group["tolerance_change"]:
                    break
                length, t = t, 0.0  # until a step is taken
                if wolfe is not None:
                    slack = 0.0 if flat_spaces else 10 * points.eps * abs(then)
                    tolerance, left = group["tolerance_change"], group["max_eval"] - len(losses)
                    bounds = {"size": float(d.abs().max()), "tolerance": tolerance, "iterations": left}
                    step = search(place, d, slope, length, evaluate, pairs.vectors, **bounds, slack=slack)
                    t, place, d, before = step.t, step.place, step.direction, step.before
                    points = place.points
                    self._put(points)
                    if t == 0 and self._stays(places[0], flat_spaces):
                        break
                else:
                    ray, along, old = Ray(points, d), d.clone(), g.clone()
                    length = min(length, ray.ceiling())
                    at = ray.at(length, [along, old])
                    if iteration != last:  # as in torch: after the last one, the next step evaluates there
                        new = evaluate(at)
                        if self._stays(new, flat_spaces):
                            break
                        place = new
                    ray.renew(at, length, pairs.vectors)
                    points, d, t, before = at, along, length, old
                if (
                    iteration == last
                    or len(losses) >= group["max_eval"]
                    or float(place.gradient.abs().max()) <= group["tolerance_grad"]
                    or float((d * t).abs().max()) <= group["tolerance_change"]
                    or abs(place.value - then) < group["tolerance_change"]
                ):
                    break
        finally:
            self._put(points)
            self._keep(points)
            state.update(pairs.state(), d=d, t=t, prev_flat_grad=before, prev_loss=place.value)
            self._held = pairs, state["old_stps"]
        return losses[0]


def _copied(value: Any, device: torch.device) -> Any:
    """Copies of a tensor, or of the tensors in a list, because the memory turns in place."""
    if isinstance(value, list):
        return [_copied(x, device) for x in value]
    return value.to(device, copy=True) if torch.is_tensor(value) else value
