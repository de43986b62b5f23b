"""Muon in g^hor: momentum, and the blocks A and B of it orthogonalised, each by itself.

    M <- mu M + (1 - mu) B                         B = [A; B], the gradient in g^hor
    V <- (1 - mu) B + mu M  (nesterov), or M
    W <- -lr [msign(V_A); msign(V_B)]              msign X = X (X^H X)^(-1/2), by Newton-Schulz

msign is an odd polynomial, so that of a skew block is skew and W stays in g^hor. msign(O X P) = O msign(X) P
for rotations O and P: the step does not depend on the section, and Muon has no gauge, where Adam has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from ghor._torch.bare_step import bare_step
from ghor._torch.sharding import is_sharded, spread
from ghor.constraints.registry import spaces_by_id
from ghor.lifting.lifted import Lifted
from ghor.lifting.stack import Stack
from ghor.linalg import frobenius
from ghor.spaces import Euclidean, Sphere

COEFFICIENTS = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
PER_WEIGHT = ("space", "anchor")  # group keys that may be lists with an entry for each parameter


def newton_schulz(X: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """msign of a batch of matrices (M, a, b), nearly: singular values come out between 0.7 and 1.2, as in
    torch.

    X <- a X + X (b X^H X + c (X^H X)^2), from X/||X||_F, on the shorter side. In the dtype of X, where torch
    has bfloat16: with 3 digits the frame would show.
    """
    a, b, c = coefficients
    wide = X.shape[-2] < X.shape[-1]
    X = X.mH if wide else X
    X = X / frobenius(X).clamp_min(eps)[:, None, None]
    for _ in range(steps):
        G = X.mH @ X
        X = torch.baddbmm(X, X, torch.baddbmm(G, G, G, beta=b, alpha=c), beta=a)
    return X.mH if wide else X


def ratio(adjust_lr_fn: str | None, shape: Sequence[int]) -> float:
    """What the rate of a weight on a manifold is multiplied with: None is 1, so that lr is an angle; others
    as torch's.

    Of B alone each principal angle turns by lr (2 atan(lr/2) with Cayley), of A alone each plane; of both
    together no vector turns by more than (1 + sqrt 5)/2 lr, the spectral norm of [[1, 1], [1, 0]].
    """
    rows, columns = shape[0], math.prod(shape[1:])
    if adjust_lr_fn == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if adjust_lr_fn == "match_rms_adamw" else 1.0


class _Muon(Optimizer):
    """torch.optim.Muon on matrices, torch.optim.AdamW on all else: by groups, which are split where they are
    mixed."""

    _embeddings: frozenset[int] = frozenset()

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = DEFAULT_NS_STEPS,
        adjust_lr_fn: str | None = None,
        adamw: dict[str, Any] | None = None,
    ) -> None:
        options: Any = (lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn)
        if len(ns_coefficients) != 3 or not 0 <= ns_steps < 100:
            raise ValueError(
                f"ns_coefficients are 3 numbers and ns_steps is less than 100, got {ns_coefficients} and {ns_steps}"
            )
        self._adamw = torch.optim.AdamW(
            [torch.zeros(1)], **(adamw or {})
        ).defaults  # they check their options
        super().__init__(params, torch.optim.Muon([torch.zeros(1, 1)], *options).defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As AdamW's: step counts of old state dicts are numbers."""
        super().__setstate__(state)
        for held in self.state.values():
            if "step" in held and not torch.is_tensor(held["step"]):
                held["step"] = torch.tensor(float(held["step"]), dtype=torch.float32)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. With `adamw` True or False the group is all AdamW's or all Muon's, else it is split in
        two.

        The part of AdamW has options of its own: those of the constructor's `adamw`, of the group's `adamw`
        if that is a dict, and, where the whole group is such, the group's.
        """
        self._add_parts(param_group, super().add_param_group)

    def _add_parts(self, group: dict[str, Any], add: Callable[[dict[str, Any]], None]) -> None:
        """All parts of a group, or none."""
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
            yield group  # torch says what is wrong
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
        """torch's two steps, each on its own groups."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            for of in (torch.optim.Muon, torch.optim.AdamW):
                self.param_groups = [
                    g for g in groups if g["params"] and g["adamw"] is (of is torch.optim.AdamW)
                ]
                if of is torch.optim.Muon:
                    self.param_groups = [self._rest(group) for group in self.param_groups]
                bare_step(of, differentiable=False)(self)
        finally:
            self.param_groups = groups
        return loss

    def _rest(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group without its sharded matrices, which torch's Muon cannot do: these are stepped here."""
        sharded = [p for p in group["params"] if p.grad is not None and is_sharded(p)]
        for p in sharded:
            buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
            buf.lerp_(p.grad, 1 - group["momentum"])
            update = p.grad.lerp(buf, group["momentum"]) if group["nesterov"] else buf
            options = group["ns_coefficients"], group["ns_steps"], group["eps"]
            O = spread(_zeropower_via_newtonschulz(update.full_tensor(), *options).to(p.dtype), p)
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(O, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], p.shape))
        return {**group, "params": [p for p in group["params"] if not is_sharded(p)]} if sharded else group


