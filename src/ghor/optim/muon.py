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
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ghor._torch.bare_step import bare_step
from ghor._torch.muon import DEFAULTS
from ghor._torch.muon import orthogonalised as torchs_orthogonalised
from ghor._torch.sharding import distribute_like, is_sharded
from ghor.constraints.registry import spaces_by_id
from ghor.lifting.lifted import Lifted
from ghor.lifting.param_groups import Options, Params
from ghor.lifting.stack import Stack
from ghor.linalg import eye_like
from ghor.spaces import Euclidean, Space, Sphere

PER_WEIGHT = ("space", "anchor")  # group keys that may be lists with an entry for each parameter

# A block counts as 0 below this many units of rounding of V, but at most below this part of V. A is a
# difference of products with the Euclidean gradient G, so its rounding is about eps |G|, and near an optimum
# |V| is a hundredth of |G| or less. In half precision, where 1000 eps is about 1 or more, 1/32 is used.
ROUNDING, AT_MOST = 1000, 1 / 32


RESTART = 3  # iterations on a Gram matrix before it is computed anew


def msign(
    blocks: Sequence[Tensor],
    squares: Tensor,
    G: Tensor,
    coefficients: Sequence[float],
    steps: int,
    factors: Sequence[float],
) -> list[Tensor]:
    """Approximate msign of matrices X (M, a, n): X <- X (a I + b X^H X + c (X^H X)^2), from X/||X||_F.

    Singular values end up in 0.7 ... 1.2, and 0 stays 0. `G` are the X^H X, (K, n, n) for all blocks, and
    `squares` (K) their ||X||_F^2, infinite for a block that counts as 0. All but the first and the last
    product are n x n, and one kernel for all blocks: G alone is iterated, as T = I + G/h with h = b/(2 c), in
    which the polynomial is S = c h^2 T^2 + (a - b h/2) I and the next G is S G S; Q collects the factors S.
    Rounding of G grows by a^2 in each iteration, hence the restarts. It runs in the dtype of X. torch uses
    bfloat16, with whose 3 digits the choice of frame would show. Results are multiplied by the `factors` of
    their blocks.
    """
    a, b, c = coefficients
    count, r = [len(X) for X in blocks], squares.rsqrt().view(-1, 1, 1)
    if G.shape[-1] == 1 or steps == 0:  # one column has the one singular value 1
        x = 1.0
        for _ in range(steps):
            x = a * x + b * x**3 + c * x**5
        return [X * (q * (x * f)) for X, q, f in zip(blocks, r.split(count), factors, strict=True)]
    h, I = b / (2 * c) if abs(c) / 4 <= abs(b) <= 8 * abs(c) else 0.0, eye_like(G)  # others cost digits
    sizes = squares.view(-1, 1, 1)
    T = torch.addcdiv(I, G, sizes, value=1 / h) if h else G / sizes  # T = G if h = 0
    Q: Tensor | None = None
    for k in range(1, steps + 1):
        start, beta, alpha = (I, a - b * h / 2, c * h * h) if h else (I * a + T * b, 1, c)
        S = torch.baddbmm(start, T, T, beta=beta, alpha=alpha)
        Q = S * r if k == 1 else S if Q is None else Q @ S
        if k == steps:
            each = zip(blocks, Q.split(count), factors, strict=True)
            return [torch.baddbmm(X, X, q, beta=0, alpha=f) for X, q, f in each]
        if k % RESTART == 0:
            blocks, Q = [X @ q for X, q in zip(blocks, Q.split(count), strict=True)], None
            T = gram(blocks, I, h)
        else:
            T = torch.baddbmm(I, torch.baddbmm(S, S, T, beta=-1), S) if h else S @ T @ S
    raise AssertionError("not reached: the last of the steps returns")


