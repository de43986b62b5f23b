"""Muon in g^hor: the blocks of the momentum are orthogonalised, each by itself.

    M <- mu M + (1 - mu) G                         G the gradient in g^hor, in blocks A and B
    V <- (1 - mu) G + mu M  (nesterov), or M
    W <- -lr [msign(V_A); msign(V_B)]              msign X = X (X^H X)^(-1/2), by Newton-Schulz

msign is computed by an odd polynomial, which takes skew blocks to skew blocks, so W stays in g^hor. And
msign(O X P) = O msign(X) P for rotations O and P, so where frames differ by rotations the step, unlike
Adam's, does not depend on the frame: on Stiefel, Grassmann and flags it has none (`ghor.spaces.tangent`), and
K = Q B takes the place of B. On the symplectic spaces frames differ by symplectic matrices, which are not
rotations; there the step does depend on the frame, as that of SGD does.

The polynomial is computed as a right factor P, n x n, msign X = X P: what is tangent stays so in any
precision.

From top to bottom: msign, the rule of a batch, torch's rules for the rest, which weights are whose.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ghor._torch.bare_step import bare_step
from ghor._torch.sharding import distribute_like, is_sharded
from ghor.constraints.registry import declared_space
from ghor.lifting.batch import Batch, OwnRule
from ghor.lifting.groups import Options, Params, Weight, each
from ghor.lifting.law import Traits
from ghor.lifting.lifted import Lifted
from ghor.linalg import times
from ghor.spaces import Euclidean

Triple = tuple[float, float, float]

ADJUSTMENTS = (None, "original", "match_rms_adamw")
PER_WEIGHT = ("params", "param_names", "space", "anchor")  # keys with an entry for each weight of a group

# The first five steps of Polar Express (Amsel, Persson, Musco, Gower 2025, arXiv:2505.16932, Algorithm 1),
# for singular values above 1e-3 ||X||_F; divided by their safety factor, so that rounding cannot leave the
# interval.
POLAR_EXPRESS: tuple[Triple, ...] = tuple(
    (a / 1.01, b / 1.01**3, c / 1.01**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
)

# A block counts as 0 below this many units of rounding of V, but at most below this part of V. A is a
# difference of products with the Euclidean gradient G, so its rounding is about eps |G|, and near an optimum
# |V| is a hundredth of |G| or less. In half precision, where 1000 eps is about 1 or more, 1/32 is used.
ROUNDING, AT_MOST = 1000, 1 / 32
NOISE = 0.5  # the rounding of X^H X up to which it is iterated instead of computed anew


# -- msign: by right factors, so what is tangent stays so ----------------------------------------------------


def right_factors(blocks: Sequence[Tensor], triples: Sequence[Triple], full: torch.dtype) -> Tensor:
    """P (K, n, n) with X P = msign X for the matrices X of `blocks`, each (M, a, n) of norms ||X||_F = 1.

    X <- X S, S = a I + B, B = b X^H X + c (X^H X)^2; but T = X^H X alone is iterated, T <- S T S, for all at
    once, and P collects the S. It runs in the dtype of X, and P, which holds gains from 1 to 485, is
    collected in `full`. Rounding of T grows by a^2 in each step, so before it matters T is computed anew: in
    bfloat16 every second step, in float32 every seventh.
    """
    count, eps = list(map(len, blocks)), torch.finfo(blocks[0].dtype).eps
    T, noise = gram_of(blocks), eps
    P: Tensor | None = None  # T = (X P Q)^H X P Q
    Q: Tensor | None = None
    for k, (a, b, c) in enumerate(triples, 1):
        B = torch.baddbmm(T, T, T, beta=b, alpha=c)
        if Q is None:
            Q = B.clone()
            Q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            Q = torch.baddbmm(Q, Q, B, beta=a)
        noise *= a * a
        if k < len(triples) and noise > NOISE:
            blocks = [X @ q for X, q in zip(blocks, Q.split(count), strict=True)]
            P = Q.to(full) if P is None else P @ Q.to(full)
            T, Q, noise = gram_of(blocks), None, eps
        elif k < len(triples):
            ST = torch.baddbmm(T, B, T, beta=a)
            T = torch.baddbmm(ST, ST, B, beta=a)
    assert Q is not None
    return Q.to(full) if P is None else P @ Q.to(full)


def gram_of(blocks: Sequence[Tensor]) -> Tensor:
    """X^H X of all matrices of all blocks, one after the other."""
    if len(blocks) == 1:
        return blocks[0].mH @ blocks[0]
    X, n = blocks[0], blocks[0].shape[-1]
    G = X.new_empty(len(blocks), len(X), n, n)
    for X, out in zip(blocks, G, strict=True):
        torch.bmm(X.mH, X, out=out)
    return G.flatten(0, 1)


def orthogonalise_(
    blocks: Sequence[Tensor],
    triples: Sequence[Triple],
    floor: float,
    rate: Any,
    low: torch.dtype | None = None,
) -> None:
    """X <- rate msign(X) for the blocks X (M, a, n) of elements V of g^hor; 0 where ||X||_F <= floor ||V||_F.

    Singular values end up in 0.7 ... 1.2 of rate, and 0 stays 0, whatever the scale of V.
    """
    _normalise_(blocks, floor)
    for some in _of_a_width(blocks):
        if not triples or some[0].shape[-1] == 1:  # one singular value, 1
            x = 1.0
            for a, b, c in triples:
                x = a * x + b * x**3 + c * x**5
            for X in some:
                X.mul_(x * rate)
            continue
        lower = [X.to(low) for X in some] if low else some
        P = right_factors(lower, triples, some[0].dtype) * rate
        for X, p in zip(some, P.split(len(some[0])), strict=True):
            X.copy_(times(X, p))


def _normalise_(blocks: Sequence[Tensor], floor: float) -> None:
    """X <- X/||X||_F, and 0 where ||X||_F <= floor ||V||_F."""
    dtype, real, norm = blocks[0].dtype, blocks[0].real.dtype, torch.linalg.vector_norm
    wide = dtype if blocks[0].device.type == "mps" else torch.promote_types(dtype, torch.float64)
    if wide == dtype:  # there is no wider one for the squares: the largest entry is 1
        top = torch.stack([X.abs().amax((-2, -1), keepdim=True) for X in blocks]).amax(0)
        for X in blocks:
            X.div_(top.clamp_min(torch.finfo(real).tiny))
    sizes = torch.stack([norm(X, dim=(-2, -1), keepdim=True, dtype=wide) for X in blocks])
    sizes.masked_fill_(sizes <= floor * norm(sizes, dim=0), math.inf)
    for X, own in zip(blocks, sizes.to(real), strict=True):
        X.div_(own)


def _of_a_width(blocks: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Blocks with equally many columns together: only those of poses differ."""
    return [blocks] if len({X.shape[-1] for X in blocks}) == 1 else [[X] for X in blocks]


