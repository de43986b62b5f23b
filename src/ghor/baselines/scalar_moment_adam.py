"""Adam with one second moment for each matrix: Li et al. 2020 in g^hor (equation "scalar_adam")."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from ghor.lifting.batch import Batch, OwnRule
from ghor.lifting.groups import GROUP_KEYS, Options, Params, Weight
from ghor.lifting.law import Traits
from ghor.lifting.lifted import Lifted
from ghor.linalg import number
from ghor.spaces.matrix import Matrices

NORMS = ("canonical", "frobenius")


class ScalarMomentAdam(Lifted):
    """Adam whose second moment is one number for each matrix of a weight on a manifold; g = [A; B] in g^hor:

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) ||g||^2
        W =  -lr (m/(1 - beta1^t))/(sqrt(v/(1 - beta2^t)) + eps)

    `norm`, also a group key, is the norm of g:

        canonical    ||A||_F^2/2 + ||B||_F^2, of the inner product of g^hor in which g is the gradient of the
                     loss; on orthogonal spaces that of rgrad in the canonical metric, half that of the full
                     N x N matrix
        frobenius    ||A||_F^2 + ||B||_F^2; on orthogonal spaces that of the N x n matrix rgrad

    They are equal on the sphere and on Grassmann, where A = 0, and differ by the factor 2 on SO(N). Euclidean
    weights get torch's Adam, bit for bit.

    In "Efficient Riemannian Optimization on the Stiefel Manifold via the Cayley Transform" (ICLR 2020,
    Algorithm 2) the norm is that of the Euclidean gradient, eps is inside the root and the first moment is
    projected to the tangent space at each step. The paper's baseline, which this is, differs from the paper's
    Adam in v alone.

    >>> opt = ScalarMomentAdam(model, lr=1e-3)
    """

    Base = torch.optim.Adam  # for the Euclidean weights
    frameless = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        norm: str = "canonical",
        **ours: Unpack[Options],
    ) -> None:
        for key in set(ours) - set(GROUP_KEYS):
            raise TypeError(f"ScalarMomentAdam has no option {key!r}")
        _check(norm, 0)
        super().__init__(params, lr=lr, betas=betas, eps=eps, **ours)
        self.defaults["norm"] = norm
        for gi, group in enumerate(self.param_groups):
            _check(group.setdefault("norm", norm), gi)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; a group may also set its `norm`."""
        if isinstance(param_group, dict):
            _check(param_group.setdefault("norm", self.defaults["norm"]), len(self.param_groups))
        super().add_param_group(param_group)

    def _check_loaded(self, saved: dict[str, Any]) -> None:
        """Only states of this class: elementwise second moments cannot be converted."""
        for gi, group in enumerate(saved["param_groups"]):
            if "norm" not in group:
                raise ValueError(
                    f"not a state of ScalarMomentAdam: its group {gi} has no 'norm'; start without it"
                )
            _check(group["norm"], gi)
        super()._check_loaded(saved)

    def own_rule(self, b: Batch) -> OwnRule:
        """One second moment a matrix."""
        group = b.group
        for key in [k for k in ("amsgrad", "maximize") if group[k]] + ["weight_decay"] * b.decays:
            raise RuntimeError(
                f"{b.names[0]} is on {b.space}, where ScalarMomentAdam has no {key}; nothing was moved. "
                f"Leave {key} out of its group, or use ghor.optim.Adam"
            )
        return OwnRule(moments, velocity)

    def _asked(self, w: Weight) -> Traits:
        """The first moment turns with a frame, where there is one."""
        return Traits(reads=False, stacks=True, odd=frozenset({"exp_avg"}), turns=True, free=True)


def _check(norm: object, gi: int) -> None:
    if norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r} in group {gi}; there are {list(NORMS)}")


def moments(b: Batch) -> dict[str, Any]:
    """The state's keys are those of torch's Adam; v is (M, 1, 1)."""
    zero = torch.zeros((), dtype=torch.float32, device="cpu")
    return {"step": zero, "exp_avg": torch.zeros_like(b.H.data), "exp_avg_sq": torch.zeros_like(b.peak)}


def velocity(b: Batch) -> Tensor:
    """W = a m, in torch's order of operations; a is returned."""
    group, state, g, W = b.group, b.state, b.G, b.H
    beta1, beta2 = group["betas"]
    state["step"] += 1
    t = number(state["step"])
    state["exp_avg"].lerp_(g, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).add_(square_norm(b, g, group["norm"]), alpha=1 - beta2)
    root = (state["exp_avg_sq"].sqrt() / (1 - beta2**t) ** 0.5).add_(group["eps"])
    a: Tensor = -group["lr"] / (1 - beta1**t) / root
    W.copy_(state["exp_avg"])
    b.frame.scale_(W, a)
    return a


def square_norm(b: Batch, g: Tensor, norm: str) -> Tensor:
    """||A||^2/2 + ||B||^2 for each matrix g = [A; B], or ||A||^2 + ||B||^2; (M, 1, 1).

    On spaces without blocks A and B there is one norm.
    """
    if norm == "frobenius" and isinstance(b.space, Matrices):
        total = sum((X.conj() * X).real.sum((-2, -1)) for X in b.frame.blocks(g))
        assert torch.is_tensor(total)
    else:
        total = b.frame.inner(g, g)
    return total.view(-1, 1, 1)
