"""Muon in g^hor: the blocks A and B of the momentum are orthogonalised, each by itself.

    M <- mu M + (1 - mu) G                         G = [A; B], the gradient in g^hor
    V <- (1 - mu) G + mu M  (nesterov), or M
    W <- -lr [msign(V_A); msign(V_B)]              msign X = X (X^H X)^(-1/2), by Newton-Schulz

msign is computed by an odd polynomial, which takes skew blocks to skew blocks, so W stays in g^hor. And
msign(O X P) = O msign(X) P for rotations O and P, so where frames differ by rotations the step, unlike
Adam's, does not depend on the section. On the symplectic spaces frames differ by symplectic matrices, which
are not rotations; there the step does depend on the section, as that of SGD does.

msign gives every block the same size, however small it was, and would blow up a block that is nothing but
rounding: for losses that are invariant under rotations of the columns, A is 1e-6 of B in float32. Therefore
a block that is small beside the whole of V counts as 0, see `Muon`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ghor._torch.bare_step import bare_step
from ghor._torch.muon import DEFAULTS, orthogonalised
from ghor._torch.sharding import distribute_like, is_sharded
from ghor.constraints.registry import spaces_by_id
from ghor.lifting.lifted import Lifted
from ghor.lifting.stack import Stack
from ghor.linalg import frobenius
from ghor.spaces import Euclidean, Space, Sphere

PER_WEIGHT = ("space", "anchor")  # group keys that may be lists with an entry for each parameter

# A block counts as 0 below this many units of rounding of V, but at most below this part of V. A is a
# difference of products with the Euclidean gradient G, so its rounding is about eps |G|, and near an optimum
# |V| is a hundredth of |G| or less. In half precision, where 1000 eps is about 1 or more, 1/32 is used.
ROUNDING, AT_MOST = 1000, 1 / 32


def newton_schulz(X: Tensor, coefficients: Sequence[float], steps: int) -> Tensor:
    """Approximate msign for matrices (M, a, b) with ||X||_F = 1: singular values end up in 0.7 ... 1.2.

    X <- a X + X (b X^H X + c (X^H X)^2), on the shorter side; 0 stays 0. It runs in the dtype of X. torch
    uses bfloat16, with whose 3 digits the choice of frame would show.
    """
    a, b, c = coefficients
    wide = X.shape[-2] < X.shape[-1]
    X = X.mH if wide else X
    for _ in range(steps):
        G = X.mH @ X
        X = torch.baddbmm(X, X, torch.baddbmm(G, G, G, beta=b, alpha=c), beta=a)
    return X.mH if wide else X


def unit_blocks(V: Tensor, space: Space, floor: float) -> list[Tensor]:
    """The blocks X of V (M, *point) as X/||X||_F, and 0 where ||X||_F <= floor ||V||_F, at any scale of V."""
    peak = V.abs().flatten(1).amax(1)
    peak = torch.where(peak == 0, 1, peak)  # divided by first: squares of entries may overflow, or vanish
    blocks = space.ghor_blocks(V / peak.view(-1, *[1] * (V.dim() - 1)))
    sizes = [frobenius(X) for X in blocks]
    least = floor * torch.stack(sizes).square().sum(0).sqrt()
    # `size <= least`, not the negation of `size > least`: NaN stays NaN.
    return [
        X * torch.where(size <= least, 0, 1 / size)[:, None, None]
        for X, size in zip(blocks, sizes, strict=True)
    ]


def ratio(adjust_lr_fn: str | None, shape: Sequence[int]) -> float:
    """The factor of lr for a weight on a manifold: 1 for None, so that lr is an angle; others as in torch.

    With B alone each principal angle turns by lr (2 atan(lr/2) with Cayley), with A alone each plane; with
    both no vector turns by more than (1 + sqrt 5)/2 lr, the spectral norm of [[1, 1], [1, 0]].
    """
    rows, columns = shape[0], math.prod(shape[1:])
    if adjust_lr_fn == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if adjust_lr_fn == "match_rms_adamw" else 1.0


class _Muon(Optimizer):
    """torch.optim.Muon for matrices, torch.optim.AdamW for all else; groups that have both are split."""

    _embeddings: frozenset[int] = frozenset()

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = DEFAULTS["lr"],
        weight_decay: float = DEFAULTS["weight_decay"],
        momentum: float = DEFAULTS["momentum"],
        nesterov: bool = DEFAULTS["nesterov"],
        ns_coefficients: tuple[float, float, float] = DEFAULTS["ns_coefficients"],
        eps: float = DEFAULTS["eps"],
        ns_steps: int = DEFAULTS["ns_steps"],
        adjust_lr_fn: str | None = None,
        adamw: dict[str, Any] | None = None,
    ) -> None:
        options: Any = (lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn)
        if len(ns_coefficients) != 3 or not 0 <= ns_steps < 100:
            raise ValueError(
                "ns_coefficients are 3 numbers and ns_steps is less than 100, "
                f"got {ns_coefficients} and {ns_steps}"
            )
        # torch's own constructors check the options of both.
        self._adamw = torch.optim.AdamW([torch.zeros(1)], **(adamw or {})).defaults
        super().__init__(params, torch.optim.Muon([torch.zeros(1, 1)], *options).defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After load_state_dict, deepcopy and unpickling.

        A state dict of torch.optim.Muon does not say which groups are AdamW's: they stay what they are. Step
        counts of old state dicts are numbers, and become tensors, as in AdamW.
        """
        before = self.__dict__.get("param_groups", [])
        super().__setstate__(state)
        if "_adamw" not in self.__dict__:  # pickled by 0.1, as lift(torch.optim.Muon, blocks=True)
            self._adamw = torch.optim.AdamW([torch.zeros(1)]).defaults
        for i, group in enumerate(self.param_groups):
            known = before[i] if i < len(before) else {"adamw": False}
            for key in known.keys() & {"adamw", *self._adamw, *DEFAULTS}:
                group.setdefault(key, known[key])
        for held in self.state.values():
            if "step" in held and not torch.is_tensor(held["step"]):
                held["step"] = torch.tensor(float(held["step"]), dtype=torch.float32)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. With `adamw` True or False the whole group is AdamW's or Muon's, else it is split.

        AdamW's part has options of its own: from the constructor's `adamw`, from the group's `adamw` if that
        is a dict, and, if the whole group is AdamW's, from the group itself.
        """
        self._add_parts(param_group, super().add_param_group)

    def _add_parts(self, group: dict[str, Any], add: Callable[[dict[str, Any]], None]) -> None:
        """Add all parts of a group, or none."""
        count = len(self.param_groups)
        try:
            for part in self._parts(group):
                add(part)
        except BaseException:
            del self.param_groups[count:]
            raise

    def _parts(self, group: Any) -> Iterator[Any]:
        given = group.get("params") if isinstance(group, dict) else None
        entries = [given] if isinstance(given, Tensor) else [] if given is None else list(given)
        tensors: list[Any] = [e[1] if isinstance(e, tuple) and len(e) == 2 else e for e in entries]
        if given is None or isinstance(given, set) or not all(isinstance(p, Tensor) for p in tensors):
            yield group  # torch raises, and says what is wrong
            return
        flag, rest = group.get("adamw"), {k: v for k, v in group.items() if k != "adamw"}
        of_adamw = [flag] * len(entries) if isinstance(flag, bool) else list(self._for_adamw(tensors, group))
        own = flag if isinstance(flag, dict) else {}
        for key in own.keys() - self._adamw.keys():
            raise ValueError(f"unknown option {key!r} of AdamW; there are {sorted(self._adamw)}")
        if group.get("adjust_lr_fn") not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"adjust_lr_fn is None, 'original' or 'match_rms_adamw', got {group['adjust_lr_fn']!r}"
            )
        alone = (bool(of_adamw) and all(of_adamw)) or flag is True
        for kind in (True,) if alone else (False, True) if any(of_adamw) else (False,):
            chosen = [i for i, k in enumerate(of_adamw) if k is kind]
            part = {**rest, "params": [entries[i] for i in chosen], "adamw": kind}
            for key in PER_WEIGHT:
                if isinstance(part.get(key), (list, tuple)) and len(part[key]) == len(entries):
                    part[key] = [part[key][i] for i in chosen]
            yield (
                {**part, **self._adamw, **own, **(rest if alone else {}), "params": part["params"]}
                if kind
                else part
            )

    def _for_adamw(self, params: list[Tensor], group: dict[str, Any]) -> Iterator[bool]:
        for p in params:
            yield p.dim() != 2 or p.is_complex() or id(p) in self._embeddings

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        of, count = (torch.optim.AdamW, 6) if group["adamw"] else (torch.optim.Muon, 3)
        lists = lists if len(lists) == count else tuple([] for _ in range(count))
        return bool(of._init_group(self, group, *lists))  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """torch's two steps, each on its own groups, and ours for sharded matrices, which torch's lacks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        of_muon = [group for group in groups if group["params"] and not group["adamw"]]
        sharded = [(p, g) for g in of_muon for p in g["params"] if is_sharded(p) and p.grad is not None]
        try:
            self.param_groups = [_without_sharded(group) for group in of_muon] if sharded else of_muon
            bare_step(torch.optim.Muon, differentiable=False)(self)
            self.param_groups = [group for group in groups if group["params"] and group["adamw"]]
            bare_step(torch.optim.AdamW, differentiable=False)(self)
        finally:
            self.param_groups = groups
        for p, group in sharded:
            self._step_sharded(p, group)
        return loss

    def _step_sharded(self, p: Any, group: dict[str, Any]) -> None:
        """torch's Muon for a DTensor: only the update is gathered, and every process orthogonalises it."""
        buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
        buf.lerp_(p.grad, 1 - group["momentum"])
        update = p.grad.lerp(buf, group["momentum"]) if group["nesterov"] else buf
        options = group["ns_coefficients"], group["ns_steps"], group["eps"]
        O = distribute_like(orthogonalised(update.full_tensor(), *options).to(p.dtype), p)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(O, alpha=-group["lr"] * ratio(group["adjust_lr_fn"] or "original", p.shape))