# -- the rule of a batch -------------------------------------------------------------------------------------


def momentum(b: Batch) -> dict[str, Any]:
    """M = 0."""
    return {"momentum_buffer": torch.zeros_like(b.H.data)}


def velocity(b: Batch) -> None:
    """W <- -lr msign of the blocks of V."""
    group, W, M = b.group, b.H, b.state["momentum_buffer"]
    M.lerp_(b.G, 1 - group["momentum"])
    if group["nesterov"]:
        torch.lerp(b.G, M, group["momentum"], out=W)
    else:
        W.copy_(M)
    floor = min(max(group["eps"], ROUNDING * torch.finfo(b.params[0].dtype).eps), AT_MOST)
    rate = -group["lr"] * ratio(group["adjust_lr_fn"], *sides(b))
    low = None if W.is_complex() else group["ns_dtype"]
    orthogonalise_(b.frame.blocks(W), triples(group), floor, rate, low)
    if b.scale is not None:  # W is a length there, and lr stays an angle
        b.frame.scale_(W, b.scale)


def triples(group: dict[str, Any]) -> list[Triple]:
    """One triple for each step: `ns_coefficients` is one, for `ns_steps` steps, or a list."""
    given = group["ns_coefficients"]
    return [given] * group["ns_steps"] if is_triple(given) else list(given)


def is_triple(given: Any) -> bool:
    """Whether it is (a, b, c) and no list of such."""
    return len(given) == 3 and all(isinstance(x, (int, float)) for x in given)


def ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """The factor of lr for a weight on a manifold: 1 for None, so that lr is an angle; others as in torch.

    With B alone each principal angle turns by lr (2 atan(lr/2) with Cayley), with A alone each plane; with
    both no vector turns by more than (1 + sqrt 5)/2 lr, the spectral norm of [[1, 1], [1, 0]].
    """
    if adjust_lr_fn == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if adjust_lr_fn == "match_rms_adamw" else 1.0


