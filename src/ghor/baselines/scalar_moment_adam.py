"""Adam with one second moment for each matrix: Li et al. 2020 in g^hor (equation "scalar_adam")."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ghor.lifting.lifted import Lifted
from ghor.lifting.param_groups import GROUP_KEYS
from ghor.lifting.stack import Stack
from ghor.spaces import Space

# The factor of ||A||_F^2 in ||[A; B]||^2.
SHARE_OF_A = {"canonical": 0.5, "frobenius": 1.0}


class ScalarMomentAdam(Lifted, torch.optim.Adam):
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

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        norm: str = "canonical",
        **ours: Any,
    ) -> None:
        for key in set(ours) - set(GROUP_KEYS):
            raise TypeError(f"ScalarMomentAdam has no option {key!r}")
        self._norm = norm
        super().__init__(params, lr=lr, betas=betas, eps=eps, **ours)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; a group may also set its `norm`."""
        if isinstance(param_group, dict):
            _check(param_group.setdefault("norm", self._norm), len(self.param_groups))
        super().add_param_group(param_group)

    def _check_loaded(self, state_dict: dict[str, Any]) -> None:
        """Only states of this class can be loaded: elementwise second moments cannot be converted."""
        for gi, group in enumerate(state_dict["param_groups"]):
            if "norm" not in group:
                raise ValueError(
                    f"not a state of ScalarMomentAdam: its group {gi} has no 'norm'; start without it"
                )
            _check(group["norm"], gi)
        super()._check_loaded(state_dict)

    def _velocities(self, rule: Callable[..., Any], stacks: list[Stack]) -> None:
        """Let Base move the Euclidean weights; it skips shadows, which have no gradient meanwhile."""
        for s in stacks:
            for key in [k for k in ("amsgrad", "maximize") if s.group[k]] + ["weight_decay"] * s.decays:
                raise RuntimeError(
                    f"{s.names[0]} is on {s.space}, where ScalarMomentAdam has no {key}; nothing was moved. "
                    f"Leave {key} out of its group, or use ghor.optim.Adam"
                )
        grads = [s.H.grad for s in stacks]
        for s in stacks:
            s.H.grad = None
        super()._velocities(rule, stacks)
        for s, g in zip(stacks, grads, strict=True):
            assert g is not None
            _update(s.H, g, s.state, s.space, s.group)


def _check(norm: object, gi: int) -> None:
    if norm not in SHARE_OF_A:
        raise ValueError(f"unknown norm {norm!r} in group {gi}; there are {sorted(SHARE_OF_A)}")


def _update(H: Tensor, g: Tensor, state: dict[str, Any], space: Space, group: dict[str, Any]) -> None:
    """Write the velocity into H; the order of operations and the state's keys are those of torch's Adam."""
    square = square_norm(space, g, SHARE_OF_A[group["norm"]])
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(H), torch.zeros_like(square)
    beta1, beta2 = group["betas"]
    state["step"] += 1
    t = float(state["step"])
    state["exp_avg"].lerp_(g, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).add_(square, alpha=1 - beta2)
    root = (state["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2**t)).add_(group["eps"])
    torch.mul(state["exp_avg"], -group["lr"] / (1 - beta1**t) / root, out=H)


def square_norm(space: Space, g: Tensor, share: float) -> Tensor:
    """share ||A||_F^2 + ||B||_F^2 for each matrix g = [A; B], in the layout of weights: (..., 1, 1)."""
    if space.one != space:
        raise ValueError(f"ScalarMomentAdam takes weights that are one matrix each, and {space} has several")
    if space.has("matrix"):
        M = space.matrix(g)
        n, squares = M.shape[-1], (M.conj() * M).real
        total = squares[..., n:, :].sum((-2, -1)) + share * squares[..., :n, :].sum((-2, -1))
    else:  # on spaces without blocks A and B there is one norm
        total = space.ghor_inner(g, g)
    return total.reshape(*total.shape, *[1] * (g.dim() - total.dim()))
