"""L-BFGS on homogeneous spaces, with the calling convention of torch.optim.LBFGS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import torch
from torch import Tensor

from ghor._torch.precision import full_precision
from ghor._torch.sharding import is_sharded
from ghor.constraints.registry import declared_radii
from ghor.constraints.validation import check_on_space
from ghor.lifting.files import copied
from ghor.lifting.groups import Options, Params, Weight, each, names_of, refuse_nonfinite
from ghor.lifting.holder import Holder
from ghor.lifting.law import Traits
from ghor.solve.coordinates import FRAME_KEYS, Coordinates
from ghor.solve.descent import search
from ghor.solve.iterate import Iterate, Ray, Sample, Turn, renewed, turning
from ghor.solve.rules import Limited, changed
from ghor.spaces import Euclidean
from ghor.spaces.frames import Frame
from ghor.spaces.retraction import by_name

ABSOLUTE = 1e-10  # y^T s must exceed it, as in torch
OF_RULE = ("old_dirs", "old_stps", "d", "t", "prev_flat_grad", "ro", "H_diag", "prev_loss", "products")
OF_WEIGHTS = (*FRAME_KEYS, "master", "radius", "moves")
ONE_GROUP = (
    "LBFGS has one memory for all parameters and takes one group, got a second; pass the model itself, or "
    "one group whose 'space' is a list with one for each parameter"
)


class Taken(NamedTuple):
    """A step t d that was taken, and the gradient before it."""

    d: Tensor
    t: float
    before: Tensor

    def mapped(self, turn: Turn) -> Taken:
        """In other frames."""
        return Taken(turn(self.d), self.t, turn(self.before))


class Memory(NamedTuple):
    """All that LBFGS keeps from step to step; one assignment replaces it, whatever an interrupt leaves."""

    space: Coordinates
    frames: tuple[Frame, ...]
    rule: Limited
    last: Taken | None = None  # a pair once the gradient after it is known
    age: int = 0

    @property
    def points(self) -> list[Tensor]:
        """The points below the frames."""
        return [frame.point() for frame in self.frames]

    def turned(self, turn: Turn | None) -> Memory:
        """The vectors in other frames."""
        if turn is None:
            return self
        return self._replace(rule=self.rule.turned(turn), last=self.last and self.last.mapped(turn))

    def direction(self, g: Tensor) -> tuple[Limited, Tensor, bool]:
        """The rule that has learned from the last step, its direction; and if that is -g for want of any."""
        rule, last, flat = self.rule, self.last, self.space.euclidean
        # Also after a first step that was not taken.
        if last is None or not (flat or last.t or rule.informed):
            return rule, -g, True
        rule = rule.learned(last.d * last.t, g - last.before)
        d = rule.direction(g)
        if flat or not rule.informed or float(g.dot(d)) < 0:
            return rule, d, False
        return rule.empty(), -g, True  # rounding has spoilt the memory

    @classmethod
    def of(cls, states: Sequence[dict[str, Any]], space: Coordinates, rule: Limited) -> Memory:
        """What states have shown, from a rule without pairs."""
        state, like, last = states[0], space.like, None
        pairs = list(zip(state.get("old_stps") or (), state.get("old_dirs") or (), strict=True))
        scale, R = state.get("H_diag", 1.0), state.get("products")
        scales = tuple(map(float, scale if isinstance(scale, list) else [scale] * len(rule.sizes)))
        for s, y in pairs[-rule.size :]:
            rule = rule.with_pair(s.to(like), y.to(like), scales)
        if R is not None and len(R) == len(pairs) > 0:
            count = rule.last - rule.first
            rule.R[rule.window, rule.window] = R[-count:, -count:].to(like)
        if state.get("d") is not None and state.get("prev_flat_grad") is not None:
            last = Taken(state["d"].to(like), float(state["t"]), state["prev_flat_grad"].to(like))
        return cls(space, space.frames, rule, last, max(int(own.get("moves", 0)) for own in states))

    def shown(self, loss: float) -> list[dict[str, Any]]:
        """What the states of the weights have of it; the first one that of all, under torch's names."""
        rule, last, own = self.rule, self.last, self.space.states(self.frames, self.age)
        R = rule.R[rule.window, rule.window].clone()
        own[0] = own[0] | {
            "old_stps": list(rule.S[rule.window]),
            "old_dirs": list(rule.Y[rule.window]),
            "ro": list(R.diagonal().reciprocal()),
            "H_diag": rule.scale[0] if len(rule.scale) == 1 else list(rule.scale),
            "products": R,
            "prev_loss": loss,
        }
        if last is not None:
            own[0] |= {"d": last.d, "t": last.t, "prev_flat_grad": last.before}
        return own