def sides(b: Batch) -> tuple[int, int]:
    """Rows and columns of a point as its weight has it, wide or tall."""
    return replace(b.layout, tall=False).size(b.shape)


# -- the inner optimizer -------------------------------------------------------------------------------------


class _Muon(Optimizer):
    """torch.optim.Muon and torch.optim.AdamW, each an optimizer that is lent its groups for a step."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.001,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Any = (3.4445, -4.775, 2.0315),
        eps: float = 1e-07,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        ns_dtype: torch.dtype | None = None,
    ) -> None:
        _check_triples(ns_coefficients, ns_steps)
        one = ns_coefficients if is_triple(ns_coefficients) else (1.0, 0.0, 0.0)
        options: Any = (lr, weight_decay, momentum, nesterov, one, eps, ns_steps, adjust_lr_fn)
        self._muon = torch.optim.Muon([torch.zeros(1, 1)], *options)  # torch's own constructor checks
        self._adamw = torch.optim.AdamW([torch.zeros(1)])
        given = {"ns_coefficients": ns_coefficients, "ns_dtype": ns_dtype, "adamw": False}
        super().__init__(params, {**self._muon.defaults, **given})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; matrices and other weights become two groups."""
        (group,) = Read([{**param_group}], {}).param_groups
        for part in split(group, self._adamw.defaults, lambda group: [*map(is_no_matrix, group["params"])]):
            super().add_param_group(part)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A state dict of torch.optim.Muon does not say which groups are AdamW's: they stay what they are."""
        before = self.__dict__.get("param_groups", [])
        super().__setstate__(state)
        for group, known in zip(self.param_groups, before, strict=False):
            for key in (self._adamw.defaults.keys() | self.defaults.keys()) & known.keys():
                group.setdefault(key, known[key])
        for held in self.state.values():  # numbers in old state dicts become tensors, as in AdamW
            if "step" in held and not torch.is_tensor(held["step"]):
                held["step"] = torch.tensor(float(held["step"]), dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """torch's two steps, each on its own groups, and ours for matrices that torch's does not take."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        theirs = [g for g in self.param_groups if not g["adamw"]]
        plain = [
            {**g, "params": [p for p in g["params"] if not is_sharded(p)]}
            for g in theirs
            if is_triple(g["ns_coefficients"])
        ]
        _step(self._muon, plain, self.state)
        _step(self._adamw, [g for g in self.param_groups if g["adamw"]], self.state)
        for group in theirs:
            for p in group["params"]:
                if p.grad is not None and (is_sharded(p) or not is_triple(group["ns_coefficients"])):
                    self._step_one(p, group)
        return loss

    def _step_one(self, p: Any, group: dict[str, Any]) -> None:
        """A step of torch's Muon for a DTensor, or with a triple for each step.

        Of a DTensor the update alone is gathered, and every process orthogonalises it.
        """
        M = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
        M.lerp_(p.grad, 1 - group["momentum"])
        V = p.grad.lerp(M, group["momentum"]) if group["nesterov"] else M.clone()
        V = V.full_tensor() if is_sharded(p) else V
        if is_triple(group["ns_coefficients"]):  # torch's own step from 0 without momentum
            W, still = torch.zeros_like(V), {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
            W.grad = V
            _step(self._muon, [{**group, **still, "params": [W]}], defaultdict(dict))
        else:
            X = (V.mT if V.shape[0] < V.shape[1] else V)[None]
            orthogonalise_([X], triples(group), 0.0, 1.0, torch.bfloat16)
            W = V * (-group["lr"] * ratio(group["adjust_lr_fn"] or "original", *p.shape))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(distribute_like(W, p) if is_sharded(p) else W)


def _step(inner: Optimizer, groups: list[dict[str, Any]], state: Any) -> None:
    """A step of an optimizer that is lent groups and state."""
    try:
        inner.param_groups, inner.state = groups, state
        bare_step(type(inner), differentiable=False)(inner)
    finally:
        inner.param_groups, inner.state = [], {}  # type: ignore[assignment]


def _check_triples(given: Any, steps: int) -> None:
    if not (
        is_triple(given) or (len(given) and all(isinstance(t, Sequence) and is_triple(t) for t in given))
    ):
        raise ValueError(f"ns_coefficients are 3 numbers, or 3 for each step, got {given}")
    if not 0 <= steps < 100:
        raise ValueError(f"ns_steps is less than 100, got {steps}")


_Muon.__name__ = "Muon"


# -- which weights are whose ---------------------------------------------------------------------------------


class Read(Optimizer):
    """Parameters and groups as torch reads them: lists of tensors with names beside them, or its errors."""


class Sorting:
    """Which weights are AdamW's: by what they are, by their place in a model, by name."""

    def __init__(self, model: nn.Module | None, patterns: Sequence[str], space: Any) -> None:
        self.model, self.patterns, self.unused, self.space = model, patterns, set(patterns), space
        self.tables = set() if model is None else set(map(id, tables(model)))
        self.names: dict[int, list[str]] = {}
        for name, p in () if model is None else model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(p), []).append(name)

    def of(self, group: dict[str, Any]) -> list[bool]:
        """Whether each weight of a group is AdamW's."""
        names = group.get("param_names", [None] * len(group["params"]))
        return list(map(self.is_adamws, group["params"], names, self.spaces(group)))

    def is_adamws(self, p: Tensor, name: str | None, space: Any) -> bool:
        """On no manifold all that is no matrix or is in a table; everywhere what has one of the names."""
        names = self.names.get(id(p), []) + ([name] if name else [])
        hits = {x for x in self.patterns for name in names if fnmatch(name, x) or fnmatch(name, f"{x}.*")}
        self.unused -= hits
        return bool(hits) or (space is None and (is_no_matrix(p) or id(p) in self.tables))

    def spaces(self, group: dict[str, Any]) -> list[Any]:
        """The space of each weight; None for Euclidean ones."""
        params = group["params"]
        given = each({"space": self.space, **group}, "space")
        given = given if len(given) == len(params) else [None] * len(params)  # an error, a little later
        found = [
            declared_space(p) if space is None else space for p, space in zip(params, given, strict=True)
        ]
        return [None if isinstance(space, Euclidean) else space for space in found]

    def check(self) -> None:
        """Raise for a pattern that no parameter is called by."""
        for pattern in sorted(self.unused):
            raise ValueError(
                f"no parameter is called {pattern!r}, as adamw_names says; names come from a model: "
                "Muon(model), module=model, or model.named_parameters()"
            )

    def warn_of_bare(self, groups: list[dict[str, Any]]) -> None:
        """Bare tensors do not say which of them are embeddings and heads.

        torch.optim.Muon takes matrices alone, so who gives it weights has sorted them; who gives us vectors
        as well, without names or a module, has not.
        """
        matrices: list[Tensor] = []
        for group in groups:
            rows = zip(group["params"], self.spaces(group), strict=True)
            flat = [p for p, space in rows if space is None]
            found = [p for p in flat if not is_no_matrix(p)]
            if len(found) < len(flat) and not group.keys() & {"adamw", "param_names"}:
                matrices += found
        if matrices:
            largest = max(matrices, key=Tensor.numel)
            warnings.warn(
                "Muon was given bare tensors of all kinds in one group, and orthogonalises all "
                f"{len(matrices)} matrices there, the largest of shape {tuple(largest.shape)}. If one is an "
                "embedding or a head, give the model: Muon(model), or module=model",
                stacklevel=6,
            )