def orthogonalised(
    V: Tensor,
    space: Space,
    coefficients: Sequence[float],
    steps: int,
    floor: float,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """msign of the blocks X of V (M, *point) times `scale`, and 0 where ||X||_F <= floor ||V||_F.

    It does not depend on the scale of V.
    """
    blocks = space.ghor_blocks(normalised(V))
    factors = [scale * f for f in space.ghor_factors(len(blocks), V.shape)]
    wide = len(blocks) == 1 and blocks[0].shape[-2] < blocks[0].shape[-1]
    blocks = [X.mH for X in blocks] if wide else blocks
    # Blocks with different numbers of columns, as poses have them, one by one.
    together = len({X.shape[-1] for X in blocks}) == 1
    parts = [(blocks, factors)] if together else [([X], [f]) for X, f in zip(blocks, factors, strict=True)]
    results: list[Tensor] = []
    for some, of_them in parts:
        G = gram(some)
        results += msign(some, without_small(G, floor), G, coefficients, steps, of_them)
    return space.from_ghor_blocks([X.mH for X in results] if wide else results, V, out)


def normalised(V: Tensor) -> Tensor:
    """V/||V||_F for each of V (M, *point), and 0 for 0; squares of entries neither overflow nor vanish."""
    dims, real = tuple(range(1, V.dim())), torch.finfo(V.dtype)
    norm: Callable[..., Tensor] = torch.linalg.vector_norm
    if real.bits == 64 or V.device.type == "mps":  # no wider dtype for the squares: the largest entry is 1
        V = V / norm(V, math.inf, dims, keepdim=True).clamp_min(real.tiny)
        return V / norm(V, 2, dims, keepdim=True).clamp_min(real.tiny)
    size = norm(V, 2, dims, keepdim=True, dtype=torch.complex128 if V.is_complex() else torch.float64)
    room = size.new_empty(size.shape, dtype=V.dtype.to_real())
    return V / torch.ops.aten.threshold.out(size, real.tiny, 1.0, out=room)


def gram(blocks: Sequence[Tensor], I: Tensor | None = None, h: float = 0.0) -> Tensor:
    """X^H X of all matrices of all blocks; I + X^H X/h if there is an h."""
    X, n = blocks[0], blocks[0].shape[-1]
    G = X.new_empty(len(blocks), len(X), n, n)
    for X, out in zip(blocks, G, strict=True):
        if I is not None and h:
            torch.baddbmm(I, X.mH, X, alpha=1 / h, out=out)
        else:
            torch.bmm(X.mH, X, out=out)
    return G.view(-1, n, n)


def without_small(G: Tensor, floor: float) -> Tensor:
    """||X||_F^2 of all matrices, from their X^H X; infinite for those at or below the floor.

    NaN is not below it, and stays NaN.
    """
    return nn.functional.threshold(G.diagonal(dim1=-2, dim2=-1).real.sum(-1), floor**2, math.inf)


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
        O = distribute_like(torchs_orthogonalised(update.full_tensor(), *options).to(p.dtype), p)
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

    if TYPE_CHECKING:

        def __init__(
            self,
            params: Params,
            lr: float | Tensor = 0.001,
            weight_decay: float = 0.1,
            momentum: float = 0.95,
            nesterov: bool = True,
            ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
            eps: float = 1e-07,
            ns_steps: int = 5,
            adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
            adamw: dict[str, Any] | None = None,
            **ours: Unpack[Options],
        ) -> None: ...

    else:

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
        space, floor = s.space.one, min(max(group["eps"], ROUNDING * torch.finfo(s.where[0]).eps), AT_MOST)
        sides = s.E.flatten().shape if isinstance(space, Sphere) else s.E.shape
        rate = -group["lr"] * ratio(group["adjust_lr_fn"], sides)
        rule = V, space, group["ns_coefficients"], group["ns_steps"], floor
        sized = getattr(space, "radius", 1) != 1  # on spheres W is a length; lr stays an angle
        if not (s.decays or sized or torch.is_tensor(rate)):
            orthogonalised(*rule, scale=rate, out=s.W)
            return
        W = orthogonalised(*rule)
        if sized:
            W = W * s.each(s.section.radius())
        if s.decays:  # otherwise s.W is 0
            s.W.mul_(1 - group["lr"] * group["weight_decay"])
        s.W.add_(W * rate) if torch.is_tensor(rate) else s.W.add_(W, alpha=rate)
