"""Weights of one kind as one batch: what Algorithm 3 works on."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .declare import declared_space
from .distributed import is_spread, shards_of
from .linalg import COMPUTE_DTYPE, full_precision
from .retraction import by_name
from .section import POLISH_POINT, Implicit, Section, Transported
from .spaces import Space

Warn = Callable[[str, str], None]

# Our keys in state[p], beside those of the base optimizer: the section (transported: "section", implicit: "anchor"),
# the point in float32 where the weight is half precision and the section does not hold it, and the number of moves.
STATE_KEYS = ("section", "anchor", "master", "moves")


class Stack:
    """P weights of one group, space, shape, dtype, device and step count, as (P, *shape).

    `H` is their shadow, 0 between steps, and `state` the base optimizer's state of it. Geometry sees tall matrices
    (M, N, n), M = P times the weights' own batch dimensions. Of weights that are spread over processes, `params` are
    what this one works on, and `H` and `state` are DTensors around it.
    """

    def __init__(
        self,
        group: dict[str, Any],
        gi: int,
        space: Space,
        kind: type[Transported] | type[Implicit],
        params: list[Tensor],
        names: list[str],
        states: list[dict[str, Any]],
        vectors: set[str],
    ) -> None:
        self.group, self.gi, self.space, self.kind = group, gi, space, kind
        self.owners, self.names, self.vectors = params, names, vectors
        self.shards = shards_of(params[0], space)
        self.params = params = params if self.shards is None else self.shards.pieces(params)
        self.shape = params[0].shape
        self.N, self.n = space.size(self.shape)
        dtype = COMPUTE_DTYPE.get(params[0].dtype, params[0].dtype)
        self.half, self.where = dtype != params[0].dtype, (params[0].dtype, params[0].device)
        H = torch.zeros((len(params), *self.shape), dtype=dtype, device=params[0].device)
        self.H, self.W = self._spread(H), self.matrices(H)
        self.batch = (len(params), *space.matrix(H).shape[1:-2])
        self.state = {key: self._gather(key, states) for key in states[0] if key not in STATE_KEYS}
        self.moves = states[0]["moves"].clone() if "moves" in states[0] else torch.zeros((), dtype=torch.int64)
        self.master: Tensor | None = None
        self.section = self._section(states)
        self.published: list[Any] = []
        self._bound: dict[str, Any] | None = None
        self._ids: list[int] = []
        self.versions = [p._version for p in self.owners]
        if isinstance(self.section, Transported):
            self._points = list(self._layout(self.section.Y()).unbind(0))

    # -- layout -----------------------------------------------------------------------------------------------------

    def matrices(self, X: Tensor) -> Tensor:
        """(P, *shape) as tall matrices (M, N, n), a view."""
        return self.space.matrix(X).flatten(0, -3)

    def _layout(self, M: Tensor) -> Tensor:
        """Tall matrices (M, N, n) as (P, *shape), a view."""
        return self.space.unmatrix(M.unflatten(0, self.batch), self.shape)

    def weights(self) -> Tensor:
        """(P, *shape), to be called without gradients; of a single weight it is the weight's own memory."""
        return self.params[0].detach().unsqueeze(0) if len(self.params) == 1 else torch.stack(self.params)

    def _spread(self, X: Tensor) -> Tensor:
        """(P, ...) as the base optimizer sees it."""
        return X if self.shards is None else self.shards.stacked(X)

    def _local(self, X: Any) -> Tensor:
        """The inverse."""
        return X if self.shards is None or not is_spread(X) else X.to_local()

    def _exact(self, weights: Tensor) -> Tensor:
        """Tall matrices in the dtype of computation; half precision ones at the point they were rounded from."""
        Y = weights.to(self.H.dtype)
        return self.matrices(self.space.project(Y) if self.half else Y)

    # -- state ------------------------------------------------------------------------------------------------------

    def _gather(self, key: str, states: list[dict[str, Any]]) -> Any:
        """One value of the stack from its members': stacked if it is one for each weight, else shared."""
        value = states[0][key]
        if not torch.is_tensor(value):
            return value
        if value.dim() != len(self.shape) or value.dim() == 0:
            return value.clone()
        values = [s[key] if self.shards is None else self.shards.placed(s[key]) for s in states]
        return torch.stack(values).to(self.H.dtype if value.is_floating_point() else value.dtype)

    def _section(self, states: list[dict[str, Any]]) -> Section:
        """From the state where it is there, in the form the group asks for; else anew from the weights."""
        kind = self.kind
        dtype, device = self.H.dtype, self.H.device

        def stacked(key: str) -> Tensor:
            values = [s[key] if self.shards is None else self.shards.placed(s[key]).to_local() for s in states]
            return torch.stack(values).to(dtype=dtype, device=device)

        section: Section
        if "section" in states[0]:
            section = Transported(self.space, self.n, stacked("section").flatten(0, -3))
        elif "anchor" in states[0]:
            section = Implicit(self.space, self.n, stacked("anchor").flatten(0, -3))
        else:
            section = kind.start(self.space, self._exact(self.weights()))
        if kind is Implicit and self.half:
            held = (
                stacked("master")
                if "master" in states[0]
                else self._layout(section.Y() if isinstance(section, Transported) else self._exact(self.weights()))
            )
            self.master = held.contiguous()
        if isinstance(section, kind):
            return section
        Y = (
            section.Y()
            if isinstance(section, Transported)
            else self.matrices(stacked("master") if self.half else self.weights())
        )
        other = kind.start(self.space, Y)
        if isinstance(other, Transported):  # the implicit frame, formed, is a transported one: nothing turns
            return Transported(self.space, self.n, section.frame(Y))
        turn = other.frame(Y)[..., self.n :].mT @ section.frame(Y)[..., self.n :]
        for key in self.vectors & set(self.state):
            lower = self.matrices(self._local(self.state[key]))[..., self.n :, :]
            lower.copy_(turn @ lower)
        return other

    def part(self, index: list[int]) -> Stack:
        """The stack of some of the weights, with a copy of their state."""
        states = [self.member(i) for i in index]
        params, names = [self.owners[i] for i in index], [self.names[i] for i in index]
        part = Stack(self.group, self.gi, self.space, self.kind, params, names, states, self.vectors)
        part.versions = [self.versions[i] for i in index]
        part.published = [self.published[i] for i in index]
        part._show()
        return part

    def member(self, i: int) -> dict[str, Any]:
        """state[p] of the i-th weight: views of the stacked tensors; other values are shared by the whole stack."""
        out = {k: v[i] if self._is_stacked(v) else v for k, v in self.state.items()}
        ours = {k: v.unflatten(0, self.batch)[i] for k, v in self.section.tensors.items()}
        if self.master is not None:
            ours["master"] = self.master[i]
        if self.shards is not None:
            ours = {k: self.shards.single(v) for k, v in ours.items()}
        return out | ours | {"moves": self.moves}

    def _is_stacked(self, value: Any) -> bool:
        return torch.is_tensor(value) and value.dim() == self.H.dim() and len(value) == len(self.params)

    def publish(self, state: Any, only_if_any: bool = False) -> None:
        """Put the members' states into the optimizer's, where the base has bound new objects since the last time."""
        if self._bound is not None and all(self._bound.get(k) is v for k, v in self.state.items()):
            return
        if only_if_any and not self.state:  # nothing to show before the first step
            self.published = [state.get(p) for p in self.owners]
        else:
            self.published = [state[p] for p in self.owners]
        self._show()

    def _show(self) -> None:
        self._bound = dict(self.state) if any(d is not None for d in self.published) else None
        for i, d in enumerate(self.published):
            if d is not None:
                d.clear()
                d.update(self.member(i))
        self._ids = self._identities()

    def _identities(self) -> list[int]:
        return list(map(id, chain.from_iterable(d.values() for d in self.published if d is not None)))

    def is_published(self, state: Any) -> bool:
        """Whether the optimizer's state of the members is still what was put there, and the weights of one kind."""
        p = self.owners[0]
        return (
            (p.dtype, p.device) == self.where
            and all(map(operator.is_, map(state.get, self.owners), self.published))
            and self._identities() == self._ids
        )

    # -- what may have happened outside -------------------------------------------------------------------------------

    def notice_changes(self, warn: Warn) -> None:
        """If a weight was written to since the last step: rebuild its section if it is on the space, raise if not.

        A transported section holds the point to compare with; that is free on the CPU, would wait for another device,
        and is done every 100 steps there. An implicit section is a function of the weight: only the weight's distance
        from the space matters, looked at before Y is polished. In between torch's version counters tell; writes
        through `.data` escape them.
        """
        if self.shards is not None:
            self.params = self.shards.pieces(self.owners)
            if len(self.W) == 0:  # no matrix of theirs is on this process
                return
        touched = [p._version != v for p, v in zip(self.owners, self.versions, strict=True)]
        moves, cpu = int(self.moves), self.H.device.type == "cpu"
        point = self._layout(self.section.Y()) if isinstance(self.section, Transported) else self.master
        if not any(touched) and (moves % POLISH_POINT if point is None else not cpu and moves % 100):
            return
        Y = self.weights()
        if point is None:
            changed = ~(_distances(self.space, Y) <= tolerance(self.space, Y))
        elif self.half:  # the weight is the rounded point
            changed = (~((Y - point).abs() <= torch.finfo(Y.dtype).eps * (1 + point.abs()))).flatten(1).any(1)
        elif not any(touched) and torch.equal(Y, point):
            return
        else:
            changed = (Y != point).flatten(1).any(1)
        if any(touched):  # the very same values written again: a way to say "start anew" after a NaN
            mask = torch.tensor(touched, device=changed.device)
            changed |= mask if point is None else mask & ~self._finite()
            self.versions = [p._version for p in self.owners]
        if not bool(changed.any()):
            return
        index = changed.nonzero().flatten()
        some = index.tolist()
        for i in some:
            declared = declared_space(self.owners[i])
            if declared is not None and declared != self.space:
                raise ValueError(
                    f"{self.names[i]} was constrained to {declared} after this optimizer took it on {self.space}; "
                    "build a new optimizer"
                )
        check_on_space([self.params[i] for i in some], self.space, [self.names[i] for i in some])
        exact = self._exact(Y[index])
        rows = changed.repeat_interleave(len(self.W) // len(self.params)).nonzero().flatten()
        self.section.rebuild(rows, exact)
        if self.master is not None:
            self.matrices(self.master)[rows] = exact
        broken = ~self._finite() & changed
        for value in self._tensors():
            value[broken] = 0
        others = f" and {len(some) - 1} other weights" if len(some) > 1 else ""
        lost = f" ({int(broken.sum())} with moments that were not finite start from zero)" if bool(broken.any()) else ""
        warn(
            "changed",
            f"{self.names[some[0]]}{others} changed outside the optimizer, within {self.space}: the section was "
            f"rebuilt, moments were kept{lost}",
        )

    def _tensors(self) -> list[Tensor]:
        """State tensors with an entry for each weight."""
        return [self._local(v) for v in self.state.values() if self._is_stacked(v)]

    def _finite(self) -> Tensor:
        ok = torch.ones(len(self.params), dtype=torch.bool, device=self.H.device)
        for value in self._tensors():
            ok &= torch.isfinite(value).flatten(1).all(1)
        return ok

    # -- Algorithm 3 ------------------------------------------------------------------------------------------------

    @full_precision()
    def global_grad(self) -> Tensor:
        """B = global_rep(Lambda, rgrad(Y, G)), fused, in the layout of the shadow."""
        grads = [dense(p.grad) for p in self.owners]
        grads = grads if self.shards is None else self.shards.pieces(grads)
        G = grads[0].unsqueeze(0) if len(grads) == 1 else torch.stack(grads)
        B = self.section.global_grad(self._point(), self.matrices(G.detach().to(self.H.dtype)))
        return self._spread(self._layout(B).contiguous())

    def _point(self) -> Tensor:
        """Y, tall: what the section holds, or the float32 copy, or the weights (then kept for the rest of the step)."""
        if isinstance(self.section, Transported):
            return self.section.Y()
        self._Y = self.matrices(self.weights() if self.master is None else self.master)
        return self._Y

    @full_precision()
    def update_section(self, warn: Warn) -> bool:
        """Lambda <- Lambda R(W), W = H, in place; then H <- 0. A step that does not move (W = 0) changes no bit."""
        W, space, n = self.W, self.space, self.n
        retraction = by_name(self.group["retraction"])
        length = torch.linalg.vector_norm(W, dim=(-2, -1))
        # In units of a root-mean-square singular value: from 1/2 on rounding is repaired at once, beyond 4 a step is
        # taken in float64.
        large, limit = 0.5 * math.sqrt(n), min(4 * math.sqrt(n), space.max_velocity)
        peak, long = 0.0, None
        if W.device.type == "cpu":  # a look is free here
            peak = float(length.max()) if len(W) else 0.0
            if peak == 0:
                self.moves += len(W) == 0  # as on the processes that have a matrix
                return False
            if not peak <= limit:
                long = self._take_out(warn, length, limit)
        else:  # not even NaN is looked at: such velocities become 0, long ones as long as float32 can take
            W.mul_((limit / length).clamp_max(1)[:, None, None]).nan_to_num_(0, 0, 0)
        Y = self.section.Y() if isinstance(self.section, Transported) else self._Y
        vectors = []
        if isinstance(self.section, Implicit):
            self.section.look = W.device.type == "cpu" or int(self.moves) % 100 == 0
            vectors = [self.matrices(self._local(self.state[key])) for key in self.vectors & set(self.state)]
        moved = (length > 0).to(W.dtype)[:, None, None]
        self.section.move(Y, W, retraction, vectors, moved)
        self.moves += 1
        at_once = not peak <= large and bool(((length > large) & (length <= limit)).any())
        self.section.polish(Y, int(self.moves), moved, at_once)
        if long is not None:
            self.section.long_move(Y, *long, retraction, vectors)
        self.H.zero_()
        return True

    def _take_out(self, warn: Warn, length: Tensor, limit: float) -> tuple[Tensor, Tensor] | None:
        """Take velocities that are long or not finite out of W; return the long ones, in float64, for later."""
        W, n, longest = self.W, self.n, self.space.max_velocity
        if bool(torch.isnan(W).any()):  # 0/0 where A is 0 by its structure, as Adam has it with eps = 0, is 0
            empty = self.space.skew(torch.arange(n * n, dtype=W.dtype, device=W.device).view(n, n)) == 0
            W[..., :n, :].masked_fill_(empty, 0)
            length.copy_(torch.linalg.vector_norm(W, dim=(-2, -1)))
        finite = torch.isfinite(W).flatten(1).all(1)
        per_weight = len(W) // len(self.params)
        if not bool(finite.all()):
            W[~finite] = 0
            length[~finite] = 0
            name = self.names[int((~finite).nonzero()[0]) // per_weight]
            warn(
                "nonfinite",
                f"the velocity of {name} is not finite (a NaN or infinite gradient?): the weight stays where it is, "
                "its moments are lost. Load a state dict, or constrain the weight again: they then start from zero",
            )
        index = (finite & ~(length <= limit)).nonzero().flatten()
        if len(index) == 0:
            return None
        V = W[index].double()
        W[index] = 0
        largest = V.abs().amax((-2, -1), keepdim=True)
        norm = largest * torch.linalg.vector_norm(V / largest, dim=(-2, -1), keepdim=True)
        if bool((norm > longest).any()):
            name = self.names[int(index[0]) // per_weight]
            warn(
                "long",
                f"a velocity of length {float(norm.max()):.1e} of {name} was shortened to {longest:.0e}: is the "
                "learning rate meant?",
            )
        return index, V * (longest / norm).clamp_max(1)

    def apply_section(self) -> None:
        """Y <- Lambda E, into the weights."""
        if isinstance(self.section, Transported):
            torch._foreach_copy_(self.params, self._points)
        elif self._Y.untyped_storage().data_ptr() != self.params[0].untyped_storage().data_ptr():
            torch._foreach_copy_(self.params, list(self._layout(self._Y).unbind(0)))
        if self.shards is not None:
            self.shards.write(self.owners, self.params)
        self.versions = [p._version for p in self.owners]


def check_on_space(params: list[Tensor], space: Space, names: list[str]) -> None:
    """Raise for the first of some weights of one kind that is not on its space."""
    if params[0].is_meta:
        return
    shards = shards_of(params[0], space)
    Y = torch.stack([p.detach() for p in params] if shards is None else shards.pieces(params))
    if Y.numel() == 0:
        return
    distance = _distances(space, Y)
    bad = ~(distance <= tolerance(space, Y))
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        raise ValueError(
            f"{names[i]} of shape {tuple(params[i].shape)} is {float(distance[i]):.1e} off {space}; call "
            f"ghor.constrain(module, name, ghor.{space}), or copy ghor.{space}.project(weight) into it"
        )


def _distances(space: Space, Y: Tensor) -> Tensor:
    """Of P stacked weights, the largest distance in each: (P, *shape) -> (P)."""
    return space.distance(Y.to(COMPUTE_DTYPE.get(Y.dtype, Y.dtype))).reshape(len(Y), -1).amax(1)


def tolerance(space: Space, Y: Tensor) -> float:
    """How far off counts as on: rounding of n orthonormal columns; half precision has few digits to lose."""
    return torch.finfo(Y.dtype).eps * math.sqrt(space.size(Y.shape)[1]) * (4 if Y.dtype in COMPUTE_DTYPE else 100)


def dense(grad: Tensor | None) -> Tensor:
    """A gradient that is there, as a strided tensor."""
    assert grad is not None
    return grad.to_dense() if grad.is_sparse else grad