def is_no_matrix(p: Tensor) -> bool:
    """Whether torch.optim.Muon does not take it."""
    return p.dim() != 2 or p.is_complex()


def tables(model: nn.Module) -> list[Tensor]:
    """The weights of a model that are lists of rows, one a word, which nobody should orthogonalise.

    Those of embeddings, tied ones too, and of linear layers that answer with a number for each word: those
    with as many outputs as there are words.
    """
    embeddings = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    words = {m.num_embeddings for m in embeddings}
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features in words]
    return [m.weight for m in (*embeddings, *heads)]


def split(
    group: dict[str, Any], adamw: dict[str, Any], sort: Callable[[dict[str, Any]], list[bool]]
) -> list[dict[str, Any]]:
    """A group as Muon's part and AdamW's, as `sort` says, unless the group itself says which it is.

    The options of AdamW's part are `adamw`, or its own.
    """
    flag, rest, parts = group.get("adamw"), {k: v for k, v in group.items() if k != "adamw"}, []
    theirs = adamw | (flag if isinstance(flag, dict) else {})
    kinds = [flag] * len(group["params"]) if isinstance(flag, bool) else sort(group)
    there = sorted(set(kinds)) or [flag is True]
    for kind in there:
        # What a group sets is meant for AdamW where all of it is AdamW's, and otherwise for Muon.
        options = rest | theirs if len(there) > 1 else theirs | rest
        part = {**(options if kind else rest), "adamw": kind}
        for key in PER_WEIGHT:
            if isinstance(part.get(key), (list, tuple)) and len(part[key]) == len(kinds):
                part[key] = [x for x, k in zip(part[key], kinds, strict=True) if k is kind]
        parts.append(part)
    return parts