_Muon.__name__ = "Muon"


class Muon(Lifted, _Muon):
    """Muon on homogeneous spaces: W = -lr [msign(V_A); msign(V_B)], V the momentum of B; see `ghor.muon`.

    Options and defaults are torch's. On a manifold weight `lr` is the angle that a step turns, unless
    `adjust_lr_fn` asks for torch's scalings by name. Euclidean matrices are torch.optim.Muon's, bit for bit.
    All other Euclidean weights, and those of nn.Embedding where a module is given, are AdamW's: a group of
    their own, with the options `adamw`. A group can say which it is: {"params": [...], "adamw": True, "lr":
    3e-4}.

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
        """As torch's; `adamw` as in the constructor, or True or False."""
        self._add_parts(param_group, super().add_param_group)

    def _for_adamw(self, params: list[Tensor], group: dict[str, Any]) -> Iterator[bool]:
        space = group.get("space", self._ours["space"])
        spaces = (
            space if isinstance(space, (list, tuple)) and len(space) == len(params) else [space] * len(params)
        )
        declared = spaces_by_id()
        for p, space, other in zip(params, spaces, super()._for_adamw(params, group), strict=True):
            found = declared.get(id(p)) if space is None else space
            yield other and (found is None or isinstance(found, Euclidean))

    def turning_keys(self, group: dict[str, Any]) -> set[str]:
        """Momentum turns with the frame, and so does the first moment of AdamW."""
        return {"momentum_buffer", "exp_avg"}

    def _before(self) -> tuple[Callable[..., Any], list[Stack], list[Tensor]]:
        """Stacks of Muon's are ours; torch's step gets the rest."""
        out = super()._before()
        ours = [s for s in out[1] if not s.group["adamw"]]
        for s in ours:
            if not self.state[s.H]:
                self.state[s.H]["momentum_buffer"] = torch.zeros_like(s.H)
        for gi, group in enumerate(self.param_groups):
            shadows = {id(s.H) for s in ours if s.gi == gi}
            group["params"] = [p for p in group["params"] if id(p) not in shadows]
        self._stateless = any(not self.state.get(p) for group in self.param_groups for p in group["params"])
        return out

    def _velocities(self, rule: Callable[..., Any], stacks: list[Stack]) -> None:
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
        O = torch.zeros_like(V)
        space = s.space.one
        for X, out in zip(space.ghor_blocks(V), space.ghor_blocks(O), strict=True):
            out.copy_(newton_schulz(X, group["ns_coefficients"], group["ns_steps"], group["eps"]))
        W = space.hor(O)  # exactly skew
        s.W.mul_(1 - group["lr"] * group["weight_decay"])  # 0 without an anchor
        sides = s.E.flatten().shape if isinstance(space, Sphere) else s.E.shape
        s.W.add_(W * (-group["lr"] * ratio(group["adjust_lr_fn"], sides)))
