"""The optimizers of torch.optim, lifted: same names, same options, weights on any space.

Each takes a module, or parameters and groups as torch does, and six more options, each also a group key:

    space               a ghor space for the weights; by default the one that ghor.constrain declared
    retraction          "cayley" (default) or "geodesic"
    section             "auto" (default), "transported" or "implicit"; see ghor.spaces.sections
    max_angle           the largest angle, in radians, by which a step turns a vector (default None: no limit)
    error_if_nonfinite  raise before anything moves if a gradient is NaN or infinite (default False)
    anchor              where weight decay pulls weights on manifolds: None (default: nowhere), "start", or
                        points

Without an anchor `weight_decay` acts on Euclidean weights only (paper, section 4.1), so on a manifold AdamW
is Adam. With an anchor Y0 the rule is given the gradient of |Y - Y0|^2/2 in g^hor in place of the weight, and
decays that. `LBFGS` takes a closure, as torch's does; it is not lifted but written for g^hor, see
`ghor.optim.lbfgs`. It is not in `__all__`, which lists optimizers that can replace each other in a training
loop. `Muon` orthogonalises block by block, and uses AdamW for everything that is not a matrix, see
`ghor.optim.muon`. ASGD, SparseAdam and Adafactor do not lift; `ghor.lift` says why.

The signatures below are for type checkers and editors; at run time each class takes what the installed torch
takes, which `inspect.signature` shows. A test compares the two.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from ghor.lifting.lifted import NAMED, Lifted
from ghor.lifting.param_groups import Options, Params
from ghor.lifting.probe import REFUSED
from ghor.linalg import as_real
from ghor.optim.lbfgs import LBFGS as LBFGS
from ghor.optim.muon import Muon

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "PaperAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
]


class SGD(Lifted, torch.optim.SGD):
    """Gradient descent in g^hor, with torch's momentum, dampening and Nesterov's form: W = -lr B_cache."""

    Base = torch.optim.SGD

    if TYPE_CHECKING:

        def __init__(
            self,
            params: Params,
            lr: float | Tensor = 0.001,
            momentum: float = 0,
            dampening: float = 0,
            weight_decay: float | Tensor = 0,
            nesterov: bool = False,
            *,
            maximize: bool = False,
            foreach: bool | None = None,
            differentiable: bool = False,
            fused: bool | None = None,
            **ours: Unpack[Options],
        ) -> None: ...


class Adam(Lifted, torch.optim.Adam):
    """Adam in g^hor: W = -lr m/(sqrt(v) + eps), m and v the bias-corrected moments of the coordinates B."""

    Base = torch.optim.Adam

    if TYPE_CHECKING:

        def __init__(
            self,
            params: Params,
            lr: float | Tensor = 0.001,
            betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
            eps: float = 1e-08,
            weight_decay: float = 0,
            amsgrad: bool = False,
            *,
            foreach: bool | None = None,
            maximize: bool = False,
            capturable: bool = False,
            differentiable: bool = False,
            fused: bool | None = None,
            decoupled_weight_decay: bool = False,
            **ours: Unpack[Options],
        ) -> None: ...


class AdamW(Lifted, torch.optim.AdamW):
    """Adam with decoupled weight decay; on a manifold it is Adam unless there is an anchor."""

    Base = torch.optim.AdamW

    if TYPE_CHECKING:

        def __init__(
            self,
            params: Params,
            lr: float | Tensor = 0.001,
            betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
            eps: float = 1e-08,
            weight_decay: float = 0.01,
            amsgrad: bool = False,
            *,
            maximize: bool = False,
            foreach: bool | None = None,
            capturable: bool = False,
            differentiable: bool = False,
            fused: bool | None = None,
            **ours: Unpack[Options],
        ) -> None: ...


class NAdam(Lifted, torch.optim.NAdam):
    """Adam with Nesterov momentum, in g^hor."""

    Base = torch.optim.NAdam

    if TYPE_CHECKING:

        def __init__(
            self,
            params: Params,
            lr: float | Tensor = 0.002,
            betas: tuple[float, float] = (0.9, 0.999),
            eps: float = 1e-08,
            weight_decay: float = 0,
            momentum_decay: float = 0.004,
            decoupled_weight_decay: bool = False,
            *,
            foreach: bool | None = None,
            maximize: bool = False,
            capturable: bool = False,
            differentiable: bool = False,
            **ours: Unpack[Options],
        ) -> None: ...


class RAdam(Lifted, torch.optim.RAdam):
    """Adam with a rectified start, in g^hor."""

    Base = torch.optim.RAdam

    if TYPE_CHECKING:

        def __init__(
            self,
            params: Params,
            lr: float | Tensor = 0.001,
            betas: tuple[float, float] = (0.9, 0.999),
            eps: float = 1e-08,
            weight_decay: float = 0,
            decoupled_weight_decay: bool = False,
            *,
            foreach: bool | None = None,
            maximize: bool = False,
            capturable: bool = False,
            differentiable: bool = False,
            **ours: Unpack[Options],
        ) -> None: ...


class Adamax(Lifted, torch.optim.Adamax):
    """Adam in the infinity norm, in g^hor."""

    Base = torch.optim.Adamax

    if TYPE_CHECKING:

        def __init__(
            self,
            params: Params,
            lr: float | Tensor = 0.002,
            betas: tuple[float, float] = (0.9, 0.999),
            eps: float = 1e-08,
            weight_decay: float = 0,
            foreach: bool | None = None,
            *,
            maximize: bool = False,
            differentiable: bool = False,
            capturable: bool = False,
            **ours: Unpack[Options],
        ) -> None: ...


class Adagrad(Lifted, torch.optim.Adagrad):
    """Adagrad in g^hor: W = -lr B/(sqrt(sum of B^2) + eps)."""

    Base = torch.optim.Adagrad

    if TYPE_CHECKING:

        def __init__(
            self,
            params: Params,
            lr: float | Tensor = 0.01,
            lr_decay: float = 0,
            weight_decay: float = 0,
            initial_accumulator_value: float = 0,
            eps: float = 1e-10,
            foreach: bool | None = None,
            *,
            maximize: bool = False,
            differentiable: bool = False,
            fused: bool | None = None,
            **ours: Unpack[Options],
        ) -> None: ...


class Adadelta(Lifted, torch.optim.Adadelta):
    """Adadelta in g^hor."""

    Base = torch.optim.Adadelta

    if TYPE_CHECKING:

        def __init__(
            self,
            params: Params,
            lr: float | Tensor = 1.0,
            rho: float = 0.9,
            eps: float = 1e-06,
            weight_decay: float = 0,
            foreach: bool | None = None,
            *,
            capturable: bool = False,
            maximize: bool = False,
            differentiable: bool = False,
            **ours: Unpack[Options],
        ) -> None: ...


class RMSprop(Lifted, torch.optim.RMSprop):
    """RMSprop in g^hor, with momentum and the centered form as in torch."""

    Base = torch.optim.RMSprop

    if TYPE_CHECKING:

        def __init__(
            self,
            params: Params,
            lr: float | Tensor = 0.01,
            alpha: float = 0.99,
            eps: float = 1e-08,
            weight_decay: float = 0,
            momentum: float = 0,
            centered: bool = False,
            capturable: bool = False,
            foreach: bool | None = None,
            maximize: bool = False,
            differentiable: bool = False,
            **ours: Unpack[Options],
        ) -> None: ...


class Rprop(Lifted, torch.optim.Rprop):
    """Resilient propagation in g^hor: one step size per coordinate, from the sign of B."""

    Base = torch.optim.Rprop

    if TYPE_CHECKING:

        def __init__(
            self,
            params: Params,
            lr: float | Tensor = 0.01,
            etas: tuple[float, float] = (0.5, 1.2),
            step_sizes: tuple[float, float] = (1e-06, 50),
            *,
            capturable: bool = False,
            foreach: bool | None = None,
            maximize: bool = False,
            differentiable: bool = False,
            **ours: Unpack[Options],
        ) -> None: ...


class _PaperAdam(Optimizer):
    """Adam as the paper writes it: moments are stored bias-corrected, and delta is inside the root.

        m <- ((b1 - b1^t) m + (1 - b1) g)/(1 - b1^t),   v likewise with b2, g^2,   W = -lr m/sqrt(v + delta)

    torch's Adam and the authors' code have delta outside the root: m/(sqrt(v) + delta). Other libraries call
    the two `eps` (outside) and `eps_root` (inside).
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), delta: float = 1e-8
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"Invalid learning rate: {lr}")
        for i, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
        if not delta >= 0:
            raise ValueError(f"Invalid delta: {delta}")
        super().__init__(params, {"lr": lr, "betas": betas, "delta": delta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, self.state[p], group)
        return loss

    @staticmethod
    def _update(p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        t = state["step"].double() if torch.compiler.is_compiling() else float(state["step"])
        # Real and imaginary parts are separate numbers, as in torch.
        p, g, m, v = map(as_real, (p, g, state["m"], state["v"]))
        for cache, beta, value in zip((m, v), group["betas"], (g, g * g), strict=True):
            cache.mul_((beta - beta**t) / (1 - beta**t)).add_(value * ((1 - beta) / (1 - beta**t)))
        p.addcdiv_(m, (v + group["delta"]).sqrt(), value=-group["lr"])


class PaperAdam(Lifted, _PaperAdam):
    """Adam as the paper writes it, in g^hor: moments stored bias-corrected, W = -lr m/sqrt(v + delta)."""

    Base = _PaperAdam

    if TYPE_CHECKING:

        def __init__(
            self,
            params: Params,
            lr: float = 1e-3,
            betas: tuple[float, float] = (0.9, 0.99),
            delta: float = 1e-8,
            **ours: Unpack[Options],
        ) -> None: ...


NAMED.update(
    {
        cls.Base: cls
        for cls in (
            Muon,
            SGD,
            Adam,
            AdamW,
            NAdam,
            RAdam,
            Adamax,
            Adagrad,
            Adadelta,
            RMSprop,
            Rprop,
            PaperAdam,
            LBFGS,
        )
    }
)
NAMED[torch.optim.Muon] = Muon


if not TYPE_CHECKING:  # a type checker would take every name for one that is there

    def __getattr__(name: str) -> Any:
        if name in REFUSED:
            raise AttributeError(f"ghor.optim has no {name}: {REFUSED[name]}")
        near = difflib.get_close_matches(name, __all__, 1)
        others = "ghor.lift(Optimizer) takes optimizers of other libraries"
        hint = f"; did you mean {near[0]}?" if near else f"; {others}"
        raise AttributeError(f"ghor.optim has no {name}{'' if name.startswith('_') else hint}")