# -- the optimizer -------------------------------------------------------------------------------------------


class Muon(Lifted):
    """Muon on homogeneous spaces: W = -lr [msign(V_A); msign(V_B)], V the momentum; see `ghor.optim.muon`.

    Options and defaults are torch's. For a weight on a manifold `lr` is the angle that a step turns, unless
    `adjust_lr_fn` asks for one of torch's scalings by name, and `eps` is relative: a block of V smaller than
    eps ||V||, or than 1000 units of rounding of ||V||, counts as 0, so the step does not depend on the scale
    of the loss. `ns_coefficients` may be a list of triples, one for each step, such as `POLAR_EXPRESS`; with
    ns_dtype=torch.bfloat16 the polynomial is computed in that, as torch's own is: W stays exactly tangent,
    and its singular values are right to two digits.

    Euclidean matrices are torch.optim.Muon's, bit for bit. All other Euclidean weights are
    torch.optim.AdamW's, in a group of their own with the options `adamw`. So are, if a model is given, as
    `params` or as `module`, embeddings, weights that are tied to them, and linear layers with as many outputs
    as there are words; and weights whose name matches one of `adamw_names` ("head", "*.gate"). A group can
    say which it is: {"params": [...], "adamw": True, "lr": 3e-4}.

    >>> opt = Muon(model, lr=0.02, adamw={"lr": 3e-4, "weight_decay": 0.01})
    """

    __module__ = "ghor.optim"
    Base = _Muon
    frameless = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.001,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Triple | Sequence[Triple] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-07,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        adamw: dict[str, Any] | None = None,
        *,
        module: nn.Module | None = None,
        adamw_names: Sequence[str] = (),
        ns_dtype: torch.dtype | None = None,
        **ours: Unpack[Options],
    ) -> None:
        self._adamw = torch.optim.AdamW([torch.zeros(1)], **(adamw or {})).defaults
        model, space = params if isinstance(params, nn.Module) else module, ours.get("space")
        self._sorting = Sorting(model, adamw_names, space)
        options = lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn, ns_dtype
        super().__init__(params, *options, **ours)
        self._sorting = Sorting(None, adamw_names, space)  # ids of tensors mean nothing later

    def sorted(self, params: Any) -> Any:
        """Groups that are Muon's or AdamW's as a whole."""
        given = [{**g} if isinstance(g, dict) else g for g in params] if isinstance(params, list) else params
        try:
            groups = Read(given, {}).param_groups
        except (TypeError, ValueError):
            return params  # torch says what is wrong, after it has looked at the options
        if self._sorting.model is None:
            self._sorting.warn_of_bare(groups)
        parts = [part for group in groups for part in self._split(group)]
        self._sorting.check()
        return parts

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; with `adamw` True or False the whole group is AdamW's or Muon's, else it is split,
        so that a scheduler finds the rate of each; a dict has options of AdamW's part.
        """
        count = len(self.param_groups)
        try:
            for part in self._split(*Read([{**param_group}], {}).param_groups):
                super().add_param_group(part)
        except BaseException:
            self._drop_groups(count)
            raise

    def _split(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        own = group["adamw"] if isinstance(group.get("adamw"), dict) else {}
        for key in own.keys() - self._adamw.keys():
            raise ValueError(f"unknown option {key!r} of AdamW; there are {sorted(self._adamw)}")
        if group.get("adjust_lr_fn") not in ADJUSTMENTS:
            raise ValueError(
                f"adjust_lr_fn is None, 'original' or 'match_rms_adamw', got {group['adjust_lr_fn']!r}"
            )
        if "ns_coefficients" in group:
            _check_triples(group["ns_coefficients"], group.get("ns_steps", 0))
        return split(group, self._adamw, self._sorting.of)

    def own_rule(self, b: Batch) -> OwnRule | None:
        """Blocks are orthogonalised, unless the group is AdamW's."""
        return None if b.group["adamw"] else OwnRule(momentum, velocity)

    def _asked(self, w: Weight) -> Traits:
        """Momentum turns with a frame, where there is one."""
        if self.param_groups[w.gi]["adamw"]:
            return super()._asked(w)._replace(free=False)
        return Traits(reads=False, stacks=True, odd=frozenset({"momentum_buffer"}), turns=True, free=True)
