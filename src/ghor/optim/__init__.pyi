"""Signatures, written by tests/signatures.py."""

from typing import Unpack

from torch import Tensor

from ghor.lifting.groups import Options, Params
from ghor.lifting.lifted import Lifted
from ghor.optim.lbfgs import LBFGS as LBFGS
from ghor.optim.muon import Muon as Muon

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

class Adam(Lifted):
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

class AdamW(Lifted):
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

class NAdam(Lifted):
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

class RAdam(Lifted):
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

class Adamax(Lifted):
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

class Adagrad(Lifted):
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

class Adadelta(Lifted):
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

class RMSprop(Lifted):
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

class Rprop(Lifted):
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

class PaperAdam(Lifted):
    def __init__(
        self,
        params: Params,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.99),
        delta: float = 1e-08,
        **ours: Unpack[Options],
    ) -> None: ...