class Evaluated:
    """The closure as a function of points, which are written into the weights."""

    def __init__(self, closure: Callable[[], Any], params: list[Tensor], space: Coordinates) -> None:
        self.closure, self.params, self.space = closure, params, space
        self.losses, self.seen = list[Any](), list[Sample]()  # all values, and the last sample

    def put(self, points: Sequence[Tensor]) -> None:
        """The points into the weights."""
        torch._foreach_copy_([p.detach() for p in self.params], self.space.weights(points))

    def __call__(self, points: Sequence[Tensor]) -> Sample:
        if self.losses:  # the first is at the weights as they are
            self.put(points)
        self.losses.append(self.closure())
        G = self.space.gradients([p.grad for p in self.params])
        self.seen[:] = [Sample(points, float(self.losses[-1]), G)]
        return self.seen[0]


class LBFGS(Holder):
    """L-BFGS in g^hor, where s = t W and y = B_new - B_old are vectors of one space: nothing is transported.

        W      <- -H B                            the two-loop recursion, inner product of g^hor
        t      <- strong Wolfe, or lr             slope <G, Y_t'>, exact along either retraction
        Lambda <- Lambda R(t W)
        y, s   <- B_new - B_old, t W

    Options and state are torch's: `closure` is called several times per step, there is one parameter group,
    and all weights are on one device. On Euclidean weights alone it is torch's LBFGS up to rounding.
    Elsewhere a pair counts only if its curvature is positive beyond rounding, the memory is emptied if a
    direction does not descend, no step is longer than the space allows, and one to where the gradient is not
    finite is taken back. On a sphere W is in radians, so nothing depends on its radius.
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

    _now: Memory | None = None
    _shown: list[Tensor] | None = None  # its steps, as the state has them

    # -- groups, files, copies

    def sorted(self, params: Any) -> Any:
        """As they are: one group."""
        params = params if isinstance(params, Tensor | dict) else list(params)
        if isinstance(params, list) and len(params) > 1 and isinstance(params[0], dict):
            raise ValueError(ONE_GROUP)
        return params

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: there is one group; its `space` may be a list with one for each parameter."""
        raise ValueError(ONE_GROUP)

    def _place(self, group: dict[str, Any]) -> None:
        super()._place(group)
        if group["max_angle"] is not None:
            raise ValueError("LBFGS chooses the lengths of its steps itself: leave max_angle out")
        for p, name in zip(group["params"], names_of(group, 0), strict=True):
            if is_sharded(p):
                raise ValueError(f"{name} is sharded, and LBFGS works on whole weights; gather it")

    def _asked(self, w: Weight) -> Traits:
        """The memory turns with any frame."""
        return Traits(turns=True)

    def _adopt(self) -> None:
        super()._adopt()
        self._now = self._shown = None

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k not in ("_now", "_shown")}

    def _restore(self, saved: dict[str, Any]) -> None:
        """Every tensor in the dtype in which it was saved.

        torch casts the state of a weight to its dtype. Here the first weight holds the memory of all of them,
        in the widest of their dtypes, with float32 for half precision; the next step converts it if they have
        other dtypes now.
        """
        super()._restore(saved)
        group = self.param_groups[0]
        for p, key in zip(group["params"], saved["param_groups"][0]["params"], strict=True):
            if p in self.state:
                self.state[p].update(copied(saved["state"].get(key, {}), p))
        rows = zip(group["params"], each(group, "space"), strict=True)
        if any("moves" not in self.state.get(p, {}) for p, s in rows if not isinstance(s, Euclidean)):
            forget(
                self.state.get(group["params"][0], {})
            )  # saved by torch's own LBFGS, whose vectors are not in g^hor

    # -- where we are

    def _coordinates(self, states: Sequence[dict[str, Any]] | None = None) -> Coordinates:
        group = self.param_groups[0]
        R = by_name(group["retraction"])
        return Coordinates(group["params"], each(group, "space"), R, group["section"], states)

    def _no_pairs(self, space: Coordinates) -> Limited:
        """Without pairs: on Euclidean weights alone as in torch, elsewhere with a scale for each factor."""
        size = self.param_groups[0]["history_size"]
        return Limited(size, [space.size], ABSOLUTE) if space.euclidean else Limited(size, space.sizes)

    def _located(self) -> Memory:
        """The memory as we left it; empty if others have moved weights on manifolds."""
        group, before = self.param_groups[0], self._now
        shown = self.state.get(group["params"][0], {}).get("old_stps") is self._shown
        if before is not None and shown and before.space.fits(group["params"]):
            now = before
        else:
            states = [{"radius": declared_radii(p), **self.state.get(p, {})} for p in group["params"]]
            space = self._coordinates(states)
            now, space.section = Memory.of(states, space, self._no_pairs(space)), ""  # of any kind
            if before is not None and before.space.places != now.space.places:
                self._warn("dtypes", "some weights of one shape have got another dtype: the memory is empty")
                now = self._afresh()
        now = self._in_section(self._followed(now))
        if now.rule.size != group["history_size"]:
            now = now._replace(rule=changed(now.rule, size=group["history_size"]))
        now.space.R = by_name(group["retraction"])
        return now

    def _in_section(self, now: Memory) -> Memory:
        """The memory above frames of the kind that is asked for, which may be another than a state has."""
        if now.space.section == self.param_groups[0]["section"]:
            return now
        states = now.space.states(now.frames, now.age)
        asked = self._coordinates([{k: own[k] for k in own.keys() - set(FRAME_KEYS)} for own in states])
        if asked.section == "auto" or [*map(type, asked.frames)] == [*map(type, now.frames)]:
            now.space.section = asked.section
            return now
        turn = turning((now.space, now.frames), (asked, asked.frames))
        return now._replace(space=asked, frames=asked.frames).turned(turn)

    def _afresh(self) -> Memory:
        """Nothing but where the weights are."""
        forget(self.state.get(self.param_groups[0]["params"][0], {}))
        space = self._coordinates()
        return Memory(space, space.frames, self._no_pairs(space))

    def _followed(self, now: Memory) -> Memory:
        """The memory if weights are where it left them, or Euclidean ones alone have moved; or a new one."""
        group, frames = self.param_groups[0], list(now.frames)
        params, names, moved = group["params"], names_of(group, 0), list[int]()
        for k, (part, frame) in enumerate(zip(now.space.parts, now.frames, strict=True)):
            bad = [i for i, same in zip(part.index, part.unchanged(frame, params), strict=True) if not same]
            if bad and part.space.flat:
                frames[k] = part.frame(params)
            elif bad:
                check_on_space([params[i] for i in bad], part.space, [names[i] for i in bad], self._warn)
                moved += bad
        if not moved:
            return now._replace(frames=tuple(frames))
        name = names[min(moved)]
        self._warn(
            "changed", f"{name} changed outside the optimizer: its frame was rebuilt, the memory is empty"
        )
        return self._afresh()

    # -- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Do up to `max_iter` iterations; the closure clears gradients, computes them, returns the loss."""
        with full_precision():
            if not self._roster.holds(self.param_groups):
                self._roster.renew(self.param_groups, self.state)
            loss = self._solve(torch.enable_grad()(closure))
        self._warn.flush()
        return loss

    def _solve(self, closure: Callable[[], Any]) -> Any:
        group, params = self.param_groups[0], self.param_groups[0]["params"]
        if group["line_search_fn"] not in (None, "strong_wolfe"):
            raise RuntimeError(f"line_search_fn is None or 'strong_wolfe', got {group['line_search_fn']!r}")
        self._now = now = self._located()
        state, sample = self.state[params[0]], Evaluated(closure, params, now.space)
        counts = [state.get("func_evals", 0), state.get("n_iter", 0)]
        first = sample(now.points)
        state["func_evals"], state["n_iter"] = counts[0] + 1, counts[1]
        refuse_nonfinite(self)
        it = Iterate(now.frames, first, now.space.pull(now.frames, first.G), now.age)
        if self._done(it) or self._stays(first, now.space):
            return sample.losses[0]
        try:
            for iteration in range(1, group["max_iter"] + 1):
                state["n_iter"] = counts[1] + iteration
                found = self._iterated(self._now, it, sample, iteration == group["max_iter"])
                if found is None:
                    break
                then, (self._now, it, step) = it.value, found
                if len(sample.losses) >= group["max_eval"] or self._done(it):
                    break
                change, least = abs(it.value - then), group["tolerance_change"]
                if float(step.abs().max()) <= least or change < least:
                    break
        finally:  # also of an interrupt
            state["func_evals"] = counts[0] + len(sample.losses)
            sample.put(self._now.points)
            self._publish(self._now.shown(it.value))
        return sample.losses[0]

    def _publish(self, shown: list[dict[str, Any]]) -> None:
        """Into the states."""
        self._shown = shown[0]["old_stps"]
        for p, new in zip(self.param_groups[0]["params"], shown, strict=True):
            for key in OF_WEIGHTS:
                self.state.get(p, {}).pop(key, None)
            if new:
                self.state[p].update(new)

    def _iterated(
        self, now: Memory, it: Iterate, sample: Evaluated, final: bool
    ) -> tuple[Memory, Iterate, Tensor] | None:
        """The memory, the iterate and the step after an iteration, or None if it leads nowhere."""
        group, space, g = self.param_groups[0], now.space, it.gradient
        rule, d, afresh = now.direction(g)
        slope, t = float(g.dot(d)), float(group["lr"])
        t = t * min(1.0, 1.0 / float(g.abs().sum())) if afresh else t
        if slope > -group["tolerance_change"]:
            return None
        ray = Ray(space, it, d)
        if group["line_search_fn"] is not None:
            t, new = search(
                sample,
                ray,
                slope,
                t,
                size=float(d.abs().max()),
                tolerance=group["tolerance_change"],
                iterations=group["max_eval"] - len(sample.losses),
                slack=0.0 if space.euclidean else 10 * space.eps * abs(it.value),
            )
            if t == 0 and self._stays(sample.seen[0], space):
                return None
        else:
            t = min(t, ray.ceiling)
            trials = ray.at(t)
            points = [trial.y for trial in trials]
            # As in torch: after the final one, the next step evaluates there.
            seen = it.sample._replace(points=points) if final else sample(points)
            if self._stays(seen, space):
                return None
            new = ray.arrive(trials, seen)
        new, turn = renewed(space, new)
        return Memory(space, new.frames, rule, Taken(d, t, g), new.age).turned(turn), new, d * t

    def _done(self, it: Iterate) -> bool:
        return float(it.gradient.abs().max()) <= self.param_groups[0]["tolerance_grad"]

    def _stays(self, seen: Sample, space: Coordinates) -> bool:
        """Whether a gradient is not finite, so that the weights stay where they are, or go back there.

        With `error_if_nonfinite` raises; otherwise Euclidean weights alone go to NaN, as in torch.
        """
        if all(bool(torch.isfinite(G).all()) for G in seen.G):
            return False
        group = self.param_groups[0]
        if group["error_if_nonfinite"]:
            finite = (p.grad is None or bool(torch.isfinite(p.grad).all()) for p in group["params"])
            bad = next(name for name, good in zip(names_of(group, 0), finite, strict=True) if not good)
            raise RuntimeError(
                f"the gradient of {bad} is not finite after a step; the weights stay where they were before "
                "it (error_if_nonfinite=True)"
            )
        if space.euclidean:
            return False
        self._warn("nonfinite", "a gradient is not finite (is the loss?): the weights stay where they are")
        return True


def forget(state: dict[str, Any]) -> None:
    """Empty the memory in a state."""
    for key in OF_RULE:
        state.pop(key, None)
    state["n_iter"] = 0
