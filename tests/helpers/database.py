"""torch's own database of optimizers (torch.testing._internal.common_optimizers) as a table of cases.

It lists for every optimizer of torch the configurations that are tried there, and inputs that must be
refused.
"""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
    optim_db,
)

import ghor

FLAT, STIEFEL = ghor.Euclidean(), ghor.Stiefel()


def paper_adam_errors(device, dtype):
    kinds = ({"lr": -1.0}, {"betas": (1.0, 0.0)}, {"betas": (0.9, -0.1)}, {"delta": -1e-8})
    own = [ErrorOptimizerInput(OptimizerInput(None, kwargs), error_type=ValueError) for kwargs in kinds]
    return get_error_inputs_for_all_optims(device, dtype) + own


def muon():
    """Ours beside its own base, which takes what is no matrix to AdamW."""
    info = copy.copy({info.optim_cls.__name__: info for info in optim_db}["Muon"])
    theirs = info.optim_error_inputs_func
    info.optim_cls = ghor.optim.Muon.Base
    info.optim_error_inputs_func = lambda *where: [
        e
        for e in theirs(*where)
        if not re.search("2D|complex", str(e.error_regex))  # AdamW takes these
    ]
    return info


DATABASE = {info.optim_cls.__name__: info for info in optim_db} | {
    "PaperAdam": OptimizerInfo(
        ghor.optim.PaperAdam.Base,
        optim_inputs_func=lambda device, dtype=None: [
            OptimizerInput(None, {}, "default"),
            OptimizerInput(None, {"lr": 0.01, "betas": (0.8, 0.95), "delta": 1e-6}, "all options"),
        ],
        supported_impls=(),
        optim_error_inputs_func=paper_adam_errors,
    ),
    "Muon": muon(),
}
CLASSES = ghor.optim.__all__
SWITCHES = ("foreach", "fused", "differentiable")


def implementations(cls):
    """forloop, and what else torch has for the class, as keyword arguments."""
    info = DATABASE[cls]
    known = [
        s for s in SWITCHES if s in info.supported_impls and (s != "fused" or "cpu" in info.supports_fused_on)
    ]
    return {"forloop": {"foreach": False} if "foreach" in known else {}} | {s: {s: True} for s in known}


def inputs(cls, device="cpu"):
    """Fresh ones: they hold tensors."""
    return [i.kwargs for i in DATABASE[cls].optim_inputs_func(device=device)]


def case_id(case):
    cls, i, impl = case
    return f"{cls}-{DATABASE[cls].optim_inputs_func(device='cpu')[i].desc or i}-{impl}".replace(" ", "_")


CASES = [(cls, i, impl) for cls in CLASSES for i in range(len(inputs(cls))) for impl in implementations(cls)]
cases = pytest.mark.parametrize("case", CASES, ids=case_id)
moving_cases = pytest.mark.parametrize("case", [c for c in CASES if c[2] != "differentiable"], ids=case_id)


def options(case):
    cls, i, impl = case
    return inputs(cls)[i] | implementations(cls)[impl]


def quiet(make):
    """On Stiefel a weight_decay of all weights warns that it has no effect: tested elsewhere."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "weight_decay=")
        return make()


class Net(nn.Module):
    """Two weights of one kind, one by its rows, and a Euclidean one."""

    section = "auto"

    def __init__(self, dtype=torch.float64, space=STIEFEL):
        super().__init__()
        gen = torch.Generator().manual_seed(0)
        shapes = {"a": (6, 3), "b": (6, 3), "wide": (3, 5)}
        for name, shape in shapes.items():
            point = STIEFEL.random(*shape, generator=gen, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(point.to(dtype)))
        self.bias = nn.Parameter(torch.randn(5, generator=gen, dtype=torch.float64).to(dtype))
        self.x = torch.randn(8, 6, generator=gen, dtype=torch.float64).to(dtype)
        self.y = torch.randn(8, 5, generator=gen, dtype=torch.float64).to(dtype)
        self.spaces = (space, space, space, FLAT)

    def loss(self):
        return (self.x @ (self.a + self.b) @ self.wide + self.bias - self.y).square().sum()


KINDS = {  # space, shape, dtype
    "complex Stiefel": (STIEFEL, (5, 2), torch.complex128),
    "Unitary": (ghor.Unitary(), (3, 3), torch.complex128),
    "Sphere": (ghor.Sphere(), (4, 3), torch.float64),
    "Hyperbolic": (ghor.Hyperbolic(), (4, 3), torch.float64),
    "transported Hyperbolic": (ghor.Hyperbolic(), (4, 3), torch.float64),
    "SpecialEuclidean": (ghor.SpecialEuclidean(), (3, 4), torch.float64),
    "PositionsOrientations": (ghor.PositionsOrientations(), (4, 2, 3), torch.float64),
    "SPD": (ghor.SPD(), (3, 3), torch.float64),
    "SymplecticStiefel": (ghor.SymplecticStiefel(), (6, 2), torch.float64),
    "SymplecticGrassmann": (ghor.SymplecticGrassmann(), (6, 2), torch.float64),
}
every_kind = pytest.mark.parametrize("kind", ["Stiefel", *KINDS])


class Pair(nn.Module):
    """Two weights on a space, and targets there that draw them."""

    def __init__(self, kind):
        super().__init__()
        space, shape, dtype = KINDS[kind]
        gen = torch.Generator().manual_seed(0)
        self.a, self.b, *self.targets = (space.random(*shape, generator=gen, dtype=dtype) for _ in range(4))
        self.a, self.b = nn.Parameter(self.a), nn.Parameter(self.b)
        self.spaces = (space, space)
        self.section = "transported" if kind.startswith("transported") else "auto"

    def loss(self):
        pairs = zip((self.a, self.b), self.targets, strict=True)
        return sum((p - t).abs().square().sum() for p, t in pairs)


def of_kind(kind, case, dtype=torch.float32):
    """A net of such weights that torch's implementation takes."""
    if kind != "Stiefel" and KINDS[kind][2].is_complex and case[2] == "fused":
        pytest.skip("torch's fused kernels take no complex weights")
    return Net(dtype) if kind == "Stiefel" else Pair(kind)


def build(cls, net, named=False, **kwargs):
    params = list(net.named_parameters()) if named else list(net.parameters())
    groups = [{"params": params, "space": net.spaces, "section": net.section}]
    return quiet(lambda: getattr(ghor.optim, cls)(groups, **kwargs))


def train(net, opt, steps, skip=()):
    """Steps of gradient descent; in those of `skip` the weight b gets no gradient."""
    for k in range(steps):
        opt.zero_grad()
        net.loss().backward()
        if k in skip:
            net.b.grad = None
        opt.step()


def on_spaces(net):
    weights = zip(net.spaces, net.parameters(), strict=True)
    return all(bool((s.residual(p.detach()) <= s.tolerance(p.detach())).all()) for s, p in weights)


def on_stiefel(net, tol):
    return all(STIEFEL.residual(p.detach()) <= tol for p in (net.a, net.b, net.wide))


def outcome(make, then=lambda opt: None):
    """What a constructor and what follows say: the exception, or the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            then(make())
        except Exception as error:
            return type(error), str(error)
    return None, "\n".join(str(w.message) for w in said)
