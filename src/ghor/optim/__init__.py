"""The optimizers of torch.optim, lifted: same names, same options, weights on any space.

Each takes a module, or parameters and groups as torch does, and six more options, each also a group key:

    space               a ghor space for the weights; by default the one that ghor.constrain declared
    retraction          "cayley" (default) or "geodesic"
    section             "auto" (default), "transported" or "implicit"; see `ghor.spaces.frames`
    max_angle           the largest angle, in radians, by which a step turns a vector (default None: no limit)
    error_if_nonfinite  raise before anything moves if a gradient is NaN or infinite (default False)
    anchor              where weight decay pulls weights on manifolds: None (default: nowhere), "start", or
                        points

Without an anchor `weight_decay` acts on Euclidean weights only (paper, section 4.1), so on a manifold AdamW
is Adam. With an anchor Y0 the rule is given the gradient of |Y - Y0|^2/2 in g^hor in place of the weight, and
decays that. `LBFGS` takes a closure, as torch's does; it is not lifted but written for g^hor, see
`ghor.optim.lbfgs`. It is not in `__all__`, which lists optimizers that can replace each other in a training
loop. `Muon` orthogonalises block by block, and uses AdamW for everything that is not a matrix, see
`ghor.optim.muon`. Any other optimizer, of torch or of another library, is lifted by `ghor.lift`.

Type checkers read signatures in `__init__.pyi`, which tests/signatures.py writes; at run time each class
takes what the installed torch takes, which `inspect.signature` shows. A test compares the two.
"""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ghor.lifting.lift import NAMED
from ghor.lifting.lifted import Lifted
from ghor.linalg import as_real, number
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


class SGD(Lifted):
    """Gradient descent in g^hor, with torch's momentum, dampening and Nesterov's form: W = -lr B_cache.

    It does not depend on the frame: on Stiefel, Grassmann and flags it has none, and the state is the
    momentum.
    """

    Base = torch.optim.SGD
    frameless = True

    def multiple(self, group: dict[str, Any]) -> Any:
        """W = -lr momentum_buffer, unless in Nesterov's form."""
        return -group["lr"] if group["momentum"] and not group["nesterov"] else None


class Adam(Lifted):
    """Adam in g^hor: W = -lr m/(sqrt(v) + eps), m and v the bias-corrected moments of the coordinates B."""

    Base = torch.optim.Adam


class AdamW(Lifted):
    """Adam with decoupled weight decay; on a manifold it is Adam unless there is an anchor."""

    Base = torch.optim.AdamW


class NAdam(Lifted):
    """Adam with Nesterov momentum, in g^hor."""

    Base = torch.optim.NAdam


class RAdam(Lifted):
    """Adam with a rectified start, in g^hor."""

    Base = torch.optim.RAdam


class Adamax(Lifted):
    """Adam in the infinity norm, in g^hor."""

    Base = torch.optim.Adamax


class Adagrad(Lifted):
    """Adagrad in g^hor: W = -lr B/(sqrt(sum of B^2) + eps)."""

    Base = torch.optim.Adagrad


class Adadelta(Lifted):
    """Adadelta in g^hor."""

    Base = torch.optim.Adadelta


class RMSprop(Lifted):
    """RMSprop in g^hor, with momentum and the centered form as in torch."""

    Base = torch.optim.RMSprop


class Rprop(Lifted):
    """Resilient propagation in g^hor: one step size per coordinate, from the sign of B."""

    Base = torch.optim.Rprop


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
        t = number(state["step"])
        # Real and imaginary parts are separate numbers, as in torch.
        p, g, m, v = map(as_real, (p, g, state["m"], state["v"]))
        for cache, beta, value in zip((m, v), group["betas"], (g, g * g), strict=True):
            cache.mul_((beta - beta**t) / (1 - beta**t)).add_(value * ((1 - beta) / (1 - beta**t)))
        p.addcdiv_(m, (v + group["delta"]).sqrt(), value=-group["lr"])


class PaperAdam(Lifted):
    """Adam as the paper writes it, in g^hor: moments stored bias-corrected, W = -lr m/sqrt(v + delta)."""

    Base = _PaperAdam


NAMED.update(
    (cls.Base, cls)
    for cls in (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, PaperAdam)
)
NAMED.update({Muon.Base: Muon, torch.optim.Muon: Muon, torch.optim.LBFGS: LBFGS})


def __getattr__(name: str) -> Any:
    near = difflib.get_close_matches(name, __all__, 1)
    hint = (
        f"; did you mean {near[0]}?" if near else "; ghor.lift(Optimizer) takes optimizers of other libraries"
    )
    if isinstance(getattr(torch.optim, name, None), type):
        hint = f"; ghor.lift(torch.optim.{name}) takes it"
    raise AttributeError(f"ghor.optim has no {name}{'' if name.startswith('_') else hint}")
