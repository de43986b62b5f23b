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
        self.H = self._spread(H)
        # Longest velocities, in units of a root-mean-square singular value: from `large` on rounding is repaired at
        # once, beyond `limit` a step is taken in float64.
        self.large, self.limit = 0.5 * math.sqrt(self.n), min(4 * math.sqrt(self.n), space.max_velocity)
        self.batch = (len(params), *space.matrix(H).shape[1:-2])
        self.state = {key: self._gather(key, states) for key in states[0] if key not in STATE_KEYS}
        self.moves = torch.zeros((), dtype=torch.int64)
        if "moves" in states[0]:
            self.moves.copy_(states[0]["moves"])
        self.master: Tensor | None = None
        self.section = self._section(states)
        self.published: list[Any] = []
        self._bound: dict[str, Any] | None = None
        self._ids: list[int] = []
        self.versions = [p._version for p in self.owners]
        self.begun = self.version()
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

    def version(self) -> int:
        """Another number whenever the section has been written to."""
        return sum(t._version for t in self.section.tensors.values())

    def drop_section(self) -> None:
        """From the members' states: the next stack of them begins anew, from the weights."""
        for d in self.published:
            for key in () if d is None else (*self.section.tensors, "master"):
                d.pop(key, None)

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
            p.device == self.where[1]
            and {p.dtype for p in self.owners} == {self.where[0]}
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
            if self.params[0].numel() == 0:  # no matrix of theirs is on this process
                return
        touched = [p._version != v for p, v in zip(self.owners, self.versions, strict=True)]
        moves, cpu = int(self.moves), self.H.device.type == "cpu"
        point = self._layout(self.section.Y()) if isinstance(self.section, Transported) else self.master
        look = not moves % POLISH_POINT if point is None else cpu or not moves % 100
        if not (look or any(touched)):
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
        if bool(changed.any()):
            self._begin_anew(changed, Y, warn)
        self.versions = [p._version for p in self.owners]

    def _begin_anew(self, changed: Tensor, Y: Tensor, warn: Warn) -> None:
        """Sections of some weights from where they are; raise if that is not on the space."""
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
        rows = changed.repeat_interleave(math.prod(self.batch[1:])).nonzero().flatten()
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

    # -- Algorithm 3: without a look at numbers, for torch.compile ---------------------------------------------------

    def point(self) -> Tensor:
        """Y, tall: what the section holds, or the float32 copy, or the weights."""
        if isinstance(self.section, Transported):
            return self.section.Y()
        return self.matrices(self.weights() if self.master is None else self.master)

    @full_precision()
    def global_grad(self, Y: Tensor, B: Tensor) -> None:
        """B <- global_rep(Lambda, rgrad(Y, G)), fused, in the layout of the shadow."""
        grads = [dense(p.grad) for p in self.owners]
        grads = grads if self.shards is None else self.shards.pieces(grads)
        G = grads[0].unsqueeze(0) if len(grads) == 1 else torch.stack(grads)
        self.section.global_grad(Y, self.matrices(G.detach().to(self.H.dtype)), self.matrices(self._local(B)))

    @full_precision()
    def update_section(self, Y: Tensor) -> Tensor:
        """Lambda <- Lambda R(W), W = H, in place; returns the lengths of W. Where W = 0 no bit changes.

        A velocity that is longer than `limit` or not finite waits for `look_after`, where a look is free. Elsewhere it
        is made as long as float32 can take, or 0.
        """
        W = self.matrices(self._local(self.H))
        length = torch.linalg.vector_norm(W, dim=(-2, -1))
        moved = (length > 0)[:, None, None]
        if W.device.type != "cpu":
            W = (W * (self.limit / length).clamp_max(1)[:, None, None]).nan_to_num(0, 0, 0)
        elif torch.compiler.is_compiling() or (len(length) and not float(length.max()) <= self.limit):
            moved = moved & (length <= self.limit)[:, None, None]
            W = torch.where(moved, W, 0)
        self.section.move(Y, W, by_name(self.group["retraction"]), self._turning(), moved)
        return length

    def apply_section(self, Y: Tensor, length: Tensor) -> None:
        """Y <- Lambda E, into the weights; of half precision ones those that moved, the others are rounded already."""
        compiling = torch.compiler.is_compiling()
        if self.half:
            moved = (length > 0).view(len(self.params), math.prod(self.batch[1:])).any(1)
            moved = moved.view(-1, *[1] * len(self.shape))
            points = torch.where(moved, self._layout(Y).to(self.where[0]), self.weights())
            torch._foreach_copy_(self.params, list(points.unbind(0)))
        elif isinstance(self.section, Transported):
            torch._foreach_copy_(self.params, list(self._layout(Y).unbind(0)) if compiling else self._points)
        elif compiling or Y.untyped_storage().data_ptr() != self.params[0].untyped_storage().data_ptr():
            torch._foreach_copy_(self.params, list(self._layout(Y).unbind(0)))
        if self.shards is not None:
            self.shards.write(self.owners, self.params)

    def _turning(self) -> list[Tensor]:
        """State that an implicit section takes along, tall."""
        keys = sorted(self.vectors & set(self.state)) if isinstance(self.section, Implicit) else []
        return [self.matrices(self._local(self.state[key])) for key in keys]

    # -- what takes a look -------------------------------------------------------------------------------------------

    @full_precision()
    def look_after(self, length: Tensor, warn: Warn) -> None:
        """What `update_section` left, in float64; rounding, at times and at once after long steps."""
        cpu = length.device.type == "cpu"
        peak = float(length.max()) if cpu and len(length) else 0.0  # a look is free on the CPU, and nowhere else
        moved = peak != 0 or not cpu
        self.moves += moved or len(length) == 0  # the latter as on the processes that have a matrix
        if moved and len(length):
            age = int(self.moves)
            long = None if peak <= self.limit else self._take_out(length, warn)
            at_once = not peak <= self.large and bool(((length > self.large) & (length <= self.limit)).any())
            if at_once or long is not None or self.section.is_due(age):
                Y = self.point()
                self.section.polish(Y, age, (length > 0).to(Y.dtype)[:, None, None], at_once)
                if long is not None:
                    self.section.long_move(Y, *long, by_name(self.group["retraction"]), self._turning())
                self.apply_section(Y, length)
            if isinstance(self.section, Implicit):
                self.section.look = cpu or age % 100 == 0
        self.versions = [p._version for p in self.owners]

    def _take_out(self, length: Tensor, warn: Warn) -> tuple[Tensor, Tensor] | None:
        """Of velocities that are long or not finite, the rows and values of those to be taken, in float64."""
        W, n, longest = self.matrices(self._local(self.H)), self.n, self.space.max_velocity
        left = ~(length <= self.limit)
        if bool(torch.isnan(W).any()):  # 0/0 where A is 0 by its structure, as Adam has it with eps = 0, is 0
            empty = self.space.skew(torch.arange(n * n, dtype=W.dtype, device=W.device).view(n, n)) == 0
            W[..., :n, :].masked_fill_(empty, 0)
            length.copy_(torch.linalg.vector_norm(W, dim=(-2, -1)))
        finite = torch.isfinite(W).flatten(1).all(1)
        per_weight = math.prod(self.batch[1:])
        if not bool(finite.all()):
            length[~finite] = 0
            name = self.names[int((~finite).nonzero()[0]) // per_weight]
            warn(
                "nonfinite",
                f"the velocity of {name} is not finite (a NaN or infinite gradient?): the weight stays where it is, "
                "its moments are lost. Load a state dict, or constrain the weight again: they then start from zero",
            )
        index = (finite & left & (length > 0)).nonzero().flatten()
        if len(index) == 0:
            return None
        V = W[index].double()
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
