"""L-BFGS on homogeneous spaces, with the calling convention of torch.optim.LBFGS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ghor._torch.precision import full_precision
from ghor._torch.sharding import is_sharded
from ghor.constraints.validation import check_on_space
from ghor.lifting.lifted import Lifted
from ghor.lifting.param_groups import name_of, spaces_of
from ghor.lifting.partition import refuse_late
from ghor.retraction import by_name
from ghor.solve.directions import Limited
from ghor.solve.line_search import Trial, strong_wolfe
from ghor.solve.points import Points
from ghor.spaces import Euclidean

ABSOLUTE = 1e-10  # torch's: y^T s must exceed it
VECTORS = ("old_dirs", "old_stps", "d", "prev_flat_grad")


class LBFGS(Lifted, torch.optim.LBFGS):
    """L-BFGS in g^hor: s = t W and y = B_new - B_old are vectors of one space, so no pair is ever
    transported.

        W      <- -H B                            the two-loop recursion, inner product of g^hor
        t      <- strong Wolfe, or lr             slope <B_t, V_t>, exact along either retraction
        Lambda <- Lambda R(t W)
        y, s   <- B_new - B_old, t W

    Options and state are torch's: `closure` is called several times a step, there is one parameter group, and
    all weights are on one device. On Euclidean weights alone it is torch's to rounding. Elsewhere a pair
    counts when its curvature is positive beyond rounding, a direction that does not descend starts the memory
    afresh, and no step is longer than the retraction is exact for.
    """

    __module__ = "ghor.optim"
    Base = torch.optim.LBFGS

    _frames: Points | None = None

    def _reset(self) -> None:
        super()._reset()
        self._frames = None

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "_frames"}

    def turning_keys(self, group: dict[str, Any]) -> set[str]:
        """The memory turns in here: it is flat, all weights in one."""
        return set()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One group; its `space` may be a list with one for each parameter."""
        if self.param_groups:
            raise ValueError(
                "LBFGS has one memory for all parameters and takes one group, got a second; pass the model itself, or "
                "one group whose 'space' is a list with one for each parameter"
            )
        super().add_param_group(param_group)
        group = self.param_groups[0]
        for i, p in enumerate(group["params"]):
            if is_sharded(p):
                raise ValueError(
                    f"{name_of(group, 0, i)} is sharded, and LBFGS works on whole weights; gather it"
                )

    # -- where we are -----------------------------------------------------------------------------------------------

    def _memory(self) -> list[Tensor]:
        """The flat vectors in the state."""
        state = self.state[self.param_groups[0]["params"][0]]
        held = [state.get(key) for key in VECTORS]
        return [v for x in held if x is not None for v in (x if isinstance(x, list) else [x])]

    def _locate(self) -> Points:
        """The frames, as they were left; from the weights, and without a memory, where others have moved
        them."""
        refuse_late(self)
        group = self.param_groups[0]
        params, spaces, retraction = group["params"], spaces_of(group), by_name(group["retraction"])
        if self._frames is None:
            states = [self.state.get(p, {}) for p in params]
            self._frames = Points(params, spaces, retraction, group["section"], states, self._memory())
        points, frames = self._frames.tensors(), self._frames
        moved = [i for i, (p, Y) in enumerate(zip(params, points, strict=True)) if not torch.equal(p, Y)]
        kept = frames.states() if moved else None
        if any(not isinstance(spaces[i], Euclidean) for i in moved):
            kept = None
            for i in moved:
                check_on_space([params[i]], spaces[i], [name_of(group, 0, i)], self._warn)
            name = name_of(group, 0, moved[0])
            self._warn(
                "changed", f"{name} changed outside the optimizer: its frame was rebuilt, the memory is empty"
            )
            self._forget()
        if moved:
            frames = Points(params, spaces, retraction, group["section"], kept)
        frames.retraction = retraction
        return frames

    def _forget(self) -> None:
        state = self.state[self.param_groups[0]["params"][0]]
        for key in (*VECTORS, "t", "ro", "H_diag", "prev_loss"):
            state.pop(key, None)
        state["n_iter"] = 0

    # -- the step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Up to `max_iter` iterations; the closure clears gradients, computes them and returns the loss."""
        with full_precision():
            loss = self._solve(torch.enable_grad()(closure))
        self._warn.flush()
        return loss

    def _stays(self, g: Tensor, flat_spaces: bool) -> bool:
        """Whether there is nowhere to go: no gradient leads there. torch's own goes to NaN, and so do we
        beside it."""
        if flat_spaces or bool(torch.isfinite(g).all()):
            return False
        self._warn("nonfinite", "a gradient is not finite (is the loss?): the weights stay where they are")
        return True

    def _solve(self, closure: Callable[[], Any]) -> Any:
        group, params = self.param_groups[0], self.param_groups[0]["params"]
        flat_spaces = all(isinstance(s, Euclidean) for s in spaces_of(group))
        lr, wolfe = float(group["lr"]), group["line_search_fn"]
        if wolfe not in (None, "strong_wolfe"):
            raise RuntimeError(f"line_search_fn is None or 'strong_wolfe', got {wolfe!r}")
        frames, state, count = self._locate(), self.state[params[0]], 0
        state.setdefault("func_evals", 0)
        state.setdefault("n_iter", 0)

        def evaluate(at: Points) -> tuple[Any, Tensor]:
            nonlocal count
            count += 1
            state["func_evals"] += 1
            loss = closure()
            return loss, at.gradient([p.grad for p in params])

        def put(at: Points) -> None:
            for p, Y in zip(params, at.tensors(), strict=True):
                p.copy_(Y)

        first_loss, g = evaluate(frames)
        self._refuse_nonfinite()
        loss = float(first_loss)
        if float(g.abs().max()) <= group["tolerance_grad"] or self._stays(g, flat_spaces):
            return first_loss
        d, t, before = state.get("d"), state.get("t"), state.get("prev_flat_grad")
        size, least = group["history_size"], ABSOLUTE if flat_spaces else None
        S, Y, ro = (state.get(key) or [] for key in ("old_stps", "old_dirs", "ro"))
        pairs = Limited(size, S, Y, ro, state.get("H_diag", 1), least)
        try:
            for iteration in range(1, group["max_iter"] + 1):
                state["n_iter"] += 1
                fresh = d is None or state["n_iter"] == 1
                if not fresh:
                    pairs.update(d * t, before, g)
                d = pairs.direction(g) if not fresh else g.neg()
                slope = float(g.dot(d))
                if not flat_spaces and not slope < 0 and pairs.s:  # rounding has spoilt the memory
                    pairs, d, slope, fresh = Limited(size), g.neg(), -float(g.dot(g)), True
                before, last_loss = g, loss
                t = min(1.0, 1.0 / float(g.abs().sum())) * lr if fresh else lr
                if slope > -group["tolerance_change"]:
                    break
                longest = frames.ceiling(d)
                t = min(t, longest)

                def move(
                    t: float, d: Tensor = d, g: Tensor = g, frames: Points = frames
                ) -> tuple[Points, Tensor, Tensor]:
                    along, before = d.clone(), g.clone()
                    at = frames.moved(d, t, [along, before])
                    put(at)
                    return at, along, before

                if wolfe is not None:

                    def phi(t: float, move: Any = move) -> Trial:
                        at, along, before = move(t)
                        loss, g = evaluate(at)
                        return Trial(t, float(loss), at.slope(g, along, t), (at, along, before, g))

                    found = strong_wolfe(
                        phi,
                        Trial(0.0, loss, slope, (frames, d, g, g)),
                        t,
                        size=float(d.abs().max()),
                        tolerance=group["tolerance_change"],
                        iterations=group["max_eval"] - count,
                        longest=longest,
                        slack=0.0 if flat_spaces else 10 * frames.eps * abs(loss),
                    )
                    t, loss, (at, along, before, g) = found.t, found.f, found.at
                else:
                    at, along, before = move(t)
                if t > 0:
                    frames.renew(at, d, t, pairs.vectors())
                frames, d = at, along
                put(frames)
                if wolfe is None and iteration != group["max_iter"]:
                    value, g = evaluate(frames)
                    loss = float(value)
                    if self._stays(g, flat_spaces):
                        break
                if (
                    iteration == group["max_iter"]
                    or count >= group["max_eval"]
                    or float(g.abs().max()) <= group["tolerance_grad"]
                    or float((d * t).abs().max()) <= group["tolerance_change"]
                    or abs(loss - last_loss) < group["tolerance_change"]
                ):
                    break
        finally:
            put(frames)
            self._frames = frames
            held = {
                "d": d,
                "t": t,
                "old_dirs": pairs.y,
                "old_stps": pairs.s,
                "ro": pairs.ro,
                "H_diag": pairs.scale,
            }
            state.update(held, prev_flat_grad=before, prev_loss=loss)
            for p, own in zip(params, frames.states(), strict=True):
                if own:
                    self.state[p].update(own)
        return first_loss