def _without_sharded(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "params": [p for p in group["params"] if not is_sharded(p)]}


_Muon.__name__ = "Muon"


class Muon(Lifted, _Muon):
    """Muon on homogeneous spaces: W = -lr [msign(V_A); msign(V_B)], V the momentum; see `ghor.optim.muon`.

    Options and defaults are torch's. For a weight on a manifold `lr` is the angle that a step turns, unless
    `adjust_lr_fn` asks for one of torch's scalings by name, and `eps` is relative: a block of V smaller than
    eps ||V||, or than 1000 units of rounding of ||V||, counts as 0, so the step does not depend on the scale
    of the loss. `ghor.lift(torch.optim.Muon)` is this class, also with `blocks=True`.

    Euclidean matrices move as with torch.optim.Muon, bit for bit. All other Euclidean weights, and those of
    nn.Embedding if a module is given, are AdamW's: a group of their own, with the options `adamw`. A group
    can say which it is: {"params": [...], "adamw": True, "lr": 3e-4}.

    >>> opt = Muon(model, lr=0.02, adamw={"lr": 3e-4, "weight_decay": 0.01})
    """

    __module__ = "ghor.optim"
    Base = _Muon

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(params, nn.Module):
            tables = [m for m in params.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
            self._embeddings = frozenset(id(m.weight) for m in tables)
        super().__init__(params, *args, **kwargs)
        self._embeddings = frozenset()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; `adamw` is a dict as in the constructor, or True or False for the whole group."""
        self._add_parts(param_group, super().add_param_group)

    def _for_adamw(self, params: list[Tensor], group: dict[str, Any]) -> Iterator[bool]:
        """Weights on manifolds are Muon's, whatever their shape."""
        given = group.get("space", self._ours["space"])
        each = isinstance(given, (list, tuple)) and len(given) == len(params)
        declared = spaces_by_id()
        for p, space, other in zip(
            params, given if each else [given] * len(params), super()._for_adamw(params, group), strict=True
        ):
            found = declared.get(id(p)) if space is None else space
            yield other and (found is None or isinstance(found, Euclidean))

    def turning_keys(self, group: dict[str, Any]) -> set[str]:
        """Momentum turns with the frame, and so does the first moment of AdamW."""
        return {"momentum_buffer", "exp_avg"}

    def _before(self) -> tuple[Callable[..., Any], list[Stack], list[Tensor]]:
        """Take the shadows that are orthogonalised here out of the groups, so that torch's Muon skips them.

        Their state is made here as well, because torch.compile takes the state that it finds as complete.
        """
        out = super()._before()
        ours = [s for s in out[1] if not s.group["adamw"]]
        for s in ours:
            if not self.state[s.H]:
                self.state[s.H]["momentum_buffer"] = torch.zeros_like(s.H)
        shadows = {id(s.H) for s in ours}
        for group in self.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in shadows]
        self._stateless = any(not self.state.get(p) for group in self.param_groups for p in group["params"])
        return out

    def _velocities(self, rule: Callable[..., Any], stacks: list[Stack]) -> None:
        """Apply torch's rules, then ours to the shadows that `_before` has taken out."""

        def both(optimizer: Any) -> None:
            rule(optimizer)
            for s in stacks:
                if not s.group["adamw"]:
                    self._orthogonalise(s)

        super()._velocities(both, stacks)

    def _orthogonalise(self, s: Stack) -> None:
        """cache <- update(cache, B), W <- velocity(cache), for one stack."""
        group, grad = s.group, s.H.grad
        assert grad is not None
        B, M = s.local(grad), s.local(self.state[s.H]["momentum_buffer"])
        M.lerp_(B, 1 - group["momentum"])
        V = s.points(B.lerp(M, group["momentum"]) if group["nesterov"] else M)
        O, space = torch.zeros_like(V), s.space.one
        floor = min(max(group["eps"], ROUNDING * torch.finfo(s.where[0]).eps), AT_MOST)
        for X, out in zip(unit_blocks(V, space, floor), space.ghor_blocks(O), strict=True):
            out.copy_(newton_schulz(X, group["ns_coefficients"], group["ns_steps"]))
        W = space.hor(O)  # exactly skew
        s.W.mul_(1 - group["lr"] * group["weight_decay"])  # W is 0 here without an anchor
        sides = s.E.flatten().shape if isinstance(space, Sphere) else s.E.shape
        s.W.add_(W * (-group["lr"] * ratio(group["adjust_lr_fn"], sides)))
